"""`hopsparse explain`: what a 2:4 layer will run, and why; it needs no GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .console import bytes_text, print_json, stdout
from .options import command
from .problems import (
    Grouped,
    Sums,
    check_dtype,
    check_sums,
    four_bits_of,
    numbers_of,
    problem_of,
    shape_of,
)

if TYPE_CHECKING:
    from rich.console import Console

    from ..measure.suite import Problem
    from ..ops.spmm_nm.explain import Explanation, Tile
    from ..plan import Target
    from ..tune import Entry, Machine

_TARGET = "h200"


@dataclass(frozen=True)
class Explain:
    """Options of `hopsparse explain`."""

    shape: Annotated[str, typer.Option(metavar="OUTxK", help="The layer.")]
    tokens: Annotated[int, typer.Option(help="Rows of x.")]
    dtype: Annotated[
        str,
        typer.Option(
            help="bfloat16 or float16; of codes int8, float8_e4m3fn or float8_e4m3fn/int4 (w/x); "
            "of 4-bit weights int4:128/bfloat16 and the like."
        ),
    ] = "bfloat16"
    sums: Sums = "promoted"
    grouped: Grouped = False
    target: Annotated[
        str | None,
        typer.Option(
            metavar="GPU",
            help="GPU to plan for: h200, h100, or a MIG slice such as h200:1/7; else h200, and "
            "the one that is here.",
        ),
    ] = None
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False


def run(options: Explain) -> None:
    """Say what a 2:4 layer runs, what its tile is predicted to take, and what stood to choose."""
    from ..ops.spmm_nm.explain import target_of
    from ..plan import parse_target

    check_dtype(options.dtype)
    check_sums(options.dtype, options.sums, options.grouped)
    shape, how = shape_of(options.shape), (options.sums, options.grouped)
    problem = problem_of("", shape, options.tokens, options.dtype, *how)
    gpu = parse_target(_TARGET if options.target is None else options.target)
    planned = _explained(problem, gpu)
    here = None
    if options.target is None and (machine := _machine()) is not None:
        here = _explained(problem, target_of(machine), machine)
    if options.json:
        print_json({"planned": facts(planned), "here": None if here is None else facts(here)})
        return
    console = stdout()
    _print(console, planned)
    if here is not None:
        console.print()
        _print(console, here)


def _explained(problem: Problem, gpu: Target, machine: Machine | None = None) -> Explanation:
    from ..ops.spmm_nm.cost import Problem as Sizes
    from ..ops.spmm_nm.explain import explain
    from ..ops.spmm_nm.int4.explain import explain_int4
    from ..ops.spmm_nm.scaled.explain import explain_scaled

    sizes, numbers = Sizes(problem.tokens, problem.out, problem.k), numbers_of(problem)
    if (kind := four_bits_of(problem)) is not None:
        return explain_int4(sizes, kind, gpu, machine=machine)
    if numbers is not None:
        return explain_scaled(sizes, numbers, gpu, machine=machine)
    return explain(sizes, problem.dtype, gpu, machine=machine)


def _machine() -> Machine | None:
    """The GPU that is here, if the kernel runs on it."""
    import torch

    from ..tune import machine_of

    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        return None
    return machine_of(torch.cuda.current_device())


def facts(found: Explanation) -> dict[str, Any]:
    """An explanation as JSON values."""
    sm_count = _sm_count(found)
    return {
        "out": found.problem.out,
        "k": found.problem.k,
        "tokens": found.problem.tokens,
        "dtype": found.dtype,
        "sums": found.sums or None,
        "gpu": found.target.name if found.machine is None else found.machine.gpu,
        "sm_count": sm_count,
        "chosen_by": "tuning" if found.is_tuned else "cost model",
        "runs": "kernel" if found.won is None else "dense",
        "tile": _tile_facts(found.chosen, sm_count),
        "next": [_tile_facts(each, sm_count) for each in found.others],
        "floor": {
            "us": found.floors.us,
            "bytes": found.floors.bytes,
            "bytes_us": found.floors.bytes_us,
            "operations": found.floors.operations,
            "operations_us": found.floors.operations_us,
        },
        "dense_us": found.dense_us,
        "dense_runs_when": list(found.dense_when),
        "tuning": [_result_facts(found, entry) for entry in found.results],
        "notes": list(found.notes),
    }


def _result_facts(found: Explanation, entry: Entry) -> dict[str, Any]:
    from ..ops.spmm_nm.plan import DENSE

    tile, us = found.winner(entry) or (None, None)
    return {
        "gpu": entry.key.machine.gpu,
        "sm_count": entry.key.machine.sm_count,
        "driver": entry.key.machine.driver,
        "problems": entry.key.problem,
        "tile": None if tile is None else tile.name,
        "us": us,
        "dense_us": None if entry.best([DENSE]) is None else entry.measured[DENSE].us,
        "measured": len(entry.measured),
    }


def _tile_facts(tile: Tile, sm_count: int) -> dict[str, Any]:
    config = tile.config
    return {
        "name": config.name,
        "out": config.out,
        "tokens": config.tokens,
        "stages": config.stages,
        "cluster": [config.cluster_out, config.cluster_tokens, config.cluster_k],
        "predicted_us": tile.predicted_us,
        "tiles": tile.tiles,
        "at_once": tile.at_once,
        "waves": tile.waves,
        "sm_use": tile.sm_use(sm_count),
        "threads": 128 * len(tile.registers),
        "registers": list(tile.registers),
        "smem_bytes": tile.smem_bytes,
        "smem_left_bytes": tile.smem_left_bytes,
    }


def _sm_count(found: Explanation) -> int:
    return found.target.sm_count if found.machine is None else found.machine.sm_count


def _print(console: Console, found: Explanation) -> None:
    told = facts(found)
    rows = [*_why(found, told), *_costs(told), *_block(told["tile"]), *_others(told)]
    for label, text in rows:
        console.print(f"{label:<14}{text}", markup=False, soft_wrap=True)


def _why(found: Explanation, told: dict[str, Any]) -> list[tuple[str, str]]:
    sums = f", {found.sums} sums" if found.sums else ""
    layer = f"{told['out']}x{told['k']} {told['dtype']}{sums}, {told['tokens']} tokens"
    where = "planned for" if found.machine is None else "here"
    gpu = told["gpu"] if "SMs" in told["gpu"] else f"{told['gpu']}, {told['sm_count']} SMs"
    by = "measured to be fastest" if found.is_tuned else "fastest by the cost model"
    kernel = f"wgmma.sp, tile {told['tile']['name']}, {by}"
    runs = kernel if found.won is None else f"dense, {found.won.describe()}"
    return [("layer", f"{layer}; {where}: {gpu}"), ("runs", runs)]


def _costs(told: dict[str, Any]) -> list[tuple[str, str]]:
    tile, floor = told["tile"], told["floor"]
    tflops = floor["operations"] / 1e12
    return [
        ("predicted", f"{tile['predicted_us']:.1f} us; dense {told['dense_us']:.1f} us"),
        (
            "floor",
            f"{floor['us']:.1f} us: {bytes_text(floor['bytes'])} take {floor['bytes_us']:.1f} us, "
            f"{tflops:.3g} TFLOP (as if dense) take {floor['operations_us']:.1f} us",
        ),
        (
            "waves",
            f"{_counted(tile['tiles'], 'tile')}, {tile['at_once']} at once, "
            f"{_counted(tile['waves'], 'wave')}, "
            f"{100 * tile['sm_use']:.0f} % of the SMs in use",
        ),
    ]


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _block(tile: dict[str, Any]) -> list[tuple[str, str]]:
    producer, *consumers = tile["registers"]
    smem, left = tile["smem_bytes"], tile["smem_left_bytes"]
    return [
        ("shared memory", f"{smem} bytes in {tile['stages']} stages, {left} bytes left"),
        (
            "registers",
            f"{producer} a thread of the producer, {consumers[0]} of "
            f"{_counted(len(consumers), 'consumer warpgroup')}, {tile['threads']} threads",
        ),
        ("cluster", "{} x {} x {} blocks, out x tokens x k".format(*tile["cluster"])),
    ]


def _others(told: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [("next", f"{each['name']}, {each['predicted_us']:.1f} us") for each in told["next"]]
    for each in told["tuning"]:
        where = f"{each['gpu']}, {each['sm_count']} SMs, driver {each['driver']}"
        won = "no tile of today" if each["tile"] is None else f"{each['tile']}, {each['us']:.1f} us"
        dense = "" if each["dense_us"] is None else f"; dense {each['dense_us']:.1f} us"
        rows.append(("tuned", f"{where}: {won}, of {each['measured']} measured{dense}"))
    if not told["tuning"]:
        rows.append(("tuned", "no; `hopsparse tune` measures"))
    rows.append(("dense runs", "where " + ", or ".join(told["dense_runs_when"])))
    return rows + [("note", each) for each in told["notes"]]


EXPLAIN = command(Explain, run, name="explain")
