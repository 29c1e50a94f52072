"""What `hopsparse tune` tunes: layers of a model, of a suite or by shape, and token counts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import ArgumentError
from .problems import CODES, FOUR_BITS, check_dtype, check_sums, problem_of, shape_of, tokens_of

if TYPE_CHECKING:
    from ..measure.suite import Problem
    from ..models._entries import ModuleEntry
    from .tune import Tune

_KERNEL_DTYPES = ("bfloat16", "float16")
# By scheme of weights and of inputs.
_CODES_OF = {
    ("int8", "int8"): "int8",
    ("fp8", "fp8"): "float8_e4m3fn",
    ("fp8", "int4"): "float8_e4m3fn",
}
_INPUTS_OF_INT4 = {"int8": "int8", "fp8": "float8_e4m3fn"}
# Layers of these have the dtype of their codes, whatever a model is loaded in.
_CODED = (*CODES, *FOUR_BITS)
_PATTERNS = ("2:4", "1:4")
_OF_LAYERS = "promoted"  # sums of 8-bit floats; their scales are by row
#: Without token counts all classes up to it are tuned.
MOST_TOKENS = 4096


def distinct(problems: Iterable[Problem]) -> list[Problem]:
    """Each shape, dtype and class of token counts once, at the count that stands for the class."""
    from ..tune import token_class

    standing = {
        (each.out, each.k, each.dtype, token_class(each.tokens)): each
        for each in reversed([*problems])
    }
    return [replace(each, tokens=key[3].measured) for key, each in reversed(standing.items())]


def problems_of(options: Tune) -> Sequence[Problem]:
    """What to tune.

    Raises:
        ArgumentError: Not one source of layers, or a text that is no such thing.
        CheckpointError: The model cannot be read.
    """
    from ..measure.suite import read_suite
    from ..tune import token_classes

    check_dtype(options.dtype)
    # A model may have layers of both kinds.
    codes = options.model is not None and options.dtype not in _CODED
    asked = "float8_e4m3fn" if codes else options.dtype or _KERNEL_DTYPES[0]
    check_sums(asked, options.sums, options.grouped)
    sources = {"MODEL": options.model, "--shape": options.shape, "--suite": options.suite}
    given = [name for name, value in sources.items() if value]
    if len(given) != 1:
        raise ArgumentError(
            " and ".join(given) if given else "no layers",
            need="one of MODEL, --shape and --suite",
            hint="hopsparse tune --shape 4096x4096",
        )
    how = options.sums, options.grouped
    if options.model is not None and how != (_OF_LAYERS, False):
        raise ArgumentError(
            f"MODEL with --sums {options.sums}{' --grouped' * options.grouped}",
            need=f"--sums {_OF_LAYERS} without --grouped, which its layers run",
            hint="--shape OUTxK --dtype float8_e4m3fn, for calls of spmm_nm_scaled",
        )
    tokens = None if options.tokens is None else tokens_of(options.tokens)
    if options.suite is not None:
        return [
            problem_of(each.layer, (each.out, each.k), count, options.dtype or each.dtype, *how)
            for each in read_suite(options.suite)
            for count in ([each.tokens] if tokens is None else tokens)
        ]
    if options.model is not None:
        layers = layers_of(options.model, options.dtype)
    else:
        dtype = options.dtype or _KERNEL_DTYPES[0]
        layers = [("", *shape_of(text), dtype) for text in options.shape or ()]
    counts = tokens or [each.measured for each in token_classes(MOST_TOKENS)]
    return [
        problem_of(name, (out, k), count, dtype, *how)
        for name, out, k, dtype in layers
        for count in counts
    ]


def layers_of(model: Path, dtype: str | None) -> list[tuple[str, int, int, str]]:
    """Name, out, k and dtype of the first layer of each shape that a kernel runs.

    Args:
        model: A checkpoint that hopsparse wrote.
        dtype: What it will be loaded in; None is as it is stored. Layers whose inputs have 8-bit
            codes have the dtype of those, whatever it is loaded in; one of `CODES` or `FOUR_BITS`:
            those alone.

    Raises:
        ArgumentError: It has none.
        CheckpointError: It cannot be read.
    """
    from ..models.checkpoint import CheckpointReader

    with CheckpointReader(model) as reader:
        modules = {} if reader.sparse is None else reader.sparse.modules
    found: dict[tuple[int, int, str], str] = {}
    for name, entry in modules.items():
        kind = _kind_of(entry, dtype)
        if kind is not None:
            found.setdefault((*entry.shape, kind), name)
    if not found:
        raise ArgumentError(
            f"{model}, without a layer that has a kernel to tune",
            need="2:4 layers of 16-bit values, of 8-bit codes with 8-bit or int4 inputs and a "
            "scale a row, or of int4 with groups of 32, 64 or 128 (beside 8-bit inputs: of 128)",
            hint="`hopsparse inspect` lists its layers; --dtype bfloat16, if values are of 32 bits "
            "and loaded in that",
        )
    return [(name, *key) for key, name in found.items()]


def _kind_of(entry: ModuleEntry, dtype: str | None) -> str | None:
    """What the kernel multiplies for a stored layer; None where it does not run, or not that."""
    from ..formats.scheme import parse_scheme

    if entry.stored_as != "nm" or entry.attributes.get("pattern") not in _PATTERNS:
        return None
    if not entry.scheme:
        kind = dtype or entry.dtype
        return kind if kind in _KERNEL_DTYPES else None
    scheme = parse_scheme(entry.scheme)
    if scheme.weights == "int4":
        # x of 16 bits has the dtype that the model is loaded in.
        loaded = entry.dtype if dtype in (None, *CODES) else str(dtype).rpartition("/")[2]
        inputs = _INPUTS_OF_INT4 | {"none": loaded}
        text = f"int4:{scheme.group}/{inputs.get(scheme.activations)}"
        codes = text if text in FOUR_BITS else None
    else:
        pair = scheme.weights, scheme.activations
        codes = None if scheme.group else _CODES_OF.get(pair)
    return codes if dtype not in _CODED or dtype == codes else None
