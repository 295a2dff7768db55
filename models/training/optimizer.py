"""AdamW (Loshchilov and Hutter 2019) in float32, whatever the model computes in, with its state as named tensors.

A bfloat16 parameter has a float32 master: updates far below bfloat16's step would otherwise be rounded away, and
gradients of several micro-batches too. Knows no schedule and no file.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import Parameter

_BETAS, _EPS = (0.9, 0.999), 1e-8


class Optimizer:
    """Gradients arrive by `backward()`, any number of times a step."""

    def __init__(self, parameters: Mapping[str, Parameter], *, weight_decay: float, max_grad_norm: float) -> None:
        self._parameters = dict(parameters)
        self._max_grad_norm = max_grad_norm or math.inf
        self._masters = {name: _master(parameter) for name, parameter in parameters.items()}
        masters = list(self._masters.values())
        groups = [  # norms and biases are not decayed, as is usual
            {"params": [p for p in masters if p.dim() >= 2], "weight_decay": weight_decay},
            {"params": [p for p in masters if p.dim() < 2], "weight_decay": 0.0},
        ]
        self._adam = torch.optim.AdamW([g for g in groups if g["params"]], lr=0.0, betas=_BETAS, eps=_EPS, fused=True)
        for master in masters:
            self._adam.state[master] = {
                "step": torch.zeros((), dtype=torch.float32, device=master.device),
                "exp_avg": torch.zeros_like(master),
                "exp_avg_sq": torch.zeros_like(master),
            }

    @property
    def num_parameters(self) -> int:
        """Numbers that learn."""
        return sum(parameter.numel() for parameter in self._parameters.values())

    def step(self, learning_rate: float) -> float:
        """One update; returns the gradient's norm. When that is not finite, nothing is changed. The gradient is used
        up, also when this fails."""
        masters = list(self._masters.values())
        try:
            norm = float(torch.nn.utils.clip_grad_norm_(masters, self._max_grad_norm))
            if math.isfinite(norm):
                for group in self._adam.param_groups:
                    group["lr"] = learning_rate
                self._adam.step()
                self._copy_to_model()
        finally:
            self._adam.zero_grad(set_to_none=True)
        return norm

    def discard_gradients(self) -> None:
        self._adam.zero_grad(set_to_none=True)
        for parameter in self._parameters.values():
            parameter.grad = None

    def state_tensors(self) -> dict[str, Tensor]:
        """Everything that the next step depends on: weights, both moments and the number of updates."""
        tensors: dict[str, Tensor] = {}
        for name, master in self._masters.items():
            tensors[f"weight/{name}"] = master.detach()
            for part, value in self._adam.state[master].items():
                tensors[f"{part}/{name}"] = value
        return tensors

    @torch.no_grad()
    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Takes back what `state_tensors` gave, into the model too. Raises KeyError for a name that is missing."""
        for name, master in self._masters.items():
            master.copy_(tensors[f"weight/{name}"])
            for part, value in self._adam.state[master].items():
                value.copy_(tensors[f"{part}/{name}"])
        self._copy_to_model()

    @torch.no_grad()
    def _copy_to_model(self) -> None:
        for name, parameter in self._parameters.items():
            if self._masters[name] is not parameter:
                parameter.copy_(self._masters[name])


def _master(parameter: Parameter) -> Parameter:
    """The parameter itself, or a float32 copy that its gradients are added to as they arrive."""
    if parameter.dtype == torch.float32:
        return parameter
    master = Parameter(parameter.detach().float())

    def move(low: Tensor) -> None:
        assert low.grad is not None
        gradient = low.grad.float()
        master.grad = gradient if master.grad is None else master.grad.add_(gradient)
        low.grad = None

    parameter.register_post_accumulate_grad_hook(move)
    return master
