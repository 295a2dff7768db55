// Matrix instructions of warps (PTX ISA 9.7.14) and of warpgroups (9.7.15), by the layouts that the PTX ISA draws.
#include "state.h"

namespace emu {
namespace {
float value(Kind kind, const void* p) {
  if (kind == kE4m3) return from_e4m3(*static_cast<const uint8_t*>(p));
  uint16_t x;
  memcpy(&x, p, 2);
  return kind == kHalf ? from_half(x) : from_bf16(x);
}

struct Matrices {
  uint32_t address;
  uint32_t x[4];
  bool transposed;
};
struct Mma {
  Kind kind;
  int k;
  float* const* c;
  const uint32_t *a, *b;
};
uint16_t element(const uint16_t (*rows)[8], int lane, int half, bool transposed) {
  return transposed ? rows[lane % 4 * 2 + half][lane / 4] : rows[lane / 4][lane % 4 * 2 + half];
}
}  // namespace

void load_matrices(uint32_t* const (&out)[4], uint32_t address, bool transposed) {
  Matrices mine{address, {}, transposed};
  shared_pointer(address, 16);
  meet(~0u, transposed ? "ldmatrix.trans" : "ldmatrix", &mine, [](void** lanes, unsigned) {
    for (int m = 0; m < 4; m++) {
      uint16_t rows[8][8];
      for (int r = 0; r < 8; r++)
        memcpy(rows[r], me()->block->base + static_cast<Matrices*>(lanes[8 * m + r])->address, 16);
      for (int lane = 0; lane < 32; lane++) {
        Matrices& to = *static_cast<Matrices*>(lanes[lane]);
        const uint32_t low = element(rows, lane, 0, to.transposed), high = element(rows, lane, 1, to.transposed);
        to.x[m] = low | high << 16;
      }
    }
  });
  for (int m = 0; m < 4; m++) *out[m] = mine.x[m];
}

void store_matrices(uint32_t address, const uint32_t (&x)[4]) {
  Matrices mine{address, {x[0], x[1], x[2], x[3]}, false};
  shared_pointer(address, 16);
  meet(~0u, "stmatrix", &mine, [](void** lanes, unsigned) {
    for (int m = 0; m < 4; m++)
      for (int lane = 0; lane < 32; lane++)
        memcpy(me()->block->base + static_cast<Matrices*>(lanes[8 * m + lane / 4])->address + lane % 4 * 4,
               &static_cast<Matrices*>(lanes[lane])->x[m], 4);
  });
}

uint32_t transpose_matrix(uint32_t x) {
  Matrices mine{0, {x}, true};
  meet(~0u, "movmatrix", &mine, [](void** lanes, unsigned) {
    uint16_t rows[8][8];
    for (int lane = 0; lane < 32; lane++)
      memcpy(&rows[lane / 4][lane % 4 * 2], &static_cast<Matrices*>(lanes[lane])->x[0], 4);
    for (int lane = 0; lane < 32; lane++)
      static_cast<Matrices*>(lanes[lane])->x[1] =
          element(rows, lane, 0, true) | static_cast<uint32_t>(element(rows, lane, 1, true)) << 16;
  });
  return mine.x[1];
}

void mma(Kind kind, int k, float* const (&c)[4], const uint32_t* a, const uint32_t* b) {
  Mma mine{kind, k, c, a, b};
  meet(~0u, "mma", &mine, [](void** lanes, unsigned) {
    const Mma& first = *static_cast<Mma*>(lanes[0]);
    const int k = first.k;
    float x[16][16], y[16][8];
    double sums[16][8] = {};
    for (int lane = 0; lane < 32; lane++) {
      const Mma& of = *static_cast<Mma*>(lanes[lane]);
      const int g = lane / 4, t = lane % 4 * 2;
      for (int half = 0; half < 2; half++) {
        const auto at = [half](const uint32_t* p) { return reinterpret_cast<const char*>(p) + 2 * half; };
        for (int i = 0; i < k / 8; i++) {
          x[g][8 * i + t + half] = value(of.kind, at(of.a + 2 * i));
          x[g + 8][8 * i + t + half] = value(of.kind, at(of.a + 2 * i + 1));
          y[8 * i + t + half][g] = value(of.kind, at(of.b + i));
        }
      }
    }
    for (int row = 0; row < 16; row++)
      for (int j = 0; j < k; j++)
        for (int column = 0; column < 8; column++) sums[row][column] += static_cast<double>(x[row][j]) * y[j][column];
    for (int lane = 0; lane < 32; lane++)
      for (int i = 0; i < 4; i++) {
        float& sum = *static_cast<Mma*>(lanes[lane])->c[i];
        sum = static_cast<float>(sum + sums[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2]);
      }
  });
}

namespace {
void meet_group(const char* what, const void* mine, void (*finish)(WarpGroup& group)) {
  Fiber& fiber = *me();
  const size_t thread = &fiber - fiber.block->fibers.data(), at = thread / 128, index = thread % 128;
  WarpGroup& group = fiber.block->groups[at];
  if (group.arrived && group.what != what) fail("a warpgroup's threads meet in %s and in %s", group.what, what);
  group.what = what, group.mine[index] = mine;
  if (++group.arrived < 128) {
    group.waiting.push_back(&fiber);
    return wait(what);
  }
  group.arrived = 0;
  finish(group);
  wake_all(group.waiting);
}

// The address of element (r, k) of an operand in shared memory.
struct Operand {
  uint32_t start, leading, stride, pitch, mask;
  bool transposed;
  Operand(uint64_t descriptor, bool transposed) : transposed(transposed) {
    const auto bytes = [descriptor](int from) { return static_cast<uint32_t>(descriptor >> from & 0x3fff) << 4; };
    start = bytes(0), leading = bytes(16), stride = bytes(32);
    const int mode = descriptor >> 62;
    if (!mode) fail("a wgmma operand without a swizzle");
    pitch = 256 >> mode, mask = 0x70 & ((pitch - 1) & ~15u);
    if (transposed && mode != 1) fail("a transposed operand in a narrow swizzle");
  }
  uint32_t at(int r, int k, int bytes) const {
    const uint32_t linear = transposed ? start + r / 64 * leading + k / 8 * stride + k % 8 * 128 + r % 64 * bytes
                                       : start + r / 8 * stride + r % 8 * pitch + k * bytes;
    return linear ^ (linear >> 3 & mask);
  }
};

void multiply(Block& block, const Product& product, std::vector<float>& sums) {
  const Wgmma& op = product.operation;
  const int bytes = op.kind == kE4m3 ? 1 : 2, depth = 32 / bytes, n = op.n;
  static float a[64][32], b[32][256], c[64][256];
  if (op.a) {
    const int together = 4 / bytes;
    for (int t = 0; t < 128; t++)
      for (int i = 0; i < 4; i++)
        for (int j = 0; j < together; j++)
          a[t / 32 * 16 + t % 32 / 4 + i % 2 * 8][i / 2 * depth / 2 + t % 4 * together + j] =
              value(op.kind, reinterpret_cast<const char*>(&product.a[4 * t + i]) + j * bytes);
  } else {
    const Operand from(op.descriptor_a, op.transposed_a);
    for (int m = 0; m < 64; m++)
      for (int k = 0; k < depth; k++) a[m][k] = value(op.kind, shared_of(block, from.at(m, k, bytes), bytes));
  }
  const Operand from(op.descriptor_b, op.transposed_b);
  for (int i = 0; i < n; i++)
    for (int k = 0; k < depth; k++) b[k][i] = value(op.kind, shared_of(block, from.at(i, k, bytes), bytes));
  memset(c, 0, sizeof c);
  for (int m = 0; m < 64; m++)
    for (int k = 0; k < depth; k++)
      for (int i = 0; i < n; i++) c[m][i] += a[m][k] * b[k][i];
  for (int t = 0; t < 128; t++)
    for (int i = 0; i < n / 2; i++) {
      float& sum = sums[t * (n / 2) + i];
      const float added = c[t / 32 * 16 + t % 32 / 4 + i / 2 % 2 * 8][i / 4 * 8 + t % 4 * 2 + i % 2];
      sum = op.accumulate ? sum + added : added;
    }
}
}  // namespace

void wgmma(const Wgmma& operation) {
  meet_group("wgmma", &operation, [](WarpGroup& group) {
    Product product;
    product.operation = *static_cast<const Wgmma*>(group.mine[0]);
    const int registers = product.operation.n / 2;
    product.registers.reserve(128 * registers);
    for (const void* mine : group.mine) {
      const Wgmma& of = *static_cast<const Wgmma*>(mine);
      if (of.n != 2 * registers || of.descriptor_b != product.operation.descriptor_b ||
          of.descriptor_a != product.operation.descriptor_a || of.accumulate != product.operation.accumulate)
        fail("a warpgroup's threads want different products");
      product.registers.insert(product.registers.end(), of.d, of.d + registers);
      if (of.a) product.a.insert(product.a.end(), of.a, of.a + 4);
    }
    std::vector<float>& sums = group.sums[product.key()];
    if (sums.empty()) {  // from now on accumulators may not be touched
      for (float* p : product.registers) sums.push_back(*p), *p = NAN;
    } else if (sums.size() != 128u * registers) {
      fail("products of two sizes into the same accumulators");
    }
    group.open.push_back(std::move(product));
  });
}

void wgmma_commit() {
  meet_group("wgmma.commit_group", nullptr, [](WarpGroup& group) {
    group.groups.emplace_back();
    group.groups.back().swap(group.open);
  });
}

namespace {
bool under_way(const WarpGroup& group, float* key) {
  for (const std::vector<Product>& products : group.groups)
    for (const Product& product : products)
      if (product.key() == key) return true;
  for (const Product& product : group.open)
    if (product.key() == key) return true;
  return false;
}
}  // namespace

void wgmma_wait(int pending) {
  static const char* const names[] = {"wgmma.wait_group 0", "wgmma.wait_group 1", "wgmma.wait_group 2",
                                      "wgmma.wait_group 3"};
  static int wanted;
  if (pending > 3) fail("a wait for all products but %d groups", pending);
  wanted = pending;
  const auto finish = [](WarpGroup& group) {
    std::vector<Product> finished;
    while (group.groups.size() > static_cast<size_t>(wanted)) {
      for (Product& product : group.groups.front()) {
        multiply(*me()->block, product, group.sums[product.key()]);
        finished.push_back(std::move(product));
      }
      group.groups.pop_front();
    }
    for (const Product& product : finished) {
      const auto sums = group.sums.find(product.key());
      if (sums == group.sums.end() || under_way(group, product.key())) continue;
      size_t i = 0;
      for (float* p : product.registers) *p = sums->second[i++];
      group.sums.erase(sums);
    }
  };
  meet_group(names[pending], nullptr, finish);
}
}  // namespace emu
