"""Tests of the attention kernels on a GPU; a small subset runs the same bodies on the CPU path."""
