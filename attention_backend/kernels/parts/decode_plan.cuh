// Shares the keys of all sequences out among the blocks of a fixed grid, on the device: nothing on the host depends on
// the lengths, so a CUDA graph replays right when they change.
//
// The keys that a sequence's rows may see are cut into tiles. The tiles of all sequences, one after another, are a line of
// work (shorter than 2^31 tiles), the same for every key head; each head (and row block) has `parts` blocks, each with
// an equal stretch of it. Neighbouring blocks take the same stretch for different heads: what they read at one time is
// tokens whole, which is read faster than pieces from everywhere (docs/log.md). The part of a stretch that lies in one
// sequence is a segment. A pair is one key head of one sequence; segment (part, pair) keeps its result in slot
// `head * (parts + batch) + part + sequence`, which is unique because neither of the last two falls along the line.
//
// The plan is made once a block, in shared memory: whatever happens to the lengths meanwhile, all of the block's warps
// count the same tiles. tests/unit/attention_backend/decode_plan.py is the same in Python.
#pragma once

#include "parts/seqlen.cuh"

struct Segment {
  int pair, batch, kv_head;
  int begin, end;    // tiles of the sequence, counted from its first visible one
  int first_slot;    // of the pair
  int num_segments;  // of the pair
  int slot;
};

class DecodePlan {
 public:
  // The grid is key heads by parts, by row blocks. `prefix` is shared memory for batch + 1 ints. All threads of the block
  // must call; ends with a block barrier.
  template <int THREADS, int TILE>
  __device__ __forceinline__ void build(const SequenceParams& p, int batch, int min_tiles, int* prefix_in_shared) {
    const int parts = gridDim.y, part = blockIdx.y;
    prefix = prefix_in_shared;
    num_batch = batch;
    if (batch <= 32) {
      if (threadIdx.x < 32) {
        const int tiles = threadIdx.x < batch ? count_tiles<TILE>(p, threadIdx.x) : 0;
        const int sum = warp_sum(tiles);
        if (threadIdx.x < batch) prefix_in_shared[threadIdx.x + 1] = sum;
        if (threadIdx.x == 0) prefix_in_shared[0] = 0;
      }
    } else {
      build_wide<THREADS, TILE>(p, batch, prefix_in_shared);
    }
    __syncthreads();
    const int work = prefix[batch];
    share = max(min_tiles, (work + parts - 1) / parts);
    // A stretch that starts past the end is empty; the product would leave 32 bits only where it is.
    position = static_cast<int>(min(static_cast<int64>(part) * share, static_cast<int64>(work)));
    end = min(share, work - position) + position;
  }

  __device__ __forceinline__ bool next(Segment& s) {
    if (position >= end) return false;
    int low = 0, high = num_batch;  // the last sequence that starts at or before the position
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (prefix[middle] <= position)
        low = middle;
      else
        high = middle;
    }
    const int start = prefix[low], tiles = prefix[low + 1] - start;
    const int num_heads = gridDim.x, parts = gridDim.y, head = blockIdx.x, part = blockIdx.y;
    s.batch = low;
    s.kv_head = head;
    s.pair = low * num_heads + head;
    s.begin = position - start;
    s.end = min(end - start, tiles);
    const int first_part = start / share, first_slot = head * (parts + num_batch) + low;
    s.first_slot = first_slot + first_part;
    s.num_segments = (start + tiles - 1) / share - first_part + 1;
    s.slot = first_slot + part;
    position = start + s.end;
    return true;
  }

  // The tiles that hold the keys some row of the sequence sees; at least one, so that every row gets its answer. (A
  // sequence without rows has none: see count_tiles.)
  template <int TILE>
  static __device__ __forceinline__ void tile_range(const Sequence& seq, int& first, int& end) {
    const int low = seq.low(0), high = seq.high(max(seq.seqlen_q - 1, 0));
    first = low / TILE;
    end = max(high > low ? (high + TILE - 1) / TILE : 0, first + 1);
  }

 private:
  template <int TILE>
  static __device__ __forceinline__ int count_tiles(const SequenceParams& p, int b) {
    const Sequence seq(p, b);
    int first, end;
    tile_range<TILE>(seq, first, end);
    return seq.seqlen_q > 0 ? end - first : 0;
  }

  // Sum of this lane's and all lower lanes' x.
  static __device__ __forceinline__ int warp_sum(int x) {
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const int other = __shfl_up_sync(~0u, x, d);
      if (threadIdx.x % 32 >= d) x += other;
    }
    return x;
  }

  template <int THREADS, int TILE>
  static __device__ __forceinline__ void build_wide(const SequenceParams& p, int batch, int* prefix_in_shared) {
    __shared__ int warp_total[THREADS / 32];
    int base = 0;
    for (int b0 = 0; b0 < batch; b0 += THREADS) {
      const int b = b0 + threadIdx.x;
      const int sum = warp_sum(b < batch ? count_tiles<TILE>(p, b) : 0);
      if (threadIdx.x % 32 == 31) warp_total[threadIdx.x / 32] = sum;
      __syncthreads();
      int before = base, total = base;
#pragma unroll
      for (int w = 0; w < THREADS / 32; w++) {
        if (w < threadIdx.x / 32) before += warp_total[w];
        total += warp_total[w];
      }
      if (b < batch) prefix_in_shared[b + 1] = before + sum;
      base = total;
      __syncthreads();
    }
    if (threadIdx.x == 0) prefix_in_shared[0] = 0;
  }

  const int* prefix;
  int num_batch, share;
  int position, end;
};
