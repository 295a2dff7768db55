// What the copy engines move besides tiles that are loaded: sums of floats, results; and floats, fragments and matrices to
// and from shared memory (Hopper).
#pragma once

#include "parts/tma.cuh"

// Starts the copy of `bytes` of shared memory to global memory, as a group of bulk copies of its own.
__device__ __forceinline__ void bulk_store(void* destination, uint32 source, uint32 bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(destination), "r"(source), "r"(bytes)
               : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Starts the addition of `bytes` of floats in shared memory to those in global memory, as a group of its own.
__device__ __forceinline__ void bulk_add(float* destination, uint32 source, uint32 bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(destination), "r"(source),
               "r"(bytes)
               : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Waits until this thread's additions have read shared memory, or until they are done.
__device__ __forceinline__ void bulk_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
__device__ __forceinline__ void fence_bulk_copies() { asm volatile("fence.proxy.async;" ::: "memory"); }
__device__ __forceinline__ void bulk_wait_done() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
  fence_bulk_copies();
}

__device__ __forceinline__ float2 load_shared2(uint32 address) {
  float2 x;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(address));
  return x;
}
__device__ __forceinline__ float load_shared(uint32 address) {
  float x;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(address));
  return x;
}
__device__ __forceinline__ int load_shared_int(uint32 address) {
  int x;
  asm volatile("ld.shared.s32 %0, [%1];" : "=r"(x) : "r"(address));
  return x;
}
__device__ __forceinline__ float4 load_shared4(uint32 address) {
  float4 x;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "r"(address));
  return x;
}
__device__ __forceinline__ void load_shared4(uint32 (&x)[4], uint32 address) {
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(address));
}
__device__ __forceinline__ void store_shared4(uint32 address, float a, float b, float c, float d) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}
__device__ __forceinline__ void store_shared4(uint32 address, const uint4& x) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
}
__device__ __forceinline__ void store_global4(void* address, const uint32 (&x)[4]) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
               : "memory");
}
// Four 8 x 8 matrices of elements; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void store_matrices(uint32 address, const uint32 (&x)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x[0]), "r"(x[1]),
               "r"(x[2]), "r"(x[3])
               : "memory");
}
