// The Hopper backward's shared memory: a tile of keys and values, rings of query and output-gradient tiles with their row
// terms, dS, and what the consumers hand on. Included by the backward kernels for Hopper, whose macros it needs.
#pragma once

#include "parts/backward_bulk.cuh"
#include "parts/backward_tiles.cuh"

constexpr int kConsumers = 2;  // warpgroups
constexpr int kThreads = 128 * (kConsumers + 1);
constexpr int kSpaces = 2;  // that consumers write: chunks of dQ, or stages of dS
constexpr int kSlabsK = (HEAD_DIM + 63) / 64, kSlabsV = (HEAD_DIM_V + 63) / 64;  // of 64 columns, 128 swizzled bytes a row
constexpr int kSlabQ = BLOCK_M * 128, kSlabKv = BLOCK_N * 128;
constexpr int kBytesK = kSlabsK * kSlabKv, kBytesV = kSlabsV * kSlabKv;
constexpr int kBytesQ = kSlabsK * kSlabQ, kBytesO = kSlabsV * kSlabQ;
constexpr int kBytesDs = BLOCK_N * BLOCK_M * 2, kBytesTerms = BLOCK_M * 4;
constexpr int kChunk = 4096;                           // floats of 64 x 64 of dQ
constexpr int kBytesHandover = HANDOVER * kChunk * 4;  // HANDOVER chunks

struct Shared {
  uint32 k, v, q, o, ds, handover;  // q, o and ds are rings
  uint32 lse2, delta;               // rings of q and o
  uint32 full_k, full_v, full_q, empty_q, full_o, empty_o, free_space;
  KeyRows* rows;  // [BLOCK_N]
  KeyTile* tile;

  __device__ __forceinline__ explicit Shared(char* memory) {
    const uint32 base = shared_address(memory), aligned = (base + 1023) & ~1023u;
    k = aligned;
    v = k + kBytesK;
    q = v + kBytesV;
    o = q + Q_STAGES * kBytesQ;
    ds = o + O_STAGES * kBytesO;
    handover = ds + DS_STAGES * kBytesDs;
    lse2 = handover + kBytesHandover;
    delta = lse2 + Q_STAGES * kBytesTerms;
    full_k = delta + O_STAGES * kBytesTerms;
    full_v = full_k + 8;
    full_q = full_v + 8;
    empty_q = full_q + 8 * Q_STAGES;
    full_o = empty_q + 8 * Q_STAGES;
    empty_o = full_o + 8 * O_STAGES;
    free_space = empty_o + 8 * O_STAGES;
    char* rest = memory + (free_space + 8 * kSpaces - base);
    tile = reinterpret_cast<KeyTile*>(rest);
    rows = reinterpret_cast<KeyRows*>(tile + 1);
  }

  __device__ __forceinline__ void init_barriers() const {
    barrier_init(full_k, 1);
    barrier_init(full_v, 1);
    for (int i = 0; i < Q_STAGES; i++) {
      barrier_init(full_q + 8 * i, 1);
      barrier_init(empty_q + 8 * i, kConsumers);
    }
    for (int i = 0; i < O_STAGES; i++) {
      barrier_init(full_o + 8 * i, 1);
      barrier_init(empty_o + 8 * i, kConsumers);
    }
    for (int i = 0; i < kSpaces; i++) barrier_init(free_space + 8 * i, 1);
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
  __device__ __forceinline__ void wait_full(uint32 barriers) const { barrier_wait(barriers + 8 * at, parity); }
  __device__ __forceinline__ void wait_empty(uint32 barriers) const { barrier_wait(barriers + 8 * at, parity ^ 1); }
};

// What all threads of a block do first: false where the block has no keys. Which tile it is, and who sees its keys, stands in
// shared memory afterwards.
__device__ __forceinline__ bool start_tile(const Shared& shared, const BackwardParams& p) {
  if (threadIdx.x == 0) {
    shared.init_barriers();
    const Place place(p, blockIdx.x);
    KeyTile tile(p, place.line / p.kv_heads);
    describe(tile, p, place);
    *shared.tile = tile;
  }
  __syncthreads();
  const KeyTile& tile = *shared.tile;
  if (tile.first_key >= tile.seqlen_k) return false;
  for (int r = threadIdx.x; r < BLOCK_N; r += kThreads) shared.rows[r] = rows_of(tile, p, r);
  __syncthreads();
  return true;
}
