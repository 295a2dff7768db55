// Linear attention, first pass: the state of each segment of keys alone (see parts/linear_tiles.cuh).
//
// One thread block takes one segment of one key head and walks it in tiles of TILE keys through a ring of STAGES buffers.
// A warp owns 16 * SLICES rows of S, so it alone maps its elements of every key, in registers: phi(K)^T is operand A.
// A column of ones beside V gives z.
//
// Compile-time: those of parts/linear_tiles.cuh, SLICES, TILE, STAGES (at least 2), MIN_BLOCKS.
#include "parts/linear_tiles.cuh"
#include "parts/mma_sm80.cuh"

constexpr int kWarps = HEAD_DIM / (16 * SLICES), kThreads = kWarps * 32;
constexpr int kTileBytes = TILE * kPitch, kStageBytes = 2 * kTileBytes;

extern "C" __global__ void __launch_bounds__(kThreads, MIN_BLOCKS) linear_states(const LinearParams p) {
  extern __shared__ __align__(128) char shared[];
  const uint32 ring = shared_address(shared);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int kv_head = blockIdx.x % p.num_kv_heads, rest = blockIdx.x / p.num_kv_heads;
  const int batch = rest % p.batch, segment = rest / p.batch;
  const int begin = segment * p.segment_length, end = min(begin + p.segment_length, p.seqlen_k);
  const int tiles = (end - begin + TILE - 1) / TILE;
  const element* k = p.k + batch * p.k_batch + kv_head * p.k_head + begin * p.k_row;
  const element* v = p.v + batch * p.v_batch + kv_head * p.v_head + begin * p.v_row;

  auto load = [&](int i) {
    if (i < tiles) {
      const uint32 stage = ring + i % STAGES * kStageBytes;
      const int limit = end - begin - i * TILE;
      const int64 row = static_cast<int64>(i) * TILE;
      copy_rows<kThreads, TILE>(stage, k + row * p.k_row, p.k_row, limit, threadIdx.x);
      copy_rows<kThreads, TILE>(stage + kTileBytes, v + row * p.v_row, p.v_row, limit, threadIdx.x);
    }
    copy_commit();  // an empty group keeps the count
  };
#pragma unroll
  for (int i = 0; i < STAGES - 1; i++) load(i);

  float s[SLICES][HEAD_DIM / 8][4], z[SLICES][4];
#pragma unroll
  for (int x = 0; x < SLICES; x++) {
    z[x][0] = z[x][1] = z[x][2] = z[x][3] = 0.f;
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 8; i++) s[x][i][0] = s[x][i][1] = s[x][i][2] = s[x][i][3] = 0.f;
  }

  // ldmatrix rows of this thread: keys are the rows in memory and the inner dimension of the product, so both operands
  // are read transposed.
  const uint32 offset_k = (lane % 8 + lane / 16 * 8) * kPitch + warp * SLICES * 32 + lane / 8 % 2 * 16;
  const uint32 offset_v = kTileBytes + lane % 16 * kPitch + lane / 16 * 16;

#pragma unroll 1
  for (int i = 0; i < tiles; i++) {
    copy_wait<STAGES - 2>();
    __syncthreads();  // tile i has arrived, and all warps are done with tile i - 1, whose buffer comes next
    load(i + STAGES - 1);
    const uint32 stage = ring + i % STAGES * kStageBytes;
    const int limit = end - begin - i * TILE;
#pragma unroll
    for (int step = 0; step < TILE / 16; step++) {
      uint32 a[SLICES][4];
#pragma unroll
      for (int x = 0; x < SLICES; x++) {
        ldmatrix_x4_trans(a[x], stage + offset_k + step * 16 * kPitch + x * 32);
#pragma unroll
        for (int j = 0; j < 4; j++) a[x][j] = features2(a[x][j]);
        if (limit < TILE) {  // phi(0) may be 1: keys past the end must not count
#pragma unroll
          for (int j = 0; j < 4; j++) {
            const int key = step * 16 + j / 2 * 8 + lane % 4 * 2;
            if (key >= limit) a[x][j] = 0;
            else if (key + 1 >= limit) a[x][j] &= 0xffffu;
          }
        }
        mma_16x8x16(z[x], a[x], kOnes, kOnes);
      }
#pragma unroll
      for (int n = 0; n < HEAD_DIM / 16; n++) {
        uint32 b[4];
        ldmatrix_x4_trans(b, stage + offset_v + step * 16 * kPitch + n * 32);
#pragma unroll
        for (int x = 0; x < SLICES; x++) {
          mma_16x8x16(s[x][2 * n], a[x], b[0], b[1]);
          mma_16x8x16(s[x][2 * n + 1], a[x], b[2], b[3]);
        }
      }
    }
  }

  float* const state = p.states + state_offset(p, batch, kv_head, segment);
#pragma unroll
  for (int x = 0; x < SLICES; x++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int row = (warp * SLICES + x) * 16 + lane / 4 + half * 8;
#pragma unroll
      for (int i = 0; i < HEAD_DIM / 8; i++)
        *reinterpret_cast<float2*>(state + row * HEAD_DIM + i * 8 + lane % 4 * 2) =
            make_float2(s[x][i][half * 2], s[x][i][half * 2 + 1]);
      if (lane % 4 == 0) state[kMatrixFloats + row] = z[x][half * 2];
    }
}
