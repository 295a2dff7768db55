// gated_linear_sm90: act(x Wgate^T) * (x Wup^T) of many rows x, on Hopper.
//
// Persistent blocks, one an SM: a warp brings tiles of x and W by TMA, two warpgroups multiply 64 rows of x each by
// OUTPUTS rows of the gate and as many of the projection beside it, whose sums fill their registers. CLUSTER blocks with neighbouring
// rows of x share the tile of W: each brings a part of it to all.
//
// Sums go to shared memory, rounded, and the warps beside the one that loads make the one result of both and send it,
// while the next tile is multiplied: the tensor cores wait for no activation, and neither gate nor projection is ever in
// global memory. Numbers are rounded where Hugging Face's modules round.
//
// Tiles are taken in bands of `band` tiles of rows, all columns of a band before the next: what blocks read at a time
// is nearly a square, which the L2 holds.
//
// Compile-time: BF16, STAGES, CLUSTER (1 or 2), OUTPUTS (a multiple of 16 from 64 to 128), ACTIVATION.
#include "parts/activation.cuh"
#include "parts/bulk_copies.cuh"
#include "parts/cluster.cuh"
#include "parts/ring.cuh"
#include "parts/uniform.cuh"
#include "parts/vectors.cuh"
#include "parts/wgmma_sm90.cuh"

constexpr int kRows = 128, kOutputs = OUTPUTS, kDepth = 64;  // of a tile: of x, columns of the result, of x and W
constexpr int kColumns = 2 * kOutputs;                   // rows of W
constexpr int kTeams = kRows / 64, kGaters = 96;         // warpgroups that multiply; threads that end tiles
constexpr int kThreads = 128 * (kTeams + 1);
constexpr int kBytesX = kRows * 128, kHalfW = kOutputs * 128, kBytesW = 2 * kHalfW;
constexpr int kSlab = 64 * 128, kSlabs = (kOutputs + 63) / 64;  // 64 rows of 64 columns; a team's of gates, of projections
constexpr int kTeamBytes = 2 * kSlabs * kSlab;
static_assert(kOutputs % 16 == 0 && kOutputs >= 64, "slabs are whole, and begin at a matrix");

// The first column of a slab. The last slab ends with the tile, so it may begin with what the one before ends with.
__device__ __forceinline__ constexpr int slab_column(int slab) { return slab * 64 < kOutputs - 64 ? slab * 64 : kOutputs - 64; }
constexpr int kFull = 1, kEmpty = 1 + kTeams, kMeet = 1 + 2 * kTeams;  // named barriers: of each team; of the gaters

// The same fields, in the same order, as attention_backend/kernels/gated_linear.py: GatedLinearParams.
struct GatedLinearParams {
  TensorMap rows, weights, out;
  int width, steps;             // columns of the result, and rows of the gate; tiles of kDepth columns
  int row_tiles, column_tiles;  // of a cluster
  int band;
};

struct GatedShared {
  uint32 x, w, sums, full, empty;

  __device__ __forceinline__ explicit GatedShared(const char* memory) {
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

  __device__ __forceinline__ explicit Tiles(const GatedLinearParams& p)
      : p(p), rank(CLUSTER > 1 ? cluster_rank() : 0), tile(static_cast<int>(blockIdx.x) / CLUSTER) {
    find();
  }
  __device__ __forceinline__ bool there() const { return tile < p.row_tiles * p.column_tiles; }
  __device__ __forceinline__ void next() {
    tile += static_cast<int>(gridDim.x) / CLUSTER;
    find();
  }

 private:
  const GatedLinearParams& p;
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
__device__ __forceinline__ void load(const GatedShared& shared, const GatedLinearParams& p) {
  Ring ring;
  for (Tiles tiles(p); tiles.there(); tiles.next())
    for (int step = 0; step < p.steps; step++) {
      const uint32 full = shared.full + 8 * ring.stage, w = shared.w + ring.stage * kBytesW;
      barrier_wait(shared.empty + 8 * ring.stage, ring.parity ^ 1);
      barrier_expect(full, kBytesX + kBytesW);
      tma_load(shared.x + ring.stage * kBytesX, &p.rows, full, step * kDepth, tiles.row, 0, 0, kEvictNormal);
#if CLUSTER > 1
      const int half = cluster_rank();
      tma_load_for(3, w + half * kHalfW, &p.weights, full, step * kDepth, tiles.column + half * p.width, 0, 0, kEvictNormal);
#else
#pragma unroll
      for (int half = 0; half < 2; half++)
        tma_load(w + half * kHalfW, &p.weights, full, step * kDepth, tiles.column + half * p.width, 0, 0, kEvictNormal);
#endif
      ring.step();
    }
}

// A warpgroup that multiplies.
class Team {
 public:
  __device__ __forceinline__ Team(const GatedShared& shared, const GatedLinearParams& p)
      : shared(shared), p(p), team(uniform(threadIdx.x / 128)) {}

  __device__ __forceinline__ void run() {
    float acc[kColumns / 2];
#pragma unroll 1
    for (Tiles tiles(p); tiles.there(); tiles.next()) {
      multiply(acc);
      named_sync(kEmpty + team, 128 + kGaters);
      hand_over(acc);
      named_arrive(kFull + team, 128 + kGaters);
    }
    named_sync(kEmpty + team, 128 + kGaters);
  }

 private:
  const GatedShared& shared;
  const GatedLinearParams& p;
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

  // The sums, rounded, as rows of 128 swizzled bytes: slabs of gates, then slabs of projections.
  __device__ __forceinline__ void hand_over(const float (&acc)[kColumns / 2]) const {
    const int lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16 + lane % 16;
    const uint32 space = shared.sums + team * kTeamBytes + row * 128;
#pragma unroll
    for (int slab = 0; slab < 2 * kSlabs; slab++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int column = slab / kSlabs * kOutputs + slab_column(slab % kSlabs) + i * 16;
        uint32 x[4];
#pragma unroll
        for (int j = 0; j < 4; j++) x[j] = pack2(acc[column / 2 + j * 2], acc[column / 2 + j * 2 + 1]);
        store_matrices(space + slab * kSlab + ((i * 2 + lane / 16 ^ row & 7) << 4), x);
      }
  }
};

__device__ __forceinline__ void load_elements(uint32 address, float (&x)[kVector]) {
  uint32 bits[4];
  load_shared4(bits, address);
  unpack(make_uint4(bits[0], bits[1], bits[2], bits[3]), x);
}

// Makes gates and projections one result, in the gates' place, which a copy takes from there. What lies outside of the
// result is not written.
__device__ __forceinline__ void end_tiles(const GatedShared& shared, const GatedLinearParams& p) {
  const int thread = threadIdx.x % 128;
#pragma unroll
  for (int team = 0; team < kTeams; team++) named_arrive(kEmpty + team, 128 + kGaters);
#pragma unroll 1
  for (Tiles tiles(p); tiles.there(); tiles.next())
#pragma unroll
    for (int team = 0; team < kTeams; team++) {
      const uint32 space = shared.sums + team * kTeamBytes;
      named_sync(kFull + team, 128 + kGaters);
#pragma unroll 1
      for (int i = thread; i < kSlabs * kSlab / 16; i += kGaters) {
        const uint32 at = space + i * 16;
        float gate[kVector], up[kVector];
        load_elements(at, gate);
        load_elements(at + kSlabs * kSlab, up);
#pragma unroll
        for (int j = 0; j < kVector; j++) gate[j] = activate(gate[j]);
        round_all(gate);
#pragma unroll
        for (int j = 0; j < kVector; j++) gate[j] *= up[j];
        store_shared4(at, pack(gate));
      }
      fence_async_proxy();
      named_sync(kMeet, kGaters);
      if (thread == 0) {
#pragma unroll
        for (int i = 0; i < kSlabs; i++)
          tma_store(&p.out, space + i * kSlab, tiles.column + slab_column(i), tiles.row + team * 64, 0, 0);
        bulk_wait_read();
      }
      named_arrive(kEmpty + team, 128 + kGaters);
    }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
#if CLUSTER > 1
    __cluster_dims__(CLUSTER, 1, 1)
#endif
    gated_linear_sm90(const __grid_constant__ GatedLinearParams p) {
  extern __shared__ __align__(1024) char memory[];
  const GatedShared shared(memory);
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
    if (thread < kGaters)
      end_tiles(shared, p);
    else if (thread == kGaters)
      load(shared, p);
  }
#if CLUSTER > 1
  cluster_sync();  // no block ends before the others have said that they are through with what it brought
#endif
}
