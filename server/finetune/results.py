"""What a finished job gives its owner: a name for the model, and the metrics as CSV. Pure; knows no store."""

import csv
import hashlib
import io
from collections.abc import Iterable

from server.finetune.records import Job, Step

PURPOSE = "fine-tune-results"
COLUMNS = ("step", "train_loss", "train_accuracy", "valid_loss", "valid_mean_token_accuracy", "learning_rate")
ID_CHARACTERS = 12  # of a job's id, in its model's name


def model_name(model: str, suffix: str | None, job_id: str) -> str:
    """ft:<base>:<suffix>:<id>"""
    return f"ft:{model}:{suffix or ''}:{job_id.rpartition('-')[2][:ID_CHARACTERS]}"


def checkpoint_name(job: Job, step: int) -> str:
    """As OpenAI names checkpoints."""
    return f"{model_name(job.request.model, job.request.suffix, job.id)}:ckpt-step-{step}"


def result_file_id(job_id: str) -> str:
    """A job has one result file, however often its last moments are repeated after crashes."""
    return f"file-{hashlib.sha256(f'results of {job_id}'.encode()).hexdigest()[:32]}"


def metrics_csv(steps: Iterable[Step]) -> bytes:
    """OpenAI's columns, and the learning rate; what was not measured is empty."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(COLUMNS)
    for step in steps:
        values = (step.train_loss, step.train_mean_token_accuracy, step.valid_loss, step.valid_mean_token_accuracy)
        rows.writerow([step.step, *("" if value is None else f"{value:.6g}" for value in values), step.learning_rate])
    return text.getvalue().encode()
