// A value that all lanes hold, as the compiler knows then.
#pragma once

// Loops over it, barriers and descriptors live in uniform registers. Without, each wgmma waits for its descriptors to be
// copied there.
__device__ __forceinline__ int uniform(int x) { return __shfl_sync(~0u, x, 0); }
