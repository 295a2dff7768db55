// Linear attention, last pass under the causal mask: row i sees the keys up to i.
//
// One thread block takes one segment of one head: it starts with the state before the segment and walks it in chunks of
// 64 tokens, O = phi(Q) S + tril(phi(Q) phi(K)^T) V, then S += phi(K)^T V. The state stays in registers all the while:
// a warp owns 16 * SLICES columns of values, and keeps S^T for them, whose accumulators are operand B of phi(Q) S as
// they are. Phi is applied once, in shared memory; the triangle's ten 16 x 16 blocks of scores are shared out over the
// warps and come back through shared memory.
//
// Compile-time: those of parts/linear_tiles.cuh, NORMALIZE, SLICES, PASS_TILES (16-row tiles whose output is in registers
// at a time: 1, 2 or 4), STAGES (1 or 2), MIN_BLOCKS.
#include "parts/linear_tiles.cuh"
#include "parts/mma_sm80.cuh"

constexpr int kWarps = HEAD_DIM / (16 * SLICES), kThreads = kWarps * 32;
constexpr int kTileBytes = kChunk * kPitch, kStageBytes = 3 * kTileBytes;
constexpr int kTiles = kChunk / 16;  // of 16 tokens
constexpr int kPitchP = kChunk * 2 + 16;
constexpr int kPairs = HEAD_DIM / 2;

extern "C" __global__ void __launch_bounds__(kThreads, MIN_BLOCKS) linear_causal(const LinearParams p) {
  extern __shared__ __align__(128) char shared[];
  char* const tile_p = shared + STAGES * kStageBytes;                              // scores, elements
  float* const row_sums = reinterpret_cast<float*>(tile_p + kChunk * kPitchP);     // [block of keys][row]
  uint32* const z_parts = reinterpret_cast<uint32*>(row_sums + kTiles * kChunk);  // [high, low][kPairs]
  const uint32 ring = shared_address(shared), address_p = shared_address(tile_p);

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int head = blockIdx.x % p.num_heads, rest = blockIdx.x / p.num_heads;
  const int batch = rest % p.batch, segment = rest / p.batch, kv_head = head / p.group;
  const int begin = segment * p.segment_length, end = min(begin + p.segment_length, p.seqlen_q);
  const int chunks = (end - begin + kChunk - 1) / kChunk;
  const element* q = p.q + batch * p.q_batch + head * p.q_head + begin * p.q_row;
  const element* k = p.k + batch * p.k_batch + kv_head * p.k_head + begin * p.k_row;
  const element* v = p.v + batch * p.v_batch + kv_head * p.v_head + begin * p.v_row;
  element* out = p.out + batch * p.out_batch + head * p.out_head + begin * p.out_row;

  auto load = [&](int i) {  // queries, keys, values
    if (i < chunks) {
      const uint32 stage = ring + i % STAGES * kStageBytes;
      const int limit = end - begin - i * kChunk;
      const int64 row = static_cast<int64>(i) * kChunk;
      copy_rows<kThreads, kChunk>(stage, q + row * p.q_row, p.q_row, limit, threadIdx.x);
      copy_rows<kThreads, kChunk>(stage + kTileBytes, k + row * p.k_row, p.k_row, limit, threadIdx.x);
      copy_rows<kThreads, kChunk>(stage + 2 * kTileBytes, v + row * p.v_row, p.v_row, limit, threadIdx.x);
    }
    copy_commit();
  };
  load(0);

  // S^T: s[x][i] is the tile of values 16 * slice + (g, g + 8) by key elements 8 i + (2 t, 2 t + 1).
  // z: of the key elements 16 * slice + 8 n + (2 t, 2 t + 1), the same in all rows g.
  float s[SLICES][HEAD_DIM / 8][4], z[SLICES][2][4];
  const int first_slice = warp * SLICES;
  const float* state = p.states + (segment ? state_offset(p, batch, kv_head, segment) : 0);
#pragma unroll
  for (int x = 0; x < SLICES; x++) {
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 8; i++)
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const int row = i * 8 + t * 2 + j % 2, column = (first_slice + x) * 16 + g + j / 2 * 8;
        s[x][i][j] = segment ? state[row * HEAD_DIM + column] : 0.f;
      }
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
      for (int j = 0; j < 4; j++)
        z[x][n][j] = segment ? state[kMatrixFloats + (first_slice + x) * 16 + n * 8 + t * 2 + j % 2] : 0.f;
  }
  auto publish_z = [&](int count) {  // for the chunk behind `count` keys
    if (g == 0)
#pragma unroll
      for (int x = 0; x < SLICES; x++)
#pragma unroll
        for (int n = 0; n < 2; n++) {
          const int pair = (first_slice + x) * 8 + n * 4 + t;
          const float scale = state_scale(count);
          split2(z[x][n][0] * scale, z[x][n][1] * scale, z_parts[pair], z_parts[kPairs + pair]);
        }
  };
  if (NORMALIZE) publish_z(begin);

  // ldmatrix rows of this thread: operand A as it lies in memory, B with n as rows, and both with k as rows (transposed;
  // one read of values is operand A of V^T phi(K) and, in another order, operand B of P V).
  const uint32 offset_a = lane % 16 * kPitch + lane / 16 * 16;
  const uint32 offset_b = (lane % 8 + lane / 16 * 8) * kPitch + lane / 8 % 2 * 16;
  const uint32 offset_p = lane % 16 * kPitchP + lane / 16 * 16;

#pragma unroll 1
  for (int i = 0; i < chunks; i++) {
    const uint32 stage = ring + i % STAGES * kStageBytes;
    const uint32 tile_k = stage + kTileBytes, tile_v = tile_k + kTileBytes;
    copy_wait<0>();
    __syncthreads();  // chunk i has arrived, and all warps are done with chunk i - 1
    if (STAGES == 2) load(i + 1);

#if FEATURES
    {
      constexpr int kVectors = HEAD_DIM / 8;
      char* const tiles = shared + i % STAGES * kStageBytes;  // queries, then keys
#pragma unroll
      for (int j = 0; j < 2 * kChunk * kVectors / kThreads; j++) {
        const int at = threadIdx.x + j * kThreads;
        uint4* const x = reinterpret_cast<uint4*>(tiles + at / kVectors * kPitch + at % kVectors * 16);
        const uint4 y = *x;
        *x = make_uint4(features2(y.x), features2(y.y), features2(y.z), features2(y.w));
      }
    }
    __syncthreads();
#endif

    // Scores of the triangle, and the sums of their rows with what the state adds to the denominator.
    const int count = begin + i * kChunk;  // keys in the state
    const float back = inverse_state_scale(count);
#pragma unroll 1
    for (int task = warp; task < kTiles * (kTiles + 1) / 2; task += kWarps) {
      const int r = task < 1 ? 0 : task < 3 ? 1 : task < 6 ? 2 : 3, c = task - r * (r + 1) / 2;
      float score[2][4] = {}, den[4] = {};
#pragma unroll
      for (int step = 0; step < HEAD_DIM / 16; step++) {
        uint32 a[4], b[4];
        ldmatrix_x4(a, stage + offset_a + r * 16 * kPitch + step * 32);
        ldmatrix_x4(b, tile_k + offset_b + c * 16 * kPitch + step * 32);
        mma_16x8x16(score[0], a, b[0], b[1]);
        mma_16x8x16(score[1], a, b[2], b[3]);
        if (NORMALIZE && r == c) {
          const uint32* parts = z_parts + g * kPairs + step * 8 + t;  // column g of the tile, g < 2
          mma_16x8x16(den, a, g < 2 ? parts[0] : 0, g < 2 ? parts[4] : 0);
        }
      }
#pragma unroll
      for (int half = 0; half < 2; half++) {
        float sum = (den[half * 2] + den[half * 2 + 1]) * back;  // both parts are in the columns of t = 0
#pragma unroll
        for (int n = 0; n < 2; n++) {
#pragma unroll
          for (int j = 0; j < 2; j++) {
            if (r == c && n * 8 + t * 2 + j > g + half * 8) score[n][half * 2 + j] = 0.f;
            sum += score[n][half * 2 + j];
          }
          *reinterpret_cast<uint32*>(tile_p + (r * 16 + g + half * 8) * kPitchP + (c * 16 + n * 8 + t * 2) * 2) =
              pack2(score[n][half * 2], score[n][half * 2 + 1]);
        }
        if (NORMALIZE) {
          sum += __shfl_xor_sync(~0u, sum, 1);
          sum += __shfl_xor_sync(~0u, sum, 2);
          if (t == 0) row_sums[c * kChunk + r * 16 + g + half * 8] = sum;
        }
      }
    }

    const float scale = state_scale(count);
    const int limit = end - begin - i * kChunk;
#pragma unroll
    for (int first = 0; first < kTiles; first += PASS_TILES) {
      // phi(Q) S, of this warp's columns; in the first pass while other warps finish their scores.
      float acc[PASS_TILES][2 * SLICES][4];
#pragma unroll
      for (int m = 0; m < PASS_TILES; m++)
#pragma unroll
        for (int n = 0; n < 2 * SLICES; n++) acc[m][n][0] = acc[m][n][1] = acc[m][n][2] = acc[m][n][3] = 0.f;
      if (count) {
#pragma unroll
        for (int step = 0; step < HEAD_DIM / 16; step++) {
          uint32 b[SLICES][2][2];
#pragma unroll
          for (int x = 0; x < SLICES; x++)
#pragma unroll
            for (int n = 0; n < 2; n++)
#pragma unroll
              for (int j = 0; j < 2; j++)
                b[x][n][j] = pack2(s[x][2 * step + j][2 * n] * scale, s[x][2 * step + j][2 * n + 1] * scale);
#pragma unroll
          for (int m = 0; m < PASS_TILES; m++) {
            uint32 a[4];
            ldmatrix_x4(a, stage + offset_a + (first + m) * 16 * kPitch + step * 32);
#pragma unroll
            for (int x = 0; x < SLICES; x++) {
              mma_16x8x16(acc[m][2 * x], a, b[x][0][0], b[x][0][1]);
              mma_16x8x16(acc[m][2 * x + 1], a, b[x][1][0], b[x][1][1]);
            }
          }
        }
#pragma unroll
        for (int m = 0; m < PASS_TILES; m++)
#pragma unroll
          for (int n = 0; n < 2 * SLICES; n++)
#pragma unroll
            for (int j = 0; j < 4; j++) acc[m][n][j] *= back;
      }

      if (first == 0) __syncthreads();  // all scores have come
#pragma unroll
      for (int c = 0; c < first + PASS_TILES; c++) {
        uint32 b[SLICES][4];
#pragma unroll
        for (int x = 0; x < SLICES; x++)
          ldmatrix_x4_trans(b[x], tile_v + offset_b + c * 16 * kPitch + (first_slice + x) * 32);
#pragma unroll
        for (int m = 0; m < PASS_TILES; m++) {
          if (c > first + m) continue;
          uint32 a[4];
          ldmatrix_x4(a, address_p + offset_p + (first + m) * 16 * kPitchP + c * 32);
#pragma unroll
          for (int x = 0; x < SLICES; x++) {
            mma_16x8x16(acc[m][2 * x], a, b[x][0], b[x][2]);
            mma_16x8x16(acc[m][2 * x + 1], a, b[x][1], b[x][3]);
          }
        }
      }

#pragma unroll
      for (int m = 0; m < PASS_TILES; m++) {
        const int row = (first + m) * 16 + g;
        float factor[2] = {1.f, 1.f};
        if (NORMALIZE)
#pragma unroll
          for (int half = 0; half < 2; half++) {
            float den = 0.f;
#pragma unroll
            for (int c = 0; c <= first + m; c++) den += row_sums[c * kChunk + row + half * 8];
            factor[half] = den == 0.f ? 0.f : 1.f / den;
          }
        element* const row0 = out + (static_cast<int64>(i) * kChunk + row) * p.out_row + first_slice * 16;
#pragma unroll
        for (int x = 0; x < SLICES; x++)
          store_block(row0 + x * 16, row0 + 8 * p.out_row + x * 16, row < limit, row + 8 < limit, acc[m][2 * x],
                      acc[m][2 * x + 1], factor[0], factor[1], lane);
      }
    }

    if (i + 1 < chunks) {  // a chunk with rows behind it is whole
      const uint32 ones[4] = {kOnes, kOnes, kOnes, kOnes};
#pragma unroll
      for (int step = 0; step < kTiles; step++) {
        uint32 a[SLICES][4];
#pragma unroll
        for (int x = 0; x < SLICES; x++)
          ldmatrix_x4_trans(a[x], tile_v + offset_b + step * 16 * kPitch + (first_slice + x) * 32);
#pragma unroll
        for (int j = 0; j < HEAD_DIM / 16; j++) {
          uint32 b[4];
          ldmatrix_x4_trans(b, tile_k + offset_a + step * 16 * kPitch + j * 32);
#pragma unroll
          for (int x = 0; x < SLICES; x++) {
            mma_16x8x16(s[x][2 * j], a[x], b[0], b[1]);
            mma_16x8x16(s[x][2 * j + 1], a[x], b[2], b[3]);
          }
          if (NORMALIZE && j / SLICES == warp) {
            mma_16x8x16(z[j % SLICES][0], ones, b[0], b[1]);
            mma_16x8x16(z[j % SLICES][1], ones, b[2], b[3]);
          }
        }
      }
      if (NORMALIZE) publish_z(count + kChunk);
    }
    if (STAGES == 1) {
      __syncthreads();  // all warps are done with the only buffer
      load(i + 1);
    }
  }
}
