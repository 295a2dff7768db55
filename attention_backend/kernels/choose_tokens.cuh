// The next token of each row of logits: argmax_i(logit_i / temperature - log E_i), E_i ~ Exp(1), which draws i with
// probability softmax(logits / temperature)_i (the Gumbel-max trick, written with exponentials); temperature 0 is greedy.
// E_i is a hash of (the row's key, i), as models/sampling/noise.py has it, so a row's token depends on nothing else.
//
// A row is cut into gridDim.y parts; the block that comes last at the row's counter compares their winners. The counter
// wraps to zero as it counts itself. Equal scores: the lowest index wins.
//
// Compile-time: BF16 or FP32.
#include "parts/element.cuh"

// The same fields, in the same order, as attention_backend/kernels/choose_tokens.py: ChoiceParams.
struct ChoiceParams {
  const element* logits;     // [rows, vocab_size]
  const float* temperature;  // [rows]
  const int* keys;           // [rows, 2], aligned to 4 bytes: a graph's fields lie one behind the other
  uint2* winners;            // [rows, gridDim.y]
  uint32* counters;          // [rows]
  int64* tokens;             // [rows]
  uint8* finite;             // [rows]: no logit is NaN or infinite
  int64 row_stride;          // elements
  int vocab_size;
  int vectors;  // whether rows may be read 16 bytes at a time
};

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kVector = 16 / static_cast<int>(sizeof(element));
constexpr uint32 kBad = 0x80000000u;  // in an index: a logit was not finite
constexpr float kGreedy = 1e-5f;      // below it; models/sampling/parameters.py

struct Best {
  float score;
  uint32 index;  // with kBad

  __device__ __forceinline__ void take(const Best& other) {
    const uint32 bad = (index | other.index) & kBad, mine = index & ~kBad, theirs = other.index & ~kBad;
    const bool better = other.score > score || (other.score == score && theirs < mine);
    score = better ? other.score : score;
    index = (better ? theirs : mine) | bad;
  }
  __device__ __forceinline__ void look_at(float value, uint32 at) {
    if (value > score) score = value, index = at | (index & kBad);
  }
};

// murmur3's finaliser
__device__ __forceinline__ uint32 mix(uint32 x) {
  x = (x ^ (x >> 16)) * 0x85ebca6bu;
  x = (x ^ (x >> 13)) * 0xc2b2ae35u;
  return x ^ (x >> 16);
}

__device__ __forceinline__ float log_exponential(uint32 index, int2 key) {
  uint32 bits = mix((index * 0x9e3779b1u) ^ static_cast<uint32>(key.x));
  bits = mix(bits ^ static_cast<uint32>(key.y));
  const float whole = __int2float_rn(static_cast<int>(bits & 0x7fffffffu));
  const float uniform = fminf(__fmul_rn(__fadd_rn(whole, 0.5f), 0x1p-31f), 1.f - 0x1p-24f);
  return logf(-log1pf(-uniform));
}

template <bool GREEDY>
struct Part {
  Best best{-kInfinity, 0x7fffffffu};
  const float temperature;
  const int2 key;

  __device__ __forceinline__ Part(float t, int2 k) : temperature(t), key(k) {}
  __device__ __forceinline__ void look_at(float logit, uint32 index) {
    if (!(fabsf(logit) < kInfinity)) best.index |= kBad;
    best.look_at(GREEDY ? logit : __fsub_rn(__fdiv_rn(logit, temperature), log_exponential(index, key)), index);
  }
};

union Load {
  uint4 bits;
  element values[kVector];
};

template <bool GREEDY>
__device__ __forceinline__ Best best_of_part(const ChoiceParams& p, int row) {
  Part<GREEDY> part(p.temperature[row], make_int2(p.keys[2 * row], p.keys[2 * row + 1]));
  const element* const logits = p.logits + row * p.row_stride;
  int first = 0;
  if (p.vectors) {
    const int count = p.vocab_size / kVector;
    for (int i = blockIdx.y * kThreads + threadIdx.x; i < count; i += gridDim.y * kThreads) {
      Load load;
      load.bits = reinterpret_cast<const uint4*>(logits)[i];
#pragma unroll
      for (int j = 0; j < kVector; j++) part.look_at(to_float(load.values[j]), i * kVector + j);
    }
    first = count * kVector;
  }
  for (int i = first + blockIdx.y * kThreads + threadIdx.x; i < p.vocab_size; i += gridDim.y * kThreads)
    part.look_at(to_float(logits[i]), i);
  return part.best;
}

__device__ __forceinline__ Best best_of_warp(Best best) {
#pragma unroll
  for (int lane = 16; lane > 0; lane /= 2)
    best.take({__shfl_xor_sync(~0u, best.score, lane), __shfl_xor_sync(~0u, best.index, lane)});
  return best;
}

// In thread 0.
__device__ __forceinline__ Best best_of_block(Best best, Best* shared) {
  best = best_of_warp(best);
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = best;
  __syncthreads();
  if (threadIdx.x == 0)
#pragma unroll
    for (int warp = 1; warp < kWarps; warp++) best.take(shared[warp]);
  return best;
}

extern "C" __global__ void __launch_bounds__(kThreads) choose_tokens(const ChoiceParams p) {
  __shared__ Best shared[kWarps];
  __shared__ bool last;
  const int row = blockIdx.x;
  Best best = p.temperature[row] < kGreedy ? best_of_part<true>(p, row) : best_of_part<false>(p, row);
  best = best_of_block(best, shared);
  uint2* const winners = p.winners + static_cast<int64>(row) * gridDim.y;
  if (threadIdx.x == 0) {
    winners[blockIdx.y] = make_uint2(__float_as_uint(best.score), best.index);
    __threadfence();
    last = atomicInc(p.counters + row, gridDim.y - 1) == gridDim.y - 1;
    __threadfence();
  }
  __syncthreads();
  if (!last || threadIdx.x >= 32) return;
  Best winner{-kInfinity, 0x7fffffffu};
  for (int i = threadIdx.x; i < gridDim.y; i += 32) {
    const uint2 other = __ldcg(winners + i);
    winner.take({__uint_as_float(other.x), other.y});
  }
  winner = best_of_warp(winner);
  if (threadIdx.x == 0) {
    const uint32 index = winner.index & ~kBad;
    p.tokens[row] = index < static_cast<uint32>(p.vocab_size) ? index : 0;  // all NaN: nobody uses it
    p.finite[row] = (winner.index & kBad) == 0;
  }
}
