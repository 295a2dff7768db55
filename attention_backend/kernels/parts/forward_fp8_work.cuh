// The work of the persistent 8-bit forward: a line of tiles of query rows that all blocks draw from, those with the most
// keys first, so that they finish together; and the rings of shared memory through which a tile's queries, keys and values
// come. Where all tiles are as long, the last round has some blocks without one: the host has the tiles of that round cut
// into parts of their keys (parts/forward_fp8_parts.cuh puts them together again).
#pragma once

#include "parts/forward_fp8_tiles.cuh"
#include "parts/stages.cuh"

constexpr uint32 kFourOnes = 0x38383838;  // e4m3
constexpr int kQueryStages = 2, kTileSlots = 2;

// One unit of work, shared by the warps of a block.
struct Tile {
  int batch, head, kv;  // kv: the line of keys and values, of all sequences
  int q_tile, first_row, last_row;
  int end;     // of the key tiles, from right to left, one past the first
  int steps;   // key tiles; 0: nothing is seen
  int masked;  // of those, the first ones that some rows do not see all of
  int part;    // of those of all tiles that are cut; -1: whole
};
static_assert(sizeof(Tile) == 40, "_TILE_BYTES in heuristics/fp8.py");

// One past the last key that query i sees.
__device__ __forceinline__ int end_of_keys(int i, const Fp8Params& p) {
  return p.causal ? min(i + p.seqlen_k - p.seqlen_q + 1, p.seqlen_k) : p.seqlen_k;
}

// The unit-th of the line: a whole tile, or a part of one of those that are cut.
__device__ __forceinline__ void describe(Tile& tile, int unit, const Fp8Params& p) {
  const int part = unit - p.whole, index = part < 0 ? unit : p.whole + part % p.cut, line = p.num_heads * p.q_tiles;
  tile.batch = index / line;
  const int rest = index - tile.batch * line, section = rest / (p.section * p.q_tiles);
  const int place = rest - section * p.section * p.q_tiles;
  const int heads = min(p.section, p.num_heads - section * p.section);
  tile.head = section * p.section + place % heads;
  tile.kv = tile.batch * (p.num_heads / p.group) + tile.head / p.group;
  tile.q_tile = p.q_tiles - 1 - place / heads;
  tile.first_row = tile.q_tile * BLOCK_M;
  tile.last_row = min(tile.first_row + BLOCK_M, p.seqlen_q) - 1;
  tile.end = (max(end_of_keys(tile.last_row, p), 0) + BLOCK_N - 1) / BLOCK_N;
  tile.steps = tile.end;
  // Tiles that every row sees whole end at the first row's last key.
  tile.masked = min(max(tile.steps - max(end_of_keys(tile.first_row, p), 0) / BLOCK_N, 1), tile.steps);
  tile.part = max(part, -1);
  if (part >= 0) {
    const int split = part / p.cut, begin = tile.steps * split / p.splits, end = tile.steps * (split + 1) / p.splits;
    tile.end -= begin;
    tile.steps = end - begin;
    tile.masked = min(max(tile.masked - begin, 0), tile.steps);
  }
}

struct Shared {
  uint32 q, k, v;  // rings
  uint32 full_q, empty_q, full_k, empty_k, full_v, empty_v, full_tile, empty_tile;
  float* q_scale;  // [kQueryStages, BLOCK_M]
  Tile* tiles;

  __device__ __forceinline__ explicit Shared(char* memory) {
    const uint32 base = shared_address(memory);
    q = (base + 1023) & ~1023u;
    k = q + kQueryStages * kBytesQ;
    v = k + STAGES * kBytesKv;
    const uint32 scales = v + STAGES * kStageV;
    full_q = scales + kQueryStages * BLOCK_M * 4;
    empty_q = full_q + 8 * kQueryStages;
    full_k = empty_q + 8 * kQueryStages;
    empty_k = full_k + 8 * STAGES;
    full_v = empty_k + 8 * STAGES;
    empty_v = full_v + 8 * STAGES;
    full_tile = empty_v + 8 * STAGES;
    empty_tile = full_tile + 8 * kTileSlots;
    q_scale = reinterpret_cast<float*>(memory + (scales - base));
    tiles = reinterpret_cast<Tile*>(memory + (empty_tile + 8 * kTileSlots - base));
  }

  // The channels of ones behind those of the values; the whole block.
  __device__ __forceinline__ void write_ones() const {
    for (int slab = 0; slab < STAGES * kSteps; slab++)
      for (int i = threadIdx.x * 4; i < kOnes * 32; i += kThreads * 4)
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(v + slab * kSlab + HEAD_DIM * 32 + i), "r"(kFourOnes));
    fence_async_proxy();  // the tensor cores read them
  }

  __device__ __forceinline__ void init_barriers() const {
    for (int i = 0; i < kQueryStages; i++) {
      barrier_init(full_q + 8 * i, 1);
      barrier_init(empty_q + 8 * i, kConsumers * 4);
    }
    for (int i = 0; i < STAGES; i++) {
      barrier_init(full_k + 8 * i, 1);
      barrier_init(full_v + 8 * i, 1);
      barrier_init(empty_k + 8 * i, kConsumers);
      barrier_init(empty_v + 8 * i, kConsumers);
    }
    for (int i = 0; i < kTileSlots; i++) {
      barrier_init(full_tile + 8 * i, 1);
      barrier_init(empty_tile + 8 * i, kConsumers * 4);
    }
    barrier_init_fence();
  }
};

// Where element n of a ring of SIZE is.
template <int SIZE>
__device__ __forceinline__ uint32 element_of(uint32 ring, int bytes, int n) {
  return ring + stage<SIZE>(n) * bytes;
}

// A tile of keys or values: `copies` of the same size, `stride` bytes apart in shared memory.
template <int copies, int stride>
__device__ __forceinline__ void load_tile(uint32 ring, uint32 full, uint32 empty, int n, const uint8* from) {
  const uint32 barrier = element_of<STAGES>(full, 8, n), to = element_of<STAGES>(ring, copies * stride, n);
  wait_empty<STAGES>(empty, n);
  barrier_expect(barrier, kBytesKv);
#pragma unroll
  for (int i = 0; i < copies; i++)
    bulk_load(to + i * stride, from + i * (kBytesKv / copies), kBytesKv / copies, barrier, kEvictLast);
}

// A tile's queries, and what their scores are multiplied by.
__device__ __forceinline__ void load_queries(const Shared& shared, const Tile& tile, int q, const Fp8Params& p) {
  const int64 line = static_cast<int64>(tile.batch) * p.num_heads + tile.head, image = line * p.q_tiles + tile.q_tile;
  const uint32 barrier = element_of<kQueryStages>(shared.full_q, 8, q);
  wait_empty<kQueryStages>(shared.empty_q, q);
  barrier_expect(barrier, kBytesQ + BLOCK_M * 4);
  bulk_load(element_of<kQueryStages>(shared.q, kBytesQ, q), p.q + image * kBytesQ, kBytesQ, barrier, kEvictFirst);
  bulk_load(element_of<kQueryStages>(shared.v + STAGES * kStageV, BLOCK_M * 4, q), p.q_scale + image * BLOCK_M, BLOCK_M * 4,
            barrier, kEvictFirst);
}

// Draws tiles and fills the rings with them; one thread.
__device__ __forceinline__ void load_tiles(const Shared& shared, const Fp8Params& p) {
  const int units = p.whole + p.cut * p.splits;
  int unit = blockIdx.x, n = 0, q = 0;  // n, q: steps and tiles so far
#pragma unroll 1
  for (int t = 0;; t++) {
    wait_empty<kTileSlots>(shared.empty_tile, t);
    Tile& tile = shared.tiles[stage<kTileSlots>(t)];
    if (unit < units)
      describe(tile, unit, p);
    else
      tile.steps = -1;
    barrier_arrive(element_of<kTileSlots>(shared.full_tile, 8, t));
    if (unit >= units) break;
    if (tile.steps > 0) load_queries(shared, tile, q++, p);
    // From the tile's first key tile on, which is its last.
    int64 at = (static_cast<int64>(tile.kv) * p.k_tiles + tile.end - 1) * kBytesKv;
    auto load = [&] {
      load_tile<1, kBytesKv>(shared.k, shared.full_k, shared.empty_k, n, p.k + at);
      load_tile<kSteps, kSlab>(shared.v, shared.full_v, shared.empty_v, n++, p.v + at);
      at -= kBytesKv;
    };
#pragma unroll 1
    for (int i = 1; i < tile.steps; i++) load();
    unit = gridDim.x + atomicAdd(p.counters, 1);  // as late as it can be known in time: whoever is early takes more
    if (tile.steps > 0) load();
  }
  // The last block to get here leaves the counters as it found them.
  __threadfence();
  if (atomicAdd(p.counters + 1, 1) == gridDim.x - 1) p.counters[0] = p.counters[1] = 0;
}
