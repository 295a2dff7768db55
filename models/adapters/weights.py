"""PEFT's tensors -> the two factors of every adapted layer, checked against the model they must fit. Knows no slots."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from torch import Tensor

from models.adapters.config import LoraConfig, parse_config
from models.adapters.folder import AdapterFiles
from models.adapters.linears import LinearLayer
from models.batch import AdapterFacts
from models.errors import AdapterError

_KEY = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])\.weight")
_HEADER_BYTES = 16 << 20  # names and offsets of a safetensors file
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """Of each adapted layer, A `[rank, in_features]` and B^T `[rank, out_features]` with the scaling in it, both in the
    model's dtype, on the host."""

    facts: AdapterFacts
    layers: Mapping[str, tuple[Tensor, Tensor]]


def max_weight_bytes(linears: Mapping[str, LinearLayer], max_rank: int) -> int:
    """The largest file an adapter of this rank can be."""
    return _HEADER_BYTES + sum(4 * max_rank * (layer.in_features + layer.out_features) for layer in linears.values())


def read_weights(
    files: AdapterFiles, linears: Mapping[str, LinearLayer], *, max_rank: int, dtype: torch.dtype, pin_memory: bool
) -> AdapterWeights:
    """Raises AdapterError unless every tensor of the file is a factor of one of the model's `linears`."""
    config = parse_config(files.config)
    try:
        tensors = load_tensors(files.weights)
    except SafetensorError as error:
        raise AdapterError(f"adapter_model.safetensors is damaged: {error!s:.200}") from None
    pairs = _pairs(tensors)
    layers = {}
    for module, (a, b) in sorted(pairs.items()):  # a file has no order
        _check(module, a, b, linears, config, max_rank)
        scaled = b.float().T * config.scaling(module)
        factors = (a.to(dtype), scaled.to(dtype))
        if not all(torch.isfinite(factor).all() for factor in factors):
            raise AdapterError(f"the weights for {module} are not finite in {str(dtype).removeprefix('torch.')}")
        layers[module] = (_owned(factors[0], pin_memory), _owned(factors[1], pin_memory))
    rank = max(a.shape[0] for a, _ in layers.values())
    return AdapterWeights(AdapterFacts(files.digest, rank, len(layers), config.base_model, files.written), layers)


def _owned(factor: Tensor, pin_memory: bool) -> Tensor:
    """Not a view into the file's bytes, and where copies to a GPU start at once."""
    owned = factor.contiguous().clone()
    return owned.pin_memory() if pin_memory else owned


def _pairs(tensors: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """Module -> (A, B)."""
    sides: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        match = _KEY.fullmatch(key)
        if match is None:
            raise AdapterError(f"it holds {key!s:.200}: only plain LoRA on linear layers is served{_reason(key)}")
        sides.setdefault(match["module"], {})[match["side"]] = tensor
    if not sides:
        raise AdapterError("it adapts no layer")
    for module, found in sides.items():
        if len(found) != 2:
            raise AdapterError(f"it holds only lora_{next(iter(found))} for {module!s:.200}")
    return {module: (found["A"], found["B"]) for module, found in sides.items()}


def _reason(key: str) -> str:
    if "lora_embedding_" in key:
        return ", not on embeddings"
    if "lora_magnitude_vector" in key:
        return ", not DoRA"
    if key.endswith("bias"):
        return ", not with biases"
    return ", not whole layers (modules_to_save)" if ".lora_" not in key else ""


def _check(
    module: str, a: Tensor, b: Tensor, linears: Mapping[str, LinearLayer], config: LoraConfig, max_rank: int
) -> None:
    trained_for = "" if config.base_model is None else f" (it was trained for {config.base_model!s:.200})"
    layer = linears.get(module)
    if layer is None:
        raise AdapterError(
            f"it adapts {module!s:.200}, which is no linear layer inside this model's decoder layers{trained_for}"
        )
    rank = config.rank(module)
    if rank > max_rank:
        raise AdapterError(f"its rank is {rank} ({module}); this server takes ranks up to {max_rank} (max_lora_rank)")
    wanted = ([rank, layer.in_features], [layer.out_features, rank])
    if [list(a.shape), list(b.shape)] != list(wanted):
        raise AdapterError(
            f"lora_A and lora_B of {module} are {list(a.shape)} and {list(b.shape)}; this model and rank {rank} need "
            f"{wanted[0]} and {wanted[1]}{trained_for}"
        )
    if a.dtype not in _DTYPES or b.dtype not in _DTYPES:
        found = " and ".join(str(side.dtype).removeprefix("torch.") for side in (a, b))
        raise AdapterError(f"the weights for {module} are {found}: float32, bfloat16 or float16 is read")
