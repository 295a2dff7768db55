// Merges softmax states of the same query rows, each over other keys, into one:
//   out = sum_s e^(lse_s - lse) out_s,   lse = log(sum_s e^lse_s + e^sink)
// The states come in sets: partial results of one split pass in float32, or single results in the element type.
//
// kLanes lanes serve one (row, head), kVector elements each. A state of weight zero is not read: its output may be NaN.
//
// Compile-time: BF16 or FP32, HEAD_DIM (32, 64, 128 or 256; head_dim is a multiple of 8 up to it).
#include "parts/element.cuh"

constexpr int kMaxSets = 8;

// The same fields, in the same order, as attention_backend/kernels/flash_merge.py: StateSet. Strides are in elements;
// a row is (row / seqlen, row % seqlen), as the log-sum-exps [batch, heads, seqlen] or [heads, rows] are laid out.
struct StateSet {
  const void* out;
  const float* lse;  // natural log
  int64 out_state, out_batch, out_row, out_head;
  int64 lse_state, lse_batch, lse_row, lse_head;
  int count;
  int seqlen;
  int in_float;  // float32 outputs, whatever the element type
  int reserved;
};

// The same fields, in the same order, as attention_backend/kernels/flash_merge.py: MergeParams.
struct MergeParams {
  StateSet sets[kMaxSets];
  const float* sinks;  // [num_heads] or null
  element* out;
  float* lse;
  int64 out_batch, out_row, out_head;
  int64 lse_batch, lse_row, lse_head;
  int64 num_pairs;  // rows * num_heads
  int num_sets, seqlen, num_heads, head_dim;
};

constexpr int kThreads = 128;
constexpr int kVector = 8;
constexpr int kLanes = HEAD_DIM / kVector;
constexpr int kInFlight = 4;  // states of a lane under way together

template <class From>
struct Vector;

template <>
struct Vector<float> {
  float4 lo, hi;
  __device__ __forceinline__ void zero() { lo = hi = make_float4(0.f, 0.f, 0.f, 0.f); }
  __device__ __forceinline__ void read(const float* from) {
    lo = reinterpret_cast<const float4*>(from)[0];
    hi = reinterpret_cast<const float4*>(from)[1];
  }
  __device__ __forceinline__ void add_to(float (&acc)[kVector], float weight) const {
    acc[0] += weight * lo.x, acc[1] += weight * lo.y, acc[2] += weight * lo.z, acc[3] += weight * lo.w;
    acc[4] += weight * hi.x, acc[5] += weight * hi.y, acc[6] += weight * hi.z, acc[7] += weight * hi.w;
  }
};

#if !FP32
template <>
struct Vector<element> {
  uint4 bits;
  __device__ __forceinline__ void zero() { bits = make_uint4(0, 0, 0, 0); }
  __device__ __forceinline__ void read(const element* from) { bits = *reinterpret_cast<const uint4*>(from); }
  __device__ __forceinline__ void add_to(float (&acc)[kVector], float weight) const {
    const uint32 words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
#if BF16
      acc[2 * i] += weight * __uint_as_float(words[i] << 16);
      acc[2 * i + 1] += weight * __uint_as_float(words[i] & 0xffff0000u);
#else
      const float2 pair = __half22float2(*reinterpret_cast<const __half2*>(&words[i]));
      acc[2 * i] += weight * pair.x, acc[2 * i + 1] += weight * pair.y;
#endif
    }
  }
};
#endif

// Adds a set's states to `acc` and their weights over e^top to `sum`. `lse` and `out` are those of the set's first state.
template <class From>
__device__ __forceinline__ void add_states(float (&acc)[kVector], float& sum, const float* lse, int64 lse_state,
                                           const From* out, int64 out_state, int count, float top, bool inside) {
  for (int first = 0; first < count; first += kInFlight) {
    float weight[kInFlight];
    Vector<From> x[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; i++)
      weight[i] = first + i < count ? exp2_approx((lse[(first + i) * lse_state] - top) * kLog2e) : 0.f;
#pragma unroll
    for (int i = 0; i < kInFlight; i++) {
      x[i].zero();
      if (inside && weight[i] != 0.f) x[i].read(out + (first + i) * out_state);
    }
#pragma unroll
    for (int i = 0; i < kInFlight; i++) {
      sum += weight[i];
      x[i].add_to(acc, weight[i]);
    }
  }
}

__device__ __forceinline__ void write(element* to, const float (&acc)[kVector], float factor) {
#if FP32
  reinterpret_cast<float4*>(to)[0] = make_float4(acc[0] * factor, acc[1] * factor, acc[2] * factor, acc[3] * factor);
  reinterpret_cast<float4*>(to)[1] = make_float4(acc[4] * factor, acc[5] * factor, acc[6] * factor, acc[7] * factor);
#else
  *reinterpret_cast<uint4*>(to) =
      make_uint4(pack2(acc[0] * factor, acc[1] * factor), pack2(acc[2] * factor, acc[3] * factor),
                 pack2(acc[4] * factor, acc[5] * factor), pack2(acc[6] * factor, acc[7] * factor));
#endif
}

extern "C" __global__ void __launch_bounds__(kThreads, 8) flash_merge(const __grid_constant__ MergeParams p) {
  const int lane = threadIdx.x % kLanes, column = lane * kVector;
  const int64 wanted = static_cast<int64>(blockIdx.x) * (kThreads / kLanes) + threadIdx.x / kLanes;
  // Lanes past the end repeat the last pair up to the shuffles, which take whole warps.
  const bool exists = wanted < p.num_pairs;
  const int64 pair = exists ? wanted : p.num_pairs - 1;
  const int row = static_cast<int>(pair / p.num_heads), head = static_cast<int>(pair % p.num_heads);

  float top = -kInfinity;
  int most = 0;  // states of a set, up to the last that has seen something: often there is room for more parts than there are
  for (int i = 0; i < p.num_sets; i++) {
    const StateSet& set = p.sets[i];
    const float* lse = set.lse + row / set.seqlen * set.lse_batch + row % set.seqlen * set.lse_row + head * set.lse_head;
    for (int s = lane; s < set.count; s += kLanes) {
      const float x = lse[s * set.lse_state];
      top = fmaxf(top, x);
      if (x != -kInfinity) most = max(most, s + 1);
    }
  }
#pragma unroll
  for (int d = kLanes / 2; d; d /= 2) {
    top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
    most = max(most, __shfl_xor_sync(~0u, most, d));
  }
  if (!exists) return;

  const int batch = row / p.seqlen, query = row % p.seqlen;
  element* const out = p.out + batch * p.out_batch + query * p.out_row + head * p.out_head + column;
  float* const lse_out = p.lse + batch * p.lse_batch + query * p.lse_row + head * p.lse_head;
  const bool inside = column < p.head_dim;
  float acc[kVector] = {};
  float factor = 0.f, lse_all = -kInfinity;
  if (most > 0) {  // else the row has seen nothing, and a sink does not change that; NaN is not nothing
    float sum = 0.f;
    for (int i = 0; i < p.num_sets; i++) {
      const StateSet& set = p.sets[i];
      const int b = row / set.seqlen, r = row % set.seqlen;
      const float* lse = set.lse + b * set.lse_batch + r * set.lse_row + head * set.lse_head;
      const int64 from = b * set.out_batch + r * set.out_row + head * set.out_head + column;
      const int count = min(set.count, most);
#if !FP32
      if (!set.in_float) {
        add_states(acc, sum, lse, set.lse_state, static_cast<const element*>(set.out) + from, set.out_state, count, top,
                   inside);
        continue;
      }
#endif
      add_states(acc, sum, lse, set.lse_state, static_cast<const float*>(set.out) + from, set.out_state, count, top,
                 inside);
    }
    // A sink may be far larger than any score: the larger of both is what is taken out.
    const float sink = p.sinks ? p.sinks[head] : -kInfinity;
    const float all = fmaxf(top, sink), weight = exp2_approx((top - all) * kLog2e);
    const float total = sum * weight + exp2_approx((sink - all) * kLog2e);
    factor = weight / total;
    lse_all = all + log2f(total) * kLn2;
  }
  if (inside) write(out, acc, factor);
  if (lane == 0) *lse_out = lse_all;
}
