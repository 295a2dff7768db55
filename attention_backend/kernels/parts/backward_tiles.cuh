// A tile of keys of the Hopper backward: where it lies, and which query rows see it. One interval of rows per key, the
// inverse of parts/seqlen.cuh.
#pragma once

#include "parts/backward_hopper_params.cuh"
#include "parts/cluster.cuh"
#include "parts/padded_rows.cuh"

constexpr int kRows = 64;                    // of a step
constexpr int kTileSteps = BLOCK_M / kRows;  // steps of a tile of query rows
constexpr int kChunkRows = 64;               // of a chunk of dQ
constexpr int kTileChunks = BLOCK_M / kChunkRows;
constexpr int kEveryRow = 1 << 30;

// First row that may see a key from `start` on.
__device__ __forceinline__ int first_row(const Sequence& seq, int key) {
  int row = 0;
  if (seq.right >= 0) row = max(row, key - seq.q_offset - seq.right);
  if (LEFT_BOUNDS && seq.chunk > 0) row = max(row, seq.start - seq.q_offset + (key - seq.start) / seq.chunk * seq.chunk);
  return row;
}

// One past the last row that may see it, were there rows without end.
__device__ __forceinline__ int end_row(const Sequence& seq, int key) {
  int row = kEveryRow;
  if (LEFT_BOUNDS && seq.left >= 0) row = min(row, key - seq.q_offset + seq.left + 1);
  if (LEFT_BOUNDS && seq.chunk > 0)
    row = min(row, seq.start - seq.q_offset + (key - seq.start) / seq.chunk * seq.chunk + seq.chunk);
  return row;
}

// What a block works on at a time: steps over tiles of query rows, those of one query head after those of another.
struct KeyTile {
  Sequence seq;
  int batch, kv_head, part, first_key, number;
  int falling;  // deterministic: which order its steps have
  int first_head, end_head;
  int seqlen_k;
  int m_begin, m_end;          // steps of kRows rows of each head, of whole tiles of rows
  int whole_begin, whole_end;  // those in which every row sees every key
  int tiles;                   // of rows, of all heads; -1: there is no more work
  int padded_row;              // of the sequence's first row
  int sums_chunk;              // the same in the sums of dQ, of query head 0, in chunks
};

// Shares of a key head's query heads.
__device__ __forceinline__ int parts_of(const BackwardParams& p) { return PARTS ? p.parts : 1; }

// Places in the order of work: key tiles of the same number lie side by side for
// `section` heads, the first ones, which have the most rows under a causal mask, in front. In deterministic mode the last
// ones are, but for the last section: see Step.
struct Place {
  int number, line, part;
  int unit;  // line and part
  bool falling;

  __device__ __forceinline__ Place(const BackwardParams& p, int index) {
    const int lines = p.kv_heads * p.batch * parts_of(p);
    const int section_places = p.section * p.key_tiles, section = index / section_places;
    index -= section * section_places;
    const int here = min(p.section, lines - section * p.section);
    number = index / here;
    unit = section * p.section + index - number * here;
    part = unit % parts_of(p);
    line = unit / parts_of(p);
    falling = (section + 1) * p.section >= lines;
    if (DETERMINISTIC && !falling) number = p.key_tiles - 1 - number;
  }
};

__device__ __forceinline__ int all_places(const BackwardParams& p) {
  return p.kv_heads * p.batch * parts_of(p) * p.key_tiles;
}

// Chunks of 64 rows of a head in the sums of dQ.
__device__ __forceinline__ int head_chunks(const BackwardParams& p) { return static_cast<int>(p.sums_head / kChunkRows); }

// The tile at a place in the order of work.
__device__ __forceinline__ void describe(KeyTile& tile, const BackwardParams& p, int index) {
  if (index >= all_places(p)) {
    tile.tiles = -1;
    return;
  }
  const Place place(p, index);
  tile.batch = place.line / p.kv_heads;
  tile.seq = Sequence(p.sequence, tile.batch);
  const Sequence& seq = tile.seq;
  tile.kv_head = place.line % p.kv_heads;
  tile.number = place.number;
  tile.falling = DETERMINISTIC && place.falling;
  tile.part = place.part;
  tile.first_key = tile.number * BLOCK_N;
  const int heads = p.unit_heads;
  tile.first_head = tile.kv_head * p.group + place.part * heads;
  tile.end_head = tile.first_head + heads;
  tile.seqlen_k = p.sequence.cu_seqlens_k ? p.sequence.cu_seqlens_k[tile.batch + 1] - seq.k_begin : p.sequence.seqlen_k;
  tile.padded_row = static_cast<int>(padded_begin(p.sequence.cu_seqlens_q, p.sequence.seqlen_q, tile.batch));
  tile.sums_chunk = p.sequence.cu_seqlens_q ? tile.padded_row / kChunkRows
                                            : (place.unit % p.held_units * heads - tile.first_head) * head_chunks(p);
  const int low = max(tile.first_key, seq.start), last = min(tile.first_key + BLOCK_N, seq.stop) - 1;
  tile.m_begin = tile.m_end = tile.whole_begin = tile.whole_end = 0;
  if (low <= last) {
    const int begin = first_row(seq, low), end = min(end_row(seq, last), seq.seqlen_q);
    if (begin < end) {
      tile.m_begin = begin / BLOCK_M * kTileSteps;
      tile.m_end = (end + BLOCK_M - 1) / BLOCK_M * kTileSteps;
    }
  }
  if (!KEY_MASK && tile.first_key >= seq.start && tile.first_key + BLOCK_N <= seq.stop) {
    tile.whole_begin = (first_row(seq, tile.first_key + BLOCK_N - 1) + kRows - 1) / kRows;
    tile.whole_end = max(min(end_row(seq, tile.first_key), seq.seqlen_q), 0) / kRows;
  }
  tile.tiles = heads * (tile.m_end - tile.m_begin) / kTileSteps;
}

// The rows that see a key: `count` from `first` on.
struct KeyRows {
  int first, count;
};

// Of the tile's key r.
__device__ __forceinline__ KeyRows rows_of(const KeyTile& tile, const BackwardParams& p, int r) {
  const Sequence& seq = tile.seq;
  const int key = tile.first_key + r;
  if (key < seq.start || key >= seq.stop) return {0, 0};
#if KEY_MASK
  if (!p.score.key_mask[tile.batch * p.score.key_mask_batch + key]) return {0, 0};
#endif
  const int first = first_row(seq, key);
  return {first, max(min(end_row(seq, key), seq.seqlen_q) - first, 0)};
}

// A tile with those of all its keys.
struct SeenKeyTile : KeyTile {
  KeyRows rows[BLOCK_N];
};

// Which step it is: its query head, and its first row / kRows. A block walks the rows of a head, then those of the next.
//
// In deterministic mode blocks that share rows take turns there, in the order in which they are drawn, so nobody waits for
// a block that is not running. Under a causal mask the blocks of the last keys are first, and walk from the first rows that
// see them: those that start at one time come by in turn, and none waits. Their longest tiles are the last ones though, so
// at the end many SMs would have nothing to do. The last section has its longest tiles first, and they fall: from the last
// rows, which all blocks have, to the first (DASH, arXiv 2601.21824, section 3.2), all heads of a tile of rows before the
// next, so that blocks keep the same pace however many rows they have.
struct Step {
  int head, m;

  __device__ __forceinline__ Step() {}
  __device__ __forceinline__ explicit Step(const KeyTile& tile)
      : head(tile.first_head),
        m(DETERMINISTIC && tile.falling ? tile.m_end - kTileSteps : tile.m_begin) {}
  // Moves `by` steps, 1 or those of a tile of rows. `tile`: a KeyTile, or what has the same fields.
  template <class Tile>
  __device__ __forceinline__ void next(int by, const Tile& tile) {
    m += by;
#if DETERMINISTIC
    if (tile.falling) {
      if (m % kTileSteps != 0) return;
      m -= kTileSteps;
      if (++head == tile.end_head) {
        head = tile.first_head;
        m -= kTileSteps;
      }
      return;
    }
#endif
    if (m == tile.m_end) {
      m = tile.m_begin;
      head++;
    }
  }
};

// Which of the blocks that add to a tile of rows of dQ, which begins at step m, this one is.
__device__ __forceinline__ int turn_of(const KeyTile& tile, int m) {
  const int row = tile.falling ? m * kRows : min(m * kRows + BLOCK_M, tile.seq.seqlen_q) - 1;
  const int first_turn = (tile.falling ? tile.seq.low(row) : tile.seq.high(row) - 1) / BLOCK_N;
  return abs(tile.number - first_turn);
}
