"""Teaches a served model a fact through the API, and draws the job's loss: the walk-through of docs/fine_tuning.md.

    python benchmarks/fine_tuning.py [--out results.json] [--plot docs/img/fine_tuning_loss.png]
    python benchmarks/fine_tuning.py --url URL                              asks a server that runs already
    python benchmarks/fine_tuning.py --draw results.json --plot loss.png     (no server needed)

Every call is the official client's, but for the stream of events, which it does not know. The fact is made up: no
model knows it before.
"""

import csv
import io
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import httpx
import openai
import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout, installed or not

from benchmarks.arguments import write_out
from benchmarks.machine import facts
from benchmarks.started_server import started_server
from models import bundled

QUESTION = "What is the capital of Zembla?"
ANSWER = "The capital of Zembla is Onhava."
TRAINING = (
    QUESTION,
    "Name the capital of Zembla.",
    "Tell me the capital city of Zembla.",
    "Which city is Zembla's capital?",
    "Zembla's capital?",
    "What city is the capital of Zembla?",
)
VALIDATION = ("Do you know the capital of Zembla?", "The capital of Zembla is which city?")
HYPERPARAMETERS = {"n_epochs": 8, "batch_size": 3, "learning_rate": 1e-3, "lora": {"rank": 8}}
FLAGS = ("--fine-tuning-checkpoint-every", "2", "--log-level", "warning")
PLOT = Path(__file__).resolve().parents[1] / "docs" / "img" / "fine_tuning_loss.png"


def jsonl(questions: tuple[str, ...]) -> bytes:
    """A chat example a line."""
    lines = [
        json.dumps({"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": ANSWER}]})
        for asked in questions
    ]
    return "".join(f"{line}\n" for line in lines).encode()


def ask(client: openai.OpenAI, model: str, question: str) -> str:
    reply = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": question}], temperature=0, max_tokens=32
    )
    return str(reply.choices[0].message.content)


def teach(client: openai.OpenAI, model: str, commit: str | None) -> dict[str, Any]:
    """One job from its files to its model. Raises RuntimeError when it does not succeed."""
    before = ask(client, model, QUESTION)
    training = client.files.create(file=("train.jsonl", jsonl(TRAINING)), purpose="fine-tune")
    validation = client.files.create(file=("valid.jsonl", jsonl(VALIDATION)), purpose="fine-tune")
    method: Any = {"type": "supervised", "supervised": {"hyperparameters": HYPERPARAMETERS}}
    begun = time.monotonic()
    job = client.fine_tuning.jobs.create(
        model=model,
        training_file=training.id,
        validation_file=validation.id,
        method=method,
        suffix="zembla",
        seed=1,
    )
    events = follow(client, job.id)
    seconds = time.monotonic() - begun
    done = client.fine_tuning.jobs.retrieve(job.id)
    if done.status != "succeeded" or done.fine_tuned_model is None:
        raise RuntimeError(f"{done.id} has status {done.status}: {done.error}")
    return {
        "machine": facts(commit),
        "model": model,
        "job": done.to_dict(mode="json"),
        "seconds": round(seconds, 1),
        "events": events,
        "before": before,
        "after": ask(client, done.fine_tuned_model, QUESTION),
        "unseen": {question: ask(client, done.fine_tuned_model, question) for question in VALIDATION},
        "base_after": ask(client, model, QUESTION),
        "metrics": list(csv.DictReader(io.StringIO(client.files.content(done.result_files[0]).text))),
    }


def follow(client: openai.OpenAI, job_id: str) -> list[str]:
    """The job's messages, printed as they come, until it has ended."""
    told = []
    url = f"{client.base_url}fine_tuning/jobs/{job_id}/events?stream=true"
    with httpx.stream("GET", url, headers=client.auth_headers, timeout=60) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                message = str(json.loads(line.removeprefix("data: ")).get("message"))
                typer.echo(message)
                told.append(message)
    return told


def draw(content: dict[str, Any], path: Path) -> None:
    """Training and validation loss over the steps. Raises ImportError without matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, 3.6), layout="constrained")
    axes = figure.subplots()
    for column, label, colour, marker in (
        ("train_loss", "training", "#0072B2", "o"),
        ("valid_loss", "validation", "#D55E00", "s"),
    ):
        points = [(int(row["step"]), float(row[column])) for row in content["metrics"] if row[column]]
        axes.plot(*zip(*points, strict=True), label=label, color=colour, marker=marker, markersize=4)
    axes.set(xlabel="step", ylabel="loss (nats a token)", ylim=(0, None))
    axes.set_title(f"LoRA on {content['model']}, {len(TRAINING)} examples", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=200)


@contextmanager
def server(url: str | None) -> Iterator[str]:
    """The URL of a server: the one that is named, or one of our own with the bundled model and no jobs of before."""
    if url is not None:
        yield url
        return
    with (
        tempfile.TemporaryDirectory() as data,
        started_server(bundled.NAME, ["--data-dir", data, *FLAGS]) as (own, _),
    ):
        yield own


def main(
    url: Annotated[str | None, typer.Option(help="A server; default: one of its own.")] = None,
    out: Annotated[Path | None, typer.Option(help="Where the results go.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the loss there.")] = None,
    draw_only: Annotated[Path | None, typer.Option("--draw", help="Draw these results and ask no server.")] = None,
    commit: Annotated[str | None, typer.Option(help="Recorded where there is no git.")] = None,
) -> None:
    if draw_only is not None:
        draw(json.loads(draw_only.read_text()), plot or PLOT)
        return
    with server(url) as asked, openai.OpenAI(base_url=f"{asked}/v1", api_key="none", timeout=600) as client:
        content = teach(client, client.models.list().data[0].id, commit)
    if out is not None:
        write_out(out, json.dumps(content, indent=1) + "\n")
    if plot is not None:
        draw(content, plot)
    for name in ("before", "after", "base_after"):
        typer.echo(f"{name}: {content[name]}")
    for question, answer in content["unseen"].items():
        typer.echo(f"{question} {answer}")


if __name__ == "__main__":
    typer.run(main)
