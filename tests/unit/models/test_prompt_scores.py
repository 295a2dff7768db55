"""Log-probabilities of prompts' own tokens equal those of transformers' own logits, whatever a step has besides."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import TINY, as_loaded, random_model, tiny_config
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GPT2Config,
    GraniteConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3Config,
)

from models.attention_sites import attention_implementation
from models.batch import PromptLogprobs, SamplingParams, ScheduledSeq, ScoredRows, StepBatch
from models.descriptions import load_tokenizer
from models.loader import LoadedModel
from models.registry import ModelSource
from models.runner import ModelRunner

TEXTS = [
    "The capital of France is Paris, and the capital of Italy is Rome.",
    "Once upon a time there was a small model that wanted to know how likely it was, and so it counted every word.",
    "1 2 3 4 5",
]
NUM_TOP = 3
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class Scores:
    """Of a prompt's tokens but the first."""

    logprobs: list[float]
    ranks: list[int]
    top_ids: list[list[int]]
    top_logprobs: list[list[float]]

    @classmethod
    def of(cls, pieces: Sequence[PromptLogprobs]) -> "Scores":
        def joined(name: str, dtype: type, width: int) -> Any:
            whole = b"".join(getattr(piece, name) for piece in pieces)
            return np.frombuffer(whole, dtype).reshape(-1, width)

        width = pieces[0].num_top
        return cls(
            joined("logprobs", np.float32, 1)[:, 0].tolist(),
            joined("ranks", np.int32, 1)[:, 0].tolist(),
            joined("top_ids", np.int32, width).tolist(),
            joined("top_logprobs", np.float32, width).tolist(),
        )


def scores(
    runner: ModelRunner, prompts: Sequence[Sequence[int]], *, chunk: int, decoding: bool = False
) -> list[Scores]:
    """Each step runs up to `chunk` tokens of every prompt that is not done; `decoding`: beside a sequence that has its
    next token in each of them."""
    found: list[list[PromptLogprobs]] = [[] for _ in prompts]
    block, tables = 1, []
    for slot, prompt in enumerate(prompts):
        count = -(-len(prompt) // runner.block_size)
        tables.append(list(range(block, block + count)))
        block += count
        runner.add_request(slot, GREEDY, prompt)
    other, token, length = len(prompts), 5, 0
    runner.add_request(other, GREEDY, [token])
    beside = list(range(block, block + 8))
    done = [0] * len(prompts)
    while any(at < len(prompt) for at, prompt in zip(done, prompts, strict=True)):
        seqs, scored, owners = [], [], []
        if decoding:
            seqs.append(ScheduledSeq(other, [token], length, beside, sample=True))
        shares = [(min(chunk, len(p) - at), slot) for slot, (at, p) in enumerate(zip(done, prompts, strict=True))]
        for count, slot in sorted(shares, key=lambda share: share[0] != 1):
            if not count:
                continue
            prompt, start = prompts[slot], done[slot]
            end = done[slot] = start + count
            targets = prompt[start + 1 : end + 1]
            if targets:
                scored.append(ScoredRows(len(seqs), targets, NUM_TOP))
                owners.append(slot)
            seqs.append(ScheduledSeq(slot, prompt[start:end], start, tables[slot], end == len(prompt)))
        output = runner.execute(StepBatch(tuple(seqs), scored=tuple(scored)))
        assert len(output.token_ids) == sum(seq.sample for seq in seqs)
        for slot, some in zip(owners, output.prompt_logprobs, strict=True):
            assert some is not None
            found[slot].append(some)
        if decoding:
            token, length = output.token_ids[0], length + 1
    for slot in range(len(prompts) + 1):
        runner.remove_request(slot)
    return [Scores.of(pieces) for pieces in found]


@torch.inference_mode()
def eager_scores(model: PreTrainedModel, prompt: Sequence[int]) -> torch.Tensor:
    """Log-probabilities of all tokens after each of the prompt's: float32 `[len(prompt) - 1, vocab]`."""
    logits: torch.Tensor = model(torch.tensor([list(prompt)]), use_cache=False).logits[0, :-1]
    return logits.float().log_softmax(-1)


def assert_same(got: Scores, wanted: torch.Tensor, prompt: Sequence[int], tolerance: float = 1e-3) -> None:
    of_tokens = wanted.gather(1, torch.tensor(list(prompt[1:]))[:, None])[:, 0]
    assert got.logprobs == pytest.approx(of_tokens.tolist(), abs=tolerance)
    for rank, row, logprob in zip(got.ranks, wanted, of_tokens, strict=True):  # up to what lies as near as rounding
        assert 1 + (row > logprob + tolerance).sum() <= rank <= 1 + (row > logprob - tolerance).sum()
    top = wanted.topk(NUM_TOP).values
    assert np.array(got.top_logprobs) == pytest.approx(top.numpy(), abs=tolerance)
    named = wanted.gather(1, torch.tensor(got.top_ids))
    assert np.array(got.top_logprobs) == pytest.approx(named.numpy(), abs=tolerance)


@pytest.fixture(scope="module")
def prompts(bundled_source: ModelSource) -> list[list[int]]:
    tokenizer: Any = load_tokenizer(bundled_source)
    return [tokenizer.encode(text, add_special_tokens=False) for text in TEXTS]


@pytest.fixture(scope="module")
def expected(bundled_source: ModelSource, prompts: list[list[int]]) -> list[torch.Tensor]:
    """By a model that nothing of ours has touched."""
    model = AutoModelForCausalLM.from_pretrained(
        bundled_source.fetch(), dtype=torch.float32, attn_implementation="eager"
    )
    return [eager_scores(model, prompt) for prompt in prompts]


@pytest.mark.parametrize(
    ("chunk", "decoding"),
    [(7, True), (100, False)]
    + [pytest.param(*case, marks=pytest.mark.thorough) for case in ((1, True), (1, False), (7, False), (100, True))],
)
def test_prompts_of_the_bundled_model_are_scored_as_by_transformers(
    bundled_model: LoadedModel,
    prompts: list[list[int]],
    expected: list[torch.Tensor],
    chunk: int,
    decoding: bool,
) -> None:
    runner = ModelRunner(
        bundled_model, block_size=16, max_num_seqs=8, max_num_batched_tokens=256, max_model_len=256, num_blocks=80
    )
    runner._sampler.rows_per_piece = 5  # a chunk's rows are scored a few at a time
    for got, wanted, prompt in zip(
        scores(runner, prompts, chunk=chunk, decoding=decoding), expected, prompts, strict=True
    ):
        assert_same(got, wanted, prompt)
    if chunk == 100:
        assert_same(scores(runner, prompts[1:2], chunk=chunk)[0], expected[1], prompts[1])  # alone


FAMILIES: dict[str, tuple[PretrainedConfig, bool]] = {  # and whether its layers are fused
    "llama": (tiny_config(), True),
    "qwen3": (Qwen3Config(**TINY, head_dim=16), True),
    "gemma2": (
        Gemma2Config(**TINY, head_dim=16, query_pre_attn_scalar=16, final_logit_softcapping=3.0, sliding_window=8),
        True,
    ),
    "cohere": (CohereConfig(**TINY, logit_scale=0.25), False),
    "granite": (GraniteConfig(**TINY, logits_scaling=4.0), False),
    "gpt2": (
        GPT2Config(vocab_size=120, n_embd=64, n_layer=2, n_head=4, n_positions=512, bos_token_id=1, eos_token_id=2),
        False,
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("selects", [True, False])
def test_every_family_scores_with_its_own_head(family: str, selects: bool) -> None:
    config, fused = FAMILIES[family]
    model = random_model(config)
    runner = ModelRunner(
        as_loaded(model), block_size=16, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=128, num_blocks=40
    )
    assert (runner._forward._decoder is not None) == fused
    runner._forward._selects_rows = selects  # a few families have logits of every row
    runner._sampler.rows_per_piece = 3
    generator = torch.Generator().manual_seed(2)
    prompts = [torch.randint(3, 120, (n,), generator=generator).tolist() for n in (5, 33, 18)]
    with attention_implementation(model, "eager"):
        wanted = [eager_scores(model, prompt) for prompt in prompts]
    for chunk in (4, 20):
        for got, right, prompt in zip(
            scores(runner, prompts, chunk=chunk, decoding=True), wanted, prompts, strict=True
        ):
            assert_same(got, right, prompt)


def test_the_logits_of_a_chunk_are_never_there_together(monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model(tiny_config())
    runner = ModelRunner(
        as_loaded(model), block_size=16, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=128, num_blocks=40
    )
    runner._sampler.rows_per_piece = 6
    decoder = runner._forward._decoder
    assert decoder is not None
    head, rows, hidden = decoder.head, list[int](), 0

    def counted(normed: torch.Tensor) -> torch.Tensor:
        rows.append(len(normed))
        return head(normed)

    def run_once(*arguments: Any) -> torch.Tensor:
        nonlocal hidden
        hidden += 1
        return type(decoder).hidden(decoder, *arguments)

    monkeypatch.setattr(decoder, "head", counted)
    monkeypatch.setattr(decoder, "hidden", run_once)
    scores(runner, [list(range(3, 23))], chunk=64)
    assert (rows, hidden) == ([6, 6, 6, 1, 1], 1)


def test_logits_that_are_not_finite_are_told(tiny_runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = tiny_runner._forward._decoder
    assert decoder is not None
    head = decoder.head
    monkeypatch.setattr(decoder, "head", lambda normed: head(normed).index_fill(0, torch.tensor([1]), torch.nan))
    tiny_runner.add_request(0, GREEDY, [3, 4, 5])
    tiny_runner.add_request(1, GREEDY, [6, 7])
    seqs = ScheduledSeq(0, [3, 4, 5], 0, [1], False), ScheduledSeq(1, [6, 7], 0, [2], False)
    output = tiny_runner.execute(StepBatch(seqs, scored=(ScoredRows(0, [4, 5], 0), ScoredRows(1, [7], 0))))
    first, second = output.prompt_logprobs
    assert first is None
    assert second is not None
    assert (len(second), second.top_ids) == (1, b"")
    for slot in (0, 1):
        tiny_runner.remove_request(slot)


@pytest.mark.gpu
@pytest.mark.parametrize("chunk", [1, 16, 64])
def test_a_gpu_scores_as_transformers_does_beside_graphs(chunk: int) -> None:
    """Steps that score run without a graph, and those before and after them in theirs."""
    model = random_model(tiny_config())
    prompts = torch.randint(3, 120, (3, 100), generator=torch.Generator().manual_seed(3)).tolist()
    with attention_implementation(model, "eager"):
        wanted = [eager_scores(model, prompt) for prompt in prompts]
    runner = ModelRunner(
        as_loaded(model.to("cuda:0")),  # type: ignore[arg-type]
        block_size=16, max_num_seqs=8, max_num_batched_tokens=256, max_model_len=256, num_blocks=64,
    )  # fmt: skip
    runner.warm_up()
    runner._sampler.rows_per_piece = 7
    torch.cuda._sleep(1_000_000_000)  # the host is ahead
    for got, right, prompt in zip(scores(runner, prompts, chunk=chunk, decoding=True), wanted, prompts, strict=True):
        assert_same(got, right, prompt)
