"""Where training rests: between any two layers' work, forward and backward, with the bits of a run that never rests."""

from collections.abc import Callable
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from training_runs import SIZES, Reports, random_examples, random_preferences, tiny_plan, write_model
from transformers import GPT2Config, MixtralConfig, Qwen3Config

from models import registry
from models.decoder_layers import decoder_layers
from models.training import Datum, LoraSettings, Pacer, SessionSettings, Trainer, TrainingSession
from models.training.boundaries import AHEAD, RunAhead, rest_between_layers
from models.training.packing import build
from models.training.trainable import TrainableModel

CPU = torch.device("cpu")
DECODER = {name: size for name, size in SIZES.items() if name not in ("bos_token_id", "eos_token_id")}
FAMILIES = {
    "qwen3": Qwen3Config(**DECODER, head_dim=16),
    "mixtral": MixtralConfig(**DECODER, num_local_experts=3, num_experts_per_tok=2),
    "gpt2": GPT2Config(vocab_size=120, n_embd=32, n_layer=2, n_head=4, n_positions=256),
}


def pacer(sleeps: list[float] | None = None) -> Pacer:
    """Somebody is always answering, and sleeping takes no time: the next look at the clock is past any rest."""
    times = iter(range(10**9))
    return Pacer(
        lambda: True, 0.25, clock=lambda: float(next(times)), sleep=[].append if sleeps is None else sleeps.append
    )


class Diary(list[str]):
    """What a model does, in its order, and where its boundaries are."""

    def __init__(self, model: TrainableModel) -> None:
        super().__init__()
        rest_between_layers(model, Pacer(self._boundary, 0.5))
        for number, layer in enumerate(decoder_layers(model.decoder)):
            last = list(layer.children())[-1]
            last.register_forward_pre_hook(self._note(f"forward {number}"))
            last.register_full_backward_hook(self._note(f"backward {number}"))

    def _boundary(self) -> bool:
        self.append("boundary")
        return False

    def _note(self, what: str) -> Callable[..., None]:
        return lambda *_: self.append(what)

    def without_boundaries(self) -> list[str]:
        return [what for what in self if what != "boundary"]

    def layers_side_by_side(self) -> list[tuple[str, str]]:
        """Work of two layers with no boundary between."""
        return [(one, two) for one, two in pairwise(self) if "boundary" not in (one, two) and one[-1] != two[-1]]


@pytest.mark.parametrize("checkpointing", [True, False], ids=["checkpointing", "no checkpointing"])
@pytest.mark.parametrize("family", ["llama", *FAMILIES])
def test_between_the_work_of_two_layers_there_is_a_boundary(family: str, checkpointing: bool, tmp_path: Path) -> None:
    folder = write_model(tmp_path, FAMILIES.get(family))
    plan = tiny_plan(folder, gradient_checkpointing=checkpointing)
    model = TrainableModel(plan, registry.resolve(plan.model), CPU)
    diary = Diary(model)
    model.logprobs(build(random_examples(3), (0, 1, 2), CPU))[0].sum().backward()

    later = ["forward 1", "backward 1", "forward 0", "backward 0"] if checkpointing else ["backward 1", "backward 0"]
    assert diary.without_boundaries() == ["forward 0", "forward 1", *later]
    assert diary.layers_side_by_side() == []


def test_every_use_of_the_head_has_one(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("models.training.logprobs.CHUNK_ELEMENTS", 120 * 4)  # four rows
    plan = tiny_plan(tiny_folder)
    model = TrainableModel(plan, registry.resolve(plan.model), CPU)
    batch = build(random_examples(3), (0, 1, 2), CPU)
    rests: list[int] = []
    rest_between_layers(model, Pacer(lambda: bool(rests.append(1)), 0.5))
    with model.evaluating():
        model.hidden(batch)
        layers = len(rests)
        model.logprobs(batch)
    assert layers == 2
    assert len(rests) - 2 * layers == -(-len(batch.rows) // 4) > 1


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_are_found_and_their_experts_are_none(family: str, tmp_path: Path) -> None:
    plan = tiny_plan(write_model(tmp_path, FAMILIES[family]))
    model = TrainableModel(plan, registry.resolve(plan.model), CPU)
    layers = decoder_layers(model.decoder)
    assert len(layers) == 2
    assert all(isinstance(layer, nn.Module) and next(layer.children()) is not None for layer in layers)


def test_lists_within_layers_are_no_layers() -> None:
    experts = nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)])
    layers = nn.ModuleList([nn.ModuleDict({"experts": experts}), nn.ModuleDict({"norm": nn.Linear(1, 1)})])
    assert decoder_layers(nn.ModuleDict({"embedding": nn.Linear(1, 1), "layers": layers})) == list(layers)


@pytest.mark.parametrize(
    "changes",
    [
        {"lora": LoraSettings(4, 8, dropout=0.2)},
        {"lora": LoraSettings(4, 8, dropout=0.2), "gradient_checkpointing": False},
        {"lora": None, "learning_rate": 1e-3},
        {"dtype": "bfloat16"},
        {"method": "dpo"},
    ],
    ids=["lora with dropout", "no checkpointing", "full", "bfloat16", "dpo"],
)
def test_a_run_that_rests_ends_with_the_bits_of_one_that_never_does(
    tiny_folder: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    preferences = changes.get("method") == "dpo"
    data: Any = (random_preferences(6), None) if preferences else (random_examples(6), random_examples(2, seed=5))
    plan = tiny_plan(tiny_folder, **changes)
    sleeps: list[float] = []
    results, losses = [], []
    for name, given in (("never", None), ("rests", pacer(sleeps))):
        reports = Reports()
        outcome = Trainer(plan, *data, tmp_path / name, "cpu", pacer=given).run(reports)
        assert outcome.result is not None
        results.append(load_file(next(outcome.result.glob("*.safetensors"))))
        losses.append([(report.train_loss, report.valid_loss) for report in reports])
    assert sleeps
    assert losses[0] == losses[1]
    assert results[0].keys() == results[1].keys()
    assert all(torch.equal(tensor, results[1][name]) for name, tensor in results[0].items())


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT's own
def test_time_between_two_calls_is_not_rested_for(tiny_folder: Path) -> None:
    """Somebody answers all the time, and whoever trains thinks for an hour."""
    now, ids = 0.0, torch.arange(3, 24)

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    given = Pacer(lambda: True, 0.25, clock=lambda: now, sleep=sleep)
    settings = SessionSettings(str(tiny_folder), max_length=64, micro_batch_tokens=48)
    session = TrainingSession(registry.resolve(str(tiny_folder)), settings, "cpu", pacer=given)
    session.create("train-1", LoraSettings(4, 8), seed=1)
    for _ in range(2):
        begun = now
        session.forward_backward("train-1", [Datum(ids[:-1], ids[1:])], "cross_entropy")
        assert now == begun  # by this clock, work takes no time
        now += 3600.0


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT's own
def test_a_session_that_rests_gives_the_same_bits(tiny_folder: Path) -> None:
    ids = torch.arange(3, 24)
    settings = SessionSettings(str(tiny_folder), max_length=64, micro_batch_tokens=48)
    sleeps: list[float] = []
    outcomes = []
    for given in (None, pacer(sleeps)):
        session = TrainingSession(registry.resolve(str(tiny_folder)), settings, "cpu", pacer=given)
        session.create("train-1", LoraSettings(4, 8, dropout=0.2), seed=1)
        report = session.forward_backward("train-1", [Datum(ids[:-1], ids[1:])], "cross_entropy")
        outcomes.append((report.loss, report.logprobs[0]))
    assert sleeps
    assert outcomes[0][0] == outcomes[1][0]
    assert torch.equal(outcomes[0][1], outcomes[1][1])


def test_the_host_is_never_more_than_two_pieces_of_work_ahead_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is queued cannot be taken back: somebody who asks now waits for it."""
    queued: list[int] = []  # boundaries that the device has not come to
    numbers = count()
    most = []

    class Event:
        at: int | None = None

        def __init__(self, *, blocking: bool) -> None:
            assert blocking

        def record(self, _stream: object) -> None:
            self.at = next(numbers)
            queued.append(self.at)

        def synchronize(self) -> None:
            queued[:] = [other for other in queued if self.at is None or other > self.at]

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: None)
    ahead = RunAhead(torch.device("cuda"))
    for _ in range(20):
        ahead.boundary()
        most.append(len(queued))
    assert most == [1, *[AHEAD] * 19]
