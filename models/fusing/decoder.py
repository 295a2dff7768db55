"""The loop over a decoder's layers, on its Hugging Face modules' own weights. Knows no sampling and no requests.

(block output, residual) go from layer to layer, so each sum is one call with the norm that follows.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from attention_backend import layers
from attention_backend.preparation import LayerStep, LinearStep
from models.attention_sites import AttentionSite, find_attention_sites
from models.fusing.chain import LayerChain
from models.fusing.families import Family, family_of
from models.fusing.layer import FusedAttention, FusedMLP, Queries
from models.fusing.linears import one_linear
from models.fusing.norms import Norm
from models.fusing.plain import NotFusedError, is_plain
from models.fusing.rotary import StepRotary
from models.inputs import StepTensors
from models.kv_pool import KVCaches


class FusedLayer:
    """A decoder layer's blocks and norms; `after_*` are there in families that normalise a block's result too."""

    def __init__(self, module: Any, site: AttentionSite, family: Family, dtype: torch.dtype, *, pack: bool) -> None:
        def norm(name: str) -> Norm:
            return Norm(getattr(module, name), family, dtype)

        self.attention = FusedAttention(module.self_attn, site, family, dtype, pack=pack)
        self.mlp = FusedMLP(module.mlp, pack=pack)
        self.before_attention = norm("input_layernorm")
        self.after_attention = norm("post_attention_layernorm") if family.sandwich else None
        self.before_mlp = norm("pre_feedforward_layernorm" if family.sandwich else "post_attention_layernorm")
        self.after_mlp = norm("post_feedforward_layernorm") if family.sandwich else None
        self.structure = (module, module.self_attn, module.mlp)

    @property
    def norms(self) -> list[Norm]:
        found = (self.before_attention, self.after_attention, self.before_mlp, self.after_mlp)
        return [norm for norm in found if norm is not None]


class FusedDecoder:
    """Use `fuse`. Weights are read from the modules in every call, so what changes them is seen."""

    def __init__(self, model: Any, family: Family, sites: Sequence[AttentionSite], *, pack: bool) -> None:
        self.family = family
        self._model = model
        self._inner = model.model
        if any(site.has_sinks or site.head_dim != site.head_dim_v for site in sites):
            raise NotFusedError("its attention has sinks, or values of another head_dim than its keys")
        self._types = {site.layer_type for site in sites}
        self.rotary = StepRotary(self._inner.rotary_emb, family)
        self.layers: list[FusedLayer] = []
        for module, site in zip(self._inner.layers, sites, strict=True):
            self.layers.append(FusedLayer(module, site, family, model.dtype, pack=pack))
            if pack and model.device.type == "cuda":
                torch.cuda.empty_cache()  # the parts' memory, before the next layer's whole is allocated
        self.norm = Norm(self._inner.norm, family, model.dtype)
        head = one_linear(model.lm_head)
        following = [
            (layer.before_attention, layer.attention.projections, layer.attention) for layer in self.layers[1:]
        ]
        self.chains = [
            LayerChain(layer, *next_of)
            for layer, next_of in zip(self.layers, [*following, (self.norm, head, None)], strict=True)
        ]
        self._softcap = model.config.final_logit_softcapping if family.softcap else None
        self.between_layers: Callable[[], None] | None = None  # called in front of each layer
        self._structure = [model, self._inner, *(m for layer in self.layers for m in layer.structure)]

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self._model.dtype
        return dtype

    def intact(self) -> bool:
        """Whether nothing was hooked or replaced around the layers since; what is inside them is looked at in calls."""
        return all(is_plain(module, type(module)) for module in self._structure)

    def linears(self) -> Iterator[LinearStep | str]:
        """Of all layers, what is one product each, or why it is not."""
        for layer in self.layers:
            yield from (layer.attention.projections.step(), layer.attention.out.step())
            yield from (layer.mlp.gated_step, layer.mlp.down.step())

    def gated_linears(self) -> Iterator[LinearStep | str]:
        """Those of them that are gates and what these multiply."""
        return (layer.mlp.gated_step for layer in self.layers)

    def layer_steps(self) -> Iterator[LayerStep]:
        """What decides about the kernels of each layer, beside attention's and linear ones."""
        width, unit_offset = int(self._model.config.hidden_size), self.family.unit_offset
        for layer in self.layers:
            head_dim, normed = layer.attention.turned_heads
            yield LayerStep(width, head_dim, unit_offset, normed, layer.mlp.activation)

    def logits(self, step: StepTensors, kv_caches: KVCaches, rows: Tensor | None) -> Tensor:
        """Logits of `rows` (int64 indices) of the flat batch, of all without: `[rows, vocab_size]`."""
        return self._run(step, kv_caches, rows, self.head)

    def hidden(self, step: StepTensors, kv_caches: KVCaches, rows: Tensor) -> Tensor:
        """What `head` makes logits of: `[rows, hidden_size]`. The step has no `sampled`."""
        if step.sampled is not None:
            raise ValueError("the last layer's attention would be of samples alone")
        return self._run(step, kv_caches, rows, lambda normed: normed)

    def head(self, normed: Tensor) -> Tensor:
        return self._capped(self._model.lm_head(normed))

    def _run(
        self, step: StepTensors, kv_caches: KVCaches, rows: Tensor | None, finish: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """`finish`: `head`, unless `rows` are given and the step has no `sampled`."""
        x = self._inner.embed_tokens(step.input_ids)[0]
        tables = {kind: self.rotary.tables(step.position_ids, kind, x) for kind in self._types}
        block, residual = x, None
        queries: Queries | None = None  # of the next attention, where a chain gave them
        last, metadata = len(self.layers) - 1, step.metadata
        for i, (layer, chain, pages) in enumerate(zip(self.layers, self.chains, kv_caches, strict=True)):
            if self.between_layers is not None:
                self.between_layers()
            if queries is None:
                normed, residual = self._before_attention(layer, block, residual)
                projected = layer.attention.projections(normed)
                queries = layer.attention.queries(projected, tables[layer.attention.layer_type], pages, metadata)
            assert residual is not None
            if i == last and rows is not None and not len(rows) and queries.k is None:
                # Keys and values are in their pages, and nobody asks for more. (Some quantised layers fail on no rows.)
                return x.new_empty(0, self._model.lm_head.out_features)
            if i == last and rows is not None and step.sampled is not None and queries.k is None:
                queries, residual, metadata, rows = Queries(queries.q[rows]), residual[rows], step.sampled, None
            whole = i < last or rows is None  # every row goes on
            own = layer.attention.own(queries, pages, metadata) if whole else None
            if own is None or not chain.serves(queries.q, own):
                own = None
            attended = layer.attention(queries, pages, metadata) if own is None else queries.q
            queries = None
            if own is not None or (whole and chain.serves(attended)):
                if i == last:
                    return self._capped(chain(attended, residual, own)[1][0])
                kind = self.layers[i + 1].attention.layer_type
                residual, queries = chain.to_queries(attended, residual, tables[kind], kv_caches[i + 1], metadata, own)
            else:
                block, residual = self._after_attention(layer, attended, residual, step, rows if i == last else None)
        assert residual is not None
        normed, _ = self.norm.add(block, residual)
        return finish(normed)

    def _before_attention(self, layer: FusedLayer, block: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """The norm of (block + residual), and the next residual."""
        if residual is None:
            return layer.before_attention(block), block
        return layer.before_attention.add(block, residual)

    def _after_attention(
        self, layer: FusedLayer, attended: Tensor, residual: Tensor, step: StepTensors, rows: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The next (block output, residual), of `rows` only if there are some: behind its attention, a row of the last
        layer is nobody's key."""
        late = rows is not None and step.adapter_rows is not None  # adapters know the whole batch's rows
        if rows is not None and not late:
            attended, residual = attended[rows], residual[rows]
        (block,) = layer.attention.out(attended)
        if layer.after_attention is not None:
            block = layer.after_attention(block)
        normed, residual = layer.before_mlp.add(block, residual)
        block = layer.mlp(normed)
        if layer.after_mlp is not None:
            block = layer.after_mlp(block)
        return (block[rows], residual[rows]) if late else (block, residual)

    def _capped(self, logits: Tensor) -> Tensor:
        if self._softcap is None:
            return logits
        return torch.tanh(logits / self._softcap) * self._softcap


def fuse(model: PreTrainedModel, *, pack: bool = True, device: torch.device | None = None) -> FusedDecoder:
    """The decoder over the model's own weights. May be repeated.

    With `pack`, projections of one input lie in one tensor from now on, and the modules' parameters are views of it:
    the modules still compute what they did. `device` is where it will run (where it is, by default). Raises
    NotFusedError, and has then changed nothing.
    """
    family = family_of(model)
    sites = find_attention_sites(model)
    if (device or model.device).type != "cpu":
        _refuse_sizes(model, StepRotary(model.model.rotary_emb, family), sites)
    return FusedDecoder(model, family, sites, pack=pack)


def _refuse_sizes(model: Any, rotary: StepRotary, sites: Sequence[AttentionSite]) -> None:
    """Raises NotFusedError for sizes that no kernel serves."""
    for site in sites:
        reason = layers.refuses(
            width=model.config.hidden_size,
            gated_width=model.config.intermediate_size,
            head_dim=site.head_dim,
            rotary_dim=rotary.rotary_dim(site.layer_type),
        )
        if reason is not None:
            raise NotFusedError(reason)
