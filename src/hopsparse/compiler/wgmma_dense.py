"""The text of dense wgmma instructions, summing in named PTX registers as those of wgmma.py do.

Sources: PTX ISA, "Asynchronous warpgroup level matrix multiply-accumulate instruction".
"""

from __future__ import annotations

from ..errors import ArgumentError
from .wgmma import names_of, panel_member, quoted, read_sums, zero_sums

_TYPES = {"bf16": "f32.bf16.bf16", "f16": "f32.f16.f16"}
_STEPS = 4  # instructions of 16 columns in 128 bytes of a row


def dense_product(kind: str, n: int, panels: int = 1) -> str:
    """Members that multiply 64 x n panels in steps of 64 columns, with sums of their own.

    `Number`, `declare()`, `zero<Panel>()` and `read<Panel>(d)` are as `sparse_product` has them.
    `multiply<Panel>(a, b)` adds a @ b^T for 64 columns: a and b are the shared-memory descriptors
    of its four instructions of 16 columns.

    Args:
        kind: `bf16` or `f16`, of both operands.
        n: Columns, 8 to 256.
        panels: Sets of sums.

    Raises:
        ArgumentError: There is no such instruction.

    Example:
        >>> "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16" in dense_product("bf16", 16)
        True
    """
    if kind not in _TYPES:
        raise ArgumentError(f"wgmma of {kind}", need=f"one of {', '.join(_TYPES)}", hint="bf16")
    if n % 8 or not 8 <= n <= 256:
        raise ArgumentError(
            f"wgmma of {kind} with n = {n}",
            need="a multiple of 8 from 8 to 256",
            hint=f"n = {min(256, max(8, -(-n // 8) * 8))}",
        )
    each = range(panels)
    bodies = [
        ("zero()", [zero_sums("bf16", n, panel) for panel in each]),
        (
            f"multiply(const u64 (&a)[{_STEPS}], const u64 (&b)[{_STEPS}])",
            [_multiply(kind, n, panel) for panel in each],
        ),
        (f"read(float (&d)[{n // 2}])", [read_sums("bf16", n, panel) for panel in each]),
    ]
    return f"""
  using Number = float;

  static __device__ __forceinline__ void declare() {{
    asm volatile(".reg .f32 sum<{panels * n // 2}>;");
  }}
""" + "".join(panel_member(head, texts) for head, texts in bodies)


def _multiply(kind: str, n: int, panel: int) -> str:
    instructions = "\n".join(
        f'''          "wgmma.mma_async.sync.aligned.m64n{n}k16.{_TYPES[kind]} {{"
{quoted(names_of(n, panel), ", ")}
          "}}, %{step}, %{_STEPS + step}, add, 1, 1, 0, 0;\\n"'''
        for step in range(_STEPS)
    )
    operands = ", ".join(f'"l"({side}[{step}])' for side in "ab" for step in range(_STEPS))
    return f"""      asm volatile(
          "{{.reg .pred add;\\n"
          "setp.ne.b32 add, 1, 0;\\n"
{instructions}
          "}}" ::{operands} : "memory");
"""
