"""Kernels that are there before the first call: a server compiles nothing once it serves."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ...compiler import KernelCache
from ...errors import ArgumentError
from ...formats.nm import NM
from ...tune import machine_of
from .cost import Problem, counted
from .kernel import ACTIVATIONS, SWIGLU, Config
from .op import why_no_kernel
from .plan import choices, spec_of

if TYPE_CHECKING:
    from .device import Epilogue


def prepare(
    w: NM,
    max_tokens: int,
    *,
    act: str | None = None,
    residual: bool = False,
    out_dtype: torch.dtype | None = None,
) -> tuple[Config, ...]:
    """Compile and load every kernel that `spmm_nm(w, x, ...)` may run, up to so many tokens.

    Calls with a gradient to keep run the kernel without `act` and `residual`: prepare those too
    where there are some. Call it outside a CUDA graph capture.

    Args:
        w: The weight, where it will be used. Where no kernel runs it there is nothing to do.
        max_tokens: Most rows of x, all leading dimensions multiplied.
        act: As for `spmm_nm`.
        residual: Whether there will be one.
        out_dtype: As for `spmm_nm`.

    Returns:
        The tiles, by the least token count that chooses each.

    Raises:
        ArgumentError: No tokens, or no such activation.
        CompileError: A kernel does not compile.
        UnsupportedError: A CUDA graph is being captured.

    Example:
        >>> prepare(NM.from_dense(torch.tensor([[1.0, 0.0, 0.0, 2.0]])), 4096)
        ()
    """
    activation = act or "none"
    max_tokens = counted(max_tokens)
    if activation not in (*ACTIVATIONS, SWIGLU):
        raise ArgumentError(
            f"max_tokens={max_tokens}, act={act!r}",
            need="at least one token, and an activation of spmm_nm",
            hint="max_tokens=4096",
        )
    if not w.values.is_cuda or why_no_kernel(w, w.values) is not None:
        return ()
    from .device import Epilogue, launch_for

    epilogue, device = Epilogue(out_dtype or w.dtype, activation, residual), w.values.get_device()
    found = _choices(w, max_tokens, device, activation)
    _compile(w, list(found), epilogue)
    for tokens in found.values():
        launch_for(Problem(tokens, *w.shape), w.dtype, epilogue, device)
    return tuple(found)


def load(w: NM, tokens: int) -> None:
    """Load what so many tokens run, for a CUDA graph that captures it later."""
    if w.values.is_cuda:
        from .device import Epilogue, launch_for

        launch_for(Problem(tokens, *w.shape), w.dtype, Epilogue(w.dtype), w.values.get_device())


def _choices(w: NM, max_tokens: int, device: int, activation: str) -> dict[Config, int]:
    machine = machine_of(device)
    problem = Problem(max_tokens, *w.shape)
    return choices(
        problem,
        machine.sm_count,
        dtype=_name(w.dtype),
        machine=machine,
        activation=activation,
    )


def _compile(w: NM, configs: list[Config], epilogue: Epilogue) -> None:
    """Compile side by side what is then loaded one after the other."""
    specs = [
        spec_of(
            config,
            w.shape[0],
            _name(w.dtype),
            out_dtype=_name(epilogue.out_dtype),
            activation=epilogue.activation,
            residual=epilogue.has_residual,
        )
        for config in configs
    ]
    for built in KernelCache.default().compile_all(specs):
        if built.error is not None:
            raise built.error


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
