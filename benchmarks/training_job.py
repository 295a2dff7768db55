"""A fine-tuning job on a server that answers others meanwhile, through the API, and its speed. Knows no chats."""

import asyncio
import json
import random
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import httpx

POLL_SECONDS = 0.5
JOB_LIMIT = 180.0  # seconds from the job's creation to its second step: loading, and kernels that are compiled
EXAMPLES = 8
EPOCHS = 50  # the job is cancelled before they are done


class Job:
    """A fine-tuning job of one sequence a step, through the API."""

    def __init__(self, client: httpx.AsyncClient, model: str, vocabulary: int, sequence: int) -> None:
        self._client, self._model, self._vocabulary, self._sequence = client, model, vocabulary, sequence
        self.id = ""

    async def start(self) -> None:
        """Returns after its second step: the first one still compiles kernels. Raises SystemExit."""
        words = random.Random(1)
        lines = []
        for _ in range(EXAMPLES):
            text = [f"t{words.randrange(3, self._vocabulary)}" for _ in range(self._sequence - 2)]
            half = len(text) // 2
            lines.append(json.dumps({"prompt": " ".join(text[:half]), "completion": " ".join(text[half:])}) + "\n")
        file = {"file": ("train.jsonl", "".join(lines).encode())}
        uploaded = self._of(await self._client.post("/v1/files", data={"purpose": "fine-tune"}, files=file))
        hyperparameters = {"n_epochs": EPOCHS, "batch_size": 1, "lora": {"rank": 16}}
        method = {"type": "supervised", "supervised": {"hyperparameters": hyperparameters}}
        asked = {"model": self._model, "training_file": uploaded["id"], "method": method, "seed": 1}
        self.id = self._of(await self._client.post("/v1/fine_tuning/jobs", json=asked))["id"]
        deadline = time.monotonic() + JOB_LIMIT
        while (await self.progress())[0] < 2:
            await self.check()
            if time.monotonic() > deadline:
                raise SystemExit(f"the job did not train two steps within {JOB_LIMIT:.0f} s")
            await asyncio.sleep(POLL_SECONDS)

    async def check(self) -> None:
        """Raises SystemExit when it has ended."""
        job = self._of(await self._client.get(f"/v1/fine_tuning/jobs/{self.id}"))
        if job["status"] in ("succeeded", "failed", "cancelled"):
            raise SystemExit(f"the job has ended too early: {job['status']}, {job.get('error')}")

    async def progress(self) -> tuple[float, float]:
        """Steps and tokens so far."""
        samples = {}
        for line in (await self._client.get("/metrics")).text.splitlines():
            if line.startswith("longwave:finetune_"):
                samples[line.partition("{")[0].partition(" ")[0]] = float(line.rpartition(" ")[2])
        return samples["longwave:finetune_steps_total"], samples["longwave:finetune_tokens_total"]

    async def cancel(self) -> None:
        await self._client.post(f"/v1/fine_tuning/jobs/{self.id}/cancel")

    @staticmethod
    def _of(reply: httpx.Response) -> dict[str, Any]:
        if reply.status_code != 200:
            raise SystemExit(f"{reply.request.url} answered {reply.status_code}: {reply.text}")
        content: dict[str, Any] = reply.json()
        return content


async def speed(progress: Callable[[], Awaitable[tuple[float, float]]], until: asyncio.Event) -> dict[str, Any]:
    """Whole steps of that time, from the end of one to the end of another, and their tokens a second: null without."""
    before, _ = await progress()
    ends: list[tuple[float, float, float]] = []
    while not until.is_set():
        with suppress(TimeoutError):
            async with asyncio.timeout(POLL_SECONDS):
                await until.wait()
        steps, tokens = await progress()
        if steps > (ends[-1][1] if ends else before):
            ends.append((time.perf_counter(), steps, tokens))
    if len(ends) < 2:
        return {"steps": 0, "train_tokens_per_s": None}
    seconds, steps, tokens = (last - first for first, last in zip(ends[0], ends[-1], strict=True))
    return {"steps": round(steps), "train_tokens_per_s": round(tokens / seconds)}
