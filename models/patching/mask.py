"""The mask function of the name "longwave": a descriptor of a few integers per row instead of an N x N mask.

A pattern it does not know is evaluated up to MAX_DENSE_KEYS keys and refused beyond, by name; padding is never dropped.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import masking_utils

from attention_backend.operators import readable
from models.patching import descriptor
from models.patching.errors import UnsupportedCallError
from models.patching.own_attention import REASON, is_bypassed_by
from models.patching.rule import MaskFunction, MaskRule, classify, describe

#: The longest sequence for which a pattern we cannot name is written out as an N x N mask (32 MiB of bf16 a row).
MAX_DENSE_KEYS = 4096

#: Families whose layers do arithmetic on the mask itself: they need the N x N tensor.
MASK_EDITORS = frozenset(
    {"axk2", "deepseek_v32", "deepseek_v4", "doge", "dots3_note", "dots3_note_text", "glm5_next", "glm5_next_text"}
    | {"glm_moe_dsa", "hy_v4", "mistral_large4", "mistral_large4_text", "pix2struct", "pix2struct_text_model"}
    | {"qwen4_exp", "qwen4_exp_text"}
)

#: Options that only say when a written-out mask could be left out, or repeat what the closure says.
_HINTS = frozenset({"allow_is_bidirectional_skip", "allow_is_causal_skip", "allow_torch_fix", "local_size"})


def longwave_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: MaskFunction = masking_utils.causal_mask_function,
    attention_mask: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    config: Any = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **hints: Any,
) -> Tensor:
    """transformers' mask interface. `attention_mask` is the 2-D padding mask, bool `[batch, keys so far]`, or None.

    Nothing here waits for the device, except for packed sequences given by their position ids alone (twice a forward).
    """
    model_type = getattr(config, "model_type", "unknown")
    if model_type in MASK_EDITORS:
        raise UnsupportedCallError(f"{model_type} computes with its attention mask and needs it written out")
    if is_bypassed_by(type(config)):  # and would add our descriptor to its scores
        raise UnsupportedCallError(f"{model_type} {REASON}")
    if hints.keys() - _HINTS:
        raise UnsupportedCallError(f"{model_type}: mask options {sorted(hints.keys() - _HINTS)} are not known here")
    device = torch.device(device)
    rule = classify(mask_function)
    if rule is None or (rule.sequence_ids is not None and attention_mask is not None):
        return _dense(
            model_type, dtype, batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset,
            kv_offset=kv_offset, mask_function=mask_function, attention_mask=attention_mask, use_vmap=use_vmap,
            device=device,
        )  # fmt: skip
    if rule.sequence_ids is not None:
        return _packed(rule, q_length, kv_length, device)
    desc = descriptor.encode_rows(rule, batch_size, q_length, kv_length, q_offset, kv_offset, device)
    if attention_mask is None:
        return desc[:, None, None, :]
    key_mask = _keys_in_use(attention_mask, kv_length, kv_offset)
    descriptor.pad_rows(desc, rule, key_mask)
    if _is_one_interval(desc, key_mask):
        return desc[:, None, None, :]
    return descriptor.attach_key_mask(desc, key_mask)


def _keys_in_use(attention_mask: Tensor, kv_length: int, kv_offset: int) -> Tensor:
    """bool `[batch, kv_length]`: the padding mask of the keys handed to the layers; keys beyond it are unused."""
    missing = kv_offset + kv_length - attention_mask.shape[-1]
    if missing > 0:  # a static cache: its free slots
        attention_mask = torch.nn.functional.pad(attention_mask, (0, missing))
    return attention_mask[:, kv_offset : kv_offset + kv_length]


def _is_one_interval(desc: Tensor, key_mask: Tensor) -> bool:
    """Whether START and STOP say it all. Only asked where the answer is free: elsewhere the key mask always travels.

    On a GPU the question would stop the host once a mask, so once a token in generate(); a byte a key costs the
    attention less than 1/100 of the key itself (head_dim 64, bf16).
    """
    if not readable(key_mask):
        return False
    index = torch.arange(key_mask.shape[1], dtype=torch.int32)
    interval = (index >= desc[:, 0:1]) & (index < desc[:, 1:2])
    return bool((interval == key_mask).all())


@torch.compiler.disable
def _packed(rule: MaskRule, q_length: int, kv_length: int, device: torch.device) -> Tensor:
    """Rows that hold several sequences each become a varlen call. Waits for the device to learn how many there are."""
    ids = rule.sequence_ids
    assert ids is not None
    if q_length != kv_length:
        raise UnsupportedCallError(f"packed sequences with {q_length} queries and {kv_length} keys: lengths must agree")
    batch = ids.shape[0]
    first = torch.ones(batch, q_length, dtype=torch.bool, device=device)
    first[:, 1:] = ids[:, 1:] != ids[:, :-1]
    starts = first.flatten().nonzero().flatten()
    plain = MaskRule(rule.left, rule.right, rule.chunk)
    if starts.shape[0] == batch:  # one sequence a row, which only a traced forward calls packed
        return descriptor.encode_rows(plain, batch, q_length, kv_length, 0, 0, device)[:, None, None, :]
    if rule.chunk and rule.positions is not None:
        starts_off_border = rule.positions.expand(batch, -1).flatten()[starts] % rule.chunk != 0
        if bool(starts_off_border.any()):
            raise UnsupportedCallError("packed chunked attention needs every sequence to start at a chunk's border")
    cu_seqlens = torch.cat([starts, starts.new_tensor([batch * q_length])]).to(torch.int32)
    desc = descriptor.encode_rows(plain, 1, q_length, kv_length, 0, 0, device)
    desc = descriptor.sequence_rows(desc, cu_seqlens, cu_seqlens)
    return descriptor.encode_packed(desc, cu_seqlens, int(cu_seqlens.diff().max()))


@torch.compiler.disable
def _dense(
    model_type: str, dtype: torch.dtype, *, kv_length: int, mask_function: MaskFunction, **arguments: Any
) -> Tensor:
    """An additive mask `[batch, 1, q_length, kv_length]` for a pattern that is not an interval of keys per query."""
    if kv_length > MAX_DENSE_KEYS:
        raise UnsupportedCallError(
            f"{model_type} asks for the mask {describe(mask_function)}, which is not one interval of keys per query; "
            f"it is served up to {MAX_DENSE_KEYS} keys, and {kv_length} were given"
        )
    allowed = masking_utils.sdpa_mask(
        kv_length=kv_length, mask_function=mask_function, allow_is_causal_skip=False, **arguments
    )
    assert allowed is not None
    return torch.zeros_like(allowed, dtype=dtype).masked_fill_(~allowed, float("-inf"))
