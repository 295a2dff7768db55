// Attention for few query rows over long contexts (decode): every key and value byte is read once for all query heads
// of its group. Split-KV after "Flash-Decoding" (Dao et al., 2023) with the work shared out on the device
// (parts/decode_plan.cuh) and merged by whoever comes last (parts/decode_merge.cuh).
//
// Each warp streams its own slices of 16 keys through its own ring of STAGES shared memory buffers and keeps its own
// running softmax (parts/decode_rows.cuh); the warps of a block meet only at the end of a segment.
//
// Compile-time: BF16, HEAD_DIM, HEAD_DIM_V, EVEN, NUM_WARPS, ROWS (8, 16 or 32), STAGES, MIN_BLOCKS, PAGED, FP8_KV
// (sm_89 and up), KEY_MASK, SOFTCAP, ALIBI, BIAS.
#include "parts/decode_merge.cuh"

constexpr int kThreads = NUM_WARPS * 32;
constexpr int kTile = kSlice * NUM_WARPS;  // keys of one step of a block
constexpr int kPitchK = HEAD_DIM * sizeof(cached) + 16;  // bytes of a padded row
constexpr int kPitchV = HEAD_DIM_V * sizeof(cached) + 16;
constexpr int kStageBytes = kSlice * (kPitchK + kPitchV);

struct BlockSync {
  static __device__ __forceinline__ void sync() { __syncthreads(); }
};
typedef SegmentEnd<NUM_WARPS, HEAD_DIM_V, BlockSync> End;

constexpr int kRingBytes = NUM_WARPS * STAGES * kStageBytes;
constexpr int kWorkBytes = kRingBytes > End::kMergeFloats * 4 ? kRingBytes : End::kMergeFloats * 4;

// Copies 16 rows of CHUNKS times 16 bytes by one warp. `once`: nobody else will read them.
template <int CHUNKS, int PITCH, class Source, class Ok>
__device__ __forceinline__ void copy_slice(uint32 destination, int width, int lane, bool once, Source source,
                                           Ok ok) {
  constexpr int kLanes = CHUNKS % 16 == 0 ? 16 : CHUNKS % 8 == 0 ? 8 : CHUNKS % 4 == 0 ? 4 : 2;
  constexpr int kRowsPerPass = 32 / kLanes;
  const int chunk = lane % kLanes, row = lane / kLanes;
  const uint64 evict_first = evict_first_policy();
#pragma unroll
  for (int i = 0; i < kSlice / kRowsPerPass; i++) {
    const int r = row + i * kRowsPerPass;
    const bool valid = ok(r);
    const cached* from = source(valid ? r : 0) + chunk * kChunk;
#pragma unroll
    for (int c = 0; c < CHUNKS / kLanes; c++) {
      const uint32 to = destination + r * PITCH + (chunk + c * kLanes) * 16;
      const cached* const x = from + c * kLanes * kChunk;
      const bool there = valid && (EVEN || (chunk + c * kLanes) * kChunk < width);
      if (once)
        copy16(to, x, there, evict_first);
      else
        copy16(to, x, there);
    }
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, MIN_BLOCKS) flash_decode(const DecodeParams p) {
  extern __shared__ __align__(128) char shared[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint32 tile_q = shared_address(shared);
  float* const factor = reinterpret_cast<float*>(shared + ROWS * kPitchQ);
  char* const work = shared + ROWS * (kPitchQ + 4);
  const uint32 ring = shared_address(work) + warp * STAGES * kStageBytes;
  float* const merge = reinterpret_cast<float*>(work);  // over the rings, between segments
  int* const prefix = reinterpret_cast<int*>(work + kWorkBytes);

  DecodePlan plan;
  plan.build<kThreads, kTile>(p.sequence, p.batch, p.min_tiles, prefix);

  const int row_begin = blockIdx.z * ROWS;  // of the group's rows: row r is query i = r / group of head r % group
  const int rows = min(ROWS, p.group_rows - row_begin);

  // Otherwise other rows' blocks read the same keys. ROWS = 32 leaves no register for a policy.
  const bool once = ROWS < 32 && gridDim.z == 1;
  Segment segment;
  while (plan.next(segment)) {
    const Sequence seq(p.sequence, segment.batch);
    int first_tile, end_tile;
    DecodePlan::tile_range<kTile>(seq, first_tile, end_tile);
    const int any_low = seq.low(0), any_high = seq.high(seq.seqlen_q - 1);
    const int all_low = seq.low(seq.seqlen_q - 1), all_high = seq.high(0);
    const int first_head = segment.kv_head * p.group;
    load_queries<NUM_WARPS>(p, seq, segment.batch, segment.kv_head, row_begin, rows, shared, factor, threadIdx.x);

    const cached* k = p.k + segment.kv_head * p.k_head;
    const cached* v = p.v + segment.kv_head * p.v_head;
#if PAGED
    const int* table = p.sequence.block_table + segment.batch * p.sequence.block_table_stride;
    const int last_page = (any_high - 1) / p.sequence.page_size;
    const bool uniform = p.sequence.page_shift >= 4;  // a slice never crosses a page
#else
    const bool packed_k = p.sequence.cu_seqlens_k != nullptr;
    k += packed_k ? seq.k_begin * p.k_row : segment.batch * p.k_batch;
    v += packed_k ? seq.k_begin * p.v_row : segment.batch * p.v_batch;
#endif

    // Slice j of this warp holds keys from key0 + j * kTile.
    const int key0 = (first_tile + segment.begin) * kTile + warp * kSlice;
    const int steps = segment.end - segment.begin;
#if PAGED
    // The page of the next slice to load is looked up one slice ahead.
    auto page_of = [&](int key) {
      return uniform && any_high > any_low ? table[max(min(key >> p.sequence.page_shift, last_page), 0)] : 0;
    };
    int next_page = page_of(key0);
#endif
    auto load = [&](int j) {
      const uint32 stage = ring + (j % STAGES) * kStageBytes;
      const int begin = key0 + j * kTile;
      auto visible = [&](int r) {
        bool ok = begin + r >= any_low && begin + r < any_high;
#if KEY_MASK
        ok = ok && p.score.key_mask[segment.batch * p.score.key_mask_batch + begin + r];
#endif
        return ok;
      };
      auto copy_both = [&](auto row_k, auto row_v) {
        copy_slice<kChunksK, kPitchK>(stage, p.head_dim, lane, once, row_k, visible);
        copy_slice<kChunksV, kPitchV>(stage + kSlice * kPitchK, p.head_dim_v, lane, once, row_v, visible);
      };
#if PAGED
      if (uniform) {
        const int page = next_page, in_page = begin & (p.sequence.page_size - 1);
        next_page = page_of(begin + kTile);
        const cached* from_k = k + page * p.k_batch + in_page * p.k_row;
        const cached* from_v = v + page * p.v_batch + in_page * p.v_row;
        copy_both([&](int r) { return from_k + r * p.k_row; }, [&](int r) { return from_v + r * p.v_row; });
      } else {
        auto row_of = [&](const cached* base, int64 page, int64 row) {
          return [=, &p](int r) {
            return base + key_offset(p.sequence, table, min(max(begin + r, 0), any_high - 1), page, row);
          };
        };
        if (begin < any_high) copy_both(row_of(k, p.k_batch, p.k_row), row_of(v, p.v_batch, p.v_row));
      }
#else
      const cached* from_k = k + begin * p.k_row;
      const cached* from_v = v + begin * p.v_row;
      copy_both([&](int r) { return from_k + r * p.k_row; }, [&](int r) { return from_v + r * p.v_row; });
#endif
    };

#pragma unroll
    for (int j = 0; j < STAGES - 1; j++) {
      if (j < steps) load(j);
      copy_commit();
    }

    WarpRows state;
    state.clear();
    const Score score(p.score, segment.batch, first_head);

    copy_wait<STAGES - 1>();
    __syncthreads();  // every warp's share of the query rows has arrived

#pragma unroll 1
    for (int j = 0; j < steps; j++) {
      copy_wait<STAGES - 2>();
      __syncwarp();
      // The buffer that is filled now is the one that was read in the last step.
      if (j + STAGES - 1 < steps) load(j + STAGES - 1);
      copy_commit();
      const int begin = key0 + j * kTile;
      if (begin >= any_high || begin + kSlice <= any_low) continue;
      const uint32 slice_k = ring + (j % STAGES) * kStageBytes, slice_v = slice_k + kSlice * kPitchK;
      state.add_slice(
          p, seq, score, segment.batch, first_head, row_begin, begin,
          KEY_MASK || begin < all_low || begin + kSlice > all_high, tile_q, factor, lane,
          [&](int r, int c) { return slice_k + r * kPitchK + c * 16; },
          [&](int r, int c) { return slice_v + r * kPitchV + c * 16; });
    }

    copy_wait<0>();
    __syncthreads();  // the rings are free for the merge
    End(p, seq, segment, row_begin, rows, merge, threadIdx.x).finish(state, score.scale_log2);
  }
}
