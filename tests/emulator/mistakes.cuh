// Turns `count` floats round through shared memory, with a mistake of choice: what the emulator is there to find.
#include "parts/copy_sm80.cuh"
#include "parts/tma.cuh"

enum Mistake {
  kNone, kBeyondTensor, kBeyondShared, kMissedBarrier, kNoBarrier, kEarlyRead, kNoBytes, kMisaligned, kMissedShuffle,
  kTooManyRegisters
};

struct MistakeParams {
  const float* from;
  float* to;
  int count, mistake;
};

extern "C" __global__ void __launch_bounds__(384) mistakes(const __grid_constant__ MistakeParams p) {
  extern __shared__ __align__(128) char shared[];
  __shared__ uint64 barriers[1];
  float* const rows = reinterpret_cast<float*>(shared);
  const int i = threadIdx.x, lane = i % 32;
  if (i < 128)
    registers_lower<24>();
  else if (p.mistake == kTooManyRegisters)
    registers_raise<248>();
  else
    registers_raise<240>();
  if (i >= p.count) return;
  if (p.mistake == kEarlyRead || p.mistake == kNone) {
    if (i % 4 == 0) copy16(shared_address(rows + i), p.from + i, true);
    copy_commit();
    if (p.mistake == kNone) copy_wait<0>();
  } else {
    rows[i] = p.from[p.mistake == kBeyondTensor ? i + 1 : i];
  }
  if (p.mistake == kBeyondShared) copy16(shared_address(shared) + 4 * p.count, p.from, true);
  if (p.mistake == kMissedBarrier && i >= 32) return;
  if (p.mistake != kNoBarrier) named_sync(1, p.count);
  if (p.mistake == kNoBytes) {
    if (i == 0) {
      barrier_init(shared_address(barriers), 1);
      barrier_expect(shared_address(barriers), 16);
    }
    named_sync(1, p.count);
    barrier_wait(shared_address(barriers), 0);
  }
  float x = rows[p.count - 1 - i];
  if (p.mistake == kMisaligned) x = __uint_as_float(reinterpret_cast<const uint4*>(p.from + 1)->x);
  if (p.mistake == kMissedShuffle && lane) x = __shfl_up_sync(~0u, x, 1);
  p.to[i] = x;
}
