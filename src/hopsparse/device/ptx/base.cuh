// Integer names, shared-memory addresses and the votes that pick a thread. NVRTC brings no headers.
#pragma once

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

__device__ __forceinline__ u32 shared_address(const void* p) {
  return static_cast<u32>(__cvta_generic_to_shared(p));
}

// The same value in every lane, told to the compiler: it then keeps it in uniform registers.
__device__ __forceinline__ u32 uniform(u32 value) { return __shfl_sync(0xFFFFFFFF, value, 0); }

__device__ __forceinline__ bool elect_one() {
  u32 chosen;
  asm volatile(
      "{.reg .pred p;\n"
      "elect.sync _|p, 0xFFFFFFFF;\n"
      "selp.u32 %0, 1, 0, p;}"
      : "=r"(chosen));
  return chosen != 0;
}

// One of 16 barriers of the block; 0 is __syncthreads.
template <int Threads>
__device__ __forceinline__ void named_barrier(u32 id) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(Threads) : "memory");
}

template <int Registers>
__device__ __forceinline__ void keep_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Registers));
}
template <int Registers>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Registers));
}
