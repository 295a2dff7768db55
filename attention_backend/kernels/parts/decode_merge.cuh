// How a segment ends: the warps' results meet in shared memory; a pair of one segment is done then. Otherwise the
// partial results go to global memory, and the block that arrives last at the counter of the pair and its rows merges all
// of them, always in one order (even segments, odd ones, then both), so that the same call gives the same bits whoever
// comes last. A NaN or Inf that one segment sees comes out as it would of a pair of one segment.
//
// out = sum_s 2^(lse_s - lse) out_s with lse = log2 sum_s 2^lse_s (Flash-Decoding, Dao et al., 2023, second step).
//
// The counter wraps to zero as the last block counts itself, so the next launch finds what this one found. Nobody waits:
// all blocks but the last go on.
#pragma once

#include "parts/decode_plan.cuh"
#include "parts/decode_rows.cuh"
#include "parts/softmax.cuh"

// The `WARPS` warps that own a block's rows; `Sync::sync()` is a barrier among them. `WIDTH` value columns of all rows
// fit into shared memory at once: see kMergeFloats.
template <int WARPS, int WIDTH, class Sync>
struct SegmentEnd {
  static_assert(HEAD_DIM_V % WIDTH == 0 && WIDTH % 32 == 0, "a pass is whole vectors");
  static constexpr int kPitch = WIDTH + 4;
  static constexpr int kMergeFloats = WARPS * ROWS * (kPitch + 2);
  static constexpr int kBlock = 64;                                  // columns of a row that a warp merges
  static constexpr int kBlocks = (HEAD_DIM_V + kBlock - 1) / kBlock;
  static constexpr int kBatch = 8;                                   // segments that a lane loads at once

  const DecodeParams& p;
  const Sequence& seq;
  const Segment& segment;
  const int row_begin, rows;
  float* const shared;  // kMergeFloats, 16-byte aligned
  const int thread, lane, warp;

  __device__ __forceinline__ SegmentEnd(const DecodeParams& params, const Sequence& sequence, const Segment& s,
                                        int first_row, int num_rows, float* merge, int thread_of_team)
      : p(params), seq(sequence), segment(s), row_begin(first_row), rows(num_rows), shared(merge),
        thread(thread_of_team), lane(thread_of_team % 32), warp(thread_of_team / 32) {}

  // All warps must call. On return shared memory is free again.
  __device__ __forceinline__ void finish(const WarpRows& state, float scale_log2) {
    float* const all_max = shared;                   // [WARPS, ROWS]
    float* const all_sum = all_max + WARPS * ROWS;   // [WARPS, ROWS]
    float* const all_acc = all_sum + WARPS * ROWS;   // [WARPS, ROWS, kPitch]
    const bool whole = segment.num_segments == 1;
#if FP8_KV
    const float v_scale = p.v_scale[segment.kv_head];
#else
    constexpr float v_scale = 1.f;
#endif
#pragma unroll
    for (int c = 0; c < kColumns; c++)
#pragma unroll
      for (int x = 0; x < 2; x++) {
        float l = state.row_sum[c][x];
        l += __shfl_xor_sync(~0u, l, 4);
        l += __shfl_xor_sync(~0u, l, 8);
        l += __shfl_xor_sync(~0u, l, 16);
        if (lane < 4) {
          all_max[warp * ROWS + c * 8 + lane * 2 + x] = state.row_max[c][x];
          all_sum[warp * ROWS + c * 8 + lane * 2 + x] = l;
        }
      }
#pragma unroll
    for (int first = 0; first < HEAD_DIM_V; first += WIDTH) {
#pragma unroll
      for (int c = 0; c < kColumns; c++)
#pragma unroll
        for (int x = 0; x < 2; x++)
#pragma unroll
          for (int i = 0; i < WIDTH / 16; i++) {
            float* to = all_acc + (warp * ROWS + c * 8 + lane % 4 * 2 + x) * kPitch + i * 16;
            const float(&from)[4] = state.acc[first / 16 + i][c];
#if FP8_KV  // ldmatrix left even columns in rows 0 to 7 of a tile and odd ones in rows 8 to 15
            *reinterpret_cast<float2*>(to + lane / 4 * 2) = make_float2(from[x], from[x + 2]);
#else
            to[lane / 4] = from[x];
            to[lane / 4 + 8] = from[x + 2];
#endif
          }
      Sync::sync();
      // One item: 4 columns of a row.
      for (int item = thread; item < rows * (WIDTH / 4); item += WARPS * 32) {
        const int r = item / (WIDTH / 4), column = item % (WIDTH / 4) * 4;
        if (p.query_of(row_begin + r) >= seq.seqlen_q) continue;
        float m = -kInfinity, l = 0.f, o[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
        for (int w = 0; w < WARPS; w++) m = fmaxf(m, all_max[w * ROWS + r]);
        const bool sees = m != -kInfinity;
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
          const float weight = sees ? exp2_approx((all_max[w * ROWS + r] - m) * scale_log2) : 0.f;
          const float4 x = *reinterpret_cast<const float4*>(all_acc + (w * ROWS + r) * kPitch + column);
          l += weight * all_sum[w * ROWS + r];
          o[0] += weight * x.x;
          o[1] += weight * x.y;
          o[2] += weight * x.z;
          o[3] += weight * x.w;
        }
        const RowEnd end = end_row(m * scale_log2, l, whole ? sink(r) : nullptr);
        const float factor = end.factor * v_scale;
        const bool first_item = first == 0 && column == 0;
        if (whole) {
          write(r, first + column, make_float4(o[0] * factor, o[1] * factor, o[2] * factor, o[3] * factor));
          if (first_item) write_lse(r, end.lse);
        } else {
          const int64 at = static_cast<int64>(segment.slot) * p.group_rows + row_begin + r;
          *reinterpret_cast<float4*>(p.partial_out + at * HEAD_DIM_V + first + column) =
              make_float4(o[0] * factor, o[1] * factor, o[2] * factor, o[3] * factor);
          if (first_item) p.partial_lse[at] = end.lse;
        }
      }
      Sync::sync();
    }
    if (!whole && arrive()) merge();
  }

 private:
  __device__ __forceinline__ const float* sink(int r) const {
    return p.sinks ? p.sinks + segment.kv_head * p.group + p.head_of(row_begin + r) : nullptr;
  }

  __device__ __forceinline__ void write(int r, int column, float4 o) const {
    if (column >= p.head_dim_v) return;
    const int query = p.query_of(row_begin + r), head = segment.kv_head * p.group + p.head_of(row_begin + r);
    element* out = p.out + (p.sequence.cu_seqlens_q ? 0 : segment.batch * p.out_batch) +
                   (seq.q_begin + static_cast<int64>(query)) * p.out_row + head * p.out_head + column;
    *reinterpret_cast<uint2*>(out) = make_uint2(pack2(o.x, o.y), pack2(o.z, o.w));
  }

  __device__ __forceinline__ void write_lse(int r, float lse) const {
    const int query = p.query_of(row_begin + r), head = segment.kv_head * p.group + p.head_of(row_begin + r);
    p.lse[(p.sequence.cu_seqlens_q ? seq.q_begin : segment.batch * p.lse_batch) + head * p.lse_head + query] =
        lse * kLn2;
  }

  // Counts this block's segment, whose partial results were written before the last barrier. True in the last block,
  // which sees those of the others.
  __device__ __forceinline__ bool arrive() const {
    __shared__ bool is_last;
    if (thread == 0) {
      const uint32 most = segment.num_segments - 1;
      int* const counter = p.counters + segment.pair * gridDim.z + blockIdx.z;
      uint32 before;
      asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
                   : "=r"(before)
                   : "l"(counter), "r"(most)
                   : "memory");
      is_last = before == most;
    }
    Sync::sync();
    return is_last;
  }

  // A warp takes a block of columns of a row, a lane 4 of them from every second segment.
  __device__ __forceinline__ void merge() const {
    const int half = lane / 16;
#pragma unroll 1
    for (int unit = warp; unit < rows * kBlocks; unit += WARPS) {
      const int r = unit / kBlocks, column = unit % kBlocks * kBlock + lane % 16 * 4;
      if (p.query_of(row_begin + r) >= seq.seqlen_q) continue;
      const bool there = column < HEAD_DIM_V;
      const int64 first = static_cast<int64>(segment.first_slot) * p.group_rows + row_begin + r;
      const float* const lse_of = p.partial_lse + first;
      const float* const out_of = p.partial_out + first * HEAD_DIM_V + column;
      float top = -kInfinity, total = 0.f, o[4] = {0.f, 0.f, 0.f, 0.f};
      auto rescale = [&](float m) {
        const float factor = m == -kInfinity ? 0.f : exp2_approx(top - m);
        top = m;
        total *= factor;
#pragma unroll
        for (int j = 0; j < 4; j++) o[j] *= factor;
      };
#pragma unroll 1
      for (int s0 = half; s0 < segment.num_segments + half; s0 += 2 * kBatch) {
        float lse[kBatch];
        float4 x[kBatch];
        float m = top;
#pragma unroll
        for (int i = 0; i < kBatch; i++) {
          const int s = s0 + 2 * i;
          const uint32 row = s * p.group_rows;
          const bool in = s < segment.num_segments;
          lse[i] = in ? __ldcg(lse_of + row) : -kInfinity;
          x[i] = in && there ? __ldcg(reinterpret_cast<const float4*>(out_of + row * HEAD_DIM_V)) : float4{};
        }
#pragma unroll
        for (int i = 0; i < kBatch; i++) m = fmaxf(m, lse[i]);
        rescale(m);
        const float shift = m == -kInfinity ? 0.f : m;  // of scores that are all NaN, too
#pragma unroll
        for (int i = 0; i < kBatch; i++) {
          const float weight = exp2_approx(lse[i] - shift);
          total += weight;
          o[0] += weight * x[i].x;
          o[1] += weight * x[i].y;
          o[2] += weight * x[i].z;
          o[3] += weight * x[i].w;
        }
      }
      rescale(fmaxf(top, __shfl_xor_sync(~0u, top, 16)));
      total += __shfl_xor_sync(~0u, total, 16);
#pragma unroll
      for (int j = 0; j < 4; j++) o[j] += __shfl_xor_sync(~0u, o[j], 16);
      const RowEnd end = end_row(top, total, sink(r));
      if (half == 0)
        write(r, column, make_float4(o[0] * end.factor, o[1] * end.factor, o[2] * end.factor, o[3] * end.factor));
      if (unit % kBlocks == 0 && lane == 0) write_lse(r, end.lse);
    }
  }
};
