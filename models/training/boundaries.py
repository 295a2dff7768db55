"""Where a model that learns may rest: between its decoder layers, forward and backward, and between uses of its head.

Knows the modules of a model, not why it rests.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from models.decoder_layers import decoder_layers
from models.training.pacing import Pacer
from models.training.trainable import TrainableModel

#: Pieces of work, each between two boundaries, that may be queued on a GPU: enough to keep it busy, and no more than
#: somebody who asks now may wait for. Else the host would be many layers ahead.
AHEAD = 2


class RunAhead:
    """Keeps the host from being more than so many boundaries ahead of a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._passed = [torch.cuda.Event(blocking=True) for _ in range(AHEAD)]  # a wait takes no processor
        self._turn = 0

    def boundary(self) -> None:
        event = self._passed[self._turn]
        self._turn = (self._turn + 1) % AHEAD
        event.synchronize()  # of as many boundaries ago; at once, before there were so many
        event.record(torch.cuda.current_stream(self._device))


def rest_between_layers(model: TrainableModel, pacer: Pacer) -> None:
    """From now on `pacer` hears of every forward that begins, and of every boundary in the model's forward and backward
    passes, for the model's life.

    A layer's boundary is its first part and not the layer: transformers recomputes a checkpointed layer by its
    `forward`, past the hooks of the layer itself.
    """
    device = model.device
    ahead = RunAhead(device) if device.type == "cuda" else None

    def wait_for_device() -> None:
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()

    def boundary() -> None:
        if ahead is not None:
            ahead.boundary()
        pacer.boundary(wait_for_device)

    def begin(*_: object) -> None:
        pacer.begin()

    model.decoder.register_forward_pre_hook(begin)
    for layer in decoder_layers(model.decoder):
        _watch(next(layer.children(), layer), boundary)
    _watch(model.head.linear, boundary)


def _watch(module: nn.Module, boundary: Callable[[], None]) -> None:
    """Before the module runs, which is also when it is recomputed, and when the gradient of its input is known."""

    def before(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        boundary()
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor) and value.requires_grad:
                value.register_hook(lambda _gradient: boundary())
                return

    module.register_forward_pre_hook(before, with_kwargs=True)
