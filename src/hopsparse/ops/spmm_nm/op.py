"""y = act(alpha * x @ w.T + bias) + residual for a weight in NM format: checks, plan, run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from numbers import Real

import torch
from torch import Tensor
from torch.nn import functional as F

from ...errors import ArgumentError
from ...formats import SparseMatrix
from ...formats._windows import windows_of
from ...formats.nm import NM
from ...tune import machine_of
from .._call import check_epilogue as check_any_epilogue
from .._call import check_tensors
from .._call import is_plain as is_plain
from .._call import is_recorded as is_recorded
from .._call import is_transformed as is_transformed
from .._product import Plan, check_inputs, check_weight, decompress, is_hopper
from . import reference
from .cost import Problem
from .dense import dense_win
from .dispatch import traced
from .kernel import ACTIVATIONS, SWIGLU, Config
from .plan import choose, tuned

_KERNEL_DTYPES = (torch.bfloat16, torch.float16)
_NUMBERS = (int, float)


def spmm_nm(
    w: NM,
    x: Tensor,
    *,
    bias: Tensor | None = None,
    act: str | None = None,
    alpha: float = 1,  # An int: torch.compile makes an input of a float, and traces twice.
    residual: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    config: Config | None = None,
) -> Tensor:
    """Multiply by a 2:4 (or other N:M) weight: y = act(alpha * x @ w.T + bias) + residual.

    On a Hopper GPU a 2:4 weight of 16-bit values runs as one kernel, whatever the shape; all else,
    and every call under torch.func or with dual numbers, decodes w, which `plan` says.
    Differentiable in x, bias, residual and the kept values; gradients run dense, and where there is
    one to keep, `act` and `residual` are applied after the kernel. One graph under torch.compile.
    The kernel also runs where tuning measured the dense product to be faster: a function keeps no
    decoded weight between calls. `SparseLinear` does.

    Args:
        w: [out, k], float32, bfloat16 or float16.
        x: [..., k], dtype and device of w, any strides, any number of tokens, also none. Rows that
            do not start on 16 bytes, or whose columns are no neighbours, are copied.
        bias: [out], dtype and device of w, or None.
        act: `relu`, `gelu` (with erf), `gelu_tanh`, `silu` or None; or `swiglu`, silu(gate) * up of
            rows as `interleave_gate_up` orders them, without a residual.
        alpha: What the product is multiplied by, before the bias; a number, and no tensor.
        residual: [..., out], device of x, in the dtype of the result, or None.
        out_dtype: Dtype of the result: that of x, or float32. None is that of x.
        config: The kernel's tile; None chooses one, as torch.compile and gradients always do.

    Returns:
        [..., out], contiguous; of `swiglu`, [..., out / 2].

    Raises:
        ArgumentError: Arguments do not fit each other.
        FormatError: Parts of w have the wrong shape or dtype.
        UnsupportedError: Values are 8-bit; a side is longer than 2^31 - 2^13; or a CUDA graph is
            being captured, and the kernel is not loaded yet.

    Example:
        >>> w = NM.from_dense(torch.tensor([[1.0, 0.0, 0.0, 2.0], [0.0, -1.0, 0.0, 0.0]]))
        >>> spmm_nm(w, torch.ones(1, 4), act="relu")
        tensor([[3., 0.]])
    """
    if type(x) is not Tensor or bias is not None or residual is not None:  # 0.3 us saved without
        check_tensors("spmm_nm", x, bias, residual)
    activation, out_dtype = act or "none", out_dtype or x.dtype
    if config is not None or type(alpha) not in _NUMBERS:
        check_choices(alpha, config)
    has_kernel = check_operands("spmm_nm", w, x, bias)
    if activation != "none" or residual is not None or out_dtype is not x.dtype:
        check_epilogue("spmm_nm", w.shape[0], x, activation, residual, out_dtype)
    if not has_kernel:
        return _run_decoding(w, x, bias, residual, activation, alpha, out_dtype)
    return run_kernel(w, x, bias, residual, activation, alpha, out_dtype, config)


def _run_decoding(
    w: NM,
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str,
    alpha: float,
    out_dtype: torch.dtype,
) -> Tensor:
    plain = activation == "none" and residual is None and alpha == 1 and out_dtype is x.dtype
    if x.is_cuda and plain:
        return F.linear(x, decompress(w), bias)
    return reference.spmm_nm(
        w,
        x,
        bias,
        activation=activation,
        alpha=alpha,
        residual=residual,
        out_dtype=out_dtype,
    )


def run_kernel(
    w: NM,
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor | None = None,
    activation: str = "none",
    alpha: float = 1,
    out_dtype: torch.dtype | None = None,
    config: Config | None = None,
) -> Tensor:
    """`spmm_nm` where `check_operands` allows it, by the shortest way that the call allows.

    Args:
        w: [out, k], 2:4, bfloat16 or float16.
        x: [..., k] on a Hopper GPU, dtype of w, any strides.
        bias: [out], dtype of x, or None.
        residual: As the result, or None.
        activation: One of `kernel.ACTIVATIONS`.
        alpha: What the sums are multiplied by.
        out_dtype: Of the result; None is that of x.
        config: The tile, where nothing is traced; None chooses one.

    Returns:
        [..., out], contiguous.
    """
    out_dtype = out_dtype or x.dtype
    if is_plain(w.values, x, bias, residual):
        return _run()(w, x, bias, residual, activation, alpha, out_dtype, config)
    return traced(w, x, bias, residual, activation, alpha, out_dtype)


@cache
def _run() -> Callable[..., Tensor]:
    """The launch, imported late: a process on the CPU needs neither a compiler nor a driver."""
    from .device import run

    return run


if torch.version.cuda is not None:
    _run()  # With a CUDA build of torch now, or the first call would take 9 ms longer.


def needs_gradient(*tensors: Tensor | None) -> bool:
    """Whether autograd records what is made of these."""
    if not torch.is_grad_enabled():
        return False
    return any(tensor is not None and tensor.requires_grad for tensor in tensors)


def may_skip(x: Tensor) -> bool:
    """Whether a layer may multiply x by a decoded weight instead, and no one misses the operator.

    Not where calls are recorded, which would make a constant of that weight; nor for tensors of
    other classes.
    """
    return not is_recorded(x)


def is_captured(x: Tensor) -> bool:
    """Whether what is done with x now is captured into a CUDA graph."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def check_operands(op: str, w: NM, x: Tensor, bias: Tensor | None) -> bool:
    """Refuse what `check_product` refuses; whether the kernel takes the rest.

    Under torch.func and forward-mode differentiation it takes nothing; the dense product does.
    A call asks the tensors of w only whether they look as they did when they passed last.
    """
    compiling = torch.compiler.is_compiling()
    if is_transformed():
        check_weight(op, w, NM)
        check_inputs(op, w, x, bias)
        return False
    traced_or_foreign = compiling or not isinstance(w, NM)
    if traced_or_foreign or not w.values.is_cuda or not _has_passed(op, w):
        check_weight(op, w, NM)
        check_inputs(op, w, x, bias)
        return why_no_kernel(w, x) is None
    (out, k), dtype, device = w.shape, w.values.dtype, w.values.get_device()
    fits = x.shape[-1:] == (k,) and x.dtype is dtype and x.get_device() == device
    if fits and bias is not None:
        fits = bias.shape == (out,) and bias.dtype is dtype and bias.get_device() == device
    if not fits:
        check_inputs(op, w, x, bias)
    return True


def plan(w: NM, x: Tensor) -> Plan:
    """What `spmm_nm(w, x)` will run."""
    if x.device.type == "cpu":
        return Plan("spmm_nm", "reference", "x is on the CPU; w is decoded at every call")
    if (reason := why_no_kernel(w, x)) is not None:
        return Plan("spmm_nm", "dense", f"{reason}; w is decoded at every call")
    tokens, machine = x.numel() // max(1, x.shape[-1]), machine_of(x.device.index)
    problem, dtype = Problem(max(1, tokens), *w.shape), str(w.dtype).removeprefix("torch.")
    config = choose(problem, machine.sm_count, dtype=dtype, machine=machine)
    how = "predicted" if tuned(problem, dtype, machine) is None else "tuned"
    return Plan("spmm_nm", "kernel", f"wgmma.sp, tile {config.name}, {how}; gradients run dense")


def plan_kept(w: NM, x: Tensor) -> Plan:
    """What a layer runs that may keep the decoded weight: also dense, where that was measured."""
    decided, tokens = plan(w, x), x.numel() // max(1, x.shape[-1])
    if decided.name != "kernel" or tokens == 0:
        return decided
    dtype = str(w.dtype).removeprefix("torch.")
    won = dense_win(Problem(tokens, *w.shape), dtype, machine_of(x.device.index))
    if won is None:
        return decided
    return Plan("spmm_nm", "dense", f"{won.describe()}; w is decoded at every call")


def why_no_kernel(w: NM, x: Tensor) -> str | None:
    """What keeps the kernel from running, as a clause; None if nothing does."""
    if not x.is_cuda:
        return "x is on the CPU" if x.device.type == "cpu" else f"x is on {x.device.type}"
    if w.dtype not in _KERNEL_DTYPES:
        return f"values are {str(w.dtype).removeprefix('torch.')}, and the kernel takes 16 bits"
    if windows_of(w.pattern) != 1:
        return f"{w.pattern} needs x gathered for each window"
    return why_no_launch((w.values, w.meta), x)


def why_no_launch(parts: Iterable[Tensor], x: Tensor) -> str | None:
    """What keeps any kernel of this operator from running, whatever it multiplies.

    Args:
        parts: Of w.
        x: On a GPU.
    """
    if not all(part.is_contiguous() for part in parts):
        return "a part of w is not contiguous"
    if not is_hopper(x.get_device()):
        return "the GPU is no H100 or H200"
    if is_transformed():
        return "torch.func or a forward derivative is at work"
    return None


def _has_passed(op: str, w: NM) -> bool:
    """Whether w passed `check_weight` and the kernel takes it; asked again when a part changed."""
    values, meta = w.values, w.meta
    looks = (
        *(values.shape, values.dtype, values.get_device(), values.is_contiguous()),
        *(meta.shape, meta.dtype, meta.get_device(), meta.is_contiguous()),
    )
    if w.__dict__.get("_passed") == looks:
        return True
    check_weight(op, w, NM)
    if why_no_kernel(w, values) is not None:
        return False
    w.__dict__["_passed"] = looks
    return True


def check_parts(w: SparseMatrix, parts: Iterable[Tensor]) -> None:
    """Refuse parts that are not what the format says; asked again only when one looks otherwise.

    Args:
        w: The weight.
        parts: All of it.

    Raises:
        FormatError: It says which part.
    """
    if torch.compiler.is_compiling():
        return
    looks = [(part.shape, part.dtype, part.get_device()) for part in parts]
    if w.__dict__.get("_checked") != looks:
        w._check_parts()
        w.__dict__["_checked"] = looks


def check_choices(alpha: object, config: object) -> None:
    """Refuse an `alpha` that is no number, and a `config` that is no tile.

    Raises:
        ArgumentError: It says which.
    """
    if config is not None and not isinstance(config, Config):
        raise ArgumentError(
            f"spmm_nm: config of type {type(config).__name__}",
            need="a Config of hopsparse.ops.spmm_nm.kernel, or None",
            hint="config=None, which chooses the fastest that is known",
        )
    # A tensor could change after its number was packed into the arguments of a launch.
    if not torch.compiler.is_compiling() and not isinstance(alpha, Real):
        raise ArgumentError(
            f"spmm_nm: alpha of type {type(alpha).__name__}",
            need="a number",
            hint="alpha.item(), or x multiplied by it",
        )


def check_epilogue(
    op: str, out: int, x: Tensor, activation: str, residual: Tensor | None, out_dtype: torch.dtype
) -> None:
    """Refuse an epilogue that cannot mean anything.

    Raises:
        ArgumentError: No such activation, or a dtype or residual that does not fit.
    """
    if activation == SWIGLU and (out % 16 or residual is not None):
        raise ArgumentError(
            f"{op}: swiglu of {out} rows" + (", with a residual" if residual is not None else ""),
            need="a multiple of 16 rows, as interleave_gate_up makes them, and no residual",
            hint="rows of zeros at the end of gate and of up; an addition after it",
        )
    known = (*ACTIVATIONS, SWIGLU)
    check_any_epilogue(op, out, x, activation, residual, out_dtype, known)
