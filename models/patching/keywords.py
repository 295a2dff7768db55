"""Which keyword arguments models pass to their attention function, and which of them may be left out of the maths.

Anything not listed that is not None is an error: an option dropped in silence is a wrong model.
"""

from collections.abc import Mapping
from typing import Any

from models.patching.errors import UnsupportedCallError

#: Passed down by models for their own bookkeeping; eager attention ignores them too.
_HARMLESS = frozenset(
    {
        "cache_position",
        "deterministic",
        "encoder_attention_mask",
        "encoder_hidden_states",
        "layer_idx",
        "logits_to_keep",
        "num_items_in_batch",
        "output_hidden_states",
        "output_router_logits",
        "past_key_values",
        "position_ids",
        "return_dict",
        "seq_idx",
        "token_type_ids",
        "use_cache",
    }
)


def refuse_unknown(module: object, keywords: Mapping[str, Any]) -> None:
    """Raises UnsupportedCallError for any keyword that could change the result."""
    for name, value in keywords.items():
        if value is None or name in _HARMLESS:
            continue
        if name == "output_attentions":
            if not value:
                continue
            raise UnsupportedCallError(
                "output_attentions=True: the attention weights are never written out; "
                'use attn_implementation="eager" to look at them'
            )
        raise UnsupportedCallError(
            f"{type(module).__name__} passes {name}={value!r:.80} to its attention, which does not know it"
        )


def refuse_dropout(module: Any, dropout: float) -> None:
    """Raises UnsupportedCallError for dropout in training, which a cache of pages is not for."""
    if dropout and module.training:
        raise UnsupportedCallError(
            f"attention dropout {dropout} in training: a model on pages serves, so put it in eval(); "
            'train with attn_implementation="longwave"'
        )
