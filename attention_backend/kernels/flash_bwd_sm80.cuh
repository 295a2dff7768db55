// Attention backward for every GPU from sm_75 on: FlashAttention-2's loop (arXiv 2307.08691, Algorithm 2) on mma.sync.
//
// One thread block takes BLOCK_N keys of one key head and walks, for every query head of the group (or of a part of
// it), the query rows that may see them in tiles of BLOCK_M. Probabilities are computed again from lse; they and dS pass
// through shared memory, because each product is shared out among the warps in its own way. dK and dV stay in registers.
// dQ is added to a float32 buffer that lies in the order of the accumulators' registers, so that a warp adds consecutive
// words; flash_bwd_postprocess brings it into rows. Where the sum has to repeat bitwise, blocks take turns at a tile of
// rows: the block of its last keys first, which of all blocks that add to these rows (one line of one section) is also the
// first to be started, so nobody waits for one that is not running, and with a causal mask the turns are those in which
// the blocks come by.
//
// Compile-time: BF16, HEAD_DIM and HEAD_DIM_V (tile widths, multiples of 32), EVEN (the tensors are that wide), BLOCK_M,
// BLOCK_N, NUM_WARPS; SCORE_WARPS_M x SCORE_WARPS_N warps share a tile of scores, the warps that share dK and dV are
// KEY_WARPS along the keys, those of dQ are ROW_WARPS along the rows; STAGES (of the query tiles), MIN_BLOCKS (of an SM),
// DETERMINISTIC, KEY_MASK, SOFTCAP, ALIBI, DROPOUT (which adds a parameter).
#define BIAS 0
#include "parts/backward_sm80_loads.cuh"
#include "parts/backward_sm80_scores.cuh"
#include "parts/backward_sm80_sums.cuh"

extern "C" __global__ void __launch_bounds__(kThreads, MIN_BLOCKS) flash_bwd_sm80(const BackwardParams p
#if DROPOUT
                                                                         ,
                                                                         const DropoutParams dropout_params
#endif
) {
  extern __shared__ __align__(128) char memory[];
  const Shared shared(memory);

  if (line_of_block() >= p.lines) return;
  const Block block(p);
  const int batch = block.batch, first_key = block.first_key;
  if (first_key >= block.seqlen_k) return;
  const int heads = p.group / p.parts, first_head = block.kv_head * p.group + block.part * heads;
  const Sequence seq(p.sequence, batch);

  volatile Walk& walk = shared.walk();
  if (threadIdx.x == 0) {
    plan(walk, p, seq, batch, first_key, first_head + heads);
    block.keep(walk);
  }
  __syncthreads();
  const bool any = walk.first_tile < walk.end_tile;

  const KeyMask keys(p, batch);

  auto load_keys = [&]() {
    const KeyCopy copy_k;
    const ValueCopy copy_v;
    const int low = seq.low(0), high = seq.high(seq.seqlen_q - 1);  // what no row sees may be NaN, and counts as zero
    auto ok = [&](int r) { return first_key + r >= low && first_key + r < high && keys.sees(first_key + r); };
    const element* k = p.k + block.key_offset(p.k_batch, p.k_head, p.k_row);
    const element* v = p.v + block.key_offset(p.v_batch, p.v_head, p.v_row);
    copy_k.template strided<BLOCK_N>(shared.k, k, p.head_dim, p.k_row, ok);
    copy_v.template strided<BLOCK_N>(shared.v, v, p.head_dim_v, p.v_row, ok);
  };

  float dk[kKeys][kWidth * 2][4], dv[kKeys][kWidthV * 2][4];
  clear(dk);
  clear(dv);

  if (any) {
    load_keys();
    load_rows(p, walk, shared.stages, first_head, walk.first_tile);
    copy_commit();
  }
  int head = first_head, m = walk.first_tile;
  uint32 stage = shared.stages;
#pragma unroll 1
  for (bool more = any; more;) {
    const int first_row = m * BLOCK_M;
    copy_wait<0>();
    __syncthreads();  // this step's tiles have arrived; all warps are done with the last step's
#if DETERMINISTIC
    if (threadIdx.x == 0) {
      if (walk.turn) end_turn(walk.turn);
      walk.turn = p.turns + (head * p.padded_rows + walk.rows_begin + first_row) / BLOCK_M;
    }
#endif
    const bool wraps = m + 1 == walk.end_tile;
    more = !wraps || head + 1 < walk.end_head;
    if (STAGES == 2 && more) {
      load_rows(p, walk, shared.stages + (shared.stages + kStage - stage), wraps ? head + 1 : head,
                wraps ? walk.first_tile : m + 1);
      copy_commit();
    }

    if (NUM_WARPS == SCORE_WARPS_M * SCORE_WARPS_N || threadIdx.x < SCORE_WARPS_M * SCORE_WARPS_N * 32) {
      const uint32 thread = thread_index();
      const int lane = thread % 32, warp = thread / 32;
      const int score_row = warp / SCORE_WARPS_N * kScoreRows * 16, score_key = warp % SCORE_WARPS_N * kScoreKeys * 16;
      const Score score(p.score, walk.batch, head);
#if DROPOUT
      const Dropout dropout(dropout_params, walk.batch * p.kv_heads * p.group + head);
#endif
      float s[kScoreRows][kScoreKeys * 2][4];
      clear(s);
      warp_gemm<HEAD_DIM / 16, false, kPitch, false, kPitch>(s, Operand::by_rows(lane, stage, kPitch, score_row, 0),
                                                             Operand::by_columns(lane, shared.k, kPitch, score_key, 0));

      const uint32 score_at = (score_row + lane / 4) * kPitchP + (score_key + lane % 4 * 2) * 2;
      const float* terms = shared.terms(stage) + score_row + lane / 4;
      const int row0 = first_row + score_row + lane / 4, key0 = first_key_of_block() + score_key + lane % 4 * 2;
#if SOFTCAP
      cap_scores(s, score);
#endif
      if (KEY_MASK || m < walk.first_whole || m >= walk.end_whole) {
        const Sequence again(p.sequence, walk.batch);
#pragma unroll
        for (int x = 0; x < kScoreRows; x++)
#pragma unroll
          for (int half = 0; half < 2; half++) {
            const int low = again.low(row0 + x * 16 + half * 8);
            const uint32 count = max(again.high(row0 + x * 16 + half * 8) - low, 0);
#pragma unroll
            for (int i = 0; i < kScoreKeys * 2; i++)
#pragma unroll
              for (int j = 0; j < 2; j++) {
                const int key = key0 + i * 8 + j;
                if (!(static_cast<uint32>(key - low) < count && keys.sees(key))) s[x][i][half * 2 + j] = -kInfinity;
              }
          }
      }
#pragma unroll
      for (int x = 0; x < kScoreRows; x++) {
#if DROPOUT
        uint32 kept[kScoreKeys][4];
#pragma unroll
        for (int i = 0; i < kScoreKeys; i++) kept[i][0] = kept[i][1] = kept[i][2] = kept[i][3] = ~0u;
        dropout(kept, (first_row + score_row) / 16 + x, key0 / 16);
#endif
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const float lse2 = terms[x * 16 + half * 8];
#pragma unroll
          for (int i = 0; i < kScoreKeys * 2; i++) {
            float prob[2], slope[2] = {1.f, 1.f};
#pragma unroll
            for (int j = 0; j < 2; j++) {
              float t = s[x][i][half * 2 + j];
#if SOFTCAP
              // Of a hidden score too, which is -inf.
              slope[j] = fmaxf(1.f - t * score.per_softcap * (t * score.per_softcap), 0.f);
#elif SCORE_CHANGES
              t = score.capped(t);
#endif
#if SCORE_CHANGES
              t = score.biased(t, row0 + x * 16 + half * 8, key0 + i * 8 + j, seq);
#endif
              prob[j] = exp2_approx(fmaf(t, score.scale_log2, -lse2));
            }
            uint32 word = pack2(prob[0], prob[1]);
#if DROPOUT
            // Below, a dropped one is known by its sign.
            const uint32 mask = kept[i / 2][i % 2 * 2 + half];
            word &= mask;
            if (!(mask & 0xffffu)) slope[0] = -slope[0];
            if (!(mask >> 16)) slope[1] = -slope[1];
#endif
#pragma unroll
            for (int j = 0; j < 2; j++) s[x][i][half * 2 + j] = SOFTCAP || DROPOUT ? prob[j] * slope[j] : prob[j];
            store_shared(shared.probs + score_at + (x * 16 + half * 8) * kPitchP + i * 16, word);
          }
        }
      }

      float dp[kScoreRows][kScoreKeys * 2][4];
      clear(dp);
      warp_gemm<HEAD_DIM_V / 16, false, kPitchV, false, kPitchV>(
          dp, Operand::by_rows(lane, stage + kStageGrad, kPitchV, score_row, 0),
          Operand::by_columns(lane, shared.v, kPitchV, score_key, 0));
#pragma unroll
      for (int x = 0; x < kScoreRows; x++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const float delta = terms[BLOCK_M + x * 16 + half * 8];
#pragma unroll
          for (int i = 0; i < kScoreKeys * 2; i++) {
            float ds[2];
#pragma unroll
            for (int j = 0; j < 2; j++) {
              const float prob = s[x][i][half * 2 + j], gradient = dp[x][i][half * 2 + j];
#if DROPOUT
              ds[j] = fabsf(prob) * fmaf(gradient, __float_as_int(prob) < 0 ? 0.f : dropout.scale, -delta);
#else
              ds[j] = prob * (gradient - delta);
#endif
            }
            store_shared(shared.ds + score_at + (x * 16 + half * 8) * kPitchP + i * 16, pack2(ds[0], ds[1]));
          }
        }
    }
    __syncthreads();  // probabilities and dS are there

    add_rows(dk, dv, shared, stage);

    if (STAGES == 1 && more) {
      __syncthreads();  // all warps are done with the rows
      load_rows(p, walk, stage, wraps ? head + 1 : head, wraps ? walk.first_tile : m + 1);
      copy_commit();
    }

    {
      const uint32 thread = thread_index();
      const int lane = thread % 32, warp = thread / 32;
      const int row_part = warp / kRowsWidthWarps * kRows * 16, row_width = warp % kRowsWidthWarps * kRowsWidth * 16;
      const int64 sums_row = head * p.padded_rows + walk.rows_begin + first_row + row_part;
      float* sums = p.dq_sums + (sums_row / 16 * (HEAD_DIM / 8) + row_width / 8) * 128;
      constexpr int kPassWidth = kRowsWidth / kPasses * 2;
#pragma unroll
      for (int pass = 0; pass < kPasses; pass++) {
        float dq[kRows][kPassWidth][4];
        clear(dq);
        warp_gemm<BLOCK_N / 16, false, kPitchP, true, kPitch>(
            dq, Operand::by_rows(lane, shared.ds, kPitchP, row_part, 0),
            Operand::by_rows(lane, shared.k, kPitch, 0, row_width + pass * kPassWidth * 8));
#if DETERMINISTIC
        if (pass == 0) {
          if (threadIdx.x == 0) {
            const Sequence again(p.sequence, walk.batch);
            const int last_key = again.high(min(first_row + BLOCK_M, again.seqlen_q) - 1) - 1;
            await_turn(walk.turn, (last_key - first_key_of_block()) / BLOCK_N);
          }
          __syncthreads();
        }
#endif
#pragma unroll
        for (int x = 0; x < kRows; x++)
#pragma unroll
          for (int i = 0; i < kPassWidth; i++)
            add_tile(sums + (x * (HEAD_DIM / 8) + pass * kPassWidth + i) * 128, dq[x][i]);
      }
    }
    m++;
    if (m == walk.end_tile) {
      m = walk.first_tile;
      head++;
    }
    if (STAGES == 2) stage = shared.stages + (shared.stages + kStage - stage);
  }

  __syncthreads();  // all warps are done with the keys and values, where dK and dV are staged
#if DETERMINISTIC
  if (any && threadIdx.x == 0) end_turn(walk.turn);
#endif
  const Block again(p, walk);  // rather than registers over the loop
  const int rows = min(BLOCK_N, again.seqlen_k - again.first_key);
  const int64 dk_at = again.key_offset(p.dk_batch, p.dk_head, p.dk_row);
  const int64 dv_at = again.key_offset(p.dv_batch, p.dv_head, p.dv_row);
  const float scale = p.score.softmax_scale;
#if DROPOUT
  const float scale_v = dropout_params.scale;
#else
  const float scale_v = 1.f;
#endif
  const int warp = thread_index() / 32, key_part = warp / kWidthWarps * kKeys * 16, width_part = warp % kWidthWarps;
  const int column = width_part * kWidth * 16, column_v = width_part * kWidthV * 16;
  if (p.dk_parts) {
    float* dk_part = p.dk_parts + again.part * p.dk_part + dk_at;
    float* dv_part = p.dv_parts + again.part * p.dv_part + dv_at;
    for_pairs(dk, key_part, column, [&](int r, int c, float low, float high) {
      if (r < rows && (EVEN || c < p.head_dim))
        *reinterpret_cast<float2*>(dk_part + r * p.dk_row + c) = make_float2(low * scale, high * scale);
    });
    for_pairs(dv, key_part, column_v, [&](int r, int c, float low, float high) {
      if (r < rows && (EVEN || c < p.head_dim_v))
        *reinterpret_cast<float2*>(dv_part + r * p.dv_row + c) = make_float2(low * scale_v, high * scale_v);
    });
    return;
  }
  for_pairs(dk, key_part, column, [&](int r, int c, float low, float high) {
    store_shared(shared.k + r * kPitch + c * 2, pack2(low * scale, high * scale));
  });
  for_pairs(dv, key_part, column_v, [&](int r, int c, float low, float high) {
    store_shared(shared.v + r * kPitchV + c * 2, pack2(low * scale_v, high * scale_v));
  });
  __syncthreads();
  store_rows<HEAD_DIM>(memory, kPitch, p.dk + dk_at, p.dk_row, rows, p.head_dim);
  store_rows<HEAD_DIM_V>(memory + BLOCK_N * kPitch, kPitchV, p.dv + dv_at, p.dv_row, rows, p.head_dim_v);
}
