// Linear attention, second pass, in place: the states of segments -> the state before each segment (CAUSAL), or the sum
// of all in the place of the first. Always added in the order of the keys, so that results are bitwise equal.
//
// One thread takes four floats of one key head's states through all its segments. The last segment's state is not read
// under CAUSAL: nobody is behind it.
//
// Compile-time: those of parts/linear_tiles.cuh, CAUSAL.
#include "parts/linear_tiles.cuh"

constexpr int kThreads = 256;
constexpr int kVectors = kStateFloats / 4;
constexpr int kBlocks = (kVectors + kThreads - 1) / kThreads;  // of a key head
constexpr int kInFlight = 8;

extern "C" __global__ void __launch_bounds__(kThreads) linear_prefix(const LinearParams p) {
  const int pair = blockIdx.x / kBlocks, at = blockIdx.x % kBlocks * kThreads + threadIdx.x;
  if (at >= kVectors) return;
  float4* const state = reinterpret_cast<float4*>(p.states) + static_cast<int64>(pair) * p.segments * kVectors + at;
  const int count = CAUSAL ? p.segments - 1 : p.segments;
  float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
  for (int first = 0; first < count; first += kInFlight) {
    float4 x[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; i++)
      if (first + i < count) x[i] = state[static_cast<int64>(first + i) * kVectors];
#pragma unroll
    for (int i = 0; i < kInFlight; i++)
      if (first + i < count) {
        if (CAUSAL) state[static_cast<int64>(first + i) * kVectors] = sum;
        sum = make_float4(sum.x + x[i].x, sum.y + x[i].y, sum.z + x[i].z, sum.w + x[i].w);
      }
  }
  state[CAUSAL ? static_cast<int64>(count) * kVectors : 0] = sum;
}
