// The tensor memory accelerator and its barriers (Hopper): bulk copies of tiles that complete on an mbarrier.
#pragma once

#include "parts/element.cuh"
#include "parts/named_barriers.cuh"

// A CUtensorMap, made on the host (attention_backend/kernels/tensor_map.py).
struct alignas(64) TensorMap {
  char opaque[128];
};

constexpr uint64 kEvictFirst = 0x12F0000000000000ull;  // L2 cache policies, as CUTLASS encodes them
constexpr uint64 kEvictLast = 0x14F0000000000000ull;
constexpr uint64 kEvictNormal = 0x1000000000000000ull;

__device__ __forceinline__ void barrier_init(uint32 barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}
__device__ __forceinline__ void barrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ __forceinline__ void barrier_expect(uint32 barrier, uint32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_arrive(uint32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void barrier_wait(uint32 barrier, uint32 parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "wait:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra finished;\n"
      "bra wait;\n"
      "finished:\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// Makes this thread's ordinary writes to shared memory visible to TMA and wgmma.
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Starts the copy of one box; its bytes count on `barrier`. What lies outside of the tensor arrives as zeros.
__device__ __forceinline__ void tma_load(uint32 destination, const TensorMap* map, uint32 barrier, int c0, int c1,
                                         int c2, int c3, uint64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(destination),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "l"(policy)
      : "memory");
}

// The same of tensors of five and of two dimensions.
__device__ __forceinline__ void tma_load(uint32 destination, const TensorMap* map, uint32 barrier, int c0, int c1,
                                         int c2, int c3, int c4, uint64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(destination),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "l"(policy)
      : "memory");
}

__device__ __forceinline__ void tma_load(uint32 destination, const TensorMap* map, uint32 barrier, int c0, int c1,
                                         uint64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%3, %4}], [%2], %5;" ::"r"(destination),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "l"(policy)
      : "memory");
}

// Starts the copy of one box to global memory, as a group of bulk copies of its own; what lies outside of the tensor is
// not written.
__device__ __forceinline__ void tma_store(const TensorMap* map, uint32 source, int c0, int c1, int c2, int c3) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map), "r"(source),
               "r"(c0), "r"(c1), "r"(c2), "r"(c3)
               : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Hands registers from one warpgroup to others (needs a register cap at launch).
template <int registers>
__device__ __forceinline__ void registers_raise() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
}
template <int registers>
__device__ __forceinline__ void registers_lower() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
}
