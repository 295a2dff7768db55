// Copies that run beside the threads: cp.async, the TMA's loads and stores, bulk additions. Where a copy will write is
// NaN from the moment it is asked for until it lands (not so additions). A load reads its source when it lands. What
// goes to global memory reads shared memory when its thread waits, and lands then or, if it waits for the reads alone,
// at any time until the grid has ended.
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

Map decode(const void* encoded, int dimensions, uint32_t shared_place) {
  Map map;
  memcpy(&map, encoded, sizeof map);
  if (map.magic != kMagic || map.rank != dimensions)
    fail("a TMA copy of %d dimensions by a map of %d", dimensions, map.rank);
  if (shared_place % 128) fail("a TMA copy at shared address %u", shared_place);
  return map;
}

uint32_t bytes_of(const Map& map) {
  uint32_t bytes = map.element;
  for (int d = 0; d < map.rank; d++) bytes *= map.box[d];
  return bytes;
}

// A row of a box: `move(in global memory, where in the row, bytes)` is called for what of it lies in the tensor.
template <class Move>
void for_row(const Map& map, const int* at, const uint32_t* index, Move move) {
  uint64_t global = map.address;
  for (int d = 1; d < map.rank; d++) {
    const int64_t place = static_cast<int64_t>(at[d]) + index[d];
    if (place < 0 || place >= static_cast<int64_t>(map.sizes[d])) return;
    global += place * map.pitches[d - 1];
  }
  const int64_t first = std::max<int64_t>(0, -static_cast<int64_t>(at[0]));
  const int64_t last = std::min<int64_t>(map.box[0], static_cast<int64_t>(map.sizes[0]) - at[0]);
  if (first < last)
    move(reinterpret_cast<char*>(global) + (at[0] + first) * map.element, first * map.element, (last - first) * map.element);
}

// A box: `move(in global memory, where in the box, bytes)` is called for what of it lies in the tensor.
template <class Move>
void for_box(const Map& map, const int* at, Move move) {
  const uint32_t row_bytes = map.box[0] * map.element;
  uint32_t index[5] = {};
  for (uint32_t row = 0; row < bytes_of(map); row += row_bytes) {
    for_row(map, at, index, [&](char* global, int64_t first, int64_t bytes) { move(global, row + first, bytes); });
    for (int d = 1; d < map.rank && ++index[d] == map.box[d]; d++) index[d] = 0;
  }
}

// A box in shared memory: `move(there, where in the box)` is called for every 16 bytes.
template <class Move>
void for_pieces(Block& block, const Map& map, uint32_t place, Move move) {
  for (uint32_t i = 0; i < bytes_of(map); i += 16)
    move(block.base + (map.swizzled ? swizzled(place + i) : place + i), i);
}

void load_box(Block& block, const Map& map, uint32_t place, const int* at) {
  Bytes box(bytes_of(map));
  for_box(map, at, [&](const char* global, int64_t i, int64_t bytes) { memcpy(box.data() + i, global, bytes); });
  for_pieces(block, map, place, [&](char* shared, uint32_t i) { memcpy(shared, box.data() + i, 16); });
}

void arrive_bytes(Block& block, uint32_t address, uint32_t bytes) {
  MBarrier& barrier = block.mbarriers.at(address);
  barrier.bytes -= bytes;
  complete(block, barrier);
}

// `land` goes on its way; `bytes` of shared memory at `destination` are undefined until it lands.
void send(Block* block, uint32_t destination, uint32_t bytes, uint32_t mbarrier, std::function<void(Block&)> land,
          const Block* source = nullptr) {
  if (!block->mbarriers.count(mbarrier)) fail("a copy on an mbarrier at %u that was not made", mbarrier);
  memset(shared_of(*block, destination, bytes), 0xff, bytes);
  block->under_way.push_back(new Copy{[=] {
    land(*block);
    arrive_bytes(*block, mbarrier, bytes);
  }, source, nullptr});
  step();
}

void send_to_global(BulkCopy copy) {
  me()->bulk.push_back(std::move(copy));
  step();
}

BulkCopy bulk_copy(const void* destination, uint32_t source, uint32_t bytes, std::function<void(const Bytes&)> write) {
  if (source % 16 || bytes % 16 || reinterpret_cast<size_t>(destination) % 16) fail("a misaligned bulk copy");
  const char* const from = shared_of(*me()->block, source, bytes);
  return {[=] { return Bytes(from, from + bytes); }, std::move(write)};
}
}  // namespace

void tma_load(uint32_t destination, const void* encoded, uint32_t mbarrier, int dimensions, const int* at) {
  const Map map = decode(encoded, dimensions, destination);
  const std::vector<int> place(at, at + dimensions);
  send(me()->block, destination, bytes_of(map), mbarrier,
       [=](Block& block) { load_box(block, map, destination, place.data()); });
}

void tma_load_for(uint32_t blocks, uint32_t destination, const void* encoded, uint32_t mbarrier, int dimensions,
                  const int* at) {
  if (!blocks || blocks >> launch->cluster) fail("a copy for the blocks %x of a cluster of %u", blocks, launch->cluster);
  for (uint32_t rank = 0; rank < launch->cluster; rank++) {
    if (!(blocks >> rank & 1)) continue;
    const Map map = decode(encoded, dimensions, destination);
    const std::vector<int> place(at, at + dimensions);
    send(&block_at(rank), destination, bytes_of(map), mbarrier,
         [=](Block& block) { load_box(block, map, destination, place.data()); });
  }
}

void tma_store(const void* encoded, uint32_t source, int dimensions, const int* at) {
  const Map map = decode(encoded, dimensions, source);
  Block* const block = me()->block;
  shared_of(*block, source, bytes_of(map));
  const std::vector<int> place(at, at + dimensions);
  const auto read = [=] {
    Bytes box(bytes_of(map));
    for_pieces(*block, map, source, [&](const char* shared, uint32_t i) { memcpy(box.data() + i, shared, 16); });
    return box;
  };
  const auto write = [=](const Bytes& box) {
    for_box(map, place.data(), [&](char* global, int64_t i, int64_t bytes) { memcpy(global, box.data() + i, bytes); });
  };
  write(Bytes(bytes_of(map), '\xff'));
  send_to_global({read, write});
}

void bulk_load(uint32_t destination, const void* source, uint32_t bytes, uint32_t mbarrier) {
  if (destination % 16 || bytes % 16 || reinterpret_cast<size_t>(source) % 16) fail("a misaligned bulk copy");
  send(me()->block, destination, bytes, mbarrier, [=](Block& block) { memcpy(block.base + destination, source, bytes); });
}

void store_there(uint32_t destination, const uint32_t* words, int count, uint32_t mbarrier) {
  Block& block = block_of(destination);
  if (&block != &block_of(mbarrier)) fail("a store to one block counts on an mbarrier of another");
  if (destination % (4 * count)) fail("a misaligned store to another block");
  const std::vector<uint32_t> held(words, words + count);
  send(&block, destination, 4 * count, mbarrier,
       [=](Block& block) { memcpy(block.base + destination, held.data(), 4 * count); });
}
void copy_there(uint32_t destination, uint32_t source, uint32_t bytes, uint32_t mbarrier) {
  Block& block = block_of(destination);
  if (&block != &block_of(mbarrier)) fail("a copy to one block counts on an mbarrier of another");
  if (destination % 16 || source % 16 || bytes % 16) fail("a misaligned bulk copy");
  const char* const from = shared_of(*me()->block, source, bytes);
  send(&block, destination, bytes, mbarrier, [=](Block& block) { memcpy(block.base + destination, from, bytes); },
       me()->block);
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

void bulk_store(void* destination, uint32_t source, uint32_t bytes) {
  const auto write = [=](const Bytes& read) { memcpy(destination, read.data(), bytes); };
  BulkCopy copy = bulk_copy(destination, source, bytes, write);
  memset(destination, 0xff, bytes);
  send_to_global(std::move(copy));
}
void bulk_add(void* destination, uint32_t source, uint32_t bytes) {
  send_to_global(bulk_copy(destination, source, bytes, [=](const Bytes& read) {
    const float* const added = reinterpret_cast<const float*>(read.data());
    for (uint32_t i = 0; i < bytes / 4; i++) static_cast<float*>(destination)[i] += added[i];
  }));
}
namespace {
void read_all(int pending) {
  if (pending) fail("a wait for all bulk groups but %d", pending);
  for (const BulkCopy& copy : me()->bulk)
    launch->writes.push_back(new Copy{[write = copy.write, read = copy.read()] { write(read); }, nullptr, me()});
  me()->bulk.clear();
}
}  // namespace
void bulk_wait_read(int pending) {
  read_all(pending);
  step();
}
void bulk_wait(int pending) {
  read_all(pending);
  for (size_t i = launch->writes.size(); i--;)
    if (launch->writes[i]->thread == me()) land(launch->writes, i);
  step();
}
}  // namespace emu
