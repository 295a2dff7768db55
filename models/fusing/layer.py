"""One decoder layer as fused calls: packed projections, rotary with the KV store, paged attention, gated MLP.

Norms belong to the loop over layers, which carries the residual. Knows no batch but its metadata.
"""

from typing import Any

import torch
from torch import Tensor, nn

import attention_backend
from attention_backend import layers
from attention_backend.metadata import KVPages, PagedMetadata
from attention_backend.problem import UNBOUNDED
from models.attention_sites import AttentionSite
from models.fusing.families import Family
from models.fusing.linears import JoinedLinears
from models.fusing.norms import Norm
from models.fusing.plain import is_plain
from models.fusing.rotary import Tables

#: transformers' classes of activations -> ours.
_ACTIVATIONS = {
    "torch.nn.modules.activation.SiLU": "silu",
    "transformers.activations.SiLUActivation": "silu",
    "transformers.activations.GELUTanh": "gelu_tanh",
}


class FusedAttention:
    """Projections, heads' norms, rotary, pages, attention. `out` is called by itself: the last layer needs few rows."""

    def __init__(self, module: Any, site: AttentionSite, family: Family, dtype: torch.dtype, *, pack: bool) -> None:
        self._site = site
        sizes = [heads * site.head_dim for heads in (site.num_heads, site.num_kv_heads, site.num_kv_heads)]
        packed_already = getattr(module, "qkv_proj", None)
        parts = (module.q_proj, module.k_proj, module.v_proj) if packed_already is None else (packed_already,)
        self.projections = JoinedLinears(parts, sizes, pack=pack)
        self.out: nn.Module = module.o_proj
        self._rotates = bool(getattr(module, "use_rope", True))  # SmolLM3 leaves some layers without positions
        has_norms = hasattr(module, "q_norm")
        self.norms = tuple(Norm(norm, family, dtype) for norm in (module.q_norm, module.k_norm)) if has_norms else None

    @property
    def layer_type(self) -> str:
        return self._site.layer_type

    def __call__(
        self, projected: tuple[Tensor, ...], tables: Tables, pages: KVPages, metadata: PagedMetadata
    ) -> Tensor:
        """What `projections` gives, `[tokens, size]` of each -> `[tokens, heads * head_dim]`, before `out`."""
        site = self._site
        q, k, v = (rows.unflatten(1, (-1, site.head_dim)) for rows in projected)
        norms: dict[str, Any] = {}
        if self.norms is not None:
            q_norm, k_norm = self.norms
            if q_norm.fused and k_norm.fused and self._rotates:
                norms = {"q_norm": q_norm.weight, "k_norm": k_norm.weight, **q_norm.options}
            else:
                q, k = q_norm.module(q), k_norm.module(k)
        new: tuple[Tensor | None, Tensor | None] = (k, v)
        if self._rotates:
            q, new = self._rotate_and_store(q, k, v, tables, pages, metadata, norms), (None, None)
        out = attention_backend.paged_attention(
            q,
            *new,
            pages.k,
            pages.v,
            metadata,
            softmax_scale=site.softmax_scale,
            window_left=site.window - 1 if site.window else UNBOUNDED,
            chunk_size=site.chunk_size,
            softcap=site.softcap,
            k_scale=pages.k_scale,
            v_scale=pages.v_scale,
        )
        return out.flatten(1)

    def _rotate_and_store(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        tables: Tables,
        pages: KVPages,
        metadata: PagedMetadata,
        norms: dict[str, Any],
    ) -> Tensor:
        options = {**norms, "k_scale": pages.k_scale, "v_scale": pages.v_scale}
        return layers.rotary_store(q, k, v, pages.k, pages.v, metadata.slot_mapping, *tables, **options)


class FusedMLP:
    """down(act(gate(x)) * up(x))."""

    def __init__(self, module: Any, *, pack: bool) -> None:
        packed_already = getattr(module, "gate_up_proj", None)
        parts = (module.gate_proj, module.up_proj) if packed_already is None else (packed_already,)
        size = int(module.down_proj.in_features)
        self.projections = JoinedLinears(parts, [size, size], pack=pack)
        self.down: nn.Module = module.down_proj
        self.width = size
        self._activation: nn.Module = module.act_fn if packed_already is None else module.activation_fn

    @property
    def activation(self) -> str | None:
        """The name of a fused activation; None: it stays a module."""
        kind = type(self._activation)
        name = _ACTIVATIONS.get(f"{kind.__module__}.{kind.__qualname__}")
        return name if is_plain(self._activation, kind) else None

    def __call__(self, x: Tensor) -> Tensor:
        """x `[rows, width]` -> `[rows, width]`."""
        gate, up = self.projections(x)
        name = self.activation
        gated = self._activation(gate) * up if name is None else layers.gated_activation(gate, up, name)
        return self.down(gated)
