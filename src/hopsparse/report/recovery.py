"""What a recovery did, for the page: facts of each stage, and the held-out loss as a plot."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from ..units import bytes_text, duration_text, time_text
from .figures import INK, PALETTE, STYLE, WIDE, figure_svg

# Losses that differ more than this are shown on a logarithmic scale.
_LOG_FROM = 10.0


@dataclass(frozen=True)
class Stage:
    """A block of a layer-wise run, or the whole of another.

    Attributes:
        number: Of the block, among those that are trained.
        looks: Step and held-out loss of each look; NaN where it was not finite.
        planned: Steps that it was to have.
    """

    number: int
    looks: tuple[tuple[int, float], ...]
    planned: int

    @property
    def start(self) -> float:
        """Held-out loss before the first step."""
        return self.looks[0][1]

    @property
    def steps(self) -> int:
        """Steps that were done: the last one is always looked at."""
        return self.looks[-1][0]

    @property
    def best(self) -> tuple[int, float]:
        """Step and loss of the look whose weights were kept."""
        finite = [look for look in self.looks if math.isfinite(look[1])]
        return min(finite, key=lambda look: look[1], default=self.looks[0])

    @property
    def stopped_early(self) -> bool:
        """Whether it ended before its last step."""
        return self.steps < self.planned


def stages_of(recover: Mapping[str, Any]) -> list[Stage]:
    """The stages of a report's `recover`; none if no window was held out."""
    looks: dict[int, list[tuple[int, float]]] = {}
    for look in recover["curve"]:
        loss = math.nan if look["held_out_loss"] is None else float(look["held_out_loss"])
        looks.setdefault(look["stage"], []).append((look["step"], loss))
    planned = recover["options"]["steps"]
    return [Stage(number, tuple(found), planned) for number, found in looks.items()]


def recovery_facts(recover: Mapping[str, Any], stages: Sequence[Stage]) -> dict[str, str]:
    """What was trained, for how long and on what, as words."""
    options, text = recover["options"], recover["text"]
    facts = {"trained": _trained(options), "steps": _steps(recover, stages)}
    # Reports of older versions do not count tokens.
    if recover.get("tokens") is not None:
        windows = f"{options['batch_windows']} windows of {options['window_tokens']} a step"
        facts["tokens"] = f"{recover['tokens']:,}: {windows}"
    facts["text"] = f"{text['name']}, {text['windows']} windows, {text['held_out']} held out"
    facts["training"] = duration_text(recover["seconds"]["training"])
    if len(stages) == 1:
        stage = stages[0]
        step, best = stage.best
        where = f"at step {step}, whose weights are kept"
        facts["held-out loss"] = f"{loss_text(stage.start)} → {loss_text(best)} {where}"
    if cost := recover.get("low_rank"):
        more = f"{bytes_text(cost['bytes'])} more, and {time_text(cost['time_us'], 'µ')} a step"
        tokens = "1 token" if cost["tokens"] == 1 else f"{cost['tokens']:,} tokens"
        target = cost["target"].upper()
        facts["low rank"] = f"{more} of {tokens} on {target} (predicted; not in the times below)"
    return facts


def loss_text(loss: float) -> str:
    """A held-out loss for readers."""
    return f"{loss:.4f}" if math.isfinite(loss) else "not finite"


def _trained(options: Mapping[str, Any]) -> str:
    if options["lora_rank"]:
        what = f"a product of rank {options['lora_rank']} beside each pruned layer"
    elif options["train"] == "all":
        what = "all weights but embeddings and head"
    else:
        what = "kept weights of the pruned layers"
    how = ", each block by itself" if options["level"] == "layer-wise" else ""
    masks = ", masks chosen anew on the way" if options["masks"] == "sr-ste" else ""
    return f"{what}{how}{masks}"


def _steps(recover: Mapping[str, Any], stages: Sequence[Stage]) -> str:
    planned = recover["options"]["steps"]
    if len(stages) > 1:
        early = sum(stage.stopped_early for stage in stages)
        told = f"; {early} stopped early" if early else ""
        return f"{planned:,} for each of {len(stages)} blocks{told}"
    if recover["steps"] < planned:
        looks = recover["options"]["patience"]
        return f"{recover['steps']:,} of {planned:,}: stopped early, no better in {looks} looks"
    return f"{recover['steps']:,}"


def recovery_rows(recover: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Each evaluation text before and after; KL is None in reports of older versions."""
    return [
        {
            "text": row["text"],
            "dense": row["dense"]["perplexity"],
            "before": row["before"],
            "after": row["after"],
            "ratio_before": row["before"]["perplexity"] / row["dense"]["perplexity"],
            "ratio_after": row["after"]["perplexity"] / row["dense"]["perplexity"],
            "kl": [row[role].get("kl") for role in ("before", "after")],
        }
        for row in recover["evaluation"]
    ]


def curve_svg(stages: Sequence[Stage], width: float) -> str:
    """Held-out loss by step, as SVG text; blocks of a layer-wise run follow one another."""
    with rc_context(STYLE):
        figure = Figure(
            figsize=(width, (0.3 if width == WIDE else 0.62) * width), layout="constrained"
        )
        axes = figure.subplots()
        first = 0
        for stage in stages:
            steps = [first + step for step, _ in stage.looks]
            losses = [loss for _, loss in stage.looks]
            axes.plot(steps, losses, "-o", color=PALETTE[0], markersize=2.5, linewidth=1)
            step, loss = stage.best
            axes.plot([first + step], [loss], "*", color=PALETTE[1], markersize=10, zorder=5)
            first += stage.steps
        known = [loss for stage in stages for _, loss in stage.looks if math.isfinite(loss)]
        if known and 0 < _LOG_FROM * min(known) < max(known):
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axes.yaxis.set_minor_locator(NullLocator())
        else:
            axes.set_ylim(bottom=0)
        axes.xaxis.set_major_locator(MaxNLocator(8 if width == WIDE else 4, integer=True))
        axes.set_xlabel("step" if len(stages) == 1 else "step, blocks one after another")
        axes.set_ylabel("held-out loss")
        axes.grid(axis="y", color=INK, alpha=0.15, linewidth=0.6)
        axes.set_axisbelow(True)
        return figure_svg(figure, "Loss on held-out windows while weights were recovered")
