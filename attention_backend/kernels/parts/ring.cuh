// Stages of shared memory that are filled and emptied in turn.
//
// Compile-time: STAGES.
#pragma once

// Where the n-th tile of a block is, and what its barriers look like then.
struct Ring {
  int stage = 0;
  uint32 parity = 0;
  __device__ __forceinline__ void step() {
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
};
