"""A stand-in for torch._dynamo, which transformers imports for its decorators and an engine never uses: it and what it
brings (sympy, torch._inductor, torch.distributed.tensor) are a third of an engine's imports. Knows no model.

Whoever wants anything else of it gets the real one, imported then.
"""

import sys
from collections.abc import Callable
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

NAME = "torch._dynamo"
MASKS = f"{NAME}._trace_wrapped_higher_order_op"  # of which transformers' masks take one class


def stand_in() -> None:
    """For a process that compiles nothing with torch.compile; where torch._dynamo is imported already, it stays."""
    if NAME in sys.modules:
        return
    sys.modules[NAME] = _Compiler()
    masks: Any = ModuleType(MASKS)
    masks.TransformGetItemToIndex = _transform_get_item_to_index
    sys.modules[MASKS] = masks
    sys.meta_path.insert(0, _Submodules())


def _real() -> ModuleType:
    """In place of the stand-in, from now on."""
    if isinstance(sys.modules.get(NAME), _Compiler):
        del sys.modules[NAME], sys.modules[MASKS]
        sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Submodules)]
    return import_module(NAME)


class _Compiler(ModuleType):
    def __init__(self) -> None:
        super().__init__(NAME)
        self.__path__ = []  # it has modules of its own: _Submodules finds them

    @staticmethod
    def disable(function: Callable[..., Any] | None = None, *_: object, **__: object) -> Any:
        """What nobody compiles needs no mark that keeps it from being compiled. With and without arguments."""
        return _same if function is None else function

    @staticmethod
    def allow_in_graph(function: Any) -> Any:
        return function

    @staticmethod
    def assume_constant_result(function: Any) -> Any:
        return function

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Python's own questions (__spec__, __wrapped__) are no use of it
            raise AttributeError(name)
        return getattr(_real(), name)


class _Submodules(MetaPathFinder):
    """A module below torch._dynamo is the real one's."""

    def find_spec(self, fullname: str, *_: object) -> ModuleSpec | None:
        if not fullname.startswith(f"{NAME}."):
            return None
        _real()
        return ModuleSpec(fullname, _Imported())


class _Imported(Loader):
    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return import_module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """It was, when the real torch._dynamo imported it."""


def _same(function: Any) -> Any:
    return function


def _transform_get_item_to_index() -> Any:
    return _real_masks().TransformGetItemToIndex()


def _real_masks() -> Any:
    _real()
    return import_module(MASKS)
