"""What the config of a compressed-tensors checkpoint says, and its 8-bit codes and scales.

Beside NAME.weight, or the parts that stand for it, lie NAME.weight_scale ([R, 1], or one number for
all rows) and, of a static scheme, NAME.input_scale. A weight is code * scale.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError, FormatError, UnsupportedError
from ..formats import NM, Quantized, Scheme, SparseMatrix, format_named
from ..formats.quantized import code_dtype
from .checkpoint import CheckpointReader

#: Parts beside a weight, which become parts of one matrix.
BESIDE = ("weight_scale", "input_scale", "weight_zero_point")
#: What `format` of the config says where a scheme is read.
FORMATS_OF_CODES = ("float-quantized", "int-quantized", "naive-quantized")

_TYPES = {"float": "fp8", "int": "int8"}
_LOGICAL = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def scheme_of(section: Mapping[str, Any], folder: object) -> Scheme | None:
    """The scheme of a `quantization_config`; None where weights are as they were trained.

    Args:
        section: The `quantization_config`.
        folder: Shown to users.

    Raises:
        UnsupportedError: It quantises in a way that no scheme here describes.
    """
    groups = section.get("config_groups")
    if not groups:
        return None
    listed = list(groups.values()) if isinstance(groups, Mapping) else []
    group = listed[0] if len(listed) == 1 else None
    weights, inputs = _told(group, "weights"), _told(group, "input_activations")
    kind = _TYPES.get(str(weights.get("type")))
    sound = isinstance(group, Mapping) and group.get("targets") == ["Linear"] and kind is not None
    sound = sound and _is_8_bit(weights, ("channel", "tensor")) and not weights.get("dynamic")
    rounds = bool(inputs)
    dynamic = bool(inputs.get("dynamic"))
    if rounds:
        fits = _is_8_bit(inputs, ("token",) if dynamic else ("tensor",))
        sound = sound and fits and inputs.get("type") == weights.get("type")
    if not sound or kind is None:
        raise UnsupportedError(
            f"{folder} is also quantised (config_groups = {groups!r:.120})",
            need="one group for Linear: weights of 8 bits, symmetric, a scale a row or one for all;"
            " inputs as they are, rounded per token, or by one scale",
            hint="the 2:4 checkpoint from before it was quantised",
        )
    return Scheme(kind, activations=kind if rounds else "none", static=rounds and not dynamic)


def with_scales(
    reader: CheckpointReader, module: str, codes: SparseMatrix, scheme: Scheme
) -> Quantized:
    """A weight of codes and the scales that lie beside it.

    Args:
        reader: The checkpoint.
        module: Whose weight it is.
        codes: [out, k], of the dtype of the scheme.
        scheme: What the codes mean.

    Raises:
        CheckpointError: Scales are missing, of another size, or no positive numbers.
        UnsupportedError: Codes are not symmetric around zero.
    """
    rows, names = codes.shape[0], set(reader.names())
    scales = _positive(reader, f"{module}.weight_scale", (1, rows))
    if f"{module}.weight_zero_point" in names:
        shift = reader.load(f"{module}.weight_zero_point")
        if bool((shift.float() != 0).any()):
            raise UnsupportedError(
                f"{module} has zero points that are not 0",
                need="symmetric codes",
                hint="the 2:4 checkpoint from before it was quantised",
            )
    step = _positive(reader, f"{module}.input_scale", (1,)) if scheme.static else None
    spread = scales.expand(rows).reshape(rows, 1).contiguous()
    try:
        return Quantized.of(codes, spread, scheme, logical_of(reader.config), step)
    except FormatError as error:
        raise CheckpointError(f"{module}: {error.got}", need=error.need, hint=error.hint) from error


def logical_of(config: Mapping[str, Any]) -> torch.dtype:
    """The dtype that the weights of a checkpoint stand for.

    Example:
        >>> logical_of({"torch_dtype": "float16"}), logical_of({})
        (torch.float16, torch.bfloat16)
    """
    named = config.get("dtype") or config.get("torch_dtype")
    return _LOGICAL.get(str(named).removeprefix("torch."), torch.bfloat16)


def check_codes(module: str, dtype: torch.dtype, scheme: Scheme) -> None:
    """Refuse a weight of another dtype than the codes of its scheme.

    Raises:
        CheckpointError: It says which.
    """
    if dtype != code_dtype(scheme):
        raise CheckpointError(
            f"{module} holds {dtype} under {scheme}",
            need=str(code_dtype(scheme)),
            hint="download the checkpoint again",
        )


def pack_codes(codes: Tensor) -> SparseMatrix:
    """Codes that lie there dense: packed where they obey 2:4, else as they are.

    Example:
        >>> pack_codes(torch.ones(1, 4, dtype=torch.int8)).name
        'dense'
    """
    try:
        return NM.from_dense(codes)
    except FormatError:
        return format_named("dense").from_dense(codes)


def ignored_modules(sparsity: Mapping[str, Any]) -> list[re.Pattern[str]]:
    """The entries of `ignore` as expressions that match from the start; `re:` marks one."""
    entries = sparsity.get("ignore") or []
    try:
        if isinstance(entries, str):
            raise TypeError("one text")
        return [
            re.compile(entry.removeprefix("re:"))
            if entry.startswith("re:")
            else re.compile(re.escape(entry) + r"\Z")
            for entry in entries
        ]
    except (AttributeError, TypeError, re.error) as error:
        raise CheckpointError(
            f"ignore of the sparsity_config is {entries!r:.60} ({error})",
            need='a list of module names and "re:" expressions',
            hint="restore config.json from the original checkpoint",
        ) from error


def _positive(reader: CheckpointReader, name: str, sizes: tuple[int, ...]) -> Tensor:
    """Flat float32 scales."""
    scales = reader.load(name).float().flatten()
    if scales.numel() not in sizes or not bool((scales.isfinite() & (scales > 0)).all()):
        raise CheckpointError(
            f"{name} holds {scales.numel()} numbers, or some that are no scale",
            need=" or ".join(map(str, sizes)) + ", finite and above 0",
            hint="download the checkpoint again",
        )
    return scales


def _told(group: object, key: str) -> Mapping[str, Any]:
    found = group.get(key) if isinstance(group, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def _is_8_bit(args: Mapping[str, Any], strategies: tuple[str, ...]) -> bool:
    return (
        args.get("num_bits") == 8
        and args.get("symmetric", True) is True
        and args.get("strategy") in strategies
        and not args.get("actorder")
    )
