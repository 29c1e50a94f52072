"""The text of wgmma instructions, and of the registers that they sum in.

An instruction has as many operands as accumulators, up to 128. Handed through C++ variables they
are what half of a compilation goes into: every statement, and every loop around it, has all of them
as values. So they are PTX registers with names, `sum0` to `sumN`, which no C++ sees until they are
read: compiling takes 10 to 24 % less.

Sources: PTX ISA, "Asynchronous warpgroup level matrix multiply-accumulate for sparse matrices".
"""

from __future__ import annotations

from ..errors import ArgumentError

#: Logical k of one sparse instruction, its types, those of its sums, and what follows the scale-d
#: predicate: two scales of 1, then, for 16-bit types, two "not transposed".
_KINDS = {
    "bf16": (32, "f32.bf16.bf16", "f32", ", 1, 1, 0, 0"),
    "f16": (32, "f32.f16.f16", "f32", ", 1, 1, 0, 0"),
    "e4m3": (64, "f32.e4m3.e4m3", "f32", ", 1, 1"),
    "e4m3.e5m2": (64, "f32.e4m3.e5m2", "f32", ", 1, 1"),
    "s8": (64, "s32.s8.s8", "s32", ""),
}
_STEPS = 2  # instructions in a unit: 128 bytes of a row of b
_WORD = 64  # columns of k that one index word serves
_C = {"f32": ("float", "f", "0f00000000"), "s32": ("int", "r", "0")}


def sparse_product(kind: str, n: int, panels: int = 1, *, registers: bool = False) -> str:
    """Members that multiply 64 x n panels in units of 128 bytes of k, with sums of their own.

    `Number` is what a sum is. `declare()`, once, in the function that the others are inlined into:
    the registers. `zero<Panel>()` clears those of a panel. `multiply<Panel>(a, b, e)` adds a @ b^T
    for one unit, 64 columns of 16-bit types or 128 of 8-bit ones: a and b are the shared-memory
    descriptors of its two instructions, a the kept values of a 2:4 matrix, e its index words, one
    for 64 columns. `read<Panel>(d)` gives the n / 2 sums of this thread, after the wait for what is
    in flight.

    Args:
        kind: `bf16`, `f16`, `e4m3` or `s8`, of both operands; `e4m3.e5m2`, of a and of b.
        n: Columns, 8 to 256.
        panels: Sets of sums.
        registers: Whether a is four registers of this thread. Then `multiply<2 * Panel + step>(a,
            b, e)` is one of the two instructions, so that what the second one reads can be made
            while the first is in flight.

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
    _, _, sums, _ = _KINDS[kind]
    number, words = _C[sums][0], words_of(kind)
    if registers:
        head = "multiply(const u32 (&a)[4], u64 b, u32 e)"
        each = [(panel, step) for panel in range(panels) for step in range(_STEPS)]
        texts = [_multiply_registers(kind, n, panel, step) for panel, step in each]
    else:
        head = (
            f"multiply(const u64 (&a)[{_STEPS}], const u64 (&b)[{_STEPS}], const u32 (&e)[{words}])"
        )
        texts = [_multiply(kind, n, panel) for panel in range(panels)]
    bodies = [
        ("zero()", [zero_sums(kind, n, panel) for panel in range(panels)]),
        (head, texts),
        (f"read({number} (&d)[{n // 2}])", [read_sums(kind, n, panel) for panel in range(panels)]),
    ]
    return f"""
  using Number = {number};

  static __device__ __forceinline__ void declare() {{
    asm volatile(".reg .{sums} sum<{panels * n // 2}>;");
  }}
""" + "".join(panel_member(head, texts) for head, texts in bodies)


def words_of(kind: str) -> int:
    """Index words a thread of one unit.

    Example:
        >>> words_of("bf16"), words_of("e4m3")
        (1, 2)
    """
    return _STEPS * _KINDS[kind][0] // _WORD


def panel_member(head: str, texts: list[str]) -> str:
    """A template of the panel, whose body is one of the texts."""
    cases = "".join(
        f"    if constexpr (Panel == {panel}) {{\n{text}    }}\n"
        for panel, text in enumerate(texts)
    )
    return f"""
  template <int Panel>
  static __device__ __forceinline__ void {head} {{
{cases}  }}
"""


def zero_sums(kind: str, n: int, panel: int) -> str:
    """A statement that clears the sums of a panel; what they are is that of `kind`."""
    sums = _KINDS[kind][2]
    moves = [f"mov.{sums} {name}, {_C[sums][2]};" for name in names_of(n, panel)]
    return f'      asm volatile(\n{quoted(moves, " ")} ::: "memory");\n'


def _multiply(kind: str, n: int, panel: int) -> str:
    words = words_of(kind)
    first_e = 2 * _STEPS
    instructions = "\n".join(
        _instruction(kind, n, panel, step, f"%{step}", _STEPS + step, first_e + step % words)
        for step in range(_STEPS)
    )
    operands = [f'"l"(a[{step}])' for step in range(_STEPS)]
    operands += [f'"l"(b[{step}])' for step in range(_STEPS)]
    operands += [f'"r"(e[{word}])' for word in range(words)]
    return _adding(instructions, operands)


def _multiply_registers(kind: str, n: int, panel: int, step: int) -> str:
    operands = [*(f'"r"(a[{i}])' for i in range(4)), '"l"(b)', '"r"(e)']
    return _adding(_instruction(kind, n, panel, step, "{%0, %1, %2, %3}", 4, 5), operands)


def _instruction(kind: str, n: int, panel: int, step: int, a: str, b: int, e: int) -> str:
    k, types, _, tail = _KINDS[kind]
    if a.startswith("{") and tail.endswith(", 0, 0"):
        tail = tail[:-3]  # a in registers is not transposed
    # The selector says which lanes' words an instruction reads: in 16 bits, 0 for lanes 0 and 1 of
    # every four, 1 for the others. In 8 bits it reads all of them.
    selector = step if words_of(kind) == 1 else 0
    return f'''          "wgmma.mma_async.sp.sync.aligned.m64n{n}k{k}.{types} {{"
{quoted(names_of(n, panel), ", ")}
          "}}, {a}, %{b}, "
          "%{e}, {selector}, add{tail};\\n"'''


def _adding(instructions: str, operands: list[str]) -> str:
    """A statement of instructions that add to the sums there are."""
    return f"""      asm volatile(
          "{{.reg .pred add;\\n"
          "setp.ne.b32 add, 1, 0;\\n"
{instructions}
          "}}" ::{", ".join(operands)} : "memory");
"""


def read_sums(kind: str, n: int, panel: int) -> str:
    """A statement that copies the sums of a panel into `d`."""
    sums = _KINDS[kind][2]
    names = names_of(n, panel)
    moves = [f"mov.{sums} %{i}, {name};" for i, name in enumerate(names)]
    letter = _C[sums][1]
    outs = [f'"={letter}"(d[{i}])' for i in range(len(names))]
    lines = ",\n".join("          " + ", ".join(outs[i : i + 8]) for i in range(0, len(outs), 8))
    return f"""      asm volatile(
{quoted(moves, " ")}
          :
{lines}
          :: "memory");
"""


def names_of(n: int, panel: int) -> list[str]:
    """The registers of a panel's sums."""
    return [f"sum{i}" for i in range(panel * n // 2, (panel + 1) * n // 2)]


def quoted(items: list[str], between: str) -> str:
    """The items, eight to a C++ string a line."""
    lines = [between.join(items[i : i + 8]) for i in range(0, len(items), 8)]
    return "\n".join(
        f'          "{line}{"" if i == len(lines) - 1 else between}"'
        for i, line in enumerate(lines)
    )
