"""Trial: a model whose chat template does not end with some messages, or makes texts without end. Design: S8, S6."""

import asyncio
import tempfile
from collections.abc import Awaitable
from pathlib import Path

from benchmarks.trial import Measure, Scale, percentile
from benchmarks.trial_client import Answer, ask, chat, open_loop
from benchmarks.trial_server import TrialServer, trial_server
from models import registry

LOOP = "{% for i in range(100000) %}HERE{% endfor %}"
ENDLESS = LOOP.replace("HERE", LOOP.replace("HERE", LOOP))
DOUBLED = "{% set ns = namespace(s='ab') %}{% for i in range(99) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}"
TEMPLATE = (
    "{% if 'loop' in messages[0]['content'] %}" + ENDLESS + "{% elif 'grow' in messages[0]['content'] %}" + DOUBLED +
    "{% endif %}{{ messages[0]['content'] }}"
)  # fmt: skip
BOTH = ("loop", "grow")
ENDED = 4.0  # seconds until it is refused: 2 of a CPU, which others use as well
EVERY = 4.0  # seconds between two such requests
BESIDE = 5.0  # good requests, and probes, a second


def endless_template(scale: Scale) -> list[Measure]:
    with tempfile.TemporaryDirectory() as parent:
        folder = _with_template(registry.resolve(scale.model).fetch(), Path(parent))
        with trial_server(str(folder)) as server:
            before = server.held()
            bad, probes, good = asyncio.run(_troubled(server, scale.seconds / 2))
            after = server.held()
    return [
        Measure("requests of such messages", len(bad)),
        Measure("not refused with 400", sum(answer.status != 400 for answer in bad), 0),
        Measure("seconds until they are refused, at most", max(answer.ms for answer in bad) / 1e3, ENDED),
        Measure("good requests beside them", len(good)),
        Measure("not answered", sum(not answer.is_whole for answer in good), 0),
        Measure("p99 ms", percentile([answer.ms for answer in good], 99)),
        Measure("probes, p99 ms", percentile([probe.ms for probe in probes], 99), 100),
        Measure("growth of the process, MB", after.rss_mb - before.rss_mb, 400),
    ]


async def _troubled(server: TrialServer, seconds: float) -> tuple[list[Answer], list[Answer], list[Answer]]:
    """Requests of such messages, and probes and good requests beside them."""

    def bad(number: int) -> Awaitable[Answer]:
        return ask(server.url, chat(server, BOTH[number % 2], 1))

    def good(number: int) -> Awaitable[Answer]:
        return ask(server.url, chat(server, f"{number} hello", 1))

    def probe(_number: int) -> Awaitable[Answer]:
        return ask(server.url, None, "/health/live")

    loads = (open_loop(1 / EVERY, seconds, bad), open_loop(BESIDE, seconds, probe), open_loop(BESIDE, seconds, good))
    of_bad, of_probes, of_good = await asyncio.gather(*loads)
    return of_bad, of_probes, of_good


def _with_template(model: Path, parent: Path) -> Path:
    """The same model with TEMPLATE."""
    folder = parent / "model"
    folder.mkdir()
    for file in model.iterdir():
        if file.name != "chat_template.jinja":
            (folder / file.name).symlink_to(file.resolve())
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder
