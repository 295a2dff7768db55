// layer_chain_sm90: all that a decoder layer computes between two attentions, for up to 4 rows, in one launch:
//
//   sum = residual + attended Wo^T                                              phase 0
//   gate, up = norm(sum) Wgate^T, norm(sum) Wup^T; gated = act(gate) * up       phase 1
//   total = sum + gated Wdown^T                                                 phase 2
//   next = norm'(total) Wnext^T + bias: the next layer's queries, keys, values  phase 3
//
// Few rows are bound by the bytes of the weights, and these depend on nothing: one block a multiprocessor lives through
// all phases, and its loading warp streams tiles of weights into a ring, whatever the phase. So what a phase reads
// first is on its way while the results of the one before still travel.
//
// A tile is 16 rows of weights (eight and eight more: of the gate and of the projection beside it in phase 1) by COLS
// columns, brought in boxes of BOX_ROWS rows. It is one warp's: its tensor cores multiply it by all rows of the input.
// The order of columns inside an mma is free if both factors agree, so a lane reads 16 bytes in a row of either. Tile k
// of a group's columns is warp k % WARPS's, and sums are added in the order of the warps.
//
// Blocks have equal numbers of tiles of every phase. A group of rows that two blocks share is finished by the one that
// has its first columns: the other computes its part first, and hands it over long before it is wanted.
//
// Results go from block to block as words of two elements (or a float of a shared group), inverted: zero is a word that
// is not there yet. Readers wait for the words themselves, so a phase ends with one way to the L2 and back. Numbers
// never are the word that would be zero, a NaN with all bits set: conversions and sums give the canonical one. Whoever
// knows that all have read a word makes it zero again.
//
// Warps may wait for a tile only if what its place in the ring held before has come: a barrier's parity tells
// neighbouring fillings apart, and no more. So the places are a multiple of the warps: what was there before was this
// warp's own, or of a group that all have finished.
//
// Numbers are rounded where Hugging Face's modules round. Results repeat bitwise.
//
// With STORE phase 3 ends as rotary_store does: a group is then columns that are turned together, queries go on, keys and
// values to their pages (parts/chain_store.cuh).
//
// With GROUP the attention in front is computed here, too, before phase 0 (parts/chain_attention.cuh).
//
// Compile-time: BF16, ACTIVATION, UNIT_OFFSET, WARPS, COLS, BOX_ROWS, STORE (1: pages of elements, 2: of e4m3), GROUP (query
// heads a key head, or 0), HEAD_DIM (a multiple of 32).
#include "parts/chain_exchange.cuh"
#if GROUP
#include "parts/chain_attention.cuh"
#endif
#include "parts/copy_sm80.cuh"
#include "parts/dependent_launch.cuh"
#include "parts/mma_sm80.cuh"
#include "parts/vectors.cuh"

// A place in the ring, and the parity of its barriers there.
struct Place {
  uint32 slot = 0, parity = 0;
  __device__ __forceinline__ void step(uint32 stages) {
    if (++slot == stages) slot = 0, parity ^= 1;
  }
};

__device__ __forceinline__ void team_sync() { named_sync(1, kTeam); }

// Rows of 16-byte vectors into shared memory, zeros up to `padded`. EXCHANGED: of words, as soon as they are there.
template <bool EXCHANGED>
__device__ __forceinline__ void bring_rows(const void* from, char* to, int rows, int width, int padded, int pitch) {
  constexpr int kBatch = 8;
  const int vectors = width / kVector, whole = padded / kVector;
  const int total = rows * vectors;
  const uint4* const source = reinterpret_cast<const uint4*>(from);
  for (int first = threadIdx.x; first < total; first += kBatch * kTeam) {
    uint4 x[kBatch];
    if (EXCHANGED) {
      bool complete;
#pragma unroll
      for (int i = 0; i < kBatch; i++) x[i] = make_uint4(0, 0, 0, 0);
      do {
#pragma unroll
        for (int i = 0; i < kBatch; i++)
          if (first + i * kTeam < total && !all_there(x[i])) x[i] = read_words(source + first + i * kTeam);
        complete = true;
#pragma unroll
        for (int i = 0; i < kBatch; i++) complete &= first + i * kTeam >= total || all_there(x[i]);
      } while (!complete);
    } else {
#pragma unroll
      for (int i = 0; i < kBatch; i++)
        if (first + i * kTeam < total) x[i] = __ldcg(source + first + i * kTeam);
    }
#pragma unroll
    for (int i = 0; i < kBatch; i++) {
      const int at = first + i * kTeam;
      if (at < total) {
        const int row = at / vectors;
        if (EXCHANGED) x[i] = make_uint4(~x[i].x, ~x[i].y, ~x[i].z, ~x[i].w);
        *reinterpret_cast<uint4*>(to + row * pitch + (at - row * vectors) * 16) = x[i];
      }
    }
  }
  for (int at = threadIdx.x; at < rows * (whole - vectors); at += kTeam) {
    const int row = at / (whole - vectors);
    const int column = vectors + at - row * (whole - vectors);
    *reinterpret_cast<uint4*>(to + row * pitch + column * 16) = make_uint4(0, 0, 0, 0);
  }
}

// RMSNorm of the rows where they are; `weights` are in shared memory.
__device__ __forceinline__ void normalise(char* x, int rows, int width, int pitch, const uint4* weights, float eps,
                                          float (*of_warps)[WARPS]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, vectors = width / kVector;
  for (int row = 0; row < rows; row++) {
    float squares = 0.f;
    for (int i = threadIdx.x; i < vectors; i += kTeam) {
      float a[kVector];
      unpack(reinterpret_cast<const uint4*>(x + row * pitch)[i], a);
#pragma unroll
      for (int j = 0; j < kVector; j++) squares += a[j] * a[j];
    }
#pragma unroll
    for (int d = 16; d; d /= 2) squares += __shfl_xor_sync(~0u, squares, d);
    if (lane == 0) of_warps[row][warp] = squares;
  }
  team_sync();
  for (int row = 0; row < rows; row++) {
    float squares = 0.f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) squares += of_warps[row][w];
    const float scale = rsqrtf(squares / width + eps);
    for (int i = threadIdx.x; i < vectors; i += kTeam) {
      uint4& place = reinterpret_cast<uint4*>(x + row * pitch)[i];
      float a[kVector], w[kVector];
      unpack(place, a);
      unpack(weights[i], w);
#pragma unroll
      for (int j = 0; j < kVector; j++) a[j] *= scale;
#if !UNIT_OFFSET
      round_all(a);
#endif
#pragma unroll
      for (int j = 0; j < kVector; j++) a[j] *= UNIT_OFFSET + w[j];
      place = pack(a);
    }
  }
}

__device__ __forceinline__ uint4 read_shared(const char* p) { return *reinterpret_cast<const uint4*>(p); }

// Adds the products of a tile and the input's same columns. `tile` and `x` are this lane's rows of them.
__device__ __forceinline__ void add_tile(float (&sums)[4][4], const char* tile, const char* x, int lane) {
  // Neighbouring rows of a tile lie in the same banks: lanes of odd rows read the two halves of 128 bytes the other way
  // round.
  const bool odd = lane / 4 & 1;
  const uint32 t = lane % 4 * 16, early = t + (odd ? 64 : 0), late = t + (odd ? 0 : 64);
#pragma unroll
  for (int c = 0; c < COLS * 2; c += 128) {
    uint4 a[2] = {read_shared(tile + c + early), read_shared(tile + c + late)};
    uint4 b[2] = {read_shared(tile + kEight + c + early), read_shared(tile + kEight + c + late)};
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const uint4 first = odd ? a[1 - i] : a[i], second = odd ? b[1 - i] : b[i], v = read_shared(x + c + i * 64 + t);
      const uint32 low[4] = {first.x, second.x, first.y, second.y}, high[4] = {first.z, second.z, first.w, second.w};
      mma_16x8x16(sums[2 * i], low, v.x, v.y);
      mma_16x8x16(sums[2 * i + 1], high, v.z, v.w);
    }
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) layer_chain_sm90(const __grid_constant__ ChainParams p) {
  extern __shared__ __align__(128) char unaligned[];
  char* const shared = unaligned + (-shared_address(unaligned) & 127u);
  const int widest = max(max(p.attended_width, p.width), p.gated_width);
  char* const input = shared + p.stages * kTileBytes;
  const int input_pitch = ((widest + COLS - 1) / COLS * COLS + kPad) * 2;
  uint4* const norm = reinterpret_cast<uint4*>(input + p.rows * input_pitch);
  __shared__ float partial[2][WARPS][kMostRows][16];
  __shared__ float of_warps[kMostRows][WARPS];
  __shared__ uint64 barriers[2 * 64];
  const uint32 ring = shared_address(shared), full = shared_address(barriers), empty = full + 8 * 64;

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (threadIdx.x == kTeam) {
    for (uint32 i = 0; i < p.stages; i++) {
      barrier_init(full + 8 * i, 1);
      barrier_init(empty + 8 * i, 1);
    }
    barrier_init_fence();
  }
  __syncthreads();
  let_next_start();

  if (warp == WARPS) {
    // A lane a box. Nothing here may take long: a tile is asked for when another has come.
    constexpr int kBoxes = 16 / BOX_ROWS;
    if (lane >= kBoxes) return;
    const bool second = lane >= kBoxes / 2;
    const int in_half = lane % (kBoxes / 2) * BOX_ROWS;
    const uint32 box = ring + (second ? kEight : 0) + in_half * COLS * 2;
    Place next, landed;
    int still_free = static_cast<int>(p.in_flight);
    for (int phase = 0; phase < kPhases; phase++) {
      const Phase here(p, phase);
      const TensorMap* const map = &p.weights[phase];
      int group = here.begin / here.tiles, k = here.begin - group * here.tiles;
      GroupRows rows = here.rows(group);
      for (int left = here.end - here.begin; left > 0; left--) {
        barrier_wait(empty + 8 * next.slot, next.parity ^ 1);
        if (still_free > 0) {
          still_free--;
        } else {
          barrier_wait(full + 8 * landed.slot, landed.parity);
          landed.step(p.stages);
        }
        const uint32 barrier = full + 8 * next.slot;
        if (lane == 0) barrier_expect(barrier, kTileBytes);
        __syncwarp((1u << kBoxes) - 1);
        const int row = rows.first + in_half + (second ? rows.apart : 0);
        tma_load(box + next.slot * kTileBytes, map, barrier, k * (COLS / kPacked), row, kEvictFirst);
        next.step(p.stages);
        if (++k == here.tiles) k = 0, rows = here.rows(++group);
      }
    }
    return;
  }

  wait_for_previous();
  const Exchange exchange(p);
#if GROUP
  ChainAttending(p, exchange).run(reinterpret_cast<WarpSums*>(input), lane, warp);
#endif
  const int rows = p.rows;
  uint32 done = 0;  // tiles of this block in the phases before
  int parity = 0;
  for (int phase = 0; phase < kPhases; phase++) {
    const Phase here(p, phase);
    if (here.begin == here.end && phase != 3) continue;
    const bool normed = phase % 2 == 1;
    const int width = phase == 0 ? p.attended_width : phase == 2 ? p.gated_width : p.width;
    const int padded = here.tiles * COLS, pitch = (padded + kPad) * 2;
    if (normed) {
      const uint4* const weights = reinterpret_cast<const uint4*>(phase == 1 ? p.norm_mlp : p.norm_next);
      for (int i = threadIdx.x; i < p.width / kVector; i += kTeam) copy16(shared_address(norm + i), weights + i, true);
      copy_commit();
    }
    team_sync();  // nobody reads the input of the phase before
    if (phase == 0 && !GROUP)
      bring_rows<false>(p.attended, input, rows, width, padded, pitch);
    else
      bring_rows<true>(exchange.input(phase), input, rows, width, padded, pitch);
    copy_wait<0>();
    team_sync();
    if (normed) {
      normalise(input, rows, width, pitch, norm, phase == 1 ? p.eps_mlp : p.eps_next, of_warps);
      team_sync();
    }
    if (phase == 3 && warp == WARPS - 1) {
      clear(p, exchange, lane);
#if GROUP
      ChainAttending(p, exchange).clear(lane);
#endif
    }
    const char* const x = input + min(lane / 4, rows - 1) * pitch;  // products with rows that are not there are not kept
    for (int at = here.begin; at < here.end;) {
      const int group = at / here.tiles, first = group * here.tiles;  // its first tile
      const int k_begin = at - first, k_end = min(here.tiles, here.end - first);
      const Group own(p, exchange, phase, here.rows(group).first, k_begin > 0, k_end < here.tiles, lane, warp == 0);
      float sums[4][4] = {};
      for (int k = k_begin + (warp + WARPS - k_begin % WARPS) % WARPS; k < k_end; k += WARPS) {
        const uint32 tile = done + (first + k - here.begin), slot = tile % p.stages;
        barrier_wait(full + 8 * slot, tile / p.stages & 1);
        add_tile(sums, shared + slot * kTileBytes + lane / 4 * COLS * 2, x + k * COLS * 2, lane);
        __syncwarp();
        if (lane == 0) barrier_arrive(empty + 8 * slot);
      }
      at = first + k_end;
#pragma unroll
      for (int i = 0; i < 4; i++) sums[0][i] += sums[1][i] + (sums[2][i] + sums[3][i]);
      const int g = lane / 4, n = lane % 4 * 2;
      if (n < kMostRows) {
        float(*const mine)[16] = partial[parity][warp];
        mine[n][g] = sums[0][0], mine[n + 1][g] = sums[0][1];
        mine[n][g + 8] = sums[0][2], mine[n + 1][g + 8] = sums[0][3];
      }
      team_sync();
      own.finish(p, exchange, partial[parity], lane);
      parity ^= 1;
    }
    done += here.end - here.begin;
  }
}
