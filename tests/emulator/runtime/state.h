// What the runtime knows of a launch: threads as fibers, warps, blocks, what is under way. One operating system thread
// runs all of it, so nothing here is locked.
#pragma once
#include <csetjmp>
#include <csignal>
#include <deque>
#include <functional>
#include <string>
#include <unordered_map>
#include <vector>

#include "device.h"

namespace emu {
struct Block;
struct Fiber;
struct Warp;

// A copy that has been asked for. `land` does it; it may be called from any fiber.
struct Copy {
  std::function<void()> land;
  const Block* source;  // whose shared memory it reads, or null
  const Fiber* thread;  // that may wait for it, or null
};

using Bytes = std::vector<char>;
struct BulkCopy {  // to global memory
  std::function<Bytes()> read;
  std::function<void(const Bytes&)> write;
};

struct Fiber : Thread {
  Block* block;
  Warp* warp;
  unsigned lane;
  void* stack_pointer;
  int stack;
  const char* waiting_for = "";  // in words, for reports
  std::vector<std::function<void()>> open_copies;
  std::deque<std::vector<std::function<void()>>> copy_groups;
  std::vector<BulkCopy> bulk;  // that have not read shared memory yet
  uint64_t cluster_phase = 0;  // of its cluster's barrier, when it arrived
};

struct Meeting {  // of the lanes of a warp
  unsigned mask = 0, arrived = 0;
  const char* what = nullptr;
  void* mine[32];
};

struct Warp {
  Fiber* lanes[32] = {};
  unsigned ready = 0;
  bool queued = false;
  std::vector<Meeting> meetings;
};

struct NamedBarrier {
  int expected = 0, arrived = 0;
  std::vector<Fiber*> waiting;
};

struct MBarrier {
  uint32_t arrivals = 0;
  int64_t pending = 0, bytes = 0;
  uint32_t phase = 0;
  std::vector<Fiber*> waiting;
};

struct ClusterBarrier {  // of all threads of a cluster's blocks
  unsigned arrived = 0;
  uint64_t phase = 0;
  std::vector<Fiber*> waiting;
};

struct Product {  // a wgmma that has been issued
  Wgmma operation;
  std::vector<float*> registers;  // accumulators of the 128 threads, thread by thread
  std::vector<uint32_t> a;        // [128][4]
  float* key() const { return registers[0]; }
};

struct WarpGroup {
  int arrived = 0;
  const char* what = nullptr;
  const void* mine[128];
  std::vector<Fiber*> waiting;
  std::vector<Product> open;
  std::deque<std::vector<Product>> groups;
  std::unordered_map<float*, std::vector<float>> sums;  // by key: what is not written yet
};

struct Block {
  dim3 index;
  char* mapping;  // what shared memory is mapped in; a page that nobody may touch follows
  char* base;     // the address of offset 0
  uint32_t dynamic_begin, dynamic_end, static_end;
  std::unordered_map<const void*, uint32_t> statics;
  std::vector<Warp> warps;
  std::vector<Fiber> fibers;
  std::vector<WarpGroup> groups;
  NamedBarrier barriers[16];
  std::unordered_map<uint32_t, MBarrier> mbarriers;
  std::vector<Copy*> under_way;  // on their own: the TMA's
  uint32_t registers = 0;        // that its threads have asked for, those who give some back too
  size_t live;
};

struct Random {  // xorshift*, Marsaglia
  uint64_t state;
  unsigned operator()() {
    state ^= state >> 12, state ^= state << 25, state ^= state >> 27;
    return state * 0x2545f4914f6cdd1dull >> 32;
  }
};

struct Launch {
  Random random;
  int fill;  // of each byte of a block's shared memory when it starts
  unsigned late;  // one in so many turns lands a copy; 0: only when nothing else can run
  std::vector<Warp*> ready;
  std::vector<Block*> resident;
  std::vector<Copy*> writes;  // bulk copies that have read shared memory and not written global memory
  uint64_t idle = 0;  // turns since something happened that others can see
  size_t live = 0;    // fibers
  unsigned cluster = 1;  // blocks
  std::unordered_map<unsigned, ClusterBarrier> clusters;
};

// Signals of accesses that are not allowed fail the launch while this exists.
struct Signals {
  static constexpr int kNumbers[] = {SIGSEGV, SIGBUS, SIGILL};
  struct sigaction before[3];
  Signals();
  ~Signals();
};

extern Launch* launch;
extern sigjmp_buf failure;  // where a launch that fails goes on
inline Fiber* me() { return static_cast<Fiber*>(self); }
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));
[[noreturn]] void report_waiting(const char* what);  // fails with what all threads wait for
void wake(Fiber* fiber);
void wake_all(std::vector<Fiber*>& waiting);
void wait(const char* what);  // until somebody wakes this fiber
void complete(Block& block, MBarrier& barrier);
void land(std::vector<Copy*>& copies, size_t which);
Block& block_at(uint32_t rank);      // of this thread's cluster
Block& block_of(uint32_t& address);  // that address_at named; the address is that block's own then
char* shared_of(Block& block, uint32_t address, size_t bytes);
}  // namespace emu
