// Attention forward in plain float32 arithmetic: for numerics, not for speed. Same loop and same options as
// flash_fwd_sm80.cuh; products are fused multiply-adds, exponentials are expf.
//
// A block takes TILE query rows and tiles of as many keys, with eight threads a row. Thread t computes scores
// (t / 8, t % 8 + 8 j) and output columns t % 8 + 8 j of row t / 8, so the threads of a row share its softmax by shuffles.
//
// Compile-time: FP32 = 1, HEAD_DIM and HEAD_DIM_V (tile widths, multiples of 32), TILE (32 or 16), PAGED, KEY_MASK, SOFTCAP,
// ALIBI, BIAS.
#include "parts/element.cuh"
#include "parts/forward_params.cuh"
#include "parts/score.cuh"
#include "parts/seqlen.cuh"

constexpr int kTile = TILE;
constexpr int kThreads = 8 * kTile;
constexpr int kScores = kTile / 8;  // of a thread
constexpr int kPitch = HEAD_DIM + 1;     // floats; odd, so that a column of rows lies in different banks
constexpr int kPitchV = HEAD_DIM_V + 1;
constexpr int kPitchP = kTile + 1;

extern "C" __global__ void __launch_bounds__(kThreads) flash_fwd_f32(const ForwardParams p) {
  extern __shared__ float shared_f32[];
  float* const tile_q = shared_f32;
  float* const tile_k = tile_q + kTile * kPitch;
  float* const tile_v = tile_k + kTile * kPitch;
  float* const tile_p = tile_v + kTile * kPitchV;

  const int head = blockIdx.y, batch = blockIdx.z;
  const Sequence seq(p.sequence, batch);
  const int first_row = (gridDim.x - 1 - blockIdx.x) * kTile;
  if (first_row >= seq.seqlen_q) return;
  const int last_row = min(first_row + kTile, seq.seqlen_q) - 1;
  const int r = threadIdx.x / 8, c = threadIdx.x % 8, row = first_row + r;
  const bool packed = p.sequence.cu_seqlens_q != nullptr;
  const Score score(p.score, batch, head);

  const element* q = p.q + (packed ? 0 : batch * p.q_batch) + head * p.q_head;
  const element* k = p.k + (head / p.group) * p.k_head;
  const element* v = p.v + (head / p.group) * p.v_head;
#if PAGED
  const int* table = p.sequence.block_table + batch * p.sequence.block_table_stride;
#else
  if (!p.sequence.cu_seqlens_k) {
    k += batch * p.k_batch;
    v += batch * p.v_batch;
  }
  k += static_cast<int64>(seq.k_begin) * p.k_row;
  v += static_cast<int64>(seq.k_begin) * p.v_row;
#endif

  for (int d = c; d < HEAD_DIM; d += 8)
    tile_q[r * kPitch + d] =
        row <= last_row && d < p.head_dim ? q[(seq.q_begin + static_cast<int64>(row)) * p.q_row + d] : 0.f;

  const int any_low = seq.low(first_row), any_high = seq.high(last_row);
  const int low = seq.low(row), high = seq.high(row);
  float acc[HEAD_DIM_V / 8], m = -kInfinity, l = 0.f;
#pragma unroll
  for (int j = 0; j < HEAD_DIM_V / 8; j++) acc[j] = 0.f;

  for (int n0 = any_low / kTile * kTile; n0 < any_high; n0 += kTile) {
    __syncthreads();
    const int key = n0 + r;
    bool valid = key >= any_low && key < any_high;
#if KEY_MASK
    valid = valid && score.key_visible(key);
#endif
    const element *from_k = k, *from_v = v;
    if (valid) {
#if PAGED
      from_k += key_offset(p.sequence, table, key, p.k_batch, p.k_row);
      from_v += key_offset(p.sequence, table, key, p.v_batch, p.v_row);
#else
      from_k += key * p.k_row;
      from_v += key * p.v_row;
#endif
    }
    for (int d = c; d < HEAD_DIM; d += 8) tile_k[r * kPitch + d] = valid && d < p.head_dim ? from_k[d] : 0.f;
    for (int d = c; d < HEAD_DIM_V; d += 8) tile_v[r * kPitchV + d] = valid && d < p.head_dim_v ? from_v[d] : 0.f;
    __syncthreads();

    // 32 products at a time: a long sum is rounded at its own size with every one.
    float s[kScores] = {};
    for (int first = 0; first < HEAD_DIM; first += 32) {
      float some[kScores] = {};
      for (int d = first; d < first + 32; d++)
#pragma unroll
        for (int j = 0; j < kScores; j++) some[j] = fmaf(tile_q[r * kPitch + d], tile_k[(c + 8 * j) * kPitch + d], some[j]);
#pragma unroll
      for (int j = 0; j < kScores; j++) s[j] += some[j];
    }
    float top = m;
#pragma unroll
    for (int j = 0; j < kScores; j++) {
      const int at = n0 + c + 8 * j;
#if SCORE_CHANGES
      s[j] = score(s[j], row, at, seq);
#else
      s[j] *= p.score.softmax_scale;
#endif
      bool visible = row <= last_row && at >= low && at < high;
#if KEY_MASK
      visible = visible && score.key_visible(at);
#endif
      if (!visible) s[j] = -kInfinity;
      top = fmaxf(top, s[j]);
    }
#pragma unroll
    for (int d = 1; d < 8; d *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
    const float shift = top == -kInfinity ? 0.f : top;
    const float correction = expf(m - shift);
    m = top;
    l *= correction;
#pragma unroll
    for (int j = 0; j < kScores; j++) {
      const float e = expf(s[j] - shift);
      l += e;
      tile_p[r * kPitchP + c + 8 * j] = e;
    }
    __syncwarp();  // a row's eight threads are in one warp
#pragma unroll
    for (int j = 0; j < HEAD_DIM_V / 8; j++) acc[j] *= correction;
    for (int n = 0; n < kTile; n++) {
      const float e = tile_p[r * kPitchP + n];
#pragma unroll
      for (int j = 0; j < HEAD_DIM_V / 8; j++) acc[j] = fmaf(e, tile_v[n * kPitchV + c + 8 * j], acc[j]);
    }
  }

#pragma unroll
  for (int d = 1; d < 8; d *= 2) l += __shfl_xor_sync(~0u, l, d);
  if (row > last_row) return;
  const bool sees = m != -kInfinity || isnan(l);  // where all scores are NaN there is no maximum either
  // A sink may be far larger than any score: the larger of both is what is taken out of the sum.
  const float sink = p.sinks ? p.sinks[head] : -kInfinity, all = fmaxf(m, sink);
  const float weight = sees ? expf(m - all) : 0.f;
  l = l * weight + (sees ? expf(sink - all) : 0.f);
  if (c == 0)
    p.lse[(packed ? seq.q_begin : batch * p.lse_batch) + head * p.lse_head + row] = sees ? all + logf(l) : -kInfinity;
  element* out =
      p.out + (packed ? 0 : batch * p.out_batch) + (seq.q_begin + static_cast<int64>(row)) * p.out_row + head * p.out_head;
#pragma unroll
  for (int j = 0; j < HEAD_DIM_V / 8; j++)
    if (c + 8 * j < p.head_dim_v) out[c + 8 * j] = sees ? acc[j] * weight / l : 0.f;
}
