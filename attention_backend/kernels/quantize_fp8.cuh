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

constexpr int kThreads = BLOCK_N * HEAD_DIM / 64;  // 64 values of a key tile each
constexpr int kBlocks = (PASS == 0 ? 640 : 960) / kThreads;  // of an SM: what registers leave room for
constexpr float kSmallest = 1e-8f;  // a row of zeros has a scale, too; the product of two is still above zero

// Where byte `column` of `row` lies in an image of `rows` rows, in slabs of `width` bytes.
template <int width>
__device__ __forceinline__ uint32 image_offset(uint32 row, uint32 column, uint32 rows) {
  const uint32 chunk = column % width / 16 ^ row * width / 128 % (width / 16);
  return column / width * rows * width + row * width + chunk * 16 + column % 16;
}

// 8 elements that nobody reads again: the cache is for values, which both launches read.
__device__ __forceinline__ uint4 load_last(const element* from) {
  return __ldcs(reinterpret_cast<const uint4*>(from));
}

__device__ __forceinline__ void unpack8(float* x, uint4 raw) {
  const uint32 words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float2 two = unpack2(words[i]);
    x[2 * i] = two.x;
    x[2 * i + 1] = two.y;
  }
}

#if PASS == 0

// Of queries and keys 8 threads have a row: lane l has columns 64 c + 8 l + i as x[8 c + i], i < 8.
constexpr int kLanes = 8, kChunks = HEAD_DIM / 64, kValues = 8 * kChunks, kRows = kThreads / kLanes;
constexpr int kWidth = HEAD_DIM % 128 ? 64 : 128;

// A row times the Hadamard matrix (of +-1), from the lowest bit of the column to the highest. A butterfly of two lanes
// would move all their values; instead they exchange halves, so that the bit of the lane becomes one of the index, and
// in the end lane l has columns 8 j + l of each 64. Index i of lane l holds what belongs at i ^ l: so every lane sends the
// same registers, and a sign says which of two places a sum takes. The columns stay so (reference/fp8.py: rotate).
__device__ __forceinline__ void transform(float (&x)[kValues], int lane) {
#pragma unroll
  for (int step = 1; step < 8; step *= 2)
#pragma unroll
    for (int i = 0; i < kValues; i++)
      if (!(i & step)) {
        const float sign = lane & step ? -1.f : 1.f, a = x[i], b = x[i + step];
        x[i] = fmaf(sign, b, a);
        x[i + step] = fmaf(-sign, b, a);
      }
#pragma unroll
  for (int step = 1; step < 8; step *= 2)
#pragma unroll
    for (int i = 0; i < kValues; i++)
      if (!(i & step)) {
        const float sign = lane & step ? -1.f : 1.f, a = x[i], b = __shfl_xor_sync(~0u, x[i + step], step);
        x[i] = fmaf(sign, a, b);
        x[i + step] = fmaf(-sign, b, a);
      }
#pragma unroll
  for (int step = 8; step < kValues; step *= 2)
#pragma unroll
    for (int i = 0; i < kValues; i++)
      if (!(i & step)) {
        const float a = x[i], b = x[i + step];
        x[i] = a + b;
        x[i + step] = a - b;
      }
}

constexpr float kRotation = HADAMARD ? (HEAD_DIM == 64 ? 0.125f : HEAD_DIM == 128 ? 0.08838834764831845f : 0.0625f) : 1.f;

// One tile of `rows` rows, of which `count` exist. With ROW_SCALES each row has a scale, else the tile has: then its rows
// stay in registers until the largest value of all is known.
template <int rows, bool ROW_SCALES>
__device__ __forceinline__ void quantize_tile(uint8* image, float* scale, float score_scale, const element* from,
                                              int64 row_stride, int count, const uint32 (&all_signs)[8]) {
  constexpr int kRounds = (rows + kRows - 1) / kRows;
  const int lane = threadIdx.x % kLanes, first = threadIdx.x / kLanes;
  uint4 raw[kRounds][kChunks];
#pragma unroll
  for (int r = 0; r < kRounds; r++)
#pragma unroll
    for (int c = 0; c < kChunks; c++) {
      const element* at = from + first * row_stride + r * kRows * row_stride + c * 64 + lane * 8;
      raw[r][c] = first + r * kRows < min(rows, count) ? load_last(at) : uint4{};
    }
  float x[kRounds][kValues];
  const auto rotate_row = [&](int r) {
#pragma unroll
    for (int c = 0; c < kChunks; c++) {
#if HADAMARD
      // Bits 2 w and 2 w + 1 of the 8 signs are bits 2 w and 2 w + 16 of this: 16 apart, as the signs of a word.
      const uint32 signs = (all_signs[2 * c + lane / 4] >> lane % 4 * 8 & 0xff) * 0x8001;
      raw[r][c].x ^= signs << 15 & 0x80008000;
      raw[r][c].y ^= signs << 13 & 0x80008000;
      raw[r][c].z ^= signs << 11 & 0x80008000;
      raw[r][c].w ^= signs << 9 & 0x80008000;
#endif
      unpack8(x[r] + 8 * c, raw[r][c]);
    }
    if (HADAMARD) transform(x[r], lane);
    float most = kSmallest;
#pragma unroll
    for (int i = 0; i < kValues; i++) most = fmaxf(most, fabsf(x[r][i]));
    return most;
  };
  const auto store_row = [&](int r, float factor) {
    const int row = first + r * kRows;
    if (row >= rows) return;
#pragma unroll
    for (int c = 0; c < kChunks; c++) {
      const float* v = x[r] + 8 * c;
      *reinterpret_cast<uint2*>(image + image_offset<kWidth>(row, c * 64 + lane * 8, rows)) = {
          pack_e4m3(v[0] * factor, v[1] * factor, v[2] * factor, v[3] * factor),
          pack_e4m3(v[4] * factor, v[5] * factor, v[6] * factor, v[7] * factor)};
    }
  };
  if (ROW_SCALES) {
#pragma unroll
    for (int r = 0; r < kRounds; r++) {
      float most = rotate_row(r);
#pragma unroll
      for (int step = 1; step < kLanes; step *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
      store_row(r, __fdiv_rn(kE4m3Largest, most));
      const int row = first + r * kRows;
      if (lane == 0 && row < rows) scale[row] = most * (1.f / kE4m3Largest) * kRotation * score_scale;
    }
  } else {
    __shared__ float warp_largest[kThreads / 32];
    float most = 0.f;
#pragma unroll
    for (int r = 0; r < kRounds; r++) most = fmaxf(most, rotate_row(r));
#pragma unroll
    for (int step = 16; step > 0; step /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
    if (threadIdx.x % 32 == 0) warp_largest[threadIdx.x / 32] = most;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kThreads / 32; i++) most = fmaxf(most, warp_largest[i]);
#pragma unroll
    for (int r = 0; r < kRounds; r++) store_row(r, __fdiv_rn(kE4m3Largest, most));
    if (threadIdx.x == 0) *scale = most * (1.f / kE4m3Largest) * kRotation * score_scale;
  }
}

// The largest size in each channel of `count` rows.
__device__ __forceinline__ void channel_amax(float* amax, const element* from, int64 row_stride, int count) {
  constexpr int kAcross = HEAD_DIM / 8, kDown = kThreads / kAcross, kAtOnce = 8;
  __shared__ float rows[kDown][HEAD_DIM];
  const int column = threadIdx.x % kAcross * 8, first = threadIdx.x / kAcross;
  float m[8] = {0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f};
  for (int row = first; row < count; row += kAtOnce * kDown) {
    uint4 raw[kAtOnce];
#pragma unroll
    for (int r = 0; r < kAtOnce; r++)  // the last row may be read more than once
      raw[r] = *reinterpret_cast<const uint4*>(from + min(row + r * kDown, count - 1) * row_stride + column);
#pragma unroll
    for (int r = 0; r < kAtOnce; r++) {
      float x[8];
      unpack8(x, raw[r]);
#pragma unroll
      for (int i = 0; i < 8; i++) m[i] = fmaxf(m[i], fabsf(x[i]));
    }
  }
#pragma unroll
  for (int i = 0; i < 8; i++) rows[first][column + i] = m[i];
  __syncthreads();
  if (threadIdx.x < HEAD_DIM) {
    float most = 0.f;
    for (int i = 0; i < kDown; i++) most = fmaxf(most, rows[i][threadIdx.x]);
    amax[threadIdx.x] = most;
  }
}

#endif

extern "C" __global__ void __launch_bounds__(kThreads, kBlocks) quantize_fp8(const __grid_constant__ QuantizeParams p) {
#if PASS == 0
  uint32 task = blockIdx.x;
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
  const int block = gridDim.x - 1 - blockIdx.x;  // the values that were measured last are still in the L2 cache
  const int tile = block % p.k_tiles, kv = block / p.k_tiles, head = kv % p.num_kv_heads, b = kv / p.num_kv_heads;
  const element* v = p.v + b * p.v_batch + head * p.v_head + static_cast<int64>(tile) * BLOCK_N * p.v_row;
  const int count = p.seqlen_k - tile * BLOCK_N;
  // A task: 8 channels of the 4 keys that are neighbours in the order of keys. 8 threads write 32 bytes of a channel. Both
  // tasks of a thread are read before anything is waited for.
  uint4 raw[2][4];
#pragma unroll
  for (int t = 0; t < 2; t++)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const uint32 task = threadIdx.x + t * kThreads, channel = task / 8 * 8 % HEAD_DIM, group = task / HEAD_DIM;
      const int row = group * 32 + task / 4 % 2 * 16 + i / 2 * 8 + task % 4 * 2 + i % 2;
      raw[t][i] = row < count ? load_last(v + row * p.v_row + channel) : uint4{};
    }
  if (threadIdx.x < HEAD_DIM) {
    const float* amax = p.v_amax + static_cast<int64>(kv) * p.v_parts * HEAD_DIM + threadIdx.x;
    float most = kSmallest;
#pragma unroll 16
    for (int i = 0; i < p.v_parts; i++) most = fmaxf(most, amax[i * HEAD_DIM]);
    factors[threadIdx.x] = __fdiv_rn(kE4m3Largest, most);
    if (tile == 0) p.v_scale[kv * HEAD_DIM + threadIdx.x] = most * (1.f / kE4m3Largest);
  }
  __syncthreads();
  uint8* image = p.v_out + static_cast<int64>(block) * BLOCK_N * HEAD_DIM;
#pragma unroll
  for (int t = 0; t < 2; t++) {
    const uint32 task = threadIdx.x + t * kThreads, channel = task / 8 * 8 % HEAD_DIM, group = task / HEAD_DIM;
    float x[4][8];
#pragma unroll
    for (int i = 0; i < 4; i++) unpack8(x[i], raw[t][i]);
#pragma unroll
    for (int j = 0; j < 8; j++) {
      const float f = factors[channel + j];
      *reinterpret_cast<uint32*>(image + image_offset<32>(channel + j, group * 32 + task % 8 * 4, HEAD_DIM)) =
          pack_e4m3(x[0][j] * f, x[1][j] * f, x[2][j] * f, x[3][j] * f);
    }
  }
#endif
}
