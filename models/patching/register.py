"""Makes the two names known to transformers. Changes nothing else of it, so there is nothing to undo."""

from transformers import AttentionInterface, AttentionMaskInterface

from models.patching.attention import longwave_attention
from models.patching.mask import longwave_mask
from models.patching.paged import longwave_paged_attention

#: For anybody: `from_pretrained(..., attn_implementation="longwave")`. No name may contain "flash", "sdpa" or "flex".
LONGWAVE = "longwave"
#: For the engine: page metadata travels as keyword arguments.
LONGWAVE_PAGED = "longwave_paged"


def register() -> None:
    """Registers "longwave" and "longwave_paged". May be called any number of times."""
    AttentionInterface.register(LONGWAVE, longwave_attention)
    # Both or padding is ignored: for a name without a mask function transformers makes no mask at all.
    AttentionMaskInterface.register(LONGWAVE, longwave_mask)
    AttentionInterface.register(LONGWAVE_PAGED, longwave_paged_attention)
