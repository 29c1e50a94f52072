"""y[t] = act(x[t] @ w[e].T + bias[e]), e the expert of token t: checks, plan, run."""

from __future__ import annotations

import torch
from torch import Tensor

from ....errors import ArgumentError
from ....formats.nm import NM
from ..._call import check_tensors
from ..._product import Plan, check_weight
from ..facts import PlainCall
from ..kernel import MOST_EXPERTS, PANEL, Config
from ..op import check_choices, check_epilogue, needs_gradient, why_no_kernel
from ..plan import for_experts
from .dispatch import by_experts
from .plan import ExpertsProblem

_OP = "spmm_nm_experts"


def spmm_nm_experts(
    w: NM,
    x: Tensor,
    offs: Tensor,
    *,
    bias: Tensor | None = None,
    act: str | None = None,
    out_dtype: torch.dtype | None = None,
    config: Config | None = None,
) -> Tensor:
    """Multiply each token by the weight of its expert: y[t] = act(x[t] @ w[e].T + bias[e]).

    On a Hopper GPU a 2:4 weight of 16-bit values runs as one kernel, which reads from `offs` how
    many tokens each expert has: the host waits for nothing, and one CUDA graph serves every
    sharing. All else, and what needs a gradient, runs one expert after the other in float32, and
    reads `offs` on the host; `plan_experts` says which.

    Args:
        w: [experts * out, k], the weights one below the other; float32, bfloat16 or float16.
            `out` is a multiple of 64.
        x: [tokens, k], dtype and device of w, any strides; tokens sorted by expert.
        offs: int32 [experts] on the device of w: one past the last token of each expert, as
            `torch._grouped_mm` takes them. Ascending; tokens past the last are given zeros. Values
            are not checked: others give wrong rows.
        bias: [experts, out], dtype and device of w, or None.
        act: `relu`, `gelu` (with erf), `gelu_tanh`, `silu` or None; or `swiglu`, silu(gate) * up of
            rows as `interleave_gate_up` orders those of each expert.
        out_dtype: Dtype of the result: that of x, or float32. None is that of x.
        config: The kernel's tile, one of `for_experts`; None chooses one.

    Returns:
        [tokens, out], contiguous; of `swiglu`, [tokens, out / 2].

    Raises:
        ArgumentError: Arguments do not fit each other.
        FormatError: Parts of w have the wrong shape or dtype.
        UnsupportedError: A side is longer than 2^31 - 2^13; or a CUDA graph is being captured, and
            the kernel is not loaded yet.

    Example:
        >>> w = NM.from_dense(torch.eye(64).repeat(2, 1) * torch.ones(128, 1).cumsum(0))
        >>> offs = torch.tensor([1, 3], dtype=torch.int32)
        >>> spmm_nm_experts(w, torch.ones(4, 64), offs)[:, 0].tolist()
        [1.0, 65.0, 65.0, 0.0]
    """
    check_tensors(_OP, x, bias)
    activation, out_dtype = act or "none", out_dtype or x.dtype
    check_weight(_OP, w, NM)
    _check_offs(w, offs)
    _check_x(w, x, offs, bias)
    check_epilogue(_OP, w.shape[0], x, activation, None, out_dtype)
    _check_config(config)
    return by_experts(w, x, offs, bias, PlainCall(activation, out_dtype, config))


def plan_experts(w: NM, x: Tensor, offs: Tensor) -> Plan:
    """What `spmm_nm_experts(w, x, offs)` will run."""
    if x.device.type == "cpu":
        return Plan(_OP, "reference", "x is on the CPU; w is decoded at every call")
    if (reason := why_no_experts_kernel(w, x)) is not None:
        return Plan(_OP, "dense", f"{reason}; w is decoded at every call, expert by expert")
    from .device import describe

    experts = len(offs)
    problem = ExpertsProblem(max(1, len(x)), experts, w.shape[0] // experts, w.shape[1])
    return Plan(_OP, "kernel", describe(problem, x.get_device()))


def why_no_experts_kernel(w: NM, x: Tensor, bias: Tensor | None = None) -> str | None:
    """What keeps the kernel from running, as a clause; None if nothing does."""
    if needs_gradient(w.values, x, bias):
        return "a gradient is to be kept"
    return why_no_kernel(w, x)


def _check_offs(w: NM, offs: Tensor) -> None:
    fits = isinstance(offs, Tensor) and offs.ndim == 1 and offs.dtype is torch.int32
    if not fits or offs.device != w.device or not 1 <= offs.shape[0] <= MOST_EXPERTS:
        given = (
            f"{list(offs.shape)} {offs.dtype} on {offs.device}"
            if isinstance(offs, Tensor)
            else repr(offs)
        )
        raise ArgumentError(
            f"{_OP}: offs {given}",
            need=f"int32 [experts] on {w.device}, 1 to {MOST_EXPERTS} of them",
            hint="counts.cumsum(0, dtype=torch.int32)",
        )
    rows, experts = w.shape[0], offs.shape[0]
    if rows % experts or rows // experts % PANEL:
        raise ArgumentError(
            f"{_OP}: {rows} rows of w for {experts} experts",
            need=f"as many rows for each, a multiple of {PANEL}",
            hint=f"weights padded with zeros to a multiple of {PANEL} rows",
        )


def _check_x(w: NM, x: Tensor, offs: Tensor, bias: Tensor | None) -> None:
    experts = offs.shape[0]
    shapes = {"x": (x, (None, w.shape[1])), "bias": (bias, (experts, w.shape[0] // experts))}
    for name, (tensor, wanted) in shapes.items():
        if tensor is None:
            continue
        sizes = zip(tensor.shape, wanted, strict=False)
        fits = tensor.ndim == 2 and all(want in (None, size) for size, want in sizes)
        if not fits or tensor.dtype != w.dtype or tensor.device != w.device:
            shown = ", ".join("tokens" if each is None else str(each) for each in wanted)
            raise ArgumentError(
                f"{_OP}: {name} {list(tensor.shape)} {tensor.dtype} on {tensor.device}",
                need=f"[{shown}] {w.dtype} on {w.device}",
                hint=f"{name} in the layout of w, which has {experts} experts",
            )


def _check_config(config: Config | None) -> None:
    check_choices(1, config)
    if config is not None and config not in for_experts():
        raise ArgumentError(f"{_OP}: {config}", need="a tile of for_experts()", hint="config=None")
