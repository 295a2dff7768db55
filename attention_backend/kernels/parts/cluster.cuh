// Blocks that run side by side and share what they load (Hopper): thread block clusters.
#pragma once

#include "tma.cuh"

__device__ __forceinline__ int cluster_rank() {
  int rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// All threads of all blocks of the cluster meet, and see each other's writes.
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}

// Arrives at block `rank`'s barrier that has the place of `barrier` here.
__device__ __forceinline__ void barrier_arrive_at(uint32 barrier, int rank) {
  asm volatile(
      "{\n.reg .b32 there;\n"
      "mapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [there];\n}" ::"r"(barrier),
      "r"(rank)
      : "memory");
}

// Where block `rank` has what is at `address` here: for what follows.
__device__ __forceinline__ uint32 address_at(uint32 address, int rank) {
  uint32 there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}

// Writes to another block's shared memory; the bytes count on a barrier of that block's.
__device__ __forceinline__ void store_there(uint32 there, uint32 x, uint32 barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(there), "r"(x), "r"(barrier)
               : "memory");
}
__device__ __forceinline__ void store_there(uint32 there, const uint32 (&x)[4], uint32 barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(there),
               "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(barrier)
               : "memory");
}
// The same of what is in shared memory here, by the bulk copy engine.
__device__ __forceinline__ void copy_there(uint32 there, uint32 source, uint32 bytes, uint32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(there),
               "r"(source), "r"(bytes), "r"(barrier)
               : "memory");
}

// As tma_load, to the same place in every block whose bit is set in `blocks`; the bytes count on each one's own barrier.
__device__ __forceinline__ void tma_load_for(unsigned short blocks, uint32 destination, const TensorMap* map,
                                             uint32 barrier, int c0, int c1, int c2, int c3, uint64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint "
      "[%0], [%1, {%3, %4, %5, %6}], [%2], %7, %8;" ::"r"(destination),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "h"(blocks), "l"(policy)
      : "memory");
}
