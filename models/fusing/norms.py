"""RMSNorm modules as fused calls, with the residual's sum where there is one. A module that is not plain stays one."""

from typing import Any

import torch
from torch import Tensor, nn

from attention_backend import layers
from models.fusing.families import Family, class_name
from models.fusing.plain import is_plain


class Norm:
    """One RMSNorm of a family."""

    def __init__(self, module: nn.Module, family: Family, dtype: torch.dtype) -> None:
        """`dtype` of the rows: a module whose weight has another one (kept in float32) is left alone."""
        self.module: Any = module
        self._known = class_name(module) == family.cls("RMSNorm") and self.module.weight.dtype == dtype
        self._unit_offset = family.unit_offset
        # Two names for one thing in transformers.
        eps: Any = getattr(module, "variance_epsilon", None) or getattr(module, "eps", 0.0)
        self._eps = float(eps)

    @property
    def fused(self) -> bool:
        return self._known and is_plain(self.module, type(self.module))

    @property
    def weight(self) -> Tensor:
        weight: Tensor = self.module.weight
        return weight

    @property
    def options(self) -> dict[str, Any]:
        return {"eps": self._eps, "unit_offset": self._unit_offset}

    def __call__(self, x: Tensor) -> Tensor:
        """x `[rows, width]`."""
        if self.fused:
            return layers.rms_norm(x, self.weight, self._eps, unit_offset=self._unit_offset)
        normed: Tensor = self.module(x)
        return normed

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm of x + residual, x + residual), each `[rows, width]`."""
        if self.fused:
            return layers.add_rms_norm(x, residual, self.weight, self._eps, unit_offset=self._unit_offset)
        total = residual + x
        return self.module(total), total
