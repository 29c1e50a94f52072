"""spmm_nm of 2:4 weights of 4 bits, which are widened where they are multiplied."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from ....errors import ArgumentError
from ....formats._windows import windows_of
from ....formats.pattern import NMPattern, parse_pattern
from ....formats.quantized import Quantized
from ..._product import Plan, is_dense, told
from ..cost import Problem
from ..facts import PlainCall
from ..kernel import ACTIVATIONS, Config, check_numbers
from ..op import check_parts, needs_gradient, why_no_launch
from ..passed import Passed, looks_of
from .dispatch import Added, int4_product, numbers_of

_PASSED = Passed("_passed_int4")
_CODES = (torch.int8, torch.float8_e4m3fn)
_HALVES = (torch.bfloat16, torch.float16)
_WIDE = (*_HALVES, torch.float32)


def spmm_nm_int4(
    w: Quantized,
    x: Tensor,
    x_scale: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    act: str | None = None,
    residual: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    config: Config | None = None,
) -> Tensor:
    """Multiply by a 2:4 weight of 4-bit codes with scales by group: 3 bits a weight, and scales.

    y = act(x @ w.to_dense().T + bias) + residual for x of 16 bits, where a weight is code * scale
    rounded to the dtype of x, as `Quantized.to_dense` has it. For x of 8-bit codes, sums of codes
    are exact in a group (int8) or promoted after it (E4M3), and scaled in float32.

    On a Hopper GPU a 2:4 or 1:4 weight with groups of 32, 64 or 128 columns runs as one kernel (for
    x of 8 bits: of 128). All else decodes w at every call; so does what needs a gradient: x, scales
    of x or w, the bias or the residual.

    Args:
        w: [out, k], int4 codes in `nm` format.
        x: [..., k], any strides, in the dtype that w stands for; or codes of int8 or float8_e4m3fn.
        x_scale: For codes alone: float32, one [1], or one a token [..., 1]; None is 1.
        bias: [out], of the result's dtype where that is 16-bit, else float32; or None.
        act: `relu`, `gelu` (with erf), `gelu_tanh`, `silu` or None.
        residual: [..., out] in the dtype of the result, or None.
        out_dtype: bfloat16, float16 or float32; None is that of x, or of w where x is codes. x of
            16 bits gives its own dtype or float32.
        config: The kernel's tile; None chooses one.

    Returns:
        [..., out], contiguous.

    Raises:
        ArgumentError: Arguments do not fit each other.
        UnsupportedError: A side is longer than 2^31 - 2^13; or a CUDA graph is being captured, and
            the kernel is not loaded yet.

    Example:
        >>> from hopsparse.quant import quantize_matrix
        >>> dense = torch.tensor([[7.0, 0, 0, -3.0], [0, 1.0, 0, 0]]).bfloat16()
        >>> spmm_nm_int4(quantize_matrix(dense, "2:4+int4"), torch.ones(1, 4).bfloat16())
        tensor([[4., 1.]], dtype=torch.bfloat16)
    """
    added, words = (x_scale, bias, residual), (act, out_dtype, config)
    looks = None
    if type(w) is Quantized:
        looks = looks_of((*w.tensors.values(), x, *added), words)
    call: PlainCall | None = _PASSED.find(w, looks)
    if call is None:
        call = _PASSED.keep(w, looks, _checked(w, x, added, words))
    return int4_product(w, x, added, call)


def _checked(w: Quantized, x: Tensor, added: Added, words: tuple[Any, ...]) -> PlainCall:
    """All of a call but its tensors, after every check."""
    (x_scale, bias, residual), (act, out_dtype, config) = added, words
    check_int4_weight(w)
    _check_dense(w, x)
    if out_dtype is None:
        out_dtype = w.dtype if x.dtype in _CODES else x.dtype
    call = PlainCall("none" if act is None else act, out_dtype, config)
    _check(w, x, x_scale, call)
    _check_added(w, x, bias, residual, call)
    return call


def check_int4_weight(w: Quantized) -> None:
    """Refuse another matrix than one of 4-bit codes in `nm` format.

    Raises:
        ArgumentError: It says what it is.
    """
    if not isinstance(w, Quantized) or w.scheme.weights != "int4" or w.codes_format != "nm":
        kind = f"{w.scheme} in {w.codes_format}" if isinstance(w, Quantized) else type(w).__name__
        _refuse(f"w of {kind}", "a Quantized matrix of int4 in nm format", "quantize_matrix(w, f)")


def check_int4_x(w: Quantized, dtype: object) -> None:
    """Refuse what x beside this weight is not stored as.

    Raises:
        ArgumentError: It says what it may be.
    """
    known = (*((w.dtype,) if w.dtype in _HALVES else ()), *_CODES)
    if not isinstance(dtype, torch.dtype) or dtype not in known:
        need = " or ".join(map(str, known))
        _refuse(f"x_dtype={dtype!r} beside w of {w.dtype}", need, str(known[0]))


def plan_int4(w: Quantized, x: Tensor, *, out_dtype: torch.dtype | None = None) -> Plan:
    """What `spmm_nm_int4(w, x, out_dtype=...)` will run; x may have another shape.

    Raises:
        ArgumentError: Another kind of weight or of x.
    """
    check_int4_weight(w)
    _check_dense(w, x)
    check_int4_x(w, x.dtype)
    if x.device.type == "cpu":
        return Plan("spmm_nm_int4", "reference", "x is on the CPU; w is decoded at every call")
    if (reason := why_no_int4_kernel(w, x)) is not None:
        return Plan("spmm_nm_int4", "dense", f"{reason}; w is decoded at every call")
    from ..chosen import describe
    from .plan import INT4

    if out_dtype is None:
        out_dtype = w.dtype if x.dtype in _CODES else x.dtype
    problem = Problem(max(1, x.numel() // max(1, x.shape[-1])), *w.shape)
    numbers = numbers_of(w.scheme.group, x.dtype, out_dtype)
    tile = describe(INT4, problem, numbers, "none", x.get_device())
    return Plan("spmm_nm_int4", "kernel", f"{tile}; w widened in registers")


def why_no_int4_kernel(w: Quantized, x: Tensor, *added: Tensor | None) -> str | None:
    """What keeps the kernel from running, as a clause; None if nothing does.

    Args:
        w: The weight.
        x: What it multiplies.
        added: Scale of x, bias and residual.
    """
    if not x.is_cuda:
        return f"x is on {x.device.type}"
    if _is_gathered(pattern := str(w.codes_attributes["pattern"])):
        return f"{pattern} needs x gathered for each window"
    parts = [w.tensors[name] for name in ("values", "meta", "scales")]
    if (reason := why_no_launch(parts, x)) is not None:
        return reason
    if needs_gradient(w.tensors["scales"], x, *added):
        return "a gradient is to be kept"
    groups = (128,) if x.dtype in _CODES else (32, 64, 128)
    if w.scheme.group not in groups:
        return f"{w.scheme} has no scale for each {' or '.join(map(str, groups))} columns"
    return None


# A dictionary, because torch.compile warns of functions under `functools.cache`.
_GATHERED: dict[str, bool] = {}


def _is_gathered(pattern: str) -> bool:
    known = _GATHERED.get(pattern)
    if known is None:
        found = parse_pattern(pattern)
        known = _GATHERED[pattern] = not isinstance(found, NMPattern) or windows_of(found) != 1
    return known


def _check(w: Quantized, x: Tensor, x_scale: Tensor | None, call: PlainCall) -> None:
    check_parts(w, w.tensors.values())
    out, k = w.shape
    if x.ndim < 1 or x.shape[-1] != k:
        _refuse(f"x of shape {list(x.shape)}", f"[..., {k}] for a weight [{out}, {k}]", "x.mT")
    halves = (w.dtype,) if w.dtype in _HALVES else ()
    if x.dtype not in (*_CODES, *halves) or x.device != w.device:
        need = " or ".join(map(str, (*halves, *_CODES))) + f" on {w.device}"
        _refuse(f"x is {x.dtype} on {x.device}", need, "x.to(w.device, w.dtype)")
    if not isinstance(call.activation, str) or call.activation not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS[1:])
        _refuse(f"act={call.activation!r}", f"one of {known}, or None", repr(ACTIVATIONS[1]))
    if call.config is not None:
        _check_config(call.config, w, x, call)
    if x_scale is None:
        return
    shapes = ((1,), (*x.shape[:-1], 1))
    if x.dtype not in _CODES:
        _refuse(f"x_scale beside x of {x.dtype}", "none, or x of codes", "x * x_scale")
    fits = is_dense(x_scale) and x_scale.dtype == torch.float32 and x_scale.device == x.device
    if not fits or x_scale.shape not in shapes:
        need = f"float32 [1] or {list(shapes[1])} on {x.device}"
        _refuse(f"x_scale {told(x_scale)}", need, "those of ops.quantize_rows")


def _check_dense(w: Quantized, x: Tensor) -> None:
    if not is_dense(x):
        _refuse(f"x {told(x)}", f"a tensor on {w.device}", "torch.as_tensor(x)")


def _check_config(config: object, w: Quantized, x: Tensor, call: PlainCall) -> None:
    if not isinstance(config, Config):
        _refuse(f"config {told(config)}", "a Config of hopsparse.ops.spmm_nm.kernel", "config=None")
    check_numbers(config, numbers_of(w.scheme.group, x.dtype, call.out_dtype))


def _check_added(
    w: Quantized, x: Tensor, bias: Tensor | None, residual: Tensor | None, call: PlainCall
) -> None:
    out, dtype = w.shape[0], call.out_dtype
    allowed = _WIDE if x.dtype in _CODES else (x.dtype, torch.float32)
    if dtype not in allowed:
        known = " or ".join(map(str, allowed))
        _refuse(f"out_dtype={dtype} for x of {x.dtype}", known, str(allowed[0]))
    if bias is None and residual is None:
        return
    wanted, shape = (dtype, x.device), (*x.shape[:-1], out)
    if bias is not None and not (
        is_dense(bias) and bias.shape == (out,) and (bias.dtype, bias.device) == wanted
    ):
        _refuse(f"bias {told(bias)}", f"[{out}] of {dtype} on {x.device}", f"bias.to({dtype})")
    if residual is not None and not (
        is_dense(residual)
        and residual.shape == shape
        and (residual.dtype, residual.device) == wanted
    ):
        need = f"{list(shape)} of {dtype} on {x.device}"
        _refuse(f"residual {told(residual)}", need, "residual.to(y.dtype)")


def _refuse(fact: str, need: str, hint: str) -> NoReturn:
    raise ArgumentError(f"spmm_nm_int4: {fact}", need=need, hint=hint)
