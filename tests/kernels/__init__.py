"""Tests of the attention kernels on a GPU; a small subset runs the same bodies on the CPU path.

    python -m pytest tests/kernels -m "gpu and not slow"     expected on an H200, kernels cold: 3 minutes
    python -m pytest tests/kernels -m "gpu and slow"         the product of options: 5 minutes

Where a command's time is limited, run file by file: test_forward_grid.py is the longest, expected under two minutes.
One GPU: run them one after another, not with xdist.
"""
