"""Trial: whether one API key can tell by the time to a first token what another one's prompts were. Design: S14."""

import asyncio
import os
import random
import re
import secrets
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from benchmarks.trial import Measure, Scale
from benchmarks.trial_client import Answer, ask, chat
from benchmarks.trial_server import TrialServer, trial_server

OWNER, STRANGER = "owner", "stranger"
WORDS = 600  # of a document, some thousands of tokens: what a hit saves is seen in the owner's own times
TOLD = 0.55  # AUC of a guess by the time; 0.5 is chance
SEEN = 0.9  # of the owner's own, or the times would tell nothing of anything
CACHED = re.compile(rb'"cached_tokens": ?(\d+)')


def cache_timing(scale: Scale) -> list[Measure]:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "LONGWAVE_API_KEY": f"{OWNER},{STRANGER}"}
    with trial_server(scale.model, environment=environment) as server:
        known, unknown, own, answers = asyncio.run(_pairs(server, scale.pairs))
    guess, own_guess = (auc(_firsts(one), _firsts(unknown)) for one in (known, own))
    hits = sum(_cached(answer) > 0 for answer in own)
    return [
        Measure("pairs of a document that the other key had sent, and one that nobody had", scale.pairs),
        Measure("answers that are not whole", sum(not answer.is_whole for answer in answers), 0),
        Measure("tokens that the stranger's prompts found cached", sum(map(_cached, [*known, *unknown])), 0),
        Measure("of the owner's prompts, sent again: those with tokens cached", hits, scale.pairs, at_least=True),
        Measure("AUC of the stranger's guess by the time to a first token", guess, TOLD),
        Measure("AUC of the same guess about one's own documents", own_guess, SEEN, at_least=True),
    ]


def auc(faster: Sequence[float], slower: Sequence[float]) -> float:
    """How often one of the first is less than one of the second (Mann-Whitney); a tie is half."""
    ranked = sorted(slower)
    wins = sum(2 * len(ranked) - bisect_left(ranked, x) - bisect_right(ranked, x) for x in faster)
    return wins / (2 * len(faster) * len(slower))


async def _pairs(server: TrialServer, count: int) -> tuple[list[Answer], list[Answer], list[Answer], list[Answer]]:
    """The stranger's answers about documents that the owner had sent, and about others; the owner's, when it sends a
    document again; all answers."""
    await _asked(server, OWNER, _document())
    known: list[Answer] = []
    unknown: list[Answer] = []
    own: list[Answer] = []
    answers: list[Answer] = []
    for _ in range(count):
        document = _document()
        answers.append(await _asked(server, OWNER, document))
        probes = [(known, document), (unknown, _document())]
        random.shuffle(probes)
        for found, text in probes:
            found.append(await _asked(server, STRANGER, text))
        own.append(await _asked(server, OWNER, document))
    return known, unknown, own, [*known, *unknown, *own, *answers]


def _document() -> str:
    return " ".join(secrets.token_hex(3) for _ in range(WORDS))


async def _asked(server: TrialServer, key: str, text: str) -> Answer:
    body = chat(server, text, 1, stream=True, stream_options={"include_usage": True})
    return await ask(server.url, body, key=key)


def _cached(answer: Answer) -> int:
    return int(CACHED.findall(answer.content)[-1])


def _firsts(answers: Sequence[Answer]) -> list[float]:
    return [answer.first_ms for answer in answers if answer.first_ms is not None]
