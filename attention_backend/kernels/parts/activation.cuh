// The activations of gated layers (Shazeer, arXiv 2002.05202).
//
// Compile-time: ACTIVATION (0: SiLU, 1: GELU by tanh, 2: GELU by erf).
#pragma once

__device__ __forceinline__ float activate(float x) {
#if ACTIVATION == 0
  return __fdividef(x, 1.f + __expf(-x));
#elif ACTIVATION == 1
  return 0.5f * x * (1.f + tanhf(0.7978845608028654f * (x + 0.044715f * x * x * x)));
#else
  return 0.5f * x * (1.f + erff(x * 0.7071067811865476f));
#endif
}
