"""Tiny random models of every fused family, and their logits on the engine's path, fused and by their own modules."""

from collections.abc import Sequence
from typing import Any

import torch
from tiny_models import TINY, random_model
from torch import Tensor
from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)

from models.attention_sites import AttentionSite, find_attention_sites
from models.batch import ScheduledSeq, StepBatch
from models.forward import PagedForward
from models.inputs import StepInputs
from models.kv_pool import allocate

_GEMMA: dict[str, Any] = {"head_dim": 32, "query_pre_attn_scalar": 20, "sliding_window": 16}
_LONG: dict[str, Any] = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}
_HALF: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}

CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**TINY),
    "llama with wide heads": LlamaConfig(**TINY, head_dim=32),
    "llama with biases": LlamaConfig(**TINY, attention_bias=True, mlp_bias=True),
    "llama with scaled cosines": LlamaConfig(**TINY, rope_parameters=_LONG),
    "mistral": MistralConfig(**TINY, sliding_window=16),
    "qwen2": Qwen2Config(**TINY),
    "qwen3": Qwen3Config(**TINY, head_dim=32),
    "phi3": Phi3Config(**TINY),
    "phi3 turned in part": Phi3Config(**TINY, rope_parameters=_HALF),
    "smollm3": SmolLM3Config(**TINY, no_rope_layers=[1, 0, 1]),
    "gemma2": Gemma2Config(**TINY, **_GEMMA),
    "gemma3": Gemma3TextConfig(**TINY, **_GEMMA, layer_types=["sliding_attention", "full_attention", "full_attention"]),
}
#: New tokens of (first, second) prompt in each step: packed prefill, a mixed step, decodes, a chunk behind a prefix.
STEPS = ((7, 30), (1, 9), (1, 1), (4, 5))
_BLOCK = 16


def made(name: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Norms of all sizes too, so that none is forgotten."""
    model = random_model(CONFIGS[name])
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name or "bias" in parameter_name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3 + 0.4)
    return model.to(dtype)


@torch.inference_mode()
def logits(
    model: PreTrainedModel,
    forward: PagedForward,
    *,
    sampled: bool = False,
    sites: Sequence[AttentionSite] | None = None,
) -> Tensor:
    """`[rows, vocab_size]` of all steps, in order: every row, or with `sampled` the last of each sequence."""
    generator = torch.Generator().manual_seed(3)
    length = sum(counts[0] + counts[1] for counts in STEPS)
    prompts = torch.randint(model.config.vocab_size, (2, length), generator=generator).tolist()
    tables = [[5, 3, 1, 8], [2, 7, 4, 6]]
    caches = allocate(sites or find_attention_sites(model), 9, _BLOCK, model.dtype, model.device)
    inputs = StepInputs(
        max_num_seqs=2, max_num_batched_tokens=64, max_blocks_per_seq=4, block_size=_BLOCK, device=model.device
    )
    done, rows = [0, 0], []
    for counts in STEPS:
        seqs = [
            ScheduledSeq(slot, prompts[slot][done[slot] : done[slot] + count], done[slot], tables[slot], sample=True)
            for slot, count in enumerate(counts)
        ]
        step = inputs.build(StepBatch(tuple(seqs)))
        rows.append((forward.sampled_rows if sampled else forward.every_row)(step, caches))
        done = [have + count for have, count in zip(done, counts, strict=True)]
    return torch.cat(rows)
