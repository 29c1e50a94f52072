"""`hopsparse convert`: another storage format for a checkpoint or a file of matrices."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from ..errors import ArgumentError
from ..models.convert import TARGETS, Converted, convert_checkpoint
from .console import bytes_text, print_json, stdout
from .options import command


@dataclass(frozen=True)
class Convert:
    """Options of `hopsparse convert`."""

    src: Annotated[
        Path,
        typer.Argument(
            metavar="SRC", help="Checkpoint folder, or .safetensors, .mtx, .smtx, .npz or .pt file."
        ),
    ]
    out: Annotated[Path, typer.Option("-o", "--out", metavar="DST", help="Folder or file to make.")]
    to: Annotated[str, typer.Option(help=", ".join(TARGETS) + ".")]
    pattern: Annotated[
        str | None, typer.Option(help="For nm: the N:M to pack. Nothing is ever pruned.")
    ] = None
    block: Annotated[
        str | None, typer.Option(metavar="RxC", help="For bsr and bsr24: sides of a block.")
    ] = None
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what is at DST.")] = False
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False

    def sides(self) -> tuple[int, int] | None:
        """The block as two numbers.

        Raises:
            ArgumentError: It is no ROWSxCOLS.
        """
        if self.block is None:
            return None
        rows, cross, cols = self.block.partition("x")
        if not (cross and rows.isdecimal() and cols.isdecimal()):
            raise ArgumentError(f"block {self.block!r}", need="ROWSxCOLS", hint="--block 32x32")
        return int(rows), int(cols)


def run(options: Convert) -> None:
    """Store the same weights in another format, exactly; nothing is pruned.

    Reads hopsparse checkpoints, the checkpoints of llm-compressor and compressed-tensors whose
    config.json has a sparsity_config (dense ones with zeros, or sparse-24-bitmask), and
    .safetensors, .mtx, .smtx, .npz (scipy's) and .pt files. `hopsparse sparsify` takes any other
    dense checkpoint. `--to auto` looks at each matrix, and says what it chose and why.
    """
    done = convert_checkpoint(
        options.src,
        options.out,
        to=options.to,
        pattern=options.pattern,
        block=options.sides(),
        overwrite=options.overwrite,
    )
    before, after = _weight_bytes(options.src), _weight_bytes(options.out)
    if options.json:
        print_json(
            {
                "src": str(options.src),
                "out": str(options.out),
                "kind": done.kind,
                "to": options.to,
                "layers": done.layers,
                "kept_dense": done.kept_dense,
                "chosen": {name: asdict(each) for name, each in done.chosen.items()},
                "notes": done.notes,
                "bytes_before": before,
                "bytes_after": after,
            }
        )
        return
    _print(options, done, (before, after))


def _print(options: Convert, done: Converted, size: tuple[int, int]) -> None:
    console = stdout()
    sizes = " -> ".join(bytes_text(count) for count in size)
    told = f"{options.out}: {done.layers} matrices as {options.to}, {sizes}"
    console.print(told, markup=False, soft_wrap=True)
    for (fmt, why), names in _by_choice(done).items():
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        console.print(f"{fmt}: {shown}: {why}", markup=False, soft_wrap=True)
    for note in done.notes:
        console.print(f"note: {note}", markup=False, soft_wrap=True)
    for name, reason in done.kept_dense.items():
        console.print(f"dense: {name}: {reason}", markup=False, soft_wrap=True)


def _by_choice(done: Converted) -> dict[tuple[str, str], list[str]]:
    """Names of the matrices that got one format for one reason."""
    found: dict[tuple[str, str], list[str]] = {}
    for name, each in done.chosen.items():
        sides = f" {each.block[0]}x{each.block[1]}" if each.block else ""
        found.setdefault((each.format + sides, each.why), []).append(name)
    return found


def _weight_bytes(path: Path) -> int:
    files = [path] if path.is_file() else list(path.glob("*.safetensors"))
    return sum(file.stat().st_size for file in files)


CONVERT = command(Convert, run, name="convert")
