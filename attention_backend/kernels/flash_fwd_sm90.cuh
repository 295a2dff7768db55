// Attention forward for Hopper: FlashAttention-3's structure (arXiv 2407.08608, sections 3.1 and 3.2) in plain CUDA and
// PTX, made persistent. One block per SM draws tiles of query rows until none is left. Of its first warpgroup, one warp
// draws the tiles (parts/forward_work.cuh) and three keep rings of query, key and value tiles filled by TMA, across tiles.
// Each other warpgroup owns 64 query rows. It starts the product of the next scores before the softmax of these, also
// from one tile to the next, so that the tensor cores never wait for a tile's end; the warpgroups take turns at them.
//
// Key tiles are walked from right to left: those that some row sees only in part first and last, those that all see
// between. With turns, the softmax of a tile waits for the product with the values of the tile before, as the other
// warpgroup has the tensor cores then; exponentials, rescaling and packing are one stretch of code, where the special
// function unit is never alone at work. Without turns (OVERLAP) that product runs beside the softmax, and the output is
// rescaled only when a maximum grew by a factor of 2^8 (FlashAttention-4's rule; exact: it only keeps exponents small).
//
// Compile-time: BF16, HEAD_DIM and HEAD_DIM_V (tile widths, multiples of 16; narrower tensors are padded by the TMA),
// BLOCK_M, BLOCK_N, STAGES, Q_STAGES, TURNS, OVERLAP, PRODUCER_REGISTERS, CONSUMER_REGISTERS, PAGED (PAGE_ROWS keys a
// copy), PACK (rows of all query heads of a key head in one tile), SPLIT (partial results), SPARSE (lists of blocks;
// BLOCK_M 128), KEY_MASK, SOFTCAP, ALIBI, BIAS, DROPOUT.
#include "parts/element.cuh"
#include "parts/score.cuh"
#include "parts/seqlen.cuh"
#include "parts/softmax.cuh"
#include "parts/tma.cuh"
#include "parts/wgmma_sm90.cuh"

#define DENSE_KEYS (!PAGED)
#include "parts/forward_work.cuh"

constexpr int kConsumers = BLOCK_M / 64;  // warpgroups
constexpr int kThreads = 128 * (kConsumers + 1);
constexpr int kSlabsK = (HEAD_DIM + 63) / 64, kSlabsV = (HEAD_DIM_V + 63) / 64;  // of 64 columns, 128 swizzled bytes a row
constexpr int kSlabQ = BLOCK_M * 128, kSlabKv = BLOCK_N * 128;
constexpr int kBytesQ = kSlabsK * kSlabQ, kBytesK = kSlabsK * kSlabKv, kBytesV = kSlabsV * kSlabKv;
constexpr int kTileSlots = 2;
constexpr int kLoaders = 3;  // warps that read a tile's description besides the consumers'
constexpr int kKeyReaders = SPARSE ? 4 * kConsumers : kConsumers;  // warps also read what is listed beside the keys

#if OVERLAP
constexpr float kSlack = 8.f;  // log2
#endif

// What consumers must know of a step that lists of blocks gave: its first key, and its row of bits or -1.
struct ListedStep {
  int key, bits;
};

struct Shared {
  uint32 q, k, v;  // rings
  uint32 full_q, empty_q, full_k, empty_k, full_v, empty_v, full_tile, empty_tile;
  Tile* tiles;
  ListedStep* listed;  // [STAGES]

  __device__ __forceinline__ explicit Shared(char* memory) {
    const uint32 base = shared_address(memory), aligned = (base + 1023) & ~1023u;
    q = aligned;
    k = q + Q_STAGES * kBytesQ;
    v = k + STAGES * kBytesK;
    full_q = v + STAGES * kBytesV;
    empty_q = full_q + 8 * Q_STAGES;
    full_k = empty_q + 8 * Q_STAGES;
    empty_k = full_k + 8 * STAGES;
    full_v = empty_k + 8 * STAGES;
    empty_v = full_v + 8 * STAGES;
    full_tile = empty_v + 8 * STAGES;
    empty_tile = full_tile + 8 * kTileSlots;
    char* rest = memory + (empty_tile + 8 * kTileSlots - base);
    listed = reinterpret_cast<ListedStep*>(rest);
    tiles = reinterpret_cast<Tile*>(listed + STAGES);
  }

  __device__ __forceinline__ void init_barriers() const {
    for (int i = 0; i < Q_STAGES; i++) {
      barrier_init(full_q + 8 * i, 1);
      barrier_init(empty_q + 8 * i, kConsumers);
    }
    for (int i = 0; i < STAGES; i++) {
      barrier_init(full_k + 8 * i, 1);
      barrier_init(full_v + 8 * i, 1);
      barrier_init(empty_k + 8 * i, kKeyReaders);
      barrier_init(empty_v + 8 * i, kConsumers);
    }
    for (int i = 0; i < kTileSlots; i++) {
      barrier_init(full_tile + 8 * i, 1);
      barrier_init(empty_tile + 8 * i, kConsumers * 4 + kLoaders);
    }
    barrier_init_fence();
  }
};

static_assert((STAGES & (STAGES - 1)) == 0 && (Q_STAGES & (Q_STAGES - 1)) == 0, "rings are of a power of two");

// Place of element n of a ring of SIZE: its stage (times 8: of its barrier), and the parity of that barrier's phase.
template <int SIZE>
__device__ __forceinline__ int stage(int n) {
  return n & (SIZE - 1);
}
template <int SIZE>
__device__ __forceinline__ uint32 parity(int n) {
  return n / SIZE & 1;
}
template <int SIZE>
__device__ __forceinline__ void wait_full(uint32 barriers, int n) {
  barrier_wait(barriers + 8 * stage<SIZE>(n), parity<SIZE>(n));
}
template <int SIZE>
__device__ __forceinline__ void wait_empty(uint32 barriers, int n) {  // the first round finds all stages empty
  barrier_wait(barriers + 8 * stage<SIZE>(n), parity<SIZE>(n) ^ 1);
}

// A value that all lanes hold, as the compiler knows then: loops over it, barriers and descriptors live in uniform
// registers. Without, each wgmma waits for its descriptors to be copied there.
__device__ __forceinline__ int uniform(int x) { return __shfl_sync(~0u, x, 0); }

// ---------------------------------------------------------------------------------------------------------- producers

__device__ __forceinline__ void draw_tiles(const Shared& shared, const HopperParams& p) {
  WorkLine line(p);
  int index = blockIdx.x;
#pragma unroll 1
  for (int t = 0;; t++) {
    wait_empty<kTileSlots>(shared.empty_tile, t);
    Tile& tile = shared.tiles[stage<kTileSlots>(t)];
    line.draw(index, tile, p);
    const bool more = tile.steps > 0;
    if (threadIdx.x % 32 == 0) {
      barrier_arrive(shared.full_tile + 8 * stage<kTileSlots>(t));
      if (more) index = gridDim.x + atomicAdd(p.work.counters, 1);
    }
    if (!more) break;
    index = __shfl_sync(~0u, index, 0);
  }
  // The last block to get here leaves the counters as it found them.
  if (threadIdx.x % 32 == 0) {
    __threadfence();
    if (atomicAdd(p.work.counters + 1, 1) == static_cast<int>(gridDim.x) - 1) {
      p.work.counters[0] = 0;
      p.work.counters[1] = 0;
    }
  }
}

// Calls load(tile, its number) for every tile, on all lanes of one warp.
template <class Load>
__device__ __forceinline__ void for_tiles(const Shared& shared, Load load) {
#pragma unroll 1
  for (int t = 0;; t++) {
    wait_full<kTileSlots>(shared.full_tile, t);
    const Tile& tile = shared.tiles[stage<kTileSlots>(t)];
    if (tile.steps == 0) return;
    load(tile, t);
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(shared.empty_tile + 8 * stage<kTileSlots>(t));
  }
}

__device__ __forceinline__ void load_queries(const Shared& shared, const TensorMap* map, const HopperParams& p) {
  for_tiles(shared, [&](const Tile& tile, int t) {
    if (threadIdx.x % 32 != 0) return;
    const uint32 full = shared.full_q + 8 * stage<Q_STAGES>(t), to = shared.q + stage<Q_STAGES>(t) * kBytesQ;
    const int batch = p.forward.sequence.cu_seqlens_q ? 0 : tile.batch;
    const int first = tile.seq.q_begin + tile.first_row / rows_packed(p);
    wait_empty<Q_STAGES>(shared.empty_q, t);
    barrier_expect(full, kSlabsK * 128 * rows_per_tile(p));
#pragma unroll
    for (int c = 0; c < kSlabsK; c++)
#if PACK
      tma_load(to + c * kSlabQ, map, full, c * 64, 0, first, tile.head, batch, kEvictFirst);
#else
      tma_load(to + c * kSlabQ, map, full, c * 64, first, tile.head, batch, kEvictFirst);
#endif
  });
}

// Fills the ring of key tiles, or of value tiles.
template <bool KEYS>
__device__ __forceinline__ void load_tiles(const Shared& shared, const TensorMap* map, const HopperParams& p) {
  constexpr int kSlabs = KEYS ? kSlabsK : kSlabsV;
  const uint32 ring = KEYS ? shared.k : shared.v, full_ring = KEYS ? shared.full_k : shared.full_v;
  const uint32 empty_ring = KEYS ? shared.empty_k : shared.empty_v;
  const int lane = threadIdx.x % 32;
  int n = 0;
  for_tiles(shared, [&](const Tile& tile, int) {
    const int kv_head = PACK ? tile.head : tile.head / p.forward.group, steps = tile.steps;
    int key = tile.end_key;
#if PAGED
    // Every lane copies its own rows of the tile, so the lookups of pages wait for memory at the same time.
    const SequenceParams& sequence = p.forward.sequence;
    const int* table = sequence.block_table + tile.batch * sequence.block_table_stride;
    const int last_page = (max(tile.held_high, 1) - 1) / sequence.page_size;
#else
    const int kv_batch = p.forward.sequence.cu_seqlens_k ? 0 : tile.batch, begin = tile.seq.k_begin;
#endif
#pragma unroll 1
    for (int step = 0; step < steps; step++, n++) {
      const uint32 full = full_ring + 8 * stage<STAGES>(n), to = ring + stage<STAGES>(n) * kSlabs * kSlabKv;
#if SPARSE
      constexpr int kParts = 128 / BLOCK_N;
      const int entry = step / kParts;
      const bool any = tile.seq.stop > 0;
      key = any ? p.sparse.blocks[static_cast<int64>(tile.list) * p.sparse.blocks_row + entry] * 128 + step % kParts * BLOCK_N
                : 0;
      const int bits =
          any && step < tile.masked_end ? p.sparse.bit_rows[static_cast<int64>(tile.list) * p.sparse.bit_rows_row + entry] : -1;
#else
      key -= BLOCK_N;
#endif
#if PAGED
      const int row = key + lane * PAGE_ROWS, page = min(row / sequence.page_size, last_page);  // past the end: any page
      const bool mine = lane < BLOCK_N / PAGE_ROWS;
      const int block = mine ? table[page] : 0;
      wait_empty<STAGES>(empty_ring, n);
      if (lane == 0) barrier_expect(full, kSlabs * kSlabKv);
      if (mine)
#pragma unroll
        for (int c = 0; c < kSlabs; c++)
          tma_load(to + c * kSlabKv + lane * PAGE_ROWS * 128, map, full, c * 64, row % sequence.page_size, kv_head, block,
                   kEvictLast);
#else
      if (lane == 0) {
        wait_empty<STAGES>(empty_ring, n);
#if SPARSE
        if (KEYS) shared.listed[stage<STAGES>(n)] = {key, bits};
#endif
        barrier_expect(full, kSlabs * kSlabKv);
#pragma unroll
        for (int c = 0; c < kSlabs; c++)
          tma_load(to + c * kSlabKv, map, full, c * 64, begin + key, kv_head, kv_batch, kEvictLast);
      }
#endif
    }
  });
}

// ---------------------------------------------------------------------------------------------------------- consumers

// Starts s = q k^T of one tile.
__device__ __forceinline__ void start_scores(float (&s)[BLOCK_N / 2], uint64 a, uint64 b) {
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < HEAD_DIM / 16; i++)
    Wgmma<BLOCK_N>::shared(s, a + i / 4 * (kSlabQ >> 4) + i % 4 * 2, b + i / 4 * (kSlabKv >> 4) + i % 4 * 2, i != 0);
  wgmma_commit();
}

// Starts acc += p v of one tile.
__device__ __forceinline__ void start_output(float (&acc)[HEAD_DIM_V / 2], const uint32 (&p)[BLOCK_N / 16][4], uint32 v) {
  const uint64 b = wgmma_descriptor(v, kSlabKv);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < BLOCK_N / 16; i++) Wgmma<HEAD_DIM_V>::registers(acc, p[i], b + i * 128);
  wgmma_commit();
}

// The query and the head of a row.
__device__ __forceinline__ int query_of(int row, const HopperParams& p) { return row / rows_packed(p); }
__device__ __forceinline__ int head_of(int row, const Tile& tile, const HopperParams& p) {
  return tile.head * rows_packed(p) + row % rows_packed(p);
}

#if KEY_MASK
// Of this thread's keys (columns 8 i + column, + 1), those that the mask shows, as bits 2 i and 2 i + 1.
struct KeyBits {
  uint32 words[(BLOCK_N / 4 + 31) / 32];

  __device__ __forceinline__ KeyBits(const uint8* mask, int first_key, int stop) {
#pragma unroll
    for (int w = 0; w < (BLOCK_N / 4 + 31) / 32; w++) words[w] = 0;
#pragma unroll
    for (int i = 0; i < BLOCK_N / 8; i++)
#pragma unroll
      for (int j = 0; j < 2; j++) {
        const int key = first_key + i * 8 + j;
        if (key < stop && mask[key]) words[i / 16] |= 1u << (i % 16 * 2 + j);
      }
  }
  __device__ __forceinline__ bool sees(int i, int j) const { return words[i / 16] >> (i % 16 * 2 + j) & 1; }
};
#endif

// Hides the keys that rows may not see; `row0` is the thread's first row, `key0` the tile's first key.
__device__ __forceinline__ void mask_scores(float (&s)[BLOCK_N / 2], const Tile& tile, const HopperParams& p, int row0,
                                            int key0, int column, const uint4* bits) {
  const Sequence& seq = tile.seq;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int query = query_of(row0 + half * 8, p);
    const int low = seq.low(query) - key0 - column;
    const uint32 count = max(seq.high(query) - key0 - column - low, 0);
#pragma unroll
    for (int i = 0; i < BLOCK_N / 8; i++)
#pragma unroll
      for (int j = 0; j < 2; j++)
        if (static_cast<uint32>(i * 8 + j - low) >= count) s[i * 4 + half * 2 + j] = -kInfinity;
#if SPARSE
    if (bits) {
      // A tile is the block's 128 keys or, if narrower, a part of them.
      const uint2* row = reinterpret_cast<const uint2*>(bits + (row0 + half * 8) % 128) + key0 % 128 / 64;
      uint32 words[BLOCK_N / 32];
#pragma unroll
      for (int w = 0; w < BLOCK_N / 64; w++) words[2 * w] = row[w].x, words[2 * w + 1] = row[w].y;
#pragma unroll
      for (int i = 0; i < BLOCK_N / 8; i++)
#pragma unroll
        for (int j = 0; j < 2; j++)
          if (!(words[i / 4] >> (i % 4 * 8 + column + j) & 1)) s[i * 4 + half * 2 + j] = -kInfinity;
    }
#endif
  }
}

// A row's running softmax, of the thread's two rows: what is taken out of the exponents, and the sum of the terms.
struct Rows {
  float level[2], sum[2];

  __device__ __forceinline__ void clear() {
    level[0] = level[1] = -kInfinity;
    sum[0] = sum[1] = 0.f;
  }
};

// Turns scores into unnormalised probabilities; `correction` is the factor of what came before. True when, in some row of
// the warp, it is not 1. Where registers allow it, maxima and sums are two chains each: often one warp alone must keep its
// scheduler busy. EMPTY: a row may have seen nothing yet.
template <bool EMPTY>
__device__ __forceinline__ bool softmax_tile(float (&s)[BLOCK_N / 2], Rows& rows, float (&correction)[2],
                                             const Score& score) {
  constexpr int kChains = CONSUMER_REGISTERS >= 200 ? 2 : 1;
  bool grew = false;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    float m[kChains];
#pragma unroll
    for (int i = 0; i < BLOCK_N / 4; i++) {
      const float x = s[i / 2 * 4 + half * 2 + i % 2];
      m[i % kChains] = i < kChains ? x : fmaxf(m[i % kChains], x);
    }
    float top = fmaxf(m[0], m[kChains - 1]);
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
    float level = fmaxf(rows.level[half], score.level(top));
#if OVERLAP
    const bool grows = score.above(level, rows.level[half]) > kSlack;  // never from -inf to -inf, a NaN
    if (!grows) level = rows.level[half];
    grew = grew || grows;
#endif
    const float shift = EMPTY && level == -kInfinity ? 0.f : level;
    correction[half] = exp2_approx(score.above(rows.level[half], shift));
    rows.level[half] = level;
    float sum[kChains] = {};
#pragma unroll
    for (int i = 0; i < BLOCK_N / 4; i++) {
      float& x = s[i / 2 * 4 + half * 2 + i % 2];
      x = exp2_approx(score.exponent(x, shift));
      sum[i % kChains] += x;
    }
    float all = sum[0];
    if (kChains > 1) all += sum[kChains - 1];
    rows.sum[half] = fmaf(rows.sum[half], correction[half], all);
#if OVERLAP
    asm volatile("" : "+f"(rows.sum[half]));  // here, in the shadow of the exponentials, and not after the next wait
#endif
  }
  return OVERLAP ? __any_sync(~0u, grew) : true;
}

__device__ __forceinline__ void pack_tile(uint32 (&p)[BLOCK_N / 16][4], const float (&s)[BLOCK_N / 2]) {
#pragma unroll
  for (int i = 0; i < BLOCK_N / 16; i++)
#pragma unroll
    for (int j = 0; j < 4; j++) p[i][j] = pack2(s[i * 8 + j * 2], s[i * 8 + j * 2 + 1]);
}

// Ends the softmax of the thread's rows: writes their lse, gives the factor of their output.
__device__ __forceinline__ void end_rows(float (&factor)[2], const Rows& rows, const Tile& tile, const HopperParams& p,
                                         const Score& score, int local_row) {
  const ForwardParams& f = p.forward;
  const bool packed = f.sequence.cu_seqlens_q != nullptr;
  float* lse = f.lse + (packed ? tile.seq.q_begin : tile.batch * f.lse_batch);
#if SPLIT
  lse += tile.split * p.work.lse_split;
#endif
#pragma unroll
  for (int half = 0; half < 2; half++) {
    float l = rows.sum[half];
    l += __shfl_xor_sync(~0u, l, 1);
    l += __shfl_xor_sync(~0u, l, 2);
    const int row = tile.first_row + local_row + half * 8, head = head_of(row, tile, p);
    const bool real = local_row + half * 8 < rows_per_tile(p) && row < tile.end_row;
    const RowEnd end = end_row(score.log2_of(rows.level[half]), l, f.sinks && real ? f.sinks + head : nullptr);
    factor[half] = end.factor;
#if DROPOUT
    factor[half] *= p.dropout.scale;
#endif
    if (real && threadIdx.x % 4 == 0) lse[head * f.lse_head + query_of(row, p)] = end.lse * kLn2;
  }
}

// Writes the thread's rows of the output, 16 bytes at a time: the four threads of a row swap their pairs of columns.
__device__ __forceinline__ void store_rows(const float (&acc)[HEAD_DIM_V / 2], const float (&factor)[2], const Tile& tile,
                                           const HopperParams& p, int local_row) {
  const ForwardParams& f = p.forward;
  const int c = threadIdx.x % 4;
  const bool packed = f.sequence.cu_seqlens_q != nullptr;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int row = tile.first_row + local_row + half * 8;
    const bool real = local_row + half * 8 < rows_per_tile(p) && row < tile.end_row;
    const int64 offset = (packed ? 0 : tile.batch * f.out_batch) +
                         (tile.seq.q_begin + static_cast<int64>(query_of(row, p))) * f.out_row +
                         head_of(row, tile, p) * f.out_head;
#if SPLIT
    float* out = reinterpret_cast<float*>(f.out) + tile.split * p.work.out_split + offset;
#pragma unroll
    for (int i = 0; i < HEAD_DIM_V / 8; i++)
      if (real && i * 8 < f.head_dim_v)
        *reinterpret_cast<float2*>(out + i * 8 + c * 2) =
            make_float2(acc[i * 4 + half * 2] * factor[half], acc[i * 4 + half * 2 + 1] * factor[half]);
#else
#pragma unroll
    for (int i = 0; i < HEAD_DIM_V / 8; i += 4) {
      uint32 x[4];
#pragma unroll
      for (int j = 0; j < 4; j++)
        x[j] = i + j < HEAD_DIM_V / 8 ? pack2(acc[(i + j) * 4 + half * 2] * factor[half],
                                              acc[(i + j) * 4 + half * 2 + 1] * factor[half])
                                      : 0;
      // A 4 x 4 transpose among four lanes: afterwards lane c holds the 8 columns of group i + c.
#pragma unroll
      for (int b = 1; b <= 2; b *= 2)
#pragma unroll
        for (int j = 0; j < 4; j++)
          if (!(j & b)) {
            const uint32 y = __shfl_xor_sync(~0u, c & b ? x[j] : x[j | b], b);
            if (c & b)
              x[j] = y;
            else
              x[j | b] = y;
          }
      if (real && (i + c) * 8 < f.head_dim_v)
        *reinterpret_cast<uint4*>(f.out + offset + (i + c) * 8) = make_uint4(x[0], x[1], x[2], x[3]);
    }
#endif
  }
}

// Slots that no row of the sequence sees may hold anything, and zero times NaN is NaN: their values become zeros. Each
// warpgroup does so for itself; both write the same.
__device__ __forceinline__ void clear_values(uint32 tile_v, int key0, const Tile& tile, const HopperParams& p) {
  const int thread = threadIdx.x % 128;
  const int low = tile.held_low - key0, high = tile.held_high == kNoEnd ? BLOCK_N : tile.held_high - key0;
  for (int i = thread; i < kSlabsV * BLOCK_N * 8; i += 128) {
    const int r = i / 8 % BLOCK_N;
    bool held = r >= low && r < high;
#if KEY_MASK
    held = held && key0 + r < tile.seq.stop && p.forward.score.key_mask[tile.batch * p.forward.score.key_mask_batch + key0 + r];
#endif
    if (!held)
      asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(tile_v + i / 8 / BLOCK_N * kSlabKv + r * 128 + i % 8 * 16),
                   "r"(0)
                   : "memory");
  }
  fence_async_proxy();
  named_sync(1 + kConsumers + threadIdx.x / 128, 128);
}

// What is known of a step when it is compiled: the code of masks, far longer than what it masks, stays out of the loop
// over tiles that are seen whole.
enum Mask { kWhole, kMasked, kMaybe };

class Consumer {
 public:
  __device__ __forceinline__ Consumer(const Shared& shared, const HopperParams& p)
      : shared(shared), p(p), group(uniform(threadIdx.x / 128) - 1) {
    local_row = group * 64 + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
    column = threadIdx.x % 4 * 2;
  }

  __device__ __forceinline__ void run() {
    float acc[HEAD_DIM_V / 2];
    uint32 probs[BLOCK_N / 16][4];
    Rows rows;
    if (TURNS && group == 0) named_arrive(1, 256);  // the first turn
    Steps now = next_tile(0);
    if (now.all == 0) return;
    rows.clear();
    zero(acc);
    wait_full<Q_STAGES>(shared.full_q, 0);
    step<false, kMaybe>(acc, probs, rows, now, 0, 0, 0);
    int n = 1;  // steps so far, of all tiles
#pragma unroll 1
    for (int t = 0;; t++) {
#pragma unroll 1
      for (int i = 1; i < now.all; i++, n++) {
        if (sees_mask(now, t, i, n))
          step<true, kMasked>(acc, probs, rows, now, t, i, n);
        else
          step<true, kWhole>(acc, probs, rows, now, t, i, n);
      }
      now = next_tile(t + 1);
      if (now.all == 0) return finish(acc, probs, rows, t, n);
      wait_full<Q_STAGES>(shared.full_q, t + 1);
      step<true, kMaybe>(acc, probs, rows, now, t + 1, 0, n++);
      __syncwarp();
      if (threadIdx.x % 32 == 0) barrier_arrive(shared.empty_tile + 8 * stage<kTileSlots>(t));
    }
  }

 private:
  const Shared& shared;
  const HopperParams& p;
  const int group;
  int local_row, column;

  static __device__ __forceinline__ void zero(float (&acc)[HEAD_DIM_V / 2]) {
#pragma unroll
    for (int i = 0; i < HEAD_DIM_V / 2; i++) acc[i] = 0.f;
  }

  __device__ __forceinline__ void take_turn() const {
    if (TURNS) named_sync(1 + group, 256);
  }
  __device__ __forceinline__ void pass_turn() const {
    if (TURNS) named_arrive(1 + (group + 1) % kConsumers, 256);
  }

  // What the loop over a tile's steps needs of it, in uniform registers.
  struct Steps {
    int all, masked_end, whole_end;
  };

  __device__ __forceinline__ Steps next_tile(int t) const {
    wait_full<kTileSlots>(shared.full_tile, t);
    const Tile& tile = shared.tiles[stage<kTileSlots>(t)];
    return {uniform(tile.steps), uniform(tile.masked_end), uniform(tile.whole_end)};
  }

  // Whether step `i` of tile t, the n-th of all, has keys that some row of the tile may not see.
  __device__ __forceinline__ bool sees_mask(const Steps& steps, int t, int i, int n) const {
#if SPARSE
    wait_full<STAGES>(shared.full_k, n);
    if (uniform(shared.listed[stage<STAGES>(n)].key + BLOCK_N > shared.tiles[stage<kTileSlots>(t)].seq.stop)) return true;
#endif
    return i < steps.masked_end || i >= steps.whole_end;
  }

  // Step `i` of tile t, the n-th of all. The values of the step before, if there is one, are added meanwhile; when that
  // belongs to the tile before, its output is complete then and is written.
  template <bool PENDING, Mask MASK>
  __device__ __forceinline__ void step(float (&acc)[HEAD_DIM_V / 2], uint32 (&probs)[BLOCK_N / 16][4], Rows& rows,
                                       const Steps& steps, int t, int i, int n) const {
    const Tile& tile = shared.tiles[stage<kTileSlots>(t)];
    const Tile& before = shared.tiles[stage<kTileSlots>(t - 1)];  // where i is 0
    float s[BLOCK_N / 2], correction[2], factor[2];
    const uint64 tile_q = wgmma_descriptor(uniform(shared.q + stage<Q_STAGES>(t) * kBytesQ + group * 64 * 128), 16);
    const uint64 tile_k = wgmma_descriptor(uniform(shared.k + stage<STAGES>(n) * kBytesK), 16);
    wait_full<STAGES>(shared.full_k, n);
    take_turn();
    start_scores(s, tile_q, tile_k);
    if (PENDING) {
      const uint32 tile_v = uniform(shared.v + stage<STAGES>(n - 1) * kBytesV);
      wait_full<STAGES>(shared.full_v, n - 1);
      start_output(acc, probs, tile_v);
    }
    pass_turn();
    if (PENDING && i == 0) {
      const Score score(p.forward.score, before.batch, before.head);
      end_rows(factor, rows, before, p, score, local_row);
      rows.clear();
    }
    const Score score(p.forward.score, tile.batch, tile.head);
    int key0 = tile.end_key - (i + 1) * BLOCK_N;
    const uint4* bits = nullptr;
#if SPARSE
    const ListedStep listed = shared.listed[stage<STAGES>(n)];
    key0 = listed.key;
    if (listed.bits >= 0) bits = p.sparse.bits + static_cast<int64>(listed.bits) * 128;
#endif
#if KEY_MASK
    const KeyBits shown(p.forward.score.key_mask + tile.batch * p.forward.score.key_mask_batch, key0 + column, tile.seq.stop);
#endif
    const int row0 = tile.first_row + local_row;
    const bool masked = MASK == kMasked || (MASK == kMaybe && sees_mask(steps, t, i, n));
    wgmma_wait<PENDING ? 1 : 0>();
    if (SPARSE) __syncwarp();
    if (threadIdx.x % (128 * kConsumers / kKeyReaders) == 0) barrier_arrive(shared.empty_k + 8 * stage<STAGES>(n));
    if (i == steps.all - 1 && threadIdx.x % 128 == 0) barrier_arrive(shared.empty_q + 8 * stage<Q_STAGES>(t));
#if SCORE_CHANGES
#pragma unroll
    for (int x = 0; x < BLOCK_N / 2; x++)
      s[x] = score(s[x], row0 + x / 2 % 2 * 8, key0 + column + x / 4 * 8 + x % 2, tile.seq);
#endif
#if KEY_MASK
#pragma unroll
    for (int x = 0; x < BLOCK_N / 2; x++)
      if (!shown.sees(x / 4, x % 2)) s[x] = -kInfinity;
#endif
    if (masked) mask_scores(s, tile, p, row0, key0, column, bits);
    if (PENDING && !OVERLAP) wgmma_wait<0>();
    const bool rescale = softmax_tile<MASK != kWhole || KEY_MASK || BIAS>(s, rows, correction, score);
    if (PENDING) {
      if (OVERLAP) wgmma_wait_behind(p.work.batch > 0);
      if (threadIdx.x % 128 == 0) barrier_arrive(shared.empty_v + 8 * stage<STAGES>(n - 1));
      if (i == 0) {
        store_rows(acc, factor, before, p, local_row);
        zero(acc);
      } else if (rescale) {
#pragma unroll
        for (int x = 0; x < HEAD_DIM_V / 2; x++) acc[x] *= correction[x / 2 % 2];
      }
    }
    pack_tile(probs, s);
#if DROPOUT
    const Dropout dropout(p.dropout, tile.batch * p.work.heads + tile.head);
    dropout(probs, row0 / 16, key0 / 16);
#endif
    if (KEY_MASK || (masked && (key0 < tile.held_low || key0 + BLOCK_N > tile.held_high))) {
      wait_full<STAGES>(shared.full_v, n);
      clear_values(shared.v + stage<STAGES>(n) * kBytesV, key0, tile, p);
    }
  }

  // Adds the last values, of step n - 1, and writes the last tile, t.
  __device__ __forceinline__ void finish(float (&acc)[HEAD_DIM_V / 2], const uint32 (&probs)[BLOCK_N / 16][4],
                                         const Rows& rows, int t, int n) const {
    const Tile& tile = shared.tiles[stage<kTileSlots>(t)];
    wait_full<STAGES>(shared.full_v, n - 1);
    start_output(acc, probs, shared.v + stage<STAGES>(n - 1) * kBytesV);
    float factor[2];
    const Score score(p.forward.score, tile.batch, tile.head);
    end_rows(factor, rows, tile, p, score, local_row);
    wgmma_wait<0>();
    store_rows(acc, factor, tile, p, local_row);
  }
};

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    flash_fwd_sm90(const __grid_constant__ TensorMap map_q, const __grid_constant__ TensorMap map_k,
                   const __grid_constant__ TensorMap map_v, const __grid_constant__ HopperParams p) {
  extern __shared__ __align__(1024) char memory[];
  const Shared shared(memory);
  if (threadIdx.x == 0) shared.init_barriers();
  __syncthreads();
  if (threadIdx.x < 128) {
    registers_lower<PRODUCER_REGISTERS>();
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    if (warp == 0) load_tiles<true>(shared, &map_k, p);
    if (warp == 1) load_tiles<false>(shared, &map_v, p);
    if (warp == 2) load_queries(shared, &map_q, p);
    if (warp == 3) draw_tiles(shared, p);
  } else {
    registers_raise<CONSUMER_REGISTERS>();
    Consumer(shared, p).run();
  }
}
