"""Which kernels a model's steps will want; and compiling and loading them all at once, before a first step meets one
after another."""

from collections.abc import Iterable
from typing import NamedTuple

import torch

from attention_backend import jit
from attention_backend.heuristics.layer_chain import ChainHeads
from attention_backend.heuristics.sm80 import HEAD_DIM_TILES
from attention_backend.jit import KernelVariant


class StepLayer(NamedTuple):
    """What of a layer decides about its kernels."""

    head_dim: int
    head_dim_v: int
    group: int  # query heads a key head
    softcap: bool
    left_bounds: bool = False  # a window or chunks: rows see keys from some key on only


class ChainStep(NamedTuple):
    """What decides about the kernels of `layer_chain`, or with `to_pages` of `layer_chain_to_pages`."""

    attended_width: int
    width: int
    gated_width: int
    activation: str
    unit_offset: bool
    to_pages: bool
    heads: ChainHeads | None  # of the attention in front, where it may be part of it


class LayerStep(NamedTuple):
    """What decides about the kernels of `layers` that a decoder layer has around its attention."""

    width: int
    head_dim: int
    unit_offset: bool  # of its norms
    normed_heads: bool  # by rotary_store
    activation: str | None


class LinearStep(NamedTuple):
    """A linear layer: its weight's rows and columns."""

    width: int
    depth: int
    activation: str | None = None  # of a gated one, half of whose rows are the gate's


def step_kernels(
    layers: Iterable[StepLayer],
    dtype: torch.dtype,
    device: torch.device,
    *,
    page_size: int,
    most_keys: int,
    fp8_kv: bool = False,
) -> list[KernelVariant]:
    """Of attention over pages and of the choice of tokens, for sequences of up to `most_keys` tokens. None on a CPU, of
    attention none in float32, whose kernels are few, and none for what dispatch refuses, which says why when it is
    called."""
    if device.type != "cuda":
        return []
    from attention_backend.kernels import device as devices
    from attention_backend.kernels.choose_tokens import choice_variant
    from attention_backend.kernels.step_kernels import step_variants

    arch = devices.arch(device.index or 0)
    choices = [choice_variant(each, arch) for each in {dtype, torch.float32}]
    if not _has_kernels(dtype, device):
        return choices
    return choices + [
        variant
        for layer in set(layers)
        if all(width % 8 == 0 and 16 <= width <= HEAD_DIM_TILES[-1] for width in layer[:2])
        for variant in step_variants(arch, dtype, *layer[:2], group=layer.group, page_size=page_size,
                                     softcap=layer.softcap, left_bounds=layer.left_bounds, fp8_kv=fp8_kv,
                                     most_keys=most_keys)
    ]  # fmt: skip


def layer_kernels(
    layers: Iterable[LayerStep], dtype: torch.dtype, device: torch.device, *, fp8_kv: bool = False
) -> list[KernelVariant]:
    """Of fused layers, but for their linear ones."""
    if device.type != "cuda" or not _has_kernels(dtype, device):
        return []
    from attention_backend.kernels import device as devices
    from attention_backend.kernels import gated_activation, rms_norm, rotary_store

    arch = devices.arch(device.index or 0)
    found: list[KernelVariant] = []
    for layer in set(layers):
        norms = [
            rms_norm.variant(dtype, layer.width, arch, add=x, unit_offset=layer.unit_offset) for x in (False, True)
        ]
        of_heads = 1 + layer.unit_offset if layer.normed_heads else 0
        turned = rotary_store.variant(dtype, layer.head_dim, arch, of_heads, fp8_kv=fp8_kv)
        found += [variant for variant, _ in (*norms, turned)]
        if layer.activation is not None:
            found.append(gated_activation.variant(dtype, layer.activation, arch))
    return found


def chain_kernels(chains: Iterable[ChainStep], dtype: torch.dtype, *, fp8_kv: bool = False) -> list[KernelVariant]:
    """Of chains that `layer_chain.refuses` does not refuse on the device: of any number of rows that they serve."""
    wanted = dict.fromkeys(chains)
    if not wanted:
        return []
    from attention_backend.kernels.chain_store import Store
    from attention_backend.kernels.layer_chain import variants_of

    pages = Store.FP8_PAGES if fp8_kv else Store.PAGES
    return [
        variant
        for chain in wanted
        for variant in variants_of(
            dtype, chain.activation, chain.attended_width, chain.width, chain.gated_width,
            unit_offset=chain.unit_offset, store=pages if chain.to_pages else Store.NOTHING,
            heads=None if fp8_kv else chain.heads,
        )
    ]  # fmt: skip


def linear_kernels(linears: Iterable[LinearStep], dtype: torch.dtype, device: torch.device) -> list[KernelVariant]:
    """Of linear layers of few rows, and of many rows of gated ones."""
    if device.type != "cuda" or not _has_kernels(dtype, device):
        return []
    from attention_backend.kernels import gated_linear, skinny_linear

    index = device.index or 0
    return [
        variant
        for kernel in (skinny_linear, gated_linear)
        for linear in set(linears)
        for variant in kernel.step_variants(dtype, *linear, index=index)
    ]


def make_ready(variants: Iterable[KernelVariant], device: torch.device) -> int:
    """Compiles them side by side, and loads them on a GPU: a step that comes to one that is not loaded waits for all
    that the GPU was told to do. Returns how many there are. Raises CompileError."""
    wanted = dict.fromkeys(variants)
    if not wanted:
        return 0
    built = jit.build_variants(wanted, jit.default_cache())
    if device.type == "cuda":
        for result in built:
            jit.load(result.variant, device.index or 0, result.artefact)
    return len(wanted)


def _has_kernels(dtype: torch.dtype, device: torch.device) -> bool:
    return dtype == torch.float16 or (dtype == torch.bfloat16 and torch.cuda.get_device_capability(device) >= (8, 0))
