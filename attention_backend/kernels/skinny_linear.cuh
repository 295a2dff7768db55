// out[m, n] = x[m, k] weight[n, k]^T + bias[n] for few rows of x: bound by reading the weight once.
//
// A tile is 16 rows of the weight. Every block has one run of tiles, all of k, and takes up to TILES of them at a time (a
// pass); its warps share k in lines of 64 elements, warp w having lines w, w + WARPS, ... Weights are the A operand of the
// tensor cores, x the B operand: a lane reads 16 bytes of a row, 8 elements, which are its own part of two fragments once
// k is taken in another order, in which x is read too. So nothing is shuffled, and what a lane copies it alone reads.
//
// A warp has SLOTS steps of 32 elements of k under way, in registers (RING = 0) or in shared memory (RING = 1: cp.async).
// They are filled before the previous kernel has ended, if this one started early: the weight must be constant.
//
// The order of every sum is a function of k and WARPS alone: a row's result does not depend on m or on the other rows.
//
// Compile-time: BF16, WARPS, TILES, SLOTS (even), COLUMNS (8 or 16: most rows of x), RING, MIN_BLOCKS.
#include "parts/copy_sm80.cuh"
#include "parts/dependent_launch.cuh"
#include "parts/mma_sm80.cuh"
#include "parts/skinny_weights.cuh"

// The same fields, in the same order, as attention_backend/kernels/skinny_linear.py: SkinnyParams. Strides in elements.
struct SkinnyParams {
  const element* x;       // [m, k]
  const element* weight;  // [n, k]
  const element* bias;    // [n] or null
  element* out;           // [m, n]
  int64 x_row, weight_row, out_row;
  int m, n, k;
  int prefetch;  // elements of k, behind those in the ring, that the block asks into L2 of its first pass's rows
};

constexpr int kThreads = 32 * WARPS;
constexpr int kPasses = COLUMNS / 8;                // MMAs that a weight fragment takes part in
constexpr int kAhead = SLOTS % 4 == 0 ? 4 : SLOTS % 3 == 0 ? 3 : 2;  // steps of x under way
constexpr int kPitch = 16 * TILES + 4;   // floats of a column of partial sums: free of bank conflicts
constexpr int kPartial = COLUMNS * kPitch;  // floats of a warp's partial sums
static_assert(SLOTS % 2 == 0, "a line is two steps");

// A block's tiles, in passes that differ by one tile at most.
struct Passes {
  int first, count, passes;
  __device__ __forceinline__ int begin(int pass) const {
    const int each = count / passes, more = count % passes;
    return first + pass * each + min(pass, more);
  }
};

__device__ __forceinline__ Passes own_tiles(int n) {
  const int tiles = (n + 15) / 16, blocks = gridDim.x, block = blockIdx.x;
  const int each = tiles / blocks, more = tiles % blocks;
  const int count = each + (block < more);
  return {block * each + min(block, more), count, (count + TILES - 1) / TILES};
}

// The lane's 16 bytes of x, of the rows that it holds in B fragments, at element `at` of k.
__device__ __forceinline__ void read_x(uint4 (&to)[kPasses], const SkinnyParams& p, int row, int at, bool any) {
#pragma unroll
  for (int c = 0; c < kPasses; c++) {
    to[c] = make_uint4(0, 0, 0, 0);
    if (any && row + 8 * c < p.m) to[c] = read_cached(p.x + (row + 8 * c) * p.x_row + at);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, MIN_BLOCKS) skinny_linear(const SkinnyParams p) {
  extern __shared__ __align__(128) char shared[];
  float* partial = reinterpret_cast<float*>(shared);  // [WARPS][COLUMNS][kPitch]
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const Passes own = own_tiles(p.n);
  const int lines = (p.k + 63) / 64;
  const int own_steps = 2 * ((lines - warp + WARPS - 1) / WARPS);  // of this warp, in a pass
  const int steps = (own_steps + SLOTS - 1) / SLOTS * SLOTS;        // the ones past the end do nothing
  // Element of k that step i of the lane begins at.
  auto k_of = [&](int i) { return (warp + (i / 2) * WARPS) * 64 + (i % 2) * 32 + 8 * t; };

  Weights weights(shared + sizeof(float) * WARPS * kPartial, warp, lane);
  // What is asked for next: steps next_base + slot of a pass.
  int next_pass = 0, next_base = 0;
  const element* next_row = nullptr;
  int next_rows = 0;  // of the weight, from the lane's first one to the end of the pass
  auto enter_pass = [&]() {
    next_base = 0;
    if (next_pass >= own.passes) return;
    const int begin = 16 * own.begin(next_pass);
    next_rows = min(16 * own.begin(next_pass + 1), p.n) - begin - g;
    next_row = p.weight + (begin + g) * p.weight_row;
  };
  auto ask = [&](int slot) {
    if (next_pass < own.passes && next_base + slot < own_steps) {
      const int at = k_of(next_base + slot);
      weights.ask(slot, next_row + at, 8 * p.weight_row, next_rows, at < p.k);
    }
    weights.asked();
    if (slot + 1 == SLOTS && (next_base += SLOTS) == steps) next_pass++, enter_pass();
  };

  enter_pass();
#pragma unroll
  for (int slot = 0; slot < SLOTS; slot++) ask(slot);
  if (p.prefetch > 0) {
    const int begin = 16 * own.first, rows = min(16 * own.begin(1), p.n) - begin, from = min(SLOTS / 2 * WARPS * 64, p.k);
    const int width = min(p.prefetch, p.k - from);
    for (int row = threadIdx.x; width > 0 && row < rows; row += kThreads)
      prefetch_to_l2(p.weight + (begin + row) * p.weight_row + from, width * sizeof(element));
  }
  let_next_start();
  wait_for_previous();

  uint4 x[kAhead][kPasses];
#pragma unroll
  for (int i = 0; i < kAhead; i++) read_x(x[i], p, g, k_of(i), i < own_steps && k_of(i) < p.k);

  for (int pass = 0; pass < own.passes; pass++) {
    float acc[TILES][kPasses][4];
#pragma unroll
    for (int i = 0; i < TILES * kPasses * 4; i++) (&acc[0][0][0])[i] = 0.f;
    for (int base = 0; base < steps; base += SLOTS) {
#pragma unroll
      for (int slot = 0; slot < SLOTS; slot++) {
        const int step = base + slot;
        weights.arrived(slot);
        if (step < own_steps) {
#pragma unroll
          for (int tile = 0; tile < TILES; tile++) {
            const uint4 top = weights.take(slot, 2 * tile), bottom = weights.take(slot, 2 * tile + 1);
            const uint32 first[4] = {top.x, bottom.x, top.y, bottom.y}, second[4] = {top.z, bottom.z, top.w, bottom.w};
#pragma unroll
            for (int c = 0; c < kPasses; c++) {
              const uint4 b = x[slot % kAhead][c];
              mma_16x8x16(acc[tile][c], first, b.x, b.y);
              mma_16x8x16(acc[tile][c], second, b.z, b.w);
            }
          }
        }
        ask(slot);
        const int later = step + kAhead < steps ? step + kAhead : step + kAhead - steps;
        read_x(x[slot % kAhead], p, g, k_of(later), later < own_steps && k_of(later) < p.k);
      }
    }
    if (pass) __syncthreads();  // the last pass's partial sums are read
#pragma unroll
    for (int tile = 0; tile < TILES; tile++)
#pragma unroll
      for (int c = 0; c < kPasses; c++) {
        float* to = partial + warp * kPartial + (8 * c + 2 * t) * kPitch + 16 * tile + g;
        to[0] = acc[tile][c][0], to[kPitch] = acc[tile][c][1];
        to[8] = acc[tile][c][2], to[kPitch + 8] = acc[tile][c][3];
      }
    __syncthreads();
    const int begin = 16 * own.begin(pass), rows = min(16 * own.begin(pass + 1), p.n) - begin;
    for (int i = threadIdx.x; i < 16 * TILES * p.m; i += kThreads) {
      const int row = i % (16 * TILES), column = i / (16 * TILES);
      if (row >= rows) continue;
      float sum = 0.f;
#pragma unroll
      for (int w = 0; w < WARPS; w++) sum += partial[w * kPartial + column * kPitch + row];
      if (p.bias) sum += to_float(p.bias[begin + row]);
      p.out[column * p.out_row + begin + row] = from_float(sum);
    }
  }
  weights.finish();
}
