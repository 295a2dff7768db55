"""Runs the selected cases of a module once, all at the same time, so that their kernels compile on all cores."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest
import torch

C = TypeVar("C")


def run_all(request: pytest.FixtureRequest, kind: type[C], first_call: Callable[[C], object]) -> None:
    """`first_call` of every case of that kind. What fails here is left to its own test, which will fail too."""
    if not torch.cuda.is_available():
        return
    items = (item for item in request.session.items if getattr(item, "module", None) is request.module)
    specs = (getattr(item, "callspec", None) for item in items)
    cases = {spec.params.get("case"): None for spec in specs if spec is not None}
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for case in cases:
            if isinstance(case, kind):
                pool.submit(first_call, case)
    torch.cuda.synchronize()
