"""A runner over float8 pages answers almost as over its own dtype's, in half or less of the memory."""

import pytest
import torch
from batch_driver import generate
from tiny_models import as_loaded, random_model, tiny_config

from attention_backend import fp8_pages
from models.batch import SamplingParams, ScheduledSeq, StepBatch
from models.kv_pool import FP8, KVCacheDtypeError, MemoryBudget
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


def test_graphs_hold_chunks_where_float8_pages_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    made, plain = runner("fp8"), runner("auto")
    assert made._graph_shapes() == plain._graph_shapes()
    assert any(shape.others and not shape.few_rows for shape in made._graph_shapes())
    monkeypatch.setattr(fp8_pages, "is_copied", lambda _args: True)
    assert plain._graph_shapes() == runner("auto")._graph_shapes()
    assert not any(shape.others and not shape.few_rows for shape in made._graph_shapes())


@pytest.mark.gpu
def test_chunks_over_float8_pages_answer_in_graphs_as_without() -> None:
    """Near enough: kernels split their sums by the shape of a step."""
    loaded = as_loaded(random_model(tiny_config(max_position_embeddings=512)).to("cuda:0", torch.bfloat16))  # type: ignore[arg-type]
    rng = torch.Generator().manual_seed(5)
    prompts = [torch.randint(3, 120, (n,), generator=rng).tolist() for n in (70, 301, 5, 130)]
    sampling, answers = SamplingParams(temperature=0.0, logprobs=10), []
    for enforce_eager in (True, False):
        made = ModelRunner(
            loaded, block_size=16, max_num_seqs=8, max_num_batched_tokens=192, max_model_len=512,
            num_blocks=200, kv_dtype="fp8", enforce_eager=enforce_eager,
        )  # fmt: skip
        made.warm_up()
        answers.append(generate(made, prompts, 1, sampling=sampling, budget=192))
    if torch.cuda.get_device_capability() == (9, 0):
        assert made._graphs is not None
        assert any(shape.others for shape in made._graphs._shapes)
    for one, other in zip(*answers, strict=True):
        assert one.logprobs[0] is not None
        assert other.logprobs[0] is not None
        first, second = dict(one.logprobs[0].top), dict(other.logprobs[0].top)
        common = first.keys() & second.keys()
        assert len(common) >= 8
        assert all(abs(first[token] - second[token]) < 0.1 for token in common)


@pytest.mark.gpu
def test_memory_is_kept_for_as_many_copied_pages_as_several_long_prompts_have(monkeypatch: pytest.MonkeyPatch) -> None:
    length, block_size, count = 32_768, 16, 5
    page_bytes = block_size * 2 * (16 + 16) * 2  # of both heads' keys and values, 16 dimensions of two bytes each
    monkeypatch.setattr(fp8_pages, "COPY_BYTES", count * length // block_size * page_bytes)
    config = tiny_config(max_position_embeddings=length)
    made = ModelRunner(
        as_loaded(random_model(config).to("cuda:0", torch.bfloat16)),  # type: ignore[arg-type]
        block_size=block_size, max_num_seqs=8, max_num_batched_tokens=2048, max_model_len=length,
        memory_budget=MemoryBudget(kv_cache_memory_bytes=1 << 28), kv_dtype="fp8", enforce_eager=True,
    )  # fmt: skip
    before = torch.cuda.memory_allocated()
    for lengths in ([2048], [1500, 548], [1500, *[137] * 4], [1105, *[1] * 7]):
        seqs = [
            ScheduledSeq(slot, [0] * new, length - new, [0] * (length // block_size), sample=True)
            for slot, new in enumerate(lengths)
        ]
        torch.cuda.reset_peak_memory_stats()
        made._rehearse(StepBatch(tuple(seqs)))
        taken = torch.cuda.max_memory_allocated() - before
        assert min(len(lengths), count) * length // block_size * page_bytes <= taken <= 1.01 * made._step_bytes, lengths


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
