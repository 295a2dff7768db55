"""Which probabilities dropout drops: a function of (sequence, query head, query row, key) and a seed, nothing else.

So any order of tiles, on any device, forward or backward, finds the same ones. The kernels' parts/dropout.cuh is the
same rule. Plain torch in int64, on the device of the seed; nothing is read on the host.
"""

import torch
from torch import Tensor

Words = tuple[Tensor, Tensor, Tensor, Tensor]

_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_KEY_STEPS = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 7
_LOW = 0xFFFFFFFF
_BLOCK = 16


def philox(counter: Words, key: tuple[Tensor, Tensor], rounds: int = _ROUNDS) -> Words:
    """Philox4x32 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC11).

    All 32-bit words are int64 tensors that broadcast.
    """
    (x0, x1, x2, x3), (k0, k1) = counter, key
    for _ in range(rounds):
        a, b = x0 * _MULTIPLIERS[0], x2 * _MULTIPLIERS[1]  # modulo 2^64, of which both halves are right
        x0, x1, x2, x3 = ((b >> 32) & _LOW) ^ x1 ^ k0, b & _LOW, ((a >> 32) & _LOW) ^ x3 ^ k1, a & _LOW
        k0, k1 = (k0 + _KEY_STEPS[0]) & _LOW, (k1 + _KEY_STEPS[1]) & _LOW
    return x0, x1, x2, x3


def random_bytes(seed: Tensor, planes: Tensor, rows: slice, keys: slice) -> Tensor:
    """Of some scores: uint8 `[*planes, R, C]`, planes being sequence * num_heads + head.

    A 16x16 block of scores has 16 counters (a, c). The words of one belong to the rows 2a, 2a + 1, 2a + 8, 2a + 9, a
    word's bytes from the lowest up to the keys 2c, 2c + 1, 2c + 8, 2c + 9: what threads hold of a tensor core's tile.
    """
    first_row, first_key = rows.start // _BLOCK, keys.start // _BLOCK
    row_blocks, key_blocks = -(-rows.stop // _BLOCK) - first_row, -(-keys.stop // _BLOCK) - first_key
    device = seed.device
    quarter_rows = torch.arange(first_row * 4, (first_row + row_blocks) * 4, device=device).unsqueeze(1)
    quarter_keys = torch.arange(first_key * 4, (first_key + key_blocks) * 4, device=device)
    key = (seed[0] & _LOW, (seed[0] >> 32 & _LOW) ^ (seed[1] >> 32 & _LOW))
    words = philox((quarter_rows, quarter_keys, planes[..., None, None], seed[1] & _LOW), key)
    # [*planes, block row, a, block key, c, word's upper and lower bit, byte's upper and lower bit]
    shape = (*planes.shape, row_blocks, 4, key_blocks, 4, 2, 2, 1, 1)
    shifts = torch.arange(0, 32, 8, device=device).view(2, 2)
    drawn = (torch.stack(words, -1).view(shape) >> shifts & 255).to(torch.uint8)
    n = planes.dim()
    # Row in its block: 8 * upper + 2a + lower; key likewise.
    order = (*range(n), n, n + 4, n + 1, n + 5, n + 2, n + 6, n + 3, n + 7)
    drawn = drawn.permute(order).reshape(*planes.shape, row_blocks * _BLOCK, key_blocks * _BLOCK)
    top, left = first_row * _BLOCK, first_key * _BLOCK
    return drawn[..., rows.start - top : rows.stop - top, keys.start - left : keys.stop - left]


def kept(seed: Tensor, sequences: Tensor, num_heads: int, rows: slice, keys: slice, threshold: int) -> Tensor:
    """bool `[n, num_heads, R, C]`: the scores of these sequences that stay."""
    planes = sequences.unsqueeze(1) * num_heads + torch.arange(num_heads, device=seed.device)
    return random_bytes(seed, planes, rows, keys) >= threshold


def keep_mask(
    seed: Tensor, batch: int, num_heads: int, seqlen_q: int, seqlen_k: int, threshold: int, device: torch.device
) -> Tensor:
    """bool `[batch, num_heads, seqlen_q, seqlen_k]`: `kept` of everything, for tests and for reading."""
    sequences = torch.arange(batch, device=device)
    return kept(seed.to(device), sequences, num_heads, slice(0, seqlen_q), slice(0, seqlen_k), threshold)
