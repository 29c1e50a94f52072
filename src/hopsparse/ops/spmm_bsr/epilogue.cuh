// The epilogue of spmm_bsr: sums in registers to y[tokens, out]. Needs Args, Item, Smem and Sums of
// kernel.cuh, which includes it where they are known.
#pragma once

namespace spmm_bsr {

// A panel leaves in pieces of kStoreTokens tokens, packed into words first.
template <class C>
struct Pieces {
  static constexpr int kSums = C::kStoreTokens / 2, kWords = C::kStoreTokens / 4;
  static constexpr int kOfPanel = C::kTokens / C::kStoreTokens;
  static constexpr int kRounds = C::kStoreTokens / 16;  // of 16 lines, 8 threads each
};

// Reads of these sums stay behind what is in front of this: the last wait of the main loop, or the
// piece before them (all pieces at once would not fit into registers).
template <int N>
__device__ __forceinline__ void settle(float (&sums)[N], int first, int count) {
#pragma unroll
  for (int i = first; i < first + count; i += 8) {
    asm volatile(""
                 : "+f"(sums[i]), "+f"(sums[i + 1]), "+f"(sums[i + 2]), "+f"(sums[i + 3]),
                   "+f"(sums[i + 4]), "+f"(sums[i + 5]), "+f"(sums[i + 6]),
                   "+f"(sums[i + 7])::"memory");
  }
}

// The two rows of a panel that this thread has sums of.
__device__ __forceinline__ int row_of_panel(int half) {
  return threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4 + half * 8;
}

// What is added to the sums of an item, but for a residual. Loaded before they are computed:
// between them and y, every piece of a panel would wait for L2.
template <class C>
struct Terms {
  float alpha, bias[C::kPanels][2];

  __device__ __forceinline__ Terms(const Args& args, const Item& item) : alpha(args.alpha) {
#pragma unroll
    for (int i = 0; i < 2 * C::kPanels; ++i) {
      const int row = (item.strip * C::kPanels + i / 2) * 64 + row_of_panel(i % 2);
      const bool exists = args.bias != nullptr && row < args.out;
      bias[i / 2][i % 2] = exists ? load_value<C::kNumbers>(args.bias, row) : 0.0f;
    }
  }
  __device__ __forceinline__ float finish(float sum, int panel, int half) const {
    return activate<C::kActivation>(sum * alpha + bias[panel][half]);
  }
};

// Where a panel of an item lies in y.
struct PanelAt {
  int panel, out0, token0;
};

// The words of piece `s`, in the order in which stmatrix takes them: 16 tokens x 16 rows a four.
// With a residual they hold its words before.
template <class C>
__device__ __forceinline__ void pack_piece(float (&d)[C::kTokens / 2], const Terms<C>& terms,
                                           const PanelAt& at, int s, u32* words) {
  settle(d, s * Pieces<C>::kSums, Pieces<C>::kSums);
#pragma unroll
  for (int i = 0; i < Pieces<C>::kWords; ++i) {
    const int sum = s * Pieces<C>::kSums + i / 2 * 4 + i % 2 * 2;
    float low = terms.finish(d[sum], at.panel, i % 2);
    float high = terms.finish(d[sum + 1], at.panel, i % 2);
    if constexpr (C::kResidual) {
      low += unpack<C::kOut>(words[i]);
      high += unpack<C::kOut>(words[i] >> 16);
    }
    words[i] = pack<C::kOut>(low, high);
  }
}

// A piece is written to shared memory in the fragments' order, transposed, and read back as rows of
// 64 out-features, which leave as whole lines of 128 bytes. The pieces of a warpgroup alternate
// between its two buffers, `turn` counts them: the barrier of a piece also says that the piece
// before it was read. No TMA store: the fence it needs waits for wgmma in flight.
template <class C>
__device__ __forceinline__ u32 piece_buffer(u32 smem, u32 wg, u32 turn) {
  return smem + Smem<C>::kStoreAt + (wg * 2 + turn % 2) * Smem<C>::kStore;
}

// This lane's address in the 16 tokens x 16 out-features that one instruction writes. Tokens are
// 128 bytes apart, their 16-byte chunks permuted so that no two lanes meet in a bank.
__device__ __forceinline__ u32 piece_address(u32 buffer) {
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
  return buffer + (lane / 16 * 8 + lane % 8) * 128 + ((2 * warp + lane / 8 % 2) ^ lane % 8) * 16;
}

// The 16 bytes of y, counted in elements, and of a piece that this thread moves in round `i`.
template <class C>
struct Line {
  long long at;
  u32 shared;
  bool exists;

  __device__ __forceinline__ Line(const Args& args, u32 buffer, const PanelAt& panel, int s,
                                  int i) {
    const int chunk = threadIdx.x % 8, row = threadIdx.x % 128 / 8 + i * 16;
    const int token = panel.token0 + s * C::kStoreTokens + row, out = panel.out0 + chunk * 8;
    at = (long long)token * args.out + out;
    exists = token < args.tokens && out < args.out;
    shared = buffer + row * 128 + (chunk ^ row % 8) * 16;
  }
};

// The words of the residual where a piece will be written, by the way back.
template <class C>
__device__ __forceinline__ void fetch_residual(const Args& args, u32 wg, u32 buffer,
                                               const PanelAt& at, int s, u32* words) {
#pragma unroll
  for (int i = 0; i < Pieces<C>::kRounds; ++i) {
    const Line<C> line(args, buffer, at, s, i);
    uint4 found = {0, 0, 0, 0};
    if (line.exists) {
      found = *reinterpret_cast<const uint4*>(static_cast<const u16*>(args.residual) + line.at);
    }
    store_shared_x4(line.shared, found);
  }
  named_barrier<128>(1 + wg);
#pragma unroll
  for (int j = 0; j < Pieces<C>::kWords; j += 4) {
    load_transposed_x4(words + j, piece_address(buffer) + j * 512);
  }
}

template <class C>
__device__ __forceinline__ void store_piece(const Args& args, float (&d)[C::kTokens / 2], u32 wg,
                                            u32 buffer, const Terms<C>& terms, const PanelAt& at,
                                            int s) {
  u32 words[Pieces<C>::kWords];
  if constexpr (C::kResidual) fetch_residual<C>(args, wg, buffer, at, s, words);
  pack_piece<C>(d, terms, at, s, words);
#pragma unroll
  for (int j = 0; j < Pieces<C>::kWords; j += 4) {
    store_transposed_x4<0>(piece_address(buffer) + j * 512, words[j], words[j + 1], words[j + 2],
                           words[j + 3]);
  }
  named_barrier<128>(1 + wg);
#pragma unroll
  for (int i = 0; i < Pieces<C>::kRounds; ++i) {
    const Line<C> line(args, buffer, at, s, i);
    const uint4 found = load_shared_x4(line.shared);
    if (line.exists) *reinterpret_cast<uint4*>(static_cast<u16*>(args.y) + line.at) = found;
  }
}

// Where lines cannot be written: y of 32 bits, or rows that are no multiple of 16 bytes.
template <class C>
__device__ __forceinline__ void store_panel_directly(const Args& args,
                                                     const float (&d)[C::kTokens / 2],
                                                     const Terms<C>& terms, const PanelAt& at) {
  const int column = at.token0 + threadIdx.x % 4 * 2;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int out = at.out0 + row_of_panel(half);
    const int fewer = out < args.out ? args.tokens - column : 0;
    long long place = (long long)column * args.out + out;
#pragma unroll
    for (int i = 0; i < C::kTokens / 4; ++i) {
      if (i / 2 * 8 + i % 2 < fewer) {
        float v = terms.finish(d[i / 2 * 4 + half * 2 + i % 2], at.panel, half);
        if constexpr (C::kResidual) v += load_value<C::kOut>(args.residual, place);
        store_value<C::kOut>(args.y, place, v);
      }
      place += (i % 2 == 0 ? 1LL : 7LL) * args.out;
    }
  }
}

template <class C>
__device__ __forceinline__ void store_item(const Args& args, Sums<C>& d, u32 smem, u32 wg,
                                           u32& turn, const Item& item, const Terms<C>& terms) {
#pragma unroll
  for (int p = 0; p < C::kPanels; ++p) {
    const PanelAt at = {p, (item.strip * C::kPanels + p) * 64, item.token};
    if constexpr (C::kDirect) {
      store_panel_directly<C>(args, d[p], terms, at);
    } else {
#pragma unroll
      for (int s = 0; s < Pieces<C>::kOfPanel; ++s) {
        store_piece<C>(args, d[p], wg, piece_buffer<C>(smem, wg, turn++), terms, at, s);
      }
    }
  }
}

}  // namespace spmm_bsr
