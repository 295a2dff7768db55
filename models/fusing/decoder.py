"""The loop over a decoder's layers, on its Hugging Face modules' own weights. Knows no sampling and no requests.

(block output, residual) go from layer to layer, so each sum is one call with the norm that follows.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from attention_backend import layers
from attention_backend.metadata import KVPages
from models.attention_sites import AttentionSite, find_attention_sites
from models.fusing.families import Family, family_of
from models.fusing.layer import FusedAttention, FusedMLP
from models.fusing.norms import Norm
from models.fusing.plain import NotFusedError, is_plain
from models.fusing.rotary import StepRotary, Tables
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
        self._softcap = getattr(model.config, "final_logit_softcapping", None)
        self._structure = [model, self._inner, *(m for layer in self.layers for m in layer.structure)]

    def intact(self) -> bool:
        """Whether nothing was hooked or replaced around the layers since; what is inside them is looked at in calls."""
        return all(is_plain(module, type(module)) for module in self._structure)

    def logits(self, step: StepTensors, kv_caches: KVCaches, rows: Tensor | None) -> Tensor:
        """Logits of `rows` (int64 indices) of the flat batch, of all without: `[rows, vocab_size]`."""
        x = self._inner.embed_tokens(step.input_ids)[0]
        tables = {kind: self.rotary.tables(step.position_ids, kind, x) for kind in self._types}
        block, residual = x, None
        for layer, pages in zip(self.layers, kv_caches, strict=True):
            last = layer is self.layers[-1]
            block, residual = self._layer(layer, block, residual, tables, pages, step, rows if last else None)
        assert residual is not None
        normed, _ = self.norm.add(block, residual)
        return self._head(normed)

    def _layer(
        self,
        layer: FusedLayer,
        block: Tensor,
        residual: Tensor | None,
        tables: dict[str, Tables],
        pages: KVPages,
        step: StepTensors,
        rows: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """The next (block output, residual), of `rows` only if there are some: behind its attention, a row of the last
        layer is nobody's key."""
        if residual is None:
            normed, residual = layer.before_attention(block), block
        else:
            normed, residual = layer.before_attention.add(block, residual)
        attended = layer.attention(normed, tables[layer.attention.layer_type], pages, step.metadata)
        late = rows is not None and step.adapter_rows is not None  # adapters know the whole batch's rows
        if rows is not None and not late:
            attended, residual = attended[rows], residual[rows]
        block = layer.attention.out(attended)
        if layer.after_attention is not None:
            block = layer.after_attention(block)
        normed, residual = layer.before_mlp.add(block, residual)
        block = layer.mlp(normed)
        if layer.after_mlp is not None:
            block = layer.after_mlp(block)
        return (block[rows], residual[rows]) if late else (block, residual)

    def _head(self, normed: Tensor) -> Tensor:
        logits = self._model.lm_head(normed)
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
