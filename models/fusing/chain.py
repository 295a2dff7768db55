"""What lies between a layer's attention and the next one's as one call, in steps of few rows. Computes no attention.

The layer's own parts stay in charge of what this refuses. Every call looks at that, because adapters and hooks come
after a model was loaded.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attention_backend import layer_chain
from attention_backend.layer_chain import ChainHeads, ChainOptions, ChainWeights, OwnAttention
from attention_backend.metadata import KVPages, PagedMetadata
from attention_backend.preparation import ChainStep
from models.fusing.layer import FusedAttention, Queries
from models.fusing.linears import JoinedLinears, facts
from models.fusing.norms import Norm
from models.fusing.rotary import Tables

if TYPE_CHECKING:
    from models.fusing.decoder import FusedLayer


class LayerChain:
    """Of a layer: its attention's output, its MLP, and the projections that follow, of the next layer or the head's."""

    def __init__(
        self, layer: "FusedLayer", next_norm: Norm, following: JoinedLinears, attention: FusedAttention | None
    ) -> None:
        """`attention`: the next layer's, whose projections are the `following`; None: they are the head's."""
        self._layer = layer
        self._next_norm = next_norm
        self._attention = attention
        self._out, self._down = layer.attention.out, layer.mlp.down
        self._following = following

    def refuses(self, device: torch.device, rows: int = 1) -> str | None:
        """Why so many rows are more than one call there; None: they are one."""
        if self._layer.after_attention is not None:
            return "a block's result is normalised before it is added"
        if not self._layer.before_mlp.fused or not self._next_norm.fused:
            return "a norm is not the family's, is hooked, or of another dtype"
        if self._layer.mlp.activation is None:
            return "its activation is not a fused one"
        before = (self._out, self._layer.mlp.projections, self._down)
        reason = next((r for r in (linears.refuses() for linears in (*before, self._following)) if r is not None), None)
        if reason is not None:
            return reason
        if any(linears.modules[0].bias is not None for linears in before):
            return "the attention's output or the MLP has a bias"
        return self._of_sizes(device, rows)

    def _of_sizes(self, device: torch.device, rows: int, heads: ChainHeads | None = None) -> str | None:
        out, down = self._out.modules[0], self._down.modules[0]
        if not hasattr(out, "in_features"):
            return f"they are {type(out).__name__}"
        return layer_chain.refuses(
            device, facts(down)[0],
            attended_width=out.in_features, width=down.out_features, gated_width=down.in_features, rows=rows,
            heads=heads,
        )  # fmt: skip

    def step(self, device: torch.device) -> ChainStep | None:
        """What its kernels are compiled for; None: there are none."""
        activation = self._layer.mlp.activation
        if self.refuses(device) is not None or activation is None:
            return None
        out, down = self._out.modules[0], self._down.modules[0]
        to_pages = self._attention is not None and self._attention.stores_products
        unit_offset = self._layer.before_mlp.options["unit_offset"]
        sizes = (out.in_features, down.out_features, down.in_features)
        return ChainStep(*sizes, activation, unit_offset, to_pages, self._layer.attention.heads)

    def attends(self, device: torch.device) -> bool:
        """Whether a call may begin with the layer's attention."""
        heads = self._layer.attention.heads
        return heads is not None and self.refuses(device) is None and self._of_sizes(device, 1, heads) is None

    def serves(self, attended: Tensor, own: OwnAttention | None = None) -> bool:
        """Whether these rows, `[rows, ...]`, are one call's; `own`: with their attention in front."""
        rows, device = attended.shape[0], attended.device
        heads = None if own is None else self._layer.attention.heads
        few = 0 < rows <= layer_chain.MOST_ROWS and self._of_sizes(device, rows, heads) is None  # is soon said
        return few and self.refuses(device, rows) is None and self._weights() is not None

    def __call__(
        self, attended: Tensor, residual: Tensor, own: OwnAttention | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """attended `[rows, heads * head_dim]`, with `own` queries `[rows, heads, head_dim]`; residual `[rows, width]`
        -> the next residual, and `[rows, size]` of each size of the projections that follow. `serves` has said yes."""
        residual, products = layer_chain.layer_chain(attended, residual, *self._call(), own=own)
        return residual, self._following.split(products)

    def to_queries(
        self,
        attended: Tensor,
        residual: Tensor,
        tables: Tables,
        pages: KVPages,
        metadata: PagedMetadata,
        own: OwnAttention | None = None,
    ) -> tuple[Tensor, Queries]:
        """The same, and what the next attention makes of its projections, where there is one; `tables` and `pages` are
        that layer's."""
        attention = self._attention
        assert attention is not None
        if not attention.stores_products:
            residual, projected = self(attended, residual, own)
            return residual, attention.queries(projected, tables, pages, metadata)
        following = attention.next_attention(tables, pages, metadata)
        residual, q = layer_chain.layer_chain_to_pages(attended, residual, *self._call(), following, own=own)
        return residual, Queries(q)

    def _call(self) -> tuple[ChainWeights, ChainOptions]:
        weights, activation = self._weights(), self._layer.mlp.activation
        assert weights is not None
        assert activation is not None
        before, after = self._layer.before_mlp.options, self._next_norm.options
        return weights, ChainOptions(activation, before["eps"], after["eps"], unit_offset=before["unit_offset"])

    def _weights(self) -> ChainWeights | None:
        """None: not all of them are where they were packed."""
        found = [linears.whole for linears in (self._out, self._layer.mlp.projections, self._down, self._following)]
        if any(each is None for each in found):
            return None
        out, gate_up, down, following = (each for each in found if each is not None)
        norms = (self._layer.before_mlp.weight, self._next_norm.weight)
        return ChainWeights(out[0], norms[0], gate_up[0], down[0], norms[1], *following)
