"""Compiles and loads what a model's steps will want, all at once, before a first step meets one after another."""

from collections.abc import Collection, Iterable
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


class ChainStep(NamedTuple):
    """What decides about the kernels of `layer_chain`, or with `to_pages` of `layer_chain_to_pages`."""

    attended_width: int
    width: int
    gated_width: int
    activation: str
    unit_offset: bool
    to_pages: bool
    heads: ChainHeads | None  # of the attention in front, where it may be part of it


class LinearStep(NamedTuple):
    """A linear layer: its weight's rows and columns."""

    width: int
    depth: int
    activation: str | None = None  # of a gated one, half of whose rows are the gate's
    adds: bool = False  # to a residual


def prepare_step_kernels(
    layers: Iterable[StepLayer],
    dtype: torch.dtype,
    device: torch.device,
    *,
    page_size: int,
    most_keys: int,
    fp8_kv: bool = False,
) -> int:
    """For sequences of up to `most_keys` tokens. Returns how many kernels were compiled or found in the cache: none on
    a CPU, none for float32, whose kernels are few, and none for what dispatch refuses, which says why when it is
    called. Raises CompileError."""
    if device.type != "cuda" or not _has_kernels(dtype, device):
        return 0
    from attention_backend.kernels import device as devices
    from attention_backend.kernels.step_kernels import step_variants

    arch = devices.arch(device.index or 0)
    variants = {
        variant: None
        for layer in set(layers)
        if all(width % 8 == 0 and 16 <= width <= HEAD_DIM_TILES[-1] for width in layer[:2])
        for variant in step_variants(arch, dtype, *layer[:2], group=layer.group, page_size=page_size,
                                     softcap=layer.softcap, fp8_kv=fp8_kv, most_keys=most_keys)
    }  # fmt: skip
    return _made_ready(variants, device)


def prepare_chain_kernels(
    chains: Iterable[ChainStep], dtype: torch.dtype, device: torch.device | None = None, *, fp8_kv: bool = False
) -> int:
    """The same for chains that `layer_chain.refuses` does not refuse on the device: of any number of rows that they
    serve. `device` None: they are compiled, for nobody yet."""
    wanted = dict.fromkeys(chains)
    if not wanted:
        return 0
    from attention_backend.kernels.chain_store import Store
    from attention_backend.kernels.layer_chain import variants_of

    pages = Store.FP8_PAGES if fp8_kv else Store.PAGES
    variants = dict.fromkeys(
        variant
        for chain in wanted
        for variant in variants_of(
            dtype, chain.activation, chain.attended_width, chain.width, chain.gated_width,
            unit_offset=chain.unit_offset, store=pages if chain.to_pages else Store.NOTHING,
            heads=None if fp8_kv else chain.heads,
        )
    )  # fmt: skip
    return _made_ready(variants, device)


def prepare_linear_kernels(linears: Iterable[LinearStep], dtype: torch.dtype, device: torch.device) -> int:
    """The same for linear layers of few rows, and for many rows of gated ones and of those that add to a residual."""
    if device.type != "cuda" or not _has_kernels(dtype, device):
        return 0
    from attention_backend.kernels import gemm, skinny_linear

    index = device.index or 0
    variants = {
        variant: None
        for linear in set(linears)
        for variant in (
            *skinny_linear.step_variants(dtype, *linear[:3], index=index),
            *gemm.step_variants(dtype, *linear, index=index),
        )
    }
    return _made_ready(variants, device)


def _made_ready(variants: Collection[KernelVariant], device: torch.device | None) -> int:
    """Compiled, and loaded on a GPU: a step that comes to one that is not waits for all that the GPU was told to do."""
    jit.build_variants(variants, jit.default_cache())
    if device is not None and device.type == "cuda":
        for variant in variants:
            jit.load(variant, device.index or 0)
    return len(variants)


def _has_kernels(dtype: torch.dtype, device: torch.device) -> bool:
    return dtype == torch.float16 or (dtype == torch.bfloat16 and torch.cuda.get_device_capability(device) >= (8, 0))
