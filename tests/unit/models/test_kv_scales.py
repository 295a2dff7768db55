"""Scales of float8 pages bring a model's own keys and values well inside of what e4m3 stores."""

from typing import Any

import pytest
import torch
from tiny_models import random_model, tiny_config

from models.attention_sites import find_attention_sites
from models.batch import ScheduledSeq, StepBatch
from models.forward import PagedForward
from models.inputs import StepInputs
from models.kv_pool import FP8, KVCaches, KVScales, allocate
from models.kv_scales import calibrate
from models.patching import UnsupportedModelError
from models.self_test import check_engine_path

BLOCK = 16


def caches_after(
    model: Any, scales: KVScales | None, prompt: list[int], *, fused: bool
) -> tuple[KVCaches, torch.Tensor]:
    """A prompt in two chunks and a decode: the pages, and the logits of all rows."""
    sites = find_attention_sites(model)
    caches = allocate(sites, 8, BLOCK, model.dtype if scales is None else FP8, model.device, scales)
    inputs = StepInputs(
        max_num_seqs=1, max_num_batched_tokens=64, max_blocks_per_seq=8, block_size=BLOCK, device=model.device
    )
    forward = PagedForward(model, fused=fused)
    logits = []
    for start, end in ((0, 30), (30, len(prompt) - 1), (len(prompt) - 1, len(prompt))):
        step = inputs.build(StepBatch((ScheduledSeq(0, prompt[start:end], start, [3, 1, 4, 2, 5], True),)))
        with torch.inference_mode():
            logits.append(forward.every_row(step, caches))
    return caches, torch.cat(logits)


def prompt_of(length: int) -> list[int]:
    tokens: list[int] = torch.randint(3, 120, (length,), generator=torch.Generator().manual_seed(7)).tolist()
    return tokens


def test_scales_are_powers_of_two_with_room_above_what_was_seen() -> None:
    model = random_model(tiny_config())
    scales = calibrate(model, find_attention_sites(model), block_size=BLOCK)
    caches, _ = caches_after(model, None, prompt_of(60), fused=False)
    assert len(scales) == len(caches) == 3
    for layer, pages in zip(scales, caches, strict=True):
        for scale, cache in zip(layer, pages, strict=True):
            assert (scale.dtype, scale.shape) == (torch.float32, (2,))
            assert torch.equal(scale.log2(), scale.log2().round())
            stored = cache.abs().amax((0, 2, 3)) / scale
            assert bool((stored < 448 / 4).all())  # other tokens than those of the calibration
            assert bool((stored > 448 / 64).all())


def test_every_process_finds_the_same_scales() -> None:
    model = random_model(tiny_config())
    sites = find_attention_sites(model)
    first, second = (calibrate(model, sites, block_size=block) for block in (16, 64))
    for one, other in zip(first, second, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("fused", [False, True])
def test_logits_over_float8_pages_are_close_and_not_the_same(fused: bool) -> None:
    model = random_model(tiny_config())
    scales = calibrate(model, find_attention_sites(model), block_size=BLOCK)
    prompt = prompt_of(60)
    caches, plain = caches_after(model, None, prompt, fused=fused)
    eight_bits, logits = caches_after(model, scales, prompt, fused=fused)
    error = ((logits - plain).norm(dim=-1) / plain.norm(dim=-1)).mean().item()
    assert 1e-4 < error < 0.1
    for pages, true in zip(eight_bits, caches, strict=True):
        assert pages.k.dtype == pages.v.dtype == FP8
        assert pages.k.nbytes * 4 == true.k.nbytes
    k, scale = eight_bits[0].k, eight_bits[0].k_scale
    assert scale is not None
    # The first layer's keys come before any rounding: they are off by that of e4m3 only.
    torch.testing.assert_close(
        k.float() * scale[:, None, None], caches[0].k, rtol=2**-4, atol=2**-10 * scale.max().item()
    )


def test_the_self_test_holds_float8_pages_to_a_tolerance_of_their_own() -> None:
    model = random_model(tiny_config())
    sites = find_attention_sites(model)
    scales = calibrate(model, sites, block_size=BLOCK)
    check_engine_path(model, sites, block_size=BLOCK, scales=scales)
    far_too_small = [(k * 2.0**-14, v * 2.0**-14) for k, v in scales]  # everything is cut off
    with pytest.raises(UnsupportedModelError, match="fails the self-test"):
        check_engine_path(model, sites, block_size=BLOCK, scales=far_too_small)


def test_a_head_of_zeros_gets_a_usable_scale() -> None:
    model: Any = random_model(tiny_config())
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.weight[:16] = 0.0
    scales = calibrate(model, find_attention_sites(model), block_size=BLOCK)
    assert scales[1][1][0] == 1.0
    assert scales[1][1][1] < 1.0
