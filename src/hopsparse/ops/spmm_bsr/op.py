"""y = act(alpha * x @ w.T + bias) + residual for a weight in BSR format: checks, plan, run."""

from __future__ import annotations

from numbers import Real

import torch
from torch import Tensor
from torch.nn import functional as F

from ...errors import ArgumentError
from ...formats.bsr import BSR
from ...formats.bsr24 import BSR24
from .._call import check_epilogue, check_tensors, is_plain, is_transformed
from .._product import Plan, check_inputs, check_weight, decompress, is_hopper
from . import reference
from .dispatch import traced
from .fragments_kernel import FragmentConfig
from .kernel import Config
from .plan import Decision, Problem
from .ready import class_of, layout_of
from .strips import width_of

_KERNEL_DTYPES = (torch.bfloat16, torch.float16)
_NUMBERS = (int, float)


def spmm_bsr(
    w: BSR | BSR24,
    x: Tensor,
    *,
    bias: Tensor | None = None,
    act: str | None = None,
    alpha: float = 1,  # An int: torch.compile makes an input of a float, and traces twice.
    residual: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    config: Config | FragmentConfig | None = None,
) -> Tensor:
    """Multiply by a block-sparse weight: y = act(alpha * x @ w.T + bias) + residual.

    On a Hopper GPU a weight of 16-bit values, in blocks of a multiple of 16 columns, runs as one
    kernel where that was measured, or is predicted, to be faster than decoding; `plan` says. Its
    layout is made at the first call and kept as long as `w.values`. All else, a `BSR24` (see
    `ops.spmm_bsr.triton.run`), and every call under torch.func or with dual numbers, decodes w.
    Differentiable in x, bias, residual and the kept values; gradients run dense. One graph under
    torch.compile, which takes the kernel where there is one, as do calls that keep a gradient.

    Args:
        w: [out, k], float32, bfloat16 or float16.
        x: [..., k], dtype and device of w, any strides, any number of tokens, also none. Rows that
            do not start on 16 bytes, or whose columns are no neighbours, are copied.
        bias: [out], dtype and device of w, or None.
        act: `relu`, `gelu` (with erf), `gelu_tanh`, `silu` or None.
        alpha: What the product is multiplied by, before the bias; a number, and no tensor.
        residual: [..., out], device of x, in the dtype of the result, or None.
        out_dtype: Dtype of the result: that of x, or float32. None is that of x.
        config: The kernel's tile, which then runs whatever is predicted, in its own grain of w
            (`grains`); None chooses, as torch.compile and gradients always do.

    Returns:
        [..., out], dtype `out_dtype`, device of x.

    Raises:
        ArgumentError: Arguments do not fit each other.
        FormatError: Parts of w have the wrong shape or dtype.
        UnsupportedError: Values are 8-bit; a side is longer than 2^31 - 2^13; or a CUDA graph is
            being captured, and w is not laid out, or the kernel not loaded, yet.

    Example:
        >>> import torch
        >>> w = BSR.from_dense(torch.block_diag(*torch.ones(2, 16, 16)), (16, 16))
        >>> spmm_bsr(w, torch.ones(1, 32)).unique()
        tensor([16.])
    """
    check_tensors("spmm_bsr", x, bias, residual)
    activation, out_dtype = act or "none", out_dtype or x.dtype
    if config is not None or type(alpha) not in _NUMBERS:
        _check_choices(alpha, config)
    _check_parts(w)
    check_inputs("spmm_bsr", w, x, bias)
    if activation != "none" or residual is not None or out_dtype is not x.dtype:
        check_epilogue("spmm_bsr", w.shape[0], x, activation, residual, out_dtype)
    if isinstance(w, BSR) and why_no_kernel(w, x) is None:
        y = _by_kernel(w, x, bias, residual, activation, alpha, out_dtype, config)
        if y is not None:
            return y
    return _run_decoding(w, x, bias, residual, activation, alpha, out_dtype)


def _by_kernel(
    w: BSR,
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str,
    alpha: float,
    out_dtype: torch.dtype,
    config: Config | FragmentConfig | None,
) -> Tensor | None:
    """The kernel by the shortest way that the call allows; None where decoding is faster."""
    if not is_plain(w.values, x, bias, residual):
        return traced(w, x, bias, residual, activation, alpha, out_dtype)
    if config is None and not _captures(x) and not uses_kernel(w, x):
        return None
    from .device import run  # A process on the CPU needs neither a compiler nor a driver.

    return run(w, x, bias, residual, activation, alpha, out_dtype, config)


def _run_decoding(
    w: BSR | BSR24,
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
    return reference.spmm_bsr(
        w,
        x,
        bias,
        activation=activation,
        alpha=alpha,
        residual=residual,
        out_dtype=out_dtype,
    )


def run_kernel(w: BSR, x: Tensor, bias: Tensor | None, activation: str = "none") -> Tensor:
    """`spmm_bsr` where `why_no_kernel` and `check_inputs` passed, and nothing records the call."""
    from .device import run

    return run(w, x, bias, None, activation, 1, x.dtype)


def plan(w: BSR | BSR24, x: Tensor) -> Plan:
    """What `spmm_bsr(w, x)` will run."""
    return _planned(w, x, kept=False)


def plan_kept(w: BSR | BSR24, x: Tensor) -> Plan:
    """What a layer runs that may keep the decoded weight."""
    return _planned(w, x, kept=True)


def _planned(w: BSR | BSR24, x: Tensor, *, kept: bool) -> Plan:
    if x.device.type == "cpu":
        return Plan("spmm_bsr", "reference", "x is on the CPU; w is decoded at every call")
    if (reason := why_no_kernel(w, x)) is not None:
        return Plan("spmm_bsr", "dense", f"{reason}; w is decoded at every call")
    assert isinstance(w, BSR)
    decision = decided(w, x)
    if decision.uses_kernel(kept=kept):
        why = f"{decision.instruction}, {decision.why(kept=kept)}"
        return Plan("spmm_bsr", "kernel", f"{why}; gradients run dense")
    return Plan("spmm_bsr", "dense", f"{decision.why(kept=kept)}; w is decoded at every call")


def decided(w: BSR, x: Tensor) -> Decision:
    """The kernel for x and what it is predicted to take, where `why_no_kernel` has no reason."""
    made, tokens = layout_of(w), max(1, x.numel() // w.shape[1])
    if (known := made.decided.get(class_of(tokens))) is not None:
        return known
    from .device import decide_on

    return decide_on(made, Problem(tokens, *w.shape), w.dtype, x.get_device())


def uses_kernel(w: BSR, x: Tensor, *, kept: bool = False) -> bool:
    """Whether the kernel is predicted to be faster, where `why_no_kernel` has no reason.

    Args:
        w: [out, k].
        x: [..., k].
        kept: Whether the decoded weight would be kept between calls.
    """
    return decided(w, x).uses_kernel(kept=kept)


def why_no_kernel(w: BSR | BSR24, x: Tensor) -> str | None:
    """What keeps the kernel from running, as a clause; None if nothing does."""
    if not x.is_cuda:
        return "x is on the CPU" if x.device.type == "cpu" else f"x is on {x.device.type}"
    if isinstance(w, BSR24):
        return "blocks are 2:4 inside, and the kernel takes them written out"
    if w.dtype not in _KERNEL_DTYPES:
        return f"values are {str(w.dtype).removeprefix('torch.')}, and the kernel takes 16 bits"
    if width_of(w.block) is None:
        return f"blocks are {w.block[1]} columns wide, and the kernel takes multiples of 16"
    if is_transformed():
        return "torch.func or a forward derivative is at work"
    if not is_hopper(x.get_device()):
        return "the GPU is no H100 or H200"
    if not torch.compiler.is_compiling() and any(
        part.is_inference() for part in w.parts().values()
    ):
        return "a part of w was made in inference mode, whose changes torch does not count"
    return None


def _captures(x: Tensor) -> bool:
    """Whether a CUDA graph is captured, in which w cannot be decoded."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def _check_parts(w: BSR | BSR24) -> None:
    """`check_weight`; not again while the tensors of w look as they did when it passed."""
    if torch.compiler.is_compiling() or not isinstance(w, BSR):
        check_weight("spmm_bsr", w, BSR24 if isinstance(w, BSR24) else BSR)
        return
    values, indices, indptr = w.values, w.indices, w.indptr
    looks = (
        *(values.shape, values.dtype, values.device),
        *(indices.shape, indices.dtype, indices.device),
        *(indptr.shape, indptr.dtype, indptr.device),
    )
    if w.__dict__.get("_passed") != looks:
        check_weight("spmm_bsr", w, BSR)
        w.__dict__["_passed"] = looks


def _check_choices(alpha: object, config: object) -> None:
    if config is not None and not isinstance(config, (Config, FragmentConfig)):
        raise ArgumentError(
            f"spmm_bsr: config of type {type(config).__name__}",
            need="a Config of hopsparse.ops.spmm_bsr.kernel, a FragmentConfig, or None",
            hint="config=None, which chooses the one that is measured, or predicted, to be fastest",
        )
    # A tensor could change after its number was packed into the arguments of a launch.
    if not torch.compiler.is_compiling() and not isinstance(alpha, Real):
        raise ArgumentError(
            f"spmm_bsr: alpha of type {type(alpha).__name__}",
            need="a number",
            hint="alpha.item(), or x multiplied by it",
        )
