// Attention backward for Hopper, head_dim above 128: dK and dV of 64 keys fill the registers of two warpgroups, so each has
// one of them. The first computes S and P and sums dV, the second dP and dS and sums dK; P goes from the first to the second
// and dS back, through shared memory, and each computes every other 64 columns of dQ, which it adds to global memory from
// registers: their way through shared memory would be its largest load. While one warpgroup does arithmetic the other has
// the tensor cores. Everything else is as in flash_bwd_sm90.cuh.
//
// Compile-time: BF16, HEAD_DIM and HEAD_DIM_V (tile widths), BLOCK_M and BLOCK_N (64), TILE_SLOTS, KEY_STAGES (1), Q_STAGES, O_STAGES, DS_STAGES (2),
// HANDOVER (1: P), PRODUCER_REGISTERS, CONSUMER_REGISTERS, DETERMINISTIC, PARTS, KEY_MASK, SOFTCAP, ALIBI, DROPOUT.
#define BIAS 0
#define LARGE 1
#include "parts/backward_large_half.cuh"
#include "parts/backward_large_turns.cuh"

class First : Half<0> {
 public:
  using Half::Half;

  __device__ __forceinline__ void run() {
    for_tiles([&](int tiles) {
      float dv[HEAD_DIM_V / 2];
      zero(dv);
      if (tiles > 0) {
        wait_keys();
        float s[kRows / 2];
        q.wait_full(shared.full_q);
        start_product<HEAD_DIM>(s, shared.k, shared.q + q.at * kBytesQ);
        wgmma_wait<0>();
        probabilities(s);
        if (handed) named_sync(kProbsFree, 256);
        handed = true;
        hand_over(s);
#pragma unroll 1
        for (int t = 1; t < tiles; t++) step<true>(dv, s);
        step<false>(dv, s);
      }
      store_dv(dv, tile(), p, lane);
    });
  }

 private:
  bool handed = false;  // probabilities, ever

  __device__ __forceinline__ void hand_over(const float (&s)[kRows / 2]) const {
#pragma unroll
    for (int j = 0; j < 8; j++)
      store_shared4(shared.handover + j * 2048 + threadIdx.x % 128 * 16, s[j * 4], s[j * 4 + 1], s[j * 4 + 2], s[j * 4 + 3]);
    named_arrive(kProbsFull, 256);
  }

  __device__ __forceinline__ void probabilities(float (&s)[kRows / 2]) const {
    const uint32 lse2 = shared.lse2 + q.at * kBytesTerms;
    Terms terms;
    terms.load(lse2, lane);
    to_probabilities(s, tile(), p, lse2, terms, now, is_masked(), has_dead(lse2), lane);
  }

  // One step, whose probabilities are in s and handed over. With MORE those of the next are afterwards.
  template <bool MORE>
  __device__ __forceinline__ void step(float (&dv)[HEAD_DIM_V / 2], float (&s)[kRows / 2]) {
    uint32 probs[kRows / 16][4];
    pack_kept(probs, s, kept_of(now));
    const uint32 rows_o = shared.o + o.at * kBytesO;
    o.wait_full(shared.full_o);
    const uint32 lse2 = shared.lse2 + q.at * kBytesTerms;
    if (has_dead(lse2)) clear_dead_rows(rows_o, kSlabsV, lse2);
    start_sum<HEAD_DIM_V>(dv, probs, rows_o);
    RingPlace<Q_STAGES> next = q;
    next.next();
    if (MORE) {
      next.wait_full(shared.full_q);
      start_product<HEAD_DIM>(s, shared.k, shared.q + next.at * kBytesQ);
    }
    named_sync(kDsFull, 256);
    if (first_thread()) barrier_arrive(shared.empty_q + 8 * q.at);
    q = next;
    float dq[32];
    start_dq(dq, 0);
    wgmma_wait<1>();  // the next scores, and before them dV
    if (first_thread()) barrier_arrive(shared.empty_o + 8 * o.at);
    o.next();
    const Step step = now;
    if (MORE) {
      next_step();
      probabilities(s);
      named_sync(kProbsFree, 256);
      hand_over(s);
    }
    wgmma_wait_between<0>(p.batch > 0);
    add_dq(dq, step, 0);
#pragma unroll
    for (int n = 1; n < kChunks; n++) {
      start_dq(dq, n);
      wgmma_wait<0>();
      add_dq(dq, step, n);
    }
    if (first_thread()) {
      barrier_arrive(shared.free_space + 8 * ds_place.at);
      if (!MORE) barrier_arrive(shared.empty_k);
    }
    ds_place.next();
  }
};

class Second : Half<1> {
 public:
  using Half::Half;

  __device__ __forceinline__ void run() {
    for_tiles([&](int tiles) {
      float dk[HEAD_DIM / 2];
      zero(dk);
      if (tiles > 0) {
        wait_keys();
        float dp[kRows / 2];
        o.wait_full(shared.full_o);
        start_product<HEAD_DIM_V>(dp, shared.v, shared.o + o.at * kBytesO);
#pragma unroll 1
        for (int t = 1; t < tiles; t++) step<true>(dk, dp);
        step<false>(dk, dp);
      }
      store_dk(dk, tile(), p, lane);
    });
  }

 private:
  // One step, whose dP is under way in dp. With MORE that of the next is afterwards.
  template <bool MORE>
  __device__ __forceinline__ void step(float (&dk)[HEAD_DIM / 2], float (&dp)[kRows / 2]) {
    const uint32 lse2 = shared.lse2 + q.at * kBytesTerms, delta = shared.delta + o.at * kBytesTerms;
    const uint32 rows_q = shared.q + q.at * kBytesQ;
    const Kept kept = kept_of(now);
    float probs[kRows / 2];
    named_sync(kProbsFull, 256);
    const bool dead = has_dead(lse2);
#pragma unroll
    for (int j = 0; j < 8; j++) {
      const float4 x = load_shared4(shared.handover + j * 2048 + threadIdx.x % 128 * 16);
      probs[j * 4] = x.x, probs[j * 4 + 1] = x.y, probs[j * 4 + 2] = x.z, probs[j * 4 + 3] = x.w;
    }
    named_arrive(kProbsFree, 256);
    wgmma_wait<0>();  // dP
    if (!MORE && first_thread()) barrier_arrive(shared.empty_v);
    to_score_gradients(dp, probs, tile(), p, kept, lse2, delta, now, dead, lane);
    uint32 ds[kRows / 16][4];
    pack_tile(ds, dp);
    ds_place.wait_empty(shared.free_space);
    store_ds(shared.ds + ds_place.at * kBytesDs, ds, 0);
    fence_async_proxy();
    named_arrive(kDsFull, 256);
    named_sync(1 + 1, 128);
    if (first_thread()) barrier_arrive(shared.empty_o + 8 * o.at);
    o.next();
    if (dead) {
      q.wait_full(shared.full_q);
      clear_dead_rows(rows_q, kSlabsK, lse2);
    }
    float dq[32];
    start_dq(dq, 0);
    start_sum<HEAD_DIM>(dk, ds, rows_q);
    wgmma_wait<1>();  // dQ
    add_dq(dq, now, 0);
#pragma unroll
    for (int n = 1; n < kChunks; n++) start_dq(dq, n);
    if (MORE) {
      o.wait_full(shared.full_o);
      start_product<HEAD_DIM_V>(dp, shared.v, shared.o + o.at * kBytesO);
    }
    wgmma_wait<MORE ? 1 : 0>();  // the rest of dQ, and before it dK
    if (first_thread()) {
      barrier_arrive(shared.empty_q + 8 * q.at);
      if (!MORE) barrier_arrive(shared.empty_k);
    }
#pragma unroll
    for (int n = 1; n < kChunks; n++) add_dq(dq, now, n);
    q.next();
    ds_place.next();
    next_step();
  }
};

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    flash_bwd_large_sm90(const __grid_constant__ TensorMap map_q, const __grid_constant__ TensorMap map_k,
                         const __grid_constant__ TensorMap map_v, const __grid_constant__ TensorMap map_o,
                         const __grid_constant__ TensorMap map_lse2, const __grid_constant__ TensorMap map_delta,
                         const __grid_constant__ BackwardParams p) {
  extern __shared__ __align__(1024) char memory[];
  const Shared shared(memory);
  start(shared, p);
  if (threadIdx.x < 128) {
    registers_lower<PRODUCER_REGISTERS>();
    switch (uniform(threadIdx.x / 32)) {
      case 0:
        load_tiles<true>(shared, &map_k, &map_q, &map_lse2, p);
        break;
      case 1:
        load_tiles<false>(shared, &map_v, &map_o, &map_delta, p);
        break;
      case 2:
        draw_tiles(shared, p);
        break;
#if DETERMINISTIC
      case 3:
        take_turns(shared, p);
        break;
#endif
    }
  } else {
    registers_raise<CONSUMER_REGISTERS>();
    if (uniform(threadIdx.x / 128) == 1)
      First(shared, p).run();
    else
      Second(shared, p).run();
  }
}
