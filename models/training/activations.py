"""What a forward keeps for its backward: measured, and whether it is little enough to be kept. Knows no loss."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

#: Of one forward, so much is kept rather than computed again: that costs a third more, and on a CPU twice as much.
KEPT_BYTES = 2**30


def kept_bytes(forward: Callable[[], object], weights: Iterable[Tensor]) -> int:
    """Bytes that autograd holds when `forward` has run, `weights` and what shares their storage apart."""
    known = {weight.untyped_storage().data_ptr() for weight in weights}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = forward()  # alive until all is counted: no address is used twice
    del result
    return sum(kept.values())


class Checkpointing:
    """The layers of a model that compute themselves again in the backward pass, or keep what it needs."""

    def __init__(self, model: nn.Module) -> None:
        """Of a model that does it now."""
        self._modules = [module for module in model.modules() if getattr(module, "gradient_checkpointing", False)]
        self._bytes_per_token: float | None = None  # None: unknown, so nothing is kept

    def measure(self, forward: Callable[[], object], num_tokens: int, weights: Iterable[Tensor]) -> None:
        """Learns from a small forward what larger ones would keep."""
        self._switch(on=False)
        self._bytes_per_token = kept_bytes(forward, weights) / num_tokens

    def choose(self, num_tokens: int) -> None:
        """For the next forward. The results are the same bits either way."""
        known = self._bytes_per_token
        self._switch(on=known is None or num_tokens * known > KEPT_BYTES)

    def _switch(self, *, on: bool) -> None:
        for module in self._modules:
            module.gradient_checkpointing = on  # type: ignore[assignment]
