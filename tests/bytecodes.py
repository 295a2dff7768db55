"""What Python code costs on every machine alike: the instructions of the interpreter that it executes."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def executed(work: Callable[[], object]) -> int:
    """Bytecode instructions of ``work`` and of all Python code that it calls; C code counts as the call alone."""
    count = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count
