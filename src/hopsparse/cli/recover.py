"""`hopsparse recover`: a sparse checkpoint and its dense model in, a better sparse one out."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from .console import bytes_text, print_json, seconds_text, stdout, time_text
from .options import (
    INTERRUPTED_EXIT,
    REPORT_JSON,
    REPORT_PAGE,
    EvalText,
    EvalWindows,
    Overwrite,
    ReportAsJson,
    Resume,
    command,
)
from .progress import print_interrupted, progress_shown


@dataclass(frozen=True)
class Recover:
    """Options of `hopsparse recover`; the models first, then how to train, then texts and place."""

    sparse: Annotated[
        Path, typer.Argument(metavar="SPARSE", help="Folder that `hopsparse sparsify` wrote.")
    ]
    out: Annotated[Path, typer.Option("-o", "--out", metavar="OUT", help="Folder to make.")]
    teacher: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="The dense model that SPARSE was made from. Required."),
    ] = None
    steps: Annotated[
        int, typer.Option(help="Optimizer steps; with --level layer-wise, for each block.")
    ] = 200
    lr: Annotated[float, typer.Option(help="Largest learning rate; it ends at zero.")] = 4e-4
    warmup: Annotated[float, typer.Option(help="Part of the steps in which it rises.")] = 0.05
    weight_decay: Annotated[float, typer.Option(help="Decay of weight matrices.")] = 0.0
    batch_windows: Annotated[
        int, typer.Option(help="Windows of a step, over all processes together.")
    ] = 4
    window_tokens: Annotated[int, typer.Option(help="Tokens of a training window.")] = 256
    accumulation: Annotated[
        int, typer.Option(help="Parts in which a process runs its share of a step.")
    ] = 1
    kl: Annotated[float, typer.Option(help="Weight of KL to the teacher's logits.")] = 1.0
    hidden: Annotated[float, typer.Option(help="Weight of the distance behind blocks.")] = 0.0
    hidden_block: Annotated[
        list[int] | None,
        typer.Option(metavar="INDEX", help="Blocks of --hidden; repeatable; all if left out."),
    ] = None
    cross_entropy: Annotated[float, typer.Option(help="Weight of the text itself.")] = 0.0
    position_fraction: Annotated[
        float, typer.Option(help="Part of the positions whose logits are compared in a step.")
    ] = 1.0
    train: Annotated[str, typer.Option(help="projections, or all: norms and biases too.")] = (
        "projections"
    )
    masks: Annotated[str, typer.Option(help="fixed, or sr-ste: re-selected (N:M only).")] = "fixed"
    level: Annotated[str, typer.Option(help="end-to-end or layer-wise.")] = "end-to-end"
    lora_rank: Annotated[
        int, typer.Option(help="Train a product of this rank beside each weight instead; 0: none.")
    ] = 0
    evaluate_every: Annotated[int, typer.Option(help="Steps between looks at held-out text.")] = 50
    patience: Annotated[
        int, typer.Option(help="Looks without a better one before it stops; 0: never.")
    ] = 0
    ema: Annotated[float, typer.Option(help="Decay of a running mean of the weights.")] = 0.0
    cache_teacher: Annotated[
        bool, typer.Option(help="Run the teacher once a window, not at every step.")
    ] = False
    cache_top: Annotated[int, typer.Option(help="Logits a position that its cache keeps.")] = 64
    precision: Annotated[str, typer.Option(help="no (float32), bf16 or fp16.")] = "no"
    save_every: Annotated[int, typer.Option(help="Steps between saves of the state.")] = 100
    seed: Annotated[int, typer.Option(help="Draws the windows and their order.")] = 0
    calibration: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Text to train on; a bundled one if left out."),
    ] = None
    evaluate: EvalText = None
    windows: Annotated[int, typer.Option(help="Training windows.")] = 256
    held_out: Annotated[
        int, typer.Option(help="Windows kept from training, to stop by and to keep the best.")
    ] = 8
    eval_windows: EvalWindows = 8
    eval_tokens: Annotated[int, typer.Option(help="Tokens of such a window.")] = 512
    device: Annotated[str, typer.Option(help="cpu, or auto: what accelerate finds.")] = "cpu"
    report: Annotated[
        bool, typer.Option(help=f"Write OUT/{REPORT_PAGE}, if SPARSE has a report.json.")
    ] = True
    resume: Resume = False
    overwrite: Overwrite = False
    json: ReportAsJson = False


_TEXTS = (
    *("calibration", "evaluate", "windows", "held_out", "eval_windows", "eval_tokens"),
    *("device", "resume", "overwrite"),
)
_ELSEWHERE = {"sparse", "out", "teacher", "hidden_block", "report", "json", *_TEXTS}


def run(options: Recover) -> None:
    """Train the kept weights of a sparse checkpoint towards its dense model.

    Also under torchrun, with one process a device: the first one evaluates, writes and prints.
    """
    try:
        report = _recover(options)
    except KeyboardInterrupt:
        _print_interrupted(options)
        raise typer.Exit(INTERRUPTED_EXIT) from None
    if not _is_first():
        return
    page = _write_page(options.out) if options.report else None
    if options.json:
        paths = {"out": str(options.out), "report": str(page) if page else None}
        print_json({**report, **paths})
    else:
        _print(report, options.out, page)


def _recover(options: Recover) -> dict[str, Any]:
    from ..recover import RecoverOptions

    # What can be refused is refused before a model is loaded.
    if options.report and (options.sparse / REPORT_JSON).exists():
        from ..report import check_extras

        check_extras()
    values = {key: value for key, value in vars(options).items() if key not in _ELSEWHERE}
    chosen = RecoverOptions(**values, hidden_blocks=tuple(options.hidden_block or ()))
    from ..models.recover import recover_checkpoint
    from ..models.recover_texts import RecoverTexts

    texts = RecoverTexts(**{key: getattr(options, key) for key in _TEXTS})
    with progress_shown() as progress:
        return recover_checkpoint(
            options.sparse,
            options.out,
            teacher=options.teacher,
            options=chosen,
            texts=texts,
            progress=progress,
        )


def _write_page(out: Path) -> Path | None:
    """The page of the recovered checkpoint, if it has a report."""
    path = out / REPORT_JSON
    if not path.exists():
        return None
    from ..report import write_report

    return write_report(json.loads(path.read_text(encoding="utf-8")), out / REPORT_PAGE)


def _is_first() -> bool:
    """Whether this is the first of the processes that torchrun started, or the only one."""
    return os.environ.get("RANK", "0") == "0"


def _print_interrupted(options: Recover) -> None:
    if not _is_first():
        return
    from ..models.checkpoint import partial_of

    partial = partial_of(options.out)
    print_interrupted(options.out, f"the state is in {partial}" if partial.exists() else None)


def _print(report: dict[str, Any], out: Path, page: Path | None) -> None:
    from rich.table import Table

    console = stdout()
    quality = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    quality.add_column("text")
    for title in ("dense ppl", "before", "after", "ratio", "top-1 agreement"):
        quality.add_column(title, justify="right")
    for row in report["evaluation"]:
        dense, after = row["dense"]["perplexity"], row["after"]["perplexity"]
        quality.add_row(
            row["text"],
            f"{dense:.2f}",
            f"{row['before']['perplexity']:.2f}",
            f"{after:.2f}",
            f"{after / dense:.2f}",
            f"{100 * row['after']['agreement']:.1f} %",
        )
    console.print(quality)
    console.print()
    for look in report["curve"]:
        stage = f"block {look['stage']}, " if report["options"]["level"] == "layer-wise" else ""
        loss = look["held_out_loss"]
        shown = "not finite" if loss is None else f"{loss:.4f}"
        console.print(f"  {stage}step {look['step']:>5}  held-out loss {shown}")
    if report["low_rank"]:
        cost = report["low_rank"]
        added = f"{bytes_text(cost['bytes'])} and {time_text(cost['time_us'])} a token"
        console.print(f"\nlow rank  {added} more on {cost['target'].upper()} (time predicted)")
    seconds = seconds_text(report["seconds"]["training"])
    stopped = ", stopped early" if report["stopped_early"] else ""
    console.print(f"\ntrained   {report['steps']} steps in {seconds}{stopped}")
    console.print(f"memory    {bytes_text(report['peak_memory_bytes'])} at the most")
    console.print(f"written   {out}", markup=False, soft_wrap=True)
    if page:
        console.print(f"report    {page}", markup=False, soft_wrap=True)


RECOVER = command(Recover, run, name="recover")
