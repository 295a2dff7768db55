import asyncio
import time

from scripted_engine import LiveServer

from models.batch import SamplingParams
from server.text.generation import Job

NUM_PROMPTS = 32


def test_many_short_prompts_leave_the_event_loop_its_turns(server: LiveServer) -> None:
    generator = server.lifecycle.generator
    assert generator is not None
    job = Job("job", ("hi",) * NUM_PROMPTS, SamplingParams(), max_tokens=1, arrival_time=time.monotonic())

    async def turns_while_opening() -> int:
        turns = 0

        async def count() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        counting = asyncio.create_task(count())
        generation = await generator.open(job)
        counting.cancel()
        await generation.aclose()
        return turns

    assert server.run(turns_while_opening()) >= NUM_PROMPTS
