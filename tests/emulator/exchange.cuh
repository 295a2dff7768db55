// Two blocks of a cluster send each other `from`, twice, with a mistake of choice. 16 threads of block 0 and 32 of block 1
// send: first a word each, then four words each, then the first thread copies as much as that from shared memory. Stores
// count on one barrier of the other block's, the copy on another.
#include "parts/cluster.cuh"

enum Mistake {
  kNone, kNoBarrierThere, kMisalignedStore, kMisalignedCopy, kBeyondShared, kNoBlock, kBarrierHere, kOtherBarrier,
  kTooManyBytes, kNoBytes, kNoWait, kBlockLeaves, kSourceLeaves, kSourceChanges
};

constexpr int kRounds = 2, kMost = 32, kWords = 9;  // words: that a thread sends

struct ExchangeParams {
  const uint32* from;  // [kRounds][2][kMost * kWords], of which block 0 sends half
  uint32* to;          // the same, of what each block received
  int mistake;
};

extern "C" __global__ void __launch_bounds__(kMost) __cluster_dims__(CLUSTER, 1, 1)
    exchange(const __grid_constant__ ExchangeParams p) {
  extern __shared__ __align__(128) char shared[];
  __shared__ uint64 barriers[2];
  const int i = threadIdx.x, rank = cluster_rank(), other = 1 - rank;
  const int sent = kMost / 2 * (1 + rank), received = kMost / 2 * (1 + other);
  uint32* const copy = reinterpret_cast<uint32*>(shared);
  const uint32* const in = copy + 4 * kMost;
  const uint32 stored = shared_address(barriers), copied = stored + 8;
  const auto there = [&](uint32 address) { return p.mistake == kNoBlock ? address : address_at(address, other); };
  const auto expect = [&](int round) {
    if (i != 0) return;
    if (p.mistake == kNoBytes && round == kRounds - 1)
      barrier_arrive(stored);
    else
      barrier_expect(stored, 20 * received + (p.mistake == kTooManyBytes ? 4 : 0));
    barrier_expect(copied, 16 * received);
  };
  if (i == 0) {
    barrier_init(stored, 1);
    barrier_init(copied, 1);
    barrier_init_fence();
  }
  if (p.mistake != kNoBarrierThere) cluster_sync();
  if (p.mistake == kBlockLeaves && rank == 1) return;
  expect(0);
  for (int round = 0; round < kRounds; round++) {
    const bool last = round == kRounds - 1;
    const int first = (round * 2 + rank) * kMost * kWords;
    const uint32* const from = p.from + first;
    for (int x = i; x < 4 * sent; x += kMost) copy[x] = from[5 * sent + x];
    fence_async_proxy();
    __syncthreads();
    const uint32 full = p.mistake == kBarrierHere ? address_at(stored, rank) : there(stored);
    uint32 words = shared_address(in), fours = words + 4 * sent, copies = words + 20 * sent;
    if (p.mistake == kMisalignedStore) fours += 4;
    if (p.mistake == kMisalignedCopy) copies += 4;
    if (p.mistake == kBeyondShared) copies = words + 4 * kMost * kWords;
    if (i < sent) {
      uint32 four[4];
      for (int x = 0; x < 4; x++) four[x] = from[sent + 4 * i + x];
      store_there(there(words + 4 * i), from[i], full);
      store_there(there(fours + 16 * i), four, full);
    }
    if (i == 0) copy_there(there(copies), shared_address(copy), 16 * sent, there(p.mistake == kOtherBarrier ? stored : copied));
    if (p.mistake == kSourceChanges) copy[i] = 0;
    int x = i;
    if (!last || p.mistake != kNoWait) barrier_wait(stored, round);
    for (; x < 5 * received; x += kMost) p.to[first + x] = in[x];
    if (!last || p.mistake != kNoWait) barrier_wait(copied, round);
    for (; x < kWords * received; x += kMost) p.to[first + x] = in[x];
    __syncthreads();  // all have waited
    if (!last) expect(round + 1);
    if (!last || p.mistake != kSourceLeaves) cluster_sync();  // all has been received, and read
  }
}
