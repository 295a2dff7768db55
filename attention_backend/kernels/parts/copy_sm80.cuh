// Asynchronous copies from global to shared memory, 16 bytes a thread. On sm_75 they are plain loads and stores.
#pragma once

#include "parts/element.cuh"

// The L2 policy of what is read once: it goes first when room is needed. (A policy of normal eviction, given in the same
// way, costs bandwidth on an H200, docs/log.md: what is read again is better copied without one.)
__device__ __forceinline__ uint64 evict_first_policy() {
  uint64 policy = 0;
#if __CUDA_ARCH__ >= 800
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
#endif
  return policy;
}

__device__ __forceinline__ void copy16_by_registers(uint32 destination, const void* source, bool valid) {
  uint4 x = make_uint4(0, 0, 0, 0);
  if (valid) x = *reinterpret_cast<const uint4*>(source);
  asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(destination), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
               : "memory");
}

// Copies 16 bytes, or writes 16 zero bytes when `valid` is false (`source` is not read then).
__device__ __forceinline__ void copy16(uint32 destination, const void* source, bool valid) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(destination), "l"(source),
               "r"(valid ? 16 : 0)
               : "memory");
#else
  copy16_by_registers(destination, source, valid);
#endif
}
__device__ __forceinline__ void copy16(uint32 destination, const void* source, bool valid, uint64 policy) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, %3;" ::"r"(destination),
               "l"(source), "r"(valid ? 16 : 0), "l"(policy)
               : "memory");
#else
  copy16_by_registers(destination, source, valid);
#endif
}

__device__ __forceinline__ void copy_commit() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until at most `pending` of this thread's committed groups are still under way.
template <int pending>
__device__ __forceinline__ void copy_wait() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
#endif
}
