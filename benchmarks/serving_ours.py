"""Longwave's engine under the serving cases, through its client and without HTTP. Started by benchmarks/serving.py."""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

from benchmarks.serving_cases import timed
from benchmarks.serving_child import Opened, Plan, main
from models.batch import SamplingParams
from server.engine.client import EngineClient
from server.engine.config import EngineConfig
from server.engine.messages import AddRequest
from server.engine.token_ids import TokenIds


@asynccontextmanager
async def open_engine(plan: Plan) -> AsyncIterator[Opened]:
    fields: dict[str, Any] = {
        "model": plan.model,
        "load_format": plan.load_format,
        "dtype": plan.dtype,
        "device": plan.device,
        "max_model_len": plan.size.max_model_len,
        "queue_timeout": None,
    }
    client = EngineClient(EngineConfig(**fields | plan.engine))
    numbers = count()

    async def generate(prompt: list[int], out: int) -> AsyncGenerator[int, None]:
        sampling = SamplingParams(temperature=1.0, ignore_eos=True, max_tokens=out)
        request = AddRequest(f"bench-{next(numbers)}", TokenIds(prompt), sampling)
        async for delta in client.generate(request):
            yield len(delta.token_ids)

    await client.start()
    try:
        ready = await client.ready()
        facts = {
            "device": ready.device,
            "dtype": ready.dtype,
            "num_blocks": ready.num_blocks,
            "kernels": ready.kernels,
            "stages": {name: round(seconds, 2) for name, seconds in ready.stages.items()},  # of its start
        }
        yield Opened(timed(generate), facts)
    finally:
        await client.shutdown()


if __name__ == "__main__":
    main(open_engine)
