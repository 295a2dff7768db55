"""All contenders: importing this registers them."""

from benchmarks import (
    attention_backward,
    attention_features,
    attention_fp8,
    attention_ours,
    attention_peers,
    attention_torch,
)
from benchmarks.attention_registry import REGISTRY, Call, Contender, chosen, peer_versions, peers_found

__all__ = [
    "REGISTRY",
    "Call",
    "Contender",
    "attention_backward",
    "attention_features",
    "attention_fp8",
    "attention_ours",
    "attention_peers",
    "attention_torch",
    "chosen",
    "peer_versions",
    "peers_found",
]
