// mbarriers, and clusters of blocks that share them.
#pragma once
#include "ptx/base.cuh"

__device__ __forceinline__ void mbarrier_init(u32 bar, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}

// Makes initialised barriers visible to the copy engine and to the other blocks of the cluster.
__device__ __forceinline__ void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_expect(u32 bar, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void mbarrier_arrive(u32 bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}

// `bar` is an address of the cluster, as `cluster_address` makes it. Without .release.cluster,
// which costs a fence of all memory (MEMBAR.ALL.GPU, 1.3 x the time of a whole GEMM): it orders no
// write of this thread, so it may only tell that reads are over.
__device__ __forceinline__ void mbarrier_arrive_remote(u32 bar) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(bar) : "memory");
}

// A wrong count ends in a launch error after some seconds, not in a hang. The loop is PTX on
// purpose: written in C++ it makes ptxas serialise wgmma (C7512).
__device__ __forceinline__ void mbarrier_wait(u32 bar, u32 parity) {
  asm volatile(
      "{.reg .pred done, late;\n"
      ".reg .u32 spin;\n"
      "mov.u32 spin, 0;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra ready;\n"
      "add.u32 spin, spin, 1;\n"
      "setp.gt.u32 late, spin, 4000000;\n"
      "@late trap;\n"
      "bra again;\n"
      "ready:}" ::"r"(bar),
      "r"(parity)
      : "memory");
}

// What this thread wrote to shared memory is there for wgmma of whoever passes a barrier after it.
__device__ __forceinline__ void async_proxy_fence() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ u32 cluster_rank() {
  u32 rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// This block's shared address, as the same place in block `rank` of the cluster.
__device__ __forceinline__ u32 cluster_address(u32 address, u32 rank) {
  u32 remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
  return remote;
}

__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::
                   : "memory");
}

// The same where no memory has to be seen by the others: it costs no fence.
__device__ __forceinline__ void cluster_sync_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.aligned;" ::
                   : "memory");
}

// The same in two: what lies between them is done while the others arrive.
__device__ __forceinline__ void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// To the shared memory of another block, counted as 16 bytes of a barrier of that block; both are
// addresses of the cluster.
__device__ __forceinline__ void store_async_x4(u32 address, u32 bar, u32 a, u32 b, u32 c, u32 d) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%2, %3, %4, %5}, "
      "[%1];" ::"r"(address),
      "r"(bar), "r"(a), "r"(b), "r"(c), "r"(d)
      : "memory");
}
