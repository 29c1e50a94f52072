"""y = x @ w.T + bias for any stored weight: what the operators that compute it agree on.

Which arguments are legal, what a plan is, how a stored weight becomes dense under autograd and
torch.compile, and what runs while an operator has no kernel.
"""

from __future__ import annotations

from ast import literal_eval
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.nn import functional as F

from ..errors import ArgumentError, UnsupportedError
from ..formats import Quantized, SparseMatrix, stored_named
from ..formats._places import places_of
from ..ranges import in_phase, phase

COMPUTE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

#: On the CPU a 16-bit weight is widened in pieces of about this many entries (4 MiB of float32).
#: 4096 x 4096 in bfloat16 on one core: 33 ms for 17 tokens, 54 ms in pieces of 2^16.
WIDE_ELEMENTS = 1 << 20

_STRIDED = torch.strided  # One object; looked up once, since checks of every call ask for it.

# Their decoding asks for no count that lives on the GPU, so a stream can capture it.
_CAPTURABLE = ("nm",)


@dataclass(frozen=True)
class Case:
    """A named problem: data only, so that listing cases needs no device.

    Attributes:
        name: Unique within an operator.
        tokens: Rows of x.
        out: Rows of w.
        k: Columns of w and of x.
        pattern: Sparsity of w, as `parse_pattern` reads it.
    """

    name: str
    tokens: int
    out: int
    k: int
    pattern: str


@dataclass(frozen=True)
class Plan:
    """What will run, decided before it runs.

    Attributes:
        op: Name of the operator, or "linear" for a format without one.
        name: "reference" (float32 accumulation), "kernel" (ours) or "dense" (PyTorch's product).
        why: The reason, as a clause.
    """

    op: str
    name: str
    why: str

    def describe(self) -> str:
        """One line for people.

        Example:
            >>> Plan("spmm_nm", "reference", "x is on the CPU").describe()
            'spmm_nm runs reference: x is on the CPU'
        """
        return f"{self.op} runs {self.name}: {self.why}"


def product_plan(op: str, x: Tensor) -> Plan:
    """The plan of an operator that has no kernel yet."""
    if x.device.type == "cpu":
        return Plan(op, "reference", "x is on the CPU; w is decoded at every call")
    return Plan(op, "dense", "no kernel yet; w is decoded at every call for PyTorch's product")


def planned_product(
    plan: Plan,
    w: SparseMatrix,
    x: Tensor,
    bias: Tensor | None,
    *,
    kind: type[SparseMatrix] | None = None,
    reference: Callable[[SparseMatrix, Tensor, Tensor | None], Tensor],
) -> Tensor:
    """Check the arguments and run one of the two plans that need no kernel.

    Raises:
        ArgumentError, FormatError, UnsupportedError: See `check_product` and `decompress`.
    """
    check_product(plan.op, w, x, bias, kind)
    if plan.name == "reference":
        return reference(w, x, bias)
    return F.linear(x, decompress(w), bias)


def reference_product(w: SparseMatrix, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """The product y = x @ w.T + bias, accumulated in float32.

    Args:
        w: [out, k].
        x: [..., k], any strides, on any device.
        bias: [out] or None.

    Returns:
        [..., out] in the dtype of x.
    """
    return product(decompress(w), x, bias)


def check_product(
    op: str,
    w: SparseMatrix,
    x: Tensor,
    bias: Tensor | None,
    kind: type[SparseMatrix] | None = None,
) -> None:
    """Refuse arguments of `y = x @ w.T + bias` that cannot mean anything, before any work.

    Raises:
        ArgumentError: Wrong kind of matrix, or a k, dtype, device or bias that does not fit.
        FormatError: Parts of `w` have the wrong shape or dtype.
        UnsupportedError: 8-bit values, which need scales.
    """
    check_weight(op, w, kind)
    check_inputs(op, w, x, bias)


def check_weight(op: str, w: SparseMatrix, kind: type[SparseMatrix] | None = None) -> None:
    """The part of `check_product` that looks at the weight alone."""
    if kind is not None and not isinstance(w, kind):
        raise ArgumentError(
            f"{op}: weight of type {type(w).__name__}",
            need=f"a {kind.__name__} matrix",
            hint=f"{kind.__name__}.from_dense(w.to_dense())",
        )
    if not torch.compiler.is_compiling():
        # Facts of constants: checked when the graph is first run eagerly, not traced.
        w._check_parts()
    if w.dtype not in COMPUTE_DTYPES:
        raise UnsupportedError(
            f"{op}: values of {w.dtype}",
            need="float32, bfloat16 or float16 values",
            hint="store the weight in bfloat16",
        )


def is_dense(value: object) -> TypeGuard[Tensor]:
    """Whether this is a tensor with strides: no list, no array, not sparse, not nested.

    Example:
        >>> is_dense(torch.ones(2)), is_dense(torch.eye(2).to_sparse()), is_dense(0.5)
        (True, False, False)
    """
    return isinstance(value, Tensor) and value.layout is _STRIDED and not value.is_nested


def told(value: object) -> str:
    """A value as an error tells it: shape, dtype and device of a tensor, or else its type.

    Example:
        >>> told(torch.ones(2)), told(0.5)
        ('[2] of torch.float32 on cpu', 'of type float')
    """
    if not isinstance(value, Tensor):
        return f"of type {type(value).__name__}"
    if not is_dense(value):
        kind = "nested" if value.is_nested else str(value.layout)
        return f"of {value.dtype} on {value.device}, {kind}"
    return f"{list(value.shape)} of {value.dtype} on {value.device}"


def check_inputs(op: str, w: SparseMatrix | Tensor, x: Tensor, bias: Tensor | None) -> None:
    """The part of `check_product` that changes from call to call; `w` may be decoded already."""
    out, k = w.shape
    if x.ndim < 1 or x.shape[-1] != k:
        raise ArgumentError(
            f"{op}: x of shape {list(x.shape)}",
            need=f"[..., {k}] for a weight [{out}, {k}]",
            hint="x.transpose(-1, -2), if x holds tokens along its last dimension",
        )
    for name, tensor in (("x", x), ("bias", bias)):
        if tensor is not None and (tensor.dtype != w.dtype or tensor.device != w.device):
            raise ArgumentError(
                f"{op}: {name} is {tensor.dtype} on {tensor.device}",
                need=f"{w.dtype} on {w.device}, as the weight is",
                hint=f"{name}.to(w.device, w.dtype)",
            )
    if bias is not None and bias.shape != (out,):
        raise ArgumentError(
            f"{op}: bias of shape {list(bias.shape)}",
            need=f"[{out}], one number an output feature",
            hint="add a term for each token after the product",
        )


@in_phase("sparse", "reference")
def product(weight: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
    """`x @ weight.T + bias` accumulated in float32: the definition all references share.

    Args:
        weight: Dense [out, k], in the dtype of `x` or in float32.
        x: [..., k], any strides, any number of tokens, also none.
        bias: [out] or None.

    Returns:
        [..., out] in the dtype of `x`.
    """
    tracked = torch.is_grad_enabled() and any(
        tensor is not None and tensor.requires_grad for tensor in (weight, x, bias)
    )
    narrow = weight.dtype == x.dtype != torch.float32
    if narrow and weight.device.type == "cpu" and not tracked and not torch.compiler.is_compiling():
        return _product_in_pieces(weight, x, bias)
    wide = None if bias is None else bias.to(torch.float32)
    return F.linear(x.to(torch.float32), weight.to(torch.float32), wide).to(x.dtype)


def _product_in_pieces(weight: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
    """`product` without a float32 copy of the weight."""
    out, k = weight.shape
    if x.numel() == k:
        # One token reads the weight once, and widening it costs more than that. torch sums the
        # products of 16-bit vectors in float32 (3.6 to 7 ms for 4096 x 4096, against 9 widened);
        # from two tokens on it is several times slower where the CPU has no 16-bit arithmetic.
        return F.linear(x, weight, bias)
    wide = x.to(torch.float32)
    result = x.new_empty((*x.shape[:-1], out))
    step = max(1, WIDE_ELEMENTS // k)
    for first in range(0, out, step):
        rows = slice(first, first + step)
        offset = None if bias is None else bias[rows].to(torch.float32)
        result[..., rows] = F.linear(wide, weight[rows].to(torch.float32), offset)
    return result


def check_capture(w: SparseMatrix, hint: str) -> None:
    """Refuse to decode while the current stream is captured, before the stream sees anything.

    A decoding that reads counts back from the GPU would fail inside the capture and spoil it.

    Raises:
        UnsupportedError: A capture is under way.
    """
    # The one question about CUDA that all operators without a kernel share: three copies of it in
    # ops/*/op.py could drift apart.
    if w.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise UnsupportedError(
            f"a {w.name} weight to decode while a CUDA graph is captured",
            need="a weight that was decoded before the capture began",
            hint=hint,
        )


def finish_decoding(weight: Tensor) -> None:
    """Wait for a decoded weight that calls on any stream may read from now on."""
    if weight.device.type == "cuda":
        torch.cuda.current_stream(weight.device).synchronize()


def decompress(w: SparseMatrix) -> Tensor:
    """`w.to_dense()`, differentiable in the values and one node to torch.compile.

    The gradient of a kept value is that of its entry; zeros stay zero, so their gradient is zero.

    Returns:
        [rows, cols] in the dtype and on the device of the values.

    Raises:
        UnsupportedError: A CUDA graph is being captured, and the format reads counts back; or a
            part of a quantized matrix needs a gradient.

    Example:
        >>> from hopsparse.formats.nm import NM
        >>> decompress(NM.from_dense(torch.tensor([[3.0, 0.0, 0.0, 0.0]])))
        tensor([[3., 0., 0., 0.]])
    """
    # Written out rather than in JSON: this runs while Dynamo traces, and Dynamo knows no encoder.
    facts = ", ".join([f"{key!r}: {value!r}" for key, value in w.attributes().items()])
    parts = list(w.parts().values())
    if isinstance(w, Quantized) and any(part.requires_grad for part in parts):
        raise UnsupportedError(
            "a gradient of stored codes or scales",
            need="parts without requires_grad",
            hint="train a dense weight with hopsparse.quant.fake_weight, and store it afterwards",
        )
    dense: Tensor = _decompress(parts, w.name, w.shape[0], w.shape[1], f"{{{facts}}}")
    return dense


# A custom operator, because decoding is loops and data-dependent sizes: traced op by op it would
# be hundreds of nodes a layer for N:M and graph breaks for CSR. The product around it stays plain
# torch, so x and bias need no rule of their own, and inductor may fuse what surrounds it.
def _run_decompress(
    parts: Sequence[Tensor], format: str, rows: int, cols: int, attributes: str
) -> Tensor:
    matrix = _matrix(parts, format, (rows, cols), attributes)
    if format not in _CAPTURABLE:
        check_capture(matrix, "SparseLinear, called once before the capture")
    with phase("format", f"decode {format}"):
        return matrix.to_dense()


def _dense_result(
    parts: Sequence[Tensor], format: str, rows: int, cols: int, attributes: str
) -> Tensor:
    matrix = _matrix(parts, format, (rows, cols), attributes)
    return parts[0].new_empty((rows, cols), dtype=matrix.dtype)


def _run_gather_kept(
    grad: Tensor, parts: Sequence[Tensor], format: str, rows: int, cols: int, attributes: str
) -> list[Tensor]:
    """Entries of `grad` [rows, cols] at the places of the kept values, shaped as the values are."""
    matrix = _matrix(parts, format, (rows, cols), attributes)
    places = places_of(matrix)
    kept = places > 0
    values = [part for part in parts if part.is_floating_point()]
    sizes = [part.numel() for part in values]
    flat = grad.new_zeros(sum(sizes))
    flat[places[kept] - 1] = grad[kept]
    pieces = torch.split(flat, sizes)
    return [piece.view(part.shape).clone() for piece, part in zip(pieces, values, strict=True)]


def _kept_result(
    grad: Tensor, parts: Sequence[Tensor], format: str, rows: int, cols: int, attributes: str
) -> list[Tensor]:
    return [grad.new_empty(part.shape) for part in parts if part.is_floating_point()]


def _setup_context(ctx: torch.autograd.function.FunctionCtx, inputs: tuple, output: Tensor) -> None:  # type: ignore[type-arg]
    parts, *facts = inputs
    ctx.save_for_backward(*parts)
    ctx.facts = facts  # type: ignore[attr-defined]


def _backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[object, ...]:
    parts = ctx.saved_tensors  # type: ignore[attr-defined]
    found = iter(gather_kept(grad, parts, *ctx.facts))  # type: ignore[attr-defined]
    return [next(found) if part.is_floating_point() else None for part in parts], *[None] * 4


def _no_second_gradient(ctx: object, *grads: object) -> None:
    raise UnsupportedError(
        "a gradient of a gradient of a stored weight",
        need="first gradients",
        hint="w.to_dense() of values that require a gradient, and a dense product",
    )


# Written out: torch.library.custom_op imports Dynamo at the first call, which takes 2 to 3 s.
LIBRARY: Any = torch.library.Library("hopsparse", "FRAGMENT")  # type: ignore[no-untyped-call]
_TAG, _ANY, _STORED = (
    torch.Tag.pt2_compliant_tag,
    "CompositeExplicitAutograd",
    "Tensor[] parts, str format, SymInt rows, SymInt cols, str attributes",
)
LIBRARY.define(f"decompress({_STORED}) -> Tensor", tags=_TAG)
LIBRARY.define(f"gather_kept(Tensor grad, {_STORED}) -> Tensor[]", tags=_TAG)
LIBRARY.impl("decompress", _run_decompress, _ANY)
LIBRARY.impl("gather_kept", _run_gather_kept, _ANY)
torch.library.register_fake("hopsparse::decompress", _dense_result, lib=LIBRARY)
torch.library.register_fake("hopsparse::gather_kept", _kept_result, lib=LIBRARY)
torch.library.register_autograd(
    "hopsparse::decompress", _backward, setup_context=_setup_context, lib=LIBRARY
)
torch.library.register_autograd("hopsparse::gather_kept", _no_second_gradient, lib=LIBRARY)
_decompress = torch.ops.hopsparse.decompress.default
#: Entries of `grad` [rows, cols] at the places of the kept values, shaped as the values are.
gather_kept = torch.ops.hopsparse.gather_kept.default


def _matrix(
    parts: Sequence[Tensor], format: str, shape: tuple[int, int], attributes: str
) -> SparseMatrix:
    kind, facts = stored_named(format), literal_eval(attributes)
    named = dict(zip(kind.part_names(facts), parts, strict=True))
    return kind.from_parts(shape, named, facts)


# A dictionary, because torch.compile of torch 2.11 warns of functools.cache in what it traces.
_HOPPER: dict[int, bool] = {}


def is_hopper(device: int) -> bool:
    """Whether a GPU, by its ordinal, runs the kernels of sm_90a."""
    known = _HOPPER.get(device)
    if known is None:
        known = _HOPPER[device] = torch.cuda.get_device_capability(device) == (9, 0)
    return known
