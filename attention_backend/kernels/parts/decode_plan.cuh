// Shares the keys of all sequences out among the blocks of a fixed grid, on the device: nothing on the host depends on
// the lengths, so a CUDA graph replays right when they change.
//
// The keys that a sequence's rows may see are cut into tiles. A pair is one key head of one sequence. The tiles of all
// pairs, pair after pair, are one line of work (shorter than 2^31 tiles); every block takes an equal stretch of it. The
// part of a stretch that lies in one pair is a segment; segment (block, pair) keeps its result in slot `block + pair`,
// which is unique because both numbers never fall along the line.
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
  // `prefix` is shared memory for batch + 1 ints. All threads of the block must call; ends with a block barrier.
  template <int THREADS, int TILE>
  __device__ __forceinline__ void build(const SequenceParams& p, int batch, int num_kv_heads, int blocks,
                                        int min_tiles, int* prefix_in_shared) {
    prefix = prefix_in_shared;
    num_batch = batch;
    num_heads = num_kv_heads;
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
    const int work = prefix[batch] * num_kv_heads;
    share = max(min_tiles, (work + blocks - 1) / blocks);
    // A stretch that starts past the end is empty; the product would leave 32 bits only where it is.
    position = static_cast<int>(min(static_cast<int64>(blockIdx.x) * share, static_cast<int64>(work)));
    end = min(share, work - position) + position;
  }

  __device__ __forceinline__ bool next(Segment& s) {
    if (position >= end) return false;
    int low = 0, high = num_batch;  // the last sequence that starts at or before the position
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (prefix[middle] * num_heads <= position)
        low = middle;
      else
        high = middle;
    }
    const int tiles = prefix[low + 1] - prefix[low];
    const int sequence_start = prefix[low] * num_heads;
    const int head = (position - sequence_start) / tiles;
    const int pair_start = sequence_start + head * tiles;
    s.batch = low;
    s.kv_head = head;
    s.pair = low * num_heads + head;
    s.begin = position - pair_start;
    s.end = min(end - pair_start, tiles);
    const int first_block = pair_start / share;
    s.first_slot = first_block + s.pair;
    s.num_segments = (pair_start + tiles - 1) / share - first_block + 1;
    s.slot = blockIdx.x + s.pair;
    position = pair_start + s.end;
    return true;
  }

  // The tiles that hold the keys some row of the sequence sees; at least one, so that every row gets its answer.
  template <int TILE>
  static __device__ __forceinline__ void tile_range(const Sequence& seq, int& first, int& end) {
    const int low = seq.low(0), high = seq.high(max(seq.seqlen_q - 1, 0));
    first = low / TILE;
    end = max(high > low ? (high + TILE - 1) / TILE : 0, first + 1);
  }

 private:
  template <int TILE>
  static __device__ __forceinline__ int count_tiles(const SequenceParams& p, int b) {
    int first, end;
    tile_range<TILE>(Sequence(p, b), first, end);
    return end - first;
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
  int num_batch, num_heads, share;
  int position, end;
};
