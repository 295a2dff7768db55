// The attention in front of a chain, for rows whose keys are few: computed by the chain's own blocks, so weights fill
// their rings meanwhile and no launch lies between.
//
// A pair is a row and one of its key heads. Slices of 16 of its keys are `parts` blocks' in turn: which pages a block
// reads first does not depend on lengths, so page numbers are on their way with the length. A warp holds a slice in
// registers, 16 bytes of each of its keys a lane and load, which is how tensor cores want them where the order of columns
// inside a product is free: the queries are held alike. Values are turned in registers.
//
// Warps keep running softmaxes of their own. Their sums are added to the block's, which blocks of a pair give each other
// as words (chain_exchange.cuh); each finishes a stretch of the pair's columns. All in a fixed order: results repeat
// bitwise.
#pragma once

#include "parts/chain_exchange.cuh"
#include "parts/mma_sm80.cuh"
#include "parts/vectors.cuh"

constexpr int kSlice = 16;                    // keys of a warp at a time
constexpr int kVectors = HEAD_DIM / 32;       // 16 bytes each that a lane holds of a key
constexpr int kTiles = HEAD_DIM / 16;         // of 16 value columns
constexpr int kQuads = GROUP * HEAD_DIM / 4;  // of a pair's results
static_assert(HEAD_DIM % 32 == 0 && GROUP <= 8);

__device__ __forceinline__ float finite_or_zero(float x) { return x == -kInfinity ? 0.f : x; }

// What a warp leaves in shared memory. Columns of a head are in the order in which fragments hold them: the i-th is
// column_of(i).
struct __align__(16) WarpSums {
  float values[GROUP][HEAD_DIM + 4];  // the four beside them spread lanes over the banks
  float2 top_and_sum[GROUP];
};

__device__ __forceinline__ int column_of(int i) {
  const int vector = i / 32, word = i / 8 % 4, row = i % 8;
  return vector * 32 + row / 2 * 8 + word * 2 + row % 2;
}

// Of a warp's keys: lane 4 * g + c has those of the query heads 2 * c and 2 * c + 1, in powers of two.
struct HeadSums {
  float top[2] = {-kInfinity, -kInfinity};  // the largest score
  float sum[2] = {};                        // of terms; of this lane's keys
  float values[kTiles][4] = {};             // of values: rows g and g + 8 of the transposed output

  // Scores of keys g (the first two) and g + 8; those of keys that are not there are -infinity, and their values zeros.
  __device__ __forceinline__ void add(const float (&scores)[4], const uint4 (&low)[kVectors], const uint4 (&high)[kVectors]) {
    float term[4];
#pragma unroll
    for (int x = 0; x < 2; x++) {
      float highest = fmaxf(scores[x], scores[x + 2]);
#pragma unroll
      for (int d = 4; d < 32; d *= 2) highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, d));
      highest = fmaxf(highest, top[x]);
      const float base = finite_or_zero(highest), correction = exp2_approx(top[x] - base);
      top[x] = highest;
      term[x] = exp2_approx(scores[x] - base), term[x + 2] = exp2_approx(scores[x + 2] - base);
      sum[x] = fmaf(sum[x], correction, term[x] + term[x + 2]);
#pragma unroll
      for (int t = 0; t < kTiles; t++) values[t][x] *= correction, values[t][x + 2] *= correction;
    }
    const uint32 p0 = movmatrix_trans(pack2(term[0], term[1])), p1 = movmatrix_trans(pack2(term[2], term[3]));
#pragma unroll
    for (int i = 0; i < kVectors; i++) {
      const uint32 a[4] = {low[i].x, low[i].y, low[i].z, low[i].w}, b[4] = {high[i].x, high[i].y, high[i].z, high[i].w};
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int w = half * 2;
        const uint32 turned[4] = {movmatrix_trans(a[w]), movmatrix_trans(a[w + 1]), movmatrix_trans(b[w]), movmatrix_trans(b[w + 1])};
        mma_16x8x16(values[i * 2 + half], turned, p0, p1);
      }
    }
  }

  __device__ __forceinline__ void leave(WarpSums& to, int lane) {
    const int g = lane / 4, c = lane % 4;
#pragma unroll
    for (int x = 0; x < 2; x++) {
#pragma unroll
      for (int d = 4; d < 32; d *= 2) sum[x] += __shfl_xor_sync(~0u, sum[x], d);
      const int head = c * 2 + x;
      if (head >= GROUP) continue;
      if (g == 0) to.top_and_sum[head] = make_float2(top[x], sum[x]);
      if (sum[x] == 0.f) continue;  // nobody reads them
#pragma unroll
      for (int t = 0; t < kTiles; t++)
        to.values[head][t * 16 + g] = values[t][x], to.values[head][t * 16 + 8 + g] = values[t][x + 2];
    }
  }
};

class ChainAttending {
 public:
  __device__ __forceinline__ ChainAttending(const ChainParams& p, const Exchange& exchange)
      : p(p), a(p.attention), exchange(exchange) {
    const int pairs = p.rows * a.num_kv_heads, block = static_cast<int>(blockIdx.x);
    pair = block % pairs, part = block / pairs, row = pair / a.num_kv_heads, head = pair % a.num_kv_heads;
  }

  // All warps that compute must call. `scratch`: a WarpSums of each. Leaves this block's words of exchange.attended.
  __device__ __forceinline__ void run(WarpSums* scratch, int lane, int warp) const {
    if (part >= a.parts) return;
    HeadSums sums;
    add_keys(sums, lane, warp);
    sums.leave(scratch[warp], lane);
    named_sync(1, kTeam);
    for (int quad = threadIdx.x; quad < kQuads; quad += kTeam) publish(scratch, quad);
    named_sync(1, kTeam);  // what comes next lies where the warps' sums lie
    const int width = a.parts <= 8 ? 8 : a.parts <= 16 ? 16 : 32;  // lanes of a quad, one a part
    const int last = kQuads * (part + 1) / a.parts;
    for (int first = kQuads * part / a.parts + warp * (32 / width); first < last; first += WARPS * (32 / width))
      finish(first + lane / width, last, lane % width, width);
  }

  // Once all blocks have read what this one left to its pair's. By one warp.
  __device__ __forceinline__ void clear(int lane) const {
    if (part >= a.parts) return;
    for (int i = lane; i < kPartQuads; i += 32) exchange.part(p, pair, part)[i] = make_uint4(0, 0, 0, 0);
  }

 private:
  const ChainParams& p;
  const ChainAttention& a;
  const Exchange& exchange;
  int pair, part, row, head;

  __device__ __forceinline__ void add_keys(HeadSums& sums, int lane, int warp) const {
    const int g = lane / 4, column = lane % 4 * kVector, stride = WARPS * a.parts * kSlice;
    const int* const table = a.block_table + row * a.table_row;
    int first = (warp * a.parts + part) * kSlice + g;  // this lane's keys are this one and the one eight further on
    int low_page = look_up(table, first), high_page = look_up(table, first + 8);
    const int keys = __ldcg(a.seq_lens + row);
    uint4 query[kVectors];
    const element* const q = p.attended + ((static_cast<int64>(row) * a.num_kv_heads + head) * GROUP + g) * HEAD_DIM + column;
#pragma unroll
    for (int i = 0; i < kVectors; i++)
      query[i] = g < GROUP ? __ldcg(reinterpret_cast<const uint4*>(q + i * 32)) : make_uint4(0, 0, 0, 0);
#pragma unroll 1
    for (; first - g < keys; first += stride) {
      const bool low_there = first < keys, high_there = first + 8 < keys;
      uint4 low_k[kVectors], high_k[kVectors], low_v[kVectors], high_v[kVectors];
      bring(low_k, a.k_cache + place(first, low_page, a.k_page, a.k_slot, a.k_head) + column, low_there);
      bring(high_k, a.k_cache + place(first + 8, high_page, a.k_page, a.k_slot, a.k_head) + column, high_there);
      bring(low_v, a.v_cache + place(first, low_page, a.v_page, a.v_slot, a.v_head) + column, low_there);
      bring(high_v, a.v_cache + place(first + 8, high_page, a.v_page, a.v_slot, a.v_head) + column, high_there);
      low_page = look_up(table, first + stride), high_page = look_up(table, first + stride + 8);
      float scores[4] = {};
#pragma unroll
      for (int i = 0; i < kVectors; i++) {
        const uint32 early[4] = {low_k[i].x, high_k[i].x, low_k[i].y, high_k[i].y};
        const uint32 late[4] = {low_k[i].z, high_k[i].z, low_k[i].w, high_k[i].w};
        mma_16x8x16(scores, early, query[i].x, query[i].y);
        mma_16x8x16(scores, late, query[i].z, query[i].w);
      }
#pragma unroll
      for (int x = 0; x < 4; x++)
        scores[x] = (x < 2 ? low_there : high_there) ? scores[x] * a.scale_log2 : -kInfinity;
      sums.add(scores, low_v, high_v);
    }
  }

  __device__ __forceinline__ int look_up(const int* table, int key) const {
    return __ldcg(table + min(static_cast<int>(static_cast<uint32>(key) / a.page_size), a.table_width - 1));
  }

  __device__ __forceinline__ int64 place(int key, int64 page, int64 of_page, int64 of_slot, int64 of_head) const {
    return page * of_page + static_cast<uint32>(key) % a.page_size * of_slot + head * of_head;
  }

  static __device__ __forceinline__ void bring(uint4 (&x)[kVectors], const element* from, bool there) {
#pragma unroll
    for (int i = 0; i < kVectors; i++)
      x[i] = there ? __ldcg(reinterpret_cast<const uint4*>(from + i * 32)) : make_uint4(0, 0, 0, 0);
  }

  // Four columns of the block's result, and with the first ones of a head the logarithm of its sum.
  __device__ __forceinline__ void publish(const WarpSums* scratch, int quad) const {
    const int g = quad * 4 / HEAD_DIM, column = quad * 4 % HEAD_DIM;
    float highest = -kInfinity;
#pragma unroll
    for (int w = 0; w < WARPS; w++) highest = fmaxf(highest, scratch[w].top_and_sum[g].x);
    float sum = 0.f;
    float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
      const float2 of_warp = scratch[w].top_and_sum[g];
      if (of_warp.y == 0.f) continue;
      const float factor = exp2_approx(of_warp.x - finite_or_zero(highest));
      const float4 x = *reinterpret_cast<const float4*>(scratch[w].values[g] + column);
      sum = fmaf(factor, of_warp.y, sum);
      v.x = fmaf(factor, x.x, v.x), v.y = fmaf(factor, x.y, v.y), v.z = fmaf(factor, x.z, v.z), v.w = fmaf(factor, x.w, v.w);
    }
    const float scale = sum == 0.f ? 0.f : 1.f / sum;
    uint4* const to = exchange.part(p, pair, part);
    write_words(to + quad, make_uint4(~__float_as_uint(v.x * scale), ~__float_as_uint(v.y * scale),
                                      ~__float_as_uint(v.z * scale), ~__float_as_uint(v.w * scale)));
    if (column == 0) write_word(reinterpret_cast<uint32*>(to + kQuads) + g, ~__float_as_uint(highest + log2f(sum)));
  }

  // Four columns of the pair's result, by `width` lanes, of which each reads a part.
  __device__ __forceinline__ void finish(int quad, int last, int lane, int width) const {
    const bool here = quad < last;
    float lse = -kInfinity;
    float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
    if (here && lane < a.parts) {
      const uint4* const from = exchange.part(p, pair, lane);
      uint4 x;
      uint32 y;
      do {
        x = read_words(from + quad);
        y = read_word(reinterpret_cast<const uint32*>(from + kQuads) + quad * 4 / HEAD_DIM);
      } while (!all_there(x) || !y);
      lse = __uint_as_float(~y);
      v = make_float4(__uint_as_float(~x.x), __uint_as_float(~x.y), __uint_as_float(~x.z), __uint_as_float(~x.w));
    }
    __syncwarp();
    float highest = lse;
    for (int d = width / 2; d; d /= 2) highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, d));
    float sum = exp2_approx(lse - finite_or_zero(highest));
    v.x *= sum, v.y *= sum, v.z *= sum, v.w *= sum;
    for (int d = width / 2; d; d /= 2) {
      sum += __shfl_xor_sync(~0u, sum, d);
      v.x += __shfl_xor_sync(~0u, v.x, d), v.y += __shfl_xor_sync(~0u, v.y, d);
      v.z += __shfl_xor_sync(~0u, v.z, d), v.w += __shfl_xor_sync(~0u, v.w, d);
    }
    const float scale = sum == 0.f ? 0.f : 1.f / sum;
    if (!here || lane >= 2) return;
    const int column = head * GROUP * HEAD_DIM + quad * 4 / HEAD_DIM * HEAD_DIM + column_of(quad * 4 % HEAD_DIM + lane * 2);
    const uint32 word = lane ? pack2(v.z * scale, v.w * scale) : pack2(v.x * scale, v.y * scale);
    write_word(exchange.attended() + (static_cast<int64>(row) * p.attended_width + column) / 2, ~word);
  }
};
