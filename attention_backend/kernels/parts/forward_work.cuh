// The work of the persistent Hopper forward: a line of tiles (query rows of one head, and a part of their keys) that all
// blocks draw from, longest first, so that they finish together.
//
// Sequences follow one another on the line. Within one, the heads whose keys and values fit in the L2 together are taken
// together, from the last query rows to the first: under a causal mask those have the most keys.
#pragma once

#include "parts/cluster.cuh"
#include "parts/forward_nothing.cuh"
#include "parts/hopper_params.cuh"

#if OWN_KEYS
// What the 64 rows of a warpgroup see of a tile's steps: none before `first` (all of them: there are no such rows), of that
// one the lower half with `half`; masked_end and whole_end as the tile's.
struct OwnSteps {
  int first, half, masked_end, whole_end;
};
#endif

// One unit of work, shared by the warps of a block. Rows are packed rows: query * p.pack + (query head of the group).
struct Tile {
  int steps;       // key tiles, from right to left; 0: there is no more work
  int masked_end;  // steps before it see a mask,
  int whole_end;   // those up to here none, the others again one
  int end_key;     // one past the last key of step 0
  int batch, head;  // head: of the queries, or of the keys when rows are packed
  int split, num_splits;  // the part of the keys, and how many parts the sequence's are cut into
  int first_row, end_row;
  int skipped, drawn;  // tiles of the sequence's rows, of one head: those before all others that see nothing, the others
  int held_low, held_high;  // slots that hold data; others may hold anything
  int list;                 // block-sparse: the row of the lists
  Sequence seq;
#if OWN_KEYS
  OwnSteps own[BLOCK_M / 64];
#endif
};
static_assert(sizeof(Tile) == 96 + (OWN_KEYS ? 16 * (BLOCK_M / 64) : 0), "_TILE_BYTES and _OWN_BYTES in heuristics/sm90.py");

// What a variant has not is known when it is compiled.
__device__ __forceinline__ int rows_packed(const HopperParams& p) { return PACK ? p.work.pack : 1; }
__device__ __forceinline__ int rows_per_tile(const HopperParams& p) { return PACK ? p.work.tile_rows : BLOCK_M; }
// A tile is drawn for each block of a cluster: of neighbouring rows, or (CLUSTER_HEADS) of the same rows of neighbouring
// query heads with one key head, which see the same keys whatever the mask.
constexpr int kHeadsDrawn = CLUSTER_HEADS ? CLUSTER : 1, kTilesDrawn = CLUSTER / kHeadsDrawn;
__device__ __forceinline__ int rows_drawn(const HopperParams& p) { return kTilesDrawn * rows_per_tile(p); }
__device__ __forceinline__ int key_head_of(const Tile& tile, const HopperParams& p) {
  return PACK ? tile.head : tile.head / p.forward.group;
}

// Where rows are many. Parts of keys and packed rows are for few; lists say themselves what their rows see, and of
// neighbouring rows a cluster draws both tiles, whether they see keys or not.
#define SKIPS (!SPLIT && !PACK && !SPARSE && (CLUSTER == 1 || CLUSTER_HEADS))
#if CLUSTER > 1
static_assert(!SPARSE && !OWN_KEYS && !FP8_PAGES, "blocks that share keys walk the same tiles of them");
static_assert(!PACK || !CLUSTER_HEADS, "a tile holds all heads of a key head");
#endif

#if OWN_KEYS
static_assert(!SPLIT && !PACK && !SPARSE, "a warpgroup's rows are 64 queries of one head, over one stretch of keys");
#endif
constexpr bool kHalfSteps = OWN_KEYS && BLOCK_N == 128;  // narrower products than those of 64 keys gain nothing

constexpr int kNoEnd = 0x7fffffff;
constexpr int kFewestSteps = 4;  // of a part; FEWEST_STEPS in heuristics/sm90.py
constexpr float kPartSteps = 5.f;  // what a part costs beside its steps: PART_STEPS in heuristics/sm90.py
constexpr float kNearly = 1.02f;
constexpr int kL2Kilobytes = 16 << 10;  // of keys and values that stay in the L2 beside what streams through it

// Draws tiles; all 32 lanes of one warp call. BLOCK_N is the kernel's.
class WorkLine {
 public:
  __device__ __forceinline__ explicit WorkLine(const HopperParams& p) : base(-32), before(0), sum(0), nothing(0), splits(1) {
    if (SPLIT && p.work.chosen) choose(p);
  }

  // The next tile of this block, or steps == 0.
  __device__ __forceinline__ void draw(int index, Tile& tile, const HopperParams& p) {
    int total = __shfl_sync(~0u, sum, 31);
    // As unsigned, a number below zero is past the end too: a counter that a stray write has changed may leave tiles out of
    // the result, but makes no tile of rows that are not there, whose stores would go anywhere.
    while (static_cast<uint32>(index) >= static_cast<uint32>(before + total)) {
      before += total;
      base += 32;
      if (base >= p.work.batch) {
        tile.steps = 0;
        return;
      }
      count(p);
      total = __shfl_sync(~0u, sum, 31);
    }
    const int lane = __ffs(__ballot_sync(~0u, index < before + sum)) - 1;
    const int start = before + (lane ? __shfl_sync(~0u, sum, lane - 1) : 0);
    describe(index - start, base + lane, SPLIT ? __shfl_sync(~0u, splits, lane) : 1, tile, p);
    __syncwarp();
  }

  // Writes a share of the rows that see nothing: of those of the 32 sequences in which tile `index`, the last one that was
  // drawn, lies; all tiles of theirs have as much.
  __device__ __forceinline__ void write_share(int index, const HopperParams& p) const {
    const int all = SKIPS ? __shfl_sync(~0u, nothing, 31) : 0;
    if (all == 0) return;
    const int tiles = __shfl_sync(~0u, sum, 31), nth = index - before + 1;
    const float share = static_cast<float>(all) / static_cast<float>(tiles);
    const int end = nth == tiles ? all : min(static_cast<int>(static_cast<float>(nth) * share), all);
#pragma unroll 1
    for (int i = min(static_cast<int>(static_cast<float>(nth - 1) * share), all); i < end; i++) {
      const int lane = __ffs(__ballot_sync(~0u, i < nothing)) - 1;
      const int start = lane ? __shfl_sync(~0u, nothing, lane - 1) : 0;
      const int rows = (__shfl_sync(~0u, nothing, lane) - start) / (p.work.heads / kHeadsDrawn), head = (i - start) / rows;
      write_nothing(base + lane, head * kHeadsDrawn + (CLUSTER_HEADS ? cluster_rank() : 0), i - start - head * rows, p);
    }
  }

 private:
  int base, before;  // the first of the 32 sequences looked at (-32: none yet), and the tiles before it
  int sum;           // tiles of the sequences up to this lane's,
  int nothing;       // and of their rows that see nothing, which are not drawn
  int splits;        // of this lane's sequence
  float parts;       // of a step of a sequence's last tile, where their number is chosen

  static __device__ __forceinline__ int row_tiles(int seqlen_q, const HopperParams& p) {
    return (seqlen_q * rows_packed(p) + rows_drawn(p) - 1) / rows_drawn(p);
  }

  // Tiles of rows that see nothing, from a sequence's first one on: they are not drawn. One is, if no row sees anything.
  static __device__ __forceinline__ int skipped_tiles(const Sequence& seq, const HopperParams& p) {
    if (!SKIPS || seq.seqlen_q <= 0) return 0;
    return min(seq.first_row_with_keys() / rows_drawn(p), row_tiles(seq.seqlen_q, p) - 1);
  }

  // Key tiles that the last tile of rows of a sequence sees: the most.
  static __device__ __forceinline__ int most_steps(const Sequence& seq, const HopperParams& p) {
    if (seq.seqlen_q <= 0) return 0;
    const int first_row = (row_tiles(seq.seqlen_q, p) - 1) * rows_drawn(p);
    const int low = seq.low(first_row / rows_packed(p)), high = seq.high(seq.seqlen_q - 1);
    return high > low ? (high + BLOCK_N - 1) / BLOCK_N - low / BLOCK_N : 0;
  }

  // Sequences of a step may have few rows over many keys beside many rows over few: the first alone would leave most
  // blocks idle. All tiles together are the work of so many of the longest, in rounds of a tile a block, and what is less
  // than a whole one of those finds room in a round that is not full; the fewest parts are taken with which the last round
  // ends as early as with any number, or nearly.
  __device__ __forceinline__ void choose(const HopperParams& p) {
    float work = 0.f;
    int longest = 0;
#pragma unroll 1
    for (int b = threadIdx.x % 32; b < p.work.batch; b += 32) {
      const Sequence seq(p.forward.sequence, b);
      const int steps = most_steps(seq, p);
      longest = max(longest, steps);
      work += static_cast<float>(row_tiles(max(seq.seqlen_q, 0), p)) * static_cast<float>(steps);
    }
#pragma unroll
    for (int d = 16; d; d /= 2) {
      longest = max(longest, __shfl_xor_sync(~0u, longest, d));
      work += __shfl_xor_sync(~0u, work, d);
    }
    parts = 0.f;
    if (longest < 2 * kFewestSteps) return;
    const float steps = static_cast<float>(longest), drawers = static_cast<float>(gridDim.x / CLUSTER);
    const float rounds = work / steps * static_cast<float>(p.work.heads / kHeadsDrawn) / drawers;
    const float whole = floorf(work / steps + 1e-3f) * static_cast<float>(p.work.heads / kHeadsDrawn) / drawers;
    const int limit = min(p.work.num_splits, longest / kFewestSteps);
    // A lane has every 32nd number.
    const int lane = threadIdx.x % 32;
    float best = kInfinity;
#pragma unroll 1
    for (int s = 1 + lane; s <= limit; s += 32) best = fminf(best, time_of(s, whole, rounds, steps));
#pragma unroll
    for (int d = 16; d; d /= 2) best = fminf(best, __shfl_xor_sync(~0u, best, d));
#pragma unroll 1
    for (int first = 1; parts == 0.f && first <= limit; first += 32) {
      const int s = first + lane;
      const uint32 good = __ballot_sync(~0u, s <= limit && time_of(s, whole, rounds, steps) <= kNearly * best);
      if (good) parts = static_cast<float>(first + __ffs(good) - 1) / steps;
    }
  }

  // In steps of a block: rounds of tiles are so many more of parts, of which those of `whole` ones end together.
  static __device__ __forceinline__ float time_of(int splits, float whole, float rounds, float steps) {
    const float s = static_cast<float>(splits);
    return fmaxf(ceilf(whole * s - 1e-3f), rounds * s) * (steps / s + kPartSteps);
  }

  __device__ __forceinline__ void count(const HopperParams& p) {
    const int b = base + static_cast<int>(threadIdx.x % 32);
    sum = nothing = 0;
    if (b < p.work.batch) {
      const Sequence seq(p.forward.sequence, b);
      if (SPLIT) {
        const int steps = most_steps(seq, p);
        splits = p.work.num_splits;
        if (p.work.chosen) splits = min(static_cast<int>(ceilf(static_cast<float>(steps) * parts - 1e-3f)), splits);
        splits = max(1, min(splits, steps));  // rows of nobody, that see no keys, are one part
      }
      nothing = skipped_tiles(seq, p) * (p.work.heads / kHeadsDrawn);
      sum = row_tiles(seq.seqlen_q, p) * (p.work.heads / kHeadsDrawn) * splits - nothing;
    }
    add_up(sum);
    if (SKIPS) add_up(nothing);
  }

  // Over the lanes up to this one.
  static __device__ __forceinline__ void add_up(int& x) {
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const int other = __shfl_up_sync(~0u, x, d);
      if (static_cast<int>(threadIdx.x % 32) >= d) x += other;
    }
  }

  // Tile `index` of sequence b. A producer has few registers: lanes ask for the bounds of different rows.
  static __device__ __forceinline__ void describe(int index, int b, int splits, Tile& tile, const HopperParams& p) {
    const int lane = threadIdx.x % 32;
    if (lane == 0) {
      tile.seq = Sequence(p.forward.sequence, b);
      tile.batch = b;
    }
    __syncwarp();
    const Sequence& seq = tile.seq;
    if (lane == 0) tile.skipped = skipped_tiles(seq, p), tile.drawn = row_tiles(seq.seqlen_q, p) - tile.skipped;
    __syncwarp();
    const int m_tiles = tile.drawn, units = m_tiles * splits;
    // Halves of halves, so sections are even, and none of less than one and a half tiles a block: a small last one would
    // leave its longest tiles to run beside idle blocks. Clusters' tiles that are all as long need none of that.
    const bool even = CLUSTER > 1 && seq.low(0) == seq.low(seq.seqlen_q - 1) && seq.high(0) == seq.high(seq.seqlen_q - 1);
    const int kilobytes = max(seq.stop, 0) / 16 * p.work.key_bytes / 64;
    const int heads_per_key = p.work.heads_per_key / kHeadsDrawn;
    int together = p.work.key_heads;
    while (together > 1 && together * kilobytes > kL2Kilobytes &&
           (even || (together + 1) / 2 * heads_per_key * units * 2 >= static_cast<int>(gridDim.x) / CLUSTER * 3))
      together = (together + 1) / 2;
    together *= heads_per_key;
    // None is below zero, and code that need not ask is shorter.
    const auto quotient = [](int x, int by) -> int { return static_cast<uint32>(x) / static_cast<uint32>(by); };
    const int section = quotient(index, together * units);
    index -= section * together * units;
    const int heads = min(together, p.work.heads / kHeadsDrawn - section * together), unit = quotient(index, heads);
    // Rows before parts of the keys: the tiles that read one part run at once, so it comes from memory once.
    const int m = tile.skipped + m_tiles - 1 - (SPLIT ? unit % m_tiles : unit), split = SPLIT ? unit / m_tiles : 0;
    const int drawn_row = m * rows_drawn(p), rank = kTilesDrawn > 1 ? cluster_rank() : 0;
    const int first_row = drawn_row + rank * rows_per_tile(p);
    const int end_row = min(first_row + rows_per_tile(p), seq.seqlen_q * rows_packed(p));
    if (lane == 0) {
      tile.head = (section * together + index - unit * heads) * kHeadsDrawn + (CLUSTER_HEADS ? cluster_rank() : 0);
      tile.split = split;
      tile.num_splits = splits;
      tile.first_row = first_row;
      tile.end_row = end_row;
    }
    // Lanes 0 to 3: the tile's first and last query, the sequence's first and last; 4 and 5: the drawn rows', whose keys all
    // blocks of a cluster walk.
#if OWN_KEYS  // lanes 4 and 5, 6 and 7...: a warpgroup's
    const int own_row = first_row + (lane - 4) / 2 * 64;
    const int own_query = min(lane % 2 ? own_row + 63 : own_row, end_row - 1);
    const int query = lane < 2 ? (lane == 0 ? first_row : end_row - 1) : lane == 2 ? 0 : lane == 3 ? seq.seqlen_q - 1 : own_query;
#else
    const int drawn_end = kTilesDrawn > 1 ? min(drawn_row + rows_drawn(p), seq.seqlen_q * rows_packed(p)) : end_row;
    const int query = lane < 2    ? (lane == 0 ? first_row : end_row - 1) / rows_packed(p)
                      : lane == 2 ? 0
                      : lane == 4 ? drawn_row / rows_packed(p)
                      : lane == 5 ? (drawn_end - 1) / rows_packed(p)
                                  : seq.seqlen_q - 1;
#endif
    const int low = seq.low(query), high = seq.high(query);
    const int held_low = LEFT_BOUNDS ? __shfl_sync(~0u, low, 2) : 0, held_high = __shfl_sync(~0u, high, 3);
    [[maybe_unused]] const int whole_low = LEFT_BOUNDS ? __shfl_sync(~0u, low, 1) : 0;
    [[maybe_unused]] const int any_low = LEFT_BOUNDS ? __shfl_sync(~0u, low, kTilesDrawn > 1 ? 4 : 0) : 0;
    const int any_high = __shfl_sync(~0u, high, kTilesDrawn > 1 ? 5 : 1);
#if OWN_KEYS
    const OwnSteps own = own_steps(low, high, own_row < end_row);
#endif
    __syncwarp();  // all lanes have read tile.seq, which is written below
#if OWN_KEYS
    if (lane >= 4 && lane < 4 + BLOCK_M / 32 && lane % 2 == 0) tile.own[(lane - 4) / 2] = own;
#endif
    if (lane != 0) return;
    tile.held_low = held_low;
    // Behind a tensor's end TMA reads zeros.
    tile.held_high = DENSE_KEYS && !p.forward.sequence.cu_seqlens_k && held_high == p.forward.sequence.seqlen_k ? kNoEnd : held_high;
#if SPARSE
    describe_list(tile, p, m);
#else
    int begin = any_low / BLOCK_N, end = any_high > any_low ? (any_high + BLOCK_N - 1) / BLOCK_N : begin;
    if (SPLIT) {
      const int all = end - begin;
      end = begin + all * (split + 1) / splits;
      begin += all * split / splits;
    }
    const bool nothing = begin >= end;  // to see: one step, wholly masked
    if (nothing) end = begin + 1;
    const int steps = end - begin, masked_end = min(max(end - high / BLOCK_N, 0), steps);
    tile.end_key = end * BLOCK_N;
    tile.masked_end = nothing ? 1 : masked_end;
    tile.whole_end = min(max(end - (whole_low + BLOCK_N - 1) / BLOCK_N, masked_end), steps);
    if (nothing) tile.seq.stop = -1;
    tile.steps = steps;
#endif
  }

#if OWN_KEYS
  // Of the lane's warpgroup, whose first row sees the keys from `low` to `high`; the next lane has its last row's, lanes 0
  // and 1 those of the tile. Rows that see nothing are masked in the tile's last step, if not before.
  static __device__ __forceinline__ OwnSteps own_steps(int low, int high, bool rows) {
    const int first_low = LEFT_BOUNDS ? __shfl_sync(~0u, low, 0) : 0, last_high = __shfl_sync(~0u, high, 1);
    const int own_low = LEFT_BOUNDS ? __shfl_xor_sync(~0u, low, 1) : 0, own_high = __shfl_xor_sync(~0u, high, 1);
    const int begin = first_low / BLOCK_N, end = last_high > first_low ? (last_high + BLOCK_N - 1) / BLOCK_N : begin;
    const int steps = max(end - begin, 1);
    OwnSteps own;
    own.first = rows ? min(max(end - (own_high + BLOCK_N - 1) / BLOCK_N, 0), steps - 1) : steps;
    own.half = kHalfSteps && end > begin && (end - 1 - own.first) * BLOCK_N + BLOCK_N / 2 >= own_high;
    own.masked_end = end > begin ? min(max(end - high / BLOCK_N, 0), steps) : 1;
    own.whole_end = min(max(end - (own_low + BLOCK_N - 1) / BLOCK_N, own.masked_end), steps);
    return own;
  }
#endif

#if SPARSE
  static __device__ __forceinline__ void describe_list(Tile& tile, const HopperParams& p, int m) {
    const SparseParams& s = p.sparse;
    tile.list = tile.batch * s.batch + tile.head * s.head + m;
    const int partial = s.counts[2 * tile.list], all = s.counts[2 * tile.list + 1];
    constexpr int kParts = 128 / BLOCK_N;  // steps of a block
    if (all == 0) tile.seq.stop = -1, tile.held_high = 0;  // one step, wholly masked, over keys that may hold anything
    tile.end_key = 0;             // each step has its own key
    tile.masked_end = all ? partial * kParts : 1;
    tile.steps = tile.whole_end = max(all * kParts, 1);
  }
#endif
};
