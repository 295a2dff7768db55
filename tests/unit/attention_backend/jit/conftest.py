"""Small kernels to compile, in a folder of their own, and a cache for them. Nothing here needs a GPU."""

from pathlib import Path

import pytest

from attention_backend.jit import KernelCache

SCALE = """
#include "parts/twice.cuh"
#include <cuda_fp16.h>
struct Params { const __half* x; float* y; long long n; float factor; };
extern "C" __global__ void scale(const __grid_constant__ Params p) {
  long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
  if (i < p.n) p.y[i] = twice(__half2float(p.x[i])) * p.factor * TIMES;
}
"""
TWICE = """
#pragma once
#include "depth.cuh"
__device__ float twice(float x) { return x * DEPTH; }
"""
DEPTH = """
#pragma once
#define DEPTH 2
"""
# 200 values live across a barrier do not fit 64 registers.
SPILL = """
extern "C" __global__ void __launch_bounds__(1024, 1) spill(float* x) {
  float a[200];
#pragma unroll
  for (int i = 0; i < 200; i++) a[i] = x[i * 1024 + threadIdx.x];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 200; i++) x[i * 1024 + threadIdx.x] = a[199 - i] * a[(i * 7) % 200];
}
"""
# An array indexed at run time lives in local memory, without any spill.
LOCAL = """
extern "C" __global__ void local(float* x, int n) {
  float a[64];
#pragma unroll 1
  for (int i = 0; i < n; i++) a[i & 63] = x[i];
  __shared__ float s[32];
  s[threadIdx.x] = a[n & 63];
  __syncthreads();
  x[threadIdx.x] = s[31 - threadIdx.x];
}
"""


@pytest.fixture
def kernels(tmp_path: Path) -> Path:
    """A folder of kernels: `scale` (with a header that includes a header), `spill` and `local`."""
    folder = tmp_path / "kernels"
    (folder / "parts").mkdir(parents=True)
    for name, text in {
        "scale": SCALE,
        "parts/twice": TWICE,
        "parts/depth": DEPTH,
        "spill": SPILL,
        "local": LOCAL,
    }.items():
        (folder / f"{name}.cuh").write_text(text)
    return folder


@pytest.fixture
def cache_path(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def cache(cache_path: Path, kernels: Path) -> KernelCache:
    return KernelCache(cache_path, sources=kernels)
