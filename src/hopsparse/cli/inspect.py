"""`hopsparse inspect`: what a checkpoint or a file holds, and what one matrix looks like."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import ArgumentError, CheckpointError
from .analysis import Question, analysed, print_analysis
from .console import bytes_text, print_json, stdout
from .matrices import chosen, matrices_of
from .options import command
from .problems import tokens_of
from .stored import (
    FOREIGN,
    SPARSE24,
    Kind,
    LayerRow,
    checkpoint_rows,
    file_rows,
    kind_of,
    payload_bytes,
    sparse24_rows,
)


@dataclass(frozen=True)
class Inspect:
    """Options of `hopsparse inspect`."""

    path: Annotated[
        Path,
        typer.Argument(
            metavar="PATH",
            help="Checkpoint folder, or .safetensors, .mtx, .smtx, .npz or .pt file.",
        ),
    ]
    matrix: Annotated[
        str | None,
        typer.Option(
            metavar="GLOB",
            help="Matrices to look into, by name; the only one of a file if left out.",
        ),
    ] = None
    tokens: Annotated[str, typer.Option(metavar="N,...", help="Token counts to predict for.")] = (
        "16,256,2048"
    )
    dtype: Annotated[str, typer.Option(help="To predict in: bfloat16 or float16.")] = "bfloat16"
    target: Annotated[
        str, typer.Option(metavar="GPU", help="GPU to predict for: h200, h100, or a slice.")
    ] = "h200"
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw the one matrix: .svg, .png or .pdf."),
    ] = None
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False


@dataclass(frozen=True)
class Contents:
    """What `inspect` found.

    Attributes:
        path: Where.
        kind: Which layout.
        layers: Sparse matrices.
        other_bytes: Bytes of all other tensors.
        pattern: Asked for, in a hopsparse checkpoint.
        method: How it was pruned.
        kept_dense: Why each other projection is dense.
        matrices: Names of all that can be looked into.
    """

    path: str
    kind: Kind
    layers: list[LayerRow]
    other_bytes: int
    pattern: str = ""
    method: str = ""
    kept_dense: dict[str, str] = field(default_factory=dict)
    matrices: list[str] = field(default_factory=list)

    def totals(self) -> dict[str, Any]:
        """Sums over all layers."""
        stored = sum(row.bytes for row in self.layers)
        dense = sum(row.bytes_dense for row in self.layers)
        entries = sum(row.shape[0] * row.shape[1] for row in self.layers)
        kept = sum(row.density * row.shape[0] * row.shape[1] for row in self.layers)
        return {
            "layers": len(self.layers),
            "density": kept / entries if entries else None,
            "bytes_dense": dense,
            "bytes": stored,
            "other_bytes": self.other_bytes,
            "total_bytes": stored + self.other_bytes,
        }


def run(options: Inspect) -> None:
    """Show format, pattern, density, dtype and bytes of every layer, and what is dense and why.

    A file of one matrix, or the matrices that --matrix names, are looked into: rows, blocks,
    diagonals, how far it is from 2:4, and formats and kernels with predicted times.
    """
    question = _question(options)
    contents = read_contents(options.path)
    found = matrices_of(options.path, contents.kind)
    contents = replace(contents, matrices=list(found))
    wanted = chosen(found, options.matrix)
    if options.plot is not None and len(wanted) != 1:
        raise ArgumentError(
            f"--plot of {len(wanted)} matrices", need="one", hint="--matrix NAME chooses one"
        )
    if not options.json:
        _print(contents)
    analyses = []
    for name, read in wanted.items():
        each = analysed(name, read, question)
        analyses.append(each.to_json())
        if not options.json:
            stdout().print()
            print_analysis(each)
    if options.json:
        facts = {**asdict(contents), "totals": contents.totals(), "analyses": analyses}
        print_json(facts)
    elif options.plot is not None:
        stdout().print(f"{options.plot}: the picture of it", markup=False, soft_wrap=True)


def _question(options: Inspect) -> Question:
    """What is asked, after refusing what cannot be answered; before a file is read."""
    from ..plan import parse_target

    if options.dtype not in ("bfloat16", "float16"):
        raise ArgumentError(
            f"--dtype {options.dtype!r}", need="bfloat16 or float16", hint="--dtype bfloat16"
        )
    if options.plot is not None:
        from ..report.spy import check_plot

        check_plot(options.plot)
    tokens = tokens_of(options.tokens)
    if min(tokens) < 1:
        raise ArgumentError(f"--tokens {options.tokens}", need="at least one", hint="--tokens 16")
    return Question(tokens, options.dtype, parse_target(options.target), options.plot)


def read_contents(path: Path) -> Contents:
    """Read what `path` holds; one matrix is in memory at a time.

    Raises:
        CheckpointError: It is missing, damaged, or of a newer version.
    """
    kind = kind_of(path)
    if kind == "matrices":
        rows, other = file_rows(path)
        return Contents(str(path), kind, rows, other)
    if kind == "tensors":
        return Contents(str(path), kind, [], payload_bytes(path))
    if not path.is_dir():
        if not path.is_file():
            raise CheckpointError(f"{path} does not exist", need="a file", hint="check the path")
        return Contents(str(path), kind, [], path.stat().st_size)
    from ..models.checkpoint import CheckpointReader

    with CheckpointReader(path) as reader:
        total = sum(payload_bytes(path / shard) for shard in reader.shards())
        if reader.sparse is None:
            rows = list(sparse24_rows(reader)) if kind == SPARSE24 else []
            return Contents(str(path), kind, rows, total - sum(row.bytes for row in rows))
        rows = list(checkpoint_rows(reader))
        return Contents(
            path=str(path),
            kind=kind,
            layers=rows,
            other_bytes=total - sum(row.bytes for row in rows),
            pattern=reader.sparse.pattern,
            method=reader.sparse.method,
            kept_dense=reader.sparse.kept_dense,
        )


def _print(contents: Contents) -> None:
    from rich.table import Table

    console = stdout()
    told = ", ".join(word for word in (contents.pattern, contents.method) if word)
    console.print(f"{contents.path}: {contents.kind}" + (f", {told}" if told else ""), markup=False)
    if contents.layers:
        table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
        quantized = any(row.scheme for row in contents.layers)
        for title in ("layer", "format", "pattern", *(("scheme",) if quantized else ())):
            table.add_column(title, overflow="fold")
        for title in ("shape", "dtype", "density", "dense", "stored"):
            table.add_column(title, justify="right", no_wrap=True)
        for row in contents.layers:
            table.add_row(*_cells(row, quantized))
        console.print(table)
    totals = contents.totals()
    if totals["layers"]:
        console.print(
            f"\n{totals['layers']} sparse layers, density {totals['density']:.3f}: "
            f"{bytes_text(totals['bytes_dense'])} dense, {bytes_text(totals['bytes'])} stored"
        )
    if contents.kind in FOREIGN.values():
        console.print(f"file {bytes_text(contents.other_bytes)}")
    else:
        other, total = bytes_text(totals["other_bytes"]), bytes_text(totals["total_bytes"])
        console.print(f"other tensors {other}, all together {total}")
    if len(contents.matrices) > 1 and not contents.layers:
        shown = ", ".join(contents.matrices[:6]) + (", ..." if len(contents.matrices) > 6 else "")
        text = f"{len(contents.matrices)} matrices (--matrix NAME looks into one): {shown}"
        console.print(text, markup=False, soft_wrap=True)
    if contents.kind == SPARSE24:
        console.print(
            f"to read it here: hopsparse convert {contents.path} -o DST --to nm",
            markup=False,
            soft_wrap=True,
        )
    for reason, count in Counter(contents.kept_dense.values()).most_common():
        names = [name for name, why in contents.kept_dense.items() if why == reason]
        shown = ", ".join(names[:3]) + (", ..." if count > 3 else "")
        console.print(f"kept dense ({count}): {reason}: {shown}", markup=False, soft_wrap=True)


def _cells(row: LayerRow, quantized: bool) -> tuple[str, ...]:
    from rich.markup import escape

    return (
        escape(row.name),
        row.format,
        row.pattern,
        *((row.scheme,) if quantized else ()),
        f"{row.shape[0]} x {row.shape[1]}",
        row.dtype,
        f"{row.density:.3f}",
        bytes_text(row.bytes_dense),
        bytes_text(row.bytes),
    )


INSPECT = command(Inspect, run, name="inspect")
