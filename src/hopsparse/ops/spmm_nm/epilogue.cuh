// The epilogue of spmm_nm: sums in registers to y[tokens, out]. Needs Args, Smem, Origin and Sums
// of kernel.cuh, which includes it where they are known.
#pragma once

namespace spmm_nm {

// A panel leaves in pieces of kStoreTokens tokens, packed into words first.
//
// Tried and slower: to keep a tile's words in registers and send a piece after each of the next
// tile's first stages, with one or two stages of wgmma in flight (195 to 197 k clocks against 187
// k, 4096^3). Page 0005 of docs/design has the table.

template <class C>
constexpr bool kCodes = C::kOut == Type::s8 || C::kOut == Type::e4m3;

template <class C>
struct Pieces {
  // 64 rows are lines of 128 bytes; of half as many where two rows are one, or a result is a byte.
  static constexpr int kNarrow = C::kFold * (kCodes<C> ? 2 : 1);
  static constexpr int kSums = C::kStoreTokens / 2, kWords = C::kStoreTokens / 4 / kNarrow;
  static constexpr int kOfPanel = C::kTokens / C::kStoreTokens;
  // 16-byte chunks of a line, and lines that a warpgroup moves at a time.
  static constexpr int kChunks = 8 / kNarrow, kLines = 128 / kChunks;
  static constexpr int kRounds = C::kStoreTokens > kLines ? C::kStoreTokens / kLines : 1;
  static constexpr int kBytes = kCodes<C> ? 1 : 2;  // of a result
};

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

// By itself for integers: one text for both, by way of their bits, costs moves in promoted tiles.
template <int N>
__device__ __forceinline__ void settle(int (&sums)[N], int first, int count) {
#pragma unroll
  for (int i = first; i < first + count; i += 8) {
    asm volatile(""
                 : "+r"(sums[i]), "+r"(sums[i + 1]), "+r"(sums[i + 2]), "+r"(sums[i + 3]),
                   "+r"(sums[i + 4]), "+r"(sums[i + 5]), "+r"(sums[i + 6]),
                   "+r"(sums[i + 7])::"memory");
  }
}

// What one row's sums are multiplied by, beside the scale of a token, and what is added.
struct RowTerms {
  float scale, bias = 0.0f;
};

template <class C>
__device__ __forceinline__ float finish(typename C::Total sum, const RowTerms& row,
                                        float token_scale) {
  float v = static_cast<float>(sum) * row.scale;
  if constexpr (C::kScaled) v *= token_scale;
  return activate<C::kActivation>(v + row.bias);
}

// What the sums of a tile are multiplied by and what is added to them, but for a residual. Loaded
// before the sums are computed: between them and y, every piece of a panel would wait for L2.
template <class C>
struct Terms {
  RowTerms rows[C::kPanels][2];
  float tokens[(C::kTokens + 31) / 32];  // scales: 32 tokens' in a register of a warp

  __device__ __forceinline__ Terms(const Args& args, Origin from, int panel0) {
#pragma unroll
    for (int i = 0; i < 2 * C::kPanels; ++i) {
      const int row = (panel0 + i / 2) * 64 + row_of_panel(i % 2);
      const bool exists = row - from.expert_panel * 64 < args.out;
      RowTerms& of_row = rows[i / 2][i % 2];
      of_row.scale = args.alpha;
      if (args.bias != nullptr && exists) of_row.bias = load_value<C::kBias>(args.bias, row);
      if constexpr (C::kScaled && !C::kGrouped) {
        const float* scales = static_cast<const float*>(args.w_scale);
        if (exists) of_row.scale *= scales[row * args.w_groups];
      }
    }
    if constexpr (C::kScaled) {
      const int first = from.token + threadIdx.x % 32;
#pragma unroll
      for (int i = 0; i < C::kTokens; i += 32) {
        const long long token = min(first + i, args.tokens - 1);
        tokens[i / 32] = args.x_scale[token * args.x_scale_step];
      }
    }
  }
  // The scale of this thread's first or second token among 8 of the tile; all lanes ask at a time.
  __device__ __forceinline__ float token(int of_tile) const {
    if constexpr (!C::kScaled) return 1.0f;
    return __shfl_sync(~0u, tokens[of_tile / 32], of_tile % 32 + threadIdx.x % 4 * 2);
  }
};

// Where this thread's sums of one panel of a tile lie in y, and their terms.
template <class C>
struct PanelAt {
  const Terms<C>& terms;
  int panel, out0, token0, expert_end;

  __device__ __forceinline__ PanelAt(const Terms<C>& of_tile, Origin from, int panel0, int panel)
      : terms(of_tile),
        panel(panel),
        out0((panel0 - from.expert_panel + panel) * 64),
        token0(from.token),
        expert_end(from.end) {}
  // One past the last token that may be written. Read again without experts: a register less.
  __device__ __forceinline__ int end(const Args& args) const {
    return C::kExperts ? expert_end : args.tokens;
  }
  __device__ __forceinline__ const RowTerms& of_row(int half) const {
    return terms.rows[panel][half];
  }
  // Where the panel starts in a row of y.
  __device__ __forceinline__ int first() const { return out0 / C::kFold; }
  __device__ __forceinline__ int row(int half) const { return out0 + row_of_panel(half); }
  __device__ __forceinline__ int column() const { return token0 + threadIdx.x % 4 * 2; }
};

// The words of piece `s`, in the order in which stmatrix takes them: 16 tokens x 16 rows a four.
// With a residual they hold its words before.
template <class C>
__device__ __forceinline__ void pack_piece(typename C::Total (&d)[C::kTokens / 2],
                                           const PanelAt<C>& at, int s, u32* words) {
  settle(d, s * Pieces<C>::kSums, Pieces<C>::kSums);
#pragma unroll
  for (int i = 0; i < Pieces<C>::kWords; ++i) {
    const int sum = s * Pieces<C>::kSums + (i / 2 * 4) + i % 2 * 2;
    const int token = s * C::kStoreTokens + i / 2 * 8;
    float low = finish<C>(d[sum], at.of_row(i % 2), at.terms.token(token));
    float high = finish<C>(d[sum + 1], at.of_row(i % 2), at.terms.token(token + 1));
    if constexpr (C::kResidual) {
      low += unpack<C::kOut>(words[i]);
      high += unpack<C::kOut>(words[i] >> 16);
    }
    words[i] = pack<C::kOut>(low, high);
  }
}

// The same where rows of gate and of up meet in one: eight of gate, then eight of up.
template <class C>
__device__ __forceinline__ float gate(const typename C::Total* sums, const PanelAt<C>& at,
                                      float token_scale) {
  float up = static_cast<float>(sums[2]) * at.of_row(1).scale;
  if constexpr (C::kScaled) up *= token_scale;
  return finish<C>(sums[0], at.of_row(0), token_scale) * (up + at.of_row(1).bias);
}

template <class C>
__device__ __forceinline__ void pack_gated_piece(typename C::Total (&d)[C::kTokens / 2],
                                                 const PanelAt<C>& at, int s, u32* words) {
  settle(d, s * Pieces<C>::kSums, Pieces<C>::kSums);
#pragma unroll
  for (int i = 0; i < Pieces<C>::kWords; ++i) {
    const auto* sums = &d[s * Pieces<C>::kSums + i * 4];
    const int token = s * C::kStoreTokens + i * 8;
    words[i] = pack<C::kOut>(gate<C>(sums, at, at.terms.token(token)),
                             gate<C>(sums + 1, at, at.terms.token(token + 1)));
  }
}

// Codes of this thread's two rows side by side, so that a token's 16 rows of a warp are 16 bytes.
// They come out as rows 0, 8, 1, 9 and on; `in_order` mends that.
template <class C>
__device__ __forceinline__ void pack_codes(const Args& args, typename C::Total (&d)[C::kTokens / 2],
                                           const PanelAt<C>& at, int s, u32* words) {
  settle(d, s * Pieces<C>::kSums, Pieces<C>::kSums);
#pragma unroll
  for (int i = 0; i < Pieces<C>::kWords; ++i) {
    words[i] = 0;
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      const auto* sums = &d[s * Pieces<C>::kSums + i * 4 + t];
      const float scale = at.terms.token(s * C::kStoreTokens + i * 8 + t);
      const float first = finish<C>(sums[0], at.of_row(0), scale) * args.out_multiplier;
      const float second = finish<C>(sums[2], at.of_row(1), scale) * args.out_multiplier;
      words[i] |= code_pair<C::kOut>(first, second) << 16 * t;
    }
  }
}

// Codes of gate and up, a byte at a time where send_piece reads them: a warp writes 8 bytes of each
// of 4 tokens, in banks of their own.
template <class C>
__device__ __forceinline__ void put_gated_codes(const Args& args,
                                                typename C::Total (&d)[C::kTokens / 2],
                                                const PanelAt<C>& at, int s, u32 buffer) {
  settle(d, s * Pieces<C>::kSums, Pieces<C>::kSums);
  const u32 lane = threadIdx.x % 32, out = threadIdx.x % 128 / 32 * 8 + lane / 4;
  u32 place[2];
#pragma unroll
  for (u32 t = 0; t < 2; ++t) {
    const u32 row = lane % 4 * 2 + t;
    place[t] = buffer + row * 128 + (out / 16 ^ row) * 16 + out % 16;
  }
#pragma unroll
  for (int i = 0; i < C::kStoreTokens / 8; ++i) {
    const auto* sums = &d[s * Pieces<C>::kSums + i * 4];
    const int token = s * C::kStoreTokens + i * 8;
    const float first = gate<C>(sums, at, at.terms.token(token)) * args.out_multiplier;
    const float second = gate<C>(sums + 1, at, at.terms.token(token + 1)) * args.out_multiplier;
    const u32 codes = code_pair<C::kOut>(first, second);
#pragma unroll
    for (int t = 0; t < 2; ++t) store_shared_u8(place[t] + i * 1024, codes >> 8 * t);
  }
}

__device__ __forceinline__ uint4 in_order(uint4 words) {
  return {__byte_perm(words.x, words.y, 0x6420), __byte_perm(words.z, words.w, 0x6420),
          __byte_perm(words.x, words.y, 0x7531), __byte_perm(words.z, words.w, 0x7531)};
}

// A piece is written to shared memory in the fragments' order, transposed, and read back as rows of
// 64 out-features, which leave as whole lines. The pieces of a warpgroup alternate between its two
// buffers, `turn` counts them: the barrier of a piece also says that the piece before it was read.
// No TMA store: the fence it needs waits for the wgmma in flight.
template <class C>
__device__ __forceinline__ u32 piece_buffer(u32 smem, u32 wg, u32 turn) {
  return smem + Smem<C>::kStoreAt + (wg * 2 + turn % 2) * Smem<C>::kStore;
}

// This lane's address in the 16 tokens x 16 out-features that one instruction writes; in 32 tokens
// where lines are narrow. Tokens are 128 bytes apart, their 16-byte chunks permuted so that no two
// lanes meet in a bank.
template <class C>
__device__ __forceinline__ u32 piece_address(u32 smem, u32 wg, u32 turn) {
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
  if constexpr (Pieces<C>::kNarrow == 2) {
    return piece_buffer<C>(smem, wg, turn) + lane * 128 + (warp ^ lane % 8) * 16;
  }
  return piece_buffer<C>(smem, wg, turn) + (lane / 16 * 8 + lane % 8) * 128 +
         ((2 * warp + lane / 8 % 2) ^ lane % 8) * 16;
}

template <class C>
__device__ __forceinline__ void write_words(const u32* words, u32 address) {
#pragma unroll
  for (int j = 0; j < Pieces<C>::kWords; j += 4) {
    store_transposed_x4<0>(address + j * Pieces<C>::kNarrow * 512, words[j], words[j + 1],
                           words[j + 2], words[j + 3]);
  }
}

// The 16 bytes of y, counted in bytes, and of a piece that this thread moves in round `i`.
template <class C>
struct Line {
  long long at;
  u32 shared;
  bool exists;

  __device__ __forceinline__ Line(const Args& args, u32 buffer, const PanelAt<C>& panel, int s,
                                  int i) {
    constexpr int kChunks = Pieces<C>::kChunks, kBytes = Pieces<C>::kBytes, kOfChunk = 16 / kBytes;
    const int chunk = threadIdx.x % kChunks;
    const int row = threadIdx.x % 128 / kChunks + i * Pieces<C>::kLines;
    const int width = args.out / C::kFold, first = panel.first();
    const int token = panel.token0 + s * C::kStoreTokens + row;
    at = ((long long)token * width + first) * kBytes + chunk * 16;
    exists = token < panel.end(args) && first + chunk * kOfChunk < width;
    int line = row;
    if constexpr (Pieces<C>::kLines > C::kStoreTokens) {
      // Narrow lines are fewer than there are threads for: the others read what is there.
      exists = exists && row < C::kStoreTokens;
      line = row % C::kStoreTokens;
    }
    shared = buffer + line * 128 + (chunk ^ line % 8) * 16;
  }
};

template <class C>
__device__ __forceinline__ void send_piece(const Args& args, u32 smem, u32 wg, u32& turn,
                                           const PanelAt<C>& at, int s) {
  named_barrier<128>(1 + wg);
  const u32 buffer = piece_buffer<C>(smem, wg, turn++);
#pragma unroll
  for (int i = 0; i < Pieces<C>::kRounds; ++i) {
    const Line<C> line(args, buffer, at, s, i);
    uint4 words = load_shared_x4(line.shared);
    if constexpr (kCodes<C> && C::kFold == 1) words = in_order(words);
    if (line.exists) *reinterpret_cast<uint4*>(static_cast<u8*>(args.y) + line.at) = words;
  }
}

// The words of the residual where a piece will be written, by the way back.
template <class C>
__device__ __forceinline__ void fetch_residual(const Args& args, u32 smem, u32 wg, u32 turn,
                                               const PanelAt<C>& at, int s, u32* words) {
  const u8* residual = static_cast<const u8*>(args.residual);
  const u32 buffer = piece_buffer<C>(smem, wg, turn), address = piece_address<C>(smem, wg, turn);
#pragma unroll
  for (int i = 0; i < Pieces<C>::kRounds; ++i) {
    const Line<C> line(args, buffer, at, s, i);
    uint4 found = {0, 0, 0, 0};
    if (line.exists) found = *reinterpret_cast<const uint4*>(residual + line.at);
    store_shared_x4(line.shared, found);
  }
  named_barrier<128>(1 + wg);
#pragma unroll
  for (int j = 0; j < Pieces<C>::kWords; j += 4) load_transposed_x4(words + j, address + j * 512);
}

// Where lines cannot be written: y of 32 bits, rows that are no multiple of 16 bytes, narrow lines
// of less than 32 tokens.
template <class C>
__device__ __forceinline__ void store_panel_directly(const Args& args,
                                                     const typename C::Total (&d)[C::kTokens / 2],
                                                     const PanelAt<C>& at) {
  const int left = at.end(args) - at.column();
#pragma unroll
  for (int half = 0; half < 2 / C::kFold; ++half) {
    const int fewer = at.row(half) < args.out ? left : 0;
    const int width = args.out / C::kFold;
    const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
    const int out = C::kFold == 2 ? at.first() + warp * 8 + lane / 4 : at.row(half);
    long long place = (long long)at.column() * width + out;
#pragma unroll
    for (int i = 0; i < C::kTokens / 4; ++i) {
      const int token = i / 2 * 8 + i % 2;
      const float scale = at.terms.token(token);
      if (token < fewer) {
        const typename C::Total sum = d[i / 2 * 4 + half * 2 + i % 2];
        if constexpr (C::kOut == Type::s32) {
          static_cast<int*>(args.y)[place] = sum;
        } else {
          float v;
          if constexpr (C::kFold == 2) {
            v = gate<C>(&d[i / 2 * 4 + i % 2], at, scale);
          } else {
            v = finish<C>(sum, at.of_row(half), scale);
          }
          if constexpr (C::kResidual) v += load_value<C::kOut>(args.residual, place);
          if constexpr (kCodes<C>) v *= args.out_multiplier;
          store_value<C::kOut>(args.y, place, v);
        }
      }
      place += (i % 2 == 0 ? 1LL : 7LL) * width;
    }
  }
}

template <class C>
__device__ __forceinline__ void store_tile(const Args& args, Sums<C>& d, u32 smem, u32 wg,
                                           u32& turn, Origin from, const Terms<C>& terms) {
  const int panel0 = from.panel + wg * C::kPanels;
#pragma unroll
  for (int p = 0; p < C::kPanels; ++p) {
    const PanelAt<C> at(terms, from, panel0, p);
    if constexpr (C::kDirect) {
      store_panel_directly<C>(args, d[p], at);
    } else {
#pragma unroll
      for (int s = 0; s < Pieces<C>::kOfPanel; ++s) {
        if constexpr (C::kFold == 2 && kCodes<C>) {
          put_gated_codes<C>(args, d[p], at, s, piece_buffer<C>(smem, wg, turn));
          send_piece<C>(args, smem, wg, turn, at, s);
          continue;
        }
        u32 words[Pieces<C>::kWords];
        if constexpr (C::kResidual) {
          fetch_residual<C>(args, smem, wg, turn, at, s, words);
        }
        if constexpr (C::kFold == 2) {
          pack_gated_piece<C>(d[p], at, s, words);
        } else if constexpr (kCodes<C>) {
          pack_codes<C>(args, d[p], at, s, words);
        } else {
          pack_piece<C>(d[p], at, s, words);
        }
        write_words<C>(words, piece_address<C>(smem, wg, turn));
        send_piece<C>(args, smem, wg, turn, at, s);
      }
    }
  }
}

}  // namespace spmm_nm
