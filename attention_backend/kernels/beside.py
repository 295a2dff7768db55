"""Two launches that run at once: flash_decode_sm90 on some multiprocessors, which read nearly as fast as all of them,
flash_fwd_sm90 on the others.

The forward is launched last, may start as soon as all of the decode's blocks have, and draws its tiles: its blocks fill
the multiprocessors that the decode leaves, and take those that it gives back. Assumes that dispatch checked both."""

from torch import Tensor

from attention_backend.heuristics.decode import beside_blocks
from attention_backend.kernels import device, flash_decode, flash_fwd_sm90
from attention_backend.problem import AttentionArgs

Result = tuple[Tensor, Tensor]


def serves(few: AttentionArgs, many: AttentionArgs) -> bool:
    """Whether both launch, and the decode by its Hopper kernel."""
    rows = few.q.numel() > 0 and many.q.numel() > 0
    keys = few.k.numel() > 0 and few.block_table is not None and few.block_table.numel() > 0
    return rows and keys and _blocks(few) > 0 and flash_decode.serves_hopper(few)


def forward(few: AttentionArgs, many: AttentionArgs, blocks: int | None = None) -> tuple[Result, Result]:
    """Out and lse of each problem, as `flash_decode.forward` and `flash_fwd_sm90.forward` give them.

    `blocks`: of the decode, each on a multiprocessor of its own; by default BESIDE_SHARE of them.
    """
    decodes: list[Result] = []

    def decode() -> int:
        decodes.append(flash_decode.forward(few, blocks=_blocks(few) if blocks is None else blocks))
        return flash_decode.most_counters(few)

    out = flash_fwd_sm90.forward(many, beside=decode)
    return decodes[0], out


def _blocks(few: AttentionArgs) -> int:
    return beside_blocks(device.num_sms(few.q.device.index), few.num_kv_heads)
