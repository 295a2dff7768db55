"""Trials: greedy answers of the bundled model alone, and the same ones among many, cached, and in chunks. Design: R23.

Answers are compared token by token until they first differ: what comes after other tokens says nothing. Where they
differ, how far apart the two likeliest tokens were tells a near tie from a fault."""

import asyncio
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random

from benchmarks.trial import Measure, Scale, percentile
from benchmarks.trial_client import Answer, ask, chat
from benchmarks.trial_server import TrialServer, trial_server

TEXT = (Path(__file__).resolve().parents[1] / "LICENSE").read_text()
TASKS = ("Summarise this:", "What is this about?", "Continue this text:", "Say this in simple words:")
SHORTEST, LONGEST = 20, 1500  # characters of that text in a prompt
TOKENS = 12
AMONG = 64
FIXED = 17
SEATS = ("--max-num-seqs", str(AMONG), "--max-queued-requests", str(AMONG))
UNCACHED = (*SEATS, "--no-enable-prefix-caching")
CHUNKS = (*UNCACHED, "--max-num-batched-tokens", "128")
#: Two likeliest tokens that are no further apart are a near tie: two steps of a bfloat16 between 16 and 32, where the
#: largest logits are; and what other orders of float32 sums make, with room.
NEAR = {"bfloat16": 0.25, "float32": 1e-3}


@dataclass(frozen=True, slots=True)
class Token:
    token: bytes
    logprob: float
    lead: float  # over the second likeliest


@dataclass(frozen=True, slots=True)
class Agreement:
    """Of answers to the same prompts."""

    gaps: list[float]  # of each token that was the same after the same ones, its log-probabilities apart
    leads: list[float]  # where answers first differ: of the likeliest over the second, the larger one of both answers'
    positions: list[int]  # of those tokens in their answers

    @property
    def share(self) -> float:
        return len(self.gaps) / (len(self.gaps) + len(self.leads))


def agreement(dtype: str, scale: Scale) -> list[Measure]:
    prompts = list(prompts_of(scale.prompts))
    flags = ("--dtype", dtype)
    with trial_server("bundled", (*UNCACHED, *flags)) as server:
        alone = asyncio.run(_answers(server, prompts, 1))
        others = {"alone again": asyncio.run(_answers(server, prompts[: -(-len(prompts) // 4)], 1))}
        others[f"among {AMONG}"] = asyncio.run(_answers(server, prompts, AMONG))
    with trial_server("bundled", (*SEATS, *flags)) as server:
        others[f"among {AMONG}, nothing cached"] = asyncio.run(_answers(server, prompts, AMONG))
        others[f"among {AMONG}, cached"] = asyncio.run(_answers(server, prompts, AMONG))
        cached = server.metrics().get("longwave:prefix_cache_hits_total", 0.0)
    with trial_server("bundled", (*CHUNKS, *flags)) as server:
        others[f"among {AMONG}, in chunks"] = asyncio.run(_answers(server, prompts, AMONG))
    found = {how: compare(alone, answers) for how, answers in others.items()}
    gaps = [gap for one in found.values() for gap in one.gaps]
    leads = [lead for one in found.values() for lead in one.leads]
    answers = sum(map(len, others.values()))
    return [
        Measure("prompts", len(prompts)),
        Measure("tokens of an answer", TOKENS),
        Measure("tokens found in the prefix cache", cached, 1, at_least=True),
        *(Measure(f"{how}: share of tokens alike", one.share, 0.999, at_least=True) for how, one in found.items()),
        Measure("answers that are wholly alike, share", 1 - len(leads) / answers),
        Measure("first differences", len(leads)),
        Measure("median position of them", percentile([at for one in found.values() for at in one.positions], 50)),
        Measure("of them at no near tie", sum(lead > NEAR[dtype] for lead in leads), 0),
        Measure("the two likeliest there, thousandths apart at most", 1e3 * max(leads, default=0.0)),
        Measure("log-probabilities of the same token, thousandths apart, p50", 1e3 * percentile(gaps, 50)),
        Measure("the same, at most", 1e3 * max(gaps)),
    ]


in_bfloat16, in_float32 = partial(agreement, "bfloat16"), partial(agreement, "float32")


def prompts_of(count: int) -> Iterator[str]:
    """Of very different lengths."""
    random = Random(FIXED)
    for number in range(count):
        length = round(SHORTEST * (LONGEST / SHORTEST) ** random.random())
        begin = random.randrange(len(TEXT) - length)
        yield f"{TASKS[number % len(TASKS)]} {TEXT[begin : begin + length]}"


def compare(alone: Sequence[list[Token]], others: Sequence[list[Token]]) -> Agreement:
    """`others`: to the first ones of the same prompts."""
    result = Agreement([], [], [])
    for mine, other in zip(alone, others, strict=False):
        for position, (one, two) in enumerate(zip(mine, other, strict=True)):
            if one.token != two.token:
                result.leads.append(max(one.lead, two.lead))
                result.positions.append(position)
                break
            result.gaps.append(abs(one.logprob - two.logprob))
    return result


def tokens_of(answer: Answer) -> list[Token]:
    """Raises ValueError, or KeyError, for what is no whole answer with log-probabilities."""
    content = json.loads(answer.content)["choices"][0]["logprobs"]["content"]
    return [
        Token(
            bytes(one["bytes"]), one["logprob"], one["top_logprobs"][0]["logprob"] - one["top_logprobs"][1]["logprob"]
        )
        for one in content
    ]


async def _answers(server: TrialServer, prompts: Sequence[str], at_once: int) -> list[list[Token]]:
    """In the prompts' order. `at_once` of them are open at any time."""
    seats = asyncio.Semaphore(at_once)

    async def answered(prompt: str) -> list[Token]:
        async with seats:
            return tokens_of(await ask(server.url, chat(server, prompt, TOKENS, logprobs=True, top_logprobs=2)))

    return list(await asyncio.gather(*map(answered, prompts)))
