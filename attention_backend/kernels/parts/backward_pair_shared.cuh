// The shared memory of a block of a pair, of the Hopper backward for wide heads. Block 0 has keys, a ring of queries with
// lse and a ring of dS that block 1 fills. Block 1 has values, the columns of keys that dQ takes there, a ring of output
// gradients with lse and D, and a ring of probabilities that block 0 fills, each of which becomes dS where it is.
#pragma once

#include "parts/backward_sizes.cuh"
#include "parts/cluster.cuh"
#include "parts/turns.cuh"

static_assert(BLOCK_M == kRows && BLOCK_N == 64 * kConsumers, "a warpgroup has 64 keys");
static_assert(CLUSTER == 2 && KEY_STAGES == 1 && DS_STAGES == 2, "turns are told by the places in the ring of dS");

constexpr int kThreads = 128 * (kConsumers + 1);
constexpr int kMostStages = Q_STAGES > O_STAGES ? Q_STAGES : O_STAGES;
constexpr int kTurns = DETERMINISTIC ? kConsumers : 0;            // of warpgroups that add to dQ
constexpr int kReadersOfTiles = 4 * kConsumers + 1 + kTurns / 2;  // warps; block 1 has one more, which sends dS
constexpr int kSlabsHere = kConsumers, kSlabsThere = kSlabsK - kSlabsHere;  // of dQ: block 0's and block 1's
static_assert(kSlabsThere > 0 && kSlabsThere <= kConsumers, "a warpgroup has 64 columns of dQ");
constexpr int kHalf = 64 * 128;  // bytes: a warpgroup's keys of a slab, of dS or of P
constexpr int kProbsStages = DS_STAGES + 1;

// Block 1's named barriers beside those of a warpgroup alone: dS of a step is stored, for the consumers, and for the warp
// that sends it, of even and of odd steps. That warp may be a step behind, but not two: the consumers have not the
// probabilities of the next but one then.
enum Barrier { kDsStored = 3, kDsToSend = 4 };
constexpr int kAtDsStored = 128 * kConsumers, kAtDsToSend = kAtDsStored + 32;

struct Shared {
  uint32 keys, queries;             // block 0; queries: ring
  uint32 values, right, gradients;  // block 1; right: keys' columns of dQ there, gradients: ring of output gradients
  uint32 ds;                        // ring; in block 1 of probabilities too
  uint32 lse2, delta;               // rings, as queries and gradients; delta: block 1
  uint32 full_keys, empty_keys, full_values, empty_values, full_rows, empty_rows, full_tile, empty_tile, wanted_tile,
      full_mail, full_ds, empty_ds, full_probs, turn_begins, turn_ends;
  uint32 mail;     // block 1: the next tile's place in the order of work
  KeyTile* tiles;  // [TILE_SLOTS]
  KeyRows* seen;   // [BLOCK_N], block 0: of the tile that is computed

  __device__ __forceinline__ explicit Shared(char* memory) {
    const uint32 base = shared_address(memory), aligned = (base + 1023) & ~1023u;
    constexpr int kKeys = DS_STAGES * kBytesDs + kBytesK + Q_STAGES * kBytesQ;
    constexpr int kValues = kProbsStages * kBytesDs + kBytesV + kSlabsThere * kSlabKv + O_STAGES * kBytesO;
    ds = aligned;
    keys = ds + DS_STAGES * kBytesDs;
    values = ds + kProbsStages * kBytesDs;
    right = values + kBytesV;
    queries = keys + kBytesK;
    gradients = right + kSlabsThere * kSlabKv;
    lse2 = aligned + (kKeys > kValues ? kKeys : kValues);
    delta = lse2 + O_STAGES * kBytesTerms;
    full_keys = lse2 + (Q_STAGES > 2 * O_STAGES ? Q_STAGES : 2 * O_STAGES) * kBytesTerms;
    empty_keys = full_keys + 8;
    full_values = empty_keys + 8;
    empty_values = full_values + 8;
    full_rows = empty_values + 8;
    empty_rows = full_rows + 8 * kMostStages;
    full_tile = empty_rows + 8 * kMostStages;
    empty_tile = full_tile + 8 * TILE_SLOTS;
    wanted_tile = empty_tile + 8 * TILE_SLOTS;
    full_mail = wanted_tile + 8;
    full_ds = full_mail + 8;
    empty_ds = full_ds + 8 * DS_STAGES;  // block 1: of block 0's ring
    full_probs = empty_ds + 8 * DS_STAGES;
    turn_begins = full_probs + 8 * kConsumers * kProbsStages;
    turn_ends = turn_begins + 8 * kTurns;
    mail = turn_ends + 8 * kTurns;
    tiles = static_cast<KeyTile*>(__cvta_shared_to_generic(mail + 8));
    seen = reinterpret_cast<KeyRows*>(tiles + TILE_SLOTS);
  }

  __device__ __forceinline__ void init_barriers(int rank) const {
    barrier_init(full_keys, 1);
    barrier_init(empty_keys, kConsumers);
    barrier_init(full_values, 1);
    barrier_init(empty_values, kConsumers);
    for (int i = 0; i < kMostStages; i++) {
      barrier_init(full_rows + 8 * i, 1);
      barrier_init(empty_rows + 8 * i, kConsumers);
    }
    for (int i = 0; i < TILE_SLOTS; i++) {
      barrier_init(full_tile + 8 * i, 32);  // the lanes that describe it
      barrier_init(empty_tile + 8 * i, kReadersOfTiles + rank);
    }
    barrier_init(wanted_tile, CLUSTER);
    barrier_init(full_mail, 1);
    // What the other block sends is awaited from the start.
    for (int i = 0; i < DS_STAGES; i++) {
      barrier_init(full_ds + 8 * i, 1);
      barrier_init(empty_ds + 8 * i, kConsumers);
    }
    for (int i = 0; i < kConsumers * kProbsStages; i++) barrier_init(full_probs + 8 * i, 1);
    for (int i = 0; i < kTurns; i++) {
      barrier_init(turn_begins + 8 * i, 1);
      barrier_init(turn_ends + 8 * i, 128);
    }
    barrier_init_fence();
    barrier_expect(full_mail, 4);
    for (int i = 0; i < DS_STAGES; i++) barrier_expect(full_ds + 8 * i, kConsumers * kHalf);
    for (int i = 0; i < kConsumers * kProbsStages; i++) barrier_expect(full_probs + 8 * i, kHalf);
  }
};
