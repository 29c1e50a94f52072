// A tile of 16 x 16 of bits and values (packed.py) in the registers that tensor cores multiply.
#pragma once
#include "ptx/base.cuh"

namespace spmm_csr_tiles {

// Words of a unit, prefixes of a unit; words of four lanes for each 16 columns.
constexpr u32 kUnitTiles = 16, kTileWords = 8;
constexpr u32 kWordBytes = kUnitTiles * kTileWords * 4, kPrefixBytes = kUnitTiles * kTileWords * 2;

// The eight numbers of a lane in a tile, as registers of the tensor cores: where a bit is set, the
// next of its values. As text, because the compiler makes three instructions of a step that is one.
__device__ __forceinline__ void unpack_tile(u32 (&w)[4], u32 values, u32 word, u32 prefix,
                                            u32 lane) {
  const u32 shift = lane % 4 * 8;
  u32 next = values + 2 * (prefix + __popc(word & ((1u << shift) - 1)));
#define HOPSPARSE_TAKE(entry, bit)             \
  "and.b32 bit, %5, " bit                      \
  ";\n"                                        \
  "setp.ne.u32 is_set" entry                   \
  ", bit, 0;\n"                                \
  "mov.u32 value" entry                        \
  ", 0;\n"                                     \
  "@is_set" entry " ld.shared.u16 value" entry \
  ", [%4];\n"                                  \
  "@is_set" entry " add.u32 %4, %4, 2;\n"
  asm volatile(
      "{.reg .pred is_set<8>;\n"
      ".reg .u32 bit, value<8>;\n"
      HOPSPARSE_TAKE("0", "1")
      HOPSPARSE_TAKE("1", "2")
      HOPSPARSE_TAKE("2", "4")
      HOPSPARSE_TAKE("3", "8")
      HOPSPARSE_TAKE("4", "16")
      HOPSPARSE_TAKE("5", "32")
      HOPSPARSE_TAKE("6", "64")
      HOPSPARSE_TAKE("7", "128")
      "prmt.b32 %0, value0, value1, 0x5410;\n"
      "prmt.b32 %1, value2, value3, 0x5410;\n"
      "prmt.b32 %2, value4, value5, 0x5410;\n"
      "prmt.b32 %3, value6, value7, 0x5410;}"
      : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3]), "+r"(next)
      : "r"(word >> shift));
#undef HOPSPARSE_TAKE
}

}  // namespace spmm_csr_tiles
