// out[m, n] = x[m, k] weight[n, k]^T + bias[n] for few rows of x: bound by reading the weight once.
//
// A tile is 16 rows of the weight. Every block has one run of tiles, all of k, and takes up to TILES of them at a time
// (a pass), so that x is read once a pass; its warps share k in lines of 64 elements, warp w having lines w, w + WARPS,
// and so on. Weights are the A operand of the tensor cores, x the B operand: a lane reads 16 bytes of a row, 8 elements,
// which are its own part of two fragments once k is taken in another order, in which x is read too: nothing is shuffled.
//
// A warp has SLOTS items under way, each a step (32 elements of k) or a line of GROUP tiles: parts/skinny_weights.cuh.
// They are asked for before the previous kernel has ended, if this one started early: the weight must be constant.
//
// The order of every sum is a function of k and WARPS alone: a row's result does not depend on m or on the other rows.
//
// Compile-time: BF16, WARPS, TILES, GROUP, SLOTS, COLUMNS (8 or 16: most rows of x), RING (0: steps in registers, 1: in
// shared memory, 2: lines in shared memory), MIN_BLOCKS.
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
  int tiles_each, tiles_more;  // of a block; the first tiles_more blocks have one more
  int prefetch;  // pieces of a row, each a line of every warp, that a block asks into L2 besides: what it needs next
};

constexpr int kThreads = 32 * WARPS;
constexpr int kMmas = COLUMNS / 8;                        // that a weight fragment takes part in
constexpr int kGroups = TILES / GROUP;                    // items of a step, or line, of k
constexpr int kSteps = RING ? 2 : SLOTS / kGroups;        // of a turn of the loop; registers have no index
constexpr bool kAhead = RING == 2 && TILES * kMmas <= 8;  // x of the next turn in registers of its own
constexpr int kLines = WARPS * 64;                        // elements of k that are a line of every warp
constexpr int kTurn = kSteps / 2 * kLines;                // elements of k of a turn
constexpr int kPhase = TILES < 2 ? TILES : 2;             // tiles whose partial sums meet at a time
constexpr int kPitch = 16 * kPhase + 4;                   // floats of a column of them: free of bank conflicts
constexpr int kPartial = COLUMNS * kPitch;                // floats of a warp's
static_assert(TILES % GROUP == 0, "groups are whole");
static_assert(kSteps % 2 == 0 && (RING || kSteps * kGroups == SLOTS), "a line is two steps");

// A block's tiles, in passes that differ by one tile at most.
struct Passes {
  int first, passes, each, more;
  __device__ __forceinline__ Passes(const SkinnyParams& p) {
    const int block = blockIdx.x, count = p.tiles_each + (block < p.tiles_more);
    first = block * p.tiles_each + min(block, p.tiles_more);
    passes = (count + TILES - 1) / TILES;
    each = count / passes, more = count % passes;
  }
  __device__ __forceinline__ int begin(int pass) const { return first + pass * each + min(pass, more); }
  __device__ __forceinline__ int tiles(int pass) const { return each + (pass < more); }
};

// The items of a warp in the order of their use: passes, steps of k, groups of tiles.
struct Items {
  int pass = 0, group = 0, groups, at = 0;  // `at`: element of k, from the lane's first one
  int rows, rows_left;                      // of the weight, from the lane's first one to the end of the pass
  const element *row, *first_row;           // the lane's first row of the group, and of the pass
  __device__ __forceinline__ Items(const SkinnyParams& p, const Passes& own, int lane_row, int lane_k) {
    enter(p, own, lane_row, lane_k);
  }
  __device__ __forceinline__ void enter(const SkinnyParams& p, const Passes& own, int lane_row, int lane_k) {
    const bool any = pass < own.passes;
    const int begin = 16 * own.begin(pass), tiles = any ? own.tiles(pass) : 0;
    groups = RING && any ? (tiles + GROUP - 1) / GROUP : kGroups;
    rows = rows_left = min(16 * tiles, p.n - begin) - lane_row;  // none past the last pass
    row = first_row = p.weight + (begin + lane_row) * p.weight_row + lane_k;
  }
  __device__ __forceinline__ void advance(const SkinnyParams& p, const Passes& own, int lane_row, int lane_k,
                                          int end_k) {
    row += 16 * GROUP * p.weight_row, rows_left -= 16 * GROUP;
    if (++group < groups) return;
    group = 0, row = first_row, rows_left = rows;
    at += kItemSteps == 2 ? kLines : at % 64 ? kLines - 32 : 32;
    if (at < end_k) return;
    at = 0, pass++;
    enter(p, own, lane_row, lane_k);
  }
};

extern "C" __global__ void __launch_bounds__(kThreads, MIN_BLOCKS) skinny_linear(const SkinnyParams p) {
  extern __shared__ __align__(128) char shared[];
  float* partial = reinterpret_cast<float*>(shared);  // [WARPS][COLUMNS][kPitch]
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const Passes own(p);
  const int lane_k = 64 * warp + 8 * t;                 // where the lane begins in a turn
  const int last_k = p.k - lane_k;                      // what it has of k; what lies past it counts as zeros
  const int asked_row = RING == 2 ? lane / 8 : g;       // and the same of what it asks for
  const int asked_k = RING == 2 ? 64 * warp + 8 * (lane % 8) : lane_k;
  const int end_k = (p.k + kTurn - 1) / kTurn * kTurn;  // turns are whole for every warp

  Weights weights(shared + sizeof(float) * WARPS * kPartial, warp, lane);
  Items next(p, own, asked_row, asked_k);
  auto ask = [&](int slot) {
    weights.ask(slot, next.row + next.at, kRowsApart * p.weight_row, next.rows_left, next.at < p.k - asked_k);
    next.advance(p, own, asked_row, asked_k, end_k);
  };
#pragma unroll(RING ? 1 : SLOTS)
  for (int slot = 0; slot < SLOTS; slot++) {
    ask(slot);
    weights.advance();
  }
  const int rows = min(16 * own.tiles(0), p.n - 16 * own.first);
#pragma unroll 1
  for (int i = WARPS * lane + warp; i < p.prefetch; i += kThreads) {
    const int from = (SLOTS * kItemSteps / kGroups / 2 + i / rows) * kLines;
    const element* row = p.weight + (16 * own.first + i % rows) * p.weight_row;
    if (from < p.k) prefetch_to_l2(row + from, min(kLines, p.k - from) * sizeof(element));
  }
  let_next_start();
  wait_for_previous();

  // x of the lane's rows.
  const element* x_row = p.x + g * p.x_row + lane_k;
  uint4 x[kSteps][kMmas], after_x[kSteps][kMmas];
  auto read_x = [&](uint4 (&to)[kMmas], int step, int at) {
    at += step / 2 * kLines + step % 2 * 32;
#pragma unroll
    for (int c = 0; c < kMmas; c++)
      to[c] = read_cached(x_row + 8 * c * p.x_row + at, g + 8 * c < p.m && at < last_k);
  };
#pragma unroll
  for (int step = 0; step < kSteps; step++) read_x(x[step], step, 0);

#pragma unroll 1
  for (int pass = 0; pass < own.passes; pass++) {
    const int tiles = own.tiles(pass), begin = 16 * own.begin(pass);
    float acc[TILES][kMmas][4];
#pragma unroll
    for (int i = 0; i < TILES * kMmas * 4; i++) (&acc[0][0][0])[i] = 0.f;
#pragma unroll 1
    for (int k = 0; k < end_k; k += kTurn) {
      const int after = k + kTurn < end_k ? k + kTurn : 0;
#pragma unroll
      for (int step = 0; kAhead && step < kSteps; step++) read_x(after_x[step], step, after);
#pragma unroll
      for (int step = 0; step < kSteps; step += kItemSteps) {
#pragma unroll
        for (int group = 0; group < kGroups; group++) {
          if (RING && group && group * GROUP >= tiles) break;
          const int slot = step / kItemSteps * kGroups + group;
          weights.wait();
#pragma unroll
          for (int s = 0; s < kItemSteps; s++)
#pragma unroll
            for (int i = 0; i < GROUP; i++) {
              const uint4 top = weights.take(slot, s, i, 0), bottom = weights.take(slot, s, i, 1);
              const uint32 first[4] = {top.x, bottom.x, top.y, bottom.y};
              const uint32 second[4] = {top.z, bottom.z, top.w, bottom.w};
#pragma unroll
              for (int c = 0; c < kMmas; c++) {
                const uint4 b = x[step + s][c];
                mma_16x8x16(acc[group * GROUP + i][c], first, b.x, b.y);
                mma_16x8x16(acc[group * GROUP + i][c], second, b.z, b.w);
              }
            }
          weights.release();
          ask(slot);
          weights.advance();
        }
#pragma unroll
        for (int s = 0; !kAhead && s < kItemSteps; s++) read_x(x[step + s], step + s, after);
      }
#pragma unroll
      for (int i = 0; kAhead && i < kSteps * kMmas; i++) (&x[0][0])[i] = (&after_x[0][0])[i];
    }
#pragma unroll
    for (int phase = 0; phase < TILES; phase += kPhase) {
      if (phase && phase >= tiles) break;
      if (pass || phase) __syncthreads();  // the partial sums before these are read
#pragma unroll
      for (int tile = phase; tile < phase + kPhase && tile < TILES; tile++)
#pragma unroll
        for (int c = 0; c < kMmas; c++) {
          float* to = partial + warp * kPartial + (8 * c + 2 * t) * kPitch + 16 * (tile - phase) + g;
          to[0] = acc[tile][c][0], to[kPitch] = acc[tile][c][1];
          to[8] = acc[tile][c][2], to[kPitch + 8] = acc[tile][c][3];
        }
      __syncthreads();
      const int from = begin + 16 * phase, rows = min(min(16 * (tiles - phase), 16 * kPhase), p.n - from);
#pragma unroll 1
      for (int i = threadIdx.x; i < 16 * kPhase * p.m; i += kThreads) {
        const int row = i % (16 * kPhase), column = i / (16 * kPhase);
        if (row >= rows) continue;
        float sum = 0.f;
#pragma unroll
        for (int w = 0; w < WARPS; w++) sum += partial[w * kPartial + column * kPitch + row];
        if (p.bias) sum += to_float(p.bias[from + row]);
        p.out[column * p.out_row + from + row] = from_float(sum);
      }
    }
  }
  weights.finish();
}
