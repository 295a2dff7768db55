"""Memory that ends in the middle of a forward or a backward: it is told, and the model goes on as if nothing had been.

torch of today closes a checkpointed layer whose forward fails; torch 2.11 does not, and both are run here.
"""

import gc
import re
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers.modeling_utils
from torch import Tensor
from torch.utils import checkpoint as torch_checkpoint
from training_runs import Reports, random_examples, tiny_plan
from transformers.models.llama.modeling_llama import LlamaMLP

from models import registry
from models.training import (
    AdamParams,
    Datum,
    LoraSettings,
    Outcome,
    OutOfMemoryError,
    PlanError,
    SessionSettings,
    Trainer,
    TrainingSession,
)
from models.training.out_of_memory import enough_memory, leave_spare, room_for_training

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT's own

LORA, STEP = LoraSettings(rank=4, alpha=8), AdamParams(learning_rate=1e-2)


def checkpoint_of_torch_2_11(
    function: Callable[..., Any], *args: Any, context_fn: Any = torch_checkpoint.noop_context_fn, **_: Any
) -> Any:
    """torch.utils.checkpoint.checkpoint(use_reentrant=False) as it was: nothing ends the generator when layers fail."""
    generator = torch_checkpoint._checkpoint_without_reentrant_generator(
        function, True, context_fn, "default", False, True, *args
    )
    next(generator)
    result = function(*args)
    with pytest.raises(StopIteration):
        next(generator)
    return result


@pytest.fixture(params=["torch as installed", "torch 2.11"], autouse=True)
def layer_checkpoint(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "torch 2.11":
        monkeypatch.setattr(transformers.modeling_utils, "checkpoint", checkpoint_of_torch_2_11)


class Memory:
    """Ends at one of the last layer's calls, forwards and recomputations counted together."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ends_at: int) -> None:
        self.calls, self.ends_at = 0, ends_at
        self.inputs: list[weakref.ref[Tensor]] = []
        forward = LlamaMLP.forward

        def limited(mlp: Any, x: Tensor) -> Tensor:
            if mlp.last:
                self.calls += 1
                self.inputs.append(weakref.ref(x))
                if self.calls == self.ends_at:
                    raise torch.OutOfMemoryError("CUDA out of memory.")
            return forward(mlp, x)

        monkeypatch.setattr(LlamaMLP, "forward", limited)


def mark_last_layer(model: Any) -> None:
    for number, layer in enumerate(model.model.layers):
        layer.mlp.last = number == len(model.model.layers) - 1


def result(outcome: Outcome) -> bytes:
    assert outcome.result is not None
    return next(outcome.result.glob("*.safetensors")).read_bytes()


def data(*lengths: int) -> list[Datum]:
    source = torch.Generator().manual_seed(sum(lengths))
    every = [torch.randint(3, 100, (length + 1,), generator=source) for length in lengths]
    return [Datum(ids[:-1], ids[1:]) for ids in every]


@pytest.fixture
def session(tiny_folder: Path) -> TrainingSession:
    settings = SessionSettings(str(tiny_folder), max_length=64, micro_batch_tokens=48)
    session = TrainingSession(registry.resolve(str(tiny_folder)), settings, "cpu")
    mark_last_layer(session._base.base)
    for name in ("train-a", "train-b"):
        session.create(name, LORA, seed=1)
    return session


@pytest.mark.parametrize("ends_at", [1, 2, 3, 4], ids=["forward", "backward", "second forward", "second backward"])
def test_a_call_that_fails_leaves_nothing_behind(
    session: TrainingSession, monkeypatch: pytest.MonkeyPatch, ends_at: int
) -> None:
    memory = Memory(monkeypatch, ends_at)
    with pytest.raises(OutOfMemoryError, match="too little memory for this call") as told:
        session.forward_backward("train-a", data(40, 40), "cross_entropy")
    assert memory.calls == ends_at
    assert torch._C._len_torch_dispatch_stack() == 0
    gc.collect()
    assert not [x for x in memory.inputs if x() is not None]  # the graph is gone, although `told` still has the error
    with pytest.raises(PlanError, match="too little memory"):
        session.optim_step("train-a", STEP)

    for lengths in ((7, 25, 13), (31, 45)):  # other shapes: what was saved before must not be taken for theirs
        reports = [session.forward_backward(name, data(*lengths), "cross_entropy") for name in ("train-a", "train-b")]
        assert reports[0].loss == reports[1].loss
    assert session.optim_step("train-a", STEP) == session.optim_step("train-b", STEP)
    assert told.value.__cause__ is not None


def test_a_run_that_fails_is_repeated_with_the_same_bits(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LlamaMLP, "last", True, raising=False)
    plan, examples = tiny_plan(tiny_folder), random_examples(10)
    memory = Memory(monkeypatch, ends_at=0)
    alone = Trainer(plan, examples, None, tmp_path / "alone", "cpu").run(Reports())
    middle = memory.calls // 2
    told = []
    for ends_at in range(middle, middle + 4):  # forwards and backwards
        memory.calls, memory.ends_at = 0, ends_at
        trainer = Trainer(plan, examples, None, tmp_path / f"run-{ends_at}", "cpu")
        with pytest.raises(OutOfMemoryError, match="lower micro_batch_tokens") as error:
            trainer.run(Reports())
        told.append(error.value)  # and with it, its frames
        tokens = r"\d+ tokens at once \(the longest sequence has \d+\)"
        assert re.match(rf"{tokens} did not fit into the \d+\.\d\d GiB of cpu", str(error.value.what))
        assert torch._C._len_torch_dispatch_stack() == 0
        again = trainer.run(Reports())
        assert result(again) == result(alone)


def test_a_step_that_finds_no_memory_is_told_and_has_used_the_gradient_up(
    session: TrainingSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    session.forward_backward("train-a", data(40, 40), "cross_entropy")
    with monkeypatch.context() as patch:
        patch.setattr(torch.optim.AdamW, "step", no_room)
        with pytest.raises(OutOfMemoryError, match="too little memory for this step"):
            session.optim_step("train-a", STEP)
    with pytest.raises(PlanError, match="there was no forward_backward"):
        session.optim_step("train-a", STEP)
    norms = []
    for name in ("train-a", "train-b"):
        session.forward_backward(name, data(31, 45), "cross_entropy")
        norms.append(session.optim_step(name, STEP))
    assert norms[0] == norms[1]


@pytest.mark.parametrize(("owner", "place"), [(torch.nn.init, "kaiming_uniform_"), (torch, "zeros_like")])
def test_a_model_that_finds_no_room_is_not_there(
    session: TrainingSession, monkeypatch: pytest.MonkeyPatch, owner: Any, place: str
) -> None:
    before = sorted(name for name, _ in session._peft.named_parameters())
    calls = iter(range(100))
    made = getattr(owner, place)

    def limited(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == 5:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return made(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(owner, place, limited)
        with pytest.raises(OutOfMemoryError, match="too little memory for another model"):
            session.create("train-c", LORA, seed=1)
    assert sorted(name for name, _ in session._peft.named_parameters()) == before
    assert session.create("train-c", LORA, seed=1) == session.create("train-d", LORA, seed=1)
    losses = {session.forward_backward(name, data(9, 20), "cross_entropy").loss for name in ("train-a", "train-c")}
    assert len(losses) == 1


def test_what_torch_says_of_a_cpu_without_memory_is_too_little_memory() -> None:
    with pytest.raises(OutOfMemoryError, match="lower it"), enough_memory("lower it"):
        torch.empty(1 << 60)


@pytest.mark.parametrize(
    "said",
    [
        "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call",
        "CUDA_ERROR_OUT_OF_MEMORY: out of memory",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    ],
)
def test_what_a_gpu_without_memory_says_past_torch_s_allocator_is_too_little_memory(said: str) -> None:
    """A context, a library's handle, a kernel that is loaded."""
    with pytest.raises(OutOfMemoryError, match="lower it"), enough_memory("lower it"):
        raise RuntimeError(said)
    with pytest.raises(RuntimeError, match="illegal memory"), enough_memory("lower it"):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


def test_a_base_model_that_does_not_fit_is_named(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr("models.training.trainable.load_for_training", no_room)
    with pytest.raises(OutOfMemoryError) as told:
        Trainer(tiny_plan(tiny_folder), random_examples(2), None, tmp_path, "cpu").run(Reports())
    assert re.match(r"the base model did not fit into the \d+\.\d\d GiB of cpu", str(told.value.what))


def test_a_gpu_that_cannot_even_be_asked_has_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> Any:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch.cuda, "mem_get_info", full)
    assert room_for_training(torch.device("cuda")) is None


def test_of_a_gpu_so_much_stays_free_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[tuple[float, Any]] = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (600, 1000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _device: 50)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *given: limits.append(given))
    for spare in (0, 100, 2000):
        leave_spare(torch.device("cuda"), spare)
    leave_spare(torch.device("cpu"), 100)
    assert limits == [(0.55, None), (0.0, None)]
    assert room_for_training(torch.device("cuda"), 100) == 550
