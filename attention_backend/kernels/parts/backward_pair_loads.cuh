// The producers of the Hopper backward for wide heads, a warp each: one draws tiles of keys, for both blocks, one loads, and
// one of block 1 sends dS.
#pragma once

#include "parts/backward_draw.cuh"
#include "parts/backward_pair_shared.cuh"

// What comes before all else. The place of the pair's first tile in the order of work is left in block 0's shared memory.
__device__ __forceinline__ void start(const Shared& shared, const BackwardParams& p, int rank) {
  if (threadIdx.x == 0) {
    shared.init_barriers(rank);
    if (rank == 0) shared.tiles[0].number = draw_first(p);
  }
  cluster_sync();
}

// Block 0 draws, and tells block 1 which tile it is. Both ask for the next one: block 1 has read the last message then.
__device__ __forceinline__ void draw_tiles(const Shared& shared, const BackwardParams& p, int rank) {
  const bool first_lane = threadIdx.x % 32 == 0;
  RingPlace<TILE_SLOTS> slot;
  RingPlace<1> wanted, mail;
  int index = rank == 0 ? shared.tiles[0].number : 0;
#pragma unroll 1
  for (;; slot.next()) {
    slot.wait_empty(shared.empty_tile);
    KeyTile& tile = shared.tiles[slot.at];
    if (rank == 0) {
      index = describe_next(tile, p, index);
      if (first_lane) store_there(address_at(shared.mail, 1), index, address_at(shared.full_mail, 1));
    } else {
      mail.wait_full(shared.full_mail);
      mail.next();
      index = load_shared_int(shared.mail);
      describe_by_warp(tile, p, index);
      if (first_lane) barrier_expect(shared.full_mail, 4);
    }
    if (tile.tiles < 0) break;
    barrier_arrive(shared.full_tile + 8 * slot.at);  // every lane for what it wrote
    if (rank == 0) {
      wanted.wait_full(shared.wanted_tile);
      wanted.next();
      index = draw(p);
    }
  }
  barrier_arrive(shared.full_tile + 8 * slot.at);  // there is no more
  if (rank == 0 && first_lane) stop_drawing(p);
}

// The keys and the ring of queries with lse2; in block 1 the values, keys' columns of dQ there, and the ring of output
// gradients with lse2 and delta. By one thread.
template <bool KEYS>
__device__ __forceinline__ void load_tiles(const Shared& shared, const TensorMap* map_keys, const TensorMap* map_values,
                                           const TensorMap* map_rows, const TensorMap* map_lse2, const TensorMap* map_delta,
                                           const BackwardParams& p) {
  constexpr int kSlabs = KEYS ? kSlabsK : kSlabsV, kBytes = kSlabs * kSlabQ;
  RingPlace<TILE_SLOTS> slot;
  RingPlace<KEYS ? Q_STAGES : O_STAGES> place;
  RingPlace<1> keys;
#pragma unroll 1
  for (;; slot.next()) {
    slot.wait_full(shared.full_tile);
    const KeyTile& tile = shared.tiles[slot.at];
    const int tiles = tile.tiles;
    if (tiles < 0) return;
    if (tiles == 0) barrier_arrive_at(shared.wanted_tile, 0);
    Step step(tile);
#pragma unroll 1
    for (int left = tiles; left > 0; left--) {
      const uint32 full = shared.full_rows + 8 * place.at;
      const uint32 to = (KEYS ? shared.queries : shared.gradients) + place.at * kBytes;
      if (left == min(tiles, kDrawAhead)) barrier_arrive_at(shared.wanted_tile, 0);
      place.wait_empty(shared.empty_rows);
      barrier_expect(full, kBytes + (KEYS ? 1 : 2) * kBytesTerms);
      const int row = tile.padded_row + step.m * kRows;
      tma_load(shared.lse2 + place.at * kBytesTerms, map_lse2, full, row, step.head, kEvictLast);
      if (!KEYS) tma_load(shared.delta + place.at * kBytesTerms, map_delta, full, row, step.head, kEvictLast);
#pragma unroll 1
      for (int c = 0; c < kSlabs; c++)
        tma_load(to + c * kSlabQ, map_rows, full, c * 64, tile.seq.q_begin + step.m * kRows, step.head,
                 p.sequence.cu_seqlens_q ? 0 : tile.batch, kEvictLast);
      if (left == tiles) {  // the ring has room before they do
        const int key = tile.seq.k_begin + tile.first_key, batch = p.sequence.cu_seqlens_k ? 0 : tile.batch;
        if (!KEYS) {
          keys.wait_empty(shared.empty_values);
          barrier_expect(shared.full_values, kBytesV);
#pragma unroll 1
          for (int c = 0; c < kSlabsV; c++)
            tma_load(shared.values + c * kSlabKv, map_values, shared.full_values, c * 64, key, tile.kv_head, batch,
                     kEvictFirst);
        }
        constexpr int kFirst = KEYS ? 0 : kSlabsHere;
        keys.wait_empty(shared.empty_keys);
        barrier_expect(shared.full_keys, (kSlabsK - kFirst) * kSlabKv);
#pragma unroll 1
        for (int c = kFirst; c < kSlabsK; c++)
          tma_load((KEYS ? shared.keys : shared.right) + (c - kFirst) * kSlabKv, map_keys, shared.full_keys, c * 64, key,
                   tile.kv_head, batch, kEvictFirst);
        keys.next();
      }
      step.next(kTileSteps, tile);
      place.next();
    }
    barrier_arrive(shared.empty_tile + 8 * slot.at);
  }
}

// Sends dS of every step from block 1 to block 0: a consumer that waited for room there would start its next product later.
__device__ __forceinline__ void send_ds(const Shared& shared) {
  const bool first_lane = threadIdx.x % 32 == 0;
  RingPlace<TILE_SLOTS> slot;
  RingPlace<kProbsStages> here;
  RingPlace<DS_STAGES> there;
  int odd = 0;
#pragma unroll 1
  for (;; slot.next()) {
    slot.wait_full(shared.full_tile);
    const int tiles = shared.tiles[slot.at].tiles;
    if (tiles < 0) return;
    __syncwarp();
    if (first_lane) barrier_arrive(shared.empty_tile + 8 * slot.at);
#pragma unroll 1
    for (int left = tiles; left > 0; left--) {
      if (first_lane) there.wait_empty(shared.empty_ds);
      __syncwarp();
      named_sync(kDsToSend + odd, kAtDsToSend);
      odd ^= 1;
      if (first_lane)
        copy_there(address_at(shared.ds + there.at * kBytesDs, 0), shared.ds + here.at * kBytesDs, kBytesDs,
                   address_at(shared.full_ds + 8 * there.at, 0));
      here.next();
      there.next();
    }
  }
}
