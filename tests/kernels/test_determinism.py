"""The same problem a thousand times: bitwise the same result. A result that moves is a race."""

import pytest
import torch

from .error_rule import kernels_for
from .problems import Case, build

CASES = (
    Case(1000, 1000, batch=2, heads=8, kv_heads=2),
    Case(512, 512, batch=2, heads=4, kv_heads=4, dim=128, dim_v=128, mask="sliding"),
    Case(300, 777, batch=2, dim=256, dim_v=256),
    Case(257, 513, batch=3, layout="paged_varlen", page=16),
    Case(200, 200, batch=2, dim=72, dim_v=72, keys="key_mask", score="softcap_alibi", dtype="fp16"),
    Case(1, 8192, batch=3, layout="paged", heads=32, kv_heads=8, dim=128, dim_v=128),
    Case(1, 8192, batch=3, layout="paged", heads=32, kv_heads=8, dim=128, dim_v=128, num_splits=3),
    Case(4, 2000, batch=7, heads=32, kv_heads=2, layout="paged", page=48, dtype="fp16"),
    # Long enough for blocks that load keys for each other: of neighbouring heads, and of neighbouring rows.
    Case(2100, 8300, heads=8, kv_heads=2, layout="paged_varlen", page=32, dim=128, dim_v=128),
    Case(4100, 16400, batch=1, heads=3, kv_heads=3, dim=128, dim_v=128),
)


def check_repeats(case: Case, device: torch.device, repeats: int) -> None:
    args = build(case, device)
    for name, kernel in kernels_for(args).items():
        want, want_lse = kernel(args)
        differing = torch.zeros((), dtype=torch.int64, device=device)
        for _ in range(repeats):
            out, lse = kernel(args)
            # Counted on the device: a host sync after every call would hide races between calls.
            differing += (out != want).any() | (lse != want_lse).any()
        assert int(differing) == 0, f"{name}: {int(differing)} of {repeats} repeats differ"


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_thousand_repeats_are_bitwise_equal(case: Case, device: torch.device) -> None:
    check_repeats(case, device, 1000 if device.type == "cuda" else 3)


@pytest.mark.parametrize("case", [CASES[3].with_shape(9, 40), CASES[5].with_shape(1, 200)], ids=str)
def test_repeats_are_bitwise_equal_on_cpu(case: Case) -> None:
    check_repeats(case, torch.device("cpu"), 10)
