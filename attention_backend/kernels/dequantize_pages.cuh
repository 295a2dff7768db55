// Pages of e4m3 -> pages of the element type, for kernels that read no e4m3: page j of sequence b becomes page
// b * width + j of a cache [batch * width, heads, page_size, head_dim] without gaps. One block a page; those that no row
// of the sequence sees are left as they are.
//
// Compile-time: BF16 (sm_89 and up).
#include "parts/fp8.cuh"

// The same fields, in the same order, as attention_backend/kernels/dequantize_pages.py. Strides are in elements.
struct DequantizeParams {
  const uint8* k;
  const uint8* v;
  element* k_out;
  element* v_out;
  const float* k_scale;  // [heads]
  const float* v_scale;
  const int* block_table;   // [batch, width]
  const int* seq_lens;      // [batch]
  const int* cu_seqlens_q;  // [batch + 1] or null: seqlen_q rows a sequence
  int64 table_row;
  int64 k_page, k_head, k_slot;
  int64 v_page, v_head, v_slot;
  int heads, page_size, head_dim, head_dim_v;
  int seqlen_q;
  int window_left;  // -1: all keys
};

constexpr int kVector = 16;  // elements of a thread at a time

__device__ __forceinline__ uint32 convert(uint32 pair, float scale) {
  const uint32 halves = fp8_to_half2(pair);
  const float2 x = __half22float2(*reinterpret_cast<const __half2*>(&halves));
  return pack2(x.x * scale, x.y * scale);
}

// `from`: a page's first element; `to`: the new page's.
__device__ __forceinline__ void convert_page(element* to, const uint8* from, int64 head, int64 slot, const float* scale,
                                             int heads, int page_size, int width) {
  const int chunks = width / kVector, total = heads * page_size * chunks;
  for (int i = threadIdx.x; i < total; i += blockDim.x) {
    const int row = i / chunks, c = i - row * chunks, h = row / page_size;
    const uint4 in = *reinterpret_cast<const uint4*>(from + h * head + (row - h * page_size) * slot + c * kVector);
    const uint32 words[4] = {in.x, in.y, in.z, in.w};
    const float by = scale[h];
    uint32 out[8];
#pragma unroll
    for (int j = 0; j < 4; j++) {
      out[2 * j] = convert(words[j] & 0xffff, by);
      out[2 * j + 1] = convert(words[j] >> 16, by);
    }
    uint4* target = reinterpret_cast<uint4*>(to + static_cast<int64>(i) * kVector);
    target[0] = make_uint4(out[0], out[1], out[2], out[3]);
    target[1] = make_uint4(out[4], out[5], out[6], out[7]);
  }
}

extern "C" __global__ void __launch_bounds__(256) dequantize_pages(const __grid_constant__ DequantizeParams p) {
  const int j = blockIdx.x, b = blockIdx.y, length = p.seq_lens[b];
  if (j >= (length + p.page_size - 1) / p.page_size) return;
  if (p.window_left >= 0) {
    const int rows = p.cu_seqlens_q ? p.cu_seqlens_q[b + 1] - p.cu_seqlens_q[b] : p.seqlen_q;
    if ((j + 1) * p.page_size <= length - rows - p.window_left) return;
  }
  const int64 page = p.block_table[b * p.table_row + j], target = static_cast<int64>(b) * gridDim.x + j;
  const int64 rows = static_cast<int64>(p.heads) * p.page_size;
  convert_page(p.k_out + target * rows * p.head_dim, p.k + page * p.k_page, p.k_head, p.k_slot, p.k_scale, p.heads,
               p.page_size, p.head_dim);
  convert_page(p.v_out + target * rows * p.head_dim_v, p.v + page * p.v_page, p.v_head, p.v_slot, p.v_scale, p.heads,
               p.page_size, p.head_dim_v);
}
