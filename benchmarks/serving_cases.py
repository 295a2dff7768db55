"""The serving cases, one code for every engine: what is asked, and which figures are taken from the answers.

Runs beside any engine, in its environment: the standard library only. Knows no engine and no HTTP, only a function
that answers a prompt of token ids with so many tokens.
"""

import asyncio
import random
import statistics
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

Row = dict[str, Any]

FIRST_TOKEN = 10  # below it tokenizers keep their special tokens
LAST_TOKEN = 120_000
CHATS_A_SECOND = 4.0
QUIET = 8.0  # seconds before the first case
HEAD_START = 0.3  # seconds between the long prompt and the first chat beside it


@dataclass(slots=True)
class Answer:
    """Times in seconds. A piece of several tokens counts as that many equal gaps."""

    ttft: float = 0.0
    itl: list[float] = field(default_factory=list)
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class Size:
    """The cases as they are (scale 1), or cut down so that a CPU runs them in minutes."""

    scale: float = 1.0

    def tokens(self, count: int) -> int:
        return max(16, round(count * self.scale))

    def out(self, count: int) -> int:
        return count if self.scale == 1 else max(4, round(count * self.scale**0.5))

    def requests(self, count: int) -> int:
        return count if self.scale == 1 else max(2, round(count * self.scale**0.5))

    @property
    def max_model_len(self) -> int:
        """The longest prompt of any case and its answer."""
        return self.tokens(131_072) + 1024


#: (prompt, tokens to generate) -> the times of the answer. Raises whatever went wrong.
Ask = Callable[[list[int], int], Coroutine[Any, Any, Answer]]
#: The same, as the number of new tokens of each piece of the answer when it arrives.
Generate = Callable[[list[int], int], AsyncGenerator[int, None]]


def timed(generate: Generate) -> Ask:
    """With our own clock around an engine's pieces. Raises RuntimeError when not exactly `out` tokens came."""

    async def ask(prompt: list[int], out: int) -> Answer:
        answer = Answer()
        begin = last = time.perf_counter()
        async for count in generate(prompt, out):
            if not count:
                continue
            now = time.perf_counter()
            if answer.tokens:
                answer.itl += [(now - last) / count] * count
            else:
                answer.ttft = now - begin
            last = now
            answer.tokens += count
        if answer.tokens != out:
            raise RuntimeError(f"{answer.tokens} tokens came, {out} were asked for")
        return answer

    return ask


class Bench:
    """One engine under test. Prompts are drawn before clocks start, and are never the same twice."""

    def __init__(self, ask: Ask, vocab_size: int, size: Size) -> None:
        self.one = ask
        self._last_token = min(LAST_TOKEN, vocab_size)
        self._random = random.Random(1)
        self.size = size

    def prompt(self, tokens: int) -> list[int]:
        """Random token ids, `tokens` of them: not scaled."""
        return self._random.choices(range(FIRST_TOKEN, self._last_token), k=tokens)

    async def together(self, prompts: Sequence[list[int]], out: int) -> tuple[list[Answer], float]:
        """All at once: the answers, and the seconds until the last one ended."""
        begin = time.perf_counter()
        answers = await asyncio.gather(*(self.one(prompt, out) for prompt in prompts))
        return answers, time.perf_counter() - begin

    async def chats(self, count: int) -> list[Answer]:
        """Short questions that arrive as people do: a Poisson process, the same one every time."""
        gaps = random.Random(0)
        prompts = [self.prompt(self.size.tokens(512)) for _ in range(count)]
        tasks = []
        for prompt in prompts:
            tasks.append(asyncio.create_task(self.one(prompt, self.size.out(64))))
            await asyncio.sleep(gaps.expovariate(CHATS_A_SECOND))
        return await asyncio.gather(*tasks)

    async def warm_up(self) -> None:
        """Compiles and captures what the cases will need, as far as an engine left that for its first requests, or for
        moments without any."""
        await self.together([self.prompt(self.size.tokens(2048)) for _ in range(4)], self.size.out(32))
        await self.one(self.prompt(self.size.tokens(32_768)), 4)
        await asyncio.sleep(QUIET * self.size.scale)


def quantile(values: Sequence[float], p: float) -> float | None:
    """Of seconds, in milliseconds; None of nothing. The value at or above rank p, never one in between."""
    ordered = sorted(values)
    return round(1e3 * ordered[min(len(ordered) - 1, int(p * len(ordered)))], 2) if ordered else None


def gaps(answers: Sequence[Answer], last: int | None = None) -> list[float]:
    """Inter-token latencies of all, or of the `last` tokens of each."""
    return [gap for answer in answers for gap in (answer.itl if last is None else answer.itl[-last:])]


def ttft_figures(answers: Sequence[Answer]) -> Row:
    ttft = [answer.ttft for answer in answers]
    return {"ttft_p50": quantile(ttft, 0.5), "ttft_p99": quantile(ttft, 0.99)}


def chat_figures(answers: Sequence[Answer]) -> Row:
    """TTFT; ITL, over the gaps of all answers; TPOT, a number an answer: what follows its first token, by the token."""
    tpot = [sum(answer.itl) / (answer.tokens - 1) for answer in answers if answer.tokens > 1]
    times = {"itl": gaps(answers), "tpot": tpot}
    found = {f"{name}_{p}": quantile(times[name], at) for name in times for p, at in (("p50", 0.5), ("p99", 0.99))}
    return ttft_figures(answers) | found


async def ttft(bench: Bench, tokens: int, rounds: int) -> Row:
    prompts = [bench.prompt(bench.size.tokens(tokens)) for _ in range(rounds)]
    times = [1e3 * (await bench.one(prompt, 2)).ttft for prompt in prompts]
    return {"ms": round(statistics.median(times), 2), "all_ms": [round(ms, 1) for ms in times]}


async def tpot(bench: Bench, tokens: int, out: int) -> Row:
    answer = await bench.one(bench.prompt(bench.size.tokens(tokens)), bench.size.out(out))
    return {"p50": quantile(answer.itl, 0.5), "p99": quantile(answer.itl, 0.99)}


async def batch(bench: Bench, count: int, tokens: int, out: int) -> Row:
    """`count` different prompts at once."""
    size = bench.size
    count, tokens, out = size.requests(count), size.tokens(tokens), size.out(out)
    answers, seconds = await bench.together([bench.prompt(tokens) for _ in range(count)], out)
    tail = gaps(answers, last=64)
    return {
        "s": round(seconds, 3),
        "total_tok_s": round(count * (tokens + out) / seconds, 1),
        "out_tok_s": round(count * out / seconds, 1),
        **ttft_figures(answers),
        "itl_p50_tail": quantile(tail, 0.5),
    }


async def shared_prefix(bench: Bench, count: int, shared: int, own: int, out: int) -> Row:
    """`count` questions at once on one document, which was read before."""
    size = bench.size
    count, out = size.requests(count), size.out(out)
    document = bench.prompt(size.tokens(shared))
    begin = time.perf_counter()
    await bench.one(document + bench.prompt(16), 2)
    reading = time.perf_counter() - begin
    questions = [document + bench.prompt(size.tokens(own)) for _ in range(count)]
    return {"doc_s": round(reading, 3), **await asked_together(bench, questions, out)}


async def asked_together(bench: Bench, questions: Sequence[list[int]], out: int) -> Row:
    answers, seconds = await bench.together(questions, out)
    itl = gaps(answers)
    return {
        "s": round(seconds, 3),
        "out_tok_s": round(len(questions) * out / seconds, 1),
        **ttft_figures(answers),
        **{f"itl_{p}": quantile(itl, at) for p, at in (("p50", 0.5), ("p99", 0.99))},
    }


async def nested_prefixes(bench: Bench, count: int, documents: int, instructions: int, document: int, own: int) -> Row:
    """`count` questions at once on some documents in turn, behind the same instructions: two levels that are shared.
    All of it was read before."""
    size = bench.size
    common = bench.prompt(size.tokens(instructions))
    prefixes = [common + bench.prompt(size.tokens(document)) for _ in range(size.requests(documents))]
    begin = time.perf_counter()
    await bench.one(common + bench.prompt(16), 2)
    await bench.together([prefix + bench.prompt(16) for prefix in prefixes], 2)
    reading = time.perf_counter() - begin
    turns = (prefixes[i % len(prefixes)] for i in range(size.requests(count)))
    questions = [prefix + bench.prompt(size.tokens(own)) for prefix in turns]
    return {"doc_s": round(reading, 3), **await asked_together(bench, questions, size.out(128))}


async def chats_alone(bench: Bench) -> Row:
    return chat_figures(await bench.chats(bench.size.requests(24)))


async def chats_under_prefill(bench: Bench) -> Row:
    long_prompt = bench.prompt(bench.size.tokens(131_072))
    long = asyncio.create_task(bench.one(long_prompt, 2))
    try:
        await asyncio.sleep(HEAD_START)
        answers = await bench.chats(bench.size.requests(36))
        return {"long_ttft_ms": round(1e3 * (await long).ttft, 1), **chat_figures(answers)}
    finally:
        long.cancel()


#: In the order in which they run. The names give the sizes at scale 1.
CASES: dict[str, Callable[[Bench], Awaitable[Row]]] = {
    "ttft_32k": lambda bench: ttft(bench, 32_768, 3),
    "ttft_131k": lambda bench: ttft(bench, 131_072, 2),
    "tpot_b1_1024": lambda bench: tpot(bench, 1024, 512),
    "tpot_b1_131072": lambda bench: tpot(bench, 131_072, 128),
    "32x32k_128": lambda bench: batch(bench, 32, 32_768, 128),
    "shared_100k_x64": lambda bench: shared_prefix(bench, 64, 100_000, 512, 128),
    "64x8k_256": lambda bench: batch(bench, 64, 8192, 256),
    "256x1k_128": lambda bench: batch(bench, 256, 1024, 128),
    "chats_alone": chats_alone,
    "chats_under_131k_prefill": chats_under_prefill,
    "nested_prefixes": lambda bench: nested_prefixes(bench, 64, 16, 4096, 8192, 256),
}


async def run_cases(bench: Bench, cases: Sequence[str], emit: Callable[[Row], None]) -> None:
    """Emits a row a case; one that fails becomes a row with `error`, and the next one runs."""
    if cases:
        await bench.warm_up()
    for name in cases:
        begin = time.perf_counter()
        try:
            row = await CASES[name](bench)
        except Exception as error:  # of an engine that is not ours: whatever it raises, the other cases can run
            row = {"error": f"{type(error).__name__}: {error}"}
        emit({"case": name, **row, "took_s": round(time.perf_counter() - begin, 1)})
