"""What is compiled ahead is what the launchers will ask for."""

import pytest
import torch

from attention_backend.kernels.variants import Options

from .compile_ahead import backward_variants_of, options_of, variants_of
from .problems import KEYS, SCORES, Case, build


@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize("score", SCORES)
def test_options_of_a_case_are_those_of_its_problem(keys: str, score: str) -> None:
    case = Case(4, 9, keys=keys, score=score, mask="full", dim=40, dim_v=24, dtype="fp16")
    assert options_of(case) == Options.of(build(case, torch.device("cpu")))


def test_paged_problems_are_compiled_as_paged() -> None:
    case = Case(4, 9, layout="paged", dtype="fp32")
    assert options_of(case) == Options.of(build(case, torch.device("cpu")))


def test_every_kernel_that_may_serve_is_compiled() -> None:
    def names(case: Case, arch: str = "sm_90a") -> set[str]:
        return {variant.kernel for variant in variants_of(case, arch)}

    hopper, fallback = {"flash_fwd_sm80", "flash_fwd_sm90"}, {"flash_fwd_sm80"}
    assert names(Case(200, 200)) == hopper
    assert names(Case(200, 200), "sm_80") == fallback
    assert names(Case(200, 200, score="alibi")) == hopper
    assert names(Case(200, 200, layout="paged", page=16)) == hopper
    assert names(Case(200, 200, layout="paged", page=1)) == fallback
    assert names(Case(1, 200)) == {"flash_fwd_sm80", "flash_decode_sm90"}
    assert names(Case(1, 200), "sm_80") == {"flash_fwd_sm80", "flash_decode"}
    assert names(Case(1, 200, layout="paged", page=1)) == {"flash_fwd_sm80", "flash_decode"}
    assert names(Case(200, 200, dtype="fp32")) == {"flash_fwd_f32"}


def test_every_backward_kernel_that_may_serve_is_compiled() -> None:
    def names(case: Case, arch: str = "sm_90a") -> set[str]:
        return {variant.kernel for variant in backward_variants_of(case, arch)}

    assert names(Case(200, 200)) == {"flash_bwd_sm80", "flash_bwd_sm90"}
    assert names(Case(200, 200), "sm_80") == {"flash_bwd_sm80"}
    assert names(Case(200, 200, layout="paged")) == names(Case(200, 200, dtype="fp32")) == set()
