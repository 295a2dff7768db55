// Where the rows of a sequence lie in float32 buffers of the backward: every sequence begins at a multiple of 128 rows.
#pragma once

#include "parts/element.cuh"

constexpr int kRowPadding = 128;

// First row of sequence b. Varlen: 128 rows a sequence are enough for its padding, so b + 1 begins behind it.
__device__ __forceinline__ int64 padded_begin(const int* cu_seqlens_q, int seqlen_q, int b) {
  if (cu_seqlens_q) return (cu_seqlens_q[b] + static_cast<int64>(b) * kRowPadding) / kRowPadding * kRowPadding;
  return static_cast<int64>(b) * ((seqlen_q + kRowPadding - 1) / kRowPadding * kRowPadding);
}
