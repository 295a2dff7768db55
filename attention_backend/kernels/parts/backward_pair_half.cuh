// What both blocks of a pair do in the Hopper backward for wide heads. Block 0 has S, P and dK, block 1 dP, dS and dV.
#pragma once

#include "parts/backward_pair_loads.cuh"
#include "parts/backward_store.cuh"
#include "parts/backward_wgmma.cuh"
#include "parts/rows_of_dq.cuh"
#include "parts/uniform.cuh"

// What every step asks of a tile, held in registers.
struct Walk {
  int m_begin, m_end, whole_begin, whole_end;
  int chunk;  // of the sums of dQ: of the sequence's first row, in head 0
#if DETERMINISTIC
  int falling, first_head, end_head;
#endif

  __device__ __forceinline__ Walk() {}
  __device__ __forceinline__ explicit Walk(const KeyTile& tile)
      : m_begin(uniform(tile.m_begin)),
        m_end(uniform(tile.m_end)),
        whole_begin(uniform(tile.whole_begin)),
        whole_end(uniform(tile.whole_end)),
        chunk(uniform(tile.sums_chunk)) {
#if DETERMINISTIC
    falling = uniform(tile.falling), first_head = uniform(tile.first_head), end_head = uniform(tile.end_head);
#endif
  }
};

template <int RANK>
class Half {
 public:
  __device__ __forceinline__ Half(const Shared& shared, const BackwardParams& p)
      : shared(shared), p(p), group(uniform(threadIdx.x / 128) - 1), lane(group * 64) {}

  // Calls work(tiles of rows) for every tile of keys.
  template <class Work>
  __device__ __forceinline__ void for_tiles(Work work) {
#pragma unroll 1
    for (;; slot.next()) {
      slot.wait_full(shared.full_tile);
      const int tiles = uniform(tile().tiles);
      if (tiles < 0) return;
      now = Step(tile());
      now.head = uniform(now.head), now.m = uniform(now.m);
      walk = Walk(tile());
      work(tiles);
      if (tiles > 0) keys.next();
      __syncwarp();
      if (threadIdx.x % 32 == 0) barrier_arrive(shared.empty_tile + 8 * slot.at);
    }
  }

 protected:
  const Shared& shared;
  const BackwardParams& p;
  const int group;  // of the two warpgroups; of 64 keys, and of 64 columns of dQ
  const Lane lane;
  RingPlace<TILE_SLOTS> slot;
  RingPlace<1> keys;
  Walk walk;
  Step now;
  RingPlace<RANK == 0 ? Q_STAGES : O_STAGES> rows;
  RingPlace<RANK == 0 ? DS_STAGES : kProbsStages> ds_place;

  static constexpr int kBytesRows = RANK == 0 ? kBytesQ : kBytesO;

  __device__ __forceinline__ const KeyTile& tile() const { return shared.tiles[slot.at]; }
  __device__ __forceinline__ bool first_thread() const { return threadIdx.x % 128 == 0; }
  __device__ __forceinline__ bool is_masked(const Step& step) const {
    return step.m < walk.whole_begin || step.m >= walk.whole_end;
  }
  // Whether some rows of a step see no key. All warps find the same.
  __device__ __forceinline__ bool has_dead(const Step& step, uint32 lse2) const {
    return is_masked(step) && has_dead_rows(lse2);
  }
  __device__ __forceinline__ void next_step() { now.next(1, walk); }
  __device__ __forceinline__ uint32 rows_at(int at) const {
    return (RANK == 0 ? shared.queries : shared.gradients) + at * kBytesRows;
  }
  __device__ __forceinline__ uint32 lse2_at(int at) const { return shared.lse2 + at * kBytesTerms; }

  __device__ __forceinline__ KeyRows rows_that_see(int r) const { return rows_of(tile(), p, r); }
  __device__ __forceinline__ bool has_dead_keys() const {
    return KEY_MASK || uniform(rows_that_see(0).count) == 0 || uniform(rows_that_see(BLOCK_N - 1).count) == 0;
  }
  // Keys that nobody sees, of all the tile: they are summed over by both warpgroups.
  __device__ __forceinline__ void clear_keys(uint32 keys, int slabs) const {
    const int row = threadIdx.x % 128;
    if (rows_that_see(row).count == 0) clear_row(keys, slabs, kSlabKv, row);
    fence_async_proxy();
    named_sync(threadIdx.x / 128, 128);
  }

  // Where a thread's i-th probabilities lie among its warpgroup's, in block 1: a warp's fill the place of its dS.
  __device__ __forceinline__ int probs_at(int i) const {
    return threadIdx.x % 128 / 32 * 2048 + i * 512 + threadIdx.x % 32 * 16;
  }

  // The warpgroup's keys (K or V) times rows (Q or dO).
  template <int WIDTH>
  __device__ __forceinline__ void start_product(float (&s)[kRows / 2], uint32 keys, uint32 rows) const {
    const uint64 a = wgmma_descriptor(uniform(keys + group * kHalf), 16), b = wgmma_descriptor(uniform(rows), 16);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < WIDTH / 16; i++)
      Wgmma<kRows>::shared(s, a + i / 4 * (kSlabKv >> 4) + i % 4 * 2, b + i / 4 * (kSlabQ >> 4) + i % 4 * 2, i != 0);
    wgmma_commit();
  }

  // The warpgroup's 64 columns of dQ; `keys`: their slab.
  static constexpr bool kAll = RANK == 0 || kSlabsThere == kConsumers;  // each warpgroup has some
  __device__ __forceinline__ bool has_dq() const { return kAll || group < kSlabsThere; }
  __device__ __forceinline__ void start_dq(float (&dq)[32], uint32 keys) const {
    const uint64 a = wgmma_descriptor(uniform(shared.ds + ds_place.at * kBytesDs), kSlabKv);
    const uint64 b = wgmma_descriptor(uniform(keys + group * kSlabKv), kSlabKv);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < BLOCK_N / 16; i++) wgmma_transposed(dq, a + i * 128, b + i * 128, i != 0);
    wgmma_commit();
  }
  // `turn`: the parity of how many steps there were before.
  __device__ __forceinline__ void add_dq(const float (&dq)[32], const Step& step, uint32 turn) const {
    const int rows = step.head * head_chunks(p) + walk.chunk + step.m;
#if DETERMINISTIC
    barrier_wait(shared.turn_begins + 8 * group, turn);
#endif
    const int64 slab = rows * static_cast<int64>(kSlabsK) + RANK * kSlabsHere + group;
    float* to = p.sums + slab * kChunk + first_in_chunk();
#pragma unroll
    for (int j = 0; j < 8; j++) add4(to + nth_in_chunk(j), dq[j * 4], dq[j * 4 + 1], dq[j * 4 + 2], dq[j * 4 + 3]);
#if DETERMINISTIC
    barrier_arrive(shared.turn_ends + 8 * group);  // every thread for what it added
#endif
  }

  // For what comes once a tile: a key that the compiler has not seen before, or it would keep its addresses in registers
  // while there are none left.
  __device__ __forceinline__ Lane fresh_lane() const {
    Lane fresh = lane;
    asm volatile("" : "+r"(fresh.key));
    return fresh;
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
