// The Hopper forward's producers, a warp each: one draws tiles of query rows, three fill the rings by TMA.
#pragma once

#include "bulk_copies.cuh"
#include "dependent_launch.cuh"
#include "forward_rings.cuh"

// How many steps before its last one the load of a tile's keys asks for the next tile. A tile drawn earlier than needed is
// one that a block which is done sooner cannot take.
constexpr int kDrawAhead = 1;

#if CLUSTER > 1
// What the cluster's first block has drawn, the n-th time, and tells the others. All lanes of a warp call; `index`: in the
// first block's lane 0.
__device__ __forceinline__ int drawn_for_all(const Shared& shared, int index, int n) {
  const int slot = stage<kDrawnSlots>(n);
  const uint32 full = shared.full_drawn + 8 * slot, number = shared.drawn + 4 * slot;
  if (cluster_rank() == 0) {
    if (threadIdx.x % 32 == 0) {
#pragma unroll
      for (int rank = 1; rank < CLUSTER; rank++)
        store_there(address_at(number, rank), static_cast<uint32>(index), address_at(full, rank));
    }
    return __shfl_sync(~0u, index, 0);
  }
  if (threadIdx.x % 32 == 0) barrier_expect(full, 4);
  barrier_wait(full, parity<kDrawnSlots>(n));
  return load_shared_int(number);
}
#endif

__device__ __forceinline__ void draw_tiles(const Shared& shared, const HopperParams& p) {
  WorkLine line(p);
  const int drawers = gridDim.x / CLUSTER;  // one block of a cluster
  const bool draws = CLUSTER == 1 || cluster_rank() == 0;
  int index = blockIdx.x / CLUSTER;
#pragma unroll 1
  for (int t = 0;; t++) {
    if (t > 0) {
      if (draws) {
        barrier_wait(shared.wanted_tile, (t - 1) & 1);
        if (threadIdx.x % 32 == 0) index = drawers + atomicAdd(p.work.counters, 1);
      }
#if CLUSTER > 1
      index = drawn_for_all(shared, index, t - 1);
#else
      index = __shfl_sync(~0u, index, 0);
#endif
    }
    wait_empty<kTileSlots>(shared.empty_tile, t);
    Tile& tile = shared.tiles[stage<kTileSlots>(t)];
    line.draw(index, tile, p);
    const bool more = tile.steps > 0;
    barrier_arrive(shared.full_tile + 8 * stage<kTileSlots>(t));  // every lane for what it wrote
    if (!more) break;
    line.write_share(index, p);
  }
  // The last block to get here leaves the counters as it found them.
  if (draws && threadIdx.x % 32 == 0) {
    __threadfence();
    if (atomicAdd(p.work.counters + 1, 1) == drawers - 1) {
      p.work.counters[0] = 0;
      p.work.counters[1] = 0;
    }
  }
  wait_for_previous();  // it may run beside this kernel, and the next one counts on both
}

// Calls load(tile, its number) for every tile, on all lanes of one warp.
template <class Load>
__device__ __forceinline__ void for_tiles(const Shared& shared, Load load) {
#pragma unroll 1
  for (int t = 0;; t++) {
    wait_full<kTileSlots>(shared.full_tile, t);
    const Tile& tile = shared.tiles[stage<kTileSlots>(t)];
    if (tile.steps == 0) return;
    load(tile, t);
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(shared.empty_tile + 8 * stage<kTileSlots>(t));
  }
}

__device__ __forceinline__ void load_queries(const Shared& shared, const TensorMap* map, const HopperParams& p) {
  for_tiles(shared, [&](const Tile& tile, int t) {
    if (threadIdx.x % 32 == 0) {
      const uint32 full = shared.full_q + 8 * stage<Q_STAGES>(t), to = shared.q + stage<Q_STAGES>(t) * kBytesQ;
      const int batch = p.forward.sequence.cu_seqlens_q ? 0 : tile.batch;
      const int first = tile.seq.q_begin + tile.first_row / rows_packed(p);
      wait_empty<Q_STAGES>(shared.empty_q, t);
      barrier_expect(full, kSlabsK * 128 * rows_per_tile(p));
#pragma unroll
      for (int c = 0; c < kSlabsK; c++)
#if PACK
        tma_load(to + c * kSlabQ, map, full, c * 64, 0, first, tile.head, batch, kEvictFirst);
#else
        tma_load(to + c * kSlabQ, map, full, c * 64, first, tile.head, batch, kEvictFirst);
#endif
    }
  });
}

// For all blocks of the cluster.
__device__ __forceinline__ void load_box(uint32 to, const TensorMap* map, uint32 full, int c0, int c1, int c2, int c3) {
#if CLUSTER > 1
  tma_load_for((1 << CLUSTER) - 1, to, map, full, c0, c1, c2, c3, kEvictLast);
#else
  tma_load(to, map, full, c0, c1, c2, c3, kEvictLast);
#endif
}

// Fills the ring of key tiles, or of value tiles: by a warp for each, in one code.
__device__ __forceinline__ void load_tiles(const Shared& shared, const TensorMap* map, bool keys, const HopperParams& p) {
#if FP8_PAGES  // whole rows, to be converted
  constexpr int kStages = RAW_STAGES, kMostBoxes = 1;
  const int boxes = 1, row_bytes = keys ? HEAD_DIM : HEAD_DIM_V;
  const uint32 ring = keys ? shared.raw_k : shared.raw_v, full_ring = keys ? shared.full_raw_k : shared.full_raw_v;
  const uint32 empty_ring = keys ? shared.empty_raw_k : shared.empty_raw_v;
#else
  constexpr int kStages = STAGES, kMostBoxes = kSlabsK > kSlabsV ? kSlabsK : kSlabsV;
  const int boxes = keys ? kSlabsK : kSlabsV, row_bytes = 128;
  const uint32 ring = keys ? shared.k : shared.v, full_ring = keys ? shared.full_k : shared.full_v;
  const uint32 empty_ring = keys ? shared.empty_k : shared.empty_v;
#endif
  const int box_bytes = BLOCK_N * row_bytes;
  // Each block of a cluster loads its share of a tile's columns for all.
  static_assert(CLUSTER == 1 || (kSlabsK == kSlabsV && kSlabsK % CLUSTER == 0), "a cluster's blocks load as many boxes each");
  const int rank = CLUSTER > 1 ? cluster_rank() : 0, first_box = rank * (kMostBoxes / CLUSTER);
  const int lane = threadIdx.x % 32;
  int n = 0;
  for_tiles(shared, [&](const Tile& tile, int) {
    const int kv_head = key_head_of(tile, p), steps = tile.steps;
    const int ask_at = max(steps - 1 - kDrawAhead, 0);
    int key = tile.end_key;
#if PAGED
    // Every lane copies its own rows of the tile, so the lookups of pages wait for memory at the same time.
    const SequenceParams& sequence = p.forward.sequence;
    const int* table = sequence.block_table + tile.batch * sequence.block_table_stride;
    const int last_page = (max(tile.held_high, 1) - 1) / sequence.page_size;
#else
    const int kv_batch = p.forward.sequence.cu_seqlens_k ? 0 : tile.batch, begin = tile.seq.k_begin;
#endif
#pragma unroll 1
    for (int step = 0; step < steps; step++, n++) {
      const uint32 full = full_ring + 8 * stage<kStages>(n), to = ring + stage<kStages>(n) * boxes * box_bytes;
      if (keys && lane == 0 && step == ask_at && rank == 0) barrier_arrive(shared.wanted_tile);
#if SPARSE
      constexpr int kParts = 128 / BLOCK_N;
      const int entry = step / kParts;
      const bool any = tile.seq.stop > 0;
      key = any ? p.sparse.blocks[static_cast<int64>(tile.list) * p.sparse.blocks_row + entry] * 128 + step % kParts * BLOCK_N
                : 0;
      const bool in_part = keys && any && step < tile.masked_end;
      const int bits = in_part ? p.sparse.bit_rows[static_cast<int64>(tile.list) * p.sparse.bit_rows_row + entry] : -1;
#else
      key -= BLOCK_N;
#endif
#if PAGED
      const int row = key + lane * PAGE_ROWS, page = min(row / sequence.page_size, last_page);  // past the end: any page
      const bool mine = lane < BLOCK_N / PAGE_ROWS;
      const int block = mine ? table[page] : 0;
      wait_empty<kStages>(empty_ring, n);
      if (lane == 0) barrier_expect(full, boxes * box_bytes);
#pragma unroll
      for (int i = 0; i < kMostBoxes / CLUSTER; i++) {
        const int c = first_box + i;
        if (mine && c < boxes)
          load_box(to + c * box_bytes + lane * PAGE_ROWS * row_bytes, map, full, c * 64, row % sequence.page_size, kv_head,
                   block);
      }
#else
      if (lane == 0) {
        wait_empty<kStages>(empty_ring, n);
#if SPARSE
        if (keys) shared.listed[stage<STAGES>(n)] = {key, bits};
#endif
        barrier_expect(full, boxes * box_bytes);
#pragma unroll
        for (int i = 0; i < kMostBoxes / CLUSTER; i++) {
          const int c = first_box + i;
          if (c < boxes) load_box(to + c * box_bytes, map, full, c * 64, begin + key, kv_head, kv_batch);
        }
      }
#endif
    }
  });
}
