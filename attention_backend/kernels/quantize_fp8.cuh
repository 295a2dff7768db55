// Queries, keys and values -> e4m3 tiles for flash_fwd_fp8_sm90.cuh, with their scales; zeros where a tile goes beyond
// the sequence. A tile is an image of shared memory: slabs of kWidth bytes a row (32 for values), whose 16-byte chunks
// are swizzled as TMA would do it. Two launches:
//
// PASS 0: a block takes a query tile (a scale per row), a key tile (one scale), or a part of the values (the largest
//   size per channel). With HADAMARD the rows of queries and keys are rotated: random signs, then the Walsh-Hadamard
//   transform, which spreads an outlier over the whole row and leaves products as they are.
// PASS 1: a block takes a value tile: a scale per channel, keys innermost, in the order in which the accumulators of the
//   scores are packed (attention_backend/reference/fp8.py: KEY_ORDER).
//
// Compile-time: BF16, HEAD_DIM, BLOCK_M, BLOCK_N, HADAMARD, PASS.
#include "parts/e4m3.cuh"
#include "parts/element.cuh"

// The same fields, in the same order, as attention_backend/kernels/quantize_fp8.py: QuantizeParams.
struct QuantizeParams {
  const element* q;
  const element* k;
  const element* v;
  uint8* q_out;  // images [batch, num_heads, q_tiles][BLOCK_M * HEAD_DIM]
  uint8* k_out;  // images [batch, num_kv_heads, k_tiles][BLOCK_N * HEAD_DIM]
  uint8* v_out;
  float* q_scale;  // [batch, num_heads, q_tiles * BLOCK_M], times score_scale
  float* k_scale;  // [batch, num_kv_heads, k_tiles]
  float* v_scale;  // [batch, num_kv_heads, HEAD_DIM]
  float* v_amax;   // [batch, num_kv_heads, v_parts, HEAD_DIM]
  int64 q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head;  // strides in elements
  int batch, seqlen_q, seqlen_k, num_heads, num_kv_heads;
  int q_tiles, k_tiles, v_parts, v_part_rows;
  float score_scale;  // softmax scale * log2 e
  uint32 signs[8];    // bit d: element d is negated
};

constexpr int kThreads = 256;
constexpr int kLanes = HEAD_DIM / 8;  // threads of a row, of 8 elements each
constexpr float kSmallest = 1e-8f;  // a row of zeros has a scale, too; the product of two is still above zero

// Where byte `column` of `row` lies in an image of `rows` rows, in slabs of `width` bytes.
template <int width>
__device__ __forceinline__ int image_offset(int row, int column, int rows) {
  const int chunk = column % width / 16 ^ row * width / 128 % (width / 16);
  return column / width * rows * width + row * width + chunk * 16 + column % 16;
}

__device__ __forceinline__ void load8(float (&x)[8], const element* from) {
  const uint4 raw = *reinterpret_cast<const uint4*>(from);
  const element* e = reinterpret_cast<const element*>(&raw);
#pragma unroll
  for (int i = 0; i < 8; i++) x[i] = to_float(e[i]);
}

#if PASS == 0

constexpr int kRows = kThreads / kLanes;
constexpr int kWidth = HEAD_DIM % 128 ? 64 : 128;

// A row, 8 elements in each of kLanes neighbouring threads, times the signs (bit i: this thread's element i is negated)
// and the Hadamard matrix (of +-1).
__device__ __forceinline__ void rotate(float (&x)[8], uint32 signs, int lane) {
#if HADAMARD
#pragma unroll
  for (int i = 0; i < 8; i++) x[i] = __uint_as_float(__float_as_uint(x[i]) ^ (signs << (31 - i) & 0x80000000u));
#pragma unroll
  for (int step = 1; step < 8; step *= 2)
#pragma unroll
    for (int i = 0; i < 8; i++)
      if (!(i & step)) {
        const float a = x[i], b = x[i + step];
        x[i] = a + b;
        x[i + step] = a - b;
      }
#pragma unroll
  for (int step = 1; step < kLanes; step *= 2)
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const float other = __shfl_xor_sync(~0u, x[i], step);
      x[i] = lane & step ? other - x[i] : x[i] + other;
    }
#endif
}

constexpr float kRotation = HADAMARD ? (HEAD_DIM == 64 ? 0.125f : HEAD_DIM == 128 ? 0.08838834764831845f : 0.0625f) : 1.f;

__device__ __forceinline__ float largest(const float (&x)[8]) {
  float m = 0.f;
#pragma unroll
  for (int i = 0; i < 8; i++) m = fmaxf(m, fabsf(x[i]));
  return m;
}

// One tile of `rows` rows, of which `count` exist. With ROW_SCALES each row has a scale, else the tile has, and its rows
// are read and rotated twice: the second time they come from the cache.
template <int rows, bool ROW_SCALES>
__device__ __forceinline__ void quantize_tile(uint8* image, float* scale, float score_scale, const element* from,
                                              int64 row_stride, int count, const uint32 (&all_signs)[8]) {
  static_assert(rows % kRows == 0, "a block takes a tile in whole rounds");
  const int lane = threadIdx.x % kLanes, first = threadIdx.x / kLanes;
  const uint32 signs = all_signs[lane / 4] >> lane % 4 * 8;
  auto load_row = [&](float (&x)[8], int row) {
    if (row < count) {
      load8(x, from + row * row_stride + lane * 8);
    } else {
#pragma unroll
      for (int j = 0; j < 8; j++) x[j] = 0.f;
    }
    rotate(x, signs, lane);
  };
  float most = 0.f;
  if (!ROW_SCALES) {
    __shared__ float warp_largest[kThreads / 32];
#pragma unroll 2
    for (int row = first; row < rows; row += kRows) {
      float x[8];
      load_row(x, row);
      most = fmaxf(most, largest(x));
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
    if (threadIdx.x % 32 == 0) warp_largest[threadIdx.x / 32] = most;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kThreads / 32; i++) most = fmaxf(most, warp_largest[i]);
  }
#pragma unroll 2
  for (int row = first; row < rows; row += kRows) {
    float x[8];
    load_row(x, row);
    if (ROW_SCALES) {
      most = largest(x);
#pragma unroll
      for (int step = 1; step < kLanes; step *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
    }
    most = fmaxf(most, kSmallest);
    const float factor = __fdiv_rn(kE4m3Largest, most);
    if (ROW_SCALES ? lane == 0 : threadIdx.x == 0 && row == 0)
      scale[ROW_SCALES ? row : 0] = __fdiv_rn(most, kE4m3Largest) * kRotation * score_scale;
    *reinterpret_cast<uint2*>(image + image_offset<kWidth>(row, lane * 8, rows)) = {
        pack_e4m3(x[0] * factor, x[1] * factor, x[2] * factor, x[3] * factor),
        pack_e4m3(x[4] * factor, x[5] * factor, x[6] * factor, x[7] * factor)};
  }
}

// The largest size in each channel of `count` rows.
__device__ __forceinline__ void channel_amax(float* amax, const element* from, int64 row_stride, int count) {
  __shared__ float rows[kRows][HEAD_DIM];
  const int lane = threadIdx.x % kLanes, first = threadIdx.x / kLanes;
  float m[8] = {0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f};
#pragma unroll 4
  for (int row = first; row < count; row += kRows) {
    float x[8];
    load8(x, from + row * row_stride + lane * 8);
#pragma unroll
    for (int i = 0; i < 8; i++) m[i] = fmaxf(m[i], fabsf(x[i]));
  }
#pragma unroll
  for (int i = 0; i < 8; i++) rows[first][lane * 8 + i] = m[i];
  __syncthreads();
  if (threadIdx.x < HEAD_DIM) {
    float most = 0.f;
    for (int i = 0; i < kRows; i++) most = fmaxf(most, rows[i][threadIdx.x]);
    amax[threadIdx.x] = most;
  }
}

#endif

extern "C" __global__ void __launch_bounds__(kThreads, 4) quantize_fp8(const __grid_constant__ QuantizeParams p) {
#if PASS == 0
  int task = blockIdx.x;
  if (task < p.batch * p.num_heads * p.q_tiles) {
    const int tile = task % p.q_tiles, head = task / p.q_tiles % p.num_heads, b = task / p.q_tiles / p.num_heads;
    quantize_tile<BLOCK_M, true>(p.q_out + static_cast<int64>(task) * BLOCK_M * HEAD_DIM,
                                 p.q_scale + static_cast<int64>(task) * BLOCK_M, p.score_scale,
                                 p.q + b * p.q_batch + head * p.q_head + static_cast<int64>(tile) * BLOCK_M * p.q_row,
                                 p.q_row, p.seqlen_q - tile * BLOCK_M, p.signs);
    return;
  }
  task -= p.batch * p.num_heads * p.q_tiles;
  if (task < p.batch * p.num_kv_heads * p.k_tiles) {
    const int tile = task % p.k_tiles, head = task / p.k_tiles % p.num_kv_heads, b = task / p.k_tiles / p.num_kv_heads;
    quantize_tile<BLOCK_N, false>(p.k_out + static_cast<int64>(task) * BLOCK_N * HEAD_DIM, p.k_scale + task, 1.f,
                                  p.k + b * p.k_batch + head * p.k_head + static_cast<int64>(tile) * BLOCK_N * p.k_row,
                                  p.k_row, p.seqlen_k - tile * BLOCK_N, p.signs);
    return;
  }
  task -= p.batch * p.num_kv_heads * p.k_tiles;
  const int part = task % p.v_parts, head = task / p.v_parts % p.num_kv_heads, b = task / p.v_parts / p.num_kv_heads;
  const int first = part * p.v_part_rows;
  channel_amax(p.v_amax + static_cast<int64>(task) * HEAD_DIM,
               p.v + b * p.v_batch + head * p.v_head + first * p.v_row, p.v_row,
               min(p.v_part_rows, p.seqlen_k - first));
#else
  __shared__ float factors[HEAD_DIM];
  const int tile = blockIdx.x % p.k_tiles, kv = blockIdx.x / p.k_tiles;
  const int head = kv % p.num_kv_heads, b = kv / p.num_kv_heads;
  if (threadIdx.x < HEAD_DIM) {
    const float* amax = p.v_amax + static_cast<int64>(kv) * p.v_parts * HEAD_DIM + threadIdx.x;
    float most = kSmallest;
    for (int i = 0; i < p.v_parts; i++) most = fmaxf(most, amax[i * HEAD_DIM]);
    factors[threadIdx.x] = __fdiv_rn(kE4m3Largest, most);
    if (tile == 0) p.v_scale[kv * HEAD_DIM + threadIdx.x] = __fdiv_rn(most, kE4m3Largest);
  }
  __syncthreads();
  const element* v = p.v + b * p.v_batch + head * p.v_head + static_cast<int64>(tile) * BLOCK_N * p.v_row;
  const int count = p.seqlen_k - tile * BLOCK_N;
  uint8* image = p.v_out + static_cast<int64>(blockIdx.x) * BLOCK_N * HEAD_DIM;
  // A task: 8 channels of the 4 keys that are neighbours in the order of keys. 8 threads write 32 bytes of a channel.
  for (int task = threadIdx.x; task < BLOCK_N * HEAD_DIM / 32; task += kThreads) {
    const int half = task / 4 % 2, pair = task % 4, channel = task / 8 % kLanes * 8, group = task / 8 / kLanes;
    const int row0 = group * 32 + half * 16 + pair * 2;
    float x[4][8];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int row = row0 + i / 2 * 8 + i % 2;
      if (row < count) {
        load8(x[i], v + row * p.v_row + channel);
      } else {
#pragma unroll
        for (int j = 0; j < 8; j++) x[i][j] = 0.f;
      }
    }
#pragma unroll
    for (int j = 0; j < 8; j++) {
      const float f = factors[channel + j];
      *reinterpret_cast<uint32*>(image + image_offset<32>(channel + j, group * 32 + half * 16 + pair * 4, HEAD_DIM)) =
          pack_e4m3(x[0][j] * f, x[1][j] * f, x[2][j] * f, x[3][j] * f);
    }
  }
#endif
}
