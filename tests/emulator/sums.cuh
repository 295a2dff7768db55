// Blocks add what each has to sums in device memory, by the bulk copy engine, and take what all have added, with a
// mistake of choice. The sums begin as zeros that block 0 stores; a count tells others what has been done.
#include "parts/bulk_copies.cuh"
#include "parts/turns.cuh"

enum Mistake { kNone, kZerosUnwritten, kSumsUnwritten, kSumsUnread, kSumsAgain, kResultUnread };

constexpr int kCount = 64;

struct SumsParams {
  const float* from;  // [blocks][kCount]
  float* sums;        // [kCount]
  float* to;          // [blocks][kCount]
  int* told;          // 0
  int mistake;
};

extern "C" __global__ void __launch_bounds__(kCount) sums(const __grid_constant__ SumsParams p) {
  extern __shared__ __align__(128) char memory[];
  float* const shared = reinterpret_cast<float*>(memory);
  const uint32 address = shared_address(memory);
  const int i = threadIdx.x, block = blockIdx.x, blocks = gridDim.x;
  const auto fill = [&](float x) {
    shared[i] = x;
    fence_async_proxy();
    __syncthreads();
  };
  // Copies have read shared memory for sure, and have written only where that is no mistake.
  const auto tell = [&](int mistake) {
    if (p.mistake == mistake)
      bulk_wait_read();
    else
      bulk_wait_done();
    pass_turn(p.told);
  };
  if (block == 0) {
    fill(0.f);
    if (i == 0) {
      bulk_store(p.sums, address, 4 * kCount);
      tell(kZerosUnwritten);
    }
    __syncthreads();
  }
  fill(p.from[block * kCount + i]);
  if (i == 0) {
    await_turns(p.told, 1);
    bulk_add(p.sums, address, 4 * kCount);
    if (p.mistake == kSumsUnread) shared[0] = 0.f;
    tell(kSumsUnwritten);
    await_turns(p.told, 1 + blocks);
  }
  __syncthreads();
  fill(__ldcg(p.sums + i));
  if (i == 0) {
    bulk_store(p.to + block * kCount, address, 4 * kCount);
    if (p.mistake == kSumsAgain) bulk_store(p.sums, address, 4 * kCount);  // others may not have read them
    if (p.mistake != kResultUnread) bulk_wait_read();                       // it is written when the grid has ended
  }
}
