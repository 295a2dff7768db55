"""A forty-line engine: chunked prefill mixed with decode, one flat row per step, over pages of 16 tokens."""

from dataclasses import dataclass, field
from typing import Any

import torch

from attention_backend.metadata import KVPages, PagedMetadata

PAGE = 16
NUM_BLOCKS = 64


@dataclass
class Sequence:
    tokens: list[int]
    length: int
    computed: int = 0
    blocks: list[int] = field(default_factory=list)


def pages(model: Any, device: torch.device) -> list[KVPages]:
    config = model.config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    sizes = (getattr(config, "qk_head_dim", None) or width, getattr(config, "v_head_dim", None) or width)
    # NaN shows any read of a slot that was never written.
    return [
        KVPages(*(torch.full((NUM_BLOCKS, heads, PAGE, size), float("nan"), device=device) for size in sizes))
        for _ in range(config.num_hidden_layers)
    ]


def generate(
    model: Any, prompts: list[list[int]], new_tokens: int, budget: int, device: torch.device
) -> list[list[int]]:
    """Greedy tokens of every prompt, `budget` tokens a step, decodes first."""
    free, caches = list(range(NUM_BLOCKS)), pages(model, device)
    sequences = [Sequence(list(prompt), len(prompt) + new_tokens) for prompt in prompts]
    while True:
        plan, left = [], budget
        running = [sequence for sequence in sequences if len(sequence.tokens) < sequence.length]
        for sequence in sorted(running, key=lambda s: len(s.tokens) - s.computed):
            count = min(len(sequence.tokens) - sequence.computed, left)
            if count:
                plan.append((sequence, count))
                left -= count
        if not plan:
            return [sequence.tokens for sequence in sequences]
        plan.sort(key=lambda entry: entry[1] != 1)
        _step(model, plan, free, caches, device)


def _step(
    model: Any,
    plan: list[tuple[Sequence, int]],
    free: list[int],
    caches: list[KVPages],
    device: torch.device,
) -> None:
    ids: list[int] = []
    positions: list[int] = []
    slots, cu, lengths = [], [0], []
    for sequence, count in plan:
        end = sequence.computed + count
        while len(sequence.blocks) * PAGE < end:
            sequence.blocks.append(free.pop())
        ids += sequence.tokens[sequence.computed : end]
        positions += range(sequence.computed, end)
        slots += [sequence.blocks[p // PAGE] * PAGE + p % PAGE for p in range(sequence.computed, end)]
        cu.append(cu[-1] + count)
        lengths.append(end)
        sequence.computed = end
    width = max(len(sequence.blocks) for sequence, _ in plan)
    table = [sequence.blocks + [0] * (width - len(sequence.blocks)) for sequence, _ in plan]
    metadata = PagedMetadata(
        cu_seqlens_q=torch.tensor(cu, dtype=torch.int32, device=device),
        seq_lens=torch.tensor(lengths, dtype=torch.int32, device=device),
        block_table=torch.tensor(table, dtype=torch.int32, device=device),
        slot_mapping=torch.tensor(slots, device=device),
        num_decodes=sum(count == 1 for _, count in plan),
        max_seqlen_q=max(count for _, count in plan),
        max_seqlen_k=max(lengths),
    )
    with torch.no_grad():
        logits = model(
            input_ids=torch.tensor([ids], device=device),
            position_ids=torch.tensor([positions], device=device),
            use_cache=False,
            paged_metadata=metadata,
            kv_caches=caches,
        ).logits[0]
    for (sequence, _), last in zip(plan, cu[1:], strict=True):
        if sequence.computed == len(sequence.tokens):
            sequence.tokens.append(int(logits[last - 1].argmax()))
