// y[tokens, out] = act(alpha * x[tokens, k] @ w[out, k]^T + bias) + residual for a packed 2:4 w.
//
// wgmma.sp wants its sparse operand on the side of M = 64 rows: that is w, so a block computes a
// tile of y transposed, out-features x tokens, and stores it back transposed.
//   consumers  Config::kWarpgroups warpgroups, each kPanels panels of 64 out-features x kTokens
//   producer   one thread, which keeps kStages stages of kUnits x 64 columns of k filled by TMA
//   cluster    kClusterOut blocks share their tokens, kClusterTokens blocks their weights: each
//              loads a slice and multicasts it
//   grid       persistent; tiles in the order of tile/raster.cuh
// Bound: tensor cores from some hundred tokens on, weight bytes below. Measured:
// docs/ops/spmm_nm.md.

#include "epilogue/activation.cuh"
#include "epilogue/value.cuh"
#include "pipe/ring.cuh"
#include "ptx/barrier.cuh"
#include "ptx/base.cuh"
#include "ptx/shared.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"
#include "tile/raster.cuh"

namespace spmm_nm {

struct Args {
  TensorMap x;           // [tokens, k], boxes of 64 columns
  TensorMap values;      // [steps, panels, 2048 bytes]
  TensorMap meta;        // [panels, units, 128 words]
  void* y;               // [tokens, out], contiguous
  const void* bias;      // [out], of the type of x, or null
  const void* residual;  // [tokens, out], contiguous; read if Config::kResidual
  float alpha;
  int tokens, out;
  int stages_of_k;             // even: k in stages, rounded up; what lies past k is zero
  int out_tiles, token_tiles;  // in tiles of a cluster
  int raster_group;
};

// ---- Shared memory ---------------------------------------------------------------------------

constexpr u32 kStepBytes = 2048;  // kept values of 64 rows x 32 columns
constexpr u32 kUnitWords = 128;   // index words of 64 rows x 64 columns
constexpr u32 kTokenBytes = 128;  // 64 columns of one token

template <class C>
struct Smem {
  static constexpr int kPanels = C::kWarpgroups * C::kPanels;
  static constexpr u32 kX = C::kUnits * C::kTokens * kTokenBytes;
  static constexpr u32 kValues = 2 * C::kUnits * kPanels * kStepBytes;
  static constexpr u32 kMeta = C::kUnits * kPanels * kUnitWords * 4;
  static constexpr u32 kStageBytes = kX + kValues + kMeta;
  static constexpr u32 kStore = C::kDirect ? 0 : C::kStoreTokens * 128;

  static constexpr u32 kValuesAt = C::kStages * kX;
  static constexpr u32 kStoreAt = kValuesAt + C::kStages * kValues;
  static constexpr u32 kMetaAt = kStoreAt + 2 * C::kWarpgroups * kStore;
  static constexpr u32 kFullAt = kMetaAt + C::kStages * kMeta;
  static constexpr u32 kEmptyAt = kFullAt + C::kStages * 8;
  static constexpr u32 kBytes = kEmptyAt + C::kStages * 8;
};

// ---- Barriers ----------------------------------------------------------------------------------

// Blocks whose stages this block fills too: those of its row and of its column in the cluster.
template <class C>
constexpr int kReaders = C::kClusterOut + C::kClusterTokens - 1;

template <class C>
__device__ __forceinline__ void init_barriers(u32 smem) {
  using S = Smem<C>;
  if (threadIdx.x == 0) {
#pragma unroll
    for (int s = 0; s < C::kStages; ++s) {
      mbarrier_init(smem + S::kFullAt + s * 8, 1);
      mbarrier_init(smem + S::kEmptyAt + s * 8, 4 * C::kWarpgroups * kReaders<C>);
    }
    mbarrier_init_fence();
  }
}

// What this lane tells when its warp is done with a stage: the empty barrier of one block that
// fills it. Lanes past the last of them tell nothing.
template <class C>
__device__ __forceinline__ u32 release_address(u32 smem, u32 rank) {
  const u32 lane = threadIdx.x % 32, empty = smem + Smem<C>::kEmptyAt;
  if constexpr (kReaders<C> == 1) return empty;
  const u32 out = rank % C::kClusterOut, tokens = rank / C::kClusterOut;
  u32 block = lane + tokens * C::kClusterOut;  // the blocks that share my tokens
  if (lane >= C::kClusterOut) {                // and those that share my weights
    const u32 other = lane - C::kClusterOut;
    block = out + (other < tokens ? other : other + 1) * C::kClusterOut;
  }
  return cluster_address(empty, lane < kReaders<C> ? block : rank);
}

template <class C>
__device__ __forceinline__ void release(u32 address, u32 stage) {
  if (threadIdx.x % 32 < kReaders<C>) {
    if constexpr (kReaders<C> == 1) {
      mbarrier_arrive(address + stage * 8);
    } else {
      mbarrier_arrive_remote(address + stage * 8);
    }
  }
}

// ---- Producer ----------------------------------------------------------------------------------

// One stage: this block's slice of what it shares, to all who share it, and its own indices.
template <class C>
__device__ __forceinline__ void fill_stage(const Args& args, u32 smem, u32 rank, u32 stage, int k,
                                           TileAt tile) {
  using S = Smem<C>;
  constexpr int kRows = C::kTokens / C::kClusterOut, kSteps = 2 * C::kUnits / C::kClusterTokens;
  const u32 bar = smem + S::kFullAt + stage * 8;
  const u32 out = rank % C::kClusterOut, tokens = rank / C::kClusterOut;
  const int unit = k * C::kUnits, panel = tile.out * S::kPanels;
  mbarrier_expect(bar, S::kStageBytes);

  const u32 x = smem + stage * S::kX + out * kRows * kTokenBytes;
  const u32 values =
      smem + S::kValuesAt + stage * S::kValues + tokens * kSteps * S::kPanels * kStepBytes;
  const int step = 2 * unit + tokens * kSteps, token = tile.tokens * C::kTokens + out * kRows;
#pragma unroll
  for (int u = 0; u < C::kUnits; ++u) {
    const u32 at = x + u * C::kTokens * kTokenBytes;
    if constexpr (C::kClusterOut == 1) {
      tma_load(at, args.x, bar, (unit + u) * 64, token);
    } else {
      const u16 mask = ((1 << C::kClusterOut) - 1) << tokens * C::kClusterOut;
      tma_load_multicast(at, args.x, bar, mask, (unit + u) * 64, token);
    }
  }
  if constexpr (C::kClusterTokens == 1) {
    tma_load(values, args.values, bar, 0, panel, step);
  } else {
    u16 mask = 0;
    for (int i = 0; i < C::kClusterTokens; ++i) mask |= 1 << (out + i * C::kClusterOut);
    tma_load_multicast(values, args.values, bar, mask, 0, panel, step);
  }
  tma_load(smem + S::kMetaAt + stage * S::kMeta, args.meta, bar, 0, unit, panel);
}

template <class C>
__device__ __forceinline__ TileAt tile_at(const Args& args, int index, u32 rank) {
  const TileAt at = raster(index, args.out_tiles, args.token_tiles, args.raster_group);
  return {at.out * C::kClusterOut + int(rank % C::kClusterOut),
          at.tokens * C::kClusterTokens + int(rank / C::kClusterOut)};
}

template <class C>
__device__ __forceinline__ void produce(const Args& args, u32 smem, u32 rank) {
  constexpr int kBlocks = C::kClusterOut * C::kClusterTokens;
  const int tiles = args.out_tiles * args.token_tiles, step = gridDim.x / kBlocks;
  Ring<C::kStages> ring;
  ring.parity = 1;  // of the phase before the first: every stage starts empty
  for (int index = blockIdx.x / kBlocks; index < tiles; index += step) {
    const TileAt tile = tile_at<C>(args, index, rank);
#pragma unroll 1
    for (int k = 0; k < args.stages_of_k; ++k) {
      mbarrier_wait(smem + Smem<C>::kEmptyAt + ring.stage * 8, ring.parity);
      fill_stage<C>(args, smem, rank, ring.stage, k, tile);
      ring.advance();
    }
  }
}

// ---- Consumers ---------------------------------------------------------------------------------

template <class C>
using Sums = float[C::kPanels][C::kTokens / 2];

// Reads of these sums stay behind what is in front of this: the last wait of the main loop, or the
// piece of the epilogue before them (all pieces at once would not fit into registers).
template <int N>
__device__ __forceinline__ void settle(float (&sums)[N], int first, int count) {
#pragma unroll
  for (int i = first; i < first + count; i += 8) {
    // Eight at a time: each statement is a point that all sums must pass while it is compiled.
    asm volatile(""
                 : "+f"(sums[i]), "+f"(sums[i + 1]), "+f"(sums[i + 2]), "+f"(sums[i + 3]),
                   "+f"(sums[i + 4]), "+f"(sums[i + 5]), "+f"(sums[i + 6]),
                   "+f"(sums[i + 7])::"memory");
  }
}

// One stage: its indices into registers that no wgmma in flight reads, its products issued, and the
// stage before it released once they alone are in flight.
template <class C>
__device__ __forceinline__ void multiply_stage(Sums<C>& d, u32 (&e)[C::kPanels][C::kUnits],
                                               u32 smem, u32 wg, Ring<C::kStages>& ring, u32 freed,
                                               bool first) {
  using S = Smem<C>;
  constexpr u32 kStepsApart = S::kPanels * kStepBytes;
  const u32 meta = smem + S::kMetaAt + ring.stage * S::kMeta + wg * C::kPanels * C::kUnits * 512 +
                   threadIdx.x % 128 * 4;
  const u64 a = core_matrix_descriptor(
      smem + S::kValuesAt + ring.stage * S::kValues + wg * C::kPanels * kStepBytes, 128, 256);
  const u64 b = swizzled_descriptor(smem + ring.stage * S::kX);
  mbarrier_wait(smem + S::kFullAt + ring.stage * 8, ring.parity);
#pragma unroll
  for (int p = 0; p < C::kPanels; ++p) {
#pragma unroll
    for (int u = 0; u < C::kUnits; ++u) e[p][u] = load_shared<0>(meta + (p * C::kUnits + u) * 512);
  }
  wgmma_fence();
#pragma unroll
  for (int u = 0; u < C::kUnits; ++u) {
    const u64 bu = b + (u * C::kTokens * kTokenBytes >> 4);
#pragma unroll
    for (int p = 0; p < C::kPanels; ++p) {
      const u64 ap = a + ((2 * u * kStepsApart + p * kStepBytes) >> 4);
      const u64 values[2] = {ap, ap + (kStepsApart >> 4)}, tokens[2] = {bu, bu + (64 >> 4)};
      C::multiply(d[p], values, tokens, e[p][u]);
    }
  }
  wgmma_commit();
  wgmma_wait<1>();
  if (!first) release<C>(freed, ring.previous());
  ring.advance();
}

// ---- Epilogue ----------------------------------------------------------------------------------
//
// A panel leaves in pieces of kStoreTokens tokens, packed into words first.
//
// Tried and slower: to keep a tile's words in registers and send a piece after each of the next
// tile's first stages, with one or two stages of wgmma in flight (195 to 197 k clocks against 187
// k, 4096^3). Page 0005 of docs/design has the table.

template <class C>
struct Pieces {
  static constexpr int kSums = C::kStoreTokens / 2, kWords = C::kStoreTokens / 4;
  static constexpr int kOfPanel = C::kTokens / C::kStoreTokens;
};

template <class C>
__device__ __forceinline__ float finish(const Args& args, float sum, float bias) {
  return activate<C::kActivation>(args.alpha * sum + bias);
}

// Where this thread's sums of one panel of a tile lie in y, and the biases of its two rows.
template <class C>
struct PanelAt {
  int out0, token0;
  float bias[2] = {0.0f, 0.0f};

  __device__ __forceinline__ PanelAt(const Args& args, TileAt tile, u32 wg, int panel) {
    out0 = (tile.out * Smem<C>::kPanels + wg * C::kPanels + panel) * 64;
    token0 = tile.tokens * C::kTokens;
    if (args.bias != nullptr) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (row(i) < args.out) bias[i] = load_value<C::kIn>(args.bias, row(i));
      }
    }
  }
  __device__ __forceinline__ int row(int half) const {
    return out0 + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4 + half * 8;
  }
  __device__ __forceinline__ int column() const { return token0 + threadIdx.x % 4 * 2; }
};

// The words of piece `s`, in the order in which stmatrix takes them: 16 tokens x 16 rows a four.
// With a residual they hold its words before.
template <class C>
__device__ __forceinline__ void pack_piece(const Args& args, float (&d)[C::kTokens / 2],
                                           const PanelAt<C>& at, int s, u32* words) {
  settle(d, s * Pieces<C>::kSums, Pieces<C>::kSums);
#pragma unroll
  for (int i = 0; i < Pieces<C>::kWords; ++i) {
    const int sum = s * Pieces<C>::kSums + (i / 2 * 4) + i % 2 * 2;
    float low = finish<C>(args, d[sum], at.bias[i % 2]);
    float high = finish<C>(args, d[sum + 1], at.bias[i % 2]);
    if constexpr (C::kResidual) {
      low += unpack<C::kOut>(words[i]);
      high += unpack<C::kOut>(words[i] >> 16);
    }
    words[i] = pack<C::kOut>(low, high);
  }
}

// A piece is written to shared memory in the fragments' order, transposed, and read back as rows of
// 64 out-features, which leave as whole lines. The pieces of a warpgroup alternate between its two
// buffers, `turn` counts them: the barrier of a piece also says that the piece before it was read.
// No TMA store: the fence it needs waits for the wgmma in flight.
template <class C>
__device__ __forceinline__ u32 piece_buffer(u32 smem, u32 wg, u32 turn) {
  return smem + Smem<C>::kStoreAt + (wg * 2 + turn % 2) * Smem<C>::kStore;
}

// This lane's address in the 16 tokens x 16 out-features that one instruction writes. Tokens are
// 128 bytes apart, their 16-byte chunks permuted so that no two lanes meet in a bank.
template <class C>
__device__ __forceinline__ u32 piece_address(u32 smem, u32 wg, u32 turn) {
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
  return piece_buffer<C>(smem, wg, turn) + (lane / 16 * 8 + lane % 8) * 128 +
         ((2 * warp + lane / 8 % 2) ^ lane % 8) * 16;
}

template <class C>
__device__ __forceinline__ void write_words(const u32* words, u32 address) {
#pragma unroll
  for (int j = 0; j < Pieces<C>::kWords; j += 4) {
    store_transposed_x4<0>(address + j * 512, words[j], words[j + 1], words[j + 2], words[j + 3]);
  }
}

// The 16 bytes of y, and of a piece, that this thread moves in round `i`; null outside y.
template <class C>
struct Line {
  long long at;
  u32 shared;
  bool exists;

  __device__ __forceinline__ Line(const Args& args, u32 buffer, int out0, int token0, int i) {
    const int chunk = threadIdx.x % 8, row = threadIdx.x % 128 / 8 + i * 16;
    at = (long long)(token0 + row) * args.out + out0 + chunk * 8;
    shared = buffer + row * 128 + (chunk ^ row % 8) * 16;
    exists = token0 + row < args.tokens && out0 + chunk * 8 < args.out;
  }
};

template <class C>
__device__ __forceinline__ void send_piece(const Args& args, u32 smem, u32 wg, u32& turn, int out0,
                                           int token0) {
  named_barrier<128>(1 + wg);
  const u32 buffer = piece_buffer<C>(smem, wg, turn++);
#pragma unroll
  for (int i = 0; i < C::kStoreTokens / 16; ++i) {
    const Line<C> line(args, buffer, out0, token0, i);
    const uint4 words = load_shared_x4(line.shared);
    if (line.exists) *reinterpret_cast<uint4*>(static_cast<u16*>(args.y) + line.at) = words;
  }
}

// The words of the residual where a piece will be written, by the way back.
template <class C>
__device__ __forceinline__ void fetch_residual(const Args& args, u32 smem, u32 wg, u32 turn,
                                               int out0, int token0, u32* words) {
  const u16* residual = static_cast<const u16*>(args.residual);
  const u32 buffer = piece_buffer<C>(smem, wg, turn), address = piece_address<C>(smem, wg, turn);
#pragma unroll
  for (int i = 0; i < C::kStoreTokens / 16; ++i) {
    const Line<C> line(args, buffer, out0, token0, i);
    uint4 found = {0, 0, 0, 0};
    if (line.exists) found = *reinterpret_cast<const uint4*>(residual + line.at);
    store_shared_x4(line.shared, found);
  }
  named_barrier<128>(1 + wg);
#pragma unroll
  for (int j = 0; j < Pieces<C>::kWords; j += 4) load_transposed_x4(words + j, address + j * 512);
}

// Where lines cannot be written: y of float32, or rows that are no multiple of 16 bytes.
template <class C>
__device__ __forceinline__ void store_panel_directly(const Args& args,
                                                     const float (&d)[C::kTokens / 2],
                                                     const PanelAt<C>& at) {
#pragma unroll
  for (int i = 0; i < C::kTokens / 2; ++i) {
    const int token = at.column() + i / 4 * 8 + i % 2, out = at.row(i / 2 % 2);
    if (token < args.tokens && out < args.out) {
      const long long place = (long long)token * args.out + out;
      float v = finish<C>(args, d[i], at.bias[i / 2 % 2]);
      if constexpr (C::kResidual) v += load_value<C::kOut>(args.residual, place);
      store_value<C::kOut>(args.y, place, v);
    }
  }
}

template <class C>
__device__ __forceinline__ void store_tile(const Args& args, Sums<C>& d, u32 smem, u32 wg,
                                           u32& turn, TileAt tile) {
#pragma unroll
  for (int p = 0; p < C::kPanels; ++p) {
    const PanelAt<C> at(args, tile, wg, p);
    if constexpr (C::kDirect) {
      store_panel_directly<C>(args, d[p], at);
    } else {
#pragma unroll
      for (int s = 0; s < Pieces<C>::kOfPanel; ++s) {
        u32 words[Pieces<C>::kWords];
        if constexpr (C::kResidual) {
          fetch_residual<C>(args, smem, wg, turn, at.out0, at.token0 + s * C::kStoreTokens, words);
        }
        pack_piece<C>(args, d[p], at, s, words);
        write_words<C>(words, piece_address<C>(smem, wg, turn));
        send_piece<C>(args, smem, wg, turn, at.out0, at.token0 + s * C::kStoreTokens);
      }
    }
  }
}

// ---- Consumer ----------------------------------------------------------------------------------

template <class C>
__device__ __forceinline__ void consume(const Args& args, u32 smem, u32 rank, u32 wg) {
  constexpr int kBlocks = C::kClusterOut * C::kClusterTokens;
  const int tiles = args.out_tiles * args.token_tiles, step = gridDim.x / kBlocks;
  const u32 freed = release_address<C>(smem, rank);
  Ring<C::kStages> ring;
  u32 turn = 0;
  for (int index = blockIdx.x / kBlocks; index < tiles; index += step) {
    Sums<C> d;
#pragma unroll
    for (int p = 0; p < C::kPanels; ++p) {
#pragma unroll
      for (int i = 0; i < C::kTokens / 2; ++i) d[p][i] = 0.0f;
    }
    u32 e[2][C::kPanels][C::kUnits];
    // do, not while: a path around the loop makes ptxas copy the sums while they are in flight.
    int k = 0;
#pragma unroll 1
    do {
      multiply_stage<C>(d, e[0], smem, wg, ring, freed, k == 0);
      multiply_stage<C>(d, e[1], smem, wg, ring, freed, false);
      k += 2;
    } while (k < args.stages_of_k);
    wgmma_wait<0>();
#pragma unroll
    for (int p = 0; p < C::kPanels; ++p) settle(d[p], 0, C::kTokens / 2);
    release<C>(freed, ring.previous());
    store_tile<C>(args, d, smem, wg, turn, tile_at<C>(args, index, rank));
  }
}

template <class C>
__device__ __forceinline__ void run(const Args& args, u8* dynamic) {
  constexpr bool kCluster = C::kClusterOut * C::kClusterTokens > 1;
  const u32 smem = shared_address(dynamic);
  const u32 rank = kCluster ? cluster_rank() : 0;
  if (smem % 1024 != 0) __trap();  // swizzled tiles start on 1024 bytes
  init_barriers<C>(smem);
  if constexpr (kCluster) {
    cluster_sync();
  } else {
    __syncthreads();
  }
  const u32 wg = uniform(threadIdx.x / 128);
  if (wg == C::kWarpgroups) {
    keep_registers<C::kProducerRegisters>();
    if (threadIdx.x / 32 % 4 == 0 && elect_one()) produce<C>(args, smem, rank);
    __syncwarp();
  } else {
    take_registers<C::kConsumerRegisters>();
    consume<C>(args, smem, rank, wg);
  }
  // Blocks of the cluster still write here and arrive on barriers of this one.
  if constexpr (kCluster) cluster_sync();
}

}  // namespace spmm_nm
