"""A runner over float8 pages answers almost as over its own dtype's, in half or less of the memory."""

import pytest
import torch
from batch_driver import generate
from tiny_models import as_loaded, random_model, tiny_config

from models.batch import SamplingParams
from models.kv_pool import FP8, KVCacheDtypeError
from models.runner import ModelRunner


def runner(kv_dtype: str) -> ModelRunner:
    return ModelRunner(
        as_loaded(random_model(tiny_config())),
        block_size=16,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        max_model_len=256,
        num_blocks=64,
        kv_dtype=kv_dtype,
    )


def test_float8_pages_answer_as_the_models_own_do() -> None:
    prompts = [torch.randint(3, 120, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (5, 40, 90)]
    sampling = SamplingParams(temperature=0.0, logprobs=10)
    plain, eight_bits = (generate(runner(name), prompts, 3, sampling=sampling) for name in ("auto", "fp8"))
    for one, other in zip(plain, eight_bits, strict=True):
        assert other.logprobs[0] is not None
        assert one.tokens[0] in {token for token, _ in other.logprobs[0].top}
        assert other.logprobs != one.logprobs  # other pages, other roundings


def test_the_pool_is_float8_and_every_phase_has_a_kernel() -> None:
    made = runner("fp8_e4m3")
    assert {pages.k.dtype for pages in made._kv_caches} == {FP8}
    assert made.kernels == {"full_attention/prefill": "cpu_reference", "full_attention/decode": "cpu_reference"}
    limits, plain = made.sharing_limits, runner("auto").sharing_limits
    assert limits is not None
    assert plain is not None
    assert limits.least_saved_blocks >= 3 * plain.least_saved_blocks  # a page is a fourth of the bytes
    with pytest.raises(KVCacheDtypeError, match="float16"):
        runner("float16")
