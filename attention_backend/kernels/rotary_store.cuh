// One step of a layer between its projections and its attention: queries and keys are normalised per head (NORM), turned
// (RoFormer, arXiv 2104.09864: halves, as in Llama; the first rotary_dim elements) and go on, the queries to q_out, keys
// and values to slot_mapping[token] of the pages; a negative slot is skipped.
//
// LANES lanes take a head of q, k or v, each 8 elements of the first half and the 8 that they are turned with, so a head
// is read once, 16 bytes a load. Numbers are rounded where Hugging Face's modules round.
//
// Compile-time: BF16, LANES (a power of two, head_dim / 16 or more), NORM (0, 1: weight, 2: 1 + weight, as in Gemma),
// FP8_KV (sm_89 and up: the pages hold e4m3, values over their head's scale).
#include "parts/dependent_launch.cuh"
#include "parts/vectors.cuh"
#if FP8_KV
#include "parts/fp8.cuh"
typedef uint8 cached;
#else
typedef element cached;
#endif

// The same fields, in the same order, as attention_backend/kernels/rotary_store.py: RotaryStoreParams. Strides are in
// elements.
struct RotaryStoreParams {
  const element* q;
  const element* k;
  const element* v;
  element* q_out;  // [num_tokens, num_heads, head_dim]
  cached* k_cache;
  cached* v_cache;
  const int64* slot_mapping;  // [num_tokens]
  const float* cos;           // [num_tokens, rotary_dim / 2]
  const float* sin;
  const element* q_norm;  // [head_dim] with NORM
  const element* k_norm;
  const float* k_scale;  // [num_kv_heads] with FP8_KV
  const float* v_scale;
  int64 q_row, q_head, k_row, k_head, v_row, v_head;
  int64 k_page, k_slot, k_cache_head, v_page, v_slot, v_cache_head;
  int64 table_row;
  int num_heads, num_kv_heads, head_dim, rotary_dim;
  int page_size, token_blocks;
  float eps;
  int reserved;
};

constexpr int kThreads = 128;

// A float of the tables as a tensor of elements would hold it.
__device__ __forceinline__ void read_table(const float* from, float (&x)[kVector]) {
  const float4 lo = reinterpret_cast<const float4*>(from)[0], hi = reinterpret_cast<const float4*>(from)[1];
  x[0] = lo.x, x[1] = lo.y, x[2] = lo.z, x[3] = lo.w, x[4] = hi.x, x[5] = hi.y, x[6] = hi.z, x[7] = hi.w;
  round_all(x);
}

__device__ __forceinline__ void store(element* to, const float (&x)[kVector]) {
  *reinterpret_cast<uint4*>(to) = pack(x);
}

#if FP8_KV
__device__ __forceinline__ void store(uint8* to, const float (&x)[kVector], float scale) {
  uint32 words[2];
#pragma unroll
  for (int i = 0; i < 2; i++)
    words[i] = pack_fp8(x[4 * i] / scale, x[4 * i + 1] / scale) |
               pack_fp8(x[4 * i + 2] / scale, x[4 * i + 3] / scale) << 16;
  *reinterpret_cast<uint2*>(to) = make_uint2(words[0], words[1]);
}
#endif

#if NORM
__device__ __forceinline__ void normalise(float (&x)[kVector], const element* weight, float scale) {
  float w[kVector];
  unpack(*reinterpret_cast<const uint4*>(weight), w);
#pragma unroll
  for (int j = 0; j < kVector; j++) x[j] *= scale;
#if NORM == 1
  round_all(x);
#endif
#pragma unroll
  for (int j = 0; j < kVector; j++) x[j] *= (NORM == 2) + w[j];
  round_all(x);
}
#endif

// (a, b) by the angle of (cos, sin): each product is rounded, then their sum.
__device__ __forceinline__ void turn(float (&a)[kVector], float (&b)[kVector], const float* cos, const float* sin) {
  float c[kVector], s[kVector], ac[kVector], bs[kVector], bc[kVector], as[kVector];
  read_table(cos, c);
  read_table(sin, s);
#pragma unroll
  for (int j = 0; j < kVector; j++) ac[j] = a[j] * c[j], bs[j] = b[j] * s[j], bc[j] = b[j] * c[j], as[j] = a[j] * s[j];
  round_all(ac), round_all(bs), round_all(bc), round_all(as);
#pragma unroll
  for (int j = 0; j < kVector; j++) a[j] = ac[j] - bs[j], b[j] = bc[j] + as[j];
  round_all(a), round_all(b);
}

extern "C" __global__ void __launch_bounds__(kThreads) rotary_store(const __grid_constant__ RotaryStoreParams p) {
  let_next_start();
  wait_for_previous();
  const int64 token = blockIdx.x / p.token_blocks;
  const int head = blockIdx.x % p.token_blocks * (kThreads / LANES) + threadIdx.x / LANES;
  const int lane = threadIdx.x % LANES;
  const int key_head = head - p.num_heads, value_head = key_head - p.num_kv_heads;
  // Lanes without work go on to the shuffles, which take whole warps.
  const bool exists = value_head < p.num_kv_heads && lane * 2 * kVector < p.head_dim;
  const bool is_query = key_head < 0, is_value = value_head >= 0;
  const int64 slot = p.slot_mapping[token];

  const int half = p.rotary_dim / 2;
  const bool turned = lane * kVector < half;
  // The elements after rotary_dim are 16 in a row a lane.
  const int first = turned ? lane * kVector : 2 * lane * kVector;
  const int second = first + (turned ? half : kVector);
  const element* from = is_query   ? p.q + token * p.q_row + head * p.q_head
                        : is_value ? p.v + token * p.v_row + value_head * p.v_head
                                   : p.k + token * p.k_row + key_head * p.k_head;
  float a[kVector] = {}, b[kVector] = {};
  if (exists) {
    const uint4 lo = *reinterpret_cast<const uint4*>(from + first), hi = *reinterpret_cast<const uint4*>(from + second);
    unpack(lo, a);
    unpack(hi, b);
  }
#if NORM
  float squares = 0.f;
#pragma unroll
  for (int j = 0; j < kVector; j++) squares += a[j] * a[j] + b[j] * b[j];
#pragma unroll
  for (int d = LANES / 2; d; d /= 2) squares += __shfl_xor_sync(~0u, squares, d);
  if (exists && !is_value) {
    const float scale = rsqrtf(squares / p.head_dim + p.eps);
    const element* const weight = is_query ? p.q_norm : p.k_norm;
    normalise(a, weight + first, scale);
    normalise(b, weight + second, scale);
  }
#endif
  if (!exists) return;
  if (turned && !is_value) {
    const int64 at = token * p.table_row + first;
    turn(a, b, p.cos + at, p.sin + at);
  }
  if (is_query) {
    element* const to = p.q_out + (token * p.num_heads + head) * p.head_dim;
    store(to + first, a);
    store(to + second, b);
    return;
  }
  if (slot < 0) return;
  const uint32 page = static_cast<uint32>(slot) / p.page_size, in_page = static_cast<uint32>(slot) % p.page_size;
  cached* const to = is_value ? p.v_cache + page * p.v_page + in_page * p.v_slot + value_head * p.v_cache_head
                              : p.k_cache + page * p.k_page + in_page * p.k_slot + key_head * p.k_cache_head;
#if FP8_KV
  const float scale = is_value ? p.v_scale[value_head] : p.k_scale[key_head];
  store(to + first, a, scale);
  store(to + second, b, scale);
#else
  store(to + first, a);
  store(to + second, b);
#endif
}
