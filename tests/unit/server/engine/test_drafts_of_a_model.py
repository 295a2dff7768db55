"""A real model behind the engine's loop: the same tokens with drafts and without, in fewer steps where text repeats."""

import sys
from pathlib import Path

import pytest

from models.batch import SamplingParams, StepBatch
from models.runner import ModelRunner
from models.sampling import LaunchedSample
from server.engine.core import EngineCore
from server.engine.drafting import Drafter, DraftLimits
from server.engine.kv_cache import KVCache
from server.engine.limits import SchedulerConfig
from server.engine.messages import AddRequest, FromEngine, RequestFailed, ToEngine, TokenDelta
from server.engine.runner import LoadedRunner
from server.engine.scheduler import Scheduler
from server.engine.token_ids import TokenIds

sys.path.append(str(Path(__file__).parents[2] / "models"))  # tiny models are made as their own tests make them
from tiny_models import as_loaded, random_model, tiny_config

LENGTH = 256
DOCUMENT = [3 + (7 * i * i + i) % 110 for i in range(60)]
ASKED = [  # a random model repeats little but what it is made to: one of two tokens
    SamplingParams(60, temperature=0.0, ignore_eos=True),
    SamplingParams(60, temperature=0.3, seed=1, ignore_eos=True),
    SamplingParams(60, temperature=0.5, seed=2, top_p=0.9, ignore_eos=True),
    SamplingParams(60, temperature=0.4, seed=3, top_k=5, logprobs=2, min_tokens=20),
    SamplingParams(60, temperature=1.0, seed=4, ignore_eos=True, logit_bias={7: 8.0, 8: 8.0}),
    SamplingParams(60, temperature=0.0, ignore_eos=True, frequency_penalty=0.1),
    SamplingParams(60, temperature=1.0, seed=5, ignore_eos=True, logit_bias={9: 100.0}),
]


class Link:
    def __init__(self) -> None:
        self.inbox: list[ToEngine | RequestFailed] = []
        self.sent: list[FromEngine] = []

    def receive(self, timeout: float) -> list[ToEngine | RequestFailed]:
        received, self.inbox = self.inbox, []
        return received

    def send(self, messages: list[FromEngine]) -> None:
        self.sent += messages


class CountingRunner(ModelRunner):
    num_steps = 0

    def launch(self, batch: StepBatch) -> LaunchedSample:
        self.num_steps += 1
        return super().launch(batch)


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def runner(request: pytest.FixtureRequest) -> CountingRunner:
    """float32: near ties, which another order of sums decides, are rare."""
    model = random_model(tiny_config()).to(request.param)
    runner = CountingRunner(
        as_loaded(model), block_size=16, max_num_seqs=8, max_num_batched_tokens=64, max_model_len=LENGTH, num_blocks=120
    )
    runner.warm_up()
    return runner


def answers(
    runner: CountingRunner, asked: list[SamplingParams], drafter: Drafter | None, *, overlaps: bool
) -> tuple[list[list[int]], list[list[int]]]:
    """Tokens of each request, and those that the logprobs say."""
    limits = SchedulerConfig(8, 64, LENGTH, 120, (2,))
    scheduler = Scheduler(limits, KVCache(runner.num_blocks, runner.block_size), drafter=drafter)
    link = Link()
    loaded = LoadedRunner(runner, "tiny", "cpu", "float32", LENGTH, 64, 120, (2,), overlaps=overlaps)
    core = EngineCore(loaded, scheduler, link)
    for number, sampling in enumerate(asked):
        prompt = TokenIds([*DOCUMENT, 5 + number, *DOCUMENT[:4]])
        link.inbox.append(AddRequest(str(number), prompt, sampling))
    core.turn()
    while core.has_work:
        core.turn()
    scheduler.open.check_integrity()
    tokens: list[list[int]] = [[] for _ in asked]
    likely: list[list[int]] = [[] for _ in asked]
    for message in link.sent:
        if isinstance(message, TokenDelta):
            tokens[int(message.request_id)] += message.token_ids
            likely[int(message.request_id)] += [entry.top[0][0] for entry in message.logprobs or ()]
    return tokens, likely


@pytest.mark.parametrize("overlaps", [False, True])
def test_answers_with_drafts_are_the_answers_without(runner: CountingRunner, overlaps: bool) -> None:
    drafter = Drafter(DraftLimits(step_cost=0.0, row_cost=0.0, overlaps=overlaps))
    wanted, wanted_likely = answers(runner, ASKED, None, overlaps=overlaps)
    tokens, likely = answers(runner, ASKED, drafter, overlaps=overlaps)
    assert tokens == wanted
    assert likely == wanted_likely
    assert len(likely[3]) == len(tokens[3]) >= 20
    assert drafter.stats.num_accepted_tokens > 10
    assert drafter.stats.num_accepted_tokens < drafter.stats.num_draft_tokens  # wrong ones were there too


@pytest.mark.parametrize("overlaps", [False, True])
def test_an_answer_that_repeats_itself_takes_few_steps(runner: CountingRunner, overlaps: bool) -> None:
    repeats = [SamplingParams(60, seed=5, ignore_eos=True, logit_bias={7: 100.0})]
    before = runner.num_steps
    assert answers(runner, repeats, Drafter(DraftLimits(overlaps=overlaps)), overlaps=overlaps)[0] == [[7] * 60]
    assert runner.num_steps - before < 20
