"""Tokens that the kernel chooses against the same choice in torch, number for number."""

import numpy as np
import pytest
import torch

import attention_backend
from models.sampling.noise import log_exponential, row_keys

from .problems import SESSION_SEED

pytestmark = pytest.mark.gpu


def problem(rows: int, vocab: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(SESSION_SEED + rows * vocab)
    logits = torch.randn(rows, vocab, generator=rng).mul_(3).to("cuda:0", dtype)
    temperature = torch.rand(rows, generator=rng).add_(0.3)
    temperature[::3] = 0
    seeds = torch.randint(2**62, (rows,), generator=rng).numpy().astype(np.uint64)
    keys = torch.from_numpy(row_keys(seeds, np.arange(rows)))
    return logits, temperature.to("cuda:0"), keys.to("cuda:0")


def scores(logits: torch.Tensor, temperature: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    greedy = temperature < 1e-5
    noisy = logits.float() / temperature.masked_fill(greedy, 1)[:, None] - log_exponential(keys, logits.shape[1])
    return torch.where(greedy[:, None], logits.float(), noisy)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("rows", "vocab"), [(1, 128_256), (7, 49_152), (64, 128_256), (256, 50_257), (3, 5), (2, 1)])
def test_a_row_s_token_has_the_highest_score(rows: int, vocab: int, dtype: torch.dtype) -> None:
    logits, temperature, keys = problem(rows, vocab, dtype)
    tokens, finite = attention_backend.choose_tokens(logits, temperature, keys)
    reference = scores(logits, temperature, keys)
    chosen = reference.gather(1, tokens[:, None])[:, 0]
    # Logarithms may differ in the last bit, so what counts is the score and not the index.
    torch.testing.assert_close(chosen, reference.amax(1), rtol=1e-5, atol=1e-5)
    assert finite.all()
    greedy = temperature < 1e-5
    assert torch.equal(logits[greedy].gather(1, tokens[greedy, None])[:, 0], logits[greedy].amax(1))


def test_keys_may_begin_at_any_number() -> None:
    logits, temperature, keys = problem(5, 300, torch.bfloat16)
    behind_one = torch.cat([keys.new_zeros(1), keys.flatten()])[1:].view(5, 2)
    assert behind_one.data_ptr() % 8
    there = attention_backend.choose_tokens(logits, temperature, behind_one)[0]
    assert torch.equal(there, attention_backend.choose_tokens(logits, temperature, keys)[0])


def test_of_equal_logits_the_first_wins() -> None:
    logits = torch.zeros(4, 100_000, device="cuda:0", dtype=torch.bfloat16)
    logits[:, 777:] = 1
    tokens, _ = attention_backend.choose_tokens(
        logits, torch.zeros(4, device="cuda:0"), torch.zeros(4, 2, dtype=torch.int32, device="cuda:0")
    )
    assert tokens.tolist() == [777] * 4


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_rows_that_are_not_finite_are_told(bad: float) -> None:
    logits, temperature, keys = problem(9, 30_011, torch.bfloat16)
    logits[4, 30_010] = bad
    logits[7, 0] = bad
    tokens, finite = attention_backend.choose_tokens(logits, temperature, keys)
    assert finite.tolist() == [row not in (4, 7) for row in range(9)]
    assert ((tokens >= 0) & (tokens < 30_011)).all()


def test_a_row_depends_on_no_other_row_and_a_graph_repeats_it() -> None:
    logits, temperature, keys = problem(32, 128_256, torch.bfloat16)
    together, _ = attention_backend.choose_tokens(logits, temperature, keys)
    alone = [
        attention_backend.choose_tokens(logits[i : i + 1], temperature[i : i + 1], keys[i : i + 1])[0].item()
        for i in range(32)
    ]
    assert together.tolist() == alone
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded, _ = attention_backend.choose_tokens(logits, temperature, keys)
    for _ in range(3):
        recorded.fill_(-1)
        graph.replay()
        assert recorded.tolist() == alone


def test_draws_follow_the_softmax() -> None:
    """A chi-square test over 200,000 draws from eight tokens."""
    count = 200_000
    logits = torch.linspace(-1, 2, 8, device="cuda:0").expand(count, 8).contiguous()
    seeds = np.full(count, SESSION_SEED, np.uint64)
    keys = torch.from_numpy(row_keys(seeds, np.arange(count))).to("cuda:0")
    tokens, _ = attention_backend.choose_tokens(logits, torch.full((count,), 0.7, device="cuda:0"), keys)
    expected = (logits[0] / 0.7).softmax(0).double() * count
    observed = torch.bincount(tokens, minlength=8).double()
    assert ((observed - expected) ** 2 / expected).sum().item() < 32  # 7 degrees of freedom: p = 4e-5
