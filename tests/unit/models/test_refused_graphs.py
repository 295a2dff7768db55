"""A model whose steps wait for the GPU is served without graphs, and told why; every other one keeps its graphs."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from batch_driver import generate
from tiny_models import as_loaded, random_model, tiny_config
from transformers import JetMoeConfig

from models import graphs
from models.batch import SamplingParams, ScheduledSeq, StepBatch
from models.graphs import StepGraphs
from models.host_waits import HostWaitsError, refusing_waits
from models.kv_pool import MemoryBudget
from models.loader import LoadedModel
from models.runner import ModelRunner
from models.step_rows import StepRows
from models.step_shapes import decode_shapes

ENDLESS = SamplingParams(temperature=0.0, ignore_eos=True)
PROMPTS = [[7, 8, 9], [20] * 30, list(range(3, 60))]


class WaitingRecorder:
    """Of a model that waits in every step."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.asked = 0

    def record(self, *_: Any, **__: Any) -> None:
        self.asked += 1
        raise HostWaitsError("modeling_waiting.py, line 7: sizes.tolist()")


def test_one_recording_that_would_wait_is_the_last_that_is_tried(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(graphs, "GraphRecorder", WaitingRecorder)
    unused: Any = None
    made = StepGraphs(unused, unused, decode_shapes(8), max_model_len=64, max_levels=2, device=torch.device("cpu"))
    batch = StepBatch((ScheduledSeq(0, [3], 5, [1], sample=True),))
    key = made.key_of(batch, StepRows.of(batch))
    assert key is not None
    assert not made.record(key)
    assert not made.record(key)
    assert not made.record_one()  # moments without requests are not spent on it for ever
    made.capture()
    assert made.key_of(batch, StepRows.of(batch)) is None
    recorder: Any = made._recorder
    assert recorder.asked == 1
    assert caplog.messages == [
        "no CUDA graphs: a step of this model waits for the GPU (modeling_waiting.py, line 7: sizes.tolist())"
    ]


def test_a_quiet_moment_that_finds_out_is_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "GraphRecorder", WaitingRecorder)
    unused: Any = None
    made = StepGraphs(unused, unused, decode_shapes(8), max_model_len=64, max_levels=2, device=torch.device("cpu"))
    assert not made.record_one()


@pytest.fixture
def gpu() -> Iterator[torch.device]:
    """Its mode is afterwards what it was."""
    assert torch.cuda.get_sync_debug_mode() == 0
    yield torch.device("cuda:0")
    assert torch.cuda.get_sync_debug_mode() == 0


@pytest.mark.gpu
def test_a_wait_is_told_with_its_place_and_other_errors_are_left_alone(gpu: torch.device) -> None:
    numbers = torch.arange(4, device=gpu)
    with refusing_waits():
        kept = numbers * 2 + 1
    with (
        pytest.raises(HostWaitsError, match=r"^test_refused_graphs\.py, line \d+: numbers\.tolist\(\)"),
        refusing_waits(),
    ):
        numbers.tolist()
    with pytest.raises(RuntimeError, match="must match the size"), refusing_waits():
        numbers + torch.zeros(3, device=gpu)
    assert kept.tolist() == [1, 3, 5, 7]


def jet_moe() -> LoadedModel:
    """Its router asks for the number of rows of each expert."""
    config = JetMoeConfig(
        vocab_size=120, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_key_value_heads=2,
        kv_channels=16, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=512, pad_token_id=0,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return as_loaded(random_model(config).to("cuda:0"))  # type: ignore[arg-type]


def runner_of(loaded: LoadedModel, *, all_graphs: bool = True, **options: Any) -> ModelRunner:
    made = ModelRunner(
        loaded, block_size=16, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=128, max_drafts=3, **options
    )
    made.warm_up(all_graphs=all_graphs)
    return made


def answers(runner: ModelRunner) -> list[list[int]]:
    return [answer.tokens for answer in generate(runner, PROMPTS, 9, sampling=ENDLESS)]


@pytest.mark.gpu
@pytest.mark.parametrize("all_graphs", [True, False])
@pytest.mark.parametrize("measured", [False, True], ids=["blocks given", "pool measured"])
def test_jetmoe_is_served_without_graphs(
    gpu: torch.device, all_graphs: bool, measured: bool, caplog: pytest.LogCaptureFixture
) -> None:
    loaded = jet_moe()
    pool: dict[str, Any] = {"memory_budget": MemoryBudget(0.5, 2**26)} if measured else {"num_blocks": 40}
    made = runner_of(loaded, all_graphs=all_graphs, **pool)
    assert answers(made) == answers(runner_of(loaded, enforce_eager=True, num_blocks=40))
    assert not made.prepare()
    told = [message for message in caplog.messages if message.startswith("no CUDA graphs")]
    assert len(told) == 1
    assert "modeling_jetmoe.py" in told[0]
    assert "tolist()" in told[0]


@pytest.mark.gpu
@pytest.mark.parametrize("all_graphs", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("measured", [False, True], ids=["blocks given", "pool measured"])
def test_a_model_that_waits_for_nothing_keeps_its_graphs(
    gpu: torch.device, all_graphs: bool, dtype: torch.dtype, measured: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model: Any = random_model(tiny_config(max_position_embeddings=512))
    loaded = as_loaded(model.to(gpu, dtype))
    pool: dict[str, Any] = {"memory_budget": MemoryBudget(0.5, 2**26)} if measured else {"num_blocks": 40}
    made = runner_of(loaded, all_graphs=all_graphs, **pool)
    assert len(answers(made)) == len(PROMPTS)
    while made.prepare():
        pass
    assert made._graphs is not None
    assert made._graphs.refusal is None
    assert set(made._graphs._recorded) == set(made._graphs._keys)
    assert not [record for record in caplog.records if record.name == "models.graphs"]
