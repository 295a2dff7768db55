"""python -m tests.emulator [pytest's arguments]: the GPU tests of kernels without a GPU, by default all of them.

For example `python -m tests.emulator tests/kernels/test_backward_hopper.py --emulated-seed 7 -k deterministic`.
"""

import os
import sys

import pytest

from .compile import available

if __name__ == "__main__":
    reason = available()
    if reason is not None:
        sys.exit(reason)
    os.environ["LONGWAVE_KERNEL_TESTS_EMULATED"] = "1"
    given = sys.argv[1:]
    paths = [] if any(x.startswith("tests/") for x in given) else ["tests/kernels"]
    sys.exit(pytest.main(["-p", "tests.emulator.plugin", "-p", "no:cacheprovider", *paths, *given]))
