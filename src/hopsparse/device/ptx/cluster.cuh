// Loads from the shared memory of other blocks of a cluster.
#pragma once
#include "ptx/base.cuh"

// `address` is one of the cluster, as `cluster_address` makes it.
__device__ __forceinline__ u32 load_cluster(u32 address) {
  u32 word;
  asm volatile("ld.shared::cluster.b32 %0, [%1];" : "=r"(word) : "r"(address) : "memory");
  return word;
}
__device__ __forceinline__ uint4 load_cluster_x4(u32 address) {
  uint4 words;
  asm volatile("ld.shared::cluster.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
               : "r"(address)
               : "memory");
  return words;
}
