"""Adapters resident beside a model's linear layers, and which rows of a step use which. Knows no requests.

y += ((x A^T) masked) B^T, where A and B stack all slots: two dense products for the whole batch, whatever mixture of
adapters it is. The mask leaves each row its own slot's columns (LoRA: Hu et al. 2021; many at once: Chen et al. 2023,
Punica, where each row gathers its factors instead).
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from models.adapters.folder import open_folder
from models.adapters.linears import LinearLayer
from models.adapters.weights import AdapterWeights, max_weight_bytes, read_weights
from models.batch import AdapterFacts


@dataclass(frozen=True, slots=True)
class LoraLimits:
    """vLLM's names: adapters in one step, and the largest rank of any."""

    max_loras: int
    max_lora_rank: int


class _ActiveRows:
    """What all layers of a step share."""

    others: Tensor | None = None  # bool [num_tokens, columns]: true where the column is not of the row's slot


class _AdaptedForward:
    """Stands in for a layer's `forward`."""

    def __init__(
        self, layer: LinearLayer, num_columns: int, active: _ActiveRows, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.a = torch.zeros(num_columns, layer.in_features, dtype=dtype, device=device)
        self.b = torch.zeros(num_columns, layer.out_features, dtype=dtype, device=device)  # B^T
        self.slots: set[int] = set()  # whose columns are not all zero
        self._active = active
        self._base: Callable[[Tensor], Tensor] = layer.module.forward

    @property
    def is_idle(self) -> bool:
        """Whether the layer alone says it all."""
        return self._active.others is None or not self.slots

    def __call__(self, x: Tensor) -> Tensor:
        y = self._base(x)
        self.add_to(y, x)
        return y

    def add_to(self, y: Tensor, x: Tensor) -> None:
        """y `[..., out_features]`, what the layer alone gives for x, in place; it may be a part of a wider tensor."""
        others = self._active.others
        if others is None or not self.slots:
            return
        columns = others.shape[1]
        low = torch.nn.functional.linear(x.reshape(-1, x.shape[-1]), self.a[:columns])
        # Filled, not multiplied: what overflows in one adapter's columns is no NaN in another row.
        low.masked_fill_(others, 0)
        y.view(-1, y.shape[-1]).addmm_(low, self.b[:columns])


class AdapterSlots:
    """Replaces `forward` of every linear layer, per instance; `remove` gives the model back as it was.

    Rows without an adapter get what the model alone gives them: their masked products are sums of zeros.
    """

    def __init__(
        self,
        linears: Mapping[str, LinearLayer],
        limits: LoraLimits,
        *,
        max_num_batched_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.limits = limits
        self._linears = linears
        self._dtype = dtype
        self._device = device
        num_columns = limits.max_loras * limits.max_lora_rank
        self._active = _ActiveRows()
        # Fixed memory, so that a captured step finds the next one's rows in the same place.
        self._others = torch.zeros(max_num_batched_tokens, num_columns, dtype=torch.bool, device=device)
        columns = torch.arange(num_columns, dtype=torch.int32, device=device)
        self._slot_of_column = columns.div(limits.max_lora_rank, rounding_mode="floor")
        self._forwards: dict[str, _AdaptedForward] = {}
        for name, layer in linears.items():
            forward = _AdaptedForward(layer, num_columns, self._active, dtype, device)
            self._forwards[name] = forward
            layer.module.__dict__["forward"] = forward  # found before the class's; deleting it is all it takes to undo
        self._on_host: dict[int, AdapterWeights] = {}

    def remove(self) -> None:
        for layer in self._linears.values():
            layer.module.__dict__.pop("forward", None)

    def read(self, adapter_id: int, folder: str, within: str | None = None) -> AdapterFacts:
        """Reads a PEFT folder into host memory, under a number of the caller's. Raises AdapterError, and has then kept
        nothing. Touches nothing that a running step reads: it may run in another thread."""
        rank = self.limits.max_lora_rank
        files = open_folder(folder, max_weight_bytes(self._linears, rank), within)
        weights = read_weights(
            files, self._linears, max_rank=rank, dtype=self._dtype, pin_memory=self._device.type == "cuda"
        )
        self._on_host[adapter_id] = weights
        return weights.facts

    def drop(self, adapter_id: int) -> None:
        """Forgets what `read` kept. Slots that hold a copy keep it until they are filled again."""
        self._on_host.pop(adapter_id, None)

    def place(self, adapter_id: int, slot: int) -> None:
        """Copies an adapter that was read into a slot, in the order of the current stream: steps before see the slot as
        it was. Raises KeyError for a number that nothing was read under."""
        layers = self._on_host[adapter_id].layers
        first = slot * self.limits.max_lora_rank
        for name, forward in self._forwards.items():
            factors = layers.get(name)
            for stack, factor in zip((forward.a, forward.b), factors or (None, None), strict=True):
                columns = stack[first : first + self.limits.max_lora_rank]
                rank = 0 if factor is None else len(factor)
                if factor is not None:
                    columns[:rank].copy_(factor, non_blocking=True)
                if slot in forward.slots:
                    columns[rank:].zero_()
            if factors is None:
                forward.slots.discard(slot)
            else:
                forward.slots.add(slot)

    def select(self, rows: Tensor | None, num_slots: int) -> None:
        """For the steps from here on. `rows`: int32 `[num_tokens]`, each row's slot or -1, all below `num_slots`; None:
        no row has an adapter, and nothing is computed."""
        if rows is None:
            self._active.others = None
            return
        columns = num_slots * self.limits.max_lora_rank
        others = self._others[: len(rows), :columns]
        torch.ne(rows[:, None], self._slot_of_column[:columns], out=others)
        self._active.others = others

    @contextmanager
    def rehearsing(self) -> Iterator[None]:
        """Inside, the last slot counts as adapting every layer, so that a rehearsal costs what the worst step costs."""
        last = self.limits.max_loras - 1
        idle = [forward for forward in self._forwards.values() if last not in forward.slots]
        for forward in idle:
            forward.slots.add(last)
        try:
            yield
        finally:
            for forward in idle:
                forward.slots.discard(last)


def memory_bytes(linears: Mapping[str, LinearLayer], limits: LoraLimits, dtype: torch.dtype) -> int:
    """What the slots of all layers take."""
    columns = limits.max_loras * limits.max_lora_rank * dtype.itemsize
    return sum(columns * (layer.in_features + layer.out_features) for layer in linears.values())
