// What layer_chain_sm90 is launched with, and which tiles of which phase are a block's.
#pragma once

#include "parts/tma.cuh"

constexpr int kMostRows = 4;
constexpr int kPhases = 4;
constexpr int kTeam = WARPS * 32;     // threads that compute
constexpr int kThreads = kTeam + 32;  // and the warp that loads
constexpr int kEight = 8 * COLS * 2;  // bytes of eight rows of a tile
constexpr int kTileBytes = 2 * kEight;
constexpr int kPacked = COLS > 512 ? 4 : 2;  // columns that the tensor maps count as one element: a box has 256 at most
constexpr int kPad = 32;  // elements: neighbouring rows of the input begin 64 bytes apart in the banks

// The same fields, in the same order, as attention_backend/kernels/layer_chain.py: ChainParams.
struct ChainParams {
  TensorMap weights[kPhases];
  const element* attended;  // [rows, attended_width]
  const element* residual;  // [rows, width]
  const element* norm_mlp;  // [width]
  const element* norm_next;
  const element* bias;      // [next_width], or null
  element* total;           // [rows, width]
  element* next;            // [rows, next_width]
  uint32* words;            // Exchange; zero before and after
  int rows, attended_width, width, gated_width, next_width;
  uint32 stages, in_flight;  // tiles that the ring holds, and of these at most on their way
  float eps_mlp, eps_next;
};

// The tiles of a phase: `tiles` of the columns of each group of 16 weight rows, group after group.
struct Phase {
  int tiles;
  int group_rows;  // from a group to the next
  int apart;       // rows from a tile's first eight to its others
  int begin, end;  // this block's

  __device__ __forceinline__ Phase(const ChainParams& p, int phase) {
    const bool gate = phase == 1;
    const int in = phase == 0 ? p.attended_width : phase == 2 ? p.gated_width : p.width;
    const int out = gate ? p.gated_width : phase == 3 ? p.next_width : p.width;
    group_rows = gate ? 8 : 16;
    apart = gate ? p.gated_width : 8;
    tiles = (in + COLS - 1) / COLS;
    const int groups = (out + group_rows - 1) / group_rows;
    // A group may be two blocks', not more: where blocks have less than a group's tiles each, groups stay whole.
    const int unit = groups >= static_cast<int>(gridDim.x) ? 1 : tiles;
    const int64 units = static_cast<int64>(groups) * tiles / unit;
    begin = static_cast<int>(units * blockIdx.x / gridDim.x) * unit;
    end = static_cast<int>(units * (blockIdx.x + 1) / gridDim.x) * unit;
  }
};
