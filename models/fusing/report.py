"""What of a model is fused, and why the rest is not, in words. Knows no weights."""

from collections import Counter
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel

from attention_backend import linears
from models.fusing.decoder import FusedDecoder, fuse
from models.fusing.norms import Norm
from models.fusing.plain import NotFusedError

_CHAIN = "layers' chain of few rows"
_LINEARS = "linears of few rows"
_GATES = "gates of many rows"


@dataclass(frozen=True, slots=True)
class FusionReport:
    """Parts by name. Without fused parts, `unfused` says why under "model"."""

    fused: tuple[str, ...] = ()
    unfused: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        said = [", ".join(self.fused) or "nothing"]
        said += [f"{part} not: {reason}" for part, reason in self.unfused.items()]
        return "; ".join(said)


def report(decoder: FusedDecoder, device: torch.device) -> FusionReport:
    """As it is now on that device: adapters that come later change it."""
    fused: list[str] = []
    unfused: dict[str, str] = {}
    layers = decoder.layers
    parts = {
        "packed QKV": [layer.attention.projections.refuses() for layer in layers],
        "packed gate/up": [layer.mlp.projections.refuses() for layer in layers],
        "residual + RMSNorm": [
            _of(norm) for norm in [*(norm for layer in layers for norm in layer.norms), decoder.norm]
        ],
        "rotary + KV store": [None if decoder.rotary.fused else "frequencies come from the module"],
        "gated activation": [None if layer.mlp.activation else "its activation is not a fused one" for layer in layers],
    }
    if device.type == "cuda":
        parts[_CHAIN] = [chain.refuses(device) for chain in decoder.chains]
        parts[_LINEARS] = [
            each if isinstance(each, str) else linears.refuses(device, decoder.dtype, each)
            for each in decoder.linears()
        ]
        parts[_GATES] = [
            each if isinstance(each, str) else linears.refuses_many(device, decoder.dtype, each)
            for each in decoder.gated_linears()
        ]
    of_heads = [_of(norm) for layer in layers for norm in layer.attention.norms or ()]
    if of_heads:
        parts["heads' RMSNorm"] = of_heads
    for part, reasons in parts.items():
        given = Counter(reason for reason in reasons if reason is not None)
        if len(list(given.elements())) < len(reasons):
            fused.append(part)
        if given:
            reason, count = given.most_common(1)[0]
            unfused[part] = reason if count == len(reasons) else f"{reason} ({count} of {len(reasons)})"
    return FusionReport(tuple(fused), unfused)


def _of(norm: Norm) -> str | None:
    kind = type(norm.module).__name__
    return None if norm.fused else f"{kind} is not the family's, is hooked, or of another dtype"


def foretell(model: PreTrainedModel, device: torch.device) -> FusionReport:
    """What will be fused on that device, of a model that may have no weights yet."""
    try:
        return report(fuse(model, pack=False, device=device), device)
    except NotFusedError as error:
        return FusionReport(unfused={"model": str(error)})
