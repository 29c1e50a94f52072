// Small kernels that show, exactly, whether a launch did what it was asked for.
//
// Appended to this text: entries `move_<bytes>` that call `move`, one a width of box.

using u8 = unsigned char;
using u32 = unsigned int;
using u64 = unsigned long long;

struct alignas(64) TensorMap {
  u64 words[16];
};

__device__ __forceinline__ u32 shared_address(const void* p) {
  return static_cast<u32>(__cvta_generic_to_shared(p));
}

// ---- adds a number: streams, graphs, threads ----------------------------------------------------

struct AddArgs {
  int* data;
  int count;
  int number;
};

extern "C" __global__ void add(const __grid_constant__ AddArgs a) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < a.count) a.data[i] += a.number;
}

// ---- reverses numbers through all of the shared memory it was given -----------------------------

struct ReverseArgs {
  u32* out;
  u32 count;
};

extern "C" __global__ void reverse(const __grid_constant__ ReverseArgs a) {
  extern __shared__ u32 words[];
  for (u32 i = threadIdx.x; i < a.count; i += blockDim.x) words[i] = i * 3 + 1;
  __syncthreads();
  for (u32 i = threadIdx.x; i < a.count; i += blockDim.x) a.out[i] = words[a.count - 1 - i];
}

// ---- tells each block's place in its cluster ----------------------------------------------------

struct RankArgs {
  u32* out;
};

extern "C" __global__ void rank(const __grid_constant__ RankArgs a) {
  u32 place, size;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(place));
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  if (threadIdx.x == 0) a.out[blockIdx.y * gridDim.x + blockIdx.x] = size * 256 + place;
}

// ---- one of a chain in which each may start before the one ahead has ended ----------------------

struct RelayArgs {
  const volatile int* from;
  volatile int* to;
};

extern "C" __global__ void relay(const __grid_constant__ RelayArgs a) {
  asm volatile("griddepcontrol.launch_dependents;");
  asm volatile("griddepcontrol.wait;" ::: "memory");
  __nanosleep(20000);  // whoever does not wait reads what was there before
  a.to[threadIdx.x] = a.from[threadIdx.x] + 1;
}

// ---- moves one box of a matrix by TMA, in and out, and shows how it lay in shared memory
// ---------

struct MoveArgs {
  TensorMap from;
  TensorMap to;
  u8* seen;
  int box_columns;
};

template <int kRows, int kRowBytes>
__device__ void move(const MoveArgs& a) {
  constexpr u32 kBytes = kRows * kRowBytes;
  __shared__ alignas(1024) u8 tile[kBytes];
  __shared__ alignas(8) u64 barrier;
  u32 address = shared_address(tile), bar = shared_address(&barrier);
  int column = blockIdx.x * a.box_columns, row = blockIdx.y * kRows;
  for (u32 i = threadIdx.x; i < kBytes; i += blockDim.x) tile[i] = 0xA5;
  if (threadIdx.x == 0) asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(bar));
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(kBytes)
                 : "memory");
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%2, %3}], [%4];" ::"r"(address),
        "l"(&a.from), "r"(column), "r"(row), "r"(bar)
        : "memory");
  }
  // A box that never arrives ends in a launch error, not in a hang.
  u32 done = 0;
  for (u32 spin = 0; !done; ++spin) {
    if (spin > 1000000) __trap();
    asm volatile(
        "{.reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0;\n"
        "selp.u32 %0, 1, 0, p;}"
        : "=r"(done)
        : "r"(bar)
        : "memory");
  }
  u8* seen = a.seen + (blockIdx.y * gridDim.x + blockIdx.x) * kBytes;
  for (u32 i = threadIdx.x; i < kBytes; i += blockDim.x) seen[i] = tile[i];
  if (threadIdx.x == 0) {
    asm volatile(
        "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(&a.to),
        "r"(column), "r"(row), "r"(address)
        : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
  }
}
