// What both warpgroups of the Hopper backward for wide heads do. The first has S, P and dV, the second dP, dS and dK.
#pragma once

#include "parts/backward_loads.cuh"
#include "parts/backward_store.cuh"
#include "parts/backward_wgmma.cuh"
#include "parts/uniform.cuh"

static_assert(BLOCK_M == kRows && BLOCK_N == 64 && HANDOVER == 1 && DS_STAGES == kSpaces, "one step a tile, 64 keys");

// Named barriers beside those of a warpgroup alone.
enum Barrier { kProbsFull = 3, kProbsFree, kDsFull };

// What both warpgroups do; GROUP 0 has S and dV, 1 has dP and dK.
template <int GROUP>
class Half {
 public:
  __device__ __forceinline__ Half(const Shared& shared, const BackwardParams& p)
      : shared(shared), p(p), lane(0) {}

  // Calls work(tiles of rows) for every tile of keys.
  template <class Work>
  __device__ __forceinline__ void for_tiles(Work work) {
#pragma unroll 1
    for (;; slot.next()) {
      slot.wait_full(shared.full_tile);
      const int tiles = uniform(tile().tiles);
      if (tiles < 0) return;
      now = Step(tile());
      work(tiles);
      if (tiles > 0) keys.next();
      __syncwarp();
      if (threadIdx.x % 32 == 0) barrier_arrive(shared.empty_tile + 8 * slot.at);
    }
  }

 protected:
  const Shared& shared;
  const BackwardParams& p;
  const Lane lane;
  RingPlace<TILE_SLOTS> slot;
  RingPlace<1> keys;
  Step now;
  RingPlace<Q_STAGES> q;
  RingPlace<O_STAGES> o;
  RingPlace<DS_STAGES> ds_place;
  RingPlace<1> turn;

  __device__ __forceinline__ const KeyTile& tile() const { return shared.tiles[slot.at]; }
  __device__ __forceinline__ bool first_thread() const { return threadIdx.x % 128 == 0; }
  __device__ __forceinline__ bool is_masked() const {
    return now.m < uniform(tile().whole_begin) || now.m >= uniform(tile().whole_end);
  }
  // Whether some rows of this step see no key. All warps find the same.
  __device__ __forceinline__ bool has_dead(uint32 lse2) const { return is_masked() && has_dead_rows(lse2); }
  __device__ __forceinline__ void next_step() { now.next(1, tile()); }

  __device__ __forceinline__ void wait_keys() const {
    keys.wait_full(shared.full_k);
    if (GROUP == 1) keys.wait_full(shared.full_v);
    if (has_dead_keys(tile())) {
      keys.wait_full(shared.full_v);
      clear_dead_keys(shared.k, shared.v, tile(), 0);
    }
  }

  // keys (K or V) times rows (Q or dO).
  template <int WIDTH>
  __device__ __forceinline__ void start_product(float (&s)[kRows / 2], uint32 keys, uint32 rows) const {
    const uint64 a = wgmma_descriptor(uniform(keys), 16), b = wgmma_descriptor(uniform(rows), 16);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < WIDTH / 16; i++)
      Wgmma<kRows>::shared(s, a + i / 4 * (kSlabKv >> 4) + i % 4 * 2, b + i / 4 * (kSlabQ >> 4) + i % 4 * 2, i != 0);
    wgmma_commit();
  }

  // acc += x * rows.
  template <int WIDTH>
  __device__ __forceinline__ void start_sum(float (&acc)[WIDTH / 2], const uint32 (&x)[kRows / 16][4], uint32 rows) const {
    const uint64 b = wgmma_descriptor(uniform(rows), kSlabQ);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kRows / 16; i++) Wgmma<WIDTH>::registers(acc, x[i], b + i * 128);
    wgmma_commit();
  }

  // The n-th slab of dQ that is this warpgroup's.
  static constexpr int kChunks = (kSlabsK + 1 - GROUP) / 2;
  __device__ __forceinline__ void start_dq(float (&dq)[32], int n) const {
    const uint64 a = wgmma_descriptor(uniform(shared.ds + ds_place.at * kBytesDs), kSlabKv);
    const uint64 b = wgmma_descriptor(uniform(shared.k + (2 * n + GROUP) * kSlabKv), kSlabKv);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < BLOCK_N / 16; i++) wgmma_transposed(dq, a + i * 128, b + i * 128, i != 0);
    wgmma_commit();
  }
  __device__ __forceinline__ void add_dq(const float (&dq)[32], const Step& step, int n) {
    const int64 rows = (step.head * p.padded_rows + tile().padded_row) / kRows + step.m;
#if DETERMINISTIC
    if (n == 0) turn.wait_full(shared.turn_begins + 8 * GROUP);
#endif
    float* to = p.dq + (rows * kSlabsK + 2 * n + GROUP) * kChunk + threadIdx.x % 128 * 4;
#pragma unroll
    for (int j = 0; j < 8; j++) add4(to + j * 512, dq[j * 4], dq[j * 4 + 1], dq[j * 4 + 2], dq[j * 4 + 3]);
#if DETERMINISTIC
    if (n == kChunks - 1) {
      barrier_arrive(shared.turn_ends + 8 * GROUP);  // every thread for what it added
      turn.next();
    }
#endif
  }

  __device__ __forceinline__ Kept kept_of(const Step& step) const {
#if DROPOUT
    const Dropout dropout(p.dropout, tile().batch * p.kv_heads * p.group + step.head);
    return Kept(dropout, p.dropout.threshold, step.m * (kRows / 16), (tile().first_key + lane.key) / 16);
#else
    return Kept();
#endif
  }
};
