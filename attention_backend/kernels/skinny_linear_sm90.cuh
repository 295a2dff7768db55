// skinny_linear_sm90: x W^T (+ bias) of a few rows x, or act(x Wgate^T) * (x Wup^T), on Hopper.
//
// Up to 64 rows are bound by the bytes of the weights, and these depend on nothing: a block streams tiles of
// COLUMNS rows of W into a ring by TMA, and fills it before it waits for the kernel in front. The rows of x come beside
// them, from the L2. A stage has 256 bytes of each row, as two copies that follow each other: memory reads them faster
// than 128 bytes. Rows of x are the rows of the products (wgmma's 64), those of W their columns, as many as share the
// weights out evenly.
//
// Where W has few rows, CLUSTER blocks, a cluster, share out its columns. Each sends its sums to the block that finishes
// them, a stretch of the columns each, as they lie in registers: a thread there finds what the same thread of every
// block had. They are added in the order of the blocks, so results repeat bitwise.
//
// With GATED a tile is half rows of the gate and half rows of the projection beside it: gate and up stand in one thread.
// Numbers are rounded where Hugging Face's modules round.
//
// Compile-time: BF16, COLUMNS (a multiple of 16 CLUSTER, GATED 32 CLUSTER; up to 256), CLUSTER (a power of two up to 8),
// STAGES, GATED, ACTIVATION (of GATED).
#include "parts/cluster.cuh"
#include "parts/dependent_launch.cuh"
#include "parts/ring.cuh"
#include "parts/transpose_quad.cuh"
#include "parts/uniform.cuh"
#include "parts/wgmma_sm90.cuh"
#if GATED
#include "parts/activation.cuh"
#endif

constexpr int kRows = 64, kSlab = 64, kSlabs = 2;  // of a stage: of x; columns of a copy, 128 bytes; copies
constexpr int kTeam = 128, kThreads = kTeam + 32;
constexpr int kBytesW = COLUMNS * 128, kBytesX = kRows * 128;  // of a copy
constexpr int kStageW = kSlabs * kBytesW, kStageX = kSlabs * kBytesX;
constexpr int kGroups = COLUMNS / 8;  // of eight columns
constexpr int kSentBytes = CLUSTER > 1 ? kGroups * 16 * kTeam : 0;
constexpr int kOutputs = GATED ? COLUMNS / 2 : COLUMNS;  // columns of the result
static_assert(COLUMNS % ((GATED ? 32 : 16) * CLUSTER) == 0 && COLUMNS <= 256, "outputs are stored by pairs of groups");
static_assert(kBytesW % 1024 == 0 && (!GATED || kBytesW % 2048 == 0), "tiles lie at multiples of the swizzle");

// The same fields, in the same order, as attention_backend/kernels/skinny_linear.py: SkinnyParams.
struct SkinnyParams {
  TensorMap weights, rows;
  element* out;  // contiguous rows
  const element* bias;
  int num_rows, box_rows;  // of x; of a copy of them, a multiple of 8
  int width, steps;        // of the result; stages of a tile, kSlabs * kSlab columns each
  int tiles, gate_rows;    // of the result's width; rows of W before those of the projection beside the gate
};

struct SkinnyShared {
  uint32 w, x, sent, full, empty, came;

  __device__ __forceinline__ explicit SkinnyShared(const char* memory) {
    w = (shared_address(memory) + 1023) & ~1023u;
    x = w + STAGES * kStageW;
    sent = x + STAGES * kStageX;
    full = sent + kSentBytes;
    empty = full + 8 * STAGES;
    came = empty + 8 * STAGES;
  }

  __device__ __forceinline__ void init_barriers() const {
    for (int i = 0; i < STAGES; i++) {
      barrier_init(full + 8 * i, 1);
      barrier_init(empty + 8 * i, 1);
    }
    barrier_init(came, 1);
    if (CLUSTER > 1) barrier_expect(came, kSentBytes);
    barrier_init_fence();
  }
};

// This block's part of the columns of W, in stages.
struct Depth {
  int begin, end;
  __device__ __forceinline__ explicit Depth(const SkinnyParams& p) {
    const int part = CLUSTER > 1 ? cluster_rank() : 0;
    begin = p.steps * part / CLUSTER;
    end = p.steps * (part + 1) / CLUSTER;
  }
};

__device__ __forceinline__ void load_weights(const SkinnyShared& shared, const SkinnyParams& p, int stage, int tile,
                                             int step) {
  const uint32 full = shared.full + 8 * stage;
  const int row = tile * kOutputs;
  barrier_expect(full, kSlabs * (kBytesW + 128 * p.box_rows));
#pragma unroll
  for (int i = 0; i < kSlabs; i++) {
    const uint32 to = shared.w + stage * kStageW + i * kBytesW;
    const int column = (step * kSlabs + i) * kSlab;
    tma_load(to, &p.weights, full, column, row, 0, 0, kEvictFirst);
#if GATED
    tma_load(to + kBytesW / 2, &p.weights, full, column, p.gate_rows + row, 0, 0, kEvictFirst);
#endif
  }
}

__device__ __forceinline__ void load_rows(const SkinnyShared& shared, const SkinnyParams& p, int stage, int step) {
#pragma unroll
  for (int i = 0; i < kSlabs; i++) {
    const uint32 to = shared.x + stage * kStageX + i * kBytesX;
    tma_load(to, &p.rows, shared.full + 8 * stage, (step * kSlabs + i) * kSlab, 0, 0, 0, kEvictLast);
  }
}

// One thread.
__device__ __forceinline__ void load(const SkinnyShared& shared, const SkinnyParams& p) {
  const Depth depth(p);
  const int first = static_cast<int>(blockIdx.x) / CLUSTER, apart = static_cast<int>(gridDim.x) / CLUSTER;
  const int early = min(STAGES, depth.end - depth.begin);  // weights that come while the kernel in front still runs
  for (int i = 0; i < early; i++) load_weights(shared, p, i, first, depth.begin + i);
  wait_for_previous();
  for (int i = 0; i < early; i++) load_rows(shared, p, i, depth.begin + i);
  Ring ring;
  for (int i = 0; i < early; i++) ring.step();
  int step = depth.begin + early;
  for (int tile = first; tile < p.tiles; tile += apart) {
    for (; step < depth.end; step++) {
      barrier_wait(shared.empty + 8 * ring.stage, ring.parity ^ 1);
      load_weights(shared, p, ring.stage, tile, step);
      load_rows(shared, p, ring.stage, step);
      ring.step();
    }
    step = depth.begin;
  }
}

// Of one row, two groups' sums of a thread and those of row + 8 (d[0..1], d[2..3] of each), to memory; `column`: of the
// first group's first.
__device__ __forceinline__ void store(const float (&a)[4], const float (&b)[4], int row, int column, const SkinnyParams& p) {
  const int c = threadIdx.x % 4;
  uint32 x[4] = {pack2(a[0], a[1]), pack2(b[0], b[1]), pack2(a[2], a[3]), pack2(b[2], b[3])};
  transpose_quad(x, c);
  row += c / 2 * 8;
  column += c % 2 * 8;
  if (row < p.num_rows && column < p.width)
    *reinterpret_cast<uint4*>(p.out + static_cast<int64>(row) * p.width + column) = make_uint4(x[0], x[1], x[2], x[3]);
}

#if GATED
__device__ __forceinline__ float rounded(float x) { return to_float(from_float(x)); }
__device__ __forceinline__ void gate(float (&x)[4], const float (&up)[4]) {
#pragma unroll
  for (int i = 0; i < 4; i++) x[i] = rounded(activate(rounded(x[i]))) * rounded(up[i]);
}
#else
__device__ __forceinline__ void add_bias(float (&x)[4], int column, const SkinnyParams& p) {
  if (!p.bias || column >= p.width) return;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const float bias = to_float(p.bias[column + threadIdx.x % 4 * 2 + i]);
    x[i] += bias;
    x[i + 2] += bias;
  }
}
#endif

// Finishes groups of the result's columns from `column` on: a thread's sums, with GATED gate and up in turn.
template <int COUNT>
__device__ __forceinline__ void finish(float (&sums)[COUNT][4], int row, int column, const SkinnyParams& p) {
#if GATED
#pragma unroll
  for (int i = 0; i < COUNT; i += 4) {
    gate(sums[i], sums[i + 1]);
    gate(sums[i + 2], sums[i + 3]);
    store(sums[i], sums[i + 2], row, column + i * 4, p);
  }
#else
#pragma unroll
  for (int i = 0; i < COUNT; i += 2) {
    add_bias(sums[i], column + i * 8, p);
    add_bias(sums[i + 1], column + i * 8 + 8, p);
    store(sums[i], sums[i + 1], row, column + i * 8, p);
  }
#endif
}

// Which of a tile's groups is the i-th to be finished: with GATED, gate and up in turn.
__device__ __forceinline__ constexpr int place(int i) { return GATED ? i % 2 * (kGroups / 2) + i / 2 : i; }

__device__ __forceinline__ void compute(const SkinnyShared& shared, const SkinnyParams& p) {
  const Depth depth(p);
  const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
  const int first = static_cast<int>(blockIdx.x) / CLUSTER, apart = static_cast<int>(gridDim.x) / CLUSTER;
  Ring ring;
#pragma unroll 1
  for (int tile = first; tile < p.tiles; tile += apart) {
    float acc[COLUMNS / 2];
#pragma unroll 1
    for (int step = depth.begin; step < depth.end; step++) {
      const int stage = uniform(ring.stage);
      const uint64 x = wgmma_descriptor(uniform(shared.x + stage * kStageX), 16);
      const uint64 w = wgmma_descriptor(uniform(shared.w + stage * kStageW), 16);
      barrier_wait(shared.full + 8 * stage, ring.parity);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < kSlabs * 4; i++) {
        const int slab = i / 4, within = i % 4 * 2;
        Wgmma<COLUMNS>::shared(acc, x + slab * (kBytesX / 16) + within, w + slab * (kBytesW / 16) + within,
                               i || step > depth.begin);
      }
      wgmma_commit();
      wgmma_wait<0>();
      if (threadIdx.x == 0) barrier_arrive(shared.empty + 8 * stage);
      ring.step();
    }
#if CLUSTER > 1
    constexpr int kOwned = kGroups / CLUSTER;
#pragma unroll
    for (int i = 0; i < kGroups; i++) {
      const int owner = i / kOwned, mine = cluster_rank() * kOwned + i % kOwned;
      const uint32 to = shared.sent + (mine * kTeam + static_cast<int>(threadIdx.x)) * 16;
      uint32 x[4];
#pragma unroll
      for (int j = 0; j < 4; j++) x[j] = __float_as_uint(acc[place(i) * 4 + j]);
      store_there(address_at(to, owner), x, address_at(shared.came, owner));
    }
    barrier_wait(shared.came, 0);
    float sums[kOwned][4];
#pragma unroll
    for (int i = 0; i < kOwned; i++) {
#pragma unroll
      for (int j = 0; j < 4; j++) sums[i][j] = 0.f;
#pragma unroll
      for (int part = 0; part < CLUSTER; part++) {
        float x[4];
        asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3])
                     : "r"(shared.sent + ((part * kOwned + i) * kTeam + static_cast<int>(threadIdx.x)) * 16)
                     : "memory");
#pragma unroll
        for (int j = 0; j < 4; j++) sums[i][j] += x[j];
      }
    }
    finish(sums, row, tile * kOutputs + cluster_rank() * (kOutputs / CLUSTER), p);
#else
    float sums[kGroups][4];
#pragma unroll
    for (int i = 0; i < kGroups; i++)
#pragma unroll
      for (int j = 0; j < 4; j++) sums[i][j] = acc[place(i) * 4 + j];
    finish(sums, row, tile * kOutputs, p);
#endif
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
#if CLUSTER > 1
    __cluster_dims__(CLUSTER, 1, 1)
#endif
    skinny_linear_sm90(const __grid_constant__ SkinnyParams p) {
  extern __shared__ __align__(1024) char memory[];
  const SkinnyShared shared(memory);
  if (threadIdx.x == 0) shared.init_barriers();
#if CLUSTER > 1
  cluster_sync();
#else
  __syncthreads();
#endif
  let_next_start();
  if (threadIdx.x < kTeam)
    compute(shared, p);
  else if (threadIdx.x == kTeam)
    load(shared, p);
#if CLUSTER > 1
  cluster_sync();  // no block ends before what it sent has come
#endif
}
