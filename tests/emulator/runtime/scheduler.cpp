// Runs a grid: fibers of all resident blocks by turns, in an order that the seed decides. Fails a launch that accesses
// what is nobody's, that waits for ever, or that meets where it should not.
#include <algorithm>
#include <sys/mman.h>

#include "state.h"

namespace emu {
Thread* self;
dim3 block_dim, grid_dim;
Launch* launch;

namespace {
constexpr size_t kPage = 4096, kStack = 128 << 10;
// Offsets: 1 KB is the system's, then come static and dynamic shared memory, all below what descriptors reach.
constexpr uint32_t kStatics = 1024, kMostStatics = 49 << 10, kWindow = 256 << 10;
using Entry = void (*)(void**);

Entry entry;
void** arguments;
char* stacks;
std::vector<int> free_stacks;
std::vector<char*> free_windows;
void* scheduler_stack;

extern "C" void emu_switch(void** from, void* to);
asm(R"(
.globl emu_switch
emu_switch:
  pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
  ret
)");

char* map(size_t bytes) {
  constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* const p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, kFlags, -1, 0);
  if (p == MAP_FAILED) fail("no memory for %zu bytes", bytes);
  return static_cast<char*>(p);
}

void yield() { emu_switch(&me()->stack_pointer, scheduler_stack); }

// Shared memory ends with its block: nothing may still be under way to it or from it.
void check_end(const Block& block) {
  if (!block.under_way.empty()) fail("a block ends before copies to it have landed");
  for (const Block* to : launch->resident)
    for (const Copy* copy : to->under_way)
      if (copy->source == &block) fail("a block ends before copies from it have read shared memory");
  for (const auto& [address, barrier] : block.mbarriers)
    if (barrier.bytes < 0) fail("the mbarrier at %u got %ld bytes that nobody expected", address, -barrier.bytes);
}

void body() {
  entry(arguments);
  Fiber* const fiber = me();
  if (!fiber->bulk.empty()) fail("a thread ends while its bulk copies read shared memory");
  for (Copy* copy : launch->writes)
    if (copy->thread == fiber) copy->thread = nullptr;
  fiber->block->live--, launch->live--;
  if (fiber->block->live == 0) check_end(*fiber->block);
  fiber->waiting_for = nullptr;
  launch->idle = 0;
  yield();
  __builtin_trap();
}

void start(Block& block, dim3 index, uint32_t smem) {
  block.index = index;
  if (free_windows.empty()) {
    char* const p = map(kWindow + kPage);
    mprotect(p + kWindow, kPage, PROT_NONE);
    free_windows.push_back(p);
  }
  block.mapping = free_windows.back();
  free_windows.pop_back();
  const uint32_t rounded = (smem + 63) / 64 * 64;  // the last byte before the page that nobody may touch, nearly
  const uint32_t begin = std::min(kMostStatics, (kWindow - rounded) / 1024 * 1024);
  block.dynamic_begin = begin, block.dynamic_end = begin + smem, block.static_end = kStatics;
  block.base = block.mapping + kWindow - rounded - begin;
  memset(block.base, launch->fill, begin + rounded);
  const unsigned threads = block_dim.x * block_dim.y * block_dim.z;
  block.fibers.resize(threads);
  block.warps.resize((threads + 31) / 32);
  block.groups.resize((threads + 127) / 128);
  block.live = threads, launch->live += threads;
  for (unsigned i = 0; i < threads; i++) {
    Fiber& f = block.fibers[i];
    f.thread_index = {i % block_dim.x, i / block_dim.x % block_dim.y, i / block_dim.x / block_dim.y};
    f.block_index = index, f.block = &block, f.warp = &block.warps[i / 32], f.lane = i % 32;
    f.warp->lanes[f.lane] = &f;
    if (free_stacks.empty()) fail("more threads at once than there are stacks");
    f.stack = free_stacks.back(), free_stacks.pop_back();
    void** top = reinterpret_cast<void**>(stacks + (f.stack + 1) * kStack);
    *--top = nullptr, *--top = reinterpret_cast<void*>(body);
    f.stack_pointer = top - 6;
    wake(&f);
  }
}

void end(Block& block) {
  for (const Fiber& f : block.fibers) free_stacks.push_back(f.stack);
  for (Copy* copy : block.under_way) delete copy;
  free_windows.push_back(block.mapping);
}

bool land_one() {
  const size_t blocks = launch->resident.size(), first = launch->random() % (blocks + 1);
  for (size_t i = 0; i <= blocks; i++) {
    const size_t at = (first + i) % (blocks + 1);
    std::vector<Copy*>& copies = at < blocks ? launch->resident[at]->under_way : launch->writes;
    if (copies.empty()) continue;
    self = nullptr;  // who asked for it may be gone
    land(copies, launch->random() % copies.size());
    launch->idle = 0;
    return true;
  }
  return false;
}

void run_warp(Warp& warp) {
  unsigned lanes = warp.ready;
  warp.ready = 0, warp.queued = false;
  const bool backwards = launch->random() & 1;
  while (lanes) {
    const int lane = backwards ? 31 - __builtin_clz(lanes) : __builtin_ctz(lanes);
    lanes &= ~(1u << lane);
    self = warp.lanes[lane];
    emu_switch(&scheduler_stack, me()->stack_pointer);
  }
}

void run(dim3 grid, uint32_t smem, unsigned at_once, bool together) {
  const uint64_t blocks = static_cast<uint64_t>(grid.x) * grid.y * grid.z;
  if (together && blocks > at_once) fail("%lu blocks that wait for each other, %u run at once", blocks, at_once);
  const unsigned cluster = launch->cluster;
  if (grid.x % cluster) fail("%u blocks in clusters of %u", grid.x, cluster);
  uint64_t next = 0;
  for (;;) {
    while (launch->resident.size() + cluster <= std::max(at_once, cluster) && next < blocks) {
      for (unsigned i = 0; i < cluster; i++, next++) {
        Block* const block = new Block;
        launch->resident.push_back(block);
        const unsigned at = static_cast<unsigned>(next);
        start(*block, {at % grid.x, at / grid.x % grid.y, at / grid.x / grid.y}, smem);
      }
    }
    if (launch->resident.empty()) break;
    const bool stuck = launch->ready.empty() || launch->idle > 16 * launch->live + 1000;
    if (stuck && !land_one()) {
      if (launch->ready.empty()) report_waiting("all wait for each other");
      if (launch->idle > 200 * launch->live + 100000) report_waiting("all look for what nobody writes");
    }
    if (launch->late && launch->random() % launch->late == 0) land_one();
    if (launch->ready.empty()) continue;
    std::swap(launch->ready[launch->random() % launch->ready.size()], launch->ready.back());
    Warp* const warp = launch->ready.back();
    launch->ready.pop_back();
    run_warp(*warp);
    for (size_t i = 0; i < launch->resident.size(); i++)
      if (launch->resident[i]->live == 0) {
        end(*launch->resident[i]);
        delete launch->resident[i];
        launch->resident.erase(launch->resident.begin() + i--);
      }
  }
  while (land_one()) {
  }
}

}  // namespace

void land(std::vector<Copy*>& copies, size_t which) {
  std::swap(copies[which], copies.back());
  Copy* const copy = copies.back();
  copies.pop_back();
  copy->land();
  delete copy;
}

void wake(Fiber* fiber) {
  Warp& warp = *fiber->warp;
  fiber->waiting_for = "";
  warp.ready |= 1u << fiber->lane;
  if (!warp.queued) launch->ready.push_back(&warp);
  warp.queued = true;
  launch->idle = 0;
}
void wake_all(std::vector<Fiber*>& waiting) {
  std::vector<Fiber*> woken;
  woken.swap(waiting);
  for (Fiber* fiber : woken) wake(fiber);
}
void wait(const char* what) {
  me()->waiting_for = what;
  yield();
}
void step() {
  launch->idle = 0;
  if (launch->random() % 4 == 0) wake(me()), yield();
}
void spin() {
  const uint64_t idle = launch->idle + 1;
  wake(me());
  launch->idle = idle;
  me()->waiting_for = "look for a word";
  yield();
  me()->waiting_for = "";
}

// Runs `kernel` over a grid. 0: done; 1: it failed, see emu_message().
extern "C" int emu_launch(void* kernel, const unsigned* grid, const unsigned* block, unsigned smem, void** parameters,
                          unsigned at_once, int together, unsigned cluster, unsigned seed) {
  constexpr int kStacks = 8192;
  if (!stacks) {
    stacks = map(kStacks * kStack);
    for (int i = 0; i < kStacks; i++) mprotect(stacks + i * kStack, kPage, PROT_NONE);
  }
  free_stacks.clear();
  for (int i = kStacks; i--;) free_stacks.push_back(i);
  Launch here;
  here.random.state = 0x9e3779b97f4a7c15ull * (seed + 1);
  here.fill = seed % 2 ? 0x7f : 0xff;  // a NaN with a sign or, in 16 bits of float16, without
  here.late = seed % 3 == 0 ? 0 : seed % 3 == 1 ? 4 : 64;
  here.cluster = cluster;
  launch = &here, self = nullptr;
  block_dim = {block[0], block[1], block[2]}, grid_dim = {grid[0], grid[1], grid[2]};
  entry = reinterpret_cast<Entry>(kernel), arguments = parameters;
  Signals signals;
  const int failed = sigsetjmp(failure, 1);
  if (!failed) run(grid_dim, smem, at_once, together);
  if (failed) {  // fibers in the middle of their work are let go; their blocks' bookkeeping stays behind
    for (const Block* b : here.resident) free_windows.push_back(b->mapping);
    self = nullptr;
  }
  return failed;
}
}  // namespace emu
