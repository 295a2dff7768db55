"""One optimiser step of each contender on the same weights, and how long it takes. Knows no command line."""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from models.attention_sites import attention_implementation
from models.training import Example, objectives, packing
from models.training.logprobs import chunk_rows, token_logprobs
from models.training.optimizer import Optimizer
from models.training.out_of_memory import enough_memory
from models.training.trainable import TrainableModel, enable_checkpointing

LEARNING_RATE = 1e-4
#: Contenders compute the same function: their first losses differ by rounding only.
LOSS_TOLERANCE = 0.02
Loss = Callable[[TrainableModel, Example], Tensor]
Results = dict[str, dict[str, Any]]  # by contender
Told = Callable[[str, Results], None]  # what has just happened, and all results so far


@dataclass(frozen=True, slots=True)
class Contender:
    """How a step gets its loss, and within what."""

    loss: Loss  # the mean over the learnt tokens
    attention: str  # transformers' name
    backend: SDPBackend | None = None
    recompute_attention: bool = True  # as checkpointing does when nothing is said

    @contextmanager
    def active(self, model: TrainableModel) -> Iterator[None]:
        enable_checkpointing(model.base, recompute_attention=self.recompute_attention)
        chosen: AbstractContextManager[Any] = nullcontext() if self.backend is None else sdpa_kernel(self.backend)
        with attention_implementation(model.base, self.attention), chosen:
            yield


@dataclass(frozen=True, slots=True)
class Step:
    """What one step took."""

    seconds: float
    loss: float
    peak_bytes: int  # of the allocator, weights included; 0 on a CPU


def packed_loss(model: TrainableModel, example: Example) -> Tensor:
    """The trainer's own."""
    sums = objectives.supervised(model, packing.build([example], (0,), model.device))
    return sums.loss / example.learnt


def model_s_loss(model: TrainableModel, example: Example) -> Tensor:
    """As in any loop with transformers: labels in, loss out."""
    assert model.adapter is not None
    ids = torch.tensor([example.tokens]).to(model.device)
    loss: Tensor = model.adapter(input_ids=ids, labels=ids, use_cache=False).loss
    return loss


def chunked_loss(model: TrainableModel, example: Example) -> Tensor:
    """Our loss on transformers' attention."""
    ids = torch.tensor([example.tokens]).to(model.device)
    hidden: Tensor = model.decoder(input_ids=ids, use_cache=False).last_hidden_state[0, :-1]
    rows = chunk_rows(model.config.vocab_size)
    logprobs, _ = token_logprobs(model.head, hidden, ids[0, 1:], rows, head_learns=False)
    return -logprobs.mean()


def contenders(model: TrainableModel) -> dict[str, Contender]:
    backends: dict[str, SDPBackend | None] = {"torch": None}
    if model.device.type == "cuda":
        backends = {"torch cuDNN": SDPBackend.CUDNN_ATTENTION, "torch FA2": SDPBackend.FLASH_ATTENTION}
    racers = {
        "longwave": Contender(packed_loss, "longwave", recompute_attention=False),
        "longwave, attention recomputed": Contender(packed_loss, "longwave"),
    }
    for name, backend in backends.items():
        racers[name] = Contender(model_s_loss, "sdpa", backend)
        racers[f"{name} + chunks"] = Contender(chunked_loss, "sdpa", backend)
    return racers


def random_example(tokens: int, vocab_size: int) -> Example:
    ids = torch.randint(3, vocab_size, (tokens,), generator=torch.Generator().manual_seed(0))
    return Example(tuple(ids.tolist()), (True,) * tokens)


def one_step(model: TrainableModel, racer: Contender, example: Example, optimizer: Optimizer) -> Step:
    """Raises OutOfMemoryError; the gradients are gone then, and the graph."""
    cuda = model.device.type == "cuda"
    if cuda:
        torch.cuda.synchronize(model.device)
        torch.cuda.reset_peak_memory_stats(model.device)
    begin = time.perf_counter()
    try:
        with enough_memory(f"{len(example)} tokens do not fit"):
            with racer.active(model):
                loss = racer.loss(model, example)
                loss.backward()
            optimizer.step(LEARNING_RATE)
    finally:
        optimizer.discard_gradients()
    if cuda:
        torch.cuda.synchronize(model.device)
    peak = torch.cuda.max_memory_allocated(model.device) if cuda else 0
    return Step(time.perf_counter() - begin, float(loss.detach()), peak)


def step_times(
    model: TrainableModel, racers: dict[str, Contender], tokens: int, rounds: int, seconds: float, told: Told
) -> Results:
    """A warm-up step of each from the same weights, then up to `rounds` of each in turn; medians. After the first, no
    round begins that would not end within `seconds` of the start. `told` hears of every step, with all results so far.

    Raises SystemExit when the first losses differ by more than rounding.
    """
    example = random_example(tokens, model.config.vocab_size)
    optimizer = Optimizer(model.parameters, weight_decay=0.0, max_grad_norm=1.0)
    results: Results = {}
    begin = time.perf_counter()
    for name, racer in racers.items():
        start = {key: tensor.clone() for key, tensor in optimizer.state_tensors().items()}
        try:
            first = one_step(model, racer, example, optimizer)
        except RuntimeError as error:
            results[name] = {"failed": f"{type(error).__name__}: {error}"[:300]}
        else:
            results[name] = {"first_loss": first.loss, "first_step_s": round(first.seconds, 4)}
        optimizer.load_state_tensors(start)  # the next one starts from the same weights
        if model.device.type == "cuda":
            torch.cuda.empty_cache()
        told(f"{name}: {results[name]}", results)
    losses = [row["first_loss"] for row in results.values() if "first_loss" in row]
    if losses and max(losses) - min(losses) > LOSS_TOLERANCE * max(losses):
        raise SystemExit(f"the contenders do not compute the same loss: {results}")
    steps: dict[str, list[Step]] = {name: [] for name, row in results.items() if "first_loss" in row}
    for number in range(1, rounds + 1):
        began = time.perf_counter()
        for name, taken in steps.items():
            taken.append(one_step(model, racers[name], example, optimizer))
            results[name] |= _summary(taken, tokens)
            told(f"{name}: round {number}, {taken[-1].seconds:.2f} s", results)
        now = time.perf_counter()
        if now + (now - began) > begin + seconds:
            break
    return results


def _summary(taken: list[Step], tokens: int) -> dict[str, Any]:
    return {
        "tokens_per_s": round(tokens / statistics.median(step.seconds for step in taken), 1),
        "step_s": [round(step.seconds, 4) for step in taken],
        "peak_gib": round(max(step.peak_bytes for step in taken) / 2**30, 2),
    }
