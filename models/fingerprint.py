"""What keys and values depend on besides the tokens before them, as 32 bytes: weights, shapes, precision. Knows no
pages and no files.

Weights are summed up on their own device, at the speed of its memory: this finds other weights, not forged ones."""

import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import PreTrainedModel

from models.kv_pool import KVCaches

_LAYOUT = "longwave pages 1"  # [num_kv_heads, block_size, head_dim], k then v, layer by layer
_CHUNK_WORDS = 1 << 24  # of 8 bytes
_MULTIPLIER = -7046029254386353131  # odd, so that every bit of a word counts; 2^64 / golden ratio


@torch.inference_mode()
def fingerprint(model: PreTrainedModel, kv_caches: KVCaches, *, max_model_len: int) -> bytes:
    """`max_model_len` chooses between the frequencies of some rotary embeddings."""
    digest = hashlib.sha256(_LAYOUT.encode())
    pages = [(array.dtype, tuple(array.shape[1:])) for layer in kv_caches for array in (layer.k, layer.v)]
    facts = (type(model).__name__, model.config.to_json_string(), model.dtype, model.device.type, pages, max_model_len)
    for fact in facts:
        digest.update(f"{fact}\0".encode())
    sums: list[Tensor] = []
    for name, tensor in (*_tensors(model), *_scales(kv_caches)):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\0".encode())
        sums += _sums(tensor)
    digest.update(torch.stack(sums).cpu().numpy().tobytes())
    return digest.digest()


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters, buffers, and what a module keeps beside them: a layer's weight in a layout of its own, which others
    may share."""
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        own = (module._parameters, module._buffers, vars(module))
        for name, value in sorted((name, value) for group in own for name, value in group.items()):
            if isinstance(value, Tensor) and id(value) not in seen:
                seen.add(id(value))
                yield from _dense(f"{prefix}.{name}", value)


def _dense(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Of a quantised weight (a tensor subclass) the tensors inside."""
    if not is_traceable_wrapper_subclass(tensor):
        yield name, tensor.to_dense() if tensor.is_mkldnn else tensor
        return
    inside, _ = tensor.__tensor_flatten__()
    for inner in inside:
        yield from _dense(f"{name}.{inner}", getattr(tensor, inner))


def _scales(kv_caches: KVCaches) -> Iterator[tuple[str, Tensor]]:
    for number, pages in enumerate(kv_caches):
        for name, scale in (("k_scale", pages.k_scale), ("v_scale", pages.v_scale)):
            if scale is not None:
                yield f"{number}.{name}", scale


def _sums(tensor: Tensor) -> Iterator[Tensor]:
    """One int64 scalar for each part."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    tail = -len(data) % 8
    if tail:
        data = torch.cat([data, data.new_zeros(tail)])
    for words in data.view(torch.int64).split(_CHUNK_WORDS):
        places = torch.arange(1, 2 * len(words), 2, device=words.device)
        yield (words * (places * _MULTIPLIER)).sum()
