// The Hopper forward's shared memory: rings of query, key and value tiles and of the tiles' descriptions, each stage with a
// barrier for full and one for empty; and a barrier that says when the next tile is wanted. Included by flash_fwd_sm90.cuh, whose macros it needs.
#pragma once

#include "forward_work.cuh"
#include "stages.cuh"
#include "tma.cuh"

constexpr int kConsumers = BLOCK_M / 64;  // warpgroups
constexpr int kThreads = 128 * (kConsumers + 1 + FP8_PAGES);
constexpr int kSlabsK = (HEAD_DIM + 63) / 64, kSlabsV = (HEAD_DIM_V + 63) / 64;  // of 64 columns, 128 swizzled bytes a row
constexpr int kSlabQ = BLOCK_M * 128, kSlabKv = BLOCK_N * 128;
constexpr int kBytesQ = kSlabsK * kSlabQ, kBytesK = kSlabsK * kSlabKv, kBytesV = kSlabsV * kSlabKv;
constexpr int kTileSlots = 4;
// Places for the numbers of tiles that a cluster's first block draws for the others. When it draws another one, the keys of
// the last tile but one are on their way, so all blocks have released those STAGES steps before, whose tile's number they
// have read.
constexpr int kDrawnSlots = 4;
static_assert(CLUSTER == 1 || kDrawnSlots >= STAGES + 2, "a number would be written over one that is not read yet");
constexpr int kLoaders = FP8_PAGES ? 7 : 3;  // warps that read a tile's description besides the consumers'
constexpr int kFillers = FP8_PAGES ? 2 : 1;   // arrivals that make a stage of keys or values full: copies, or warps that convert
constexpr int kKeyReaders = SPARSE ? 4 * kConsumers : kConsumers;  // warps also read what is listed beside the keys

// What consumers must know of a step that lists of blocks gave: its first key, and its row of bits or -1.
struct ListedStep {
  int key, bits;
};

struct Shared {
  uint32 q, k, v;  // rings
  uint32 full_q, empty_q, full_k, empty_k, full_v, empty_v, full_tile, empty_tile, wanted_tile;
#if FP8_PAGES
  uint32 raw_k, raw_v;  // rings of tiles as they are in their pages
  uint32 full_raw_k, empty_raw_k, full_raw_v, empty_raw_v;
#endif
  Tile* tiles;
  ListedStep* listed;  // [STAGES]
  uint32 drawn, full_drawn;  // [kDrawnSlots]: numbers of tiles, in a cluster

  __device__ __forceinline__ explicit Shared(char* memory) {
    const uint32 base = shared_address(memory), aligned = (base + 1023) & ~1023u;
    q = aligned;
    k = q + Q_STAGES * kBytesQ;
    v = k + STAGES * kBytesK;
    full_q = v + STAGES * kBytesV;
#if FP8_PAGES
    raw_k = full_q;
    raw_v = raw_k + RAW_STAGES * BLOCK_N * HEAD_DIM;
    full_q = raw_v + RAW_STAGES * BLOCK_N * HEAD_DIM_V;
#endif
    empty_q = full_q + 8 * Q_STAGES;
    full_k = empty_q + 8 * Q_STAGES;
    empty_k = full_k + 8 * STAGES;
    full_v = empty_k + 8 * STAGES;
    empty_v = full_v + 8 * STAGES;
    full_tile = empty_v + 8 * STAGES;
    empty_tile = full_tile + 8 * kTileSlots;
    wanted_tile = empty_tile + 8 * kTileSlots;
    uint32 end = wanted_tile + 8;
#if FP8_PAGES
    full_raw_k = end;
    empty_raw_k = full_raw_k + 8 * RAW_STAGES;
    full_raw_v = empty_raw_k + 8 * RAW_STAGES;
    empty_raw_v = full_raw_v + 8 * RAW_STAGES;
    end = empty_raw_v + 8 * RAW_STAGES;
#endif
#if CLUSTER > 1
    full_drawn = end;
    drawn = full_drawn + 8 * kDrawnSlots;
    end = drawn + 4 * kDrawnSlots;
#endif
    char* rest = memory + (end - base);
    listed = reinterpret_cast<ListedStep*>(rest);
    tiles = reinterpret_cast<Tile*>(listed + STAGES);
  }

  __device__ __forceinline__ void init_barriers() const {
    for (int i = 0; i < Q_STAGES; i++) {
      barrier_init(full_q + 8 * i, 1);
      barrier_init(empty_q + 8 * i, kConsumers * 4);
    }
    for (int i = 0; i < STAGES; i++) {
      barrier_init(full_k + 8 * i, kFillers);
      barrier_init(full_v + 8 * i, kFillers);
      barrier_init(empty_k + 8 * i, CLUSTER * kKeyReaders);
      barrier_init(empty_v + 8 * i, CLUSTER * kConsumers);
    }
#if FP8_PAGES
    for (int i = 0; i < RAW_STAGES; i++) {
      barrier_init(full_raw_k + 8 * i, 1);
      barrier_init(full_raw_v + 8 * i, 1);
      barrier_init(empty_raw_k + 8 * i, kFillers);
      barrier_init(empty_raw_v + 8 * i, kFillers);
    }
#endif
    for (int i = 0; i < kTileSlots; i++) {
      barrier_init(full_tile + 8 * i, 32);  // the lanes that describe it
      barrier_init(empty_tile + 8 * i, kConsumers * 4 + kLoaders);
    }
    barrier_init(wanted_tile, 1);
#if CLUSTER > 1
    for (int i = 0; i < kDrawnSlots; i++) barrier_init(full_drawn + 8 * i, 1);
#endif
    barrier_init_fence();
  }
};
