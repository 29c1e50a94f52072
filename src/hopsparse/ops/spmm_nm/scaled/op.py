"""spmm_nm of 8-bit codes: y = act((w_scale x x_scale) * (x @ w.T) + bias) + residual."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real
from typing import Any, NoReturn

import torch
from torch import Tensor

from ....errors import ArgumentError, UnsupportedError
from ....formats._windows import windows_of
from ....formats.nm import NM
from ....formats.quantized import Quantized
from ..._product import Plan, is_dense, told
from ..cost import Problem
from ..kernel import ACTIVATIONS, SWIGLU, Config, check_numbers
from ..op import check_parts, needs_gradient, why_no_launch
from ..passed import Passed, looks_of
from .dispatch import (
    GROUP,
    Call,
    Pair,
    four_bits,
    groups_of_scale,
    numbers_of,
    scaled,
)

_PASSED = Passed("_passed_scaled")
CODES = (torch.int8, torch.float8_e4m3fn)
# int8 beside E4M3 holds two codes of 4 bits.
_X_DTYPES = {
    torch.int8: (torch.int8,),
    CODES[1]: (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8),
}
_WIDE = (torch.bfloat16, torch.float16, torch.float32)
_RESULTS = (*_WIDE, torch.int32, *CODES)
_SUMS = ("promoted", "fast")
_ACTIVATIONS = (*ACTIVATIONS, SWIGLU)
_QUANTIZED_HINT = 'w.codes(), with Scaling(w=w.tensors["scales"])'
# Two of every four columns are kept, also of the last ones, and -128 * -128 is 2^14.
_LONGEST_INT8 = (2**31 - 1) // 2**14 // 2 * 4
# What a code of a result stands for: both it and its inverse are float32, and neither is subnormal.
_LEAST_OUT, _MOST_OUT = 2.0**-126, 2.0**126


@dataclass(frozen=True)
class Scaling:
    """What 8-bit codes stand for, and how they are added up.

    Attributes:
        w: float32, one for all [1], for each out-feature [out] or [out, 1], or, of 8-bit floats,
            for each 128 columns of it [out, ceil(k / 128)]; None is 1.
        x: float32, one for all [1], or for each token [..., 1]; None is 1.
        out: What a code of an 8-bit result stands for, from 2^-126 to 2^126; such a result needs
            it.
        sums: Of 8-bit floats. `promoted` leaves the tensor cores every 128 or 256 columns, to add
            in float32. `fast` stays there, where a sum keeps about 14 bits. Integers are exact.
    """

    w: Tensor | None = None
    x: Tensor | None = None
    out: float | None = None
    sums: str = "promoted"


def spmm_nm_scaled(
    w: NM,
    x: Tensor,
    scaling: Scaling = Scaling(),
    *,
    bias: Tensor | None = None,
    act: str | None = None,
    residual: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    config: Config | None = None,
) -> Tensor:
    """Multiply 8-bit codes by a 2:4 weight of codes, scale, and finish, in one launch.

    On a Hopper GPU a 2:4 or 1:4 weight runs as one kernel, whatever the shape (x of 4 bits as two
    where that is predicted to be faster); all else decodes w and multiplies in float32. Integer
    sums are exact in int32. NaN and infinity of 8-bit floats and of scales reach the result; one in
    8 bits has no infinity, which becomes the largest code, and in int8 NaN is 0. No gradients:
    codes have none.

    Args:
        w: [out, k] of int8 or float8_e4m3fn.
        x: [..., k] of int8, or for a float8_e4m3fn weight of float8_e4m3fn or float8_e5m2; or for
            the latter int8 [..., k / 2], two int4 codes a byte, as `quantize_rows(x, "int4")` makes
            them: they are widened to E4M3, exactly, in every tile or once ahead. Any strides; rows
            that do not start on 16 bytes, or that are transposed, are copied.
        scaling: Scales, and how to add.
        bias: [out], of out_dtype where that is 16-bit, else float32; or None.
        act: `relu`, `gelu` (with erf), `gelu_tanh`, `silu` or None; or `swiglu`, silu(gate) * up of
            rows as `interleave_gate_up` orders them, without a residual.
        residual: [..., out] of out_dtype, which is then float32, bfloat16 or float16; or None.
        out_dtype: bfloat16, float16 or float32; int32, the sums of int8 as they are; or int8 or
            float8_e4m3fn: the nearest code of the value over `scaling.out`, at most 127 or 448.
        config: The kernel's tile; None chooses one.

    Returns:
        [..., out], contiguous; of `swiglu`, [..., out / 2].

    Raises:
        ArgumentError: Arguments do not fit each other.
        UnsupportedError: A side is longer than 2^31 - 2^13, or k of int8 than 2^18 - 4; or a CUDA
            graph is being captured, and the kernel is not loaded yet.

    Example:
        >>> w = NM.from_dense(torch.tensor([[3, 0, 0, -4], [0, 5, 0, 0]], dtype=torch.int8))
        >>> x = torch.tensor([[2, 1, 7, 1]], dtype=torch.int8)
        >>> spmm_nm_scaled(w, x, Scaling(x=torch.tensor([0.5])), out_dtype=torch.float32)
        tensor([[1.0000, 2.5000]])
    """
    looks = _looks(w, x, scaling, (bias, residual), (act, out_dtype, config))
    call: Call | None = _PASSED.find(w, looks)
    if call is None:
        call = _checked(w, x, scaling, (bias, residual), (act, out_dtype, config))
        _PASSED.keep(w, looks, call)
    return scaled(w, x, (scaling.w, scaling.x), (bias, residual), call)


def _looks(
    w: NM, x: Tensor, scaling: Scaling, added: Pair, words: tuple[Any, ...]
) -> tuple[Any, ...] | None:
    if type(w) is not NM or type(scaling) is not Scaling:
        return None
    tensors = (w.values, w.meta, x, scaling.w, scaling.x, *added)
    # A number that is none is told apart by its type: 1 and True are the same key.
    out = scaling.out
    return looks_of(tensors, (*words, scaling.sums, out, type(out)))


def _checked(w: NM, x: Tensor, scaling: Scaling, added: Pair, words: tuple[Any, ...]) -> Call:
    """All of a call but its tensors, after every check."""
    act, out_dtype, config = words
    activation = "none" if act is None else act
    check_codes(w, scaling, activation)
    _check_codes_of_x(w, x)
    call = Call(scaling.sums, activation, scaling.out, out_dtype, config)
    _check(w, x, scaling, call)
    scales = (scaling.w, scaling.x)
    _check_result(w, scales, added, call)
    _check_added(w, x, scales, added, call)
    return call


def interleave_gate_up(gate: Tensor, up: Tensor) -> Tensor:
    """Rows of two layers as `act="swiglu"` wants them in one: eight of gate, then eight of up.

    Weights before they are packed, and their biases and scales alike.

    Args:
        gate: [rows, ...], rows a multiple of 8.
        up: As gate.

    Returns:
        [2 rows, ...].

    Raises:
        ArgumentError: Other shapes, or no two tensors of one dtype and device.

    Example:
        >>> interleave_gate_up(torch.arange(8), torch.arange(10, 18)).tolist()
        [0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12, 13, 14, 15, 16, 17]
    """
    fits = is_dense(gate) and is_dense(up) and gate.shape == up.shape and gate.ndim > 0
    if not fits or (gate.dtype, gate.device) != (up.dtype, up.device) or gate.shape[0] % 8:
        raise ArgumentError(
            f"interleave_gate_up: gate {told(gate)}, up {told(up)}",
            need="two of one shape, dtype and device, with a multiple of 8 rows",
            hint="rows of zeros at the end of both",
        )
    pairs = [each.reshape(-1, 8, *each.shape[1:]) for each in (gate, up)]
    return torch.stack(pairs, 1).flatten(0, 2)


def plan_scaled(
    w: NM,
    x: Tensor,
    scaling: Scaling = Scaling(),
    *,
    act: str | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Plan:
    """What `spmm_nm_scaled(w, x, scaling, ...)` will run; x may have another shape.

    Raises:
        ArgumentError: Another kind of weight, x or scaling, or no such activation.
    """
    activation = "none" if act is None else act
    check_codes(w, scaling, activation)
    _check_codes_of_x(w, x)
    if x.device.type == "cpu":
        return Plan("spmm_nm_scaled", "reference", "x is on the CPU; w is decoded at every call")
    if (reason := why_no_kernel(w, x)) is not None:
        return Plan("spmm_nm_scaled", "dense", f"{reason}; w is decoded at every call")
    from ..chosen import describe
    from .plan import SCALED, as_widened, sums_of

    call = Call(scaling.sums, activation, scaling.out, out_dtype)
    numbers = numbers_of(w.dtype, x.dtype, call, groups_of_scale(scaling.w, w.shape[0]))
    problem = Problem(max(1, x.numel() // max(1, x.shape[-1])), *w.shape)
    where, ahead, behind = x.get_device(), "", ""
    if numbers.x == "int4":
        from .widened import widens_here

        if widens_here(problem, numbers, activation, where):
            ahead, numbers = "x widened to float8_e4m3fn once, then ", as_widened(numbers)
        else:
            behind = ", which widens x"
    tile = describe(SCALED, problem, numbers, activation, where)
    return Plan("spmm_nm_scaled", "kernel", f"{ahead}{tile}{behind}; {sums_of(numbers)} sums")


def why_no_kernel(w: NM, x: Tensor) -> str | None:
    """What keeps the kernel from running, as a clause; None if nothing does."""
    if not x.is_cuda:
        return f"x is on {x.device.type}"
    if windows_of(w.pattern) != 1:
        return f"{w.pattern} needs x gathered for each window"
    return why_no_launch((w.values, w.meta), x)


def check_codes(w: NM, scaling: Scaling, activation: object) -> None:
    """Refuse another kind of weight or of scaling, and an activation that is none.

    Raises:
        ArgumentError: It says which.
    """
    if not isinstance(w, NM) or w.dtype not in CODES:
        kind, hint = type(w).__name__, "spmm_nm for 16 bits"
        if isinstance(w, NM):
            kind = str(w.dtype)
        elif isinstance(w, Quantized):
            kind = f"{kind}, {w.scheme} in {w.codes_format}"
            hint = _QUANTIZED_HINT if w.scheme.bits == 8 else "spmm_nm_int4(w, x)"
        _refuse(f"w of {kind}", "an NM matrix of int8 or float8_e4m3fn", hint)
    if not isinstance(scaling, Scaling):
        _refuse(f"scaling {told(scaling)}", "a Scaling", "Scaling(w=..., x=...)")
    if not isinstance(activation, str) or activation not in _ACTIVATIONS:
        known = ", ".join(_ACTIVATIONS[1:])
        _refuse(f"act={activation!r}", f"one of {known}, or None", repr(ACTIVATIONS[1]))


def check_x_dtype(w: NM, dtype: object) -> None:
    """Refuse what no codes of x beside these of w are stored as.

    Raises:
        ArgumentError: It says what they are.
    """
    if not isinstance(dtype, torch.dtype) or dtype not in _X_DTYPES[w.dtype]:
        known = " or ".join(map(str, _X_DTYPES[w.dtype]))
        _refuse(f"x_dtype={dtype!r} beside w of {w.dtype}", known, str(w.dtype))


def _check_codes_of_x(w: NM, x: Tensor) -> None:
    dtypes = _X_DTYPES[w.dtype]
    if not is_dense(x) or x.dtype not in dtypes or x.device != w.device:
        fact = f"x is {x.dtype} on {x.device}" if is_dense(x) else f"x {told(x)}"
        need = f"{' or '.join(map(str, dtypes))} on {w.device}"
        _refuse(fact, need, f"ops.quantize_rows(x, {w.dtype})")


def _check(w: NM, x: Tensor, scaling: Scaling, call: Call) -> None:
    check_parts(w, (w.values, w.meta))
    out, k = w.shape
    # Of 6:8 more than half is kept.
    longest = min(_LONGEST_INT8, (2**31 - 1) // 2**14 // w.pattern.n * w.pattern.m)
    if w.dtype == torch.int8 and k > longest:
        raise UnsupportedError(
            f"spmm_nm_scaled: int8 rows of {k}",
            need=f"at most {longest}: their sums may leave int32",
            hint="w and x in pieces along k",
        )
    few = four_bits(w.dtype, x.dtype)
    if x.ndim < 1 or x.shape[-1] * (2 if few else 1) != k:
        need = f"[..., {k}{' / 2' if few else ''}] for a weight [{out}, {k}]"
        fact = f"x of shape {list(x.shape)}" + (", int4 codes two a byte" if few else "")
        _refuse(fact, need, 'ops.quantize_rows(x, "int4")' if few else "x.mT")
    if call.sums not in _SUMS:
        _refuse(f"sums={call.sums!r}", "one of " + ", ".join(_SUMS), "'promoted'")
    groups = -(-k // GROUP) if w.dtype != torch.int8 else 1  # Sums of integers stay integers.
    _check_scale("w", scaling.w, x, ((1,), (out,), (out, 1), (out, groups)))
    _check_scale("x", scaling.x, x, ((1,), (*x.shape[:-1], 1)))


def _check_scale(
    name: str, scale: Tensor | None, x: Tensor, shapes: tuple[tuple[int, ...], ...]
) -> None:
    if scale is None:
        return
    fits = is_dense(scale) and scale.dtype == torch.float32 and scale.device == x.device
    if not fits or tuple(scale.shape) not in shapes:
        shown = " or ".join(str(list(shape)) for shape in dict.fromkeys(shapes))
        need = f"float32 {shown} on {x.device}"
        _refuse(f"scale of {name} {told(scale)}", need, "torch.tensor([0.5]), or one number a row")


def _check_result(w: NM, scales: Pair, added: Pair, call: Call) -> None:
    """Refuse a dtype, a step of codes or an activation that this result cannot have."""
    dtype, step, (bias, residual) = call.out_dtype, call.out_scale, added
    if dtype not in _RESULTS:
        _refuse(f"out_dtype={dtype}", ", ".join(map(str, _RESULTS)), "torch.bfloat16")
    if step is not None or dtype in CODES:
        _check_step(step, dtype)
    if call.activation == SWIGLU:
        if w.shape[0] % 16:
            _refuse(f"swiglu of {w.shape[0]} rows", "a multiple of 16", "interleave_gate_up")
        if residual is not None:
            _refuse("swiglu with a residual", "no residual", "an addition after it")
    if dtype == torch.int32:
        scaled_up = any(t is not None for t in (*scales, bias)) or call.activation != "none"
        if w.dtype != torch.int8 or scaled_up:
            _refuse("a result of int32 with more to do", "sums of int8 as they are", "float32")


def _check_step(step: float | None, dtype: torch.dtype) -> None:
    # A tensor would be found again by its identity, whatever it holds by then.
    fits = isinstance(step, Real) and _LEAST_OUT <= step <= _MOST_OUT
    if dtype not in CODES or not fits:
        need = "a number from 2^-126 to 2^126 for a result in 8 bits, none for any other"
        _refuse(f"scaling.out={step} for {dtype}", need, "Scaling(out=0.1)")


def _check_added(w: NM, x: Tensor, scales: Pair, added: Pair, call: Call) -> None:
    (bias, residual), dtype, out = added, call.out_dtype, w.shape[0]
    wanted = dtype if dtype in _WIDE else torch.float32
    if bias is not None and not (
        is_dense(bias) and (bias.shape, bias.dtype, bias.device) == ((out,), wanted, x.device)
    ):
        _refuse(f"bias {told(bias)}", f"[{out}] of {wanted} on {x.device}", f"bias.to({wanted})")
    shape = (*x.shape[:-1], out)
    if residual is not None and not (
        dtype in _WIDE
        and is_dense(residual)
        and (residual.shape, residual.dtype, residual.device) == (shape, dtype, x.device)
    ):
        need = f"{list(shape)} on {x.device} as the result, of 16 or 32 bits"
        _refuse(f"residual {told(residual)} for {dtype}", need, "an addition after it")
    if needs_gradient(x, w.values, *scales, *added):
        _refuse("a tensor that requires a gradient", "none that does", "torch.no_grad(), detach()")
    if call.config is not None:
        _check_config(call.config, w, x, scales[0], call)


def _check_config(config: object, w: NM, x: Tensor, scale: Tensor | None, call: Call) -> None:
    if not isinstance(config, Config):
        _refuse(f"config {told(config)}", "a Config of hopsparse.ops.spmm_nm.kernel", "config=None")
    check_numbers(config, numbers_of(w.dtype, x.dtype, call, groups_of_scale(scale, w.shape[0])))


def _refuse(fact: Any, need: str, hint: str) -> NoReturn:
    raise ArgumentError(f"spmm_nm_scaled: {fact}", need=need, hint=hint or need)
