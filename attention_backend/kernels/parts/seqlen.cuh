// Where a sequence lies and which keys each of its rows may see: one interval of keys per query row.
// The rule is written out in attention_backend/problem.py (AttentionArgs).
#pragma once

#include "parts/element.cuh"

// Whether rows may see keys from some key on only: windows, chunks, padding on the left, descriptors. Where they do not, a
// kernel that is compiled without is shorter.
#ifndef LEFT_BOUNDS
#define LEFT_BOUNDS 1
#endif

// The same fields, in the same order, as attention_backend/kernels/params.py: SequenceParams.
struct SequenceParams {
  const int* cu_seqlens_q;  // [batch + 1] or null
  const int* cu_seqlens_k;  // [batch + 1] or null
  const int* seqused_k;     // [batch] or null
  const int* leftpad_k;     // [batch] or null
  const int* mask_desc;     // [batch, 8] or null
  const int* block_table;   // [batch, block_table_stride] or null
  int64 block_table_stride;
  int seqlen_q;
  int seqlen_k;
  int window_left;
  int window_right;
  int chunk_size;
  int page_size;
  int page_shift;  // log2(page_size), or -1
  int reserved;
};

struct Sequence {
  int q_begin;  // first row in the packed query tensor (0 if dense)
  int k_begin;  // first row in the packed key tensor (0 if dense or paged)
  int seqlen_q;
  int start, stop;
  int q_offset;
  int left, right, chunk;

  __device__ __forceinline__ Sequence(const SequenceParams& p, int b) {
    q_begin = k_begin = 0;
    seqlen_q = p.seqlen_q;
    int seqlen_k = p.seqlen_k;
    if (p.cu_seqlens_q) {
      q_begin = p.cu_seqlens_q[b];
      seqlen_q = p.cu_seqlens_q[b + 1] - q_begin;
    }
    if (p.cu_seqlens_k) {
      k_begin = p.cu_seqlens_k[b];
      seqlen_k = p.cu_seqlens_k[b + 1] - k_begin;
    }
    if (LEFT_BOUNDS && p.mask_desc) {
      const int* d = p.mask_desc + 8 * b;
      start = max(d[0], 0);
      stop = min(d[1], seqlen_k);
      q_offset = d[2];
      left = d[3];
      right = d[4];
      chunk = d[5];
    } else {
      start = LEFT_BOUNDS && p.leftpad_k ? p.leftpad_k[b] : 0;
      stop = p.seqused_k ? min(p.seqused_k[b], seqlen_k) : seqlen_k;
      q_offset = stop - seqlen_q;
      left = LEFT_BOUNDS ? p.window_left : -1;
      right = p.window_right;
      chunk = LEFT_BOUNDS ? p.chunk_size : 0;
    }
  }

  // First key that row i may see.
  __device__ __forceinline__ int low(int i) const {
    if (!LEFT_BOUNDS) return 0;
    int position = i + q_offset, low = start;
    if (left >= 0) low = max(low, position - left);
    if (chunk > 0) low = max(low, start + chunk_floor(position - start));
    return low;
  }

  // One past the last key that row i may see.
  __device__ __forceinline__ int high(int i) const {
    int position = i + q_offset, high = stop;
    if (right >= 0) high = min(high, position + right + 1);
    if (LEFT_BOUNDS && chunk > 0) high = min(high, start + chunk_floor(position - start) + chunk);
    return high;
  }

  // The rows before this one see nothing: what bounds their keys on the right lies before the first key.
  __device__ __forceinline__ int first_row_with_keys() const {
    if (start >= stop) return seqlen_q;
    if (right < 0) return 0;
    return max(min(static_cast<int64>(start) - right - q_offset, static_cast<int64>(seqlen_q)), static_cast<int64>(0));
  }

  // First row whose keys reach up to `key` (its high is above), and one past the last whose keys begin before `key`
  // (its low is below). Rows between them may still see nothing, where both lie in a gap of the mask.
  __device__ __forceinline__ int first_row_reaching(int key) const {
    if (key >= stop) return seqlen_q;
    int64 row = 0;
    if (right >= 0) row = max(row, static_cast<int64>(key) - right - q_offset);
    if (chunk > 0) row = max(row, static_cast<int64>(start) + chunk_floor(key - start) - q_offset);
    return min(row, static_cast<int64>(seqlen_q));
  }
  __device__ __forceinline__ int end_row_beginning(int key) const {
    if (key <= start) return 0;
    int64 row = seqlen_q;
    if (left >= 0) row = min(row, static_cast<int64>(key) + left - q_offset);
    if (chunk > 0) row = min(row, static_cast<int64>(start) + chunk_floor(key - 1 - start) + chunk - q_offset);
    return max(row, static_cast<int64>(0));
  }

 private:
  // The largest multiple of `chunk` that is not above x, for x of either sign.
  __device__ __forceinline__ int chunk_floor(int x) const {
    int q = x / chunk;
    if (q * chunk > x) q--;
    return q * chunk;
  }
};

// Row of the key or value tensor, in elements from its base: `block_stride` is the batch stride when dense,
// the page stride when paged.
__device__ __forceinline__ int64 key_offset(const SequenceParams& p, const int* table, int key, int64 block_stride,
                                            int64 row_stride) {
  int page, row;
  if (p.page_shift >= 0) {
    page = key >> p.page_shift;
    row = key & (p.page_size - 1);
  } else {
    page = key / p.page_size;
    row = key - page * p.page_size;
  }
  return static_cast<int64>(table[page]) * block_stride + static_cast<int64>(row) * row_stride;
}
