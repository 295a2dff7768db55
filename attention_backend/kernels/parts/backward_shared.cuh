// The shared memory of the Hopper backward for narrow heads: a tile of keys and values, rings of query and output-gradient
// tiles with their row terms, dS, and what the consumers hand on.
#pragma once

#include "parts/backward_sizes.cuh"
#include "parts/turns.cuh"

constexpr int kThreads = 128 * (kConsumers + 1 + APART);
constexpr int kReadersOfTiles = 4 * kConsumers + 3 + 4 * APART;  // warps
constexpr int kSpaces = 2;                             // that consumers write: chunks of dQ
constexpr int kBytesHandover = HANDOVER * kChunk * 4;  // HANDOVER chunks
constexpr int kZerosPerChunk = 4, kZerosBytes = FINISHES * kChunk * 4 / kZerosPerChunk;
// Warps that add to dQ, each every other step: one that waits for its additions is to hold up no turn of the next step.
constexpr int kAdders = DETERMINISTIC ? 2 : 1;
// Named barriers: 1 and 2 are the consumers', each its own; 4 and 5 tell of a chunk of dQ, 6 and 7 of a stage of dS; 8 and 9
// of a chunk for the second who adds.
constexpr int kConsumersMeet = 3, kDsWhole = 6;
__device__ __forceinline__ int handed_over(int chunk, int adder) { return 4 + chunk + 4 * adder; }

struct Shared {
  uint32 k, v, q, o, ds, handover;  // all but the last are rings
  uint32 zeros;                     // a part of a chunk
  uint32 lse2, delta;               // rings of q and o
  uint32 full_k, empty_k, full_v, empty_v, full_q, empty_q, full_o, empty_o, full_tile, empty_tile, free_space, wanted_tile,
      full_ds, empty_ds, full_share, empty_share;
  SeenKeyTile* tiles;  // [TILE_SLOTS]

  __device__ __forceinline__ explicit Shared(char* memory) {
    const uint32 base = shared_address(memory), aligned = (base + 1023) & ~1023u;
    k = aligned;
    v = k + KEY_STAGES * kBytesK;
    q = v + KEY_STAGES * kBytesV;
    o = q + Q_STAGES * kBytesQ;
    ds = o + O_STAGES * kBytesO;
    handover = ds + DS_STAGES * kBytesDs;
    zeros = handover + kBytesHandover;
    lse2 = zeros + kZerosBytes;
    delta = lse2 + Q_STAGES * kBytesTerms;
    full_k = delta + O_STAGES * kBytesTerms;
    empty_k = full_k + 8 * KEY_STAGES;
    full_v = empty_k + 8 * KEY_STAGES;
    empty_v = full_v + 8 * KEY_STAGES;
    full_q = empty_v + 8 * KEY_STAGES;
    empty_q = full_q + 8 * Q_STAGES;
    full_o = empty_q + 8 * Q_STAGES;
    empty_o = full_o + 8 * O_STAGES;
    full_tile = empty_o + 8 * O_STAGES;
    empty_tile = full_tile + 8 * TILE_SLOTS;
    free_space = empty_tile + 8 * TILE_SLOTS;
    wanted_tile = free_space + 8 * kSpaces;
    full_ds = wanted_tile + 8;
    empty_ds = full_ds + 8 * DS_STAGES * APART;
    full_share = empty_ds + 8 * DS_STAGES * APART;
    empty_share = full_share + 8;
    tiles = reinterpret_cast<SeenKeyTile*>(memory + (empty_share + 8 - base));
  }

  __device__ __forceinline__ void init_barriers() const {
    for (int i = 0; i < KEY_STAGES; i++) {
      barrier_init(full_k + 8 * i, 1);
      barrier_init(full_v + 8 * i, 1);
      barrier_init(empty_k + 8 * i, kConsumers + APART);
      barrier_init(empty_v + 8 * i, kConsumers);
    }
    for (int i = 0; i < Q_STAGES; i++) {
      barrier_init(full_q + 8 * i, 1);
      barrier_init(empty_q + 8 * i, kConsumers);
    }
    for (int i = 0; i < O_STAGES; i++) {
      barrier_init(full_o + 8 * i, 1);
      barrier_init(empty_o + 8 * i, kConsumers);
    }
    for (int i = 0; i < TILE_SLOTS; i++) {
      barrier_init(full_tile + 8 * i, 32);  // the lanes that describe it
      barrier_init(empty_tile + 8 * i, kReadersOfTiles);
    }
    for (int i = 0; i < kSpaces; i++) barrier_init(free_space + 8 * i, 1);
    barrier_init(wanted_tile, 1);
    barrier_init(full_share, 32);
    barrier_init(empty_share, 4 * kConsumers);  // warps
    for (int i = 0; i < DS_STAGES * APART; i++) {
      barrier_init(full_ds + 8 * i, 4 * kConsumers);  // warps
      barrier_init(empty_ds + 8 * i, 1);
    }
    barrier_init_fence();
  }
};
