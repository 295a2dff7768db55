// Attention forward for every GPU from sm_75 on: FlashAttention-2's loop (arXiv 2307.08691, Algorithm 1) on mma.sync.
//
// One thread block takes BLOCK_M query rows of one head and walks the keys its rows may see from right to left in tiles
// of BLOCK_N. Warps split the rows, 16 * ROW_TILES each. While the scores of a tile are computed its values arrive, and
// while the softmax runs the next tile's keys arrive. Shared memory rows are padded by 16 bytes, so that every address
// is a thread's base plus a constant and ldmatrix has no bank conflict.
//
// Compile-time: BF16, HEAD_DIM and HEAD_DIM_V (tile widths, multiples of 32), EVEN (the tensors are that wide),
// NUM_WARPS, ROW_TILES, BLOCK_N, MIN_BLOCKS, PAGED, KEY_MASK, SOFTCAP, ALIBI, BIAS (0, 1: float32, 2: element),
// DROPOUT (which adds a parameter).
#include "parts/copy_sm80.cuh"
#include "parts/dropout.cuh"
#include "parts/element.cuh"
#include "parts/forward_params.cuh"
#include "parts/mma_sm80.cuh"
#include "parts/score.cuh"
#include "parts/seqlen.cuh"
#include "parts/softmax.cuh"
#include "parts/tile_copy_sm80.cuh"

constexpr int kThreads = NUM_WARPS * 32;
constexpr int kRowsPerWarp = 16 * ROW_TILES;
constexpr int kBlockM = NUM_WARPS * kRowsPerWarp;

extern "C" __global__ void __launch_bounds__(kThreads, MIN_BLOCKS) flash_fwd_sm80(const ForwardParams p
#if DROPOUT
                                                                                  ,
                                                                                  const DropoutParams dropout_params
#endif
) {
  extern __shared__ __align__(128) char shared[];
  using KeyCopy = TileCopy<HEAD_DIM, kThreads>;
  using ValueCopy = TileCopy<HEAD_DIM_V, kThreads>;
  const uint32 tile_q = shared_address(shared);
  const uint32 tile_k = tile_q + kBlockM * (HEAD_DIM > HEAD_DIM_V ? KeyCopy::kPitch : ValueCopy::kPitch);
  const uint32 tile_v = tile_k + BLOCK_N * KeyCopy::kPitch;

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int head = blockIdx.y, batch = blockIdx.z;
  const Sequence seq(p.sequence, batch);
  // Blocks with the most keys start first.
  const int first_row = (gridDim.x - 1 - blockIdx.x) * kBlockM;
  if (first_row >= seq.seqlen_q) return;
  const int last_row = min(first_row + kBlockM, seq.seqlen_q) - 1;

  const int64 q_base = (p.sequence.cu_seqlens_q ? 0 : batch * p.q_batch) + head * p.q_head;
  const element* q = p.q + q_base + (seq.q_begin + static_cast<int64>(first_row)) * p.q_row;
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
  const Score score(p.score, batch, head);
#if DROPOUT
  const Dropout dropout(dropout_params, batch * gridDim.y + head);
#endif

  // Keys that some row of the block sees, and keys that every row sees.
  const int any_low = seq.low(first_row), any_high = seq.high(last_row);
  const int all_low = seq.low(last_row), all_high = seq.high(first_row);
  const int first_tile = any_low / BLOCK_N;
  const int end_tile = any_high > any_low ? (any_high + BLOCK_N - 1) / BLOCK_N : first_tile;

  const KeyCopy copy_k;
  const ValueCopy copy_v;
  auto load_keys = [&](uint32 tile, int n, auto& copy, const element* base, int64 block, int64 row, int width) {
    const int begin = n * BLOCK_N;
    auto visible = [&](int r) {
      bool ok = begin + r >= any_low && begin + r < any_high;
#if KEY_MASK
      ok = ok && score.key_visible(begin + r);
#endif
      return ok;
    };
#if PAGED
    copy.template operator()<BLOCK_N>(
        tile, base, width, [&](int r) { return key_offset(p.sequence, table, begin + r, block, row); }, visible);
#else
    base += begin * row;
    if (!KEY_MASK && begin >= any_low && begin + BLOCK_N <= any_high)
      copy.template operator()<BLOCK_N>(
          tile, base, width, [&](int r) { return r * row; }, [](int) { return true; });
    else
      copy.template operator()<BLOCK_N>(
          tile, base, width, [&](int r) { return r * row; }, visible);
#endif
  };

  if (end_tile > first_tile) {
    copy_k.template operator()<kBlockM>(
        tile_q, q, p.head_dim, [&](int r) { return r * p.q_row; }, [&](int r) { return first_row + r <= last_row; });
    load_keys(tile_k, end_tile - 1, copy_k, k, p.k_batch, p.k_row, p.head_dim);
    copy_commit();
  }

  float acc[ROW_TILES][HEAD_DIM_V / 8][4];
  float row_max[ROW_TILES][2], row_sum[ROW_TILES][2];
#pragma unroll
  for (int x = 0; x < ROW_TILES; x++) {
    row_max[x][0] = row_max[x][1] = -kInfinity;
    row_sum[x][0] = row_sum[x][1] = 0.f;
#pragma unroll
    for (int i = 0; i < HEAD_DIM_V / 8; i++) acc[x][i][0] = acc[x][i][1] = acc[x][i][2] = acc[x][i][3] = 0.f;
  }

  // ldmatrix row addresses of this thread: A from Q, B from K (rows are n), B from V transposed (rows are k).
  const uint32 address_q = tile_q + (warp * kRowsPerWarp + lane % 16) * KeyCopy::kPitch + (lane / 16) * 16;
  const uint32 address_k = tile_k + (lane % 8 + lane / 16 * 8) * KeyCopy::kPitch + (lane / 8 % 2) * 16;
  const uint32 address_v = tile_v + (lane % 16) * ValueCopy::kPitch + (lane / 16) * 16;

#pragma unroll 1
  for (int n = end_tile - 1; n >= first_tile; n--) {
    copy_wait<0>();
    __syncthreads();
    load_keys(tile_v, n, copy_v, v, p.v_batch, p.v_row, p.head_dim_v);
    copy_commit();

    float s[ROW_TILES][BLOCK_N / 8][4];  // scores: rows of this warp x BLOCK_N keys
#pragma unroll
    for (int x = 0; x < ROW_TILES; x++)
#pragma unroll
      for (int i = 0; i < BLOCK_N / 8; i++) s[x][i][0] = s[x][i][1] = s[x][i][2] = s[x][i][3] = 0.f;
    {
      constexpr int kSteps = HEAD_DIM / 16, kTiles = BLOCK_N / 16;
      uint32 a[2][ROW_TILES][4], b[2][4];
#pragma unroll
      for (int x = 0; x < ROW_TILES; x++) ldmatrix_x4(a[0][x], address_q + x * 16 * KeyCopy::kPitch);
      ldmatrix_x4(b[0], address_k);
#pragma unroll
      for (int step = 0; step < kSteps; step++) {
        if (step + 1 < kSteps)
#pragma unroll
          for (int x = 0; x < ROW_TILES; x++)
            ldmatrix_x4(a[(step + 1) % 2][x], address_q + x * 16 * KeyCopy::kPitch + (step + 1) * 32);
#pragma unroll
        for (int i = 0; i < kTiles; i++) {
          const int at = step * kTiles + i, next = at + 1;
          if (next < kSteps * kTiles)
            ldmatrix_x4(b[next % 2], address_k + (next % kTiles) * 16 * KeyCopy::kPitch + (next / kTiles) * 32);
#pragma unroll
          for (int x = 0; x < ROW_TILES; x++) {
            mma_16x8x16(s[x][2 * i], a[step % 2][x], b[at % 2][0], b[at % 2][1]);
            mma_16x8x16(s[x][2 * i + 1], a[step % 2][x], b[at % 2][2], b[at % 2][3]);
          }
        }
      }
    }

    copy_wait<0>();
    __syncthreads();  // values have arrived; all warps are done with this tile's keys
    if (n > first_tile) {
      load_keys(tile_k, n - 1, copy_k, k, p.k_batch, p.k_row, p.head_dim);
      copy_commit();
    }

    const bool edge = KEY_MASK || n * BLOCK_N < all_low || (n + 1) * BLOCK_N > all_high;
    uint32 probs[ROW_TILES][BLOCK_N / 16][4];
#pragma unroll
    for (int x = 0; x < ROW_TILES; x++) {
      const int row0 = first_row + warp * kRowsPerWarp + x * 16 + lane / 4;
#if SCORE_CHANGES
#pragma unroll
      for (int i = 0; i < BLOCK_N / 8; i++)
#pragma unroll
        for (int j = 0; j < 4; j++)
          s[x][i][j] = score(s[x][i][j], row0 + j / 2 * 8, n * BLOCK_N + i * 8 + lane % 4 * 2 + j % 2, seq);
#endif
      if (edge) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const int low = seq.low(row0 + half * 8);
          const uint32 count = max(seq.high(row0 + half * 8) - low, 0);
          const int key0 = n * BLOCK_N + lane % 4 * 2;
#pragma unroll
          for (int i = 0; i < BLOCK_N / 8; i++)
#pragma unroll
            for (int j = 0; j < 2; j++) {
              bool visible = static_cast<uint32>(key0 + i * 8 + j - low) < count;
#if KEY_MASK
              visible = visible && score.key_visible(key0 + i * 8 + j);
#endif
              if (!visible) s[x][i][half * 2 + j] = -kInfinity;
            }
        }
      }
#pragma unroll
      for (int half = 0; half < 2; half++) {
        float m = row_max[x][half];
#pragma unroll
        for (int i = 0; i < BLOCK_N / 8; i++) m = fmaxf(m, fmaxf(s[x][i][half * 2], s[x][i][half * 2 + 1]));
        m = fmaxf(m, __shfl_xor_sync(~0u, m, 1));
        m = fmaxf(m, __shfl_xor_sync(~0u, m, 2));
        const float shift = score.shift(m);
        const float correction = exp2_approx(score.exponent(row_max[x][half], shift));
        row_max[x][half] = m;
        float sum = 0.f;
#pragma unroll
        for (int i = 0; i < BLOCK_N / 8; i++)
#pragma unroll
          for (int j = 0; j < 2; j++) {
            float e = exp2_approx(score.exponent(s[x][i][half * 2 + j], shift));
            s[x][i][half * 2 + j] = e;
            sum += e;
          }
        row_sum[x][half] = row_sum[x][half] * correction + sum;
#pragma unroll
        for (int i = 0; i < HEAD_DIM_V / 8; i++) {
          acc[x][i][half * 2] *= correction;
          acc[x][i][half * 2 + 1] *= correction;
        }
      }
#pragma unroll
      for (int i = 0; i < BLOCK_N / 16; i++) {
        probs[x][i][0] = pack2(s[x][2 * i][0], s[x][2 * i][1]);
        probs[x][i][1] = pack2(s[x][2 * i][2], s[x][2 * i][3]);
        probs[x][i][2] = pack2(s[x][2 * i + 1][0], s[x][2 * i + 1][1]);
        probs[x][i][3] = pack2(s[x][2 * i + 1][2], s[x][2 * i + 1][3]);
      }
#if DROPOUT
      dropout(probs[x], (first_row + warp * kRowsPerWarp) / 16 + x, n * (BLOCK_N / 16));
#endif
    }

    {
      constexpr int kSteps = BLOCK_N / 16, kTiles = HEAD_DIM_V / 16;
      uint32 b[2][4];
      ldmatrix_x4_trans(b[0], address_v);
#pragma unroll
      for (int at = 0; at < kSteps * kTiles; at++) {
        const int step = at / kTiles, i = at % kTiles, next = at + 1;
        if (next < kSteps * kTiles)
          ldmatrix_x4_trans(b[next % 2], address_v + (next / kTiles) * 16 * ValueCopy::kPitch + (next % kTiles) * 32);
#pragma unroll
        for (int x = 0; x < ROW_TILES; x++) {
          mma_16x8x16(acc[x][2 * i], probs[x][step], b[at % 2][0], b[at % 2][1]);
          mma_16x8x16(acc[x][2 * i + 1], probs[x][step], b[at % 2][2], b[at % 2][3]);
        }
      }
    }
  }

  // A warp stages its own rows where its query rows were (no other warp reads them), then stores 16 bytes a thread.
  const int64 out_base = (p.sequence.cu_seqlens_q ? 0 : batch * p.out_batch) + head * p.out_head;
  char* const stage = shared + warp * kRowsPerWarp * ValueCopy::kPitch;
  __syncthreads();
#pragma unroll
  for (int x = 0; x < ROW_TILES; x++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int r = x * 16 + lane / 4 + half * 8, row = first_row + warp * kRowsPerWarp + r;
      float l = row_sum[x][half];
      l += __shfl_xor_sync(~0u, l, 1);
      l += __shfl_xor_sync(~0u, l, 2);
      RowEnd end = end_row(row_max[x][half] * score.scale_log2, l, p.sinks ? p.sinks + head : nullptr);
#if DROPOUT
      end.factor *= dropout.scale;
#endif
      if (lane % 4 == 0 && row <= last_row)
        p.lse[(p.sequence.cu_seqlens_q ? seq.q_begin : batch * p.lse_batch) + head * p.lse_head + row] = end.lse * kLn2;
#pragma unroll
      for (int i = 0; i < HEAD_DIM_V / 8; i++)
        *reinterpret_cast<uint32*>(stage + r * ValueCopy::kPitch + i * 16 + lane % 4 * 4) =
            pack2(acc[x][i][half * 2] * end.factor, acc[x][i][half * 2 + 1] * end.factor);
    }
  __syncwarp();
  constexpr int kChunks = HEAD_DIM_V / 8;
#pragma unroll
  for (int i = 0; i < kRowsPerWarp * kChunks / 32; i++) {
    const int r = (lane + i * 32) / kChunks, c = (lane + i * 32) % kChunks;
    const int row = first_row + warp * kRowsPerWarp + r;
    if (row <= last_row && (EVEN || c * 8 < p.head_dim_v))
      *reinterpret_cast<uint4*>(p.out + out_base + (seq.q_begin + static_cast<int64>(row)) * p.out_row + c * 8) =
          *reinterpret_cast<const uint4*>(stage + r * ValueCopy::kPitch + c * 16);
  }
}
