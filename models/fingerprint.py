"""What keys and values depend on besides the tokens before them, as 32 bytes: weights, shapes, precision. Knows no
pages and no files.

Weights are summed up on their own device, at the speed of its memory: this finds other weights, not forged ones."""

import hashlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from models.attention_sites import AttentionSite

_LAYOUT = "longwave pages 1"  # [num_kv_heads, block_size, head_dim], k then v, layer by layer
_CHUNK_WORDS = 1 << 24  # of 8 bytes
_MULTIPLIER = -7046029254386353131  # odd, so that every bit of a word counts; 2^64 / golden ratio


@torch.inference_mode()
def fingerprint(
    model: PreTrainedModel,
    sites: Sequence[AttentionSite],
    *,
    block_size: int,
    kv_dtype: torch.dtype,
    max_model_len: int,
) -> bytes:
    digest = hashlib.sha256(_LAYOUT.encode())
    facts = (type(model).__name__, model.config.to_json_string(), list(sites), block_size, kv_dtype, max_model_len,
             model.dtype, model.device.type)  # fmt: skip
    for fact in facts:
        digest.update(f"{fact}\0".encode())
    sums: list[Tensor] = []
    for name, tensor in _tensors(model):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\0".encode())
        sums += _sums(tensor)
    digest.update(torch.stack(sums).cpu().numpy().tobytes())
    return digest.digest()


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters, buffers, and what a module keeps beside them (a layer's weight in a layout of its own)."""
    for prefix, module in model.named_modules():
        own = (module._parameters, module._buffers, vars(module))
        for name, value in sorted((name, value) for group in own for name, value in group.items()):
            if isinstance(value, Tensor):
                yield f"{prefix}.{name}", value.to_dense() if value.is_mkldnn else value


def _sums(tensor: Tensor) -> Iterator[Tensor]:
    """One int64 scalar for each part."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    tail = -len(data) % 8
    if tail:
        data = torch.cat([data, data.new_zeros(tail)])
    for words in data.view(torch.int64).split(_CHUNK_WORDS):
        places = torch.arange(1, 2 * len(words), 2, device=words.device)
        yield (words * (places * _MULTIPLIER)).sum()
