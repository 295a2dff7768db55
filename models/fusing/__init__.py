"""Decoders of known families with their layers fused; what is unknown stays with its Hugging Face modules."""

from models.fusing.decoder import FusedDecoder, fuse
from models.fusing.plain import NotFusedError
from models.fusing.report import FusionReport, foretell, report

__all__ = ["FusedDecoder", "FusionReport", "NotFusedError", "foretell", "fuse", "report"]
