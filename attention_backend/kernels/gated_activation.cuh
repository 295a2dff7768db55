// act(gate) * up of rows [gate | up] (Shazeer, arXiv 2002.05202), 16 bytes a thread; the activation is rounded before the
// product, as plain torch would.
//
// Compile-time: BF16, ACTIVATION (0: SiLU, 1: GELU by tanh, 2: GELU by erf).
#include "parts/activation.cuh"
#include "parts/dependent_launch.cuh"
#include "parts/vectors.cuh"

// The same fields, in the same order, as attention_backend/kernels/gated_activation.py: GatedParams.
struct GatedParams {
  const element* gate;
  const element* up;
  element* out;  // contiguous rows
  int64 gate_row, up_row;
  int width;  // a multiple of 8
  int row_blocks;
};

constexpr int kThreads = 128;

extern "C" __global__ void __launch_bounds__(kThreads) gated_activation(const __grid_constant__ GatedParams p) {
  let_next_start();
  wait_for_previous();
  const int64 row = blockIdx.x / p.row_blocks;
  const int column = (blockIdx.x % p.row_blocks * kThreads + threadIdx.x) * kVector;
  if (column >= p.width) return;
  float gate[kVector], up[kVector];
  unpack(*reinterpret_cast<const uint4*>(p.gate + row * p.gate_row + column), gate);
  unpack(*reinterpret_cast<const uint4*>(p.up + row * p.up_row + column), up);
#pragma unroll
  for (int j = 0; j < kVector; j++) gate[j] = activate(gate[j]);
  round_all(gate);
#pragma unroll
  for (int j = 0; j < kVector; j++) gate[j] *= up[j];
  *reinterpret_cast<uint4*>(p.out + row * p.width + column) = pack(gate);
}
