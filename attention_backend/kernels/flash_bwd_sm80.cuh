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
// KEY_WARPS along the keys, those of dQ are ROW_WARPS along the rows; SPLIT (half of the warps has the probabilities and
// dV, the other dP, dS and dK), STAGES (of the query tiles), MIN_BLOCKS (of an SM), DETERMINISTIC, KEY_MASK, SOFTCAP,
// ALIBI, DROPOUT (which adds a parameter).
#define BIAS 0
#include "parts/backward_sm80_loads.cuh"
#include "parts/backward_sm80_sums.cuh"
#if SPLIT
#include "parts/backward_sm80_halves.cuh"
#else
#include "parts/backward_sm80_whole.cuh"
#endif

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

  KeySums sums;

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

    sums.add(Tile{
        p,
        walk,
        shared,
        seq,
        keys,
#if DROPOUT
        dropout_params,
#endif
        head,
        m,
        stage,
    });

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
      float* dq_sums = p.dq_sums + (sums_row / 16 * (HEAD_DIM / 8) + row_width / 8) * 128;
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
            add_tile(dq_sums + (x * (HEAD_DIM / 8) + pass * kPassWidth + i) * 128, dq[x][i]);
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
  if (p.dk_parts) {
    sums.for_both([&](const auto& sum, bool is_dk, int first_row, int first_column) {
      const float factor = is_dk ? scale : scale_v;
      const int64 stride = is_dk ? p.dk_row : p.dv_row;
      const int width = is_dk ? p.head_dim : p.head_dim_v;
      float* part = is_dk ? p.dk_parts + again.part * p.dk_part + dk_at : p.dv_parts + again.part * p.dv_part + dv_at;
      for_pairs(sum, first_row, first_column, [&](int r, int c, float low, float high) {
        if (r < rows && (EVEN || c < width))
          *reinterpret_cast<float2*>(part + r * stride + c) = make_float2(low * factor, high * factor);
      });
    });
    return;
  }
  sums.for_both([&](const auto& sum, bool is_dk, int first_row, int first_column) {
    const float factor = is_dk ? scale : scale_v;
    const uint32 tile = is_dk ? shared.k : shared.v;
    const int pitch = is_dk ? kPitch : kPitchV;
    for_pairs(sum, first_row, first_column, [&](int r, int c, float low, float high) {
      store_shared(tile + r * pitch + c * 2, pack2(low * factor, high * factor));
    });
  });
  __syncthreads();
  store_rows<HEAD_DIM>(memory, kPitch, p.dk + dk_at, p.dk_row, rows, p.head_dim);
  store_rows<HEAD_DIM_V>(memory + BLOCK_N * kPitch, kPitchV, p.dv + dv_at, p.dv_row, rows, p.head_dim_v);
}
