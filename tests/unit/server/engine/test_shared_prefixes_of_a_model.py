"""A real model behind the engine's loop: prompts begin with the same instructions and, behind them, with documents. The
tokens are those of requests that share nothing, whether the prefixes are read once on two levels, on one or on none."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from cranked_engine import ListLink

from attention_backend.heuristics import prefix
from models.batch import SamplingParams, StepBatch
from models.runner import ModelRunner
from models.sampling import LaunchedSample
from models.step_rows import StepRows
from server.engine.core import EngineCore
from server.engine.kv_cache import KVCache
from server.engine.limits import SchedulerConfig
from server.engine.messages import AddRequest, TokenDelta
from server.engine.runner import LoadedRunner
from server.engine.scheduler import Scheduler
from server.engine.sharing import PrefixSharing
from server.engine.token_ids import TokenIds

sys.path.append(str(Path(__file__).parents[2] / "models"))  # tiny models are made as their own tests make them
from tiny_models import as_loaded, random_model, tiny_config

LENGTH, BLOCK, COUNT = 256, 16, 12
INSTRUCTIONS = [3 + (7 * i * i + i) % 110 for i in range(70)]  # 4 blocks, and some tokens of the next
DOCUMENTS = [[3 + (5 * i * i + 11 * d * i + d) % 110 for i in range(100)] for d in range(3)]
WAYS = [
    SamplingParams(temperature=0.0, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=1, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=2, top_p=0.9, ignore_eos=True),
]


def prompts() -> list[list[int]]:
    """Questions on each document, one that follows the instructions alone, and one of its own."""
    asked = [[*INSTRUCTIONS, *document, 5 + n, 9, 4 + n] for n in range(3) for document in DOCUMENTS]
    return [*asked, [*INSTRUCTIONS, 8, 8, 8], [90, 80, 70, 60]]


class WatchedRunner(ModelRunner):
    """Notes of every step how many levels its decodes and its prompts have. With graphs, decodes run in one."""

    levels: list[tuple[int, int]]

    def launch(self, batch: StepBatch) -> LaunchedSample:
        self.levels.append((len(batch.sharing.decodes), len(batch.sharing.prefills)))
        if self._graphs is not None and not batch.sharing.prefills:
            key = self._graphs.key_of(batch, StepRows.of(batch))
            assert key is not None
            assert key.levels == len(batch.sharing.decodes)
        return super().launch(batch)


@pytest.fixture(params=["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def runner_on(device: str) -> WatchedRunner:
    """float32: near ties, which another order of sums decides, are rare."""
    runner = WatchedRunner(
        as_loaded(random_model(tiny_config()).to(device)), block_size=BLOCK, max_num_seqs=12,
        max_num_batched_tokens=256, max_model_len=LENGTH, num_blocks=200,
    )  # fmt: skip
    runner.levels = []
    runner.warm_up()
    runner.levels.clear()
    return runner


def answers(runner: WatchedRunner, *, shares: bool, overlaps: bool) -> list[list[int]]:
    limits = SchedulerConfig(12, 256, LENGTH, 120, (2,))
    sharing = PrefixSharing(runner.sharing_limits) if shares and runner.sharing_limits is not None else None
    scheduler = Scheduler(limits, KVCache(runner.num_blocks, BLOCK), sharing=sharing)
    link = ListLink()
    loaded = LoadedRunner(runner, "tiny", "cpu", "float32", LENGTH, 256, 120, (2,), overlaps=overlaps)
    core = EngineCore(loaded, scheduler, link)

    def ask(name: str, prompt: list[int], sampling: SamplingParams) -> None:
        link.inbox.append(AddRequest(name, TokenIds(prompt), sampling))

    for number, document in enumerate(DOCUMENTS):  # whoever asks first leaves its document in the cache
        ask(f"first {number}", [*INSTRUCTIONS, *document, 7], SamplingParams(1, temperature=0.0, ignore_eos=True))
    core.turn()
    while core.has_work:
        core.turn()
    for number, prompt in enumerate(prompts()):
        ask(str(number), prompt, replace(WAYS[number % 3], max_tokens=COUNT + number))
    core.turn()
    while core.has_work:
        core.turn()
    scheduler.open.check_integrity()
    tokens: dict[str, list[int]] = {}
    for message in link.sent:
        if isinstance(message, TokenDelta):
            tokens.setdefault(message.request_id, []).extend(message.token_ids)
            if message.token_ids and message.request_id in "012345678":
                assert message.num_cached_tokens == 160  # of the document, too
    return [tokens[str(number)] for number in range(len(prompts()))]


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize(("level_bytes", "most"), [(4 << 10, 2), (128 << 10, 1), (1 << 30, 0)])
def test_answers_are_those_of_requests_that_share_nothing(
    device: str, level_bytes: int, most: int, overlaps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`level_bytes`: what a level costs. A second one saves three readings of the instructions, 48 KB a layer."""
    for kind in ("cpu", "cuda"):
        monkeypatch.setitem(prefix.LEVEL_BYTES, kind, level_bytes)
    runner = runner_on(device)
    wanted = answers(runner, shares=False, overlaps=overlaps)
    assert not any(map(any, runner.levels))
    assert [len(one) for one in wanted] == list(range(COUNT, COUNT + len(wanted)))
    runner.levels.clear()
    assert answers(runner, shares=True, overlaps=overlaps) == wanted
    decodes, chunks = zip(*runner.levels, strict=True)
    assert max(decodes) == max(chunks) == most
