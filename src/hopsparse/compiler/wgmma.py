"""The text of wgmma instructions: one wrapper a shape, because its operands are its accumulators.

Sources: PTX ISA, "Asynchronous warpgroup level matrix multiply-accumulate for sparse matrices".
"""

from __future__ import annotations

from ..errors import ArgumentError

_UNIT = 64  # columns of k that share an index word
#: Logical k of one sparse instruction, and what follows the scale-d predicate: two scales of 1,
#: then, for 16-bit types, two "not transposed".
_KINDS = {
    "bf16": (32, "f32.bf16.bf16", "float", ", 1, 1, 0, 0"),
    "f16": (32, "f32.f16.f16", "float", ", 1, 1, 0, 0"),
    "e4m3": (64, "f32.e4m3.e4m3", "float", ", 1, 1"),
    "s8": (64, "s32.s8.s8", "int", ""),
}


def sparse_product(kind: str, n: int) -> str:
    """A static member `multiply(d, a, b, e)` of 64 x n and one unit of 64 columns: d += a @ b^T.

    a and b are the shared-memory descriptors of each instruction of the unit, two for 16-bit types
    and one for 8-bit ones, a the kept values of a 2:4 matrix, e its index word. They are one asm
    statement: each costs the compiler as much as it has accumulators.

    Args:
        kind: `bf16`, `f16`, `e4m3` or `s8`, of both operands.
        n: Columns, 8 to 256.

    Raises:
        ArgumentError: There is no such instruction.

    Example:
        >>> "wgmma.mma_async.sp.sync.aligned.m64n16k32.f32.bf16.bf16" in sparse_product("bf16", 16)
        True
    """
    if kind not in _KINDS:
        raise ArgumentError(f"wgmma.sp of {kind}", need=f"one of {', '.join(_KINDS)}", hint="bf16")
    if n % 8 or not 8 <= n <= 256 or (kind == "s8" and n > 32 and n % 16):
        raise ArgumentError(
            f"wgmma.sp of {kind} with n = {n}",
            need="a multiple of 8 (for s8 beyond 32: of 16) from 8 to 256",
            hint=f"n = {min(256, max(16, -(-n // 16) * 16))}",
        )
    k, types, sums, tail = _KINDS[kind]
    count, steps = n // 2, _UNIT // k
    letter = "f" if sums == "float" else "r"
    outs = _rows([f'"+{letter}"(d[{i}])' for i in range(count)], "        ")
    names = _rows([f"%{i}" for i in range(count)], "        ", quoted=True)
    # The selector says which lanes' words an instruction reads: 0, lanes 0 and 1 of every four.
    instructions = "\n".join(
        f"""        "wgmma.mma_async.sp.sync.aligned.m64n{n}k{k}.{types} {{"
{names}
        "}}, %{count + 1 + step}, %{count + 1 + steps + step}, %{count}, {step}, add{tail};\\n\""""
        for step in range(steps)
    )
    descriptors = ", ".join(f'"l"({side}[{step}])' for side in "ab" for step in range(steps))
    return f"""
  static __device__ __forceinline__ void multiply(
      {sums} (&d)[{count}], const u64 (&a)[{steps}], const u64 (&b)[{steps}], u32 e) {{
    asm volatile(
        "{{.reg .pred add;\\n"
        "setp.ne.b32 add, 1, 0;\\n"
{instructions}
        "}}"
        :
{outs}
        : "r"(e), {descriptors});
  }}
"""


def _rows(items: list[str], indent: str, *, quoted: bool = False) -> str:
    """The items with commas, eight a line."""
    lines = [", ".join(items[i : i + 8]) for i in range(0, len(items), 8)]
    if quoted:
        last = len(lines) - 1
        return "\n".join(
            f'{indent}"{line}{"" if i == last else ", "}"' for i, line in enumerate(lines)
        )
    return ",\n".join(indent + line for line in lines)
