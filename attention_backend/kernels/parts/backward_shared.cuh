// The Hopper backward's shared memory: a tile of keys and values, rings of query and output-gradient tiles with their row
// terms, dS, and what the consumers hand on. Included by the backward kernels for Hopper, whose macros it needs.
#pragma once

#include "parts/backward_bulk.cuh"
#include "parts/backward_tiles.cuh"
#include "parts/turns.cuh"

constexpr int kConsumers = 2;  // warpgroups
constexpr int kThreads = 128 * (kConsumers + 1 + APART);
constexpr int kReadersOfV = LARGE ? 1 : kConsumers;                     // warpgroups
constexpr int kTurns = DETERMINISTIC && LARGE ? kConsumers : 0;         // of warpgroups that add to dQ themselves
constexpr int kReadersOfTiles = 4 * kConsumers + (LARGE ? 2 + kTurns / 2 : 3 + 4 * APART);  // warps
constexpr int kSpaces = 2;  // that consumers write: chunks of dQ, or stages of dS
constexpr int kSlabsK = (HEAD_DIM + 63) / 64, kSlabsV = (HEAD_DIM_V + 63) / 64;  // of 64 columns, 128 swizzled bytes a row
constexpr int kSlabQ = BLOCK_M * 128, kSlabKv = BLOCK_N * 128;
constexpr int kBytesK = kSlabsK * kSlabKv, kBytesV = kSlabsV * kSlabKv;
constexpr int kBytesQ = kSlabsK * kSlabQ, kBytesO = kSlabsV * kSlabQ;
constexpr int kBytesDs = BLOCK_N * (APART ? kRows : BLOCK_M) * 2, kBytesTerms = BLOCK_M * 4;
constexpr int kChunk = 4096;                           // floats of 64 x 64 of dQ
constexpr int kBytesHandover = HANDOVER * kChunk * 4;  // HANDOVER chunks

struct Shared {
  uint32 k, v, q, o, ds, handover;  // all but the last are rings
  uint32 lse2, delta;               // rings of q and o
  uint32 full_k, empty_k, full_v, empty_v, full_q, empty_q, full_o, empty_o, full_tile, empty_tile, free_space, wanted_tile,
      turn_begins, turn_ends, full_ds, empty_ds;
  KeyTile* tiles;  // [TILE_SLOTS]

  __device__ __forceinline__ explicit Shared(char* memory) {
    const uint32 base = shared_address(memory), aligned = (base + 1023) & ~1023u;
    k = aligned;
    v = k + KEY_STAGES * kBytesK;
    q = v + KEY_STAGES * kBytesV;
    o = q + Q_STAGES * kBytesQ;
    ds = o + O_STAGES * kBytesO;
    handover = ds + DS_STAGES * kBytesDs;
    lse2 = handover + kBytesHandover;
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
    turn_begins = wanted_tile + 8;
    turn_ends = turn_begins + 8 * kTurns;
    full_ds = turn_ends + 8 * kTurns;
    empty_ds = full_ds + 8 * DS_STAGES * APART;
    tiles = reinterpret_cast<KeyTile*>(memory + (empty_ds + 8 * DS_STAGES * APART - base));
  }

  __device__ __forceinline__ void init_barriers() const {
    for (int i = 0; i < KEY_STAGES; i++) {
      barrier_init(full_k + 8 * i, 1);
      barrier_init(full_v + 8 * i, 1);
      barrier_init(empty_k + 8 * i, kConsumers + APART);
      barrier_init(empty_v + 8 * i, kReadersOfV);
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
    for (int i = 0; i < kTurns; i++) {
      barrier_init(turn_begins + 8 * i, 1);
      barrier_init(turn_ends + 8 * i, 128);
    }
    for (int i = 0; i < DS_STAGES * APART; i++) {
      barrier_init(full_ds + 8 * i, 4 * kConsumers);  // warps
      barrier_init(empty_ds + 8 * i, 1);
    }
    barrier_init_fence();
  }
};

// A place in a ring of SIZE, and the parity of its barriers' phase.
template <int SIZE>
struct RingPlace {
  int at = 0;
  uint32 parity = 0;

  __device__ __forceinline__ void next() {
    if (++at == SIZE) {
      at = 0;
      parity ^= 1;
    }
  }
  __device__ __forceinline__ int before() const { return at == 0 ? SIZE - 1 : at - 1; }
  __device__ __forceinline__ void wait_full(uint32 barriers) const { barrier_wait(barriers + 8 * at, parity); }
  __device__ __forceinline__ void wait_empty(uint32 barriers) const { barrier_wait(barriers + 8 * at, parity ^ 1); }
};
