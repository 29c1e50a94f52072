// Loads from the shared memory of other blocks of a cluster.
#pragma once
#include "ptx/base.cuh"

// `address` is one of the cluster, as `cluster_address` makes it.
__device__ __forceinline__ u32 load_cluster(u32 address) {
  u32 word;
  asm volatile("ld.shared::cluster.b32 %0, [%1];" : "=r"(word) : "r"(address) : "memory");
  return word;
}
