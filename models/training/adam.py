"""AdamW whose numbers come with every step, on gradients that came with any number of calls before it."""

import math

from models.training.calls import AdamParams
from models.training.optimizer import Optimizer


class StepwiseAdam(Optimizer):
    """`Optimizer`'s state, masters and accumulation."""

    def step_with(self, params: AdamParams) -> float:
        """One update; the gradient's norm before clipping. When that is not finite, nothing is changed."""
        self._max_grad_norm = params.grad_clip_norm or math.inf
        for group in self._adam.param_groups:
            group["betas"] = (params.beta1, params.beta2)
            group["eps"] = params.eps
            group["weight_decay"] = params.weight_decay
        return self.step(params.learning_rate)
