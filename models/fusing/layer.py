"""One decoder layer as fused calls: packed projections, rotary with the KV store, paged attention, gated MLP.

Norms belong to the loop over layers, which carries the residual. Knows no batch but its metadata.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import attention_backend
from attention_backend import layers
from attention_backend.layer_chain import MOST_KEYS, ChainHeads, NextAttention, OwnAttention
from attention_backend.linears import gated_linear
from attention_backend.metadata import KVPages, PagedMetadata
from attention_backend.preparation import LinearStep
from attention_backend.problem import UNBOUNDED
from models.attention_sites import AttentionSite
from models.fusing.families import Family
from models.fusing.linears import JoinedLinears, one_linear
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
        self.out = one_linear(module.o_proj)
        self._rotates = bool(getattr(module, "use_rope", True))  # SmolLM3 leaves some layers without positions
        has_norms = hasattr(module, "q_norm")
        self.norms = tuple(Norm(norm, family, dtype) for norm in (module.q_norm, module.k_norm)) if has_norms else None

    @property
    def layer_type(self) -> str:
        return self._site.layer_type

    @property
    def turned_heads(self) -> tuple[int, bool]:
        """Head_dim, and whether heads are normalised by `layers.rotary_store`."""
        return self._site.head_dim, self._norms_with_rotary

    @property
    def _norms_with_rotary(self) -> bool:
        return self._rotates and self.norms is not None and all(norm.fused for norm in self.norms)

    @property
    def stores_products(self) -> bool:
        """Whether products are turned and stored as they are, by `layers.rotary_store` without norms."""
        return self._rotates and self.norms is None

    def queries(
        self, projected: tuple[Tensor, ...], tables: Tables, pages: KVPages, metadata: PagedMetadata
    ) -> "Queries":
        """Of what `projections` gives, `[tokens, size]` of each: what attention wants. May store keys and values."""
        q, k, v = (rows.unflatten(1, (-1, self._site.head_dim)) for rows in projected)
        norms: dict[str, Any] = {}
        if self.norms is not None:
            q_norm, k_norm = self.norms
            if self._norms_with_rotary:
                norms = {"q_norm": q_norm.weight, "k_norm": k_norm.weight, **q_norm.options}
            else:
                q, k = q_norm.module(q), k_norm.module(k)
        if not self._rotates:
            return Queries(q, k, v)
        options = {**norms, "k_scale": pages.k_scale, "v_scale": pages.v_scale}
        return Queries(layers.rotary_store(q, k, v, pages.k, pages.v, metadata.slot_mapping, *tables, **options))

    def next_attention(self, tables: Tables, pages: KVPages, metadata: PagedMetadata) -> NextAttention:
        """For a chain that ends with `queries`; only with `stores_products`."""
        return NextAttention(self._site.num_heads, pages, metadata.slot_mapping, *tables)

    @property
    def heads(self) -> ChainHeads | None:
        """For a chain that begins with this attention; None: no chain does."""
        site = self._site
        if site.window or site.chunk_size or site.softcap or not self._rotates:
            return None
        return ChainHeads(site.num_heads // site.num_kv_heads, site.num_kv_heads, site.head_dim)

    def own(self, queries: "Queries", pages: KVPages, metadata: PagedMetadata) -> OwnAttention | None:
        """For the same, of these rows; None: there are too many keys, or it is not a row a sequence against all of its
        own pages."""
        decodes = metadata.num_decodes == metadata.num_seqs == queries.q.shape[0] and metadata.decodes_here is None
        if not decodes or metadata.max_seqlen_k > MOST_KEYS or metadata.shared_decodes is not None:
            return None
        if self.heads is None or queries.k is not None or pages.k.dtype != queries.q.dtype:
            return None
        return OwnAttention(pages, metadata.block_table, metadata.seq_lens, self._site.softmax_scale)

    def __call__(self, queries: "Queries", pages: KVPages, metadata: PagedMetadata) -> Tensor:
        """-> `[tokens, heads * head_dim]`, before `out`."""
        site = self._site
        if queries.q.shape[0] == 0:  # the last layer, of a step that samples nothing
            return queries.q.flatten(1)
        out = attention_backend.paged_attention(
            queries.q,
            queries.k,
            queries.v,
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


@dataclass(frozen=True, slots=True)
class Queries:
    """Queries `[tokens, heads, head_dim]`; keys and values `[tokens, kv_heads, head_dim]` that are in no page yet."""

    q: Tensor
    k: Tensor | None = None
    v: Tensor | None = None


class FusedMLP:
    """down(act(gate(x)) * up(x))."""

    def __init__(self, module: Any, *, pack: bool) -> None:
        packed_already = getattr(module, "gate_up_proj", None)
        parts = (module.gate_proj, module.up_proj) if packed_already is None else (packed_already,)
        size = int(module.down_proj.in_features)
        self.projections = JoinedLinears(parts, [size, size], pack=pack)
        self.down = one_linear(module.down_proj)
        self.width = size
        self._activation: nn.Module = module.act_fn if packed_already is None else module.activation_fn

    @property
    def activation(self) -> str | None:
        """The name of a fused activation; None: it stays a module."""
        kind = type(self._activation)
        name = _ACTIVATIONS.get(f"{kind.__module__}.{kind.__qualname__}")
        return name if is_plain(self._activation, kind) else None

    @property
    def gated_step(self) -> LinearStep | str:
        """Gate and what it multiplies as one layer, or why they are none."""
        return self.projections.step(self.activation)

    def __call__(self, x: Tensor) -> Tensor:
        """x `[rows, width]` -> `[rows, width]`."""
        (out,) = self.down(self._gated(x))
        return out

    def _gated(self, x: Tensor) -> Tensor:
        name, whole = self.activation, self.projections.whole
        if name is not None and whole is not None and whole[1] is None:
            return gated_linear(x, whole[0], name)
        gate, up = self.projections(x)
        return self._activation(gate) * up if name is None else layers.gated_activation(gate, up, name)
