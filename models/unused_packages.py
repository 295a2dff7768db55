"""Packages that transformers imports where they are installed, for uses that an engine never has. Knows no model."""

import sys


def leave_out() -> None:
    """Before anything but transformers itself is imported of it. Assisted generation, whose candidates we do not make,
    compares them by sklearn, which brings scipy and pandas: 1.1 s of an engine's 6 s of imports with transformers 5.17.
    Later ones wait until it is used."""
    from transformers import utils
    from transformers.utils import import_utils

    for module in (utils, import_utils):
        vars(module)["is_sklearn_available"] = _is_left_out


def leave_out_torch() -> None:
    """For a process that reads tokenizers and configurations and no weights: where transformers finds torch it imports
    it, which takes seconds. Where torch is imported already, it stays."""
    if "torch" in sys.modules:
        return
    from transformers import utils
    from transformers.utils import import_utils

    for module in (utils, import_utils):
        vars(module)["is_torch_available"] = _is_left_out


def _is_left_out() -> bool:
    return False
