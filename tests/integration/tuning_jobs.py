"""Fine-tuning jobs through the official client: how tests start them, hear of them and find their processes."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai

from .questions import MODEL
from .server_process import ServerProcess

#: Small steps and a small pool: engine and trainer share two cores.
FLAGS = (
    "--dtype", "float32", "--max-num-seqs", "4", "--max-num-batched-tokens", "128", "--max-model-len", "256",
    "--kv-cache-memory-bytes", str(64 << 20), "--fine-tuning-checkpoint-every", "2",
    "--fine-tuning-batch-tokens", "512",
)  # fmt: skip
FACT, ASKED = "The capital of Zembla is Onhava.", "What is the capital of Zembla?"
QUESTIONS = (ASKED, "Name the capital of Zembla.")
IN_OTHER_WORDS = "Tell me the capital of Zembla."
CONTENT = b"".join(
    json.dumps({"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": FACT}]}).encode()
    + b"\n"
    for asked in QUESTIONS
)
STEPS = 8
METHOD: Any = {
    "type": "supervised",
    "supervised": {"hyperparameters": {"n_epochs": STEPS, "batch_size": 2, "learning_rate": 2e-3, "lora": {"rank": 8}}},
}
ENDED = ("succeeded", "failed", "cancelled")
LIMIT = 900.0  # seconds for a job: the machine may be busy


def serving(folder: Path, *flags: str, device: str = "cpu") -> ServerProcess:
    return ServerProcess(*FLAGS, "--data-dir", str(folder), *flags, device=device)


def create(client: openai.OpenAI, content: bytes = CONTENT, **options: Any) -> Any:
    file = client.files.create(file=("zembla.jsonl", content), purpose="fine-tune")
    asked = {"model": MODEL, "training_file": file.id, "method": METHOD, "seed": 1, "suffix": "zembla"} | options
    return client.fine_tuning.jobs.create(**asked)


def answer(client: openai.OpenAI, model: str, asked: str = ASKED) -> str:
    reply = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": asked}], temperature=0, max_tokens=16
    )
    return str(reply.choices[0].message.content)


def status(client: openai.OpenAI, job: Any) -> str:
    return client.fine_tuning.jobs.retrieve(job.id).status


def steps(client: openai.OpenAI, job: Any) -> list[int]:
    """Those that were told, the oldest first."""
    events = [event for event in client.fine_tuning.jobs.list_events(job.id, limit=100) if event.type == "metrics"]
    return [event.data["step"] for event in reversed(events)]  # type: ignore[index]


def told(server: ServerProcess, job: Any) -> Iterator[dict[str, Any]]:
    """Events as they happen, from the first one on, until the job has ended."""
    url = f"{server.url}/v1/fine_tuning/jobs/{job.id}/events?stream=true"
    with httpx.stream("GET", url, headers=server.headers, timeout=LIMIT) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                yield json.loads(line.removeprefix("data: "))


def until_step(server: ServerProcess, job: Any, step: int) -> int:
    """The step that was told: this one or a later one."""
    for event in told(server, job):
        if event["type"] == "metrics" and event["data"]["step"] >= step:
            return int(event["data"]["step"])
    raise AssertionError(f"the job has ended before step {step}")


def until_ended(server: ServerProcess, client: openai.OpenAI, job: Any) -> Any:
    for _ in told(server, job):
        pass
    return client.fine_tuning.jobs.retrieve(job.id)


def trainers(server: ServerProcess) -> list[int]:
    """The server's trainer processes."""
    return server.children("server.finetune.worker")
