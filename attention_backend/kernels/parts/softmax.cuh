// The end of a row's running softmax: what its unnormalised output is multiplied by, and its log-sum-exp.
#pragma once

#include "parts/element.cuh"

struct RowEnd {
  float factor;
  float lse;  // log2
};

// `top` is log2 of the row's level (-inf if it sees nothing), `sum` the sum of its terms over 2^top. A sink, a
// logit that joins the denominator only, may be far larger than any score: the larger of both is what is taken out.
// Where all scores are NaN there is no level, as where there are none: such rows are NaN, not empty.
__device__ __forceinline__ RowEnd end_row(float top, float sum, const float* sink) {
  if (top == -kInfinity && !isnan(sum)) return {0.f, -kInfinity};
  float weight = 1.f;
  if (sink) {
    const float sink_log2 = *sink * kLog2e, all = fmaxf(top, sink_log2);
    weight = exp2_approx(top - all);
    sum = sum * weight + exp2_approx(sink_log2 - all);
    top = all;
  }
  return {weight * reciprocal_approx(sum), top + log2_approx(sum)};
}
