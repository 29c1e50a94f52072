// Probe of wgmma.mma_async.sp on sm_90a: does the packed 2:4 layout of docs/formats.md feed it
// (proof), and how fast is each way to bring A and its indices to the tensor cores (rate).
//
// wgmma_sp_layout.py appends a struct Config (shape, forms, the wgmma text) and an extern "C"
// entry. Words used below:
//   step   one instruction: 32 logical columns of 16-bit values, 64 of 8-bit; 32 kept bytes a row
//   group  two steps = 64 kept bytes a row = 128 bytes of a B row = one 128B-swizzle atom of B
//   panel  64 rows of A, what one warpgroup multiplies
// The rate kernel is a GEMM main loop without an epilogue: 2 consumer warpgroups, one m64 each, a
// producer warp, 4 stages of one group. Without traffic the stages are filled once.

using u8 = unsigned char;
using u32 = unsigned int;
using u64 = unsigned long long;

// Where A comes from, under the names of the rows.
enum class Form { ss_swizzle128, ss_noswizzle, rs_const, rs_ldmatrix, rs_lds32, rs_ldg, rs_ldg128 };
enum class Meta { constant, lds, ldg };

constexpr int kStages = 4;
constexpr int kPeriod = 32;    // groups before the operand streams repeat: about 16 MB, L2-resident
constexpr int kBStreams = 12;  // CTAs that read different B tiles, as one wave of a GEMM does
constexpr u32 kStepBytes = 2048, kGroupBytes = 2 * kStepBytes;

// ---- PTX -----------------------------------------------------------------------------------

__device__ __forceinline__ u32 shared_address(const void* p) {
  return static_cast<u32>(__cvta_generic_to_shared(p));
}

// Bits of an accumulator; volatile keeps the read behind the wait before it.
__device__ __forceinline__ u32 bits(float x) {
  u32 word;
  asm volatile("mov.b32 %0, %1;" : "=r"(word) : "f"(x));
  return word;
}
__device__ __forceinline__ u32 bits(int x) { return bits(__int_as_float(x)); }

template <int InFlight>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(InFlight) : "memory");
}

// Offsets in bytes. Unswizzled K-major (layout 0): lbo = next core matrix along k, sbo = next 8
// rows. 128B swizzle (layout 1): lbo unused, sbo = next 8 rows = 1024.
__device__ __forceinline__ u64 descriptor(u32 address, u32 lbo, u32 sbo, u64 layout) {
  return u64((address & 0x3FFFF) >> 4) | u64(lbo >> 4) << 16 | u64(sbo >> 4) << 32 | layout << 62;
}

__device__ __forceinline__ void mbarrier_init(u32 bar, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}

__device__ __forceinline__ void mbarrier_expect(u32 bar, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes)
               : "memory");
}

// Lane r of the calling warp tells CTA r of the cluster.
template <int Ctas>
__device__ __forceinline__ void mbarrier_arrive(u32 bar) {
  if constexpr (Ctas == 1) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
  } else {
    asm volatile(
        "{.reg .b32 remote;\n"
        "mapa.shared::cluster.u32 remote, %0, %1;\n"
        "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [remote];}" ::"r"(bar),
        "r"(threadIdx.x % 32)
        : "memory");
  }
}

// A wrong barrier count ends in a launch error, not in a hang. The loop is PTX on purpose: written
// in C++ it makes ptxas serialise every wgmma that reads A from registers (C7512).
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

// To this CTA, or to the same place in every CTA of the cluster, each with its own barrier.
template <int Ctas = 1>
__device__ __forceinline__ void bulk_load(u32 dst, const void* src, u32 bytes, u32 bar) {
  if constexpr (Ctas == 1) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
            "r"(dst),
        "l"(src), "r"(bytes), "r"(bar)
        : "memory");
  } else {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
        " [%0], [%1], %2, [%3], %4;" ::"r"(dst),
        "l"(src), "r"(bytes), "r"(bar), "h"((unsigned short)((1 << Ctas) - 1))
        : "memory");
  }
}

__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

// Loads with an immediate byte offset, which keeps address arithmetic out of the main loop.
template <int Offset>
__device__ __forceinline__ u32 lds32(u32 address) {
  u32 word;
  asm volatile("ld.shared.b32 %0, [%1 + %2];" : "=r"(word) : "r"(address), "n"(Offset) : "memory");
  return word;
}

template <int Offset>
__device__ __forceinline__ u32 ldg32(const u8* p) {
  u32 word;
  asm volatile("ld.global.nc.L1::no_allocate.b32 %0, [%1 + %2];"
               : "=r"(word)
               : "l"(p), "n"(Offset));
  return word;
}

template <int Offset>
__device__ __forceinline__ void ldg128(u32 (&w)[4], const u8* p) {
  asm volatile("ld.global.nc.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4 + %5];"
               : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
               : "l"(p), "n"(Offset));
}

template <int Offset>
__device__ __forceinline__ void ldmatrix_x4(u32 (&w)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4 + %5];"
               : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
               : "r"(address), "n"(Offset)
               : "memory");
}

// ---- A fragment of one step ------------------------------------------------------------------

__device__ constexpr bool in_registers(Form form) {
  return form != Form::ss_swizzle128 && form != Form::ss_noswizzle;
}

__device__ constexpr bool from_global(Form form) {
  return form == Form::rs_ldg || form == Form::rs_ldg128;
}

__device__ constexpr bool through_shared(Form form) {
  return form != Form::rs_const && !from_global(form);
}

// Byte offset of this lane in a step of [8 row blocks][2 chunks][8 rows][16 bytes].
template <Form F>
__device__ __forceinline__ u32 lane_offset() {
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32 * 512;
  if (F == Form::rs_ldmatrix) {
    return warp + (lane >> 3 & 1) * 256 + (lane >> 4) * 128 + (lane & 7) * 16;
  }
  return warp + lane * (F == Form::rs_ldg128 ? 16 : 4);
}

// Word l of core matrices (2w, 0), (2w + 1, 0), (2w, 1), (2w + 1, 1). rs_ldg128 reads the same
// bytes as 16 contiguous bytes a lane: what a layout packed in fragment order would allow.
template <Form F, int Offset>
__device__ __forceinline__ void load_fragment(u32 (&a)[4], u32 shared, const u8* global) {
  if constexpr (F == Form::rs_ldmatrix) {
    ldmatrix_x4<Offset>(a, shared);
  } else if constexpr (F == Form::rs_lds32) {
    a[0] = lds32<Offset>(shared), a[1] = lds32<Offset + 256>(shared);
    a[2] = lds32<Offset + 128>(shared), a[3] = lds32<Offset + 384>(shared);
  } else if constexpr (F == Form::rs_ldg128) {
    ldg128<Offset>(a, global);
  } else {
    a[0] = ldg32<Offset>(global), a[1] = ldg32<Offset + 256>(global);
    a[2] = ldg32<Offset + 128>(global), a[3] = ldg32<Offset + 384>(global);
  }
}

template <Form F>
__device__ __forceinline__ void load_fragments(u32 (&a)[2][4], u32 shared, const u8* global) {
  if constexpr (in_registers(F)) {
    load_fragment<F, 0>(a[0], shared, global);
    load_fragment<F, kStepBytes>(a[1], shared, global);
  }
}

// One group, committed: 16-bit steps share a word through selectors 0 and 1; 8-bit steps have a
// word each.
template <class C>
__device__ __forceinline__ void multiply(typename C::Acc (&d)[C::kN / 2], const u32 (&a)[2][4],
                                         const u32 (&meta)[C::kMetaWords], u64 a0, u64 a1, u64 b) {
  constexpr int kFirst = C::kSwapSelectors ? 1 : 0;
  constexpr int kSecond = C::kMetaWords == 1 ? 1 - kFirst : 0;
  constexpr u64 kBStep = 64 >> 4;
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
  if constexpr (in_registers(C::kA)) {
    C::template rs<kFirst>(d, a[0], b, meta[0]);
    C::template rs<kSecond>(d, a[1], b + kBStep, meta[C::kMetaWords - 1]);
  } else {
    C::template ss<kFirst>(d, a0, b, meta[0]);
    C::template ss<kSecond>(d, a1, b + kBStep, meta[C::kMetaWords - 1]);
  }
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// ---- Proof: D[64 P, N] = W x^T, one CTA of one warpgroup a panel ------------------------------

struct ProofArgs {
  const u8* values;  // packed: [panels][groups][2 steps][2048]
  const u8* rows;    // kept values, row-major: [64 P][groups * 64], for the swizzled form
  const u32* meta;   // [panels][groups * kMetaWords][128]
  const u8* x;       // [N][groups * 128] bytes
  void* out;         // Acc [64 P][N]
  int groups, lbo, sbo;
};

// Rows of up to 128 bytes into a tile with the 128B swizzle.
__device__ __forceinline__ void copy_swizzled(u8* tile, const u8* from, int pitch, int rows,
                                              int chunks) {
  for (int i = threadIdx.x; i < rows * chunks; i += 128) {
    const int row = i / chunks, chunk = i % chunks;
    *reinterpret_cast<uint4*>(tile + row * 128 + ((chunk ^ (row & 7)) << 4)) =
        *reinterpret_cast<const uint4*>(from + size_t(row) * pitch + chunk * 16);
  }
}

template <class C>
__device__ __forceinline__ void prove(const ProofArgs& args, u8* smem) {
  using Acc = typename C::Acc;
  const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, panel = blockIdx.x;
  u8* b = smem;
  u8* a = smem + C::kN * 128;
  const u32 a_base = shared_address(a), bar = a_base + 8192;
  if (tid == 0) mbarrier_init(bar, 1);
  __syncthreads();

  Acc d[C::kN / 2];
#pragma unroll
  for (int i = 0; i < C::kN / 2; ++i) d[i] = 0;
  for (int g = 0; g < args.groups; ++g) {
    copy_swizzled(b, args.x + g * 128, args.groups * 128, C::kN, 8);
    if (C::kA == Form::ss_swizzle128 && g % 2 == 0) {
      const u8* rows = args.rows + (size_t(panel) * 64 * args.groups + g) * 64;
      copy_swizzled(a, rows, args.groups * 64, 64, g + 1 < args.groups ? 8 : 4);
    }
    const u8* group_values = args.values + (size_t(panel) * args.groups + g) * kGroupBytes;
    constexpr bool kBulk = through_shared(C::kA) && C::kA != Form::ss_swizzle128;
    if (kBulk && tid == 0) {
      mbarrier_expect(bar, kGroupBytes);
      bulk_load(a_base, group_values, kGroupBytes, bar);
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    if (kBulk) mbarrier_wait(bar, g & 1);

    u32 fragment[2][4], meta[C::kMetaWords];
    const u32 offset = lane_offset<C::kA>();
    load_fragments<C::kA>(fragment, a_base + offset, group_values + offset);
#pragma unroll
    for (int i = 0; i < C::kMetaWords; ++i) {
      meta[i] = args.meta[((size_t(panel) * args.groups + g) * C::kMetaWords + i) * 128 + tid];
    }
    u64 a0, a1;
    if constexpr (C::kA == Form::ss_swizzle128) {
      a0 = descriptor(a_base + (g & 1) * 64, 16, 1024, 1);
      a1 = descriptor(a_base + (g & 1) * 64 + 32, 16, 1024, 1);
    } else {
      a0 = descriptor(a_base, args.lbo, args.sbo, 0);
      a1 = descriptor(a_base + kStepBytes, args.lbo, args.sbo, 0);
    }
    multiply<C>(d, fragment, meta, a0, a1, descriptor(shared_address(b), 16, 1024, 1));
    wgmma_wait<0>();
    __syncthreads();
  }
  Acc* out = static_cast<Acc*>(args.out) + size_t(panel) * 64 * C::kN;
#pragma unroll
  for (int i = 0; i < C::kN / 2; ++i) {
    const int row = warp * 16 + lane / 4 + (i & 2) * 4;
    const int col = i / 4 * 8 + lane % 4 * 2 + (i & 1);
    out[row * C::kN + col] = d[i];
  }
}

// ---- Rate --------------------------------------------------------------------------------------

struct RateArgs {
  const u8* b;      // [kBStreams][kPeriod][N][128]
  const u8* a;      // [panels][kPeriod][2 steps][2048]
  const u32* meta;  // [panels][kPeriod * kMetaWords][128]
  u32* hash;        // [CTAs][256]: equal for equal accumulators
  u64* cycles;      // [CTAs]
  int groups;       // a multiple of kStages
};

template <class C>
struct Smem {
  static constexpr u32 kB = C::kN * 128, kA = 2 * kGroupBytes, kMeta = 2 * 512 * C::kMetaWords;
  static constexpr u32 kAOffset = kStages * kB;
  static constexpr u32 kMetaOffset = kAOffset + kStages * kA;
  static constexpr u32 kFull = kMetaOffset + kStages * kMeta;
  static constexpr u32 kEmpty = kFull + kStages * 8;
};

// Where this CTA's operands come from: CTAs of a cluster share the B tile.
template <class C>
struct Streams {
  const u8* b;
  const u8* a;
  const u32* meta;

  __device__ explicit Streams(const RateArgs& args) {
    const int cluster = blockIdx.x / C::kCluster, rank = blockIdx.x % C::kCluster;
    const int panel = 2 * (cluster / kBStreams * C::kCluster + rank);
    b = args.b + size_t(cluster % kBStreams) * kPeriod * Smem<C>::kB;
    a = args.a + size_t(panel) * kPeriod * kGroupBytes;
    meta = args.meta + size_t(panel) * kPeriod * C::kMetaWords * 128;
  }
  __device__ const u8* a_group(int warpgroup, int g) const {
    return a + (size_t(warpgroup) * kPeriod + g % kPeriod) * kGroupBytes;
  }
  __device__ const u32* meta_group(int warpgroup, int g) const {
    return meta + (size_t(warpgroup) * kPeriod + g % kPeriod) * C::kMetaWords * 128;
  }
};

// One group into one stage: this CTA's share of B to the whole cluster, its own A and indices.
template <class C>
__device__ __forceinline__ void fill_stage(const Streams<C>& from, u32 smem, int g) {
  using S = Smem<C>;
  constexpr bool kFillA = through_shared(C::kA), kFillMeta = C::kMeta == Meta::lds;
  constexpr u32 kShare = S::kB / C::kCluster;
  const u32 rank = blockIdx.x % C::kCluster, stage = g % kStages, bar = smem + S::kFull + stage * 8;
  mbarrier_expect(bar, S::kB + (kFillA ? S::kA : 0) + (kFillMeta ? S::kMeta : 0));
  const u8* b = from.b + size_t(g % kPeriod) * S::kB + rank * kShare;
  const u32 b_stage = smem + stage * S::kB + rank * kShare;
  bulk_load<C::kCluster>(b_stage, b, kShare, bar);
#pragma unroll
  for (int w = 0; w < 2; ++w) {
    if constexpr (kFillA) {
      bulk_load(smem + S::kAOffset + stage * S::kA + w * kGroupBytes, from.a_group(w, g),
                kGroupBytes, bar);
    }
    if constexpr (kFillMeta) {
      bulk_load(smem + S::kMetaOffset + stage * S::kMeta + w * S::kMeta / 2, from.meta_group(w, g),
                S::kMeta / 2, bar);
    }
  }
}

template <class C>
__device__ __forceinline__ void produce(const RateArgs& args, u32 smem) {
  using S = Smem<C>;
  const Streams<C> from(args);
  // With traffic one group more than is used, as consumers look one ahead; else all stages once.
  const int last = C::kFill ? args.groups : kStages - 1;
#pragma unroll 1
  for (int g = 0; g <= last; ++g) {
    if (g >= kStages) {
      mbarrier_wait(smem + S::kEmpty + g % kStages * 8, (g / kStages - 1) & 1);
    }
    fill_stage<C>(from, smem, g);
  }
}

// This thread's first words of each operand in registers.
template <class C>
struct Sources {
  const u8 *a_global, *meta_global;
  u32 a_shared, meta_shared;

  __device__ Sources(const RateArgs& args, u32 smem, int wg) {
    const Streams<C> from(args);
    const u32 a = lane_offset<C::kA>(), m = threadIdx.x % 128 * 4;
    a_global = from.a_group(wg, 0) + a;
    a_shared = smem + Smem<C>::kAOffset + wg * kGroupBytes + a;
    meta_global = reinterpret_cast<const u8*>(from.meta_group(wg, 0)) + m;
    meta_shared = smem + Smem<C>::kMetaOffset + wg * Smem<C>::kMeta / 2 + m;
  }
  __device__ __forceinline__ void load_a(u32 (&a)[2][4], u32 g, u32 stage) const {
    load_fragments<C::kA>(a, a_shared + stage * Smem<C>::kA, a_global + g % kPeriod * kGroupBytes);
  }
  __device__ __forceinline__ void load_meta(u32 (&meta)[C::kMetaWords], u32 g, u32 stage) const {
    const u32 shared = meta_shared + stage * Smem<C>::kMeta;
    const u8* global = meta_global + g % kPeriod * (C::kMetaWords * 512);
    constexpr int kLast = C::kMetaWords - 1;
    if constexpr (C::kMeta == Meta::lds) {
      meta[0] = lds32<0>(shared);
      if (kLast > 0) meta[kLast] = lds32<kLast * 512>(shared);
    } else {
      meta[0] = ldg32<0>(global);
      if (kLast > 0) meta[kLast] = ldg32<kLast * 512>(global);
    }
  }
};

// How many groups ahead an operand is loaded into registers, and the register sets that needs:
// the set being written is never one that a wgmma in flight reads.
template <class C>
struct Ahead {
  static constexpr int kA = from_global(C::kA) ? C::kAhead : 1;
  static constexpr int kMeta = C::kMeta == Meta::ldg ? C::kAhead : 1;
  static constexpr int kASets = in_registers(C::kA) && C::kA != Form::rs_const ? kA + 1 : 1;
  static constexpr int kMetaSets = C::kMeta == Meta::constant ? 1 : kMeta + 1;
};

template <class C>
__device__ __forceinline__ void consume(const RateArgs& args, u32 smem, int wg) {
  using S = Smem<C>;
  using R = Ahead<C>;
  constexpr bool kStreamA = R::kASets > 1, kStreamMeta = R::kMetaSets > 1;
  const Sources<C> from(args, smem, wg);
  typename C::Acc d[C::kN / 2];
#pragma unroll
  for (int i = 0; i < C::kN / 2; ++i) d[i] = 0;

  for (int s = 0; s < (C::kFill ? 1 : kStages); ++s) mbarrier_wait(smem + S::kFull + s * 8, 0);
  u32 a[R::kASets][2][4], meta[R::kMetaSets][C::kMetaWords];
#pragma unroll
  for (int g = 0; g < R::kA; ++g) from.load_a(a[g % R::kASets], g, g);
#pragma unroll
  for (int g = 0; g < R::kMeta; ++g) from.load_meta(meta[g % R::kMetaSets], g, g);

  constexpr bool kSwizzled = C::kA == Form::ss_swizzle128;
  const u64 b0 = descriptor(smem, 16, 1024, 1);
  const u64 a0 = kSwizzled ? descriptor(smem + S::kAOffset + wg * 8192, 16, 1024, 1)
                           : descriptor(smem + S::kAOffset + wg * kGroupBytes, 128, 256, 0);
  const u64 start = clock64();
  // do, not for: a path around the loop makes ptxas copy the accumulators while they are in flight.
  int g0 = 0;
#pragma unroll 1
  do {
    const u32 phase = g0 / kStages & 1;
#pragma unroll
    for (int u = 0; u < kStages; ++u) {
      // A swizzled row holds two groups: stages 2 i and 2 i + 1 share an 8 KB atom a warpgroup.
      const u32 a_offset = kSwizzled ? u / 2 * 16384 + u % 2 * 64 : u * S::kA;
      const u64 au = a0 + (a_offset >> 4);
      multiply<C>(d, a[u % R::kASets], meta[u % R::kMetaSets], au,
                  au + ((kSwizzled ? 32 : kStepBytes) >> 4), b0 + (u * S::kB >> 4));
      wgmma_wait<1>();  // the group before this one is done: its stage and registers are free
      if constexpr (C::kFill) {
        if ((u > 0 || g0 > 0) && threadIdx.x % 32 < C::kCluster) {
          mbarrier_arrive<C::kCluster>(smem + S::kEmpty + (u + kStages - 1) % kStages * 8);
        }
        mbarrier_wait(smem + S::kFull + (u + 1) % kStages * 8,
                      u == kStages - 1 ? phase ^ 1 : phase);
      }
      if constexpr (kStreamA) {
        from.load_a(a[(u + R::kA) % R::kASets], g0 + u + R::kA, (u + R::kA) % kStages);
      }
      if constexpr (kStreamMeta) {
        from.load_meta(meta[(u + R::kMeta) % R::kMetaSets], g0 + u + R::kMeta,
                       (u + R::kMeta) % kStages);
      }
    }
    g0 += kStages;
  } while (g0 < args.groups);
  wgmma_wait<0>();
  if (threadIdx.x == 0) args.cycles[blockIdx.x] = clock64() - start;
  u32 hash = 0;
#pragma unroll
  for (int i = 0; i < C::kN / 2; ++i) hash = hash * 31 + bits(d[i]);
  args.hash[blockIdx.x * 256 + threadIdx.x] = hash;
}

template <class C>
__device__ __forceinline__ void rate(const RateArgs& args, u8* smem) {
  using S = Smem<C>;
  const u32 base = shared_address(smem);
  if (base % 1024 != 0) __trap();
  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      mbarrier_init(base + S::kFull + s * 8, 1);
      mbarrier_init(base + S::kEmpty + s * 8, 8 * C::kCluster);  // every consumer warp
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  if constexpr (C::kCluster > 1) cluster_sync();
  const int wg = __shfl_sync(0xFFFFFFFF, threadIdx.x / 128, 0);
  if (wg == 2) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x == 256) produce<C>(args, base);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    consume<C>(args, base, wg);
  }
  if constexpr (C::kCluster > 1) cluster_sync();  // peers still arrive at this CTA's barriers
}
