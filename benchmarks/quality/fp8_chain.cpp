/* fp8_sums of src/hopsparse/measure/fp8.py for one model of 135M weights in minutes of one core.

   A chain of instructions of 32 kept products each, from a sum of zero. Lanes are tokens, so that
   the columns that a row keeps need no gather. bits.py compiles it, and compares it with fp8_sums
   bit for bit before it uses it.

   c++ -O3 -march=native -shared -fPIC fp8_chain.cpp -o fp8_chain.so */

#include <cstdint>

#define KEPT 32 /* products an instruction adds */
#define LANES 8
#define VECTORS 4
#define TOKENS (LANES * VECTORS)
#define FRACTION 13
#define NOTHING (-100) /* exponent of zero */

typedef float floats __attribute__((vector_size(4 * LANES)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));

static inline ints larger(ints a, ints b) { return a > b ? a : b; }

/* values, exponents, columns: [instructions, rows, 32], exponents of zeros 2 * NOTHING.
   x, x_exponents: [blocks, k, 32 tokens]. sums: [blocks, rows, 32 tokens]. */
extern "C" void fp8_chain(const float* values, const int32_t* exponents, const int32_t* columns,
                          long rows, long first, long last, const float* x,
                          const int32_t* x_exponents, long k, long blocks, float* sums) {
  for (long b = 0; b < blocks; ++b, x += k * TOKENS, x_exponents += k * TOKENS) {
    for (long i = first; i < last; ++i) {
      for (long r = 0; r < rows; ++r) {
        const long at = (i * rows + r) * KEPT;
        floats* sum = (floats*)(sums + (b * rows + r) * TOKENS);
        ints top[VECTORS], total[VECTORS];
        floats old[VECTORS], scale[VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; ++v) {
          old[v] = i == first ? floats{} : sum[v];
          const ints bits = (ints)old[v];
          const ints exponent = ((bits >> 23) & 255) - 127;
          top[v] = larger(exponent, ints{} + NOTHING); /* zero: -127 */
        }
        for (int j = 0; j < KEPT; ++j) {
          const ints* e = (const ints*)(x_exponents + columns[at + j] * TOKENS);
#pragma GCC unroll 4
          for (int v = 0; v < VECTORS; ++v) top[v] = larger(top[v], e[v] + exponents[at + j]);
        }
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; ++v) {
          scale[v] = (floats)((FRACTION + 127 - top[v]) << 23);
          total[v] = __builtin_convertvector(old[v] * scale[v], ints);
        }
        for (int j = 0; j < KEPT; ++j) {
          const floats* from = (const floats*)(x + columns[at + j] * TOKENS);
#pragma GCC unroll 4
          for (int v = 0; v < VECTORS; ++v) {
            const floats product = from[v] * values[at + j];
            total[v] += __builtin_convertvector(product * scale[v], ints);
          }
        }
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; ++v) {
          const floats back = (floats)((top[v] - FRACTION + 127) << 23);
          const ints bits = (ints)(__builtin_convertvector(total[v], floats) * back);
          sum[v] = (floats)(bits & ~((1 << (23 - FRACTION)) - 1));
        }
      }
    }
  }
}
