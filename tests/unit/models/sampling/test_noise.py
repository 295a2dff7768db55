"""The noise behind sampling: exponential, and a pure function of (seed, position, token)."""

import numpy as np
import torch

from models.sampling.noise import log_exponential, row_keys


def _noise(seeds: list[int], positions: list[int], vocab_size: int) -> torch.Tensor:
    keys = row_keys(np.array(seeds, np.uint64), np.array(positions, np.int64))
    return log_exponential(torch.from_numpy(keys), vocab_size)


def test_noise_is_exponential() -> None:
    samples = _noise([1, 2, 3, 4], [0, 5, 6, 7], 100_000).exp().flatten().sort().values.double()
    theory = 1 - (-samples).exp()
    steps = torch.arange(1, len(samples) + 1, dtype=torch.float64) / len(samples)
    kolmogorov_smirnov = (theory - steps).abs().max().item() * len(samples) ** 0.5
    assert kolmogorov_smirnov < 1.95  # 0.1 % level


def test_noise_is_uncorrelated_across_neighbouring_tokens_positions_and_seeds() -> None:
    base = _noise([7], [100], 50_000)[0]
    for other in (_noise([8], [100], 50_000)[0], _noise([7], [101], 50_000)[0], base.roll(1), base.roll(64)):
        assert abs(torch.corrcoef(torch.stack([base, other]))[0, 1].item()) < 0.02


def test_noise_is_independent_over_positions_for_one_token() -> None:
    over_positions = _noise([7] * 4096, list(range(4096)), 3).exp()
    correlations = torch.corrcoef(torch.cat([over_positions.T, over_positions.roll(1, 0).T]))
    assert (correlations - torch.eye(6)).abs().max().item() < 0.08
    assert torch.allclose(over_positions.mean(0), torch.ones(3), atol=0.08)


def test_a_rows_noise_does_not_depend_on_the_other_rows() -> None:
    together = _noise([3, 9, 2**64 - 1], [0, 1, 2**40], 1000)
    alone = _noise([9], [1], 1000)
    assert torch.equal(together[1], alone[0])


def test_noise_is_always_finite_and_varied() -> None:
    noise = _noise(list(range(64)), [0] * 64, 50_000)
    assert bool(noise.isfinite().all())
    assert noise.unique().numel() > 0.9 * noise.numel()
