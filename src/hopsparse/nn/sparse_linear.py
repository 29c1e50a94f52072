"""A linear layer whose weight is a stored sparse matrix."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parameter import is_lazy

from ..errors import ArgumentError
from ..formats import BSR, CSR, NM, Attribute, Quantized, SparseMatrix
from ..launch import hold
from ..ops._call import apply_activation
from ..ops._product import (
    Plan,
    check_inputs,
    planned_product,
    product,
    product_plan,
    reference_product,
)
from ..ops.spmm_bsr import op as spmm_bsr
from ..ops.spmm_csr import op as spmm_csr
from ..ops.spmm_nm import op as spmm_nm
from ..ops.spmm_nm.ahead import load as load_nm
from ..ops.spmm_nm.cost import counted
from ..ops.spmm_nm.dense import DenseCounts, counts_of
from ._ahead import prepare_kernels
from ._codes import codes_plan, product_of_codes, put_together, rounded, takes_codes
from ._kept import MadeOf, decoded, kept_plan, may_keep, still_there
from ._parts import (
    after_cast,
    allocated,
    broken_parts,
    checked_act,
    device_type,
    stored,
    values_only,
)
from ._tiles import prepare_tiles, product_by_kernel

# Of each format that has them: the operator, its plan, and the plan of a layer that keeps a decoded
# weight. The others run as the plain product.
_OPERATORS: dict[str, tuple[Callable[..., Tensor], Callable[..., Plan], Callable[..., Plan]]] = {
    "nm": (spmm_nm.spmm_nm, spmm_nm.plan, spmm_nm.plan_kept),
    "bsr": (spmm_bsr.spmm_bsr, spmm_bsr.plan, spmm_bsr.plan_kept),
    "bsr24": (spmm_bsr.spmm_bsr, spmm_bsr.plan, spmm_bsr.plan_kept),
    "csr": (spmm_csr.spmm_csr, spmm_csr.plan, spmm_csr.plan_kept),
}

# Where layers run. To ask torch for more (is_autocast_available) breaks graphs in torch 2.11.
_AUTOCASTS = ("cpu", "cuda")


class SparseLinear(nn.Module):
    """y = x @ w.T + bias for a stored weight w [out_features, in_features].

    The parts of the matrix are buffers under their own names (`values`, `meta`, ...), so that
    state_dict, `.to()`, deepcopy and safetensors see plain tensors. A cast changes values only.

    A 2:4 weight of 16-bit values, or of codes of a scheme with a kernel (docs/quant.md), runs it on
    a Hopper GPU, and nothing is decoded; except for token counts where `hopsparse tune` measured
    dense to be faster (docs/ops/spmm_nm.md). So does a weight in blocks where its kernel is
    predicted to beat dense (docs/ops/spmm_bsr.md), and a large CSR weight up to 16 tokens, where
    it was measured to (docs/ops/spmm_csr.md). Else the first call decodes the weight and later
    calls multiply with what it made: the time of the dense layer, and its memory on top of the
    stored matrix. The decoded weight has the dtype of the values on every device (2 bytes an entry
    in bfloat16; `plan(x).describe()` says how many in all) and is never saved, copied or moved. It
    is dropped when a part is another tensor or was changed in place; only edits through `.data` go
    unnoticed. `SparseLinear.keep_decoded = False`, on the class or a module, decodes at every call
    instead, or runs the kernel where there is one. So do compiled calls, values that need a
    gradient, and parts made in inference mode, whose changes torch does not count.

    A `Quantized` matrix without a kernel is multiplied as codes * scales, in float32 where x is
    float32, else rounded to its dtype, with inputs that its scheme rounds first. A cast changes the
    dtype that it stands for, and touches neither codes nor scales.

    `load_state_dict` refuses parts on the CPU that break the format, but parts of another matrix
    may be legal here: those of a 4:6 [8, 48] are those of a 2:4 [8, 64]. `torch.export` of a bare
    nm layer fails, because the part `meta` is an attribute of its GraphModule too: export a module
    that holds the layer.

    `act` is an activation that follows the product, one of those of `ops.spmm_nm`; where a kernel
    runs, it runs there. `hopsparse.graphs.fuse_activations` sets it. It is no part of the
    checkpoint.

    A CUDA graph captures calls that were made once before, with as many tokens. Others refuse,
    because decoding reads counts back from the GPU. A 2:4 layer with a kernel always captures that:
    its replays read the parts as they are then. Others read them as of the last call.

    Args:
        matrix: The weight, in any format.
        bias: [out_features] or None; a Parameter is used as it is.

    Example:
        >>> linear = nn.Linear(8, 2).requires_grad_(False)
        >>> linear.weight.view(-1, 4)[:, 2:] = 0.0
        >>> sparse, x = SparseLinear.from_linear(linear), torch.ones(3, 8)
        >>> torch.equal(sparse(x), linear(x))
        True
    """

    bias: nn.Parameter | None
    keep_decoded: bool = True
    act: str | None = None
    _assembled: object  # The matrix, or what a helper made of its parts; None: not yet.
    _dense_counts: DenseCounts  # Of what was assembled last.

    def __init__(self, matrix: SparseMatrix, bias: Tensor | None = None) -> None:
        super().__init__()
        if not isinstance(matrix, SparseMatrix):
            raise ArgumentError(
                f"a {type(matrix).__name__} as the matrix",
                need="a stored matrix",
                hint="SparseLinear(NM.from_dense(weight)), or SparseLinear.from_linear(linear)",
            )
        fits = bias is None or (bias.is_floating_point() and bias.shape == (matrix.shape[0],))
        if bias is not None and not fits:
            raise ArgumentError(
                f"bias of shape {list(bias.shape)} and {bias.dtype}",
                need=f"[{matrix.shape[0]}], one floating number an output feature",
                hint="SparseLinear(matrix), without a bias",
            )
        self.out_features, self.in_features = matrix.shape
        for name, part in matrix.parts().items():
            self.register_buffer(name, part)
        if bias is not None and not isinstance(bias, nn.Parameter):
            bias = nn.Parameter(bias)
        self.register_parameter("bias", bias)
        self._remember(matrix)

    @classmethod
    def from_linear(cls, linear: nn.Linear, fmt: str = "nm", **options: Any) -> Self:
        """Store the weight of a dense layer that has its zeros already; nothing is pruned.

        Args:
            linear: The layer; its bias is shared.
            fmt: Token of a format.
            options: Of the format's `from_dense`: `pattern` of nm, `block` of bsr.

        Raises:
            ArgumentError: `linear` is no nn.Linear, or no such format or option.
            FormatError: The weight breaks the pattern.

        Example:
            >>> SparseLinear.from_linear(nn.Linear(4, 4, bias=False), "csr").matrix.name
            'csr'
        """
        if not isinstance(linear, nn.Linear) or is_lazy(linear.weight):
            raise ArgumentError(
                f"a module of class {type(linear).__name__}",
                need="an nn.Linear that has its weight",
                hint="SparseLinear(matrix, bias)",
            )
        matrix = stored(linear.weight.detach(), fmt, options)
        return cls(matrix, linear.bias).train(linear.training)

    @classmethod
    def empty(
        cls,
        shape: tuple[int, int],
        dtype: torch.dtype,
        fmt: str,
        attributes: Mapping[str, Attribute],
        *,
        bias: bool = False,
        device: torch.device | str | None = None,
    ) -> Self:
        """Allocate a layer without contents, for a loader to fill; on "meta" nothing at all.

        Args:
            shape: [out_features, in_features].
            dtype: Of the values and the bias.
            fmt: Token of a format, or "quantized".
            attributes: Facts of that format, such as {"pattern": "2:4"}.
            bias: Whether there is one.
            device: Where; None is torch's default.

        Raises:
            ArgumentError: No such format.
            FormatError: No such shape or dtype, or attributes are missing or malformed.

        Example:
            >>> SparseLinear.empty((4, 8), torch.bfloat16, "nm", {"pattern": "2:4"}, device="meta")
            SparseLinear(in_features=8, out_features=4, bias=False, nm(pattern=2:4), bfloat16, \
4608 bytes)
        """
        matrix = allocated(shape, dtype, fmt, attributes, device)
        offset = nn.Parameter(torch.empty(shape[0], dtype=dtype, device=device)) if bias else None
        return cls(matrix, offset)

    def __setattr__(self, name: str, value: Any) -> None:
        # Before nn.Module sees it, which would take a module for a child.
        super().__setattr__(name, checked_act(value, self) if name == "act" else value)

    @property
    def matrix(self) -> SparseMatrix:
        """The weight; shares the tensors of this module."""
        return self._form.with_parts({name: getattr(self, name) for name in self._form.parts()})

    def to_dense(self) -> Tensor:
        """The weight [out_features, in_features], as a new tensor."""
        return self.matrix.to_dense()

    def plan(self, x: Tensor) -> Plan:
        """What `self(x)` will run, and the memory that it keeps for that.

        Example:
            >>> layer = SparseLinear.from_linear(nn.Linear(4, 4).requires_grad_(False), "csc")
            >>> layer.plan(torch.ones(1, 4)).describe()
            'linear runs reference: x is on the CPU; w is decoded once and kept, 64 bytes'
        """
        matrix, _ = self.matrix, device_type(x)
        keeps, known = self._may_keep(matrix), _OPERATORS.get(matrix.name)
        of_op = known and (known[2] if keeps else known[1])
        plan = of_op(matrix, x) if of_op else product_plan("linear", x)
        if isinstance(matrix, Quantized):
            plan = codes_plan(matrix, x, self.bias) or plan
            plan = replace(plan, why=f"{matrix.scheme.describe()}; {plan.why}")
        return kept_plan(plan, matrix) if keeps else plan

    def prepare(self, max_tokens: int) -> None:
        """Do what a first call would: after it, no call of so many tokens compiles or decodes.

        Args:
            max_tokens: Most rows of x, all leading dimensions multiplied.

        Raises:
            ArgumentError: No tokens.
            CompileError: A kernel does not compile.
            UnsupportedError: A CUDA graph is being captured.
        """
        matrix = self.matrix
        if isinstance(matrix, CSR) and prepare_tiles(self, counted(max_tokens)):
            return
        decodes = prepare_kernels(matrix, counted(max_tokens), self.bias, self.act)
        if decodes and self._may_keep(matrix) and self._kept_weight() is None:
            self._decode(matrix)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply.

        Args:
            x: [..., in_features], device and dtype of the weight; under autocast any float dtype,
                and the weight's own precision decides.

        Returns:
            [..., out_features], in the dtype of x; under autocast in the dtype of autocast.

        Raises:
            ArgumentError: `x` does not fit.
            UnsupportedError: A CUDA graph is being captured, and no call came before.
        """
        device = device_type(x)
        if device in _AUTOCASTS and torch.is_autocast_enabled(device):
            with torch.autocast(device, enabled=False):
                y = self._run(x.to(self.values_dtype))
            return y.to(torch.get_autocast_dtype(device))
        return self._run(x)

    def extra_repr(self) -> str:
        """Sizes, format, dtype and stored bytes."""
        matrix, act = self.matrix, "" if self.act is None else f"act={self.act}, "
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, {act}{matrix.name}({matrix.facts_text()}), "
            f"{str(matrix.dtype).removeprefix('torch.')}, {matrix.nbytes} bytes"
        )

    @property
    def values_dtype(self) -> torch.dtype:
        """Dtype of the kept values, which `x` must have; quantized ones stand for it."""
        if isinstance(self._form, Quantized):
            return self._form.dtype
        return cast(Tensor, getattr(self, self._form.VALUES)).dtype

    def _run(self, x: Tensor) -> Tensor:
        form, act = self._form, self.act
        if isinstance(form, NM) and x.is_cuda:
            compiling = torch.compiler.is_compiling()
            packed = cast(NM, self.matrix) if compiling else self._packed()
            bias = self._parameters["bias"]
            if spmm_nm.check_operands("linear", packed, x, bias):
                weight = None
                if not compiling and not self._dense_counts.never:
                    weight = self._faster_weight(packed, x)
                if weight is None:
                    return spmm_nm.run_kernel(packed, x, bias, None, act or "none")
                return apply_activation(F.linear(x, weight, bias), act or "none")
        elif isinstance(form, Quantized):
            if takes_codes(form, x, self.bias):
                return product_of_codes(put_together(self, form), x, self.bias, act)
            x = rounded(x, form, self._buffers.get("input_scale"))
        elif (
            isinstance(form, BSR | CSR) and (y := product_by_kernel(self, form, x, act)) is not None
        ):
            return y
        return apply_activation(self._run_decoded(x), act or "none")

    def _run_decoded(self, x: Tensor) -> Tensor:
        weight = self._kept_weight()
        if weight is None:
            matrix = self.matrix
            if not self._may_keep(matrix):
                return self._run_decoding(matrix, x)
            weight = self._decode(matrix)
        check_inputs("linear", weight, x, self.bias)
        if x.device.type == "cpu":
            return product(weight, x, self.bias)
        if not torch.compiler.is_compiling() and self._decoded is not None:
            hold(weight, partial(still_there, self._decoded[0], self._buffers))
        return F.linear(x, weight, self.bias)

    def _run_decoding(self, matrix: SparseMatrix, x: Tensor) -> Tensor:
        if matrix.name in _OPERATORS:
            return _OPERATORS[matrix.name][0](matrix, x, bias=self.bias)
        plan = product_plan("linear", x)
        return planned_product(plan, matrix, x, self.bias, reference=reference_product)

    def _packed(self) -> NM:
        """The matrix, put together again only where a part is another tensor."""
        parts, known = self._buffers, cast("NM | None", self._assembled)
        # Values that are trained may be a Parameter, which is no buffer.
        values, meta = parts.get("values"), parts.get("meta")
        if not known or known.values is not values or known.meta is not meta:
            self._assembled = known = cast(NM, self.matrix)
            self._dense_counts = counts_of(known)
        return known

    def _faster_weight(self, packed: NM, x: Tensor) -> Tensor | None:
        """The kept weight, where dense was measured to be faster for this many tokens."""
        tokens = x.numel() // self.in_features
        if tokens not in self._dense_counts or not self.keep_decoded or not spmm_nm.may_skip(x):
            return None
        if spmm_nm.is_captured(x):
            return None  # A replay would go on with what the weight was.
        weight = self._kept_weight()
        if weight is None and self._may_keep(packed):
            weight = self._decode(packed)
        if (tokens, self.act) not in self._loaded:  # A capture that follows takes the kernel.
            load_nm(packed, tokens, self.act)
            self._loaded.add((tokens, self.act))
        return weight

    def _remember(self, matrix: SparseMatrix) -> None:
        """Keep what tensors do not say: the format, the shape and the pattern."""
        # The buffers alone hold its tensors.
        self._form: SparseMatrix = matrix.with_parts(dict.fromkeys(matrix.parts()))
        self._decoded: tuple[list[MadeOf], Tensor] | None = None
        self._assembled = None
        self._loaded: set[tuple[int, str | None]] = set()

    def _may_keep(self, matrix: SparseMatrix) -> bool:
        # Parts that became parameters are no buffers, where `_kept_weight` looks for them.
        buffers = matrix.parts().keys() <= self._buffers.keys()
        return self.keep_decoded and buffers and may_keep(matrix)

    def _kept_weight(self) -> Tensor | None:
        """The decoded weight, if the parts are still the ones it was made of."""
        # Every call comes here: on a GPU one token of a small layer takes less than a few
        # attribute look-ups of nn.Module, so the matrix is not put together.
        if torch.compiler.is_compiling() or self._decoded is None or not self.keep_decoded:
            return None
        parts, weight = self._decoded
        return weight if still_there(parts, self._buffers) else None

    def _decode(self, matrix: SparseMatrix) -> Tensor:
        """Check and decode the weight, and keep it."""
        self._decoded = decoded(matrix)
        return self._decoded[1]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """What `.to()`, `.half()`, `.cuda()` call: casts reach values, never indices or codes."""
        before = self.matrix
        cast_to, guarded = values_only(before, fn)
        self._decoded, self._assembled = None, None
        super()._apply(guarded, recurse)  # type: ignore[no-untyped-call]
        if isinstance(self._form, Quantized):
            self._form = self._form.with_dtype(cast_to)
        for name, part in after_cast(before, self.matrix).items():
            setattr(self, name, part)
        return self

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, *rest: Any, **kwargs: Any
    ) -> None:
        self._decoded, self._assembled = None, None
        super()._load_from_state_dict(state_dict, prefix, *rest, **kwargs)
        errors: list[str] = kwargs["error_msgs"] if "error_msgs" in kwargs else rest[-1]
        if not errors and all(f"{prefix}{name}" in state_dict for name in self._form.parts()):
            errors += broken_parts(self.matrix, prefix.rstrip(".") or "this layer")

    def __getstate__(self) -> dict[str, Any]:
        # Copies and pickles start without the decoded weight.
        return self.__dict__ | dict.fromkeys(("_decoded", "_assembled", "_dense_counts"))
