// The end of dQ in the Hopper backward for narrow heads: sums that are complete become elements while the L2 has them yet,
// and zeros again, for the sums of a later section. Cleared in front of the kernel and read behind it, all sums would go to
// memory and come back, twice.
//
// The order of work has units: the query heads that a tile of keys adds to, all of its key head's. p.progress counts, of
// each, tiles that have been added, then shares that are zeros again. With a tile goes a share of the unit p.lag before the
// tile's, of whose tiles all were drawn earlier, so nobody waits for a block that does not run; and what a tile adds to are
// zeros after shares that went with tiles of sections in front. Consumers, who have registers for it, finish the tile's share
// while they store its dK and dV; the warp that draws waits for others' additions, before, and tells others, afterwards.
#pragma once

#include "parts/backward_draw.cuh"
#include "parts/backward_shared.cuh"
#include "parts/rows_of_dq.cuh"
#include "parts/turns.cuh"

__device__ __forceinline__ int unit_of(const BackwardParams& p, const KeyTile& tile) {
  return tile.batch * p.kv_heads + tile.kv_head;
}
// The unit of which a share goes with the tile; none: below 0.
__device__ __forceinline__ int finished_unit(const BackwardParams& p, const KeyTile& tile) {
  return unit_of(p, tile) - p.lag;
}

// One thread waits until what the tile adds to is zeros.
__device__ __forceinline__ void await_zeros(const BackwardParams& p, const KeyTile& tile) {
  const int before = unit_of(p, tile) - p.held_units;  // where it adds
  if (FINISHES && before >= 0) await_turns(p.progress + before, 2 * p.key_tiles);
}

// The share that goes with a tile: chunks of the sums from `begin` to `end`, of the unit's.
struct Share {
  int unit, begin, end;

  __device__ __forceinline__ Share(const BackwardParams& p, const KeyTile& tile) : unit(finished_unit(p, tile)) {
    begin = min(tile.number * p.share_chunks, unit_chunks(p));
    end = unit < 0 ? begin : min(begin + p.share_chunks, unit_chunks(p));
  }
  static __device__ __forceinline__ int unit_chunks(const BackwardParams& p) {
    return p.unit_heads * head_chunks(p) * kSlabsK;
  }
  __device__ __forceinline__ float* at(const BackwardParams& p, int chunk) const {
    return p.sums + (static_cast<int64>(unit % p.held_units) * unit_chunks(p) + chunk) * kChunk;
  }
};

// By the warp that draws, when there are no more tiles or the next one has been described: makes zeros of the share that went
// with the last of `drawn` tiles, once consumers have it. Only where dQ is finished on the way.
__device__ __forceinline__ void end_share(const Shared& shared, const BackwardParams& p, uint32 drawn) {
  if (drawn == 0) return;
  barrier_wait(shared.empty_share, (drawn - 1) % 2);
  const Share share(p, shared.tiles[(drawn - 1) % TILE_SLOTS]);
  if (share.unit < 0) return;
  if (threadIdx.x % 32 == 0) {
    fence_bulk_copies();  // consumers' reads come before the zeros
    float* to = share.at(p, share.begin);
#pragma unroll 1
    for (int left = (share.end - share.begin) * kZerosPerChunk; left > 0; left--, to += kZerosBytes / 4)
      bulk_store(to, shared.zeros, kZerosBytes);
    bulk_wait_done();
    pass_turn(p.progress + share.unit);
  }
  __syncwarp();
}
// And lets consumers have that of the next, when all has been added.
__device__ __forceinline__ void begin_share(const Shared& shared, const BackwardParams& p, uint32 drawn) {
  end_share(shared, p, drawn);
  const int unit = finished_unit(p, shared.tiles[drawn % TILE_SLOTS]);
  if (unit >= 0) await_turns(p.progress + unit, p.key_tiles);
  barrier_arrive(shared.full_share);
}

// A share, as one of the consumers' warps sees it: pieces of 16 rows of a chunk, kHeld of them in registers, side by side.
class Pieces {
 public:
  __device__ __forceinline__ Pieces(const BackwardParams& p, const KeyTile& tile)
      : p(p), share(p, tile), next(share.begin * 4 + (threadIdx.x / 32 - 4) * kHeld) {}

  // Asks for the next ones, or, as what is not written at all the compiler keeps from tile to tile, for some others.
  __device__ __forceinline__ void load() {
    const float* from = next < share.end * 4 ? share.at(p, next / 4) + next % 4 * kPiece : p.sums;
    asm volatile("" : "+l"(from));  // to which the compiler adds what is constant, as it knows nothing else of it
#pragma unroll
    for (int i = 0; i < kHeld; i++) DqRows::load(sums[i], from + i * kPiece);
  }
  // All of them become rows. Afterwards, or when the last have been read, the share may be made zeros.
  __device__ __forceinline__ void finish(const Shared& shared) {
    bool told = false;
#pragma unroll 1
    do {
      DqRows rows[kHeld];
#pragma unroll
      for (int i = 0; i < kHeld; i++) rows[i].pack(sums[i], p.score.softmax_scale);
      const int here = next;
      next += kWarps * kHeld;
      told = next >= share.end * 4;
      if (told) {
        __syncwarp();
        if (threadIdx.x % 32 == 0) barrier_arrive(shared.empty_share);
      }
      if (here < share.end * 4) store(here, rows);
      if (!told) load();
    } while (!told);
  }

 private:
  static constexpr int kWarps = 4 * kConsumers, kHeld = kSlabsK;
  static_assert(4 % kHeld == 0, "those that are held are of one chunk");
  const BackwardParams& p;
  const Share share;
  int next;
  float4 sums[kHeld][8];

  __device__ __forceinline__ void store(int piece, const DqRows (&rows)[kHeld]) const {
    const uint32 any_row = static_cast<uint32>(piece) / (kSlabsK * 4);  // of 64
    const uint32 head = share.unit * p.unit_heads + any_row / head_chunks(p), heads = p.group * p.kv_heads;
    const int row = any_row % head_chunks(p) * kChunkRows + piece % 4 * 16, column = piece / 4 % kSlabsK * 64;
    element* const to = p.dq + head / heads * p.dq_batch + head % heads * p.dq_head + row * p.dq_row + column;
#pragma unroll
    for (int i = 0; i < kHeld; i++)
      rows[i].store(to + i * 16 * p.dq_row, p.dq_row, p.sequence.seqlen_q - row - i * 16, p.head_dim - column);
  }
};
