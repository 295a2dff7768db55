// Shared memory, and all that threads of a warp or of a block wait for each other with.
#include "state.h"

namespace emu {
void* dynamic_shared() { return me()->block->base + me()->block->dynamic_begin; }

void* static_shared(const void* key, size_t bytes, size_t alignment) {
  Block& block = *me()->block;
  const auto found = block.statics.find(key);
  if (found != block.statics.end()) return block.base + found->second;
  const uint32_t at = (block.static_end + alignment - 1) / alignment * alignment;
  block.static_end = at + bytes;
  if (block.static_end > block.dynamic_begin) fail("%u bytes of static shared memory are too many", block.static_end);
  block.statics[key] = at;
  return block.base + at;
}

uint32_t shared_address(const void* p) {
  const Block& block = *me()->block;
  const ptrdiff_t at = static_cast<const char*>(p) - block.base;
  if (at < 0 || at > block.dynamic_end) fail("an address that is not in shared memory is taken for one");
  return static_cast<uint32_t>(at);
}

char* shared_of(Block& block, uint32_t address, size_t bytes) {
  const bool in_statics = address >= 1024 && address + bytes <= block.static_end;
  if (!in_statics && (address < block.dynamic_begin || address + bytes > block.dynamic_end))
    fail("shared memory %u .. %zu: dynamic is %u .. %u", address, address + bytes, block.dynamic_begin,
         block.dynamic_end);
  return block.base + address;
}
char* shared_pointer(uint32_t address, size_t bytes) {
  if (address % bytes) fail("shared address %u is misaligned for %zu bytes", address, bytes);
  return shared_of(*me()->block, address, bytes);
}

unsigned lane_index() { return me()->lane; }

void meet(unsigned mask, const char* what, void* mine, Finish finish) {
  Fiber& fiber = *me();
  std::vector<Meeting>& meetings = fiber.warp->meetings;
  if (!(mask >> fiber.lane & 1)) fail("%s by a lane outside of its mask %08x", what, mask);
  size_t i = 0;
  while (i < meetings.size() && meetings[i].mask != mask) i++;
  if (i == meetings.size()) {
    Meeting fresh;
    fresh.mask = mask, fresh.what = what;
    meetings.push_back(fresh);
  }
  Meeting& meeting = meetings[i];
  if (meeting.what != what) fail("lanes meet in %s and in %s", meeting.what, what);
  meeting.arrived |= 1u << fiber.lane;
  meeting.mine[fiber.lane] = mine;
  if (meeting.arrived != mask) return wait(what);
  Meeting whole = meeting;
  meetings.erase(meetings.begin() + i);
  finish(whole.mine, mask);
  for (unsigned lane = 0; lane < 32; lane++)
    if (lane != fiber.lane && mask >> lane & 1) wake(fiber.warp->lanes[lane]);
}

namespace {
struct Shuffled {
  uint64_t given, taken;
  int lane;
};
struct Vote {
  bool predicate;
  unsigned votes;
};
}  // namespace

uint64_t shuffle(unsigned mask, uint64_t x, int lane) {
  Shuffled mine{x, 0, lane};
  meet(mask, "a shuffle", &mine, [](void** lanes, unsigned mask) {
    for (int i = 0; i < 32; i++) {
      if (!(mask >> i & 1)) continue;
      Shuffled& to = *static_cast<Shuffled*>(lanes[i]);
      if (!(mask >> to.lane & 1)) fail("a shuffle from lane %d, which takes no part", to.lane);
      to.taken = static_cast<Shuffled*>(lanes[to.lane])->given;
    }
  });
  return mine.taken;
}

unsigned ballot(unsigned mask, bool predicate) {
  Vote mine{predicate, 0};
  meet(mask, "a vote", &mine, [](void** lanes, unsigned mask) {
    unsigned votes = 0;
    for (int i = 0; i < 32; i++)
      if (mask >> i & 1) votes |= static_cast<unsigned>(static_cast<Vote*>(lanes[i])->predicate) << i;
    for (int i = 0; i < 32; i++)
      if (mask >> i & 1) static_cast<Vote*>(lanes[i])->votes = votes;
  });
  return mine.votes;
}

// A block has what its threads were launched with (__launch_bounds__(threads, 1)), a multiple of 8 each: a warp waits until
// others have given back what it asks for.
void set_registers(uint32_t registers) {
  Block& block = *me()->block;
  const uint32_t threads = block.fibers.size(), held = threads * (65536 / threads / 8 * 8);
  block.registers += registers;
  if (block.registers > held) fail("a block of %u registers is asked for %u: warps would wait for ever", held, block.registers);
}

void barrier(int id, int threads, bool waits) {
  if (id < 0 || id > 15) fail("there is no barrier %d", id);
  if (threads <= 0 || threads % 32) fail("barrier %d of %d threads", id, threads);
  NamedBarrier& b = me()->block->barriers[id];
  if (b.arrived && b.expected != threads) fail("barrier %d of %d and of %d threads", id, b.expected, threads);
  b.expected = threads;
  b.arrived++;
  if (b.arrived == threads) {
    b.arrived = 0;
    wake_all(b.waiting);
    if (!waits) launch->idle = 0;
  } else if (waits) {
    static const char* const names[16] = {
        "barrier 0", "barrier 1", "barrier 2", "barrier 3", "barrier 4", "barrier 5", "barrier 6", "barrier 7",
        "barrier 8", "barrier 9", "barrier 10", "barrier 11", "barrier 12", "barrier 13", "barrier 14", "barrier 15"};
    b.waiting.push_back(me());
    wait(names[id]);
  }
}

namespace {
MBarrier& mbarrier_at(uint32_t address, Block& block = *me()->block) {
  const auto found = block.mbarriers.find(address);
  if (found == block.mbarriers.end()) fail("an mbarrier at %u that was not made", address);
  return found->second;
}
}  // namespace

void complete(Block&, MBarrier& barrier) {
  if (barrier.pending || barrier.bytes) return;
  barrier.phase++;
  barrier.pending = barrier.arrivals;
  launch->idle = 0;
  wake_all(barrier.waiting);
}

void mbarrier_init(uint32_t address, uint32_t arrivals) {
  shared_pointer(address, 8);
  MBarrier fresh;
  fresh.arrivals = arrivals, fresh.pending = arrivals;
  me()->block->mbarriers[address] = fresh;
}
namespace {
void arrive(Block& block, uint32_t address, uint32_t bytes) {
  MBarrier& barrier = mbarrier_at(address, block);
  barrier.bytes += bytes;
  if (--barrier.pending < 0) fail("more than %u arrivals at the mbarrier at %u", barrier.arrivals, address);
  complete(block, barrier);
  step();
}
constexpr int kRankShift = 24;  // above every address
}  // namespace

void mbarrier_arrive(uint32_t address, uint32_t bytes) { arrive(*me()->block, address, bytes); }

uint32_t cluster_rank() { return me()->block->index.x % launch->cluster; }
Block& block_at(uint32_t rank) {
  if (rank >= launch->cluster) fail("block %u of a cluster of %u", rank, launch->cluster);
  const dim3& mine = me()->block->index;
  const uint32_t x = mine.x - mine.x % launch->cluster + rank;
  for (Block* block : launch->resident)
    if (block->index.x == x && block->index.y == mine.y && block->index.z == mine.z) return *block;
  fail("block %u of the cluster has ended", rank);
}
uint32_t address_at(uint32_t address, uint32_t rank) {
  block_at(rank);
  return address | (rank + 1) << kRankShift;
}
Block& block_of(uint32_t& address) {
  const uint32_t rank = address >> kRankShift;
  if (!rank) fail("an address %u of no block", address);
  address &= (1u << kRankShift) - 1;
  return block_at(rank - 1);
}
void mbarrier_arrive_at(uint32_t address) {
  Block& block = block_of(address);
  arrive(block, address, 0);
}
namespace {
ClusterBarrier& cluster_barrier() { return launch->clusters[me()->block->index.x / launch->cluster]; }
}  // namespace
void cluster_arrive() {
  ClusterBarrier& barrier = cluster_barrier();
  me()->cluster_phase = barrier.phase;
  if (++barrier.arrived < launch->cluster * me()->block->fibers.size()) return;
  barrier.arrived = 0, barrier.phase++;
  launch->idle = 0;
  wake_all(barrier.waiting);
}
void cluster_wait() {
  ClusterBarrier& barrier = cluster_barrier();
  while (barrier.phase == me()->cluster_phase) {
    barrier.waiting.push_back(me());
    wait("the cluster");
  }
}
void mbarrier_wait(uint32_t address, uint32_t parity) {
  MBarrier& barrier = mbarrier_at(address);
  if (parity > 1) fail("a parity of %u", parity);
  while ((barrier.phase & 1) == parity) {
    barrier.waiting.push_back(me());
    wait("an mbarrier");
  }
}
bool mbarrier_test(uint32_t address, uint32_t parity) {
  if ((mbarrier_at(address).phase & 1) != parity) return true;
  spin();
  return false;
}
}  // namespace emu
