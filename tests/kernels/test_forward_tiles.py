"""Tiles of the Hopper forward that no call selects, by the same rule as the default ones."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from attention_backend.heuristics.sm90 import HopperConfig
from attention_backend.kernels import flash_fwd_sm90
from attention_backend.kernels.hopper_variants import HopperOptions, offered_configs
from attention_backend.kernels.variants import Options

from .error_rule import check, run
from .problems import Case, build


def others(dim: int) -> list[tuple[int, HopperConfig]]:
    """Those of a head_dim that are never the default."""
    plain = HopperOptions(Options(torch.bfloat16, dim, dim))
    defaults = {offered_configs(plain._replace(short=short))[0] for short in (False, True)}
    return [(dim, config) for config in offered_configs(plain) if config not in defaults]


OTHERS = [x for dim in (64, 128, 256) for x in others(dim)]
LENGTHS = (1, 63, 64, 65, 127, 129, 257, 331, 512)
EVEN = [
    Case(n, n, batch=2, heads=4, kv_heads=2 if n % 2 else 4, mask=mask, dtype="fp16" if n % 3 == 0 else "bf16")
    for n in LENGTHS
    for mask in ("causal", "full")
]
#: More keys than rows, more rows than keys, ends and gaps of masks within a warpgroup's rows, rows that see nothing.
UNEVEN = [
    Case(70, 331, batch=2, heads=4, kv_heads=2),
    Case(331, 70, batch=2, heads=4, kv_heads=1),
    Case(192, 320, batch=2, mask="full"),
    *(Case(300, 350, heads=2, kv_heads=1, layout="varlen", mask=m) for m in ("causal", "sliding", "window", "chunk")),
    *(Case(300, 350, heads=2, kv_heads=1, mask=m, sinks=True) for m in ("lookahead", "sliding", "chunk")),
    Case(200, 260, keys="seqused", heads=2),
    Case(260, 260, keys="leftpad", heads=2),
]


@pytest.mark.gpu
@pytest.mark.parametrize("case", EVEN + UNEVEN, ids=str)
@pytest.mark.parametrize(("dim", "config"), OTHERS, ids=str)
def test_error_rule(dim: int, config: HopperConfig, case: Case, hopper: torch.device) -> None:
    args = build(replace(case, dim=dim, dim_v=dim), hopper)
    check(args, run(args, partial(flash_fwd_sm90.forward, config=config)))


@pytest.mark.gpu
@pytest.mark.parametrize(("dim", "config"), OTHERS, ids=str)
def test_a_narrower_head_dim_is_padded(dim: int, config: HopperConfig, hopper: torch.device) -> None:
    args = build(Case(257, 257, dim=dim - 8, dim_v=dim - 16, layout="padded"), hopper)
    check(args, run(args, partial(flash_fwd_sm90.forward, config=config)))
