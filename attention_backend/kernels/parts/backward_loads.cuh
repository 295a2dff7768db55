// The Hopper backward's producers, a warp each: keys and queries, values and output gradients, by TMA.
#pragma once

#include "parts/backward_shared.cuh"

// KEYS: the tile of keys, and the ring of queries with lse2. Else the values, and the ring of output gradients with delta.
template <bool KEYS>
__device__ __forceinline__ void load_tiles(const Shared& shared, const TensorMap* once, const TensorMap* rows,
                                           const BackwardParams& p) {
  constexpr int kStages = KEYS ? Q_STAGES : O_STAGES, kSlabs = KEYS ? kSlabsK : kSlabsV;
  constexpr int kBytes = kSlabs * kSlabQ;
  if (threadIdx.x % 32 != 0) return;
  const KeyTile& tile = *shared.tile;
  const int tiles = tile.tiles, m_begin = tile.m_begin, m_end = tile.m_end;
  if (tiles == 0) return;
  {
    const uint32 full = KEYS ? shared.full_k : shared.full_v, to = KEYS ? shared.k : shared.v;
    const int batch = p.sequence.cu_seqlens_k ? 0 : tile.batch, first = tile.seq.k_begin + tile.first_key;
    barrier_expect(full, kSlabs * kSlabKv);
#pragma unroll 1
    for (int c = 0; c < kSlabs; c++)
      tma_load(to + c * kSlabKv, once, full, c * 64, first, tile.kv_head, batch, kEvictFirst);
  }
  const int batch = p.sequence.cu_seqlens_q ? 0 : tile.batch, first = tile.seq.q_begin;
  const uint32 full_ring = KEYS ? shared.full_q : shared.full_o, empty_ring = KEYS ? shared.empty_q : shared.empty_o;
  const uint32 ring = KEYS ? shared.q : shared.o, terms_ring = KEYS ? shared.lse2 : shared.delta;
  Step step(tile);
  RingPlace<kStages> place;
#pragma unroll 1
  for (int n = 0; n < tiles; n++) {
    const uint32 full = full_ring + 8 * place.at, to = ring + place.at * kBytes;
    place.wait_empty(empty_ring);
    barrier_expect(full, kBytes + kBytesTerms);
    bulk_load(terms_ring + place.at * kBytesTerms,
              (KEYS ? p.lse2 : p.delta) + step.head * p.padded_rows + tile.padded_row + step.m * kRows, kBytesTerms, full);
#pragma unroll 1
    for (int c = 0; c < kSlabs; c++)
      tma_load(to + c * kSlabQ, rows, full, c * 64, first + step.m * kRows, step.head, batch, kEvictLast);
    step.next(kTileSteps, m_begin, m_end);
    place.next();
  }
}
