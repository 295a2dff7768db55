// Pages of e4m3 in the Hopper forward (FP8_PAGES): a warpgroup more turns the tiles that the TMA brings into 16-bit ones,
// which the tensor cores read. Every e4m3 is exactly an fp16, by one instruction for two of them; to bfloat16 it would
// take three times as many. So products are of fp16, and the scales of keys and values are applied to scores and output.
//
// Queries of bfloat16 may be too large for fp16, or too small: each row is scaled by the power of two that brings its largest
// element to [2^14, 2^15). What is below 2^-29 of that is rounded, the rest is exact. They stay in registers: shared memory
// is read and written once more for every tile than without a conversion, and has no bandwidth left for queries too.
#pragma once

#include "forward_loads.cuh"
#include "fp8.cuh"
#include "mma_sm80.cuh"

static_assert(PAGED && HEAD_DIM <= 128 && !SCORE_CHANGES, "consumers have no registers for queries beside more than this");

constexpr int kConverters = 64;  // threads for the keys, and as many for the values

__device__ __forceinline__ void load_shared(uint32 (&x)[2], uint32 address) {
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(x[0]), "=r"(x[1]) : "r"(address) : "memory");
}
__device__ __forceinline__ void store_shared(uint32 address, const uint32 (&x)[4]) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
               : "memory");
}

// One tile of WIDTH columns, rows without gaps -> slabs of 64 columns in 128-byte swizzle. A thread takes 8 columns at a
// time; neither its reads nor, where rows are of a multiple of 64 columns, its writes meet in a bank.
template <int WIDTH>
__device__ __forceinline__ void convert_tile(uint32 to, uint32 from, int thread) {
  constexpr int kPieces = WIDTH / 8, kEach = BLOCK_N * kPieces / kConverters, kBatch = 4;
  constexpr bool kWholeRows = kConverters % kPieces == 0;
  constexpr int kRows = kConverters / kPieces;  // rows of all threads, if whole ones
  static_assert(BLOCK_N * kPieces % (kConverters * kBatch) == 0 && (!kWholeRows || kRows * kBatch % 8 == 0), "");
  const int first = thread / kPieces, piece = thread % kPieces;
  if (kWholeRows) to += piece / 8 * kSlabKv + first * 128 + ((piece ^ first) & 7) * 16;
  from += thread * 8;
#pragma unroll 1
  for (int begin = 0; begin < kEach; begin += kBatch) {
    uint32 x[kBatch][2];
#pragma unroll
    for (int j = 0; j < kBatch; j++) load_shared(x[j], from + j * kConverters * 8);
#pragma unroll
    for (int j = 0; j < kBatch; j++) {
      uint32 y[4];
      fp8_to_halves(y[0], y[1], x[j][0]);
      fp8_to_halves(y[2], y[3], x[j][1]);
      if (kWholeRows) {  // `first` is below kRows, a power of two, and `to` was at a multiple of 1,024
        store_shared((to ^ j * kRows % 8 * 16) + j * kRows * 128, y);
      } else {
        const int i = (begin + j) * kConverters + thread, row = i / kPieces, c = i % kPieces;
        store_shared(to + c / 8 * kSlabKv + row * 128 + ((c ^ row) & 7) * 16, y);
      }
    }
    from += kBatch * kConverters * 8;
    if (kWholeRows) to += kBatch * kRows * 128;
  }
}

// Two warps: every tile of the ring of raw tiles, of keys or of values, to the ring that consumers read.
template <bool KEYS>
__device__ __forceinline__ void convert_tiles(const Shared& shared) {
  constexpr int kWidth = KEYS ? HEAD_DIM : HEAD_DIM_V, kBytes = KEYS ? kBytesK : kBytesV;
  const uint32 raw = KEYS ? shared.raw_k : shared.raw_v, ring = KEYS ? shared.k : shared.v;
  const uint32 full_raw = KEYS ? shared.full_raw_k : shared.full_raw_v, full = KEYS ? shared.full_k : shared.full_v;
  const uint32 empty_raw = KEYS ? shared.empty_raw_k : shared.empty_raw_v, empty = KEYS ? shared.empty_k : shared.empty_v;
  int n = 0;
  for_tiles(shared, [&](const Tile& tile, int) {
    const int steps = tile.steps;
#pragma unroll 1
    for (int step = 0; step < steps; step++, n++) {
      wait_full<RAW_STAGES>(full_raw, n);
      wait_empty<STAGES>(empty, n);
      convert_tile<kWidth>(ring + stage<STAGES>(n) * kBytes, raw + stage<RAW_STAGES>(n) * BLOCK_N * kWidth,
                           threadIdx.x % kConverters);
      fence_async_proxy();
      __syncwarp();
      if (threadIdx.x % 32 == 0) {
        barrier_arrive(empty_raw + 8 * stage<RAW_STAGES>(n));
        barrier_arrive(full + 8 * stage<STAGES>(n));
      }
    }
  });
}

// The queries of a consumer's thread, as wgmma wants them from registers; of its row `half`, x[i][half] and x[i][half + 2]
// are columns 16 i + 2 (lane % 4) and the 8 further on.
struct Queries {
  float scale[2];  // of each row: what makes a product with a key as it is in its page an exponent of two
  uint32 x[HEAD_DIM / 16][4];

  // Turns the warpgroup's rows, at `rows`, of a tile into fp16.
  __device__ __forceinline__ void convert(uint32 rows, const Tile& tile, const HopperParams& p) {
    const float k_scale = p.k_scale[key_head_of(tile, p)];
    float top[2] = {0.f, 0.f}, down[2];
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 16; i++) {
      uint32 q[4];
      ldmatrix_x4(q, block(rows, i));
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const float2 pair = unpack2(q[j]);
        top[j % 2] = fmaxf(top[j % 2], fmaxf(fabsf(pair.x), fabsf(pair.y)));
      }
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
      top[half] = fmaxf(top[half], __shfl_xor_sync(~0u, top[half], 1));
      top[half] = fmaxf(top[half], __shfl_xor_sync(~0u, top[half], 2));
      const int exponent = min(max(__float_as_int(top[half]) >> 23, 15), 253);
      down[half] = copysignf(__int_as_float((268 - exponent) << 23), k_scale);
      // Not zero, even if k_scale is: the score of a key that is hidden is -inf.
      const float up = __int_as_float((exponent - 14) << 23) * fabsf(k_scale);
      scale[half] = fmaxf(up * p.forward.score.softmax_scale * kLog2e, kSmallest);
    }
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 16; i++) {
      uint32 q[4];
      ldmatrix_x4(q, block(rows, i));
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const float2 pair = unpack2(q[j]);
        x[i][j] = pack_half2(pair.x * down[j % 2], pair.y * down[j % 2]);
      }
    }
    named_sync(1 + kConsumers + threadIdx.x / 128, 128);
  }

 private:
  static constexpr float kSmallest = 1.17549435e-38f;  // 2^-126

  // This lane's row of the 16 x 16 elements from column 16 i of its warp's 16 rows.
  static __device__ __forceinline__ uint32 block(uint32 rows, int i) {
    const int row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 16, chunk = 2 * i + threadIdx.x % 32 / 16;
    return rows + chunk / 8 * kSlabQ + row * 128 + ((chunk ^ row) & 7) * 16;
  }
};
