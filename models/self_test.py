"""Before a model serves: the engine's path must give what transformers' eager attention gives.

Some families run on a flattened batch and are silently wrong (state carried across sequences, dropped keyword
arguments). Two prompts are packed, cut into chunks and decoded here, and compared with each prompt alone.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from models.attention_sites import AttentionSite, attention_implementation
from models.batch import ScheduledSeq, StepBatch
from models.forward import PagedForward
from models.inputs import StepInputs
from models.kv_pool import FP8, KVScales, allocate
from models.patching import UnsupportedModelError
from models.patching.errors import refusing_calls, refusing_failures

_LENGTHS = (13, 45)
# Tokens of (first, second) prompt that each step runs: packed prefill, a mixed step, two decodes, a chunk on a prefix.
_STEPS = ((7, 30), (1, 9), (1, 1), (4, 5))
_TWICE = (1, 9)  # the step that runs again as one that samples nothing, over the same pages

#: Largest relative error of a row's logits (L2), averaged over rows.
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.1}
#: Over float8 pages: three bits of mantissa in every key and value. A wrong path is off by about 1.
_FLOAT8_TOLERANCE = 0.35
#: Where a small difference may become a whole step: quantised layers round what they are given to 8 bits or 16, and a
#: router sends a row to another expert (a few rows of a small random model in bfloat16, none in float32).
_STEPS_TOLERANCE = 0.2
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")  # transformers' names for their number


@torch.inference_mode()
def check_engine_path(
    model: PreTrainedModel, sites: Sequence[AttentionSite], *, block_size: int, scales: KVScales | None = None
) -> None:
    """Raises UnsupportedModelError when the paths disagree. With `scales` the pages are float8."""
    config = model.config.get_text_config()
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(config.vocab_size, (n,), generator=generator).tolist() for n in _LENGTHS]
    with refusing_failures(model):
        theirs = [_eager_logits(model, prompt) for prompt in prompts]
    if not all(logits.isfinite().all() for logits in theirs):
        raise UnsupportedModelError(
            f"{type(model).__name__} fails the self-test: by eager attention, too, its logits are not finite: the "
            f"weights are damaged, or {str(model.dtype).removeprefix('torch.')} is too narrow for them"
        )
    with refusing_calls(model):
        ours = _engine_logits(model, sites, prompts, block_size, scales)
    tolerance = _TOLERANCE[model.dtype] if scales is None else _FLOAT8_TOLERANCE
    routes = any(getattr(config, name, None) for name in _EXPERTS) and model.dtype != torch.float32
    if routes or getattr(model, "is_quantized", False):
        tolerance = max(tolerance, _STEPS_TOLERANCE)
    for logits, expected in zip(ours, theirs, strict=True):
        error = ((logits - expected).norm(dim=-1) / expected.norm(dim=-1)).mean().item()
        if not error <= tolerance:  # NaN fails too
            raise UnsupportedModelError(
                f"{type(model).__name__} fails the self-test: on the paged cache its logits differ from eager "
                f"attention's by {error:.2g} (relative), more than {tolerance:g}"
            )


def _eager_logits(model: PreTrainedModel, prompt: list[int]) -> Tensor:
    """float32 `[len(prompt), vocab]` of one prompt alone."""
    with attention_implementation(model, "eager"):
        ids = torch.tensor([prompt], device=model.device)
        logits: Tensor = model(input_ids=ids, use_cache=False).logits[0].float()
    return logits


def _engine_logits(
    model: PreTrainedModel,
    sites: Sequence[AttentionSite],
    prompts: list[list[int]],
    block_size: int,
    scales: KVScales | None,
) -> list[Tensor]:
    """float32 `[len(prompt), vocab]` of each prompt, through pages that interleave and do not ascend."""
    blocks = [-(-len(prompt) // block_size) for prompt in prompts]
    table = [list(range(blocks[0] + blocks[1], blocks[1], -1)), list(range(blocks[1], 0, -1))]
    dtype = model.dtype if scales is None else FP8
    caches = allocate(sites, sum(blocks) + 1, block_size, dtype, model.device, scales)
    inputs = StepInputs(
        max_num_seqs=2,
        max_num_batched_tokens=sum(_LENGTHS),
        max_blocks_per_seq=max(blocks),
        block_size=block_size,
        device=model.device,
    )
    forward = PagedForward(model)
    done = [0, 0]
    pieces: list[list[Tensor]] = [[], []]
    for counts in _STEPS:
        batch = StepBatch(
            tuple(
                ScheduledSeq(slot, prompt[start : start + count], start, blocks_of, sample=True)
                for slot, (prompt, start, count, blocks_of) in enumerate(zip(prompts, done, counts, table, strict=True))
            )
        )
        logits = forward.every_row(inputs.build(batch), caches).float()
        if counts == _TWICE:
            unsampled = StepBatch(tuple(seq._replace(sample=False) for seq in batch.seqs))
            forward.sampled_rows(inputs.build(unsampled), caches)
        for slot, rows in enumerate(logits.split(list(counts))):
            pieces[slot].append(rows)
            done[slot] += counts[slot]
    return [torch.cat(rows) for rows in pieces]
