// What the kernels over a CSR matrix share: a span of its entries, streamed by a few lanes.
//
// A team of kLanes lanes has a span: whole rows, or a part of one long row (schedule.py cuts them).
// It goes through the entries kBatch at a time, across the ends of rows, so that kBatch gathers are
// in flight however short rows are. Columns and values come a batch ahead, one to a lane, and go
// round by shuffles. Teams of a warp end at different times: trips of the loop are those of the
// longest, as shuffles need all lanes.
#pragma once
#include "epilogue/value.cuh"
#include "ptx/base.cuh"

namespace spmm_csr {

using i64 = long long;

enum : u32 { kAll = 0xFFFFFFFF, kNever = 0xFFFFFFFF };

// Entries from `entry` to that of the next span. Whole rows, from `row` to that of the next span,
// where `slot` is negative; else a part of `row`, whose sums go to that slot.
struct alignas(16) Span {
  i64 entry;
  u32 row;
  int slot;
};

// A row that is cut: its sums are in slots first to first + count.
struct alignas(16) Cut {
  u32 row, first, count, unused;
};

struct Args {
  const u8* x;         // [k, features]: multiplied, or the side that columns choose
  const u8* u;         // [rows, features]: the other side of sddmm
  const u8* values;    // of entries; sddmm writes y instead
  const u8* bias;      // of rows, or none
  const u8* columns;   // of entries
  const u8* pointers;  // where rows start
  const Span* spans;   // one more than there are
  const Cut* cuts;
  float* partial;          // [slots, features]
  u8* y;                   // [rows, features], or [entries]
  u32 x_stride, u_stride;  // bytes of a row
  u32 rows, features, span_count, unused;
};

template <class C>
struct Facts {
  static constexpr int kBytes = C::kType == Type::f32 ? 4 : 2;
  static constexpr int kWide = C::kVector ? 16 / kBytes : 1;  // features of a lane
  static constexpr int kWords = C::kVector ? 4 : 1;
  static constexpr int kTile = C::kLanes * kWide;  // features of a team
  static constexpr int kTeams = C::kThreads / C::kLanes;
  static constexpr int kHeld = C::kBatch > C::kLanes ? C::kBatch / C::kLanes : 1;
};

// ---- features ------------------------------------------------------------------------------

// Neighbouring features of one row, as they are stored.
template <class C>
struct Features {
  u32 word[Facts<C>::kWords];
};

// Zeros where not inside. Not a branch, so that all loads of a batch start at once.
template <class C>
__device__ __forceinline__ Features<C> load_features(bool inside, const u8* from) {
  Features<C> f;
  if constexpr (C::kVector) {
    asm("{.reg .pred inside;\n"
        "setp.ne.u32 inside, %5, 0;\n"
        "mov.b32 %0, 0;\nmov.b32 %1, 0;\nmov.b32 %2, 0;\nmov.b32 %3, 0;\n"
        "@inside ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4];}"
        : "=&r"(f.word[0]), "=&r"(f.word[1]), "=&r"(f.word[2]), "=&r"(f.word[3])
        : "l"(from), "r"(u32(inside)));
  } else if constexpr (Facts<C>::kBytes == 4) {
    asm("{.reg .pred inside;\n"
        "setp.ne.u32 inside, %2, 0;\n"
        "mov.b32 %0, 0;\n"
        "@inside ld.global.nc.b32 %0, [%1];}"
        : "=&r"(f.word[0])
        : "l"(from), "r"(u32(inside)));
  } else {
    u16 half;
    asm("{.reg .pred inside;\n"
        "setp.ne.u32 inside, %2, 0;\n"
        "mov.b16 %0, 0;\n"
        "@inside ld.global.nc.b16 %0, [%1];}"
        : "=&h"(half)
        : "l"(from), "r"(u32(inside)));
    f.word[0] = half;
  }
  return f;
}

// Feature i of them.
template <class C>
__device__ __forceinline__ float feature(const Features<C>& f, int i) {
  if constexpr (C::kType == Type::f32) return __uint_as_float(f.word[i]);
  const u32 word = f.word[i / 2];
  if constexpr (C::kType == Type::bf16) {
    return __uint_as_float(i % 2 == 0 ? word << 16 : word & 0xFFFF0000);
  }
  return unpack<C::kType>(i % 2 == 0 ? word : word >> 16);
}

// ---- entries -------------------------------------------------------------------------------

// What a lane has of a batch: entries lane, lane + kLanes and on.
template <class C>
struct Held {
  u32 column[Facts<C>::kHeld];
  float value[Facts<C>::kHeld];
};

// What a team works on, counted from the first entry of its span.
template <class C>
struct Work {
  i64 entry;
  u32 count;          // entries
  u32 row, last;      // whole rows from row to last
  int slot;           // negative for whole rows
  const u8* columns;  // of the first entry
  const u8* values;

  __device__ __forceinline__ Work(const Args& a, u32 team) {
    Span here{}, next{};
    here.slot = -1;
    if (team < a.span_count) here = a.spans[team], next = a.spans[team + 1];
    entry = here.entry, count = u32(next.entry - here.entry);
    row = here.row, last = next.row, slot = here.slot;
    columns = a.columns + entry * C::kIndexBytes;
    values = a.values + entry * Facts<C>::kBytes;
  }

  // Columns are below 2^31: of eight bytes the low four.
  template <bool WithValues>
  __device__ __forceinline__ Held<C> hold(u32 first, u32 lane) const {
    Held<C> held;
#pragma unroll
    for (int i = 0; i < Facts<C>::kHeld; ++i) {
      const u32 mine = lane + i * C::kLanes, at = first + mine;
      const bool inside = mine < C::kBatch && at < count;
      held.column[i] = 0, held.value[i] = 0;
      if (inside) {
        held.column[i] = *reinterpret_cast<const u32*>(columns + u64(at) * C::kIndexBytes);
        if constexpr (WithValues) held.value[i] = load_value<C::kType>(values, at);
      }
    }
    return held;
  }
};

// Entry u of a batch, from the lane that has it.
template <class C>
__device__ __forceinline__ u32 column_of(const Held<C>& held, int u) {
  return __shfl_sync(kAll, held.column[u / C::kLanes], u % C::kLanes, C::kLanes);
}
template <class C>
__device__ __forceinline__ float value_of(const Held<C>& held, int u) {
  return __shfl_sync(kAll, held.value[u / C::kLanes], u % C::kLanes, C::kLanes);
}

// ---- rows ----------------------------------------------------------------------------------

// The row that entries belong to now, and where it and the next one end, from the first entry of
// the span. Ends are read a row ahead.
template <class C>
struct Row {
  u32 row, end, next_end;

  __device__ __forceinline__ Row(const Args& a, const Work<C>& w) : row(w.row) {
    end = next_end = kNever;
    if (w.slot < 0 && w.row < w.last) {
      end = end_of(a, w, row), next_end = end_of(a, w, row + 1);
    }
  }

  __device__ __forceinline__ u32 end_of(const Args& a, const Work<C>& w, u32 of) const {
    const u64 at = min(of + 1, a.rows);
    if constexpr (C::kPointerBytes == 8) {
      return u32(reinterpret_cast<const i64*>(a.pointers)[at] - w.entry);
    }
    return u32(reinterpret_cast<const int*>(a.pointers)[at] - w.entry);
  }

  __device__ __forceinline__ void advance(const Args& a, const Work<C>& w) {
    ++row, end = next_end, next_end = end_of(a, w, row + 1);
  }
};

}  // namespace spmm_csr
