"""What a compiler makes of a unit: the machine code of one kernel, and what ptxas said of it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

#: How logs call the text that is compiled.
UNIT_NAME = "kernel.cu"
_FUNCTION = re.compile(
    r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
)


@dataclass(frozen=True)
class Cubin:
    """A compiled kernel.

    Attributes:
        image: The cubin, an ELF file.
        entry: Name of the kernel in it.
        registers: Registers of a thread at launch.
        stack_bytes: Local memory of a thread, of the kernel and what it calls.
        spill_bytes: Bytes that are spilled to it and loaded back.
        static_smem_bytes: Shared memory that is declared, not asked for at launch.
        args_bytes: Size of its arguments.
        advice: The C75xx lines of ptxas: wgmma that does not run as it is written.
        warnings: Lines of the log that warn.
        has_grid_wait: Whether it executes griddepcontrol.wait, so that it may start early.
        nvrtc: The compiler, as `nvrtc_version` names it.
        compile_ms: How long it took; not compared.
    """

    image: bytes = field(repr=False)
    entry: str
    registers: int
    stack_bytes: int
    spill_bytes: int
    static_smem_bytes: int
    args_bytes: int
    advice: tuple[str, ...]
    warnings: tuple[str, ...]
    has_grid_wait: bool
    nvrtc: str
    compile_ms: float = field(compare=False)


@dataclass(frozen=True)
class Usage:
    """What `ptxas -v` says of one kernel; the fields are those of `Cubin`."""

    registers: int
    stack_bytes: int
    spill_bytes: int
    static_smem_bytes: int


def usage_of(log: str, entry: str) -> Usage | None:
    """Read the part of a log that is about `entry`; None if there is no such kernel.

    Example:
        >>> usage_of('''ptxas info    : Compiling entry function 'entry' for 'sm_90a'
        ... ptxas info    : Function properties for entry
        ... ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
        ... ptxas info    : Used 92 registers, used 1 barriers, 1024 bytes smem''', "entry")
        Usage(registers=92, stack_bytes=0, spill_bytes=0, static_smem_bytes=1024)
    """
    _, _, rest = log.partition(f"Compiling entry function '{entry}' for ")
    part, _, _ = rest.partition("Compiling entry function ")
    used = re.search(r"Used (\d+) registers.*", part)
    if used is None:
        return None
    # The first function is the kernel; those behind it are called, and their frames add up.
    functions = [tuple(map(int, found)) for found in _FUNCTION.findall(part)]
    cumulative = re.search(r"(\d+) bytes cumulative stack size", used[0])
    static = re.search(r"(\d+) bytes smem", used[0])
    return Usage(
        registers=int(used[1]),
        stack_bytes=int(cumulative[1]) if cumulative else sum(stack for stack, _, _ in functions),
        spill_bytes=sum(stores + loads for _, stores, loads in functions),
        static_smem_bytes=int(static[1]) if static else 0,
    )


def args_bytes_of(ptx: str, entry: str) -> int:
    """Size of the arguments of a kernel, without padding between them: ours have one.

    Example:
        >>> args_bytes_of(".visible .entry entry(.param .align 64 .b8 entry_param_0[192])", "entry")
        192
    """
    declared = re.search(rf"\.entry {re.escape(entry)}\(([^)]*)\)", ptx)
    each = re.findall(r"\.[bsuf](\d+)[^,\[]*(?:\[(\d+)\])?", declared[1] if declared else "")
    return sum(int(bits) // 8 * int(count or 1) for bits, count in each)


def advice_in(log: str) -> tuple[str, ...]:
    """The lines with a C75xx number, each once."""
    return _lines(log, r"\(C75\d\d\)")


def warnings_in(log: str) -> tuple[str, ...]:
    """The lines that warn, each once."""
    return _lines(log, r"\bwarning\s*[:#]")


def errors_in(log: str, text: str) -> tuple[str, ...]:
    """The lines that name an error, each once, with the line of the text that they are about."""
    source = text.splitlines()
    found = []
    for line in _lines(log, r"\berror\b"):
        place = re.match(rf"{re.escape(UNIT_NAME)}\((\d+)\)", line)
        quoted = f" in `{source[int(place[1]) - 1].strip():.100}`" if place else ""
        found.append(line + quoted)
    return tuple(found)


def _lines(log: str, pattern: str) -> tuple[str, ...]:
    found = (line.strip() for line in log.splitlines() if re.search(pattern, line))
    return tuple(dict.fromkeys(found))
