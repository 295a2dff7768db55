// Writes new keys and values into the pages of the KV cache: token t of head h goes to slot_mapping[t]
// (page * page_size + row); a negative slot is skipped. With ROTARY, keys are rotated on the way (RoFormer,
// arXiv 2104.09864, section 3.4.2), and so are the queries, into q_out.
//
// One block per token: block t takes query t, key t and value t as far as there are so many. Without rotary a row is
// moved 16 bytes a thread, whatever its type. With FP8_KV the caches hold e4m3: an element, rounded to its own type
// first, is divided by its head's scale and saturates.
//
// Compile-time: BF16 or FP32, ROTARY (0: none, 1: halves, as in Llama; 2: interleaved pairs, as in GPT-J), FP8_KV (sm_89
// and up).
#include "parts/element.cuh"
#if FP8_KV
#include "parts/fp8.cuh"
typedef uint8 cached;
#else
typedef element cached;
#endif

// The same fields, in the same order, as attention_backend/kernels/decode_params.py: StoreParams. Strides are in elements.
struct StoreParams {
  const element* q;
  const element* k;
  const element* v;
  element* q_out;
  cached* k_cache;
  cached* v_cache;
  const int64* slot_mapping;  // [num_tokens]
  const int* q_positions;     // [num_queries]: row of cos and sin
  const int* k_positions;     // [num_tokens]
  const element* cos;         // [rotary_rows, rotary_dim / 2]
  const element* sin;
  const float* k_scale;  // [num_kv_heads] with FP8_KV
  const float* v_scale;
  int64 q_row, q_head, q_out_row, q_out_head;
  int64 k_row, k_head, v_row, v_head;
  int64 k_page, k_slot, k_cache_head;
  int64 v_page, v_slot, v_cache_head;
  int64 cos_row;
  int num_heads, num_kv_heads;
  int head_dim, head_dim_v;
  int rotary_dim, rotary_rows;
  int num_queries, num_tokens;
  int page_size;
  int reserved;
};

constexpr int kVector = 16 / sizeof(element);

#if ROTARY
// How an element of head h is stored.
struct AsElement {
  __device__ __forceinline__ void operator()(element* to, element x, int) const { *to = x; }
};
#if FP8_KV
struct AsFp8 {
  const float* scale;
  __device__ __forceinline__ void operator()(uint8* to, element x, int h) const {
    *to = static_cast<uint8>(pack_fp8(to_float(x) / scale[h], 0.f));
  }
};
#endif
#endif

#if FP8_KV
__device__ __forceinline__ void move_row(uint8* to, const element* from, int width, int64 to_head, int64 from_head,
                                         int heads, const float* scale) {
  const int chunks = width / kVector;
  for (int i = threadIdx.x; i < heads * chunks; i += blockDim.x) {
    const int h = i / chunks, c = (i % chunks) * kVector;
    const uint4 in = *reinterpret_cast<const uint4*>(from + h * from_head + c);
    const element* x = reinterpret_cast<const element*>(&in);
    uint32 out[kVector / 4];
#pragma unroll
    for (int j = 0; j < kVector; j += 4)
      out[j / 4] = pack_fp8(to_float(x[j]) / scale[h], to_float(x[j + 1]) / scale[h]) |
                   pack_fp8(to_float(x[j + 2]) / scale[h], to_float(x[j + 3]) / scale[h]) << 16;
#pragma unroll
    for (int j = 0; j < kVector / 4; j++) reinterpret_cast<uint32*>(to + h * to_head + c)[j] = out[j];
  }
}
#else
__device__ __forceinline__ void move_row(element* to, const element* from, int width, int64 to_head, int64 from_head,
                                         int heads, const float*) {
  const int chunks = width / kVector;
  for (int i = threadIdx.x; i < heads * chunks; i += blockDim.x) {
    const int h = i / chunks, c = (i % chunks) * kVector;
    *reinterpret_cast<uint4*>(to + h * to_head + c) = *reinterpret_cast<const uint4*>(from + h * from_head + c);
  }
}
#endif

#if ROTARY
template <class Out, class Store>
__device__ __forceinline__ void rotate_row(Out* to, const element* from, int width, int64 to_head, int64 from_head,
                                           int heads, const element* cos, const element* sin, int rotary_dim,
                                           Store store) {
  const int half = rotary_dim / 2, rest = width - rotary_dim, per_head = half + rest;
  for (int i = threadIdx.x; i < heads * per_head; i += blockDim.x) {
    const int h = i / per_head, j = i % per_head;
    const element* x = from + h * from_head;
    Out* y = to + h * to_head;
    if (j < half) {
      const int first = ROTARY == 1 ? j : 2 * j, second = ROTARY == 1 ? j + half : 2 * j + 1;
      const float c = to_float(cos[j]), s = to_float(sin[j]), a = to_float(x[first]), b = to_float(x[second]);
      store(y + first, from_float(a * c - b * s), h);
      store(y + second, from_float(a * s + b * c), h);
    } else {
      store(y + half + j, x[half + j], h);
    }
  }
}
#endif

extern "C" __global__ void __launch_bounds__(128) kv_cache_store(const StoreParams p) {
  const int64 token = blockIdx.x;
#if ROTARY
  // A position past the table would read outside of it: it takes the last row.
  if (token < p.num_queries) {
    const int64 at = min(max(p.q_positions[token], 0), p.rotary_rows - 1) * p.cos_row;
    rotate_row(p.q_out + token * p.q_out_row, p.q + token * p.q_row, p.head_dim, p.q_out_head, p.q_head, p.num_heads,
               p.cos + at, p.sin + at, p.rotary_dim, AsElement());
  }
#endif
  if (token >= p.num_tokens) return;
  const int64 slot = p.slot_mapping[token];
  if (slot < 0) return;
  const int64 page = slot / p.page_size, row = slot % p.page_size;
  cached* k = p.k_cache + page * p.k_page + row * p.k_slot;
  cached* v = p.v_cache + page * p.v_page + row * p.v_slot;
#if ROTARY
  const int64 at = min(max(p.k_positions[token], 0), p.rotary_rows - 1) * p.cos_row;
#if FP8_KV
  const AsFp8 store_k = {p.k_scale};
#else
  const AsElement store_k;
#endif
  rotate_row(k, p.k + token * p.k_row, p.head_dim, p.k_cache_head, p.k_head, p.num_kv_heads, p.cos + at, p.sin + at,
             p.rotary_dim, store_k);
#else
  move_row(k, p.k + token * p.k_row, p.head_dim, p.k_cache_head, p.k_head, p.num_kv_heads, p.k_scale);
#endif
  move_row(v, p.v + token * p.v_row, p.head_dim_v, p.v_cache_head, p.v_head, p.num_kv_heads, p.v_scale);
}
