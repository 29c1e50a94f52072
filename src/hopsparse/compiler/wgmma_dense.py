"""The text of dense wgmma instructions, summing in named PTX registers as those of wgmma.py do.

Sources: PTX ISA, "Asynchronous warpgroup level matrix multiply-accumulate instruction".
"""

from __future__ import annotations

from ..errors import ArgumentError
from .wgmma import names_of, panel_member, quoted, read_sums, zero_sums

_TYPES = {"bf16": "f32.bf16.bf16", "f16": "f32.f16.f16"}
_STEPS = 4  # instructions of 16 columns in 128 bytes of a row


def dense_product(kind: str, n: int, panels: int = 1, *, registers: bool = False) -> str:
    """Members that multiply 64 x n panels in steps of 64 columns, with sums of their own.

    `Number`, `declare()`, `zero<Panel>()` and `read<Panel>(d)` are as `sparse_product` has them.
    `multiply<Panel>(a, b)` adds a @ b^T for 64 columns: a and b are the shared-memory descriptors
    of its four instructions of 16 columns.

    Args:
        kind: `bf16` or `f16`, of both operands.
        n: Columns, 8 to 256.
        panels: Sets of sums.
        registers: Whether a is registers of this thread, four for each instruction.

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
    a = f"const u32 (&a)[{_STEPS}][4]" if registers else f"const u64 (&a)[{_STEPS}]"
    text = _multiply_registers if registers else _multiply
    bodies = [
        ("zero()", [zero_sums("bf16", n, panel) for panel in each]),
        (
            f"multiply({a}, const u64 (&b)[{_STEPS}])",
            [text(kind, n, panel) for panel in each],
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
    instructions = [
        _instruction(kind, n, panel, f"%{step}, %{_STEPS + step}", "0, 0") for step in range(_STEPS)
    ]
    return _adding(
        instructions, [f'"l"({side}[{step}])' for side in "ab" for step in range(_STEPS)]
    )


def _multiply_registers(kind: str, n: int, panel: int) -> str:
    instructions, operands = [], []
    for step in range(_STEPS):
        a = ", ".join(f"%{4 * step + i}" for i in range(4))
        # A in registers is not transposed: there is no word for it.
        instructions.append(_instruction(kind, n, panel, f"{{{a}}}, %{4 * _STEPS + step}", "0"))
        operands += [f'"r"(a[{step}][{i}])' for i in range(4)]
    return _adding(instructions, [*operands, *(f'"l"(b[{step}])' for step in range(_STEPS))])


def _instruction(kind: str, n: int, panel: int, operands: str, tail: str) -> str:
    return f'''          "wgmma.mma_async.sync.aligned.m64n{n}k16.{_TYPES[kind]} {{"
{quoted(names_of(n, panel), ", ")}
          "}}, {operands}, add, 1, 1, {tail};\\n"'''


def _adding(instructions: list[str], operands: list[str]) -> str:
    """A statement of instructions that add to the sums there are."""
    text = "\n".join(instructions)
    return f"""      asm volatile(
          "{{.reg .pred add;\\n"
          "setp.ne.b32 add, 1, 0;\\n"
{text}
          "}}" ::{", ".join(operands)} : "memory");
"""
