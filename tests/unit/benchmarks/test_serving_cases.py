"""The cases' arithmetic, on an engine whose answers come at known times."""

import asyncio
from collections.abc import AsyncGenerator

import pytest

from benchmarks import serving_cases
from benchmarks.serving_cases import CASES, Answer, Bench, Row, Size, chat_figures, gaps, quantile, run_cases, timed

SMALL = Size(0.001)


class FewTokens(Size):
    """Prompts of few tokens, everything else as it is."""

    def tokens(self, count: int) -> int:
        return count // 64


class Engine:
    """Answers at once, `piece` tokens at a time, and keeps the prompts."""

    def __init__(self, piece: int = 1, short: int = 0) -> None:
        self.piece, self.short = piece, short
        self.asked: list[tuple[list[int], int]] = []
        self.open = self.most_open = 0

    async def generate(self, prompt: list[int], out: int) -> AsyncGenerator[int, None]:
        self.asked.append((prompt, out))
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        left = out - self.short
        while left:
            await asyncio.sleep(0)
            yield min(self.piece, left)
            left -= min(self.piece, left)
        self.open -= 1


def rows(engine: Engine, *cases: str) -> list[Row]:
    out: list[Row] = []
    asyncio.run(run_cases(Bench(timed(engine.generate), 500, SMALL), cases, out.append))
    return out


def test_a_piece_of_several_tokens_is_that_many_equal_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 4.0, 5.0])
    monkeypatch.setattr(serving_cases.time, "perf_counter", lambda: next(clock))
    answer = asyncio.run(timed(Engine(piece=3).generate)([1], 7))  # type: ignore[arg-type]
    assert answer.ttft == 1.0
    assert answer.itl == [1.0, 1.0, 1.0, 1.0]  # three tokens in three seconds, one in one
    assert answer.tokens == 7


def test_a_quantile_is_one_of_the_values_in_milliseconds() -> None:
    assert quantile([0.004, 0.001, 0.003, 0.002], 0.5) == 3.0
    assert quantile([0.001] * 99 + [0.5], 0.99) == 500.0
    assert quantile([], 0.5) is None


def test_gaps_of_the_last_tokens_only() -> None:
    answers = [Answer(itl=[1.0, 2.0, 3.0]), Answer(itl=[4.0])]
    assert gaps(answers, last=2) == [2.0, 3.0, 4.0]
    assert gaps(answers) == [1.0, 2.0, 3.0, 4.0]


def test_time_per_token_is_a_number_an_answer_and_gaps_are_all_of_them() -> None:
    steady, uneven, short = Answer(0.1, [0.002] * 9, 10), Answer(0.2, [0.001] * 8 + [0.01], 10), Answer(0.3, [], 1)
    assert chat_figures([steady, uneven, short]) == {
        "ttft_p50": 200.0,
        "ttft_p99": 300.0,
        "itl_p50": 2.0,
        "itl_p99": 10.0,
        "tpot_p50": 2.0,
        "tpot_p99": 2.0,
    }


def test_at_scale_one_the_cases_are_what_their_names_say() -> None:
    size = Size()
    assert (size.tokens(131_072), size.out(128), size.requests(64)) == (131_072, 128, 64)
    assert size.max_model_len == 132_096


def test_every_case_runs_and_no_prompt_is_asked_twice() -> None:
    engine = Engine()
    found = rows(engine, *(name for name in CASES if not name.startswith("chats")))
    assert [row for row in found if "error" in row] == []
    prompts = [tuple(prompt) for prompt, _ in engine.asked]
    assert len(set(prompts)) == len(prompts)
    assert all(serving_cases.FIRST_TOKEN <= token < 500 for prompt in prompts for token in prompt)


def test_questions_on_one_document_begin_with_it_and_come_at_once() -> None:
    engine = Engine()
    rows(engine, "shared_100k_x64")
    document = engine.asked[-1][0][: SMALL.tokens(100_000)]
    questions = engine.asked[-SMALL.requests(64) :]
    assert all(prompt[: len(document)] == document for prompt, _ in questions)
    assert engine.most_open >= len(questions)


def test_nested_prefixes_share_instructions_and_each_document() -> None:
    """Scale 1 but for the tokens: 16 documents of 64 questions, that come at once when all of them were read."""
    engine = Engine()
    bench = Bench(timed(engine.generate), 500, FewTokens())
    row = asyncio.run(CASES["nested_prefixes"](bench))  # type: ignore[arg-type]
    prompts = [prompt for prompt, _ in engine.asked]
    first, reads, questions = prompts[0], prompts[1:17], prompts[17:]
    common, document, own = (FewTokens().tokens(n) for n in (4096, 8192, 256))
    assert [len(prompt) for prompt in (first, reads[0], questions[0])] == [
        common + 16,
        common + document + 16,
        common + document + own,
    ]
    assert len({tuple(prompt[:common]) for prompt in prompts}) == 1
    documents = [tuple(prompt[: common + document]) for prompt in questions]
    assert len(questions) == 64
    assert len(set(documents)) == 16
    assert {documents.count(one) for one in documents} == {4}
    assert set(documents) == {tuple(prompt[: common + document]) for prompt in reads}
    assert engine.most_open == 64
    assert {out for _, out in engine.asked[17:]} == {128}
    assert {"out_tok_s", "itl_p50", "doc_s", "ttft_p50"} <= row.keys()


def test_an_answer_of_another_length_fails_its_case_and_no_other() -> None:
    engine = Engine(short=1)
    out: list[Row] = []
    bench = Bench(timed(engine.generate), 500, SMALL)

    async def run() -> None:
        bench.warm_up = lambda: asyncio.sleep(0)  # type: ignore[method-assign]
        await run_cases(bench, ["ttft_32k", "tpot_b1_1024"], out.append)

    asyncio.run(run())
    assert [row["case"] for row in out] == ["ttft_32k", "tpot_b1_1024"]
    assert out[0]["error"] == "RuntimeError: 1 tokens came, 2 were asked for"
