import asyncio
import time

import pytest
from scripted_engine import MAX_MODEL_LEN, LiveServer

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


@pytest.mark.parametrize(("unit", "size"), [("<|im_start|>", 24 * MAX_MODEL_LEN), ("x<|", 12 * MAX_MODEL_LEN)])
@pytest.mark.parametrize("chat", [True, False])
def test_a_text_that_no_tokens_could_make_fit_is_refused_before_it_is_encoded(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch, chat: bool, unit: str, size: int
) -> None:
    assert server.lifecycle.generator is not None
    tokenizer = server.lifecycle.generator.tokenizer
    encoded: list[str] = []
    for name in ("encode", "encode_plain"):
        monkeypatch.setattr(tokenizer, name, lambda text, **_: encoded.append(text) or [1])
    # Of the longest tokens it would have too many; or they are so short that a part of it has.
    text = unit * (size // len(unit))
    path, field = ("/v1/chat/completions", "messages") if chat else ("/v1/completions", "prompt")
    prompt = [{"role": "user", "content": text}] if chat else text
    with server.client() as client:
        reply = client.post(path, json={"model": "tiny", field: prompt, "max_tokens": 1})
    error = reply.json()["error"]
    assert (reply.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", field)
    assert "at least" in error["message"]
    assert not encoded


def test_a_text_of_the_longest_tokens_that_fits_is_served(server: LiveServer) -> None:
    text = "<|endoftext|>" * (MAX_MODEL_LEN - 1)  # the vocabulary has no longer token
    with server.client() as client:
        reply = client.post("/v1/completions", json={"model": "tiny", "prompt": text, "max_tokens": 1})
    assert reply.status_code == 200
    assert reply.json()["usage"]["prompt_tokens"] == MAX_MODEL_LEN - 1
