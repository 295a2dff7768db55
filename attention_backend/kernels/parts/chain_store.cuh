// How layer_chain_sm90 ends with STORE: queries and keys turned, keys and values in their pages, rounded where rotary_store
// rounds.
#pragma once

#include "parts/chain_plan.cuh"

__device__ __forceinline__ float rounded(float x) { return to_float(from_float(x)); }

// Two neighbouring columns of a head and the two that they are turned with, or that lie beside them.
struct TurnedPair {
  float2 cos, sin;
  int64 slot;

  // Starts to read what `finish` wants. `column` is the first one's, of all heads' of queries, keys and values.
  __device__ __forceinline__ void ask(const ChainStore& s, int row, int column) {
    const int in_head = column % s.head_dim;
    cos = sin = make_float2(0.f, 0.f);
    if (in_head < s.half) {
      const int64 at = row * s.table_row + in_head;
      cos = *reinterpret_cast<const float2*>(s.cos + at), sin = *reinterpret_cast<const float2*>(s.sin + at);
    }
    slot = s.slot_mapping[row];
  }

  // v: the products of the two columns (x, y) and of the other two (z, w).
  __device__ __forceinline__ void finish(const ChainParams& p, int row, int column, float4 v) const {
    const ChainStore& s = p.store;
    const int head = column / s.head_dim, in_head = column - head * s.head_dim;
    const int key_head = head - s.num_heads, value_head = key_head - s.num_kv_heads;
    const int apart = in_head < s.half ? s.half : 8;
    if (p.bias) {
      const element* const bias = p.bias + column;
      v.x += to_float(bias[0]), v.y += to_float(bias[1]), v.z += to_float(bias[apart]), v.w += to_float(bias[apart + 1]);
    }
    float2 a = make_float2(rounded(v.x), rounded(v.y)), b = make_float2(rounded(v.z), rounded(v.w));
    if (in_head < s.half && value_head < 0) {
      turn(a.x, b.x, rounded(cos.x), rounded(sin.x));
      turn(a.y, b.y, rounded(cos.y), rounded(sin.y));
    }
    if (key_head < 0) {
      uint32* const to = reinterpret_cast<uint32*>(p.next + static_cast<int64>(row) * s.num_heads * s.head_dim + column);
      to[0] = pack2(a.x, a.y), to[apart / 2] = pack2(b.x, b.y);
      return;
    }
    if (slot < 0) return;
    const bool is_value = value_head >= 0;
    const uint32 page = static_cast<uint32>(slot) / s.page_size, in_page = static_cast<uint32>(slot) % s.page_size;
    cached* const to = in_head + (is_value ? s.v_cache + page * s.v_page + in_page * s.v_slot + value_head * s.v_head
                                           : s.k_cache + page * s.k_page + in_page * s.k_slot + key_head * s.k_head);
#if STORE == 2
    const float scale = is_value ? s.v_scale[value_head] : s.k_scale[key_head];
    typedef unsigned short pair;
    reinterpret_cast<pair*>(to)[0] = static_cast<pair>(pack_fp8(a.x / scale, a.y / scale));
    reinterpret_cast<pair*>(to)[apart / 2] = static_cast<pair>(pack_fp8(b.x / scale, b.y / scale));
#else
    reinterpret_cast<uint32*>(to)[0] = pack2(a.x, a.y);
    reinterpret_cast<uint32*>(to)[apart / 2] = pack2(b.x, b.y);
#endif
  }

 private:
  // (a, b) by the angle of (c, s): each product is rounded, then their sum.
  static __device__ __forceinline__ void turn(float& a, float& b, float c, float s) {
    const float x = rounded(a * c) - rounded(b * s), y = rounded(b * c) + rounded(a * s);
    a = rounded(x), b = rounded(y);
  }
};
