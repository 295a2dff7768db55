// A tile of keys of the Hopper backward: where it lies, and which query rows see it. One interval of rows per key, the
// inverse of parts/seqlen.cuh.
#pragma once

#include "parts/backward_hopper_params.cuh"
#include "parts/padded_rows.cuh"

constexpr int kRows = 64;                  // of a step
constexpr int kTileSteps = BLOCK_M / kRows;  // steps of a tile of query rows
constexpr int kEveryRow = 1 << 30;

// First row that may see a key from `start` on.
__device__ __forceinline__ int first_row(const Sequence& seq, int key) {
  int row = 0;
  if (seq.right >= 0) row = max(row, key - seq.q_offset - seq.right);
  if (seq.chunk > 0) row = max(row, seq.start - seq.q_offset + (key - seq.start) / seq.chunk * seq.chunk);
  return row;
}

// One past the last row that may see it, were there rows without end.
__device__ __forceinline__ int end_row(const Sequence& seq, int key) {
  int row = kEveryRow;
  if (seq.left >= 0) row = min(row, key - seq.q_offset + seq.left + 1);
  if (seq.chunk > 0) row = min(row, seq.start - seq.q_offset + (key - seq.start) / seq.chunk * seq.chunk + seq.chunk);
  return row;
}

// The rows that see a key: `count` from `first` on.
struct KeyRows {
  int first, count;
};

// What a block works on at a time: steps over tiles of query rows, those of one query head after those of another.
struct KeyTile {
  Sequence seq;
  int batch, kv_head, part, first_key, number;
  int first_head, heads;
  int seqlen_k;
  int m_begin, m_end;          // steps of kRows rows of each head, of whole tiles of rows
  int whole_begin, whole_end;  // those in which every row sees every key
  int tiles;                   // of rows, of all heads; -1: there is no more work
  int64 padded_row;            // of the sequence's first row
  KeyRows rows[BLOCK_N];
};

// Places in the order of work: key tiles of the same number lie side by side for `section` heads, the first
// ones, which have the most rows under a causal mask, in front. In deterministic mode the last ones are, as then each block
// adds to dQ after those before it.
struct Place {
  int number, line, part;

  __device__ __forceinline__ Place(const BackwardParams& p, int index) {
    const int lines = p.kv_heads * p.batch * p.parts;
    const int section = index / (p.section * p.key_tiles);
    index -= section * p.section * p.key_tiles;
    const int here = min(p.section, lines - section * p.section);
    number = index / here;
    line = section * p.section + index - number * here;
    part = line % p.parts;
    line /= p.parts;
    if (DETERMINISTIC) number = p.key_tiles - 1 - number;
  }
};

// The tile at a place in the order of work.
__device__ __forceinline__ void describe(KeyTile& tile, const BackwardParams& p, int index) {
  if (index >= p.kv_heads * p.batch * p.parts * p.key_tiles) {
    tile.tiles = -1;
    return;
  }
  const Place place(p, index);
  tile.batch = place.line / p.kv_heads;
  tile.seq = Sequence(p.sequence, tile.batch);
  const Sequence& seq = tile.seq;
  tile.kv_head = place.line % p.kv_heads;
  tile.number = place.number;
  tile.part = place.part;
  tile.first_key = place.number * BLOCK_N;
  tile.heads = p.group / p.parts;
  tile.first_head = tile.kv_head * p.group + place.part * tile.heads;
  tile.seqlen_k = p.sequence.cu_seqlens_k ? p.sequence.cu_seqlens_k[tile.batch + 1] - seq.k_begin : p.sequence.seqlen_k;
  tile.padded_row = padded_begin(p.sequence.cu_seqlens_q, p.sequence.seqlen_q, tile.batch);
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
  tile.tiles = tile.heads * (tile.m_end - tile.m_begin) / kTileSteps;
}

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

// Which step it is: its query head, and its first row / kRows.
struct Step {
  int head, m;

  __device__ __forceinline__ Step() {}
  __device__ __forceinline__ explicit Step(const KeyTile& tile) : head(tile.first_head), m(tile.m_begin) {}
  __device__ __forceinline__ void next(int by, int m_begin, int m_end) {
    m += by;
    if (m == m_end) {
      m = m_begin;
      head++;
    }
  }
};

// Which of the blocks that add to a tile of rows of dQ, which begins at step m, this one is, in the order of falling keys.
__device__ __forceinline__ int turn_of(const KeyTile& tile, int m) {
  const int last = min(m * kRows + BLOCK_M, tile.seq.seqlen_q) - 1;
  return (tile.seq.high(last) - 1) / BLOCK_N - tile.number;
}
