"""`hopsparse inspect`: what a checkpoint or a file of matrices holds, layer by layer."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from .console import bytes_text, print_json, stdout
from .options import command
from .stored import (
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
        Path, typer.Argument(metavar="PATH", help="Checkpoint folder or .safetensors file.")
    ]
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
    """

    path: str
    kind: Kind
    layers: list[LayerRow]
    other_bytes: int
    pattern: str = ""
    method: str = ""
    kept_dense: dict[str, str] = field(default_factory=dict)

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
    """Show format, pattern, density, dtype and bytes of every layer, and what is dense and why."""
    contents = read_contents(options.path)
    if options.json:
        print_json({**asdict(contents), "totals": contents.totals()})
    else:
        _print(contents)


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
    other, total = bytes_text(totals["other_bytes"]), bytes_text(totals["total_bytes"])
    console.print(f"other tensors {other}, all together {total}")
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
