// Attention backward for Hopper, head_dim above 128. dK and dV of 128 keys do not fit the registers of one block, so a pair
// of blocks (a cluster) shares a tile of keys. Block 0 has keys and queries: its two warpgroups compute S and P of 64 keys
// each and sum dK. Block 1 has values and output gradients: they compute dP and dS and sum dV. P goes from block 0 to block
// 1 and dS back, through the shared memory of the other, and each warpgroup computes 64 columns of dQ, from all 128 keys.
//
// So a block loads queries or output gradients, not both, and adds to dQ once for 128 keys: half of what goes through the L2
// where one block has dK and dV of 64 keys.
//
// Block 0 is two steps of scores ahead, so neither waits for the other's answer: it computes exponentials of one step while
// the tensor cores have dK of another. It sends P of a step when it has dS of the last but one, which block 1 made when it
// had done with the step before that: a ring of three has room for P, and nobody asks.
//
// Compile-time: BF16, HEAD_DIM and HEAD_DIM_V (tile widths), BLOCK_M (64), BLOCK_N (128), CLUSTER (2), TILE_SLOTS,
// KEY_STAGES (1), Q_STAGES, O_STAGES, DS_STAGES (2), PRODUCER_REGISTERS, CONSUMER_REGISTERS, DETERMINISTIC, PARTS, KEY_MASK,
// SOFTCAP, ALIBI, DROPOUT, LEFT_BOUNDS.
#define BIAS 0
#include "parts/backward_pair_half.cuh"
#include "parts/backward_pair_turns.cuh"

class KeyHalf : Half<0> {
 public:
  using Half::Half;

  __device__ __forceinline__ void run() {
    for_tiles([&](int tiles) {
      float dk[HEAD_DIM / 2], dq[32];
      zero(dk);
      zero(dq);
      if (tiles > 0) {
        keys.wait_full(shared.full_keys);
        if (has_dead_keys()) clear_keys(shared.keys, kSlabsK);
        note_seen();
        float s[kRows / 2];
        later = now;
        start_scores(s);
        wgmma_wait<0>();
        send_probabilities(s);
        if (tiles > 1) {
          start_scores(s);
          wgmma_wait<0>();
          send_probabilities(s);
        }
        if (tiles > 2) start_scores(s);
#pragma unroll 1
        for (int t = 3; t < tiles; t++) step<3>(dk, dq, s, t == 3);
        if (tiles > 2) step<2>(dk, dq, s, tiles == 3);
        if (tiles > 1) step<1>(dk, dq, s, tiles == 2);
        step<0>(dk, dq, s, tiles == 1);
        add_dq(dq, before, ds_place.at ^ 1);
      }
      store_dk(dk, tile(), p, fresh_lane());
    });
  }

 private:
  Step before;  // whose dQ has not been added yet
  Step later;   // whose scores are computed next, and its places in the rings
  RingPlace<Q_STAGES> later_rows;
  RingPlace<kProbsStages> probs_place;

  // Of each warp's own 16 keys.
  __device__ __forceinline__ void note_seen() const {
    const int l = threadIdx.x % 32, r = group * 64 + threadIdx.x % 128 / 32 * 16 + l;
    __syncwarp();
    if (l < 16) shared.seen[r] = rows_that_see(r);
    __syncwarp();
  }

  __device__ __forceinline__ void start_scores(float (&s)[kRows / 2]) {
    later_rows.wait_full(shared.full_rows);
    start_product<HEAD_DIM>(s, shared.keys, rows_at(later_rows.at));
  }

  // Scores become probabilities in block 1. In a copy: where accumulators change while products are under way, ptxas lets
  // none run beside another.
  __device__ __forceinline__ void send_probabilities(const float (&scores)[kRows / 2]) {
    float s[kRows / 2];
#pragma unroll
    for (int x = 0; x < kRows / 2; x++) s[x] = scores[x];
    const uint32 lse2 = lse2_at(later_rows.at);
    Terms terms;
    terms.load(lse2, lane);
    to_probabilities(s, tile(), shared.seen, p, lse2, terms, later, is_masked(later), has_dead(later, lse2), lane);
    uint32 probs[kRows / 16][4];
    pack_tile(probs, s);
    const uint32 there = address_at(shared.ds + probs_place.at * kBytesDs + group * kHalf + probs_at(0), 1);
    const uint32 full = address_at(shared.full_probs + 8 * (probs_place.at * kConsumers + group), 1);
#pragma unroll
    for (int i = 0; i < kRows / 16; i++) store_there(there + i * 512, probs[i], full);
    probs_place.next();
    later_rows.next();
    later.next(1, walk);
  }

  __device__ __forceinline__ void start_dk(float (&dk)[HEAD_DIM / 2], uint32 rows) const {
    const uint64 a = wgmma_descriptor(uniform(shared.ds + ds_place.at * kBytesDs + group * kHalf), 16);
    const uint64 b = wgmma_descriptor(uniform(rows), kSlabQ);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kRows / 16; i++) Wgmma<HEAD_DIM>::both(dk, a + i * 2, b + i * 128);
    wgmma_commit();
  }

  // One step, of which and of the next the probabilities have been sent. LEFT (3: or more) follow: scores of the next but one
  // are under way, and are sent; those of the one after it are under way afterwards.
  //
  // Its dQ is added in the step after, behind the start of dK. Additions hold their registers until memory has taken them,
  // some 700 cycles; scores, which come next otherwise, waited for that.
  template <int LEFT>
  __device__ __forceinline__ void step(float (&dk)[HEAD_DIM / 2], float (&dq)[32], float (&s)[kRows / 2], bool first) {
    const uint32 lse2 = lse2_at(rows.at), rows_q = rows_at(rows.at);
    ds_place.wait_full(shared.full_ds);
    if (threadIdx.x == 128) barrier_expect(shared.full_ds + 8 * ds_place.at, kConsumers * kHalf);  // of the next round
    if (has_dead(now, lse2)) clear_dead_rows(rows_q, kSlabsK, lse2);
    if (LEFT > 1) wgmma_wait<0>();  // scores
    start_dk(dk, rows_q);
    if (!first) add_dq(dq, before, ds_place.at ^ 1);
    before = now;
    if (LEFT > 1) send_probabilities(s);
    start_dq(dq, shared.keys);
    wgmma_wait_between<1>(p.batch > 0);  // dK
    if (first_thread()) barrier_arrive(shared.empty_rows + 8 * rows.at);
    if (LEFT > 2) start_scores(s);
    wgmma_wait_between<(LEFT > 2)>(p.batch > 0);  // dQ
    if (first_thread()) {
      barrier_arrive_at(shared.empty_ds + 8 * ds_place.at, 1);
      if (LEFT == 0) barrier_arrive(shared.empty_keys);
    }
    rows.next();
    ds_place.next();
    next_step();
  }
};

class ValueHalf : Half<1> {
 public:
  using Half::Half;

  __device__ __forceinline__ void run() {
    for_tiles([&](int tiles) {
      float dv[HEAD_DIM_V / 2];
      zero(dv);
      if (tiles > 0) {
        keys.wait_full(shared.full_values);
        keys.wait_full(shared.full_keys);
        if (has_dead_keys()) {
          clear_keys(shared.right, kSlabsThere);
          clear_keys(shared.values, kSlabsV);
        }
        float dp[kRows / 2];
        rows.wait_full(shared.full_rows);
        start_product<HEAD_DIM_V>(dp, shared.values, rows_at(rows.at));
#pragma unroll 1
        for (int t = 1; t < tiles; t++) step<true>(dv, dp);
        step<false>(dv, dp);
      }
      store_dv(dv, tile(), p, fresh_lane());
    });
  }

 private:
  uint32 turn = 0;  // the parity of how many steps there were before

  __device__ __forceinline__ void start_dv(float (&dv)[HEAD_DIM_V / 2], const uint32 (&probs)[kRows / 16][4],
                                           uint32 rows) const {
    const uint64 b = wgmma_descriptor(uniform(rows), kSlabQ);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kRows / 16; i++) Wgmma<HEAD_DIM_V>::registers(dv, probs[i], b + i * 128);
    wgmma_commit();
  }

  // One step, whose dP is under way in dp. With MORE that of the next is afterwards.
  template <bool MORE>
  __device__ __forceinline__ void step(float (&dv)[HEAD_DIM_V / 2], float (&dp)[kRows / 2]) {
    const uint32 lse2 = lse2_at(rows.at), delta = shared.delta + rows.at * kBytesTerms, rows_o = rows_at(rows.at);
    const Kept kept = kept_of(now);
    const bool dead = has_dead(now, lse2);
    const uint32 space = shared.ds + ds_place.at * kBytesDs;
    const uint32 full_probs = shared.full_probs + 8 * (ds_place.at * kConsumers + group);
    uint32 packed[kRows / 16][4];
    barrier_wait(full_probs, ds_place.parity);
    if (first_thread()) barrier_expect(full_probs, kHalf);  // of the next round
#pragma unroll
    for (int i = 0; i < kRows / 16; i++) load_shared4(packed[i], space + group * kHalf + probs_at(i));
    float probs[kRows / 2];
    unpack_tile(probs, packed);
    keep(packed, kept);
    if (dead) clear_dead_rows(rows_o, kSlabsV, lse2);
    wgmma_wait<0>();  // dP
    start_dv(dv, packed, rows_o);
    if (!MORE && first_thread()) barrier_arrive(shared.empty_values);
    to_score_gradients(dp, probs, tile(), p, kept, lse2, delta, now, dead, lane);
    uint32 ds[kRows / 16][4];
    pack_tile(ds, dp);
    __syncwarp();  // all lanes have read their probabilities
    store_ds(space, ds, group * 64);
    fence_async_proxy();
    named_arrive(kDsToSend + turn, kAtDsToSend);
    named_sync(kDsStored, kAtDsStored);
    float dq[32];
    if (has_dq()) start_dq(dq, shared.right);
    RingPlace<O_STAGES> next = rows;
    next.next();
    if (kAll) {
      wgmma_wait<1>();  // dV
      if (first_thread()) barrier_arrive(shared.empty_rows + 8 * rows.at);
    }
    if (MORE) {
      next.wait_full(shared.full_rows);
      start_product<HEAD_DIM_V>(dp, shared.values, rows_at(next.at));
    }
    wgmma_wait_between<MORE ? 1 : 0>(p.batch > 0);  // dQ
    if (first_thread()) {
      if (!kAll) barrier_arrive(shared.empty_rows + 8 * rows.at);
      if (!MORE) barrier_arrive(shared.empty_keys);
    }
    if (has_dq()) add_dq(dq, now, turn);
    rows = next;
    turn ^= 1;
    ds_place.next();
    next_step();
  }
};

extern "C" __global__ void __launch_bounds__(kThreads, 1) __cluster_dims__(CLUSTER, 1, 1)
    flash_bwd_pair_sm90(const __grid_constant__ TensorMap map_q, const __grid_constant__ TensorMap map_k,
                        const __grid_constant__ TensorMap map_v, const __grid_constant__ TensorMap map_o,
                        const __grid_constant__ TensorMap map_lse2, const __grid_constant__ TensorMap map_delta,
                        const __grid_constant__ BackwardParams p) {
  extern __shared__ __align__(1024) char memory[];
  const int rank = cluster_rank();
  const Shared shared(memory);
  start(shared, p, rank);
  if (threadIdx.x < 128) {
    registers_lower<PRODUCER_REGISTERS>();
    switch (uniform(threadIdx.x / 32)) {
      case 0:
        if (threadIdx.x % 32 == 0) {
          if (rank == 0)
            load_tiles<true>(shared, &map_k, &map_v, &map_q, &map_lse2, &map_delta, p);
          else
            load_tiles<false>(shared, &map_k, &map_v, &map_o, &map_lse2, &map_delta, p);
        }
        break;
      case 1:
        draw_tiles(shared, p, rank);
        break;
      case 3:
        if (rank == 1) send_ds(shared);
        break;
#if DETERMINISTIC
      case 2:
        if (rank == 0)
          take_turns<0>(shared, p);
        else
          take_turns<1>(shared, p);
        break;
#endif
    }
  } else {
    registers_raise<CONSUMER_REGISTERS>();
    if (rank == 0)
      KeyHalf(shared, p).run();
    else
      ValueHalf(shared, p).run();
  }
  cluster_sync();  // the other block may still send to this one
}
