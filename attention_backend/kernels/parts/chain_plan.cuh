// What layer_chain_sm90 is launched with, and which tiles of which phase are a block's.
#pragma once

#include "parts/tma.cuh"
#if STORE == 2
#include "parts/fp8.cuh"
typedef uint8 cached;
#else
typedef element cached;
#endif

constexpr int kMostRows = 4;
constexpr int kPhases = 4;
constexpr int kTeam = WARPS * 32;     // threads that compute
constexpr int kThreads = kTeam + 32;  // and the warp that loads
constexpr int kEight = 8 * COLS * 2;  // bytes of eight rows of a tile
constexpr int kTileBytes = 2 * kEight;
constexpr int kPacked = 2;            // columns that the tensor maps count as one element: a box has 256 at most
constexpr int kPad = 32;              // elements: neighbouring rows of the input begin 64 bytes apart in the banks

// Where the next attention wants its queries, keys and values (with STORE), as rotary_store does. The same fields, in the
// same order, as attention_backend/kernels/chain_store.py: ChainStore. Strides are in elements.
struct ChainStore {
  cached* k_cache;
  cached* v_cache;
  const int64* slot_mapping;  // [rows]; a negative slot is skipped
  const float* cos;           // [rows, half]
  const float* sin;
  const float* k_scale;  // [num_kv_heads] of e4m3 pages
  const float* v_scale;
  int64 k_page, k_slot, k_head, v_page, v_slot, v_head, table_row;
  int num_heads, num_kv_heads, head_dim, half;  // half of what is turned of a head
  int page_size, reserved;
};

// With GROUP: the attention in front of the chain. The same fields, in the same order, as
// attention_backend/kernels/chain_attention.py: ChainAttention. Strides are in elements.
struct ChainAttention {
  const element* k_cache;
  const element* v_cache;
  const int* block_table;
  const int* seq_lens;  // [rows]
  int64 k_page, k_slot, k_head, v_page, v_slot, v_head, table_row;
  float scale_log2;
  int num_kv_heads, page_size, table_width;
  int parts;  // blocks that share a head's keys: 1 to 32, and all heads' are no more than there are
  int reserved;
};

// The same fields, in the same order, as attention_backend/kernels/layer_chain.py: ChainParams.
struct ChainParams {
  TensorMap weights[kPhases];
  const element* attended;  // [rows, attended_width]; with GROUP the queries, [rows, heads, HEAD_DIM]
  const element* residual;  // [rows, width]
  const element* norm_mlp;  // [width]
  const element* norm_next;
  const element* bias;      // [next_width], or null
  element* total;           // [rows, width]
  element* next;            // [rows, next_width], or with STORE the queries alone
  uint32* words;            // Exchange; zero before and after
  int rows, attended_width, width, gated_width, next_width;
  uint32 stages, in_flight;  // tiles that the ring holds, and of these at most on their way
  float eps_mlp, eps_next;
  ChainStore store;
  ChainAttention attention;
};

// Rows of weights of a group: eight from `first`, and the eight that lie `apart` rows behind them.
struct GroupRows {
  int first, apart;
};

// The tiles of a phase: `tiles` of the columns of each group of 16 weight rows, group after group.
struct Phase {
  int tiles;
  int begin, end;  // this block's

 private:
  bool gate;
  int apart;           // in phase 1
  int head_dim, half;  // in phase 3 with STORE, else head_dim is 0: groups are of columns that are turned together

 public:
  __device__ __forceinline__ Phase(const ChainParams& p, int phase) {
    gate = phase == 1;
    const int in = phase == 0 ? p.attended_width : phase == 2 ? p.gated_width : p.width;
    const int out = gate ? p.gated_width : phase == 3 ? p.next_width : p.width;
    const int group_rows = gate ? 8 : 16;
    apart = p.gated_width;
    head_dim = STORE && phase == 3 ? p.store.head_dim : 0, half = p.store.half;
    tiles = (in + COLS - 1) / COLS;
    const int groups = (out + group_rows - 1) / group_rows;
    // A group may be two blocks', not more: where blocks have less than a group's tiles each, groups stay whole.
    const int unit = groups >= static_cast<int>(gridDim.x) ? 1 : tiles;
    const int64 units = static_cast<int64>(groups) * tiles / unit;
    begin = static_cast<int>(units * blockIdx.x / gridDim.x) * unit;
    end = static_cast<int>(units * (blockIdx.x + 1) / gridDim.x) * unit;
  }

  __device__ __forceinline__ GroupRows rows(int group) const {
    if (gate) return {group * 8, apart};
    if (head_dim == 0) return {group * 16, 8};
    const int per_head = head_dim / 16, head = group / per_head, pair = (group - head * per_head) * 8;
    return pair < half ? GroupRows{head * head_dim + pair, half} : GroupRows{head * head_dim + pair * 2, 8};
  }
};
