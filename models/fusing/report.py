"""What of a model is fused, and why the rest is not, in words. Knows no weights."""

from collections import Counter
from dataclasses import dataclass, field

from models.fusing.decoder import FusedDecoder


@dataclass(frozen=True, slots=True)
class FusionReport:
    """Parts by name. Without fused parts, `unfused` says why under "model"."""

    fused: tuple[str, ...] = ()
    unfused: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        said = [", ".join(self.fused) or "nothing"]
        said += [f"{part} not: {reason}" for part, reason in self.unfused.items()]
        return "; ".join(said)


def report(decoder: FusedDecoder) -> FusionReport:
    """As it is now: adapters that come later change it."""
    fused: list[str] = []
    unfused: dict[str, str] = {}
    layers = decoder.layers
    parts = {
        "packed QKV": [layer.attention.projections.refuses() for layer in layers],
        "packed gate/up": [layer.mlp.projections.refuses() for layer in layers],
        "residual + RMSNorm": [
            None if norm.fused else f"{type(norm.module).__name__} is not the family's, or is hooked"
            for norm in [*(norm for layer in layers for norm in layer.norms), decoder.norm]
        ],
        "rotary + KV store": [None if decoder.rotary.fused else "frequencies come from the module"],
        "gated activation": [None if layer.mlp.activation else "its activation is not a fused one" for layer in layers],
    }
    for part, reasons in parts.items():
        given = Counter(reason for reason in reasons if reason is not None)
        if len(list(given.elements())) < len(reasons):
            fused.append(part)
        if given:
            reason, count = given.most_common(1)[0]
            unfused[part] = reason if count == len(reasons) else f"{reason} ({count} of {len(reasons)})"
    return FusionReport(tuple(fused), unfused)
