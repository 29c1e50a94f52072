// Two blocks of a cluster: one copies a box by TMA to both, and each reads what the other got.
// Whatever is missing of clusters, multicast, barriers or distributed shared memory shows as a
// wrong number, or as a launch error after some seconds.
#include "ptx/barrier.cuh"
#include "ptx/base.cuh"
#include "ptx/cluster.cuh"
#include "ptx/tma.cuh"

constexpr int kRows = 16, kColumns = 32, kBlocks = 2;
constexpr int kNumbers = kRows * kColumns;

struct Args {
  TensorMap map;
  int* out;  // [kBlocks, kNumbers]
};

extern "C" __global__ void smoke(const __grid_constant__ Args a) {
  __shared__ alignas(128) int tile[kNumbers];
  __shared__ alignas(8) u64 barrier;
  u32 bar = shared_address(&barrier), rank = cluster_rank();
  if (threadIdx.x == 0) {
    mbarrier_init(bar, 1);
    mbarrier_init_fence();
    mbarrier_expect(bar, sizeof(tile));
  }
  __syncthreads();
  cluster_sync();  // both barriers expect the copy before it is made
  if (rank == 0 && threadIdx.x == 0) {
    tma_load_multicast(shared_address(tile), a.map, bar, (1 << kBlocks) - 1, 0, 0);
  }
  mbarrier_wait(bar, 0);
  cluster_sync();  // the other one has its box too
  for (u32 i = threadIdx.x; i < kNumbers; i += blockDim.x) {
    u32 other = load_cluster(cluster_address(shared_address(&tile[i]), rank ^ 1));
    a.out[rank * kNumbers + i] = tile[i] * 1000 + static_cast<int>(other);
  }
  cluster_sync();  // nobody leaves while it is read
}
