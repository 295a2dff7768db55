"""A training session on an NVIDIA GPU: the CPU's numbers in bfloat16, models that take turns, weights that go on."""

import gc
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch import Tensor
from training_runs import write_model

from models import registry
from models.training import (
    AdamParams,
    Datum,
    LoraSettings,
    LossReport,
    OutOfMemoryError,
    PlanError,
    SessionSettings,
    TrainingSession,
)
from models.training.calls import LossName

pytestmark = pytest.mark.gpu

LORA, STEP = LoraSettings(rank=4, alpha=8), AdamParams(learning_rate=1e-3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Head dimension 64: what the kernels for bfloat16 take."""
    return write_model(tmp_path_factory.mktemp("gpu"), hidden_size=256, intermediate_size=512)


def make_session(folder: Path, device: str) -> TrainingSession:
    settings = SessionSettings(str(folder), max_length=128, micro_batch_tokens=192)
    return TrainingSession(registry.resolve(str(folder)), settings, device)


def random_data(seed: int) -> list[Datum]:
    source = torch.Generator().manual_seed(seed)
    data = []
    for length in (100, 7, 31, 64):
        ids = torch.randint(3, 100, (length + 1,), generator=source)
        sampled = -5 * torch.rand(length, generator=source)
        data.append(Datum(ids[:-1], ids[1:], None, sampled, torch.randn(length, generator=source)))
    return data


def plain(data: list[Datum]) -> list[Datum]:
    return [Datum(datum.tokens, datum.targets) for datum in data]


def compute(session: TrainingSession, name: str, loss: LossName, seed: int = 0) -> LossReport:
    data = random_data(seed)
    return session.forward_backward(name, plain(data) if loss == "cross_entropy" else data, loss)


def test_logprobs_and_gradients_follow_the_cpu_s(folder: Path) -> None:
    """Of the loss that adds log-probabilities up: the others take their exponential, noise of bfloat16 included."""
    reports, norms = [], []
    for device in ("cpu", "cuda"):
        session = make_session(folder, device)
        session.create("train-a", LORA, seed=1)
        reports.append(compute(session, "train-a", "cross_entropy"))
        norms.append(session.optim_step("train-a", STEP))
    for ours, theirs in zip(reports[1].logprobs, reports[0].logprobs, strict=True):
        assert float((ours - theirs).abs().mean()) < 0.1
    assert reports[1].loss == pytest.approx(reports[0].loss, rel=0.02)
    assert norms[1] == pytest.approx(norms[0], rel=0.1)


@pytest.mark.parametrize("loss", ["importance_sampling", "ppo"])
def test_policy_losses_and_their_gradients_are_those_of_the_logprobs_here(folder: Path, loss: LossName) -> None:
    """By the definitions in float64. At one point the gradient is that of a weighted cross-entropy: the weights are
    d loss / d log p, so both ways have the same rounding in the model."""
    session = make_session(folder, "cuda")
    for name in ("train-a", "train-b"):
        session.create(name, LORA, seed=1)
    data = random_data(0)
    report = session.forward_backward("train-a", data, loss)
    expected, clipped, weighted = 0.0, 0, []
    for datum, logprobs in zip(data, report.logprobs, strict=True):
        assert datum.logprobs is not None
        assert datum.advantages is not None
        advantages = datum.advantages.double()
        ratio = (logprobs.double() - datum.logprobs.double()).exp()
        terms = ratio * advantages
        if loss == "ppo":
            bounded = ratio.clamp(0.8, 1.2) * advantages
            cut = bounded < terms
            clipped += int(cut.sum())
            expected -= float(torch.minimum(terms, bounded).sum())
            terms = terms.masked_fill(cut, 0)
        else:
            expected -= float(terms.sum())
        weighted.append(Datum(datum.tokens, datum.targets, terms.float()))
    assert report.loss == pytest.approx(expected, rel=1e-4, abs=1e-3)
    assert report.clipped == (clipped if loss == "ppo" else None)
    session.forward_backward("train-b", weighted, "cross_entropy")
    norms = [session.optim_step(name, STEP) for name in ("train-a", "train-b")]
    assert norms[0] == pytest.approx(norms[1], rel=0.01)


def test_models_take_turns_and_saved_weights_go_on(folder: Path, tmp_path: Path) -> None:
    session = make_session(folder, "cuda")
    for name in ("train-a", "train-b"):
        session.create(name, LORA, seed=1)
    for step in range(3):
        for name in ("train-a", "train-b"):
            compute(session, name, "cross_entropy", step)
        norms = [session.optim_step(name, STEP) for name in ("train-a", "train-b")]
        assert norms[1] == pytest.approx(norms[0], rel=0.02)
    before = session.forward("train-a", plain(random_data(9)), "cross_entropy")
    session.save("train-a", tmp_path / "weights", optimizer=True, files={})
    other = make_session(folder, "cuda")
    other.create("train-x", LORA, seed=2)
    assert other.load("train-x", tmp_path / "weights", optimizer=True) == 3
    after = other.forward("train-x", plain(random_data(9)), "cross_entropy")
    assert after.loss == pytest.approx(before.loss, rel=1e-3)
    compute(other, "train-x", "cross_entropy", 3)
    assert other.optim_step("train-x", STEP) > 0


def _all_that_is_left() -> list[Tensor]:
    """Of torch's own memory: tests before may have left pieces in which a call finds room."""
    held: list[Tensor] = []
    for size in (1 << i for i in range(30, 8, -1)):
        with suppress(torch.OutOfMemoryError):
            while True:
                held.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
    return held


def test_too_little_memory_is_told_and_the_model_goes_on(folder: Path) -> None:
    session = make_session(folder, "cuda")
    session.create("train-a", LORA, seed=1)
    compute(session, "train-a", "cross_entropy")
    _, total = torch.cuda.mem_get_info()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_allocated() / total)
    held = _all_that_is_left()
    try:
        with pytest.raises(OutOfMemoryError, match="too little memory for this call"):
            session.forward_backward("train-a", plain(random_data(0)) * 400, "cross_entropy")
    finally:
        held.clear()
        torch.cuda.set_per_process_memory_fraction(1.0)
    with pytest.raises(PlanError, match="too little memory"):
        session.optim_step("train-a", STEP)
    compute(session, "train-a", "cross_entropy")
    assert session.optim_step("train-a", STEP) > 0
