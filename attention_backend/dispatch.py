"""(device, dtype, head_dim, phase, options) -> the implementation that serves: a capability table, never a fallback.

Knows what each implementation can do; knows no tensor contents and waits for no device.
"""

from collections import Counter
from dataclasses import dataclass
from importlib import import_module

import torch
from torch import Tensor

from attention_backend.problem import UNBOUNDED, AttentionArgs

ALL_OPTIONS = frozenset(
    {
        *("varlen", "paged", "leftpad", "mask_desc", "key_mask", "bias"),
        *("alibi", "sinks", "window", "chunk", "softcap", "head_dim_v"),
    }
)


class UnsupportedError(NotImplementedError):
    """No implementation serves this combination; the message lists what is served."""


@dataclass(frozen=True, slots=True)
class Capability:
    """One row of the table: what one implementation serves."""

    name: str
    module: str  # has forward(args) -> (out, lse); imported at first use
    device: str  # torch device type
    dtypes: frozenset[torch.dtype]
    head_dims: range  # of q and k, and of v
    options: frozenset[str]
    phases: frozenset[str]  # "decode": one query row a sequence; "prefill": more

    def __str__(self) -> str:
        dtypes = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in self.dtypes))
        dims = f"head_dim {self.head_dims.start} to {self.head_dims[-1]} in steps of {self.head_dims.step}"
        return (
            f"{self.name}: {self.device}, {dtypes}; {dims}; {' and '.join(sorted(self.phases))}; "
            f"options {', '.join(sorted(self.options))}"
        )


KernelSpec = Capability

TABLE: tuple[Capability, ...] = (
    Capability(
        name="cpu_reference",
        module="attention_backend.reference.cpu",
        device="cpu",
        dtypes=frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64}),
        head_dims=range(1, 1025),
        options=ALL_OPTIONS,
        phases=frozenset({"decode", "prefill"}),
    ),
)

_calls: Counter[str] = Counter()


def options_of(args: AttentionArgs) -> frozenset[str]:
    """The names of the options that this problem uses."""
    used = {
        "varlen": args.cu_seqlens_q is not None or args.cu_seqlens_k is not None,
        "paged": args.block_table is not None,
        "leftpad": args.leftpad_k is not None,
        "mask_desc": args.mask_desc is not None,
        "key_mask": args.key_mask is not None,
        "bias": args.bias is not None,
        "alibi": args.alibi_slopes is not None,
        "sinks": args.sinks is not None,
        "window": args.window_left != UNBOUNDED or args.window_right > 0,
        "chunk": args.chunk_size > 0,
        "softcap": args.softcap != 0.0,
        "head_dim_v": args.head_dim_v != args.head_dim,
    }
    return frozenset(name for name, present in used.items() if present)


def phase_of(args: AttentionArgs) -> str:
    return "decode" if args.seqlen_q == 1 else "prefill"


def select(args: AttentionArgs) -> KernelSpec:
    """The row that will serve. Raises UnsupportedError, whose message lists what is served."""
    device, options, phase = args.q.device.type, options_of(args), phase_of(args)
    for row in TABLE:
        if (
            row.device == device
            and args.dtype in row.dtypes
            and args.head_dim in row.head_dims
            and args.head_dim_v in row.head_dims
            and options <= row.options
            and phase in row.phases
        ):
            return row
    served = "\n".join(f"  {row}" for row in TABLE)
    raise UnsupportedError(
        f"no attention for {device}, {str(args.dtype).removeprefix('torch.')}, head_dim {args.head_dim}, "
        f"head_dim_v {args.head_dim_v}, {phase}, options {', '.join(sorted(options)) or 'none'}. Served:\n{served}"
    )


def run(args: AttentionArgs) -> tuple[Tensor, Tensor]:
    """Selects, counts and runs. Returns out `args.out_shape` and lse `args.lse_shape`."""
    row = select(args)
    _calls[row.name] += 1
    out, lse = import_module(row.module).forward(args)
    return out, lse


def calls() -> dict[str, int]:
    """How often each implementation ran in this process."""
    return dict(_calls)
