// flash_decode for Hopper: one warp streams tiles of 64 keys by TMA into a ring of STAGES, through all segments of its
// block without a break, while NUM_WARPS warps compute. Four of them share a tile, a slice of 16 keys each; each four
// take turns. What ends a segment (parts/decode_merge.cuh) hides behind the tiles that are on their way meanwhile.
//
// A tile is made of lines of 128 bytes, as the TMA's 128-byte swizzle wants them: 16-byte chunk c of line i stands at chunk
// c ^ (i & 7), so that ldmatrix meets few banks twice. With WHOLE_ROWS the lines of a row follow each other, and a copy
// takes whole rows, one piece of memory where a page of a head is one. Otherwise lines are rows,
// slab after slab of 64 columns. Columns past head_dim, and keys past the tensor, are zeros.
//
// Compile-time: BF16, HEAD_DIM, HEAD_DIM_V, NUM_WARPS (4, 8 or 12), ROWS (8, 16 or 32), STAGES, MERGE_WIDTH, PAGED
// (PAGE_ROWS keys a copy), WHOLE_ROWS, FP8_KV, SOFTCAP, ALIBI, BIAS. KEY_MASK must be 0.
#include "parts/decode_merge.cuh"
#include "parts/dependent_launch.cuh"
#include "parts/tma.cuh"

constexpr int kTile = 64;
constexpr int kTeam = NUM_WARPS * 32;   // threads that compute
constexpr int kThreads = kTeam + 32;    // and the warp that loads
constexpr int kTurns = NUM_WARPS / 4;   // tiles under way in the compute warps
constexpr int kSlabsK = (HEAD_DIM * sizeof(cached) + 127) / 128, kSlabsV = (HEAD_DIM_V * sizeof(cached) + 127) / 128;
constexpr int kSlabColumns = 128 / sizeof(element);  // the maps count 16-bit elements, whatever the type
constexpr int kSlabBytes = kTile * 128;
constexpr int kStageBytes = (kSlabsK + kSlabsV) * kSlabBytes;
constexpr int kBoxesK = WHOLE_ROWS ? 1 : kSlabsK, kBoxesV = WHOLE_ROWS ? 1 : kSlabsV;
constexpr int kCopies = kTile / PAGE_ROWS * (kBoxesK + kBoxesV);
static_assert(kCopies <= 32, "a lane makes at most one copy");
// Copies land in any order. A warp that comes to a stage two fillings after its last one could find the filling between
// still on its way, and that barrier's parity is the one it waits for: it would read a tile that is not there.
static_assert(STAGES % kTurns == 0, "a stage is always filled for the same four warps");

struct TeamSync {
  static __device__ __forceinline__ void sync() { named_sync(1, kTeam); }
};
typedef SegmentEnd<NUM_WARPS, MERGE_WIDTH, TeamSync> End;

// Where chunk c of row r of a tile of SLABS slabs stands.
template <int SLABS>
__device__ __forceinline__ int chunk_place(int r, int c) {
  const int line = WHOLE_ROWS ? r * SLABS + c / 8 : r;  // of 128 bytes
  return (WHOLE_ROWS ? 0 : c / 8 * kSlabBytes) + line * 128 + ((c ^ line) & 7) * 16;
}

// The tile's keys that no row of the sequence sees may hold anything, and zero times NaN is NaN: this warp's slice of
// their values becomes zeros.
__device__ __forceinline__ void clear_unseen(char* tile_v, int slice, int from, int to, int lane) {
#pragma unroll 1
  for (int i = lane; i < kSlabsV * kSlice * 8; i += 32) {
    const int r = i / (kSlabsV * 8), c = i % (kSlabsV * 8);
    if (r < from || r >= to)
      *reinterpret_cast<uint4*>(tile_v + chunk_place<kSlabsV>(slice * kSlice + r, c)) = make_uint4(0, 0, 0, 0);
  }
  fence_async_proxy();  // the TMA writes here again
  __syncwarp();
}

__device__ __forceinline__ void prefetch_map(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
__device__ __forceinline__ void prefetch_line(const void* p) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(p) : "memory");
}

// Page numbers are wanted as soon as the lengths are known. Brings some lines of them meanwhile: those of this block's
// first keys if all sequences were as long as the table is wide, and the first ones of that sequence.
__device__ __forceinline__ void prefetch_table(const DecodeParams& p, int lane) {
  constexpr int kLine = 32;  // entries
  const int width = p.sequence.seqlen_k / p.sequence.page_size;
  const int parts = gridDim.y;
  const int64 position = static_cast<int64>(blockIdx.y) * p.batch;
  const int64 batch = position / parts, within = position % parts;
  const int entry = (lane < 4 ? static_cast<int>(within * width / parts) / kLine + lane : lane - 4) * kLine;
  if (lane < 8 && entry < width) prefetch_line(p.sequence.block_table + batch * p.sequence.block_table_stride + entry);
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    flash_decode_sm90(const __grid_constant__ TensorMap map_k, const __grid_constant__ TensorMap map_v,
                      const __grid_constant__ DecodeParams p) {
  extern __shared__ __align__(128) char unaligned[];
  char* const shared = unaligned + (-shared_address(unaligned) & 1023u);
  const uint32 ring = shared_address(shared);
  char* const after = shared + STAGES * kStageBytes;
  const uint32 tile_q = shared_address(after);
  float* const factor = reinterpret_cast<float*>(after + ROWS * kPitchQ);
  float* const merge = factor + ROWS;
  const uint32 full = shared_address(merge + End::kMergeFloats), empty = full + 8 * STAGES;
  int* const prefix = reinterpret_cast<int*>(merge + End::kMergeFloats + 4 * STAGES);

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (threadIdx.x == kTeam) {
    prefetch_map(&map_k);
    prefetch_map(&map_v);
#pragma unroll
    for (int i = 0; i < STAGES; i++) {
      barrier_init(full + 8 * i, 1);
      barrier_init(empty + 8 * i, 4);
    }
    barrier_init_fence();
  }
  let_next_start();
  wait_for_previous();  // it may have written anything that is read from here on
#if PAGED
  if (warp == NUM_WARPS) prefetch_table(p, lane);
#endif
  DecodePlan plan;
  plan.build<kThreads, kTile>(p.sequence, p.batch, p.min_tiles, prefix);

  uint32 tile = 0;  // tiles of this block so far
  Segment segment;

  if (warp == NUM_WARPS) {
    const int piece = lane / (kBoxesK + kBoxesV), box = lane % (kBoxesK + kBoxesV);
    const bool copies = lane < kCopies, of_k = box < kBoxesK;
    const TensorMap* const map = of_k ? &map_k : &map_v;
#if WHOLE_ROWS
    const uint32 place = of_k ? piece * PAGE_ROWS * kSlabsK * 128 : kSlabsK * kSlabBytes + piece * PAGE_ROWS * kSlabsV * 128;
#else
    const int column = (of_k ? box : box - kSlabsK) * kSlabColumns;
    const uint32 place = box * kSlabBytes + piece * PAGE_ROWS * 128;
#endif
    const uint64 policy = gridDim.z > 1 ? kEvictNormal : kEvictFirst;  // other rows' blocks read the same keys
    while (plan.next(segment)) {
      const Sequence seq(p.sequence, segment.batch);
      int first_tile, end_tile;
      DecodePlan::tile_range<kTile>(seq, first_tile, end_tile);
      const int any_low = seq.low(0), any_high = seq.high(seq.seqlen_q - 1);
      const bool sees = any_high > any_low;
      int key = (first_tile + segment.begin) * kTile + piece * PAGE_ROWS;
#if PAGED
      const int* table = p.sequence.block_table + segment.batch * p.sequence.block_table_stride;
      const int last_page = (any_high - 1) / p.sequence.page_size;
      // Past the last visible key: any page, it is masked. Looked up one tile ahead.
      auto block_of = [&](int at) {
        return sees && copies ? table[max(min(at / p.sequence.page_size, last_page), 0)] : 0;
      };
      int next_block = block_of(key);
#else
      const int kv_batch = p.sequence.cu_seqlens_k ? 0 : segment.batch;
#endif
#pragma unroll 1
      for (int j = segment.begin; j < segment.end; j++, tile++, key += kTile) {
        const uint32 stage = tile % STAGES;
#if PAGED
        const int block = next_block, row = key % p.sequence.page_size;
        next_block = j + 1 < segment.end ? block_of(key + kTile) : 0;
#else
        const int block = kv_batch, row = seq.k_begin + key;
#endif
        barrier_wait(empty + 8 * stage, (tile / STAGES & 1) ^ 1);
        if (lane == 0) {
          if (sees)
            barrier_expect(full + 8 * stage, kStageBytes);
          else
            barrier_arrive(full + 8 * stage);
        }
        __syncwarp();
        if (sees && copies)
#if WHOLE_ROWS
          tma_load(ring + stage * kStageBytes + place, map, full + 8 * stage, 0, 0, row, segment.kv_head, block, policy);
#else
          tma_load(ring + stage * kStageBytes + place, map, full + 8 * stage, column, row, segment.kv_head, block,
                   policy);
#endif
      }
    }
    return;
  }

  const int row_begin = blockIdx.z * ROWS;  // of the group's rows: row r is query i = r / group of head r % group
  const int rows = min(ROWS, p.group_rows - row_begin);
  const int turn = warp / 4, slice = warp % 4;
  while (plan.next(segment)) {
    const Sequence seq(p.sequence, segment.batch);
    int first_tile, end_tile;
    DecodePlan::tile_range<kTile>(seq, first_tile, end_tile);
    const int any_low = seq.low(0), any_high = seq.high(seq.seqlen_q - 1);
    const int all_low = seq.low(seq.seqlen_q - 1), all_high = seq.high(0);
    const int first_head = segment.kv_head * p.group;
    load_queries<NUM_WARPS>(p, seq, segment.batch, segment.kv_head, row_begin, rows, after, factor, threadIdx.x);
    WarpRows state;
    state.clear();
    const Score score(p.score, segment.batch, first_head);
    copy_wait<0>();
    TeamSync::sync();  // every warp's share of the query rows has arrived

    const int steps = segment.end - segment.begin;
#pragma unroll 1
    for (int j = (turn + kTurns - tile % kTurns) % kTurns; j < steps; j += kTurns) {
      const uint32 at = tile + j, stage = at % STAGES;
      const int begin = (first_tile + segment.begin + j) * kTile + slice * kSlice;
      const uint32 tile_k = ring + stage * kStageBytes, tile_v = tile_k + kSlabsK * kSlabBytes;
      barrier_wait(full + 8 * stage, at / STAGES & 1);
      if (begin < any_high && begin + kSlice > any_low) {
        if (begin < any_low || begin + kSlice > any_high)
          clear_unseen(shared + (tile_v - ring), slice, any_low - begin, any_high - begin, lane);
        state.add_slice(
            p, seq, score, segment.batch, first_head, row_begin, begin, begin < all_low || begin + kSlice > all_high,
            tile_q, factor, lane, [&](int r, int c) { return tile_k + chunk_place<kSlabsK>(slice * kSlice + r, c); },
            [&](int r, int c) { return tile_v + chunk_place<kSlabsV>(slice * kSlice + r, c); });
      }
      __syncwarp();
      if (lane == 0) barrier_arrive(empty + 8 * stage);
    }
    tile += steps;
    End(p, seq, segment, row_begin, rows, merge, threadIdx.x).finish(state, score.scale_log2);
  }
}
