// Attention backward for every GPU from sm_75 on: FlashAttention-2's loop (arXiv 2307.08691, Algorithm 2) on mma.sync.
//
// One thread block takes BLOCK_N keys of one key head and walks, for every query head of the group (or of a part of
// it), the query rows that may see them in tiles of BLOCK_M. Probabilities are computed again from lse; they and dS pass
// through shared memory, because each product is shared out among the warps in its own way. dK and dV stay in registers.
// dQ is added to a float32 buffer that lies in the order of the accumulators' registers, so that a warp adds consecutive
// words; flash_bwd_postprocess brings it into rows. Where the sum has to repeat bitwise, blocks take turns at a tile of
// rows: the block of its last keys first, which is also the block that is started first, so nobody waits for one that is
// not running, and with a causal mask the turns are those in which the blocks come by.
//
// Compile-time: BF16, HEAD_DIM and HEAD_DIM_V (tile widths, multiples of 32), EVEN (the tensors are that wide), BLOCK_M,
// BLOCK_N, NUM_WARPS; SCORE_WARPS_M x SCORE_WARPS_N warps share a tile of scores, the warps that share dK and dV are
// KEY_WARPS along the keys, those of dQ are ROW_WARPS along the rows; STAGES (of the query tiles), MIN_BLOCKS (of an SM),
// DETERMINISTIC, KEY_MASK, SOFTCAP, ALIBI, DROPOUT (which adds a parameter).
#define BIAS 0
#include "parts/dropout.cuh"
#include "parts/element.cuh"
#include "parts/fresh_indices.cuh"
#include "parts/padded_rows.cuh"
#include "parts/score.cuh"
#include "parts/seqlen.cuh"
#include "parts/tile_copy_sm80.cuh"
#include "parts/turns.cuh"
#include "parts/warp_gemm_sm80.cuh"

// The same fields, in the same order, as attention_backend/kernels/backward_params.py: BackwardParams.
struct BackwardParams {
  SequenceParams sequence;
  ScoreParams score;
  const element* q;
  const element* k;
  const element* v;
  const element* grad_out;
  const float* lse2;  // [num_heads, padded_rows], as delta: see flash_bwd_preprocess.cuh
  const float* delta;
  float* dq_sums;  // [num_heads, padded_rows / 16, HEAD_DIM / 8, 128]: see add_tile
  element* dk;     // laid out as dk_*, dv as dv_*
  element* dv;
  float* dk_parts;  // [parts, ...] laid out as dk and dv, or null when there is one part
  float* dv_parts;
  int* turns;  // [num_heads, padded_rows / BLOCK_M] zeros, or null
  int64 q_batch, q_row, q_head;
  int64 k_batch, k_row, k_head;
  int64 v_batch, v_row, v_head;
  int64 grad_out_batch, grad_out_row, grad_out_head;
  int64 dk_batch, dk_row, dk_head, dk_part;
  int64 dv_batch, dv_row, dv_head, dv_part;
  int64 padded_rows;
  int head_dim, head_dim_v;
  int group;  // query heads per key head
  int parts;  // blocks that share them
};

constexpr int kThreads = NUM_WARPS * 32;
using KeyCopy = TileCopy<HEAD_DIM, kThreads>;
using ValueCopy = TileCopy<HEAD_DIM_V, kThreads>;
constexpr int kPitch = KeyCopy::kPitch, kPitchV = ValueCopy::kPitch, kPitchP = BLOCK_N * 2 + 16;

// Every warp's part of the products, in tiles of 16.
constexpr int kScoreRows = BLOCK_M / SCORE_WARPS_M / 16, kScoreKeys = BLOCK_N / SCORE_WARPS_N / 16;
constexpr int kWidthWarps = NUM_WARPS / KEY_WARPS, kKeys = BLOCK_N / KEY_WARPS / 16;
constexpr int kWidth = HEAD_DIM / kWidthWarps / 16, kWidthV = HEAD_DIM_V / kWidthWarps / 16;
constexpr int kRowsWidthWarps = NUM_WARPS / ROW_WARPS, kRows = BLOCK_M / ROW_WARPS / 16;
constexpr int kRowsWidth = HEAD_DIM / kRowsWidthWarps / 16;
constexpr int kPasses = kRows * kRowsWidth > 6 && kRowsWidth % 2 == 0 ? 2 : 1;  // of dQ, for its registers' sake
static_assert(kScoreRows * SCORE_WARPS_M * 16 == BLOCK_M && kScoreKeys * SCORE_WARPS_N * 16 == BLOCK_N, "score warps");
static_assert(kKeys * KEY_WARPS * 16 == BLOCK_N && kWidth * kWidthWarps * 16 == HEAD_DIM, "key warps");
static_assert(kWidthV * kWidthWarps * 16 == HEAD_DIM_V, "key warps");
static_assert(kRows * ROW_WARPS * 16 == BLOCK_M, "row warps");
static_assert(kRowsWidth * kRowsWidthWarps * 16 == HEAD_DIM, "row warps");
static_assert(kRowPadding % BLOCK_M == 0, "a tile of rows is read whole");

// A stage: Q, dO, lse2 and delta of a tile of rows.
constexpr int kStageGrad = BLOCK_M * kPitch, kStageTerms = kStageGrad + BLOCK_M * kPitchV;
constexpr int kStage = kStageTerms + BLOCK_M * 8;

// The tiles of rows that a block walks. In shared memory, behind the stages: registers are what this kernel is short of.
struct Walk {
  int* turn;  // the first thread's: at the rows that were added to last, or null
  int first_tile, end_tile;
  int first_whole, end_whole;  // those of which every row sees all of the block's keys
  int end_head;                // of the block's query heads
  int rows_begin;              // of the sequence, in padded rows
};

__device__ __forceinline__ void store_shared(uint32 address, uint32 x) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(x) : "memory");
}

// What the block added before a barrier comes before its turn's end.
__device__ __forceinline__ void end_turn(int* turn) {
  __threadfence();
  pass_turn(turn);
}

// With a causal mask the first keys have the most rows, and start first, those of all heads side by side; where blocks take
// turns, the last keys do.
__device__ __forceinline__ int first_key_of_block() {
  return static_cast<int>(DETERMINISTIC ? gridDim.y - 1 - block_y() : block_y()) * BLOCK_N;
}

// What of the problem a block takes.
struct Block {
  int batch, kv_head, part;
  int first_key, seqlen_k;  // in the sequence
  int64 dense_batch, row;   // of the key tensors

  __device__ __forceinline__ Block(const BackwardParams& p) {
    const int x = block_x();
    batch = block_z();
    kv_head = x / p.parts;
    part = x % p.parts;
    first_key = first_key_of_block();
    int k_begin = 0;
    seqlen_k = p.sequence.seqlen_k;
    if (p.sequence.cu_seqlens_k) {
      k_begin = p.sequence.cu_seqlens_k[batch];
      seqlen_k = p.sequence.cu_seqlens_k[batch + 1] - k_begin;
    }
    dense_batch = p.sequence.cu_seqlens_k ? 0 : batch;
    row = static_cast<int64>(k_begin) + first_key;
  }

  __device__ __forceinline__ int64 key_offset(int64 batch_stride, int64 head_stride, int64 row_stride) const {
    return dense_batch * batch_stride + kv_head * head_stride + row * row_stride;
  }
};

// Adds an accumulator to 128 consecutive floats, in an order that only the postprocess has to know.
__device__ __forceinline__ void add_tile(float* sums, const float (&acc)[4]) {
  const int lane = threadIdx.x % 32;
#if __CUDA_ARCH__ >= 900
  add4(sums + lane * 4, acc[0], acc[1], acc[2], acc[3]);
#else
#pragma unroll
  for (int j = 0; j < 4; j++) atomicAdd(sums + j * 32 + lane, acc[j]);
#endif
}

// Calls `put(row, column, low, high)` for the pairs of an accumulator, the warp's part of a tile.
template <int ROW_TILES, int COLUMNS8, class Put>
__device__ __forceinline__ void for_pairs(const float (&acc)[ROW_TILES][COLUMNS8][4], int row0, int column0, Put put) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int x = 0; x < ROW_TILES; x++)
#pragma unroll
    for (int i = 0; i < COLUMNS8; i++)
#pragma unroll
      for (int half = 0; half < 2; half++)
        put(row0 + x * 16 + half * 8 + lane / 4, column0 + i * 8 + lane % 4 * 2, acc[x][i][half * 2],
            acc[x][i][half * 2 + 1]);
}

// Stores the rows of a tile in shared memory, 16 bytes a thread.
template <int WIDTH>
__device__ __forceinline__ void store_rows(const char* tile, int pitch, element* out, int64 out_row, int rows,
                                           int width) {
  constexpr int kChunks = WIDTH / 8;
  for (int i = threadIdx.x; i < BLOCK_N * kChunks; i += kThreads) {
    const int row = i / kChunks, chunk = i % kChunks;
    if (row < rows && (EVEN || chunk * 8 < width))
      *reinterpret_cast<uint4*>(out + row * out_row + chunk * 8) =
          *reinterpret_cast<const uint4*>(tile + row * pitch + chunk * 16);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, MIN_BLOCKS) flash_bwd_sm80(const BackwardParams p
#if DROPOUT
                                                                         ,
                                                                         const DropoutParams dropout_params
#endif
) {
  extern __shared__ __align__(128) char shared[];
  const uint32 tile_k = shared_address(shared), tile_v = tile_k + BLOCK_N * kPitch;
  const uint32 tile_p = tile_v + BLOCK_N * kPitchV, tile_ds = tile_p + BLOCK_M * kPitchP;
  const uint32 stages = tile_ds + BLOCK_M * kPitchP;

  const Block block(p);
  const int batch = block.batch, first_key = block.first_key;
  if (first_key >= block.seqlen_k) return;
  const int heads = p.group / p.parts, first_head = block.kv_head * p.group + block.part * heads;
  const Sequence seq(p.sequence, batch);

  volatile Walk& walk = *reinterpret_cast<Walk*>(shared + (stages - tile_k) + STAGES * kStage);
  if (threadIdx.x == 0) {
    const int reaching = seq.first_row_reaching(first_key);
    // A tile is walked when its last row reaches the block's first key, and its first row begins before its last: all
    // that see any of its keys. Turns are counted by the same rule.
    walk.first_tile = reaching / BLOCK_M;
    walk.end_tile = reaching < seq.seqlen_q ? (seq.end_row_beginning(first_key + BLOCK_N) + BLOCK_M - 1) / BLOCK_M : 0;
    walk.first_whole = (seq.first_row_reaching(first_key + BLOCK_N - 1) + BLOCK_M - 1) / BLOCK_M;
    walk.end_whole = seq.end_row_beginning(first_key + 1) / BLOCK_M;
    walk.turn = nullptr;
    walk.end_head = first_head + heads;
    walk.rows_begin = padded_begin(p.sequence.cu_seqlens_q, p.sequence.seqlen_q, batch);
  }
  __syncthreads();
  const bool any = walk.first_tile < walk.end_tile;

#if KEY_MASK
  const uint8* const key_mask = p.score.key_mask + batch * p.score.key_mask_batch;
#endif
  auto key_visible = [&](int key) {
#if KEY_MASK
    return key_mask[key] != 0;
#else
    return true;
#endif
  };

  auto load_keys = [&]() {
    const KeyCopy copy_k;
    const ValueCopy copy_v;
    const int low = seq.low(0), high = seq.high(seq.seqlen_q - 1);  // what no row sees may be NaN, and counts as zero
    auto ok = [&](int r) { return first_key + r >= low && first_key + r < high && key_visible(first_key + r); };
    const element* k = p.k + block.key_offset(p.k_batch, p.k_head, p.k_row);
    const element* v = p.v + block.key_offset(p.v_batch, p.v_head, p.v_row);
    copy_k.template strided<BLOCK_N>(tile_k, k, p.head_dim, p.k_row, ok);
    copy_v.template strided<BLOCK_N>(tile_v, v, p.head_dim_v, p.v_row, ok);
  };
  auto load_rows = [&](uint32 stage, int head, int m) {
    const int first_row = m * BLOCK_M;
    const uint32 thread = thread_index();
    const KeyCopy copy_k(thread);
    const ValueCopy copy_v(thread);
    const int64 terms = head * p.padded_rows + walk.rows_begin + first_row;
    const float* lse2 = p.lse2 + terms;
    const int b = block_z(), dense_b = p.sequence.cu_seqlens_q ? 0 : b;
    const int64 row = (p.sequence.cu_seqlens_q ? p.sequence.cu_seqlens_q[b] : 0) + first_row;
    const element* q_tile = p.q + dense_b * p.q_batch + head * p.q_head + row * p.q_row;
    const element* grad_tile = p.grad_out + dense_b * p.grad_out_batch + head * p.grad_out_head + row * p.grad_out_row;
    if (!KEY_MASK && m >= walk.first_whole && m < walk.end_whole) {
      auto ok = [](int) { return true; };
      copy_k.template strided<BLOCK_M>(stage, q_tile, p.head_dim, p.q_row, ok);
      copy_v.template strided<BLOCK_M>(stage + kStageGrad, grad_tile, p.head_dim_v, p.grad_out_row, ok);
    } else {  // rows that see nothing may be NaN, too
      auto ok = [&](int r) { return lse2[r] != kInfinity; };
      copy_k.template strided<BLOCK_M>(stage, q_tile, p.head_dim, p.q_row, ok);
      copy_v.template strided<BLOCK_M>(stage + kStageGrad, grad_tile, p.head_dim_v, p.grad_out_row, ok);
    }
    for (uint32 i = thread; i < BLOCK_M / 2; i += kThreads) {
      const bool second = i >= BLOCK_M / 4;
      const uint32 at = second ? i - BLOCK_M / 4 : i;
      copy16(stage + kStageTerms + i * 16, (second ? p.delta + terms : lse2) + at * 4, true);
    }
  };

  float dk[kKeys][kWidth * 2][4], dv[kKeys][kWidthV * 2][4];
  clear(dk);
  clear(dv);

  if (any) {
    load_keys();
    load_rows(stages, first_head, walk.first_tile);
    copy_commit();
  }
  int head = first_head, m = walk.first_tile;
  uint32 stage = stages;
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
      load_rows(stages + (stages + kStage - stage), wraps ? head + 1 : head, wraps ? walk.first_tile : m + 1);
      copy_commit();
    }

    if (NUM_WARPS == SCORE_WARPS_M * SCORE_WARPS_N || threadIdx.x < SCORE_WARPS_M * SCORE_WARPS_N * 32) {
      const uint32 thread = thread_index();
      const int lane = thread % 32, warp = thread / 32;
      const int score_row = warp / SCORE_WARPS_N * kScoreRows * 16, score_key = warp % SCORE_WARPS_N * kScoreKeys * 16;
      const Score score(p.score, batch, head);
#if DROPOUT
      const Dropout dropout(dropout_params, batch * static_cast<int>(gridDim.x / p.parts * p.group) + head);
#endif
      float s[kScoreRows][kScoreKeys * 2][4];
      clear(s);
      warp_gemm<HEAD_DIM / 16, false, kPitch, false, kPitch>(s, Operand::by_rows(lane, stage, kPitch, score_row, 0),
                                                             Operand::by_columns(lane, tile_k, kPitch, score_key, 0));

      const uint32 score_at = (score_row + lane / 4) * kPitchP + (score_key + lane % 4 * 2) * 2;
      const float* terms =
          reinterpret_cast<const float*>(shared + (stage - tile_k) + kStageTerms) + score_row + lane / 4;
      const int row0 = first_row + score_row + lane / 4, key0 = first_key_of_block() + score_key + lane % 4 * 2;
#if SOFTCAP
#pragma unroll
      for (int x = 0; x < kScoreRows; x++)
#pragma unroll
        for (int i = 0; i < kScoreKeys * 2; i++)
#pragma unroll
          for (int j = 0; j < 4; j++) s[x][i][j] = score.capped(s[x][i][j]);
#endif
      if (KEY_MASK || m < walk.first_whole || m >= walk.end_whole) {
        const Sequence again(p.sequence, block_z());
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
                if (!(static_cast<uint32>(key - low) < count && key_visible(key))) s[x][i][half * 2 + j] = -kInfinity;
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
              slope[j] = fmaxf(1.f - t / score.softcap * (t / score.softcap), 0.f);
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
            store_shared(tile_p + score_at + (x * 16 + half * 8) * kPitchP + i * 16, word);
          }
        }
      }

      float dp[kScoreRows][kScoreKeys * 2][4];
      clear(dp);
      warp_gemm<HEAD_DIM_V / 16, false, kPitchV, false, kPitchV>(
          dp, Operand::by_rows(lane, stage + kStageGrad, kPitchV, score_row, 0),
          Operand::by_columns(lane, tile_v, kPitchV, score_key, 0));
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
            store_shared(tile_ds + score_at + (x * 16 + half * 8) * kPitchP + i * 16, pack2(ds[0], ds[1]));
          }
        }
    }
    __syncthreads();  // probabilities and dS are there

    {
      const uint32 thread = thread_index();
      const int lane = thread % 32, warp = thread / 32;
      const int key_part = warp / kWidthWarps * kKeys * 16, width_part = warp % kWidthWarps;
      warp_gemm<BLOCK_M / 16, true, kPitchP, true, kPitchV>(
          dv, Operand::by_columns(lane, tile_p, kPitchP, 0, key_part),
          Operand::by_rows(lane, stage + kStageGrad, kPitchV, 0, width_part * kWidthV * 16));
      warp_gemm<BLOCK_M / 16, true, kPitchP, true, kPitch>(
          dk, Operand::by_columns(lane, tile_ds, kPitchP, 0, key_part),
          Operand::by_rows(lane, stage, kPitch, 0, width_part * kWidth * 16));
    }

    if (STAGES == 1 && more) {
      __syncthreads();  // all warps are done with the rows
      load_rows(stage, wraps ? head + 1 : head, wraps ? walk.first_tile : m + 1);
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
            dq, Operand::by_rows(lane, tile_ds, kPitchP, row_part, 0),
            Operand::by_rows(lane, tile_k, kPitch, 0, row_width + pass * kPassWidth * 8));
#if DETERMINISTIC
        if (pass == 0) {
          if (threadIdx.x == 0) {
            const Sequence again(p.sequence, block_z());
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
    if (STAGES == 2) stage = stages + (stages + kStage - stage);
  }

  __syncthreads();  // all warps are done with the keys and values, where dK and dV are staged
#if DETERMINISTIC
  if (any && threadIdx.x == 0) end_turn(walk.turn);
#endif
  const Block again(p);  // rather than registers over the loop
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
    store_shared(tile_k + r * kPitch + c * 2, pack2(low * scale, high * scale));
  });
  for_pairs(dv, key_part, column_v, [&](int r, int c, float low, float high) {
    store_shared(tile_v + r * kPitchV + c * 2, pack2(low * scale_v, high * scale_v));
  });
  __syncthreads();
  store_rows<HEAD_DIM>(shared, kPitch, p.dk + dk_at, p.dk_row, rows, p.head_dim);
  store_rows<HEAD_DIM_V>(shared + BLOCK_N * kPitch, kPitchV, p.dv + dv_at, p.dv_row, rows, p.head_dim_v);
}
