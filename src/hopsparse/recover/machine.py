"""Devices, mixed precision and processes, by accelerate; nothing else here knows it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.util import find_spec
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import ArgumentError, UnsupportedError
from .options import RecoverOptions

_DTYPES = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class Machine:
    """What one process trains on; made by `open_machine`.

    Args:
        accelerator: An `accelerate.Accelerator`.
    """

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator

    @property
    def device(self) -> torch.device:
        """Where this process computes."""
        device: torch.device = self._accelerator.device
        return device

    @property
    def rank(self) -> int:
        """Which process this is."""
        return int(self._accelerator.process_index)

    @property
    def world(self) -> int:
        """How many there are."""
        return int(self._accelerator.num_processes)

    @property
    def is_main(self) -> bool:
        """Whether this process writes."""
        return self.rank == 0

    @property
    def dtype(self) -> torch.dtype | None:
        """Of products under mixed precision; None: of the weights."""
        return _DTYPES[self._accelerator.mixed_precision]

    @property
    def skips_steps(self) -> bool:
        """Whether gradients may overflow without harm: fp16 skips such steps and scales down."""
        return self._accelerator.scaler is not None

    def prepare(self, module: nn.Module, optimizer: Optimizer) -> tuple[Any, Any]:
        """The module as it is run in training, and the optimizer as it steps."""
        return tuple(self._accelerator.prepare(module, optimizer))

    def autocast(self) -> AbstractContextManager[Any]:
        """Mixed precision for a module that was not prepared."""
        return self._accelerator.autocast()  # type: ignore[no-any-return]

    def together(self, module: nn.Module, last: bool) -> AbstractContextManager[Any]:
        """Gradients of processes are averaged in the last part of a step alone."""
        return nullcontext() if last else self._accelerator.no_sync(module)

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of `loss`."""
        self._accelerator.backward(loss)

    def clip(self, parameters: list[nn.Parameter], most: float) -> Tensor:
        """Scale gradients down to a norm of `most`; returns the norm that they had."""
        norm: Tensor = self._accelerator.clip_grad_norm_(parameters, most)
        return norm

    def unscale(self) -> None:
        """Take the loss scale of fp16 out of the gradients; `clip` does it too."""
        self._accelerator.unscale_gradients()

    def total(self, *numbers: float) -> list[float]:
        """Each number summed over the processes."""
        if self.world == 1:
            return list(numbers)
        # gloo and NCCL both sum float32; float64 keeps a sum of few numbers exact enough.
        mine = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        summed: Tensor = self._accelerator.reduce(mine, reduction="sum")
        return [float(number) for number in summed]

    def wait(self) -> None:
        """Until every process has come here."""
        self._accelerator.wait_for_everyone()

    def release(self) -> None:
        """Let go of what was prepared."""
        self._accelerator.free_memory()

    def scaler_state(self) -> dict[str, Any]:
        """Loss scale of fp16, as plain numbers; empty otherwise."""
        scaler = self._accelerator.scaler
        return dict(scaler.state_dict()) if scaler is not None else {}

    def load_scaler_state(self, state: dict[str, Any]) -> None:
        """Continue with the loss scale of an earlier run."""
        if self._accelerator.scaler is not None and state:
            self._accelerator.scaler.load_state_dict(state)


@contextmanager
def open_machine(options: RecoverOptions, device: str = "cpu") -> Iterator[Machine]:
    """What this process trains on: alone, or one of those that torchrun started.

    Args:
        options: Says the precision.
        device: `cpu`, or `auto`: what accelerate finds, one device a process.

    Raises:
        ArgumentError: Another device, or another precision than this process began with.
        UnsupportedError: accelerate is not installed, or the device lacks the precision.

    Example:
        >>> with open_machine(RecoverOptions()) as machine:
        ...     machine.world, machine.device.type
        (1, 'cpu')
    """
    if device not in ("cpu", "auto"):
        raise ArgumentError(f"device {device!r}", need="cpu or auto", hint="auto")
    if find_spec("accelerate") is None:
        raise UnsupportedError(
            "accelerate is not installed",
            need="accelerate, which places models and averages gradients",
            hint='pip install "hopsparse[models]"',
        )
    from accelerate.state import AcceleratorState

    was_known = bool(AcceleratorState._shared_state)
    accelerator = None
    try:
        accelerator = _accelerator(options, device)
        yield Machine(accelerator)
    finally:
        if accelerator is not None:
            accelerator.free_memory()
        if not was_known:
            # accelerate keeps the precision for the whole process otherwise.
            AcceleratorState._reset_state()


def _accelerator(options: RecoverOptions, device: str) -> Any:
    from accelerate import Accelerator, DistributedDataParallelKwargs

    ddp = DistributedDataParallelKwargs(
        # Masks and scales are the same everywhere already; the others may be large.
        broadcast_buffers=False,
        # Without logits nothing behind the last compared block gets a gradient.
        find_unused_parameters=not options.uses_logits,
    )
    try:
        accelerator = Accelerator(
            mixed_precision=options.precision, cpu=device == "cpu", kwargs_handlers=[ddp]
        )
        if options.precision == "fp16" and accelerator.scaler is None:
            # accelerate computes in float32 there, without a word.
            raise ValueError(f"no fp16 on {accelerator.device}")
    except ValueError as error:
        raise UnsupportedError(
            f"precision {options.precision} on {device} ({' '.join(str(error).split())})",
            need="a precision that the device has, the same for the whole process",
            hint="precision='no', or 'bf16'",
        ) from error
    return accelerator


class Interrupt:
    """Whether Ctrl-C was pressed."""

    def __init__(self) -> None:
        self.asked = False


@contextmanager
def deferred_interrupt() -> Iterator[Interrupt]:
    """Ctrl-C only takes a note while this is open; pressed twice, it interrupts at once."""
    interrupt = Interrupt()
    if threading.current_thread() is not threading.main_thread():
        # Only the main thread may handle signals.
        yield interrupt
        return
    before = signal.getsignal(signal.SIGINT)

    def note(number: int, frame: FrameType | None) -> None:
        if interrupt.asked:
            raise KeyboardInterrupt
        interrupt.asked = True

    signal.signal(signal.SIGINT, note)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, before)
