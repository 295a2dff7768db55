"""What float8 keys and values are multiplied by, per layer and head: measured on this model before it serves. Knows no
requests.

e4m3 keeps 3 bits of mantissa over a range of 2^15, so a scale need only bring a head's numbers well inside of it: the
largest ones seen lie a factor of 8 under the largest that can be stored. Scales are powers of two: what is stored then
stands for exactly what a 16-bit copy of it holds, and a restart on other kernels, whose sums differ in their last bits,
finds the same scales, so pages that were kept stay right. A checkpoint's own k_scale and v_scale are not read.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from models.attention_sites import AttentionSite
from models.batch import ScheduledSeq, StepBatch
from models.forward import PagedForward
from models.inputs import StepInputs
from models.kv_pool import FP8, KVScales, allocate

_TOKENS = 512
_HEADROOM = 8.0  # how much larger than any seen a number may be before it is cut off


@torch.inference_mode()
def calibrate(model: PreTrainedModel, sites: Sequence[AttentionSite], *, block_size: int) -> KVScales:
    """One forward over random tokens, the same in every process."""
    config = model.config.get_text_config()
    count = min(_TOKENS, config.max_position_embeddings)
    blocks = -(-count // block_size)
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(config.vocab_size, (count,), generator=generator).tolist()
    caches = allocate(sites, blocks + 1, block_size, model.dtype, model.device)
    inputs = StepInputs(
        max_num_seqs=1,
        max_num_batched_tokens=count,
        max_blocks_per_seq=blocks,
        block_size=block_size,
        device=model.device,
    )
    batch = StepBatch((ScheduledSeq(0, prompt, 0, range(1, blocks + 1), sample=True),))
    PagedForward(model, fused=False).sampled_rows(inputs.build(batch), caches)
    return [(_scale(pages.k), _scale(pages.v)) for pages in caches]


def _scale(pages: Tensor) -> Tensor:
    """float32 `[num_kv_heads]` of `[num_blocks, num_kv_heads, block_size, dim]`."""
    largest = pages.abs().amax((0, 2, 3)).float() * (_HEADROOM / torch.finfo(FP8).max)
    usable = largest.isfinite() & (largest > 0)
    # A head of zeros may hold anything later; one of NaN is the self-test's to refuse.
    return torch.where(usable, largest, 1.0).log2().ceil().exp2()
