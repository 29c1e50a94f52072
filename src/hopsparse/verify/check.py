"""One call of an operator beside what it must give, and the first number that is something else.

What is expected never comes from the kernel: integers, float64, or the reference on the CPU. Before
a call, memory of the size of its results is filled with what no result is, and freed: what a kernel
does not write shows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..launch import launches
from ..measure.fault import named, wait_for

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Expected:
    """What a result must be.

    Attributes:
        value: The right numbers: float64 for what is compared as numbers (NaN is NaN, -0 is 0), or
            of the dtype of the result, whose bits must then be the same.
        dtype: Of the result.
        slack: float64 as value: how far each may be off; None: not at all.
        name: Of the result, where a call has several.
    """

    value: Tensor
    dtype: torch.dtype
    slack: Tensor | None = None
    name: str = "y"

    @classmethod
    def bits(cls, value: Tensor, name: str = "y") -> Expected:
        """The very bits of a tensor."""
        return cls(value, value.dtype, name=name)

    @classmethod
    def within(cls, least: Tensor, most: Tensor, dtype: torch.dtype, name: str = "y") -> Expected:
        """Anything from `least` to `most`."""
        value = (least.double() + most.double()) / 2
        # Half a difference rounds; its last bits must not exclude the ends.
        slack = (most.double() - least.double()) / 2
        return cls(value, dtype, slack + 4e-16 * value.abs(), name)


@dataclass(frozen=True)
class Trial:
    """A call that has not been made yet.

    Attributes:
        run: Makes it; gives as many tensors as are expected.
        expected: Of each.
    """

    run: Callable[[], Tensor | Sequence[Tensor]]
    expected: Sequence[Expected]


@dataclass(frozen=True)
class Check:
    """Something that is verified of an operator.

    Attributes:
        op: The operator.
        case: Which problem.
        dtype: Of its numbers, in words.
        format: How the matrix is stored, or "".
        trials: Makes the calls, with their tensors on the given device.
        kernel: Whether one of our kernels has to run where there is a Hopper GPU.
        quick: Whether it is one of the quick set of the CPU.
        first: Whether it is one of the quick set of a GPU, where each kernel has to be loaded: of
            each operator, dtype and format one, and of each family of kernels the riskiest.
        only_gpu: Whether the CPU has nothing of the kind: tiles are choices of kernels.
    """

    op: str
    case: str
    dtype: str
    format: str
    trials: Callable[[torch.device], Iterable[Trial]]
    kernel: bool = True
    quick: bool = False
    only_gpu: bool = False
    first: bool = False

    @property
    def name(self) -> str:
        """Operator, case, format and dtype in one word each."""
        return " ".join(filter(None, (self.op, self.case, self.format, self.dtype)))

    def is_quick(self, kind: str) -> bool:
        """Whether it is one of the quick set of that kind of device, "cpu" or "cuda"."""
        return self.first if kind == "cuda" else self.quick and not self.only_gpu


@dataclass(frozen=True)
class Outcome:
    """What came of a check.

    Attributes:
        check: Which.
        ok: Whether all was right.
        detail: The first number that was not, or how many were compared.
        kernels: Those that were launched, by name, each once.
        seconds: How long it took, with what was expected.
    """

    check: Check
    ok: bool
    detail: str
    kernels: tuple[str, ...]
    seconds: float


def outcome_of(check: Check, device: torch.device) -> Outcome:
    """Run a check.

    A check that wants a kernel fails where none was launched: a dense product of the right numbers
    verifies no kernel.

    Args:
        check: What to run.
        device: "cpu", or a Hopper GPU.

    Raises:
        GpuLostError: A kernel failed; no later check can run in this process.
    """
    started, compared, seen = time.monotonic(), 0, list[str]()
    detail = "no call was made"
    wait = wait_for(device) if device.type == "cuda" else lambda: None
    # The same numbers at every run, whatever ran before.
    torch.manual_seed(sum(check.name.encode()))
    for trial in check.trials(device):
        for each in trial.expected:
            _poison(each, device)
        with launches() as names, named(check.name, wait):
            found = trial.run()
        seen += names
        if check.kernel and device.type == "cuda" and not names:
            detail = "no kernel was launched: what ran instead was right or wrong unseen"
            break
        results = [found] if isinstance(found, Tensor) else list(found)
        detail = _first_of(results, trial.expected)
        if detail:
            break
        compared += sum(each.value.numel() for each in trial.expected)
    kernels = tuple(dict.fromkeys(seen))
    told = detail or f"{compared} numbers"
    return Outcome(check, not detail, told, kernels, time.monotonic() - started)


def _first_of(results: Sequence[Tensor], expected: Sequence[Expected]) -> str:
    if len(results) != len(expected):
        return f"{len(results)} results where {len(expected)} are expected"
    for found, right in zip(results, expected, strict=True):
        if (told := first_mismatch(found, right)) is not None:
            return told
    return ""


def first_mismatch(found: Tensor, expected: Expected) -> str | None:
    """The first number, in the order of rows, that is not what it must be; None if all are.

    Args:
        found: A result.
        expected: What it must be; it may lie on another device.

    Returns:
        Its coordinates, its bits and those of the right number in hexadecimal digits, and how many
        more there are.

    Example:
        >>> y = torch.tensor([[1.0, 2.5]]).bfloat16()
        >>> first_mismatch(y, Expected(torch.tensor([[1.0, 2.0]]).double(), torch.bfloat16))
        'y[0, 1] is 0x4020 (2.5) and must be 0x4000 (2); 1 of 2 differ'
    """
    right = expected.value.to(found.device)
    if found.shape != right.shape or found.dtype != expected.dtype:
        return (
            f"{expected.name} is {list(found.shape)} {found.dtype} "
            f"and must be {list(right.shape)} {expected.dtype}"
        )
    wrong = _wrong(found, right, expected.slack)
    count = int(wrong.sum())
    if not count:
        return None
    first = int(wrong.flatten().to(torch.int8).argmax())
    at = [int(each) for each in torch.unravel_index(torch.tensor(first), found.shape)]
    mine, other = found.flatten()[first], right.flatten()[first]
    told = f"{expected.name}{at} is {_shown(mine)} and must be {_shown(other.to(found.dtype))}"
    if expected.slack is not None:
        told += f", at most {float(expected.slack.flatten()[first]):.3g} off"
        told += f", and is {abs(float(mine) - float(other)):.3g} off"
    return f"{told}; {count} of {found.numel()} differ"


def _wrong(found: Tensor, right: Tensor, slack: Tensor | None) -> Tensor:
    """bool, as found."""
    if slack is None and found.dtype == right.dtype != torch.float64:
        return _bits_of(found) != _bits_of(right)
    mine, other = found.double(), right.double()
    off = torch.zeros_like(other) if slack is None else slack.to(found.device)
    same = (mine == other) | (mine.isnan() & other.isnan())
    # A comparison with NaN is false, so that one that is not expected is wrong.
    return ~(same | ((mine - other).abs() <= off))


def _bits_of(tensor: Tensor) -> Tensor:
    kind = torch.uint8 if tensor.dtype == torch.bool else _BITS[tensor.dtype.itemsize]
    return tensor.contiguous().view(kind)


def _shown(number: Tensor) -> str:
    size = number.dtype.itemsize
    bits = int(_bits_of(number.reshape(1))) & ((1 << 8 * size) - 1)
    value = int(number) if not number.dtype.is_floating_point else f"{float(number):.9g}"
    return f"0x{bits:0{2 * size}x} ({value})"


def _poison(expected: Expected, device: torch.device) -> None:
    """Leave what no result is where the next one of this size will likely be."""
    size, dtype = expected.value.shape, expected.dtype
    memory = torch.empty(size, dtype=dtype, device=device)
    # NaN where a dtype has it in all its bits.
    memory.reshape(-1).view(torch.uint8).fill_(0xFF) if memory.numel() else None
