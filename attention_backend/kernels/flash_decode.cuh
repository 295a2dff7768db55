// Attention for few query rows over long contexts (decode): every key and value byte is read once for all query heads
// of its group. Split-KV after "Flash-Decoding" (Dao et al., 2023) with the work shared out on the device
// (parts/decode_plan.cuh).
//
// Operands are swapped: a warp multiplies 16 keys (A) by up to ROWS query rows (B), so few rows waste nothing. Each warp
// streams its own slices of 16 keys through its own ring of STAGES shared memory buffers and keeps its own running
// softmax; the warps of a block meet only at the end of a segment.
//
// Compile-time: BF16, HEAD_DIM, HEAD_DIM_V, EVEN, NUM_WARPS, ROWS (8, 16 or 32), STAGES, MIN_BLOCKS, PAGED, KEY_MASK,
// SOFTCAP, ALIBI, BIAS.
#include "parts/copy_sm80.cuh"
#include "parts/decode_plan.cuh"
#include "parts/element.cuh"
#include "parts/mma_sm80.cuh"
#include "parts/score.cuh"
#include "parts/seqlen.cuh"
#include "parts/softmax.cuh"

// The same fields, in the same order, as attention_backend/kernels/params.py: DecodeParams. Strides are in elements.
struct DecodeParams {
  SequenceParams sequence;
  ScoreParams score;
  const element* q;
  const element* k;
  const element* v;
  element* out;
  float* lse;
  const float* sinks;   // [num_heads] or null
  float* partial_out;   // [slots, group rows, head_dim_v]
  float* partial_lse;   // [slots, group rows], log2
  int* segments;        // [pairs, 2]: first slot and number of segments of each pair
  int64 q_batch, q_row, q_head;
  int64 k_batch, k_row, k_head;
  int64 v_batch, v_row, v_head;
  int64 out_batch, out_row, out_head;
  int64 lse_batch, lse_head;
  int batch, num_kv_heads;
  int head_dim, head_dim_v;
  int group;       // query heads per key head
  int group_rows;  // group * seqlen_q
  int min_tiles;
  int reserved;
};

constexpr int kThreads = NUM_WARPS * 32;
constexpr int kSlice = 16;                  // keys of one step of a warp
constexpr int kTile = kSlice * NUM_WARPS;   // keys of one step of a block
constexpr int kPitchK = HEAD_DIM * 2 + 16;  // bytes of a padded row
constexpr int kPitchV = HEAD_DIM_V * 2 + 16;
constexpr int kStageBytes = kSlice * (kPitchK + kPitchV);
constexpr int kColumns = ROWS / 8;  // tiles of 8 query rows

// Copies 16 rows of WIDTH elements by one warp.
template <int WIDTH, int PITCH, class Source, class Ok>
__device__ __forceinline__ void copy_slice(uint32 destination, int width, int lane, Source source, Ok ok) {
  constexpr int kChunks = WIDTH / 8;
  constexpr int kLanes = kChunks % 16 == 0 ? 16 : kChunks % 8 == 0 ? 8 : 4;
  constexpr int kRowsPerPass = 32 / kLanes;
  const int chunk = lane % kLanes, row = lane / kLanes;
#pragma unroll
  for (int i = 0; i < kSlice / kRowsPerPass; i++) {
    const int r = row + i * kRowsPerPass;
    const bool valid = ok(r);
    const element* from = source(valid ? r : 0) + chunk * 8;
#pragma unroll
    for (int c = 0; c < kChunks / kLanes; c++)
      copy16(destination + r * PITCH + (chunk + c * kLanes) * 16, from + c * kLanes * 8,
             valid && (EVEN || (chunk + c * kLanes) * 8 < width));
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, MIN_BLOCKS) flash_decode(const DecodeParams p) {
  extern __shared__ __align__(128) char shared[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint32 tile_q = shared_address(shared);
  const uint32 ring = tile_q + ROWS * kPitchK + warp * STAGES * kStageBytes;
  float* const merge = reinterpret_cast<float*>(shared + ROWS * kPitchK);  // over the rings, between segments
  int* const prefix = reinterpret_cast<int*>(shared + ROWS * kPitchK + NUM_WARPS * STAGES * kStageBytes);

  DecodePlan plan;
  plan.build<kThreads, kTile>(p.sequence, p.batch, p.num_kv_heads, gridDim.x, p.min_tiles, prefix);

  const int row_begin = blockIdx.y * ROWS;  // of the group's rows: row r is query i = r / group of head r % group
  const int rows = min(ROWS, p.group_rows - row_begin);

  Segment segment;
  while (plan.next(segment, p.sequence)) {
    const Sequence seq(p.sequence, segment.batch);
    int first_tile, end_tile;
    DecodePlan::tile_range<kTile>(seq, first_tile, end_tile);
    const int any_low = seq.low(0), any_high = seq.high(seq.seqlen_q - 1);
    const int all_low = seq.low(seq.seqlen_q - 1), all_high = seq.high(0);
    const int first_head = segment.kv_head * p.group;

    const bool packed = p.sequence.cu_seqlens_q != nullptr;
    const element* q = p.q + (packed ? 0 : segment.batch * p.q_batch);
    for (int i = threadIdx.x; i < ROWS * (HEAD_DIM / 8); i += kThreads) {
      const int r = i / (HEAD_DIM / 8), c = i % (HEAD_DIM / 8);
      const int query = (row_begin + r) / p.group, head = first_head + (row_begin + r) % p.group;
      copy16(tile_q + r * kPitchK + c * 16, r < rows ? q + (seq.q_begin + query) * p.q_row + head * p.q_head + c * 8 : q,
             r < rows && query < seq.seqlen_q && (EVEN || c * 8 < p.head_dim));
    }
    copy_commit();

    const element* k = p.k + segment.kv_head * p.k_head;
    const element* v = p.v + segment.kv_head * p.v_head;
#if PAGED
    const int* table = p.sequence.block_table + segment.batch * p.sequence.block_table_stride;
    const int last_page = (any_high - 1) / p.sequence.page_size;
    const bool uniform = p.sequence.page_shift >= 4;  // a slice never crosses a page
#else
    const bool packed_k = p.sequence.cu_seqlens_k != nullptr;
    k += packed_k ? seq.k_begin * p.k_row : segment.batch * p.k_batch;
    v += packed_k ? seq.k_begin * p.v_row : segment.batch * p.v_batch;
#endif

    // Slice j of this warp holds keys from key0 + j * kTile.
    const int key0 = (first_tile + segment.begin) * kTile + warp * kSlice;
    const int steps = segment.end - segment.begin;
#if PAGED
    // The page of the next slice to load is looked up one slice ahead.
    auto page_of = [&](int key) {
      return uniform ? table[max(min(key >> p.sequence.page_shift, last_page), 0)] : 0;
    };
    int next_page = page_of(key0);
#endif
    auto load = [&](int j) {
      const uint32 stage = ring + (j % STAGES) * kStageBytes;
      const int begin = key0 + j * kTile;
      auto visible = [&](int r) {
        bool ok = begin + r >= any_low && begin + r < any_high;
#if KEY_MASK
        ok = ok && p.score.key_mask[segment.batch * p.score.key_mask_batch + begin + r];
#endif
        return ok;
      };
#if PAGED
      if (uniform) {
        const int page = next_page, in_page = begin & (p.sequence.page_size - 1);
        next_page = page_of(begin + kTile);
        const element* from_k = k + page * p.k_batch + in_page * p.k_row;
        const element* from_v = v + page * p.v_batch + in_page * p.v_row;
        copy_slice<HEAD_DIM, kPitchK>(stage, p.head_dim, lane, [&](int r) { return from_k + r * p.k_row; }, visible);
        copy_slice<HEAD_DIM_V, kPitchV>(
            stage + kSlice * kPitchK, p.head_dim_v, lane, [&](int r) { return from_v + r * p.v_row; }, visible);
      } else {
        auto row_of = [&](const element* base, int64 page, int64 row) {
          return [=, &p](int r) {
            return base + key_offset(p.sequence, table, min(max(begin + r, 0), any_high - 1), page, row);
          };
        };
        if (begin < any_high) {
          copy_slice<HEAD_DIM, kPitchK>(stage, p.head_dim, lane, row_of(k, p.k_batch, p.k_row), visible);
          copy_slice<HEAD_DIM_V, kPitchV>(
              stage + kSlice * kPitchK, p.head_dim_v, lane, row_of(v, p.v_batch, p.v_row), visible);
        }
      }
#else
      const element* from_k = k + begin * p.k_row;
      const element* from_v = v + begin * p.v_row;
      copy_slice<HEAD_DIM, kPitchK>(stage, p.head_dim, lane, [&](int r) { return from_k + r * p.k_row; }, visible);
      copy_slice<HEAD_DIM_V, kPitchV>(
          stage + kSlice * kPitchK, p.head_dim_v, lane, [&](int r) { return from_v + r * p.v_row; }, visible);
#endif
    };

#pragma unroll
    for (int j = 0; j < STAGES - 1; j++) {
      if (j < steps) load(j);
      copy_commit();
    }

    float acc[HEAD_DIM_V / 16][kColumns][4];  // O^T: value columns x query rows
    float row_max[kColumns][2], row_sum[kColumns][2];
#pragma unroll
    for (int c = 0; c < kColumns; c++) {
      row_max[c][0] = row_max[c][1] = -kInfinity;
      row_sum[c][0] = row_sum[c][1] = 0.f;
#pragma unroll
      for (int i = 0; i < HEAD_DIM_V / 16; i++) acc[i][c][0] = acc[i][c][1] = acc[i][c][2] = acc[i][c][3] = 0.f;
    }
    const Score score(p.score, segment.batch, first_head);

    copy_wait<STAGES - 1>();
    __syncthreads();  // every warp's share of the query rows has arrived

#pragma unroll 1
    for (int j = 0; j < steps; j++) {
      copy_wait<STAGES - 2>();
      __syncwarp();
      // The buffer that is filled now is the one that was read in the last step.
      if (j + STAGES - 1 < steps) load(j + STAGES - 1);
      copy_commit();
      const int begin = key0 + j * kTile;
      if (begin >= any_high || begin + kSlice <= any_low) continue;
      const uint32 slice_k = ring + (j % STAGES) * kStageBytes, slice_v = slice_k + kSlice * kPitchK;

      float s[kColumns][4];  // S^T: keys x query rows
#pragma unroll
      for (int c = 0; c < kColumns; c++) s[c][0] = s[c][1] = s[c][2] = s[c][3] = 0.f;
#pragma unroll
      for (int step = 0; step < HEAD_DIM / 32; step++) {
        uint32 a0[4], a1[4];
        ldmatrix_x4(a0, slice_k + lane % 16 * kPitchK + step * 64 + lane / 16 * 16);
        ldmatrix_x4(a1, slice_k + lane % 16 * kPitchK + step * 64 + 32 + lane / 16 * 16);
#pragma unroll
        for (int c = 0; c < kColumns; c++) {
          uint32 b[4];
          ldmatrix_x4(b, tile_q + (c * 8 + lane % 8) * kPitchK + step * 64 + lane / 8 * 16);
          mma_16x8x16(s[c], a0, b[0], b[1]);
          mma_16x8x16(s[c], a1, b[2], b[3]);
        }
      }

      const bool edge = KEY_MASK || begin < all_low || begin + kSlice > all_high;
      uint32 probs[kColumns][2];
#pragma unroll
      for (int c = 0; c < kColumns; c++) {
#pragma unroll
        for (int x = 0; x < 4; x++) {
          const int key = begin + lane / 4 + x / 2 * 8;
          const int r = row_begin + c * 8 + lane % 4 * 2 + x % 2;
#if SCORE_CHANGES
          const Score changes(p.score, segment.batch, first_head + r % p.group);
          s[c][x] = changes(s[c][x], r / p.group, key, seq);
#endif
          if (edge) {
            const int query = min(r / p.group, seq.seqlen_q - 1);
            bool visible = key >= seq.low(query) && key < seq.high(query);
#if KEY_MASK
            visible = visible && score.key_visible(key);
#endif
            if (!visible) s[c][x] = -kInfinity;
          }
        }
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
        probs[c][0] = movmatrix_trans(pack2(s[c][0], s[c][1]));
        probs[c][1] = movmatrix_trans(pack2(s[c][2], s[c][3]));
      }
#pragma unroll
      for (int i = 0; i < HEAD_DIM_V / 16; i++) {
        uint32 a[4];
        ldmatrix_x4_trans(a, slice_v + (lane % 8 + lane / 16 * 8) * kPitchV + i * 32 + lane / 8 % 2 * 16);
#pragma unroll
        for (int c = 0; c < kColumns; c++) mma_16x8x16(acc[i][c], a, probs[c][0], probs[c][1]);
      }
    }

    // The warps' results meet in shared memory: maximum, sum and unnormalised output of every row.
    copy_wait<0>();
    __syncthreads();
    float* const all_max = merge;                           // [warps, ROWS]
    float* const all_sum = all_max + NUM_WARPS * ROWS;      // [warps, ROWS]
    float* const all_acc = all_sum + NUM_WARPS * ROWS;      // [warps, ROWS, HEAD_DIM_V + 4]
    constexpr int kPitchAcc = HEAD_DIM_V + 4;
#pragma unroll
    for (int c = 0; c < kColumns; c++)
#pragma unroll
      for (int x = 0; x < 2; x++) {
        const int r = c * 8 + lane % 4 * 2 + x;
        float l = row_sum[c][x];
        l += __shfl_xor_sync(~0u, l, 4);
        l += __shfl_xor_sync(~0u, l, 8);
        l += __shfl_xor_sync(~0u, l, 16);
        if (lane < 4) {
          all_max[warp * ROWS + r] = row_max[c][x];
          all_sum[warp * ROWS + r] = l;
        }
#pragma unroll
        for (int i = 0; i < HEAD_DIM_V / 16; i++) {
          float* to = all_acc + (warp * ROWS + r) * kPitchAcc + i * 16 + lane / 4;
          to[0] = acc[i][c][x];
          to[8] = acc[i][c][x + 2];
        }
      }
    __syncthreads();

    if (segment.begin == 0 && blockIdx.y == 0 && threadIdx.x == 0) {
      p.segments[2 * segment.pair] = segment.first_slot;
      p.segments[2 * segment.pair + 1] = segment.num_segments;
    }
    for (int r = warp; r < rows; r += NUM_WARPS) {
      const int query = (row_begin + r) / p.group, head = first_head + (row_begin + r) % p.group;
      if (query >= seq.seqlen_q) continue;
      float m = -kInfinity, l = 0.f, weight[NUM_WARPS];
#pragma unroll
      for (int w = 0; w < NUM_WARPS; w++) m = fmaxf(m, all_max[w * ROWS + r]);
      const bool sees = m != -kInfinity;
#pragma unroll
      for (int w = 0; w < NUM_WARPS; w++) {
        weight[w] = sees ? exp2_approx((all_max[w * ROWS + r] - m) * score.scale_log2) : 0.f;
        l += weight[w] * all_sum[w * ROWS + r];
      }
      const bool whole = segment.num_segments == 1;
      const RowEnd end = end_row(m * score.scale_log2, l, whole && p.sinks ? p.sinks + head : nullptr);
      const int64 slot_row = static_cast<int64>(segment.slot) * p.group_rows + row_begin + r;
      element* out = p.out + (packed ? 0 : segment.batch * p.out_batch) +
                     static_cast<int64>(seq.q_begin + query) * p.out_row + head * p.out_head;
      for (int d = lane; d < p.head_dim_v; d += 32) {
        float o = 0.f;
#pragma unroll
        for (int w = 0; w < NUM_WARPS; w++) o += weight[w] * all_acc[(w * ROWS + r) * kPitchAcc + d];
        if (whole)
          out[d] = from_float(o * end.factor);
        else
          p.partial_out[slot_row * p.head_dim_v + d] = o * end.factor;
      }
      if (lane == 0) {
        if (whole)
          p.lse[(packed ? seq.q_begin : segment.batch * p.lse_batch) + head * p.lse_head + query] = end.lse * kLn2;
        else
          p.partial_lse[slot_row] = end.lse;
      }
    }
    __syncthreads();  // the rings and the query rows are free again
  }
}
