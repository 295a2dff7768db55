"""LoRA adapters beside a loaded model: read from PEFT's folders, many in one batch. Knows no requests, no names.

A slot is a place for one adapter in every linear layer; a row of a batch names the slot that adapts it, or none.
"""

from models.adapters.folder import AdapterFiles, open_folder
from models.adapters.linears import find_linears
from models.adapters.slots import AdapterSlots, LoraLimits
from models.adapters.weights import AdapterWeights, read_weights

__all__ = [
    "AdapterFiles",
    "AdapterSlots",
    "AdapterWeights",
    "LoraLimits",
    "find_linears",
    "open_folder",
    "read_weights",
]
