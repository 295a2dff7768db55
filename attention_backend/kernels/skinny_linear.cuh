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
constexpr int kUnroll = RING ? 2 : SLOTS;           // steps of a block of k; registers have no index
constexpr int kPitch = 16 * TILES + 4;   // floats of a column of partial sums: free of bank conflicts
constexpr int kPartial = COLUMNS * kPitch;  // floats of a warp's partial sums
constexpr int kBlock = kUnroll / 2 * WARPS * 64;    // elements of k of a block: some lines of each warp
constexpr int kPrefilled = SLOTS / kUnroll * kBlock;
static_assert(SLOTS % 2 == 0, "a line is two steps");

// Where a step of a block of k begins, from the warp's first line of it.
__device__ __forceinline__ constexpr int step_k(int step) { return step / 2 * WARPS * 64 + step % 2 * 32; }

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

extern "C" __global__ void __launch_bounds__(kThreads, MIN_BLOCKS) skinny_linear(const SkinnyParams p) {
  extern __shared__ __align__(128) char shared[];
  float* partial = reinterpret_cast<float*>(shared);  // [WARPS][COLUMNS][kPitch]
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const Passes own = own_tiles(p.n);
  const int lane_k = 64 * warp + 8 * t;                    // where the lane begins in a block of k
  const int last_k = p.k - lane_k;                         // what it has of k; what lies past it counts as zeros
  const int end_k = (p.k + kBlock - 1) / kBlock * kBlock;  // blocks of k are whole for every warp

  // What is asked for next: block next_k of pass next_pass.
  Weights weights(shared + sizeof(float) * WARPS * kPartial, warp, lane);
  int next_pass = 0, next_k = 0, next_rows;
  const element* next_row;
  auto enter_pass = [&]() {
    const int begin = 16 * own.begin(next_pass);  // none is left: no rows
    next_rows = next_pass < own.passes ? min(16 * own.begin(next_pass + 1), p.n) - begin - g : 0;
    next_row = p.weight + (begin + g) * p.weight_row + lane_k;
  };
  auto ask = [&](int step) {
    weights.ask(step, next_row + next_k + step_k(step), 8 * p.weight_row, next_rows, next_k + step_k(step) < last_k);
  };
  auto advance = [&]() {
    weights.advance();
    next_k += kBlock;
    if (next_k == end_k) next_k = 0, next_pass++, enter_pass();
  };

  enter_pass();
  for (int block = 0; block < SLOTS / kUnroll; block++) {
#pragma unroll
    for (int step = 0; step < kUnroll; step++) ask(step);
    advance();
  }
  if (p.prefetch > 0) {
    const int begin = 16 * own.first, rows = min(16 * own.begin(1), p.n) - begin;
    const int width = min(p.prefetch, p.k - kPrefilled);
#pragma unroll 1
    for (int row = WARPS * lane + warp; width > 0 && row < rows; row += kThreads)
      prefetch_to_l2(p.weight + (begin + row) * p.weight_row + kPrefilled, width * sizeof(element));
  }
  let_next_start();
  wait_for_previous();

  // x of the lane's rows, a block ahead.
  const element* x_row = p.x + g * p.x_row + lane_k;
  uint4 x[kUnroll][kPasses];
  auto read_x = [&](int step, int at) {
#pragma unroll
    for (int c = 0; c < kPasses; c++)
      x[step][c] = read_cached(x_row + 8 * c * p.x_row + at, g + 8 * c < p.m && at < last_k);
  };
#pragma unroll
  for (int step = 0; step < kUnroll; step++) read_x(step, step_k(step));

  for (int pass = 0; pass < own.passes; pass++) {
    float acc[TILES][kPasses][4];
#pragma unroll
    for (int i = 0; i < TILES * kPasses * 4; i++) (&acc[0][0][0])[i] = 0.f;
#pragma unroll 1
    for (int k = 0; k < end_k; k += kBlock) {
      const int after = k + kBlock < end_k ? k + kBlock : 0;
#pragma unroll
      for (int step = 0; step < kUnroll; step++) {
        weights.wait();
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
          const uint4 top = weights.take(step, 2 * tile), bottom = weights.take(step, 2 * tile + 1);
          const uint32 first[4] = {top.x, bottom.x, top.y, bottom.y}, second[4] = {top.z, bottom.z, top.w, bottom.w};
#pragma unroll
          for (int c = 0; c < kPasses; c++) {
            mma_16x8x16(acc[tile][c], first, x[step][c].x, x[step][c].y);
            mma_16x8x16(acc[tile][c], second, x[step][c].z, x[step][c].w);
          }
        }
        ask(step);
        read_x(step, after + step_k(step));
      }
      advance();
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
#pragma unroll 1
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
