"""What a prompt was scored stands in front of what each of its choices says, whichever of them is first to speak."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any

import numpy as np
import pytest
from scripted_engine import EOS, LiveServer
from token_logprobs import token_logprobs

from models.batch import PromptLogprobs, SamplingParams
from server.engine.messages import AddRequest, TokenDelta
from server.engine.token_ids import TokenIds
from server.errors import EngineUnavailable, LongwaveError, RequestFailedError
from server.text.choice import TextDelta
from server.text.details import PromptDetails
from server.text.generation import Generation, Job
from server.text.scored_prompt import ScoredPrompt
from server.text.tokenizer import TextTokenizer

N = 3


def scores(count: int, num_top: int) -> PromptLogprobs:
    values, ids = -np.arange(count, dtype=np.float32), np.arange(count * num_top, dtype=np.int32)
    ranks = np.arange(1, count + 1, dtype=np.int32)
    top = (-ids).astype(np.float32)
    return PromptLogprobs(num_top, values.tobytes(), ranks.tobytes(), ids.tobytes(), top.tobytes())


@pytest.mark.parametrize(("echoed", "apart"), [(None, 3), (1, 3), (3, 1), (2, None)])
def test_scores_are_shown_with_every_choice_and_told_apart_with_one_with_as_many_alternatives_as_each_wants(
    tokenizer: TextTokenizer, echoed: int | None, apart: int | None
) -> None:
    details = PromptDetails(tokenizer, list(b"hey"), "hey")
    prompt = ScoredPrompt(details, range(4, 6), echoed=echoed, told_apart=apart)
    first, *others = prompt.feed([scores(2, 3)])
    assert [said.index for said in (first, *others)] == ([4] if echoed is None else [4, 5])
    for details_of, wanted in ((first.details, echoed), (first.prompt_details, apart)):
        assert [len(detail.top) for detail in details_of] == ([] if wanted is None else [0, wanted, wanted])
        assert "".join(detail.chosen.text for detail in details_of) == ("" if wanted is None else "hey")
    assert first.num_logprobs == sum(3 + 2 * wanted for wanted in (echoed, apart) if wanted is not None)
    assert [(said.details, said.prompt_details) for said in others] == [(first.details, ())] * len(others)
    assert list(prompt.feed([])) == []


class Engine:
    """Scores what is to be scored, in two pieces, the second when the test lets it; others answer at once."""

    def __init__(self) -> None:
        self.spoke: list[str] = []
        self.aborted: list[str] = []
        self.go_on = asyncio.Event()
        self.failure: LongwaveError | TokenDelta | None = None  # in place of the second piece

    async def generate(self, request: AddRequest) -> AsyncGenerator[TokenDelta, None]:
        name, top = request.request_id, request.sampling.prompt_logprobs
        ended = False
        try:
            if top is not None:
                yield TokenDelta(name, [], prompt_logprobs=[scores(4, top)])
                await self.go_on.wait()
                if isinstance(self.failure, LongwaveError):
                    raise self.failure
                yield self.failure or TokenDelta(name, [], prompt_logprobs=[scores(4, top)])
            self.spoke.append(name)
            for token in b"ok":
                yield TokenDelta(name, [token], [token_logprobs(-1.0)])
            ended = True
            yield TokenDelta(name, [EOS], [token_logprobs(-1.0)], "stop", EOS)
        finally:
            if not ended:
                self.aborted.append(name)


@pytest.fixture
def engine(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> Engine:
    engine = Engine()
    monkeypatch.setattr(server.engine, "generate", engine.generate)
    return engine


@asynccontextmanager
async def half_way(server: LiveServer, engine: Engine, **fields: Any) -> AsyncIterator[Generation]:
    """Two prompts of nine tokens: five of each are told, and all choices but the first of each have their answer."""
    assert server.lifecycle.generator is not None
    prompts = tuple(TokenIds(list(text)) for text in (b"hey there", b"hi people"))
    job = Job("job", prompts, SamplingParams(logprobs=0), 9, time.monotonic(), n=N, echo=True, **fields)
    async with aclosing(await server.lifecycle.generator.open(job)) as generation:
        while len(engine.spoke) < 2 * (N - 1):
            await asyncio.sleep(0)
        for _ in range(100):  # turns of the loop, in which they would say it
            await asyncio.sleep(0)
        yield generation


async def rest_of(generation: Generation) -> list[TextDelta]:
    said: list[TextDelta] = []
    while (delta := await generation.next()) is not None:
        said.append(delta)
    return said


def told(said: Sequence[TextDelta]) -> list[tuple[str, str]]:
    """Of each choice, the tokens of its details and its text."""
    choices = [[delta for delta in said if delta.index == index] for index in range(2 * N)]
    return [
        (
            "".join(detail.chosen.text for delta in own for detail in delta.details),
            "".join(delta.text for delta in own),
        )
        for own in choices
    ]


def test_choices_that_are_not_scored_wait_for_what_they_show_of_their_prompt(
    server: LiveServer, engine: Engine
) -> None:
    async def read() -> tuple[list[TextDelta], list[TextDelta]]:
        async with half_way(server, engine) as generation:
            early: list[TextDelta] = []
            while not generation._unread.empty():
                early += [delta for delta in [await generation.next()] if delta is not None]
                await asyncio.sleep(0)
            engine.go_on.set()
            return early, await rest_of(generation)

    early, late = server.run(read())
    assert told(early) == [("hey t", "")] * N + [("hi pe", "")] * N
    assert told(early + late) == [("hey thereok<|im_end|>", "ok")] * N + [("hi peopleok<|im_end|>", "ok")] * N
    assert [delta.finish_reason for delta in late].count("stop") == 2 * N
    assert engine.aborted == []


def test_choices_wait_for_nothing_that_is_told_beside_them(server: LiveServer, engine: Engine) -> None:
    """The reader of a reply that is not echoed has their text at once."""

    async def read() -> list[TextDelta]:
        assert server.lifecycle.generator is not None
        job = Job("job", (TokenIds(list(b"hey there")),), SamplingParams(), 9, time.monotonic(), n=N, prompt_logprobs=0)
        async with aclosing(await server.lifecycle.generator.open(job)) as generation:
            early: list[TextDelta] = []
            while sum(delta.finish_reason is not None for delta in early) < N - 1:
                early += [delta for delta in [await generation.next()] if delta is not None]
            engine.go_on.set()
            return early + await rest_of(generation)

    said = server.run(read())
    assert [text for _, text in told(said)][:N] == ["ok"] * N
    assert "".join(detail.chosen.text for delta in said for detail in delta.prompt_details) == "hey there"
    assert {delta.index for delta in said if delta.prompt_details} == {0}


@pytest.mark.parametrize(
    "failure", [EngineUnavailable("The engine stopped."), TokenDelta("r", [], finish_reason="abort")], ids=str
)
def test_all_end_with_the_choice_that_is_scored_where_that_fails(
    server: LiveServer, engine: Engine, failure: LongwaveError | TokenDelta
) -> None:
    engine.failure = failure

    async def read() -> None:
        async with half_way(server, engine) as generation:
            engine.go_on.set()
            with pytest.raises(type(failure) if isinstance(failure, LongwaveError) else RequestFailedError):
                await rest_of(generation)

    server.run(read())
    assert sorted(engine.aborted) == [f"job-{at}" for at in range(2 * N)]


def test_nobody_waits_on_where_the_reader_leaves(server: LiveServer, engine: Engine) -> None:
    async def leave() -> None:
        async with half_way(server, engine) as generation:
            assert await generation.next() is not None

    server.run(leave())
    assert sorted(engine.aborted) == [f"job-{at}" for at in range(2 * N)]
