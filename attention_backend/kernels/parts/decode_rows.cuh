// Few query rows of one key head's group against slices of 16 keys, by one warp: scores, running softmax, output.
//
// Operands are swapped: 16 keys (A) by up to ROWS query rows (B), so few rows waste nothing.
//
// e4m3 keys and values (FP8_KV) are multiplied as fp16. ldmatrix moves bytes in pairs, so a thread gets four neighbouring
// columns of a key where it would get two and the two eight further on. A product does not mind the order of its terms:
// the query rows are kept in the same order (see `query_place`). The queries become fp16, each row scaled by a power of
// two that brings its largest element to [1, 2): nothing overflows, and no bit that counts is lost.
#pragma once

#include "parts/copy_sm80.cuh"
#include "parts/decode_params.cuh"
#include "parts/mma_sm80.cuh"
#include "parts/score.cuh"
#include "parts/seqlen.cuh"
#if FP8_KV
#include "parts/fp8.cuh"
#endif

constexpr int kSlice = 16;                        // keys of one step of a warp
constexpr int kColumns = ROWS / 8;                // tiles of 8 query rows
constexpr int kPitchQ = HEAD_DIM * 2 + 16;        // bytes of a padded query row
constexpr int kChunk = 16 / sizeof(cached);       // cached elements of 16 bytes
constexpr int kChunksK = HEAD_DIM / kChunk, kChunksV = HEAD_DIM_V / kChunk;

#if FP8_KV
// Where column c of a query row stands: within 16 columns, the order in which ldmatrix leaves 16 bytes of a key.
__device__ __forceinline__ int query_place(int c) { return (c & ~15) + (c % 16 / 4 * 2) + (c & 1) + (c & 2) * 4; }
#endif

// The query rows [row_begin, row_begin + rows) of a group, into shared memory at `tile`; zeros for rows that are not
// there. With FP8_KV, factor[r] is what a score of row r is multiplied by. The block's `WARPS` warps must call; their
// next barrier, after copy_wait, completes it.
template <int WARPS>
__device__ __forceinline__ void load_queries(const DecodeParams& p, const Sequence& seq, int batch, int kv_head,
                                             int row_begin, int rows, char* tile, float* factor, int thread) {
  const element* q = p.q + (p.sequence.cu_seqlens_q ? 0 : batch * p.q_batch);
  const int first_head = kv_head * p.group;
#if FP8_KV
  const int lane = thread % 32;
  const float k_scale = p.k_scale[kv_head];
  for (int r = thread / 32; r < ROWS; r += WARPS) {
    const int query = p.query_of(row_begin + r), head = first_head + p.head_of(row_begin + r);
    const bool there = r < rows && query < seq.seqlen_q;
    const element* from = q + (seq.q_begin + static_cast<int64>(query)) * p.q_row + head * p.q_head;
    float x[HEAD_DIM / 32], top = 0.f;
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 32; i++) {
      const int c = i * 32 + lane;
      x[i] = there && c < p.head_dim ? to_float(from[c]) : 0.f;
      top = fmaxf(top, fabsf(x[i]));
    }
#pragma unroll
    for (int d = 16; d; d /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
    const int exponent = min(max(__float_as_int(top) >> 23, 1), 253);
    const float down = __int_as_float((254 - exponent) << 23);
    __half* const to = reinterpret_cast<__half*>(tile + r * kPitchQ);
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 32; i++) to[query_place(i * 32 + lane)] = __float2half_rn(x[i] * down);
    if (lane == 0) factor[r] = __int_as_float(exponent << 23) * k_scale;
  }
#else
  for (int i = thread; i < ROWS * (HEAD_DIM / 8); i += WARPS * 32) {
    const int r = i / (HEAD_DIM / 8), c = i % (HEAD_DIM / 8);
    const int query = p.query_of(row_begin + r), head = first_head + p.head_of(row_begin + r);
    const bool there = r < rows && query < seq.seqlen_q && c * 8 < p.head_dim;
    copy16(shared_address(tile) + r * kPitchQ + c * 16,
           there ? q + (seq.q_begin + static_cast<int64>(query)) * p.q_row + head * p.q_head + c * 8 : q, there);
  }
  copy_commit();
#endif
}

__device__ __forceinline__ void mma_cached(float (&c)[4], const uint32 (&a)[4], uint32 b0, uint32 b1) {
#if FP8_KV
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
  mma_16x8x16(c, a, b0, b1);
#endif
}

// What one warp knows of its rows: largest score, sum of terms (of this thread's keys) and output, unnormalised.
struct WarpRows {
  float acc[HEAD_DIM_V / 16][kColumns][4];  // O^T: value columns x query rows
  float row_max[kColumns][2], row_sum[kColumns][2];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int c = 0; c < kColumns; c++) {
      row_max[c][0] = row_max[c][1] = -kInfinity;
      row_sum[c][0] = row_sum[c][1] = 0.f;
#pragma unroll
      for (int i = 0; i < HEAD_DIM_V / 16; i++) acc[i][c][0] = acc[i][c][1] = acc[i][c][2] = acc[i][c][3] = 0.f;
    }
  }

  // Scores of 16 keys: s[c] is S^T, keys x query rows. `chunk(row, c)` is the address of 16 bytes of a key.
  template <class Chunk>
  static __device__ __forceinline__ void scores(float (&s)[kColumns][4], uint32 tile_q, int lane, Chunk chunk) {
    constexpr bool kTwoChains = kColumns < 4;  // half as long; more rows are chains enough, and take the registers
    float other[kTwoChains ? kColumns : 1][4];
#pragma unroll
    for (int c = 0; c < kColumns; c++)
#pragma unroll
      for (int x = 0; x < 4; x++) s[c][x] = other[kTwoChains ? c : 0][x] = 0.f;
#pragma unroll
    for (int step = 0; step < HEAD_DIM / 32; step++) {
      uint32 a0[4], a1[4];
#if FP8_KV
      uint32 x[4];
      ldmatrix_x4(x, chunk(lane % 16, step * 2 + lane / 16));
#pragma unroll
      for (int i = 0; i < 4; i++) {
        a0[i] = fp8_to_half2(i < 2 ? x[i] : x[i - 2] >> 16);
        a1[i] = fp8_to_half2(i < 2 ? x[i + 2] : x[i] >> 16);
      }
#else
      ldmatrix_x4(a0, chunk(lane % 16, step * 4 + lane / 16));
      ldmatrix_x4(a1, chunk(lane % 16, step * 4 + 2 + lane / 16));
#endif
#pragma unroll
      for (int c = 0; c < kColumns; c++) {
        uint32 b[4];
        ldmatrix_x4(b, tile_q + (c * 8 + lane % 8) * kPitchQ + step * 64 + lane / 8 * 16);
        mma_cached(s[c], a0, b[0], b[1]);
        mma_cached(kTwoChains ? other[kTwoChains ? c : 0] : s[c], a1, b[2], b[3]);
      }
    }
    if (kTwoChains)
#pragma unroll
      for (int c = 0; c < kColumns; c++)
#pragma unroll
        for (int x = 0; x < 4; x++) s[c][x] += other[kTwoChains ? c : 0][x];
  }

  // Turns scores into probabilities, as the B operand of the product with the values; rescales what came before.
  __device__ __forceinline__ void softmax(uint32 (&probs)[kColumns][2], float (&s)[kColumns][4], const Score& score) {
#pragma unroll
    for (int c = 0; c < kColumns; c++) {
#pragma unroll
      for (int x = 0; x < 2; x++) {
        float m = fmaxf(s[c][x], s[c][x + 2]);
        m = fmaxf(m, __shfl_xor_sync(~0u, m, 4));
        m = fmaxf(m, __shfl_xor_sync(~0u, m, 8));
        m = fmaxf(m, __shfl_xor_sync(~0u, m, 16));
        m = fmaxf(m, row_max[c][x]);
        const float shift = score.shift(m);
        const float correction = exp2_approx(score.exponent(row_max[c][x], shift));
        row_max[c][x] = m;
        s[c][x] = exp2_approx(score.exponent(s[c][x], shift));
        s[c][x + 2] = exp2_approx(score.exponent(s[c][x + 2], shift));
        row_sum[c][x] = row_sum[c][x] * correction + s[c][x] + s[c][x + 2];
#pragma unroll
        for (int i = 0; i < HEAD_DIM_V / 16; i++) {
          acc[i][c][x] *= correction;
          acc[i][c][x + 2] *= correction;
        }
      }
#if FP8_KV
      probs[c][0] = movmatrix_trans(pack_half2(s[c][0], s[c][1]));
      probs[c][1] = movmatrix_trans(pack_half2(s[c][2], s[c][3]));
#else
      probs[c][0] = movmatrix_trans(pack2(s[c][0], s[c][1]));
      probs[c][1] = movmatrix_trans(pack2(s[c][2], s[c][3]));
#endif
    }
  }

  // Adds the values of 16 keys. `chunk(row, c)` is the address of 16 bytes of a value row.
  template <class Chunk>
  __device__ __forceinline__ void add_values(const uint32 (&probs)[kColumns][2], int lane, Chunk chunk) {
#if FP8_KV
#pragma unroll
    for (int i = 0; i < HEAD_DIM_V / 32; i++) {
      uint32 x[4];  // chunk 2i: keys 0 to 7, 8 to 15; chunk 2i + 1: the same
      ldmatrix_x4_trans(x, chunk(lane % 16, i * 2 + lane / 16));
#pragma unroll
      for (int half = 0; half < 2; half++) {
        uint32 a[4];
#pragma unroll
        for (int y = 0; y < 2; y++) {
          // Bytes: two columns of key 2t, two columns of key 2t + 1 -> two keys of the even column, of the odd one.
          const uint32 pairs = __byte_perm(x[half * 2 + y], 0, 0x3120);
          a[y * 2] = fp8_to_half2(pairs);
          a[y * 2 + 1] = fp8_to_half2(pairs >> 16);
        }
#pragma unroll
        for (int c = 0; c < kColumns; c++) mma_cached(acc[i * 2 + half][c], a, probs[c][0], probs[c][1]);
      }
    }
#else
#pragma unroll
    for (int i = 0; i < HEAD_DIM_V / 16; i++) {
      uint32 a[4];
      ldmatrix_x4_trans(a, chunk(lane % 8 + lane / 16 * 8, i * 2 + lane / 8 % 2));
#pragma unroll
      for (int c = 0; c < kColumns; c++) mma_cached(acc[i][c], a, probs[c][0], probs[c][1]);
    }
#endif
  }

  // One slice: the keys from `key`. `edge`: not every row sees all of them.
  template <class ChunkK, class ChunkV>
  __device__ __forceinline__ void add_slice(const DecodeParams& p, const Sequence& seq, const Score& score, int batch,
                                            int first_head, int row_begin, int key, bool edge, uint32 tile_q,
                                            const float* factor, int lane, ChunkK chunk_k, ChunkV chunk_v) {
    float s[kColumns][4];
    scores(s, tile_q, lane, chunk_k);
    // Else the compiler keeps the rows' queries and heads from slice to slice, in registers that 32 rows do not leave.
    if (kColumns >= 4) asm volatile("" : "+r"(row_begin));
#pragma unroll
    for (int c = 0; c < kColumns; c++)
#pragma unroll
      for (int x = 0; x < 4; x++) {
        const int r = c * 8 + lane % 4 * 2 + x % 2, row = row_begin + r, at = key + lane / 4 + x / 2 * 8;
#if FP8_KV
        s[c][x] *= factor[r];
#endif
#if SCORE_CHANGES
        const Score changes(p.score, batch, first_head + p.head_of(row));
        s[c][x] = changes(s[c][x], p.query_of(row), at, seq);
#endif
        if (edge) {
          const int query = min(p.query_of(row), seq.seqlen_q - 1);
          bool visible = at >= seq.low(query) && at < seq.high(query);
#if KEY_MASK
          visible = visible && score.key_visible(at);
#endif
          if (!visible) s[c][x] = -kInfinity;
        }
      }
    uint32 probs[kColumns][2];
    softmax(probs, s, score);
    add_values(probs, lane, chunk_v);
  }
};
