// What a translated kernel is compiled against: CUDA's keywords and intrinsics, and the instructions of its inline PTX
// (translate.py turns each into a call of emu::). The runtime behind it is compiled once, in runtime.cpp.
#pragma once
#include "types.h"

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))
#define threadIdx (emu::self->thread_index)
#define blockIdx (emu::self->block_index)
#define blockDim (emu::block_dim)
#define gridDim (emu::grid_dim)

namespace emu {
// A thread of the grid, as kernels see it.
struct Thread {
  dim3 thread_index, block_index;
};
extern Thread* self;  // the one that runs
extern dim3 block_dim, grid_dim;

// Shared memory; addresses are offsets, as the hardware's 32-bit ones. Out of bounds fails the launch.
void* dynamic_shared();
void* static_shared(const void* key, size_t bytes, size_t alignment);
uint32_t shared_address(const void* p);
char* shared_pointer(uint32_t address, size_t bytes);

// Where other threads may run: after anything that they can see or wait for.
void step();
void spin();  // this thread looks again and again

// Warps. `finish` runs once, in the last lane of `mask` to arrive, with all lanes' arguments.
using Finish = void (*)(void** lanes, unsigned mask);
void meet(unsigned mask, const char* what, void* mine, Finish finish);
uint64_t shuffle(unsigned mask, uint64_t x, int lane);
unsigned lane_index();
unsigned ballot(unsigned mask, bool predicate);

// Blocks.
void barrier(int id, int threads, bool waits);
void set_registers(uint32_t registers);
void mbarrier_init(uint32_t address, uint32_t arrivals);
void mbarrier_arrive(uint32_t address, uint32_t bytes);
void mbarrier_wait(uint32_t address, uint32_t parity);
bool mbarrier_test(uint32_t address, uint32_t parity);

// Clusters of blocks: an address of another one's shared memory is its own with the block's rank above.
uint32_t cluster_rank();
uint32_t address_at(uint32_t address, uint32_t rank);
void mbarrier_arrive_at(uint32_t address);
void store_there(uint32_t address, const uint32_t* words, int count, uint32_t mbarrier);
void copy_there(uint32_t address, uint32_t source, uint32_t bytes, uint32_t mbarrier);
void cluster_arrive();
void cluster_wait();

// Copies, which land as late as they may, or at any time before; what they will overwrite is NaN meanwhile.
void copy16(uint32_t destination, const void* source, int bytes);
void copy_commit();
void copy_wait(int pending);
void tma_load(uint32_t destination, const void* map, uint32_t mbarrier, int dimensions, const int* at);
void tma_load_for(uint32_t blocks, uint32_t destination, const void* map, uint32_t mbarrier, int dimensions, const int* at);
void bulk_load(uint32_t destination, const void* source, uint32_t bytes, uint32_t mbarrier);
void tma_store(const void* map, uint32_t source, int dimensions, const int* at);
void bulk_store(void* destination, uint32_t source, uint32_t bytes);
void bulk_add(void* destination, uint32_t source, uint32_t bytes);
void bulk_wait_read(int pending);
void bulk_wait(int pending);

// Matrices.
void load_matrices(uint32_t* const (&out)[4], uint32_t address, bool transposed);
void store_matrices(uint32_t address, const uint32_t (&x)[4]);
uint32_t transpose_matrix(uint32_t x);
enum Kind { kHalf, kBf16, kE4m3 };
void mma(Kind kind, int k, float* const (&c)[4], const uint32_t* a, const uint32_t* b);
struct Wgmma {
  Kind kind;
  int n;
  float* const* d;      // n / 2 accumulators
  const uint32_t* a;    // registers, or null
  uint64_t descriptor_a, descriptor_b;
  bool accumulate, transposed_a, transposed_b;
};
void wgmma(const Wgmma& operation);
void wgmma_commit();
void wgmma_wait(int pending);

template <class T>
T* shared_at(uint32_t address) { return reinterpret_cast<T*>(shared_pointer(address, sizeof(T))); }
template <class T>
T read_spinning(const void* p) {
  spin();
  return *static_cast<const T*>(p);
}
template <class T>
void write_visibly(void* p, const T& x) {
  *static_cast<T*>(p) = x;
  step();
}
template <class T>
T shuffled(unsigned mask, T x, int lane) {
  uint64_t bits = 0;
  memcpy(&bits, &x, sizeof x);
  bits = shuffle(mask, bits, lane);
  memcpy(&x, &bits, sizeof x);
  return x;
}
inline float exp2_flushed(float x) {
  const float y = exp2f(x);
  return y < 0x1p-126f ? 0.f : y;
}
inline float log2_flushed(float x) { return log2f(fabsf(x) < 0x1p-126f ? copysignf(0.f, x) : x); }
inline float reciprocal_flushed(float x) {
  const float y = 1.f / x;
  return fabsf(y) < 0x1p-126f ? 0.f : y;
}
inline uint32_t pack_bf16(float high, float low) { return to_bf16(low) | static_cast<uint32_t>(to_bf16(high)) << 16; }
inline uint32_t pack_half(float high, float low) { return to_half(low) | static_cast<uint32_t>(to_half(high)) << 16; }
inline uint16_t pack_e4m3(float high, float low) { return to_e4m3(low) | to_e4m3(high) << 8; }
inline uint32_t half_of_e4m3(uint16_t x) { return pack_half(from_e4m3(x >> 8), from_e4m3(x & 255)); }
}  // namespace emu

inline size_t __cvta_generic_to_shared(const void* p) { return emu::shared_address(p); }
inline void* __cvta_shared_to_generic(size_t address) { return emu::shared_pointer(address, 1); }
inline size_t __cvta_generic_to_global(const void* p) { return reinterpret_cast<size_t>(p); }
inline void __syncthreads() { emu::barrier(0, emu::block_dim.x * emu::block_dim.y * emu::block_dim.z, true); }
inline void __syncwarp(unsigned mask = ~0u) { emu::meet(mask, "__syncwarp", nullptr, [](void**, unsigned) {}); }
inline void __threadfence() { emu::step(); }
template <class T>
T __shfl_sync(unsigned mask, T x, int lane) { return emu::shuffled(mask, x, lane & 31); }
template <class T>
T __shfl_xor_sync(unsigned mask, T x, int bits) { return emu::shuffled(mask, x, emu::lane_index() ^ bits); }
template <class T>
T __shfl_up_sync(unsigned mask, T x, int by) {
  const int lane = emu::lane_index();
  return emu::shuffled(mask, x, lane < by ? lane : lane - by);
}
inline unsigned __ballot_sync(unsigned mask, bool predicate) { return emu::ballot(mask, predicate); }
inline bool __any_sync(unsigned mask, bool predicate) { return emu::ballot(mask, predicate); }
template <class T>
T __ldcg(const T* p) { return *p; }
template <class T>
T __ldcs(const T* p) { return *p; }
template <class T, class U>
T atomicAdd(T* p, U x) {
  const T old = *p;
  *p = old + x;
  emu::step();
  return old;
}
inline unsigned atomicInc(unsigned* p, unsigned most) {
  const unsigned old = *p;
  *p = old >= most ? 0 : old + 1;
  emu::step();
  return old;
}
