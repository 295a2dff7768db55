// How the blocks of layer_chain_sm90 give each other what they have computed: words in device memory that are zero
// until they are there, read and written past the L1.
#pragma once

#include "parts/activation.cuh"
#include "parts/chain_store.cuh"

// Vectors of four words that a block leaves of a pair's attention: the sums of its columns, the logarithms of its heads'.
constexpr int kPartQuads = (GROUP * HEAD_DIM + GROUP + 3) / 4;

// What blocks give each other, in words that are zero until they are there.
struct Exchange {
  uint32 *sum, *gated, *total;  // [rows, width / 2 or gated_width / 2]
  uint4* shares;                // [phases, blocks, rows, 8]: sums of groups that two blocks share
  uint32* readers;              // blocks that have read all of `total`; four words

  __device__ __forceinline__ Exchange(const ChainParams& p) {
    sum = p.words;
    gated = sum + p.rows * p.width / 2;
    total = gated + p.rows * p.gated_width / 2;
    shares = reinterpret_cast<uint4*>(total + p.rows * p.width / 2);
    readers = reinterpret_cast<uint32*>(shares + kPhases * gridDim.x * p.rows * 8);
  }
  // With GROUP: [rows, attended_width / 2], and behind it [pairs of rows and key heads, parts, kPartQuads].
  __device__ __forceinline__ uint32* attended() const { return readers + 4; }
  __device__ __forceinline__ uint4* part(const ChainParams& p, int pair, int part) const {
    uint4* const parts = reinterpret_cast<uint4*>(attended() + p.rows * p.attended_width / 2);
    return parts + (pair * p.attention.parts + part) * kPartQuads;
  }
  __device__ __forceinline__ const uint32* input(int phase) const {
    return phase == 0 ? attended() : phase == 1 ? sum : phase == 2 ? gated : total;
  }
  __device__ __forceinline__ uint4* share(const ChainParams& p, int phase, int block) const {
    return shares + (phase * gridDim.x + block) * p.rows * 8;
  }
};

__device__ __forceinline__ uint32 read_word(const uint32* p) {
  uint32 x;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
  return x;
}
__device__ __forceinline__ uint4 read_words(const uint4* p) {
  uint4 x;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(p)
               : "memory");
  return x;
}
__device__ __forceinline__ void write_word(uint32* p, uint32 x) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(x) : "memory");
}
__device__ __forceinline__ void write_words(uint4* p, const uint4& x) {
  asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
               : "memory");
}
__device__ __forceinline__ bool all_there(const uint4& x) { return x.x && x.y && x.z && x.w; }

// What finishing a group wants from memory, asked for before its tiles are multiplied. Lane 8 * row + i of a warp has
// two neighbouring columns of a row: of 16, or, where the group's two halves belong together (the gate's and the other
// projection's columns, what is turned together), of both halves, and only half the lanes have some.
struct Group {
  int phase, row, column;
  bool here, is_rest, has_rest;
  uint32 before;  // two elements of the residual; in phase 2 their word, if it was there
  float4 rest;    // of another block
  TurnedPair turned;

  __device__ __forceinline__ Group(const ChainParams& p, const Exchange& exchange, int phase, int first_column,
                                   bool is_rest, bool has_rest, int lane, bool finishes)
      : phase(phase), is_rest(is_rest), has_rest(has_rest), before(0), rest(make_float4(0.f, 0.f, 0.f, 0.f)) {
    row = lane / 8, column = first_column + lane % 8 * 2;
    here = finishes && row < p.rows && (!(phase == 1 || (STORE && phase == 3)) || lane % 8 < 4);
    if (!here || is_rest) return;
    if (STORE && phase == 3) turned.ask(p.store, row, column);
    if (phase % 2 == 0 && column < p.width)
      before = phase == 0 ? __ldcg(reinterpret_cast<const uint32*>(p.residual) + word(p.width))
                          : read_word(exchange.sum + word(p.width));
    if (has_rest) {
      uint4* const share = exchange.share(p, phase, blockIdx.x + 1) + lane;
      uint4 x;
      do x = read_words(share);
      while (!all_there(x));
      rest = make_float4(__uint_as_float(~x.x), __uint_as_float(~x.y), __uint_as_float(~x.z), __uint_as_float(~x.w));
      write_words(share, make_uint4(0, 0, 0, 0));
    }
  }

  __device__ __forceinline__ int64 word(int width) const { return (static_cast<int64>(row) * width + column) / 2; }

  // The sums of all warps to where they are wanted.
  __device__ __forceinline__ void finish(const ChainParams& p, const Exchange& exchange,
                                         const float (*partial)[kMostRows][16], int lane) const {
    if (!here) return;
    const int c = lane % 8 * 2;
    float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
      const float2 a = *reinterpret_cast<const float2*>(&partial[w][row][c]);
      const float2 b = *reinterpret_cast<const float2*>(&partial[w][row][c % 8 + 8]);
      v.x += a.x, v.y += a.y, v.z += b.x, v.w += b.y;
    }
    if (is_rest) {
      const uint4 x = make_uint4(__float_as_uint(v.x), __float_as_uint(v.y), __float_as_uint(v.z), __float_as_uint(v.w));
      write_words(exchange.share(p, phase, blockIdx.x) + lane, make_uint4(~x.x, ~x.y, ~x.z, ~x.w));
      return;
    }
    if (has_rest) v.x += rest.x, v.y += rest.y, v.z += rest.z, v.w += rest.w;
    if (phase == 1) {
      if (column >= p.gated_width) return;
      const float y = rounded(activate(rounded(v.x))), z = rounded(activate(rounded(v.y)));
      write_word(exchange.gated + word(p.gated_width), ~pack2(y * rounded(v.z), z * rounded(v.w)));
    } else if (STORE && phase == 3) {
      turned.finish(p, row, column, v);
    } else if (phase == 3) {
      element* const out = p.next + static_cast<int64>(row) * p.next_width + column;
      if (column < p.next_width) out[0] = from_float(p.bias ? v.x + to_float(p.bias[column]) : v.x);
      if (column + 1 < p.next_width) out[1] = from_float(p.bias ? v.y + to_float(p.bias[column + 1]) : v.y);
    } else if (column < p.width) {
      // That words are there which were computed from this one proves nothing: relaxed accesses have an order at one address.
      uint32 at_last = before;
      while (phase == 2 && !at_last) at_last = read_word(exchange.sum + word(p.width));
      const float2 old = unpack2(phase == 2 ? ~at_last : at_last);
      const uint32 after = pack2(old.x + rounded(v.x), old.y + rounded(v.y));
      write_word((phase == 0 ? exchange.sum : exchange.total) + word(p.width), ~after);
      if (phase == 2) {
        reinterpret_cast<uint32*>(p.total)[word(p.width)] = after;
        write_word(exchange.sum + word(p.width), 0);  // all have read it, or phase 2's input would not be there
      }
    }
  }
};

// Zeros into this block's share of so many vectors. By one warp.
__device__ __forceinline__ void clear_share(uint32* words, int vectors, int lane) {
  const int64 all = vectors;
  for (int i = static_cast<int>(all * blockIdx.x / gridDim.x) + lane;
       i < static_cast<int>(all * (blockIdx.x + 1) / gridDim.x); i += 32)
    reinterpret_cast<uint4*>(words)[i] = make_uint4(0, 0, 0, 0);
}

// In phase 3: all have read `attended` and `gated`, and the last block that has read `total` finds itself to be that. By
// one warp.
__device__ __forceinline__ void clear(const ChainParams& p, const Exchange& exchange, int lane) {
  const int total = p.rows * p.width / 8;  // vectors
  clear_share(exchange.gated, p.rows * p.gated_width / 8, lane);
  if (GROUP) clear_share(exchange.attended(), p.rows * p.attended_width / 8, lane);
  uint32 before = 0;
  if (lane == 0) before = atomicAdd(exchange.readers, 1u);
  if (__shfl_sync(~0u, before, 0) != gridDim.x - 1) return;
  for (int i = lane; i < total; i += 32) reinterpret_cast<uint4*>(exchange.total)[i] = make_uint4(0, 0, 0, 0);
  if (lane == 0) *exchange.readers = 0;
}
