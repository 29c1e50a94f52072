// Loads from the shared memory of other blocks of a cluster.
#pragma once
#include "ptx/base.cuh"

// `address` is one of the cluster, as `cluster_address` makes it.
__device__ __forceinline__ u32 load_cluster(u32 address) {
  u32 word;
  asm volatile("ld.shared::cluster.b32 %0, [%1];" : "=r"(word) : "r"(address) : "memory");
  return word;
}

// The same place in the shared memory of block `rank`, as a pointer that loads go through.
template <class T>
__device__ __forceinline__ const T* cluster_pointer(const T* place, u32 rank) {
  u64 remote;
  asm("mapa.u64 %0, %1, %2;" : "=l"(remote) : "l"(place), "r"(rank));
  return reinterpret_cast<const T*>(remote);
}
