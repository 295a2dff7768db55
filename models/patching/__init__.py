"""Our attention inside Hugging Face models, through transformers' official interfaces only."""

from models.patching.errors import UnsupportedCallError, UnsupportedModelError
from models.patching.register import LONGWAVE, LONGWAVE_PAGED, register
from models.patching.rope import fix_longrope, longrope_lengths
from models.patching.support import check_class, check_config, check_supported, check_supported_for_serving
from models.patching.temperature import fix_temperature

patch = register

__all__ = [
    "LONGWAVE",
    "LONGWAVE_PAGED",
    "UnsupportedCallError",
    "UnsupportedModelError",
    "check_class",
    "check_config",
    "check_supported",
    "check_supported_for_serving",
    "fix_longrope",
    "fix_temperature",
    "longrope_lengths",
    "patch",
    "register",
]
