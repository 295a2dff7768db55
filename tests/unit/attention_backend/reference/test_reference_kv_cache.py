"""Storing keys and values by slot, and rotary."""

import torch

from attention_backend.reference import kv_cache, rotary


def test_tokens_land_in_their_slots_and_negative_slots_are_skipped() -> None:
    k, v = torch.randn(4, 2, 8), torch.randn(4, 2, 6)
    k_cache, v_cache = torch.zeros(5, 2, 16, 8), torch.zeros(5, 2, 16, 6)
    kv_cache.store(k, v, k_cache, v_cache, torch.tensor([0, 79, -1, 33]))
    for token, (block, offset) in {0: (0, 0), 1: (4, 15), 3: (2, 1)}.items():
        assert torch.equal(k_cache[block, :, offset], k[token])
        assert torch.equal(v_cache[block, :, offset], v[token])
    assert int((k_cache != 0).any(-1).any(1).sum()) == 3


def test_rotary_is_a_rotation_by_the_angle_of_the_position() -> None:
    angles = torch.arange(10, dtype=torch.float64)[:, None] * torch.tensor([1.0, 0.1, 0.01], dtype=torch.float64)
    x = torch.randn(2, 4, 3, 8, dtype=torch.float64)  # rotary_dim 6 of head_dim 8
    positions = torch.tensor([[0, 1, 2, 3], [6, 7, 8, 9]])
    turn = torch.exp(1j * angles[positions]).unsqueeze(2)  # [2, 4, 1, 3]
    for interleaved in (True, False):
        first, second = (x[..., 0:6:2], x[..., 1:6:2]) if interleaved else (x[..., :3], x[..., 3:6])
        rotated = torch.complex(first, second) * turn
        result = rotary.apply(x, angles.cos(), angles.sin(), positions, interleaved)
        got = (result[..., 0:6:2], result[..., 1:6:2]) if interleaved else (result[..., :3], result[..., 3:6])
        torch.testing.assert_close(torch.complex(*got), rotated)
        assert torch.equal(result[..., 6:], x[..., 6:])
