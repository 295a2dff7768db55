// Linear attention, last pass without a mask: O = phi(Q) S / (phi(Q) z) with the state of all keys.
//
// One thread block takes block_rows query rows of one head. S lies in shared memory as elements, about a mean (times a
// power of two); z as the sum of two elements, as the first two columns of a tile of its own. Each warp walks its own
// rows, 16 * ROW_TILES at a time, through its own ring of STAGES buffers: after S has come no warp waits for another.
//
// Compile-time: those of parts/linear_tiles.cuh, NORMALIZE, NUM_WARPS, ROW_TILES, STAGES (at least 2), MIN_BLOCKS.
#include "parts/linear_tiles.cuh"
#include "parts/mma_sm80.cuh"

constexpr int kThreads = NUM_WARPS * 32;
constexpr int kRows = 16 * ROW_TILES;
constexpr int kStageBytes = kRows * kPitch;
constexpr int kStateBytes = HEAD_DIM * kPitch;
constexpr int kPairs = HEAD_DIM / 2;

extern "C" __global__ void __launch_bounds__(kThreads, MIN_BLOCKS) linear_full(const LinearParams p) {
  extern __shared__ __align__(128) char shared[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  uint32* const z_parts = reinterpret_cast<uint32*>(shared + kStateBytes);  // [high, low][kPairs]
  const uint32 tile_s = shared_address(shared);
  const uint32 ring = tile_s + kStateBytes + 2 * kPairs * 4 + warp * STAGES * kStageBytes;

  const int head = blockIdx.x % p.num_heads, rest = blockIdx.x / p.num_heads;
  const int batch = rest % p.batch, row_block = rest / p.batch;
  const int begin = row_block * p.block_rows, end = min(begin + p.block_rows, p.seqlen_q);
  const element* q = p.q + batch * p.q_batch + head * p.q_head;
  element* out = p.out + batch * p.out_batch + head * p.out_head;

  auto load = [&](int i) {
    const int first = begin + (warp + i * NUM_WARPS) * kRows;
    if (first < end)
      copy_rows<32, kRows>(ring + i % STAGES * kStageBytes, q + first * p.q_row, p.q_row, end - first, lane);
    copy_commit();  // an empty group keeps the count
  };
#pragma unroll
  for (int i = 0; i < STAGES - 1; i++) load(i);

  const float* state = p.states + state_offset(p, batch, head / p.group, 0);
  const float scale = state_scale(p.seqlen_k), back = inverse_state_scale(p.seqlen_k);
  for (int i = threadIdx.x; i < HEAD_DIM * kPairs; i += kThreads) {
    const float2 x = reinterpret_cast<const float2*>(state)[i];
    *reinterpret_cast<uint32*>(shared + i / kPairs * kPitch + i % kPairs * 4) = pack2(x.x * scale, x.y * scale);
  }
  for (int i = threadIdx.x; i < kPairs; i += kThreads) {
    const float2 x = reinterpret_cast<const float2*>(state + kMatrixFloats)[i];
    split2(x.x * scale, x.y * scale, z_parts[i], z_parts[kPairs + i]);
  }
  __syncthreads();

  // ldmatrix rows of this thread: A from Q, B from S, whose rows are the inner dimension.
  const uint32 offset_q = lane % 16 * kPitch + lane / 16 * 16;
  const uint32 address_s = tile_s + lane % 16 * kPitch + lane / 16 * 16;

#pragma unroll 1
  for (int i = 0;; i++) {
    const int first = begin + (warp + i * NUM_WARPS) * kRows;
    if (first >= end) break;
    __syncwarp();  // all lanes are done with the rows before, whose buffer comes next
    load(i + STAGES - 1);
    copy_wait<STAGES - 1>();
    __syncwarp();
    const uint32 stage = ring + i % STAGES * kStageBytes;

    float acc[ROW_TILES][HEAD_DIM / 8][4], den[ROW_TILES][4];
#pragma unroll
    for (int x = 0; x < ROW_TILES; x++) {
      den[x][0] = den[x][1] = den[x][2] = den[x][3] = 0.f;
#pragma unroll
      for (int n = 0; n < HEAD_DIM / 8; n++) acc[x][n][0] = acc[x][n][1] = acc[x][n][2] = acc[x][n][3] = 0.f;
    }
#pragma unroll
    for (int step = 0; step < HEAD_DIM / 16; step++) {
      uint32 a[ROW_TILES][4];
#pragma unroll
      for (int x = 0; x < ROW_TILES; x++) {
        ldmatrix_x4(a[x], stage + offset_q + x * 16 * kPitch + step * 32);
#pragma unroll
        for (int j = 0; j < 4; j++) a[x][j] = features2(a[x][j]);
      }
      if (NORMALIZE) {
        const uint32* parts = z_parts + (lane / 4) * kPairs + step * 8 + lane % 4;  // column g of the tile, g < 2
        const uint32 z0 = lane < 8 ? parts[0] : 0, z1 = lane < 8 ? parts[4] : 0;
#pragma unroll
        for (int x = 0; x < ROW_TILES; x++) mma_16x8x16(den[x], a[x], z0, z1);
      }
#pragma unroll
      for (int n = 0; n < HEAD_DIM / 16; n++) {
        uint32 b[4];
        ldmatrix_x4_trans(b, address_s + step * 16 * kPitch + n * 32);
#pragma unroll
        for (int x = 0; x < ROW_TILES; x++) {
          mma_16x8x16(acc[x][2 * n], a[x], b[0], b[1]);
          mma_16x8x16(acc[x][2 * n + 1], a[x], b[2], b[3]);
        }
      }
    }

#pragma unroll
    for (int x = 0; x < ROW_TILES; x++) {
      float factor[2] = {back, back};
      if (NORMALIZE)
#pragma unroll
        for (int half = 0; half < 2; half++) {
          float d = den[x][half * 2] + den[x][half * 2 + 1];  // both parts are in the columns of t = 0, the others are 0
          d += __shfl_xor_sync(~0u, d, 1);
          d += __shfl_xor_sync(~0u, d, 2);
          factor[half] = d == 0.f ? 0.f : 1.f / d;  // the scale cancels out
        }
      const int row = first + x * 16 + lane / 4;
      element* const row0 = out + row * p.out_row;
#pragma unroll
      for (int n = 0; n < HEAD_DIM / 16; n++)
        store_block(row0 + n * 16, row0 + 8 * p.out_row + n * 16, row < end, row + 8 < end, acc[x][2 * n],
                    acc[x][2 * n + 1], factor[0], factor[1], lane);
    }
  }
}
