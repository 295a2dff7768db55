// Copies that run beside the threads: cp.async, the TMA's loads, bulk additions. Where a copy will write is NaN from
// the moment it is asked for until it lands, and it reads its source when it lands.
#include <memory>

#include "state.h"

namespace emu {
namespace {
// What EmulatedDriver (tests/emulator/driver.py) encodes of a tensor.
struct Map {
  uint32_t magic;
  uint8_t element, rank, swizzled, unused;
  uint64_t address, sizes[5], pitches[4];
  uint32_t box[5];
};
constexpr uint32_t kMagic = 0x7e5012a1;

uint32_t swizzled(uint32_t address) { return address ^ (address >> 3 & 0x70); }

void land_box(Block& block, const Map& map, uint32_t destination, const int* at) {
  const uint32_t row_bytes = map.box[0] * map.element;
  uint32_t index[5] = {}, rows = 1;
  for (int d = 1; d < map.rank; d++) rows *= map.box[d];
  std::vector<char> row(row_bytes);
  for (uint32_t r = 0; r < rows; r++) {
    bool inside = true;
    uint64_t source = map.address;
    for (int d = 1; d < map.rank; d++) {
      const int64_t place = static_cast<int64_t>(at[d]) + index[d];
      inside &= place >= 0 && place < static_cast<int64_t>(map.sizes[d]);
      source += place * map.pitches[d - 1];
    }
    memset(row.data(), 0, row_bytes);
    const int64_t first = std::max<int64_t>(0, -static_cast<int64_t>(at[0]));
    const int64_t last = std::min<int64_t>(map.box[0], static_cast<int64_t>(map.sizes[0]) - at[0]);
    if (inside && first < last)
      memcpy(row.data() + first * map.element,
             reinterpret_cast<const char*>(source) + (at[0] + first) * map.element, (last - first) * map.element);
    for (uint32_t i = 0; i < row_bytes; i += 16) {
      const uint32_t address = destination + r * row_bytes + i;
      memcpy(block.base + (map.swizzled ? swizzled(address) : address), row.data() + i, 16);
    }
    for (int d = 1; d < map.rank && ++index[d] == map.box[d]; d++) index[d] = 0;
  }
}

void arrive_bytes(Block& block, uint32_t address, uint32_t bytes) {
  MBarrier& barrier = block.mbarriers.at(address);
  barrier.bytes -= bytes;
  complete(block, barrier);
}

// `land` goes on its way; `bytes` of shared memory at `destination` are undefined until it lands.
void send(uint32_t destination, uint32_t bytes, uint32_t mbarrier, std::function<void(Block&)> land) {
  Block* const block = me()->block;
  if (!block->mbarriers.count(mbarrier)) fail("a copy on an mbarrier at %u that was not made", mbarrier);
  memset(shared_of(*block, destination, bytes), 0xff, bytes);
  block->under_way.push_back(new Copy{[=] {
    land(*block);
    arrive_bytes(*block, mbarrier, bytes);
  }});
  step();
}
}  // namespace

void tma_load(uint32_t destination, const void* encoded, uint32_t mbarrier, int dimensions, const int* at) {
  Map map;
  memcpy(&map, encoded, sizeof map);
  if (map.magic != kMagic || map.rank != dimensions)
    fail("a TMA load of %d dimensions by a map of %d", dimensions, map.rank);
  if (destination % 128) fail("a TMA load to shared address %u", destination);
  uint32_t bytes = map.element;
  for (int d = 0; d < dimensions; d++) bytes *= map.box[d];
  std::vector<int> place(at, at + dimensions);
  send(destination, bytes, mbarrier, [=](Block& block) { land_box(block, map, destination, place.data()); });
}

void bulk_load(uint32_t destination, const void* source, uint32_t bytes, uint32_t mbarrier) {
  if (destination % 16 || bytes % 16 || reinterpret_cast<size_t>(source) % 16) fail("a misaligned bulk copy");
  send(destination, bytes, mbarrier, [=](Block& block) { memcpy(block.base + destination, source, bytes); });
}

void copy16(uint32_t destination, const void* source, int bytes) {
  char* const to = shared_pointer(destination, 16);
  if (bytes && reinterpret_cast<size_t>(source) % 16) fail("a misaligned asynchronous copy");
  memset(to, 0xff, 16);
  me()->open_copies.push_back([=] {
    memset(to, 0, 16);
    if (bytes) memcpy(to, source, bytes);
  });
}
void copy_commit() {
  Fiber& fiber = *me();
  fiber.copy_groups.emplace_back();
  fiber.copy_groups.back().swap(fiber.open_copies);
}
void copy_wait(int pending) {
  std::deque<std::vector<std::function<void()>>>& groups = me()->copy_groups;
  for (; groups.size() > static_cast<size_t>(pending); groups.pop_front())
    for (const std::function<void()>& copy : groups.front()) copy();
}

void bulk_add(void* destination, uint32_t source, uint32_t bytes) {
  if (source % 16 || bytes % 16 || reinterpret_cast<size_t>(destination) % 16) fail("a misaligned bulk addition");
  const float* const from = reinterpret_cast<const float*>(shared_of(*me()->block, source, bytes));
  float* const to = static_cast<float*>(destination);
  me()->bulk.push_back([=] {
    for (uint32_t i = 0; i < bytes / 4; i++) to[i] += from[i];
  });
  step();
}
void bulk_wait(int pending) {
  if (pending) fail("a wait for all bulk groups but %d", pending);
  for (const std::function<void()>& add : me()->bulk) add();
  me()->bulk.clear();
  step();
}
}  // namespace emu
