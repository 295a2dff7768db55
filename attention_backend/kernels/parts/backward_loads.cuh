// The Hopper backward's producers: one warp draws tiles of keys, one or two load keys and queries, values and output
// gradients, by TMA.
#pragma once

#include "parts/backward_finish.cuh"
#include "parts/backward_draw.cuh"

// What comes before all else. The number of a block's first tile in the order of work is left in shared memory.
__device__ __forceinline__ void start(const Shared& shared, const BackwardParams& p) {
  for (int i = threadIdx.x * 16; i < kZerosBytes; i += kThreads * 16) store_shared4(shared.zeros + i, 0.f, 0.f, 0.f, 0.f);
  fence_async_proxy();
  if (threadIdx.x == 0) {
    shared.init_barriers();
    shared.tiles[0].number = draw_first(p);
  }
  __syncthreads();
}

__device__ __forceinline__ void describe_rows(SeenKeyTile& tile, const BackwardParams& p) {
#pragma unroll 1
  for (int r = threadIdx.x % 32; r < BLOCK_N; r += 32) tile.rows[r] = rows_of(tile, p, r);
}

__device__ __forceinline__ void draw_tiles(const Shared& shared, const BackwardParams& p) {
  int index = shared.tiles[0].number;
  uint32 drawn = 0;  // tiles, and, as a producer has few registers, its places in rings
#pragma unroll 1
  for (;; drawn++) {
    const uint32 slot = drawn % TILE_SLOTS;
    barrier_wait(shared.empty_tile + 8 * slot, drawn / TILE_SLOTS % 2 ^ 1);
    SeenKeyTile& tile = shared.tiles[slot];
    index = describe_next(tile, p, index);
    if (tile.tiles < 0) break;
    describe_rows(tile, p);
    barrier_arrive(shared.full_tile + 8 * slot);  // every lane for what it wrote
    if (FINISHES) begin_share(shared, p, drawn);
    barrier_wait(shared.wanted_tile, drawn % 2);
    index = draw(p);
  }
  barrier_arrive(shared.full_tile + 8 * (drawn % TILE_SLOTS));  // there is no more
  if (FINISHES) end_share(shared, p, drawn);
  if (threadIdx.x % 32 == 0) stop_drawing(p);
}

// KEYS: the tiles of keys, and the ring of queries with lse2. Else the values, and the ring of output gradients with delta.
// Those terms, which threads read, come by a tensor map as all else does: of plain bulk copies (cp.async.bulk) racecheck
// reports that they overwrite what was read, as it does not see that a barrier of the readers comes before one's arrival.
template <bool KEYS>
class Loads {
 public:
  __device__ __forceinline__ Loads(const Shared& shared, const BackwardParams& p, const TensorMap* once, const TensorMap* rows,
                                   const TensorMap* terms)
      : shared(shared), p(p), map_once(once), map_rows(rows), map_terms(terms) {}

  __device__ __forceinline__ void once(const KeyTile& tile) {
    const uint32 full = (KEYS ? shared.full_k : shared.full_v) + 8 * keys.at;
    const uint32 to = KEYS ? shared.k + keys.at * kBytesK : shared.v + keys.at * kBytesV;
    keys.wait_empty(KEYS ? shared.empty_k : shared.empty_v);
    barrier_expect(full, kSlabs * kSlabKv);
#pragma unroll 1
    for (int c = 0; c < kSlabs; c++)
      tma_load(to + c * kSlabKv, map_once, full, c * 64, tile.seq.k_begin + tile.first_key, tile.kv_head,
               p.sequence.cu_seqlens_k ? 0 : tile.batch, kEvictFirst);
    keys.next();
  }

  __device__ __forceinline__ void rows(const KeyTile& tile, const Step& step) {
    constexpr int kBytes = kSlabs * kSlabQ;
    const uint32 full = (KEYS ? shared.full_q : shared.full_o) + 8 * place.at;
    const uint32 to = (KEYS ? shared.q : shared.o) + place.at * kBytes;
    place.wait_empty(KEYS ? shared.empty_q : shared.empty_o);
    barrier_expect(full, kBytes + kBytesTerms);
    tma_load((KEYS ? shared.lse2 : shared.delta) + place.at * kBytesTerms, map_terms, full, tile.padded_row + step.m * kRows,
             step.head, kEvictLast);
#pragma unroll 1
    for (int c = 0; c < kSlabs; c++)
      tma_load(to + c * kSlabQ, map_rows, full, c * 64, tile.seq.q_begin + step.m * kRows, step.head,
               p.sequence.cu_seqlens_q ? 0 : tile.batch, kEvictLast);
    place.next();
  }

 private:
  static constexpr int kStages = KEYS ? Q_STAGES : O_STAGES, kSlabs = KEYS ? kSlabsK : kSlabsV;

  const Shared& shared;
  const BackwardParams& p;
  const TensorMap *const map_once, *const map_rows, *const map_terms;
  RingPlace<kStages> place;
  RingPlace<KEY_STAGES> keys;
};

// One warp: all that is loaded, in the order in which it is wanted, or (KEYS or VALUES alone) what one of two warps loads.
template <bool KEYS, bool VALUES>
__device__ __forceinline__ void load_tiles(const Shared& shared, const BackwardParams& p, Loads<true> of_keys,
                                           Loads<false> of_values) {
  if (threadIdx.x % 32 != 0) return;
  RingPlace<TILE_SLOTS> slot;
#pragma unroll 1
  for (;; slot.next()) {
    slot.wait_full(shared.full_tile);
    const KeyTile& tile = shared.tiles[slot.at];
    const int tiles = tile.tiles;
    if (tiles < 0) return;
    if (KEYS && tiles == 0) barrier_arrive(shared.wanted_tile);
    if (tiles > 0) {
      if (VALUES) of_values.once(tile);  // whose place is free first
      if (KEYS) of_keys.once(tile);
    }
    Step step(tile);
#pragma unroll 1
    for (int left = tiles; left > 0; left--) {
      if (KEYS && left == min(tiles, kDrawAhead)) barrier_arrive(shared.wanted_tile);
      if (KEYS) of_keys.rows(tile, step);
      if (VALUES) of_values.rows(tile, step);
      step.next(kTileSteps, tile);
    }
    barrier_arrive(shared.empty_tile + 8 * slot.at);
  }
}
