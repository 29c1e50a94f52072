"""`hopsparse attention-report`: what a budget of attended tokens costs a model, on its own text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from .console import print_json, seconds_text, stderr, stdout
from .judging import MODEL_HELP, results_table
from .options import INTERRUPTED_EXIT, Resume, command
from .progress import print_interrupted, progress_shown


@dataclass(frozen=True)
class Report:
    """Options of `hopsparse attention-report`."""

    model: Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)]
    out: Annotated[Path, typer.Option("-o", "--out", metavar="OUT", help="Folder to make.")]
    text: Annotated[
        Path | None, typer.Option(metavar="FILE", help="UTF-8 text; a bundled one if left out.")
    ] = None
    context: Annotated[
        list[int] | None, typer.Option(help="Tokens of windows; repeatable. 1024 if left out.")
    ] = None
    budget: Annotated[
        list[int] | None,
        typer.Option(help="Most tokens attended; repeatable. 256 and 512 if left out."),
    ] = None
    page: Annotated[int, typer.Option(help="Tokens of a block: 16, 32, 64 or 128.")] = 64
    mode: Annotated[str, typer.Option(help="top-k, top-p or certified.")] = "top-k"
    top_p: Annotated[float, typer.Option(help="Part of the mass, of top-p.")] = 0.95
    epsilon: Annotated[float, typer.Option(help="Most mass left out, of certified.")] = 0.05
    score: Annotated[str, typer.Option(help="Of blocks: mass, bound or mean.")] = "mass"
    windows: Annotated[int, typer.Option(help="Most windows of each context.")] = 2
    needles: Annotated[int, typer.Option(help="Facts to find in each context; 0: none.")] = 4
    samples: Annotated[
        int, typer.Option(help="Queries of a window whose recall and error are measured.")
    ] = 32
    device: Annotated[str, typer.Option(help="Where the model runs.")] = "cpu"
    resume: Resume = False
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier report.")] = (
        False
    )
    json: Annotated[bool, typer.Option("--json", help="Print the report as JSON instead.")] = False


def run(options: Report) -> None:
    """Measure mass recall, output error, perplexity and needles against context and budget."""
    try:
        report = _measured(options)
    except KeyboardInterrupt:
        from ..models.checkpoint import partial_of

        partial = partial_of(options.out)
        print_interrupted(options.out, f"the state is in {partial}" if partial.exists() else None)
        raise typer.Exit(INTERRUPTED_EXIT) from None
    from ..report.attention import write_attention_plots

    plots = write_attention_plots(report, options.out)
    if options.json:
        print_json({**report, "out": str(options.out), "plots": [str(path) for path in plots]})
    else:
        _print(report, options.out, plots)


def _measured(options: Report) -> dict[str, Any]:
    from ..models.attention_config import AttentionConfig
    from ..models.attention_report import AttentionReport, attention_report
    from ..models.opened import open_model
    from ..models.text import HELD_OUT, bundled_text, read_text
    from ..report import check_extras

    # What can be refused is refused before a model is loaded.
    check_extras()
    budgets = tuple(options.budget or (256, 512))
    names = ("page", "mode", "top_p", "epsilon", "score")
    values = {name: getattr(options, name) for name in names}
    asked = AttentionReport(
        contexts=tuple(options.context or (1024,)),
        budgets=budgets,
        config=AttentionConfig(budget=max(budgets), crossover=0, **values),
        windows=options.windows,
        needles=options.needles,
        samples=options.samples,
        resume=options.resume,
        overwrite=options.overwrite,
    )
    text = read_text(options.text) if options.text else bundled_text(HELD_OUT[0])
    stderr().print(f"reading {options.model}", markup=False)
    opened = open_model(options.model, device=options.device)
    with progress_shown() as progress:
        return attention_report(opened, text, options.out, asked=asked, progress=progress)


def _print(report: dict[str, Any], out: Path, plots: list[Path]) -> None:
    console = stdout()
    table = results_table(
        "context", "attended", "perplexity", "over dense", "needles", "recall", "p1", "error"
    )
    for row in report["contexts"]:
        place = (row["context"], row["budget"])
        own = [each for each in report["layers"] if (each["context"], each["budget"]) == place]
        table.add_row(
            f"{row['context']:,}",
            "all" if row["budget"] is None else f"{row['budget']:,}",
            f"{row['perplexity']:.2f}",
            f"{row['ratio']:.4f}",
            f"{row['needles_found']} of {row['needles']}" if row["needles"] else "",
            *(_mean_text(own, name) for name in ("recall", "recall_p1", "error")),
        )
    console.print(table)
    console.print("\nrecall, 1st percentile and error: means over layers")
    broken = sum(each["bound_broken"] for each in report["layers"])
    queries = sum(each["queries"] for each in report["layers"])
    console.print(f"certificate broken for {broken} of {queries:,} queries")
    console.print(f"{seconds_text(report['seconds'])}; written {out}", markup=False, soft_wrap=True)
    for path in plots:
        console.print(f"  {path}", markup=False, soft_wrap=True)


def _mean_text(rows: list[dict[str, Any]], name: str) -> str:
    if not rows:
        return ""
    return f"{100 * sum(row[name] for row in rows) / len(rows):.2f} %"


ATTENTION_REPORT = command(Report, run, name="attention-report")
