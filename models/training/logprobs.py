"""Hidden states -> log-probabilities of given tokens, a chunk of rows at a time: [tokens, vocab] never exists whole.

Knows the head of a model, not how the hidden states came about.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

Head = Callable[[Tensor], Tensor]  # [rows, hidden] -> logits [rows, vocab]

#: Logits of one chunk: 512 MiB as float32, and about four times that while their gradient is taken.
CHUNK_ELEMENTS = 2**27


def chunk_rows(vocab_size: int) -> int:
    return max(1, CHUNK_ELEMENTS // vocab_size)


def token_logprobs(
    head: Head, hidden: Tensor, labels: Tensor, rows: int, *, head_learns: bool
) -> tuple[Tensor, Tensor]:
    """hidden `[n, hidden_size]`, labels `[n]` -> log p(label), float32 `[n]`; whether it is the likeliest, bool `[n]`.

    `rows`: of one chunk. `head_learns`: the head has parameters that want a gradient, so its chunks are computed again
    in the backward pass; a frozen head's gradient is taken on the way forward.
    """
    if not labels.numel():
        raise ValueError("no row is asked for")
    if torch.is_grad_enabled() and hidden.requires_grad and not head_learns:
        logprobs, correct = _FrozenHead.apply(hidden, labels, head, rows)
        return logprobs, correct
    pieces = [
        checkpoint(_logprobs, head, chunk, wanted, use_reentrant=False, preserve_rng_state=False)
        if torch.is_grad_enabled()
        else _logprobs(head, chunk, wanted)
        for chunk, wanted in zip(hidden.split(rows), labels.split(rows), strict=True)
    ]
    return torch.cat([piece[0] for piece in pieces]), torch.cat([piece[1] for piece in pieces])


def _logprobs(head: Head, hidden: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    logits = head(hidden).float()
    logprobs = logits.gather(1, labels[:, None])[:, 0] - logits.logsumexp(1)
    return logprobs, logits.detach().argmax(1) == labels


class _FrozenHead(torch.autograd.Function):
    """A row's log-probability depends on that row alone, so its gradient `[n, hidden_size]` is kept, not the logits."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, labels: Tensor, head: Head, rows: int) -> tuple[Tensor, Tensor]:
        logprobs = hidden.new_empty(hidden.shape[0], dtype=torch.float32)
        correct = torch.empty_like(labels, dtype=torch.bool)
        gradient = torch.empty_like(hidden)
        for start in range(0, hidden.shape[0], rows):
            part = slice(start, start + rows)
            with torch.enable_grad():
                chunk = hidden[part].detach().requires_grad_()
                values, hits = _logprobs(head, chunk, labels[part])
                (gradient[part],) = torch.autograd.grad(values.sum(), chunk)
            logprobs[part], correct[part] = values.detach(), hits
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(correct)
        return logprobs, correct

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor, _grad_correct: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        # In place: beside a very long sequence there is no room for another one. A second backward is refused by torch.
        return gradient.mul_(grad_logprobs[:, None]), None, None, None
