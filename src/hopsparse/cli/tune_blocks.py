"""`hopsparse tune --matrix`: which tile, in which grain, is fastest for a block-sparse pattern."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import ArgumentError
from ..units import duration_text
from .console import print_json, stdout
from .matrices import Read, chosen, matrices_of, read_named
from .problems import tokens_of
from .stored import kind_of

if TYPE_CHECKING:
    from ..formats import BSR, SparseMatrix
    from ..ops.spmm_bsr.tuning import Candidates
    from ..tune import Ranking
    from .tune import Tune

Row = dict[str, Any]

_DTYPES = ("bfloat16", "float16")
_BLOCK = (16, 16)  # of matrices that are stored in another format
_TOKENS = (16, 256, 2048)
_SECONDS = 30.0


def run_blocks(options: Tune) -> list[Row]:
    """Tune the matrices that --matrix names, print, and give a row a matrix and token count.

    Raises:
        ArgumentError: Options that do not go with --matrix, or no matrix of that name.
        CheckpointError: The path cannot be read.
        UnsupportedError: There is no H100 or H200, or a matrix has blocks that no kernel takes.
    """
    wanted, tokens = _wanted(options)
    from ..measure.clock import gpu
    from ..tune import Store, machine_of

    machine, started = machine_of(gpu().index), time.monotonic()
    found = list(_tuned(wanted, tokens, options))
    seconds, folder = time.monotonic() - started, Store.default().folder
    if options.json:
        facts = {"gpu": machine.gpu, "sm_count": machine.sm_count, "driver": machine.driver}
        print_json({**facts, "folder": str(folder), "seconds": seconds, "patterns": found})
    else:
        print_blocks(found)
        told = f"{len(found)} patterns and token counts in {duration_text(seconds)}"
        stdout().print(f"{told}; kept in {folder}", markup=False, soft_wrap=True)
    return found


def _wanted(options: Tune) -> tuple[Mapping[str, Read], Sequence[int]]:
    given = {"--shape": options.shape, "--suite": options.suite, "--grouped": options.grouped}
    other = [name for name, value in given.items() if value]
    if options.model is None or other:
        raise ArgumentError(
            f"--matrix {options.matrix!r} with {' and '.join(other) or 'no file'}",
            need="a checkpoint or a file, whose matrices it names",
            hint="hopsparse tune graph.npz --matrix '*'",
        )
    if options.dtype is not None and options.dtype not in _DTYPES:
        raise ArgumentError(
            f"--matrix with --dtype {options.dtype}",
            need="bfloat16 or float16",
            hint="--dtype bfloat16",
        )
    tokens = list(_TOKENS) if options.tokens is None else tokens_of(options.tokens)
    if min(tokens) < 1:
        raise ArgumentError(f"--tokens {options.tokens}", need="at least one", hint="--tokens 16")
    return chosen(matrices_of(options.model, kind_of(options.model)), options.matrix), tokens


def _tuned(wanted: Mapping[str, Read], tokens: Sequence[int], options: Tune) -> Iterator[Row]:
    from ..ops.spmm_bsr.device import target_of
    from ..ops.spmm_bsr.plan import Problem
    from ..ops.spmm_bsr.tuning import named_candidates, tune_weight
    from ..tune import token_class
    from .progress import progress_shown
    from .tune import shown

    left = len(wanted) * len(tokens)
    end = math.inf if options.budget_s is None else time.monotonic() + options.budget_s
    with progress_shown() as show:
        for name, read in wanted.items():
            w = as_blocks(name, read_named(name, read)[0], options.dtype).to("cuda")
            for count in tokens:
                each_s = _SECONDS if math.isinf(end) else (end - time.monotonic()) / left
                left -= 1
                if each_s <= 0:
                    return
                told = shown(show, f"{name}, {count} tokens")
                ranking = tune_weight(w, count, budget_s=each_s, show=told)
                problem = Problem(token_class(count).measured, *w.shape)
                candidates = named_candidates(w, problem, target_of(w.values.get_device()))
                yield block_row(name, w, problem.tokens, candidates, ranking)


def as_blocks(name: str, matrix: SparseMatrix, dtype: str | None) -> BSR:
    """A matrix in blocks of 16-bit values: its own, or of 16 x 16.

    Args:
        name: Of it.
        matrix: In any format.
        dtype: Of its values; None keeps 16 bits, and makes bfloat16 of others.

    Raises:
        ArgumentError: Its values are codes.
    """
    import torch

    from ..formats import BSR, convert
    from ..formats.quantized import Quantized

    if isinstance(matrix, Quantized) or not matrix.dtype.is_floating_point:
        raise ArgumentError(
            f"{name}, whose values are codes", need="floating-point values", hint="another name"
        )
    stored = matrix if isinstance(matrix, BSR) else convert(matrix, "bsr", block=_BLOCK)
    assert isinstance(stored, BSR)
    halves = {torch.bfloat16: "bfloat16", torch.float16: "float16"}
    kind = getattr(torch, dtype or halves.get(stored.dtype, "bfloat16"))
    values = stored.values.to(kind)
    return BSR(stored.shape, values, stored.indices, stored.indptr, stored.block)


def block_row(name: str, w: BSR, tokens: int, found: Candidates, ranking: Ranking) -> Row:
    """What a search found of one pattern, as JSON values; tiles are in the order of their times.

    Args:
        name: Of the matrix.
        w: It.
        tokens: That were measured.
        found: What was to be timed.
        ranking: What was.
    """
    from ..ops.spmm_bsr.choose import DENSE
    from ..ops.spmm_bsr.grains import grain_of
    from ..tune import Measured, token_class

    nothing = Measured.wrong("")
    known = {each: ranking.measured.get(each, nothing) for each in found.by_name}
    dense, first = known[DENSE].us, known[next(iter(found.by_name))].us
    tiles = {each: tile for each, tile in found.by_name.items() if tile is not None}
    rows: list[Row] = [
        {
            "tile": tile.name,
            "grain": list(grain_of(tile)),
            "us": known[each].us,
            "spread": known[each].spread,
            "predicted_us": found.predicted_us[each],
            "ratio_to_dense": _per(dense, known[each].us),
            "ratio_to_model": _per(first, known[each].us),
            "is_first_choice": tile == found.choice,
            "is_new": each in ranking.timed,
            "wrong": known[each].error,
            "failed": ranking.failed.get(each, ""),
        }
        for each, tile in sorted(tiles.items(), key=lambda pair: known[pair[0]].us)
    ]
    fastest = rows[0]["us"]
    return {
        "name": name,
        "out": w.shape[0],
        "k": w.shape[1],
        "block": list(w.block),
        "blocks": w.values.shape[0],
        "dtype": str(w.dtype).removeprefix("torch."),
        "tokens": token_class(tokens).name,
        "measured_tokens": tokens,
        "dense_us": dense,
        "runs": rows[0]["tile"] if math.isfinite(fastest) else None,
        "tiles": rows,
    }


def print_blocks(found: Sequence[Row], most: int = 4) -> None:
    """The fastest tiles of each pattern as a table."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title in ("matrix", "tokens", "tile", "cells"):
        table.add_column(title, no_wrap=True)
    for title in ("us", "predicted", "to dense", "to model"):
        table.add_column(title, justify="right")
    table.add_column("")
    for each in found:
        label = (f"{each['name']} {each['out']}x{each['k']}", each["tokens"])
        for place, row in enumerate(each["tiles"]):
            if place < most or row["is_first_choice"] or row["wrong"] or row["failed"]:
                table.add_row(*label, *_cells(row, runs=row["tile"] == each["runs"]))
                label = ("", "")
    console = stdout()
    console.print(table)
    console.print(
        "cells: rows and columns that a tile multiplies as a whole, stored or not; layers"
    )
    console.print("run the dense product where that is faster by more than 2 %")
    for each in found:
        for row in each["tiles"]:
            if told := row["wrong"] or row["failed"]:
                console.print(f"{row['tile']}, {each['name']}: {told}", markup=False)


def _cells(row: Row, *, runs: bool) -> list[str]:
    words = ["runs"] if runs else []
    words += ["model's choice"] if row["is_first_choice"] else []
    words += ["WRONG"] if row["wrong"] else ["failed"] if row["failed"] else []
    numbers = (row["us"], row["predicted_us"], row["ratio_to_dense"], row["ratio_to_model"])
    digits = (1, 1, 2, 2)
    shown = [
        f"{value:.{count}f}" if math.isfinite(value) else "-"
        for value, count in zip(numbers, digits, strict=True)
    ]
    return [row["tile"], f"{row['grain'][0]} x {row['grain'][1]}", *shown, ", ".join(words)]


def _per(what: float, us: float) -> float:
    return what / us if math.isfinite(what) and math.isfinite(us) else math.nan
