"""Every exception that hopsparse raises on purpose.

HopsparseError
├── ArgumentError       a value passed by the caller cannot mean anything (also a ValueError)
├── FormatError         tensors do not form a valid matrix of their format (also a ValueError)
├── CalibrationError    the calibration or evaluation text cannot be used (also a ValueError)
├── CheckpointError     a file or folder is missing, corrupt, too new, or cannot be written
├── CompileError        the text of a kernel does not compile, or is not what its spec says
├── UnsupportedError    the request is meaningful, but nothing here can run it
├── DriverError         the CUDA driver refused a call
│   └── GpuLostError    a kernel failed: this process can use the GPU no more
└── VerificationError   a result was computed and is wrong

A message has three parts: what arrived, what is required, and the nearest thing that works.
"""

from __future__ import annotations


class HopsparseError(Exception):
    """Base of all errors; its three parts are attributes, so that tools can show them apart.

    Args:
        got: What arrived, as a clause without a final stop.
        need: What is required.
        hint: The nearest thing that works.
    """

    def __init__(self, got: str, *, need: str, hint: str) -> None:
        # Not by the base: torch.compile follows no super() of an exception that it meets while it
        # traces, and would tell of that instead.
        self.args = (got, need, hint)
        self.got = got
        self.need = need
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.got}. Required: {self.need}. Try: {self.hint}."

    def __reduce__(self) -> tuple[object, ...]:
        # Keyword-only arguments would be lost when an error crosses a process boundary.
        return (_rebuild, (type(self), self.got, self.need, self.hint))


def _rebuild(kind: type[HopsparseError], got: str, need: str, hint: str) -> HopsparseError:
    return kind(got, need=need, hint=hint)


class ArgumentError(HopsparseError, ValueError):
    """A value passed by the caller cannot mean anything."""


class FormatError(HopsparseError, ValueError):
    """Tensors do not form a valid matrix of their format."""


class CalibrationError(HopsparseError, ValueError):
    """The calibration or evaluation text cannot be used."""


class CheckpointError(HopsparseError):
    """A file or folder is missing, corrupt, too new, or cannot be written."""


class CompileError(HopsparseError):
    """The text of a kernel does not compile, or is not what its spec says."""


class UnsupportedError(HopsparseError):
    """The request is meaningful, but nothing here can run it."""


class DriverError(HopsparseError):
    """The CUDA driver refused a call."""


class GpuLostError(DriverError):
    """A kernel failed, perhaps an earlier one; this process can use the GPU no more."""


class VerificationError(HopsparseError):
    """A result was computed and is wrong."""
