// Programmatic dependent launch (sm_90 and up): a kernel may start while the one before it still runs.
//
// A kernel that is launched with `early=True` (attention_backend/jit/launch.py) may read, before wait_for_previous(),
// only what no kernel writes just before it, and may write nothing. Every such kernel calls wait_for_previous(): then
// "the previous kernel is complete" means for the next one that all before it are. Where the previous kernel was not early
// itself, all in front of it are complete when this one starts: then it may run beside that one (kernels/beside.py), read what
// they wrote, write what the other does not touch, and wait at its end.
#pragma once

// The next kernel may start as soon as every block has called this or has ended. What this kernel writes is seen by the
// next one after its wait_for_previous(), whenever this was called.
__device__ __forceinline__ void let_next_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Waits until the previous kernel is complete and what it wrote is visible. At once, when this kernel started after it.
__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
