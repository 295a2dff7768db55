// What happens to a score besides the interval of visible keys: softcap, ALiBi, an additive bias, a key mask.
#pragma once

#include "parts/element.cuh"
#include "parts/seqlen.cuh"

#define SCORE_CHANGES (SOFTCAP || ALIBI || BIAS)

constexpr float kLowestScore = -2e38f;

// The same fields, in the same order, as attention_backend/kernels/params.py: ScoreParams.
struct ScoreParams {
  const uint8* key_mask;  // [batch, seqlen_k], 1 = visible
  const void* bias;
  const float* alibi_slopes;
  int64 key_mask_batch;
  int64 bias_batch, bias_head, bias_row;
  int64 alibi_batch;
  float softmax_scale;
  float softcap;
  float cap_log2;     // 2 log2(e) softmax_scale / softcap, or the largest number
  float per_softcap;  // 1 / softcap, or the largest number
};

struct Score {
  float scale_log2;  // turns a score, as operator() leaves it, into an exponent of two
#if KEY_MASK
  const uint8* key_mask;
  __device__ __forceinline__ bool key_visible(int key) const { return key_mask[key]; }
#endif
#if SCORE_CHANGES
  float softmax_scale, softcap, cap_log2, per_softcap, slope;
  const void* bias;
  int64 bias_row;
#endif

  __device__ __forceinline__ Score(const ScoreParams& p, int batch, int head) {
    scale_log2 = SCORE_CHANGES ? kLog2e : p.softmax_scale * kLog2e;
#if KEY_MASK
    key_mask = p.key_mask + batch * p.key_mask_batch;
#endif
#if SCORE_CHANGES
    softmax_scale = p.softmax_scale;
    softcap = p.softcap;
    cap_log2 = p.cap_log2;
    per_softcap = p.per_softcap;
    slope = ALIBI ? p.alibi_slopes[batch * p.alibi_batch + head] : 0.f;
    const int64 offset = batch * p.bias_batch + head * p.bias_head;
    bias = BIAS == 1 ? static_cast<const void*>(static_cast<const float*>(p.bias) + offset)
                     : static_cast<const void*>(static_cast<const element*>(p.bias) + offset);
    bias_row = p.bias_row;
#endif
  }

  // A term is 2^exponent(score, shift), with as shift the level of the row's largest score, or so. Where a bias may be huge,
  // the difference is taken first: rounding a product of that size would be an error of any size.
#if SCORE_CHANGES
  __device__ __forceinline__ float level(float m) const { return m; }
  __device__ __forceinline__ float above(float level, float other) const { return (level - other) * scale_log2; }
  __device__ __forceinline__ float log2_of(float level) const { return level * scale_log2; }
  __device__ __forceinline__ float exponent(float s, float shift) const { return (s - shift) * scale_log2; }
#else
  __device__ __forceinline__ float level(float m) const { return m * scale_log2; }
  __device__ __forceinline__ float above(float level, float other) const { return level - other; }
  __device__ __forceinline__ float log2_of(float level) const { return level; }
  __device__ __forceinline__ float exponent(float s, float shift) const { return fmaf(s, scale_log2, -shift); }
#endif
  __device__ __forceinline__ float shift(float m) const { return m == -kInfinity ? 0.f : level(m); }

#if SCORE_CHANGES
  // From a product of q and k to a score, in two steps: the scale and the cap; then what is added.
  __device__ __forceinline__ float operator()(float s, int row, int key, const Sequence& seq) const {
    return biased(capped(s), row, key, seq);
  }

  __device__ __forceinline__ float capped(float s) const {
#if SOFTCAP && FP32
    return softcap * tanhf(s * softmax_scale / softcap);
#elif SOFTCAP
    // tanh by exp2: the hardware's tanh.approx is off by 2^-11, which softcap multiplies.
    return fmaf(-2.f * softcap, reciprocal_approx(1.f + exp2_approx(s * cap_log2)), softcap);
#else
    return s * softmax_scale;
#endif
  }

  __device__ __forceinline__ float biased(float s, int row, int key, const Sequence& seq) const {
#if ALIBI
    s -= slope * fabsf(static_cast<float>(row + seq.q_offset - key));
#endif
#if BIAS
    if (row < seq.seqlen_q && key < seq.stop) {
      const int64 at = row * bias_row + key;
      s += BIAS == 1 ? static_cast<const float*>(bias)[at] : to_float(static_cast<const element*>(bias)[at]);
      // "Hidden" is often written as the lowest float, which times log2(e) would overflow; -inf stays what it is.
      if (s < kLowestScore && s != -kInfinity) s = kLowestScore;
    }
#endif
    return s;
  }
#endif
};
