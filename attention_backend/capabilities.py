"""A capability table's parts: its lines, the walk down it, and why tensor cores refuse a problem.

Shared by the tables of `dispatch` and `backward`. Knows what kernels can do, not how they do it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from attention_backend.errors import UnsupportedError
from attention_backend.heuristics.sm80 import HEAD_DIM_TILES
from attention_backend.kernels import device
from attention_backend.kernels.rows import begins_vectors
from attention_backend.problem import AttentionArgs

__all__ = [
    "HALVES",
    "MAX_HEAD_DIM",
    "Capability",
    "KernelSpec",
    "any_cuda",
    "describe",
    "first_that_serves",
    "tensor_cores",
]

HALVES = (torch.bfloat16, torch.float16)
MAX_HEAD_DIM = HEAD_DIM_TILES[-1]
MAX_GRID = 65535  # blocks in y and z


@dataclass(frozen=True, slots=True)
class Capability:
    """One line of the table: what a kernel serves, and why it refuses a problem."""

    kernel: str
    device: str  # torch device type
    dtypes: tuple[torch.dtype, ...]
    serves: str  # in words, for errors, `longwave doctor` and the documentation
    refusals: Callable[[AttentionArgs], Iterator[str]]

    def refuses(self, args: AttentionArgs) -> str | None:
        """The first reason why this kernel cannot serve the problem, or None."""
        if args.q.device.type != self.device:
            return f"it runs on {self.device}, the tensors are on {args.q.device.type}"
        if args.dtype not in self.dtypes:
            return f"it takes {', '.join(str(d).removeprefix('torch.') for d in self.dtypes)}, not {args.dtype}"
        return next(self.refusals(args), None)


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """The kernel that serves a problem, and where."""

    kernel: str
    arch: str  # "cpu" or an architecture of attention_backend.jit.ARCHS

    def __str__(self) -> str:
        return self.kernel if self.arch == "cpu" else f"{self.kernel}[{self.arch}]"


def first_that_serves(table: tuple[Capability, ...], args: AttentionArgs, what: str) -> KernelSpec:
    """The first line of a table that does not refuse. `what` names them in the error of all refusals."""
    reasons = []
    for line in table:
        reason = line.refuses(args)
        if reason is None:
            return KernelSpec(line.kernel, _arch(args))
        reasons.append(reason)
    refusals = (
        f"  {line.kernel} ({line.device}) serves {line.serves}\n    but {reason}"
        for line, reason in zip(table, reasons, strict=True)
    )
    raise UnsupportedError(f"no {what} serves this call:\n" + "\n".join(refusals))


def _arch(args: AttentionArgs) -> str:
    return device.arch(args.q.device.index) if args.q.is_cuda else "cpu"


def describe(table: tuple[Capability, ...]) -> Iterator[str]:
    """A table in words, a line a kernel."""
    for line in table:
        dtypes = ", ".join(str(d).removeprefix("torch.") for d in line.dtypes)
        yield f"{line.kernel} ({line.device}; {dtypes}): {line.serves}"


def any_cuda(args: AttentionArgs) -> Iterator[str]:
    """Why kernels on a GPU refuse a problem, whatever they do."""
    head_dim, head_dim_v = args.head_dim, args.head_dim_v
    if head_dim > MAX_HEAD_DIM or head_dim_v > MAX_HEAD_DIM:
        yield f"head_dim {head_dim}/{head_dim_v} is above {MAX_HEAD_DIM}"
    if args.batch > MAX_GRID or args.num_heads > MAX_GRID:
        yield f"batch {args.batch} or num_heads {args.num_heads} is above {MAX_GRID}"
    if args.bias is not None and args.bias.dtype not in (torch.float32, args.dtype):
        yield f"the bias is {args.bias.dtype}, neither float32 nor {args.dtype}"


def tensor_cores(args: AttentionArgs) -> Iterator[str]:
    """Why kernels on tensor cores refuse a problem, whatever they do."""
    head_dim, head_dim_v = args.head_dim, args.head_dim_v
    if head_dim % 8 or head_dim_v % 8 or head_dim < 16 or head_dim_v < 16:
        yield f"head_dim {head_dim}/{head_dim_v} is not a multiple of 8 from 16 to {MAX_HEAD_DIM}"
    if args.dtype == torch.bfloat16 and device.capability(args.q.device.index) < (8, 0):
        yield "this GPU has no bfloat16 (it needs sm_80): use float16"
    for name, x in (("q", args.q), ("k", args.k), ("v", args.v)):
        if not begins_vectors(x, 8):
            yield f"{name} is not 16-byte aligned: strides {x.stride()} in elements"
    yield from any_cuda(args)
