// What the backward knows of a row before it starts: lse in base 2, and D = rowsum(dO * O) - dlse (FlashAttention,
// appendix B.4). One block takes 128 rows of a head, those of all heads side by side, as rows lie in memory; LANES threads
// share a row. On the way it clears the rows' part of a float32 buffer that the main kernel adds to, of as many heads as are
// held at a time, and its counters. Rows that see nothing and padding get +inf and 0, so that their probabilities become
// 2^-inf; what stands in their dO does not matter.
//
// Compile-time: BF16, LANES (a power of two up to 32, at least head_dim_v / 8).
#include "parts/padded_rows.cuh"

constexpr int kThreads = 256;

// The same fields, in the same order, as attention_backend/kernels/backward_params.py: RowTermsParams.
struct RowTermsParams {
  const int* cu_seqlens_q;  // [batch + 1] or null
  const element* out;
  const element* grad_out;
  const float* lse;
  const float* grad_lse;  // laid out as lse, or null
  float* lse2;            // [num_heads, padded_rows], as delta
  float* delta;
  float* zeroed;  // rows of zeroed_width, or null; `_batch` and `_head`: how many rows further the next one's begin
  int* counters;  // no more than there are heads in all sequences
  int64 out_batch, out_row, out_head;
  int64 grad_out_batch, grad_out_row, grad_out_head;
  int64 lse_batch, lse_head;
  int64 padded_rows;
  int64 zeroed_batch, zeroed_head;
  int64 zeroed_heads;  // of dense sequences so many, those of the first sequence and so on; else more than there are
  int seqlen_q, batch, head_dim_v, zeroed_width, num_counters, num_heads;
};

// Sum of the products of eight elements.
__device__ __forceinline__ float dot8(const uint4& a, const uint4& b) {
  const element* x = reinterpret_cast<const element*>(&a);
  const element* y = reinterpret_cast<const element*>(&b);
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < 8; i++) sum = fmaf(to_float(x[i]), to_float(y[i]), sum);
  return sum;
}

extern "C" __global__ void __launch_bounds__(kThreads) flash_bwd_preprocess(const RowTermsParams p) {
  const int num_heads = p.num_heads, head = blockIdx.x % num_heads;
  const int64 first = static_cast<int64>(blockIdx.x / num_heads) * kRowPadding;

  // The sequence that the rows belong to is the last that begins at or before them.
  int batch = 0;
  for (int end = p.batch; end - batch > 1;) {
    const int middle = (batch + end) / 2;
    if (padded_begin(p.cu_seqlens_q, p.seqlen_q, middle) <= first)
      batch = middle;
    else
      end = middle;
  }
  const int q_begin = p.cu_seqlens_q ? p.cu_seqlens_q[batch] : 0;
  const int seqlen_q = p.cu_seqlens_q ? p.cu_seqlens_q[batch + 1] - q_begin : p.seqlen_q;
  const int64 first_row = first - padded_begin(p.cu_seqlens_q, p.seqlen_q, batch);

  const int64 dense = p.cu_seqlens_q ? 0 : batch;
  const element* out = p.out + dense * p.out_batch + head * p.out_head;
  const element* grad_out = p.grad_out + dense * p.grad_out_batch + head * p.grad_out_head;
  const int64 lse_base = dense * p.lse_batch + head * p.lse_head;
  const int lane = threadIdx.x % LANES;

  // All that a thread reads is on its way before it looks at any of it.
  constexpr int kRows = kThreads / LANES, kTurns = kRowPadding / kRows, kAtOnce = kTurns < 8 ? kTurns : 8;
#pragma unroll 1
  for (int turn = 0; turn < kTurns; turn += kAtOnce) {
    uint4 x[kAtOnce], y[kAtOnce];
    float lse[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; i++) {
      const int64 row = first_row + (turn + i) * kRows + threadIdx.x / LANES, at = q_begin + row;
      const bool there = row < seqlen_q && lane * 8 < p.head_dim_v;
      x[i] = there ? *reinterpret_cast<const uint4*>(out + at * p.out_row + lane * 8) : uint4{};
      y[i] = there ? *reinterpret_cast<const uint4*>(grad_out + at * p.grad_out_row + lane * 8) : uint4{};
      lse[i] = row < seqlen_q ? p.lse[lse_base + at] : -kInfinity;
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; i++) {
      const int r = (turn + i) * kRows + threadIdx.x / LANES;
      const bool alive = lse[i] != -kInfinity;
      float sum = alive ? dot8(x[i], y[i]) : 0.f;
#pragma unroll
      for (int offset = LANES / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
      if (lane == 0) {
        if (alive && p.grad_lse) sum -= p.grad_lse[lse_base + q_begin + first_row + r];
        p.lse2[head * p.padded_rows + first + r] = alive ? lse[i] * kLog2e : kInfinity;
        p.delta[head * p.padded_rows + first + r] = sum;
      }
    }
  }

  if (threadIdx.x == 0 && blockIdx.x < p.num_counters) p.counters[blockIdx.x] = 0;
  if (p.zeroed && static_cast<int64>(batch) * num_heads + head < p.zeroed_heads) {
    const int64 at = head * p.zeroed_head + (p.cu_seqlens_q ? first : batch * p.zeroed_batch + first_row);
    float4* zeroed = reinterpret_cast<float4*>(p.zeroed + at * p.zeroed_width);
    for (int i = threadIdx.x; i < kRowPadding / 4 * p.zeroed_width; i += kThreads)
      zeroed[i] = make_float4(0.f, 0.f, 0.f, 0.f);
  }
}
