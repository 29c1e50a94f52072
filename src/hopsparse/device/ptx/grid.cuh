// The kernels before and behind this one on its stream, where a launch may start before the one
// ahead has ended (programmatic dependent launch). Launched otherwise, both statements do nothing.
#pragma once

// Lets the kernel behind start as soon as there is room for its blocks. That one waits for this one
// whatever it wants to read of it.
__device__ __forceinline__ void let_next_start() {
  asm volatile("griddepcontrol.launch_dependents;");
}

// From here on all that earlier kernels wrote is there, and they read no more. Some thread of every
// block must come by: a kernel that ends without waiting lets the one behind it pass two.
__device__ __forceinline__ void wait_for_previous() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}
