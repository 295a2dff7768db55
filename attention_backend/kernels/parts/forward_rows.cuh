// The Hopper forward's rows: their running softmax, its end (lse), and their way to the output.
#pragma once

#include "bulk_copies.cuh"
#include "forward_masks.cuh"
#include "score.cuh"
#include "softmax.cuh"
#include "transpose_quad.cuh"

// How far the largest term may be above one, log2. The terms of a long row may all be below what fp16 holds beside a one;
// below the largest that it holds there is room for 2^-39 of that.
constexpr float kRoom = !FP8_PAGES ? 0.f : OVERLAP ? 7.f : 15.f;

// How large a term may be, log2, before its row's level follows: what is added up stays far below the largest float32 with
// any values that make sense, and terms below what their type holds. The level of a row's first keys mostly is one for all.
constexpr float kWindow = FP8_PAGES ? 15.f : BF16 ? 32.f : 12.f;

// A row's running softmax, of the thread's two rows: what is taken out of the exponents, and the sum of the terms.
struct Rows {
  float level[2], sum[2];
#if FP8_PAGES
  Queries queries;
#endif

  __device__ __forceinline__ void clear() {
    level[0] = level[1] = -kInfinity;
    sum[0] = sum[1] = 0.f;
  }
};

// The score of the thread's row `half`.
__device__ __forceinline__ Score score_of_row(Score score, const Rows& rows, int half) {
#if FP8_PAGES
  score.scale_log2 = rows.queries.scale[half];
#endif
  return score;
}

// The largest score of the thread's two rows; all four threads of a row call. Where registers allow it, a maximum is two
// chains: often one warp alone must keep its scheduler busy.
constexpr int kChains = CONSUMER_REGISTERS >= 200 ? 2 : 1;

template <int SCORES>
__device__ __forceinline__ void row_maxima(float (&top)[2], const float (&s)[SCORES]) {
#pragma unroll
  for (int half = 0; half < 2; half++) {
    float m[kChains];
#pragma unroll
    for (int i = 0; i < SCORES / 2; i++) {
      const float x = s[i / 2 * 4 + half * 2 + i % 2];
      m[i % kChains] = i < kChains ? x : fmaxf(m[i % kChains], x);
    }
    top[half] = fmaxf(m[0], m[kChains - 1]);
    top[half] = fmaxf(top[half], __shfl_xor_sync(~0u, top[half], 1));
    top[half] = fmaxf(top[half], __shfl_xor_sync(~0u, top[half], 2));
  }
}

// The largest of this thread's scores of each row, or zero; a NaN is the largest of its own row alone. By integers, which
// Hopper compares three at a time: floats without a sign have that order, and those with one are below zero.
template <int SCORES>
__device__ __forceinline__ void largest_or_zero(float (&top)[2], const float (&s)[SCORES]) {
  int m[2] = {};
#pragma unroll
  for (int i = 0; i < SCORES; i += 2)
    m[i / 2 % 2] = max(max(m[i / 2 % 2], __float_as_int(s[i])), __float_as_int(s[i + 1]));
  top[0] = __int_as_float(m[0]), top[1] = __int_as_float(m[1]);
}

// Levels follow the rows' largest scores; `correction` is the factor of what came before. ALWAYS: by all that these are
// higher; else, and where the output's rescaling would not be hidden, only beyond the window. Each row decides by what it
// sees alone: its result does not depend on those that share a warp with it.
template <bool ALWAYS, bool EMPTY, int SCORES>
__device__ __forceinline__ void follow(const float (&s)[SCORES], Rows& rows, float (&correction)[2], const Score& plain) {
  float tops[2];
  row_maxima(tops, s);
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const Score score = score_of_row(plain, rows, half);
    float level = fmaxf(rows.level[half], score.level(tops[half]) - kRoom);
    // Where a row sees nothing the exponent is a NaN.
    if ((OVERLAP || !ALWAYS) && !(score.exponent(tops[half], rows.level[half]) > kWindow)) level = rows.level[half];
    correction[half] = exp2_approx(score.above(rows.level[half], EMPTY && level == -kInfinity ? 0.f : level));
    rows.level[half] = level;
    rows.sum[half] *= correction[half];
  }
}

// Turns scores into unnormalised probabilities. True when levels have followed scores: `correction` is then the factor of
// what came before. EMPTY: a row may have seen nothing yet. Such steps, mostly masked ones, look at the rows' maxima each
// time: that takes less time than to ask first. So do those whose queries are registers, of which they have few.
template <bool EMPTY, int SCORES>
__device__ __forceinline__ bool softmax_tile(float (&s)[SCORES], Rows& rows, float (&correction)[2],
                                             const Score& plain) {
  constexpr bool kAlways = EMPTY || (FP8_PAGES && HEAD_DIM > 64);
  bool follows = true;
  if (!kAlways) {
    float largest[2], exponents[2];
    largest_or_zero(largest, s);
#pragma unroll
    for (int half = 0; half < 2; half++)
      exponents[half] = score_of_row(plain, rows, half).exponent(largest[half], rows.level[half]);
    follows = __any_sync(~0u, fmaxf(exponents[0], exponents[1]) > kWindow);
  }
  if (follows) follow<kAlways, EMPTY>(s, rows, correction, plain);
  if (kAlways && OVERLAP) follows = __any_sync(~0u, fminf(correction[0], correction[1]) < 1.f);
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const Score score = score_of_row(plain, rows, half);
    const float shift = EMPTY && rows.level[half] == -kInfinity ? 0.f : rows.level[half];
    float sum[kChains] = {rows.sum[half]};
#pragma unroll
    for (int i = 0; i < SCORES / 2; i++) {
      float& x = s[i / 2 * 4 + half * 2 + i % 2];
      x = exp2_approx(score.exponent(x, shift));
      sum[i % kChains] += x;
    }
    rows.sum[half] = sum[0];
    if (kChains > 1) rows.sum[half] += sum[kChains - 1];
#if OVERLAP
    asm volatile("" : "+f"(rows.sum[half]));  // here, in the shadow of the exponentials, and not after the next wait
#endif
  }
  return follows;
}

__device__ __forceinline__ uint32 pack_term(float lo, float hi) {
#if FP8_PAGES
  return pack_half2(lo, hi);
#else
  return pack2(lo, hi);
#endif
}

template <int SCORES>
__device__ __forceinline__ void pack_tile(uint32 (&p)[BLOCK_N / 16][4], const float (&s)[SCORES]) {
#pragma unroll
  for (int i = 0; i < BLOCK_N / 16; i++)
#pragma unroll
    for (int j = 0; j < 4; j++) p[i][j] = i < SCORES / 8 ? pack_term(s[i * 8 + j * 2], s[i * 8 + j * 2 + 1]) : 0;
}

// Ends the softmax of the thread's rows: writes their lse, gives the factor of their output.
__device__ __forceinline__ void end_rows(float (&factor)[2], const Rows& state, const Tile& tile, const HopperParams& p,
                                         const Score& score, int local_row) {
  const ForwardParams& f = p.forward;
  float* lse = f.lse + (f.sequence.cu_seqlens_q != nullptr ? tile.seq.q_begin : tile.batch * f.lse_batch);
#if SPLIT
  lse += tile.split * p.work.lse_split;
#endif
  const int row = tile.first_row + local_row, rows = min(rows_per_tile(p), tile.end_row - tile.first_row) - local_row;
  int head = head_of(row, tile, p);
  float* place = lse + head * f.lse_head + query_of(row, p);
  const float* sink = f.sinks ? f.sinks + head : nullptr;
#pragma unroll
  for (int half = 0; half < 2; half++) {
#if PACK
    if (half == 1) {
      head = head_of(row + 8, tile, p);
      place = lse + head * f.lse_head + query_of(row + 8, p);
      if (sink) sink = f.sinks + head;
    }
#else
    if (half == 1) place += 8;
#endif
    float l = state.sum[half];
    l += __shfl_xor_sync(~0u, l, 1);
    l += __shfl_xor_sync(~0u, l, 2);
    const RowEnd end = end_row(score.log2_of(state.level[half]), l, sink);
    factor[half] = end.factor;
#if FP8_PAGES
    factor[half] *= p.v_scale[key_head_of(tile, p)];
#endif
#if DROPOUT
    factor[half] *= p.dropout.scale;
#endif
    if (half * 8 < rows && threadIdx.x % 4 == 0) {
      *place = end.lse * kLn2;
#if SPLIT
      if (tile.split == 0)  // parts that there are not have seen nothing
        for (int s = tile.num_splits; s < p.work.num_splits; s++) place[s * p.work.lse_split] = -kInfinity;
#endif
    }
  }
}

// Whether the output takes the way through the queries' shared memory, which nobody needs at a tile's end. That is less code,
// and whole lines go to memory. Not where queries have one stage: the next ones may be there by then.
constexpr bool kStoresByQueries = Q_STAGES > 1 && !SPLIT;
static_assert(!kStoresByQueries || kSlabsV <= kSlabsK, "rows of the output have no more room than those of the queries");

// Where a row of the output is, if it is real.
__device__ __forceinline__ int64 offset_of(int row, const Tile& tile, const HopperParams& p) {
  const ForwardParams& f = p.forward;
  return (f.sequence.cu_seqlens_q != nullptr ? 0 : tile.batch * f.out_batch) +
         (tile.seq.q_begin + static_cast<int64>(query_of(row, p))) * f.out_row + head_of(row, tile, p) * f.out_head;
}

// Writes the warp's 16 rows of the output, from `first` of the tile on, by way of the shared memory of its queries. Swizzled
// as those were: no two lanes use one bank.
__device__ __forceinline__ void store_by_queries(const float (&acc)[HEAD_DIM_V / 2], const float (&factor)[2],
                                                 const Tile& tile, const HopperParams& p, int first, uint32 queries) {
  const ForwardParams& f = p.forward;
  const int lane = threadIdx.x % 32, row = lane / 8, chunk = lane % 8;  // of each fourth row 16 bytes of each slab
  const int rows = min(rows_per_tile(p), tile.end_row - tile.first_row) - first - row;
  element* out = f.out + offset_of(tile.first_row + first + row, tile, p) + chunk * 8;
#pragma unroll
  for (int i = 0; i < HEAD_DIM_V / 8; i += 2) {
    uint32 x[4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const float* pair = acc + (i + j / 2) * 4 + j % 2 * 2;
      x[j] = pack2(pair[0] * factor[j % 2], pair[1] * factor[j % 2]);
    }
    store_matrices(queries + i / 8 * kSlabQ + lane % 16 * 128 + ((i % 8 + lane / 16) ^ lane % 8) * 16, x);
  }
  fence_async_proxy();  // the next queries come behind what was written
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 16; i += 4) {
    if (PACK) out = f.out + offset_of(tile.first_row + first + row + i, tile, p) + chunk * 8;
#pragma unroll
    for (int c = 0; c < kSlabsV; c++) {
      uint32 x[4];
      load_shared4(x, queries + c * kSlabQ + (row + i) * 128 + (chunk ^ (row + i) % 8) * 16);
      if (i < rows && c * 64 + chunk * 8 < f.head_dim_v) store_global4(out + c * 64, x);
    }
    out += 4 * f.out_row;
  }
}

// Writes the thread's rows of the output from registers, 16 bytes at a time: the four threads of a row swap their pairs of
// columns.
__device__ __forceinline__ void store_rows(const float (&acc)[HEAD_DIM_V / 2], const float (&factor)[2], const Tile& tile,
                                           const HopperParams& p, int local_row) {
  const ForwardParams& f = p.forward;
  const int c = threadIdx.x % 4;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int row = tile.first_row + local_row + half * 8;
    const bool real = local_row + half * 8 < rows_per_tile(p) && row < tile.end_row;
    const int64 offset = offset_of(row, tile, p);
#if SPLIT
    float* out = reinterpret_cast<float*>(f.out) + tile.split * p.work.out_split + offset;
#pragma unroll
    for (int i = 0; i < HEAD_DIM_V / 8; i++)
      if (real && i * 8 < f.head_dim_v)
        *reinterpret_cast<float2*>(out + i * 8 + c * 2) =
            make_float2(acc[i * 4 + half * 2] * factor[half], acc[i * 4 + half * 2 + 1] * factor[half]);
#else
#pragma unroll
    for (int i = 0; i < HEAD_DIM_V / 8; i += 4) {
      uint32 x[4];
#pragma unroll
      for (int j = 0; j < 4; j++)
        x[j] = i + j < HEAD_DIM_V / 8 ? pack2(acc[(i + j) * 4 + half * 2] * factor[half],
                                              acc[(i + j) * 4 + half * 2 + 1] * factor[half])
                                      : 0;
      transpose_quad(x, c);  // lane c holds the 8 columns of group i + c
      if (real && (i + c) * 8 < f.head_dim_v)
        *reinterpret_cast<uint4*>(f.out + offset + (i + c) * 8) = make_uint4(x[0], x[1], x[2], x[3]);
    }
#endif
  }
}
