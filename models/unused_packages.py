"""Packages that others import where they are installed, for uses that we never have. Knows no model."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from models.compiler_stand_in import stand_in

_NOT_HERE: Any = None  # as a value of sys.modules: importing that name fails


def leave_out(folder: Path | None = None) -> None:
    """For an engine, before anything but transformers itself is imported of it. `folder`: of the model that it will
    serve, where its files are here.

    Assisted generation, whose candidates we do not make, compares them by sklearn, which brings scipy and pandas: 1.1 s
    of an engine's 6 s of imports with transformers 5.17. Later ones wait until it is used. torchao takes 0.4 s, and
    on a CPU warns of each library that it cannot load: only for models that it quantised. Of what is left torch's
    compiler and tensors that lie on several devices take a third, and as much again torchvision and scipy, which losses
    of models that look for things in pictures import.
    """
    stand_in()
    for asked in ("is_sklearn_available", "is_torch_distributed_available", "is_torchvision_available",
                  "is_scipy_available"):  # fmt: skip
        _hide(asked)
    imported = "transformers.quantizers" in sys.modules  # what is imported stays
    if folder is not None and not imported and b'"torchao"' not in (folder / "config.json").read_bytes():
        _hide("is_torchao_available")
    if "kernels" not in sys.modules:  # with them transformers' layers would fetch code from the hub while they run
        sys.modules["kernels"] = _NOT_HERE


@contextmanager
def without_hub_kernels() -> Iterator[None]:
    """Inside, the package `kernels` cannot be imported: it downloads native code from the hub, and bitsandbytes has it
    do so as soon as it is imported on a CPU (PEFT imports bitsandbytes). It does without."""
    before = {name: sys.modules[name] for name in ("kernels",) if name in sys.modules}
    sys.modules["kernels"] = _NOT_HERE
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)  # advises to install it
    try:
        yield
    finally:
        del sys.modules["kernels"]
        sys.modules.update(before)


def leave_out_torch() -> None:
    """For a process that reads tokenizers and configurations and no weights: where transformers finds torch it imports
    it, which takes seconds. Where torch is imported already, it stays."""
    if "torch" not in sys.modules:
        _hide("is_torch_available")


def _hide(asked: str) -> None:
    from transformers import utils
    from transformers.utils import import_utils

    for module in (utils, import_utils):
        vars(module)[asked] = _is_left_out


def _is_left_out(*_wanted: object) -> bool:
    return False
