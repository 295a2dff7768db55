// gemm_sm90: a linear layer of many rows x with what follows it, on Hopper: act(x Wgate^T) * (x Wup^T), or
// residual + x W^T.
//
// Persistent blocks, one an SM: a warp brings tiles of x and W by TMA, two warpgroups multiply 64 rows of x each by 256
// rows of W, whose sums fill their registers; GATED: 128 of the gate and 128 of the projection beside it. CLUSTER blocks
// with neighbouring rows of x share the tile of W: each brings a half of it to all.
//
// Sums go to shared memory, rounded, and the warps beside the one that loads make them results and send those, while the
// next tile is multiplied: the tensor cores wait for neither, and no sum is ever in global memory. Numbers are rounded
// where Hugging Face's modules round.
//
// Tiles are taken in bands of `band` tiles of rows, all columns of a band before the next: what blocks read at a time
// is nearly a square, which the L2 holds.
//
// Compile-time: BF16, STAGES, CLUSTER (1 or 2), GATED, ACTIVATION (of GATED).
#include "parts/bulk_copies.cuh"
#include "parts/cluster.cuh"
#include "parts/ring.cuh"
#include "parts/uniform.cuh"
#include "parts/vectors.cuh"
#include "parts/wgmma_sm90.cuh"
#if GATED
#include "parts/activation.cuh"
#endif

constexpr int kRows = 128, kColumns = 256, kDepth = 64;          // of a tile: of x, of W, columns of both
constexpr int kOutputs = GATED ? kColumns / 2 : kColumns;        // columns of the result
constexpr int kTeams = kRows / 64, kEnders = 96;                 // warpgroups that multiply; threads that end tiles
constexpr int kThreads = 128 * (kTeams + 1);
constexpr int kBytesX = kRows * 128, kHalfW = kColumns / 2 * 128, kBytesW = 2 * kHalfW;
constexpr int kSlab = 64 * 128, kTeamBytes = kColumns / 64 * kSlab;  // of sums: 64 rows of 64 columns; of a team
constexpr int kSlabs = kOutputs / 64;                                // of a team's results
constexpr int kTogether = GATED ? 1 : 4;  // results that a thread ends at a time: residuals take long to come
constexpr int kFull = 1, kEmpty = 1 + kTeams, kMeet = 1 + 2 * kTeams;  // named barriers: of each team; of the enders

// The same fields, in the same order, as attention_backend/kernels/gemm.py: GemmParams.
struct GemmParams {
  TensorMap rows, weights, out;
  const element* residual;  // of the result's shape, unless GATED
  int64 residual_row;
  int num_rows, width, steps;   // of the result, and rows of a gate; tiles of kDepth columns
  int row_tiles, column_tiles;  // of a cluster
  int band;
};

struct GemmShared {
  uint32 x, w, sums, full, empty;

  __device__ __forceinline__ explicit GemmShared(const char* memory) {
    x = (shared_address(memory) + 1023) & ~1023u;
    w = x + STAGES * kBytesX;
    sums = w + STAGES * kBytesW;
    full = sums + kTeams * kTeamBytes;
    empty = full + 8 * STAGES;
  }

  __device__ __forceinline__ void init_barriers() const {
    for (int i = 0; i < STAGES; i++) {
      barrier_init(full + 8 * i, 1);
      barrier_init(empty + 8 * i, CLUSTER * kTeams);
    }
    barrier_init_fence();
  }
};

// Tiles of this block, in its order.
class Tiles {
 public:
  int row, column;  // the first ones: of x, of the result

  __device__ __forceinline__ explicit Tiles(const GemmParams& p)
      : p(p), rank(CLUSTER > 1 ? cluster_rank() : 0), tile(static_cast<int>(blockIdx.x) / CLUSTER) {
    find();
  }
  __device__ __forceinline__ bool there() const { return tile < p.row_tiles * p.column_tiles; }
  __device__ __forceinline__ void next() {
    tile += static_cast<int>(gridDim.x) / CLUSTER;
    find();
  }

 private:
  const GemmParams& p;
  const int rank;
  int tile;

  __device__ __forceinline__ void find() {
    if (!there()) return;
    const int in_band = p.band * p.column_tiles, first = tile / in_band * p.band, i = tile % in_band;
    const int height = min(p.band, p.row_tiles - first);
    row = ((first + i % height) * CLUSTER + rank) * kRows;
    column = i / height * kOutputs;
  }
};

// One thread.
__device__ __forceinline__ void load(const GemmShared& shared, const GemmParams& p) {
  Ring ring;
  for (Tiles tiles(p); tiles.there(); tiles.next())
    for (int step = 0; step < p.steps; step++) {
      const uint32 full = shared.full + 8 * ring.stage, w = shared.w + ring.stage * kBytesW;
      barrier_wait(shared.empty + 8 * ring.stage, ring.parity ^ 1);
      barrier_expect(full, kBytesX + kBytesW);
      tma_load(shared.x + ring.stage * kBytesX, &p.rows, full, step * kDepth, tiles.row, 0, 0, kEvictNormal);
      const int apart = GATED ? p.width : kColumns / 2;  // rows of W between the halves of a tile
#if CLUSTER > 1
      const int half = cluster_rank();
      tma_load_for(3, w + half * kHalfW, &p.weights, full, step * kDepth, tiles.column + half * apart, 0, 0, kEvictNormal);
#else
#pragma unroll
      for (int half = 0; half < 2; half++)
        tma_load(w + half * kHalfW, &p.weights, full, step * kDepth, tiles.column + half * apart, 0, 0, kEvictNormal);
#endif
      ring.step();
    }
}

// A warpgroup that multiplies.
class Team {
 public:
  __device__ __forceinline__ Team(const GemmShared& shared, const GemmParams& p)
      : shared(shared), p(p), team(uniform(threadIdx.x / 128)) {}

  __device__ __forceinline__ void run() {
    float acc[kColumns / 2];
#pragma unroll 1
    for (Tiles tiles(p); tiles.there(); tiles.next()) {
      multiply(acc);
      named_sync(kEmpty + team, 128 + kEnders);
      hand_over(acc);
      named_arrive(kFull + team, 128 + kEnders);
    }
    named_sync(kEmpty + team, 128 + kEnders);
  }

 private:
  const GemmShared& shared;
  const GemmParams& p;
  const int team;
  Ring ring;

  // Gives a stage back to all who fill it.
  __device__ __forceinline__ void release(int stage) const {
#if CLUSTER > 1
    if (threadIdx.x % 128 < CLUSTER) barrier_arrive_at(shared.empty + 8 * stage, threadIdx.x % 128);
#else
    if (threadIdx.x % 128 == 0) barrier_arrive(shared.empty + 8 * stage);
#endif
  }

  __device__ __forceinline__ void multiply(float (&acc)[kColumns / 2]) {
    int before = 0;
#pragma unroll 1
    for (int step = 0; step < p.steps; step++) {
      const int stage = uniform(ring.stage);
      const uint64 x = wgmma_descriptor(uniform(shared.x + stage * kBytesX + team * kSlab), 16);
      const uint64 w = wgmma_descriptor(uniform(shared.w + stage * kBytesW), 16);
      barrier_wait(shared.full + 8 * stage, ring.parity);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < kDepth / 16; i++) Wgmma<kColumns>::shared(acc, x + i * 2, w + i * 2, i || step);
      wgmma_commit();
      wgmma_wait<1>();
      if (step) release(before);
      before = stage;
      ring.step();
    }
    wgmma_wait<0>();
    release(before);
  }

  // The sums, rounded, as rows of 128 swizzled bytes; the next 64 columns a slab further.
  __device__ __forceinline__ void hand_over(const float (&acc)[kColumns / 2]) const {
    const int lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16 + lane % 16;
    const uint32 space = shared.sums + team * kTeamBytes + row * 128;
#pragma unroll
    for (int i = 0; i < kColumns / 16; i++) {
      uint32 x[4];
#pragma unroll
      for (int j = 0; j < 4; j++) x[j] = pack2(acc[i * 8 + j * 2], acc[i * 8 + j * 2 + 1]);
      store_matrices(space + i / 4 * kSlab + ((i % 4 * 2 + lane / 16 ^ row & 7) << 4), x);
    }
  }
};

__device__ __forceinline__ void load_elements(uint32 address, float (&x)[kVector]) {
  uint32 bits[4];
  load_shared4(bits, address);
  unpack(make_uint4(bits[0], bits[1], bits[2], bits[3]), x);
}

// Eight results of a team's tile, in place of the i-th 16 bytes of their (or their gates') sums.
__device__ __forceinline__ void end_sums(uint32 space, int i, int row, int column, const GemmParams& p) {
  float x[kVector], y[kVector];
  load_elements(space + i * 16, x);
#if GATED
  load_elements(space + (i + kSlabs * (kSlab / 16)) * 16, y);
#pragma unroll
  for (int j = 0; j < kVector; j++) x[j] = activate(x[j]);
  round_all(x);
#pragma unroll
  for (int j = 0; j < kVector; j++) x[j] *= y[j];
#else
  row += i / 8 % 64;
  column += i / (kSlab / 16) * 64 + (i % 8 ^ i / 8 % 8) * kVector;
  if (row >= p.num_rows || column >= p.width) return;
  unpack(*reinterpret_cast<const uint4*>(p.residual + row * p.residual_row + column), y);
#pragma unroll
  for (int j = 0; j < kVector; j++) x[j] += y[j];
#endif
  store_shared4(space + i * 16, pack(x));
}

// Makes sums results, which a copy takes from where they were. What lies outside of the result is not written.
__device__ __forceinline__ void end_tiles(const GemmShared& shared, const GemmParams& p) {
  const int thread = threadIdx.x % 128;
#pragma unroll
  for (int team = 0; team < kTeams; team++) named_arrive(kEmpty + team, 128 + kEnders);
#pragma unroll 1
  for (Tiles tiles(p); tiles.there(); tiles.next())
#pragma unroll
    for (int team = 0; team < kTeams; team++) {
      const uint32 space = shared.sums + team * kTeamBytes;
      const int row = tiles.row + team * 64;
      named_sync(kFull + team, 128 + kEnders);
#pragma unroll kTogether
      for (int i = thread; i < kSlabs * kSlab / 16; i += kEnders) end_sums(space, i, row, tiles.column, p);
      fence_async_proxy();
      named_sync(kMeet, kEnders);
      if (thread == 0) {
#pragma unroll
        for (int i = 0; i < kSlabs; i++) tma_store(&p.out, space + i * kSlab, tiles.column + i * 64, row, 0, 0);
        bulk_wait_read();
      }
      named_arrive(kEmpty + team, 128 + kEnders);
    }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
#if CLUSTER > 1
    __cluster_dims__(CLUSTER, 1, 1)
#endif
    gemm_sm90(const __grid_constant__ GemmParams p) {
  extern __shared__ __align__(1024) char memory[];
  const GemmShared shared(memory);
  if (threadIdx.x == 0) shared.init_barriers();
#if CLUSTER > 1
  cluster_sync();
#else
  __syncthreads();
#endif
  if (threadIdx.x < kTeams * 128) {
    registers_raise<216>();
    Team(shared, p).run();
  } else {
    registers_lower<56>();
    const int thread = threadIdx.x % 128;
    if (thread < kEnders)
      end_tiles(shared, p);
    else if (thread == kEnders)
      load(shared, p);
  }
#if CLUSTER > 1
  cluster_sync();  // no block ends before the others have said that they are through with what it brought
#endif
}
