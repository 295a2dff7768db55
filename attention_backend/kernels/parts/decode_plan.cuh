// Shares the keys of all sequences out among the blocks of a fixed grid, on the device: nothing on the host depends on
// the lengths, so a CUDA graph replays right when they change.
//
// The keys that a sequence's rows may see are cut into tiles. A pair is one key head of one sequence. The tiles of all
// pairs, pair after pair, are one line of work; every block takes an equal stretch of it. The part of a stretch that
// lies in one pair is a segment; segment (block, pair) keeps its result in slot `block + pair`, which is unique because
// both numbers never fall along the line.
#pragma once

#include "parts/seqlen.cuh"

struct Segment {
  int pair, batch, kv_head;
  int begin, end;    // tiles of the sequence, counted from its key 0
  int first_slot;    // of the pair
  int num_segments;  // of the pair
  int slot;
};

class DecodePlan {
 public:
  // `prefix` is shared memory for batch + 1 ints. All threads of the block must call.
  template <int THREADS, int TILE>
  __device__ __forceinline__ void build(const SequenceParams& p, int batch, int num_kv_heads, int blocks,
                                        int min_tiles, int* prefix_in_shared) {
    prefix = prefix_in_shared;
    num_batch = batch;
    num_heads = num_kv_heads;
    __shared__ int warp_total[THREADS / 32];
    int base = 0;
    for (int b0 = 0; b0 < batch; b0 += THREADS) {
      const int b = b0 + threadIdx.x;
      int tiles = 0;
      if (b < batch) {
        int first, end;
        tile_range<TILE>(Sequence(p, b), first, end);
        tiles = end - first;
      }
      int sum = tiles;
#pragma unroll
      for (int d = 1; d < 32; d *= 2) {
        int other = __shfl_up_sync(~0u, sum, d);
        if (threadIdx.x % 32 >= d) sum += other;
      }
      if (threadIdx.x % 32 == 31) warp_total[threadIdx.x / 32] = sum;
      __syncthreads();
      int before = base, total = base;
#pragma unroll
      for (int w = 0; w < THREADS / 32; w++) {
        if (w < threadIdx.x / 32) before += warp_total[w];
        total += warp_total[w];
      }
      if (b < batch) prefix_in_shared[b] = before + sum - tiles;
      base = total;
      __syncthreads();
    }
    if (threadIdx.x == 0) prefix_in_shared[batch] = base;
    __syncthreads();
    const int64 work = static_cast<int64>(base) * num_kv_heads;
    share = static_cast<int>(max(static_cast<int64>(min_tiles), (work + blocks - 1) / blocks));
    position = static_cast<int64>(blockIdx.x) * share;
    end = min(position + share, work);
  }

  __device__ __forceinline__ bool next(Segment& s, const SequenceParams& p) {
    if (position >= end) return false;
    int low = 0, high = num_batch;  // the last sequence that starts at or before the position
    while (high - low > 1) {
      int middle = (low + high) / 2;
      if (static_cast<int64>(prefix[middle]) * num_heads <= position)
        low = middle;
      else
        high = middle;
    }
    const int tiles = prefix[low + 1] - prefix[low];
    const int64 sequence_start = static_cast<int64>(prefix[low]) * num_heads;
    const int head = static_cast<int>((position - sequence_start) / tiles);
    const int64 pair_start = sequence_start + static_cast<int64>(head) * tiles;
    s.batch = low;
    s.kv_head = head;
    s.pair = low * num_heads + head;
    s.begin = static_cast<int>(position - pair_start);
    s.end = static_cast<int>(min(end - pair_start, static_cast<int64>(tiles)));
    const int first_block = static_cast<int>(pair_start / share);
    s.first_slot = first_block + s.pair;
    s.num_segments = static_cast<int>((pair_start + tiles - 1) / share) - first_block + 1;
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
  const int* prefix;
  int num_batch, num_heads, share;
  int64 position, end;
};
