"""Kernels on a CPU: the text that runs on GPUs, compiled by g++, with a fiber for every thread.

For tests without a GPU. It finds wrong numbers, accesses beyond tensors and shared memory, misaligned ones, barriers
that threads miss, and orders of threads and copies that a kernel does not expect. It does not know the memory model
(fences do nothing, writes are seen at once), how fast anything is, or what the compiler for GPUs makes of the text.
"""
