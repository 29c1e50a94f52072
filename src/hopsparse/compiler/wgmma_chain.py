"""The text of two dense wgmma products of which the first one's sums become operands of the second.

Attention needs its sums in C++: scores turn into weights, and outputs are scaled between products.
So these take arrays, not the named registers of wgmma.py. Each product is one statement, whose
descriptors are counted up inside: ptxas then sees nothing between its instructions.

Sources: PTX ISA, "Asynchronous warpgroup level matrix multiply-accumulate instruction", and its
"Matrix Descriptor" for operands whose rows are not along k.
"""

from __future__ import annotations

from ..errors import ArgumentError
from .wgmma import quoted

_TYPES = {"bf16": "f32.bf16.bf16", "f16": "f32.f16.f16"}
_K = 16  # of one instruction
_ROW_BYTES = 128  # of a swizzled row: 64 columns
_UNIT = 16  # bytes that a descriptor counts in
_ROWS = 64  # of the first product's a


def chained_products(kind: str, keys: int, dim: int) -> str:
    """Members `score` and `weigh`, for 64 queries, `keys` keys and heads of `dim`.

    `score(s, q, k)` sets s = q @ k^T: q [64, dim] and k [keys, dim] are descriptors of swizzled
    shared memory, in panels of 64 columns that lie behind each other. `weigh(o, p, v)` adds p @ v
    to o: p are the 16-bit weights of this thread, and v [keys, dim] lies as k does, read along its
    columns. Sums and weights are where wgmma has them: s[4 j + 2 i + c] is row lane / 4 + 8 i and
    column 8 j + 2 (lane % 4) + c of the warp's 16 rows, and p[i] holds s[2 i] and s[2 i + 1].

    Args:
        kind: `bf16` or `f16`.
        keys: A multiple of 16 up to 256.
        dim: 64 or 128.

    Raises:
        ArgumentError: There are no such instructions.

    Example:
        >>> "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16" in chained_products("f16", 128, 64)
        True
    """
    if kind not in _TYPES or keys % _K or not _K <= keys <= 256 or dim not in (64, 128):
        raise ArgumentError(
            f"products of {kind} for {keys} keys of {dim}",
            need=f"one of {', '.join(_TYPES)}, 16 to 256 keys in steps of 16, 64 or 128 dimensions",
            hint='chained_products("bf16", 128, 128)',
        )
    return _score(kind, keys, dim) + _weigh(kind, keys, dim)


def _score(kind: str, keys: int, dim: int) -> str:
    count = keys // 2
    sums = quoted([f"%{i}" for i in range(count)], ", ")
    steps = []
    for step in range(dim // _K):
        panel, inside = divmod(2 * _K * step, _ROW_BYTES)
        a, b = ((panel * rows * _ROW_BYTES + inside) // _UNIT for rows in (_ROWS, keys))
        steps.append(f'''          "add.s64 a, %{count}, {a};\\nadd.s64 b, %{count + 1}, {b};\\n"
          "wgmma.mma_async.sync.aligned.m64n{keys}k16.{_TYPES[kind]} {{"
{sums}
          "}}, a, b, {"first" if step == 0 else "add"}, 1, 1, 0, 0;\\n"''')
    return f"""
  static __device__ __forceinline__ void score(float (&s)[{count}], u64 q, u64 k) {{
    asm volatile(
          "{{.reg .pred first, add;\\n.reg .b64 a, b;\\n"
          "setp.ne.b32 first, 0, 0;\\nsetp.ne.b32 add, 1, 0;\\n"
{chr(10).join(steps)}
          "}}"
          :
{_operands("=f", "s", count)}
          : "l"(q), "l"(k) : "memory");
  }}
"""


def _weigh(kind: str, keys: int, dim: int) -> str:
    count, words = dim // 2, keys // 4
    sums = quoted([f"%{i}" for i in range(count)], ", ")
    steps = []
    for step in range(keys // _K):
        a = ", ".join(f"%{count + 4 * step + i}" for i in range(4))
        b = step * _K * _ROW_BYTES // _UNIT
        steps.append(f'''          "add.s64 b, %{count + words}, {b};\\n"
          "wgmma.mma_async.sync.aligned.m64n{dim}k16.{_TYPES[kind]} {{"
{sums}
          "}}, {{{a}}}, b, add, 1, 1, 1;\\n"''')
    return f"""
  static __device__ __forceinline__ void weigh(float (&o)[{count}], const u32 (&p)[{words}],
                                               u64 v) {{
    asm volatile(
          "{{.reg .pred add;\\n.reg .b64 b;\\n"
          "setp.ne.b32 add, 1, 0;\\n"
{chr(10).join(steps)}
          "}}"
          :
{_operands("+f", "o", count)}
          :
{_operands("r", "p", words)},
          "l"(v) : "memory");
  }}
"""


def _operands(constraint: str, name: str, count: int) -> str:
    each = [f'"{constraint}"({name}[{i}])' for i in range(count)]
    return ",\n".join("          " + ", ".join(each[i : i + 8]) for i in range(0, count, 8))
