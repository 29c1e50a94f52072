"""Options of `hopsparse sparsify` in groups, and which of them exclude each other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import ArgumentError
from .options import REPORT_PAGE, EvalText, EvalWindows, Overwrite, ReportAsJson, Resume

if TYPE_CHECKING:
    from ..models.options import SparsifyOptions
    from ..models.quality_budget import QualityBudget
    from ..prune import Recipe


@dataclass(frozen=True, kw_only=True)
class Places:
    """From where to where."""

    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="HF folder, .gguf file, or smollm2-135m.")
    ]
    out: Annotated[Path, typer.Option("-o", "--out", metavar="OUT", help="Folder to make.")]


@dataclass(frozen=True, kw_only=True)
class Forms:
    """What becomes of each layer."""

    pattern: Annotated[
        str | None,
        typer.Option(
            help="N:M, unstructured:F or block:RxC[:F]; F is the part made zero. 2:4 if left out."
        ),
    ] = None
    quant: Annotated[
        str | None,
        typer.Option(
            metavar="SCHEME", help="Round kept weights, and inputs: int8, fp8, int4:64, fp8/int4."
        ),
    ] = None
    form: Annotated[
        list[str] | None,
        typer.Option(
            metavar="GLOB=FORM",
            help="Another form for layers by full name: dense, 6:8, 2:4+int8, dense+fp8; "
            "repeatable, the first that matches counts.",
        ),
    ] = None
    keep: Annotated[
        list[str] | None,
        typer.Option(metavar="GLOB", help="Layers to keep dense, by full name; repeatable."),
    ] = None
    plan: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Plan that says the form of every layer."),
    ] = None


@dataclass(frozen=True, kw_only=True)
class Budget:
    """A plan that is found, built and measured."""

    quality_budget: Annotated[
        float | None,
        typer.Option(
            metavar="R",
            help="Find the best plan whose perplexity, as a multiple of the dense model's on "
            "held-out text, is at most this.",
        ),
    ] = None
    target: Annotated[
        str | None, typer.Option(help="Budget: GPU to plan for, h200 or h100. h200 if left out.")
    ] = None
    batch: Annotated[
        int | None, typer.Option(help="Budget: sequences decoded at once. 1 if left out.")
    ] = None
    context: Annotated[
        int | None, typer.Option(help="Budget: tokens in the cache of each. 2048 if left out.")
    ] = None
    objective: Annotated[
        str | None,
        typer.Option(help="Budget: what is made small: time, floor or bytes. time if left out."),
    ] = None
    forms: Annotated[
        str | None,
        typer.Option(metavar="FORM,...", help="Budget: forms to choose from; 20 if left out."),
    ] = None
    fast: Annotated[
        bool,
        typer.Option("--fast", help="Budget: add up costs of pattern and scheme."),
    ] = False


@dataclass(frozen=True, kw_only=True)
class Method:
    """How kept weights are found."""

    method: Annotated[str, typer.Option(help="magnitude, wanda or sparsegpt.")] = "sparsegpt"
    search: Annotated[
        str,
        typer.Option(help="SparseGPT: greedy, or admm: better, in about half as much time again."),
    ] = "greedy"
    fit_to: Annotated[
        str,
        typer.Option(help="SparseGPT: layer, input, residual, or auto: what a layer is fitted to."),
    ] = "auto"
    order: Annotated[
        str, typer.Option(help="SparseGPT, greedy: natural, or activation: strong inputs first.")
    ] = "natural"
    damping: Annotated[
        str,
        typer.Option(
            metavar="FLOAT|search",
            help="SparseGPT: added to the Hessian's diagonal, as part of its mean.",
        ),
    ] = "0.01"
    refit: Annotated[
        int, typer.Option(help="SparseGPT: steps that refit the kept weights; 0 is the paper's.")
    ] = 10
    permute: Annotated[
        bool,
        typer.Option("--permute", help="Reorder channels inside blocks first: N:M keeps more."),
    ] = False
    recover: Annotated[
        int | None,
        typer.Option(metavar="STEPS", help="Then train kept weights towards MODEL."),
    ] = None
    seed: Annotated[int, typer.Option(help="Draws the calibration windows.")] = 0


@dataclass(frozen=True, kw_only=True)
class Running:
    """Texts, and how to run."""

    calibration: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Text to calibrate on; a bundled one if left out."),
    ] = None
    evaluate: EvalText = None
    windows: Annotated[int, typer.Option(help="Calibration windows.")] = 24
    window_tokens: Annotated[int, typer.Option(help="Tokens a window.")] = 512
    eval_windows: EvalWindows = 8
    samples: Annotated[bool, typer.Option(help="Generate short samples with both models.")] = True
    device: Annotated[str, typer.Option(help="Where blocks are run and pruned.")] = "cpu"
    report: Annotated[bool, typer.Option(help=f"Write OUT/{REPORT_PAGE}.")] = True
    resume: Resume = False
    overwrite: Overwrite = False
    json: ReportAsJson = False


# Fields come from the last base first: help shows places and forms, then how to run.
@dataclass(frozen=True, kw_only=True)
class Sparsify(Running, Method, Budget, Forms, Places):
    """All options of `hopsparse sparsify`."""

    def check_together(self) -> None:
        """Refuse options that exclude each other.

        Raises:
            ArgumentError: It names both.
        """
        of_forms = {"--pattern": self.pattern, "--quant": self.quant, "--form": self.form}
        budget = self.quality_budget is not None
        if self.plan is not None:
            need = "one source of forms: the plan says the form of every layer"
            given = _given({"--quality-budget": budget or None, **of_forms, "--keep": self.keep})
            _refuse("--plan", given, need, "change the form of the layer in the plan")
        if budget:
            need = "one source of forms: the budget finds the form of every layer"
            _refuse("--quality-budget", _given(of_forms), need, "--forms to choose from, or --keep")
        else:
            of_budget = ("target", "batch", "context", "objective", "forms")
            given = _given({f"--{name}": getattr(self, name) for name in of_budget})
            if self.fast or given:
                raise ArgumentError(
                    f"{[*given, '--fast'][0]} without --quality-budget",
                    need="a budget to plan for",
                    hint="--quality-budget 1.05",
                )
        if self.method != "sparsegpt":
            special = {"search": "greedy", "fit_to": "auto", "order": "natural"}
            changed = [name for name, usual in special.items() if getattr(self, name) != usual]
            changed += ["damping"] if self.damping == "search" else []
            if changed:
                option = f"--{changed[0].replace('_', '-')} {getattr(self, changed[0])}"
                need = "sparsegpt: the other methods move no weights"
                _refuse(option, [f"--method {self.method}"], need, "--method sparsegpt")
        if self.search == "admm" and self.order != "natural":
            need = "search greedy: admm has no order of columns"
            _refuse("--search admm", [f"--order {self.order}"], need, "--search greedy")

    def recipe(self) -> Recipe:
        """The recipe; a plan or a budget gives its forms later."""
        from ..prune import Recipe

        return Recipe(
            pattern="2:4" if self.pattern is None else self.pattern,
            method=self.method,
            scheme=self.quant,
            forms=dict(_glob_and_form(text) for text in self.form or ()),
            keep=tuple(self.keep or ()),
            seed=self.seed,
            damping=_damping(self.damping),
            refit=self.refit,
            search=self.search,
            fit_to=self.fit_to,
            order=self.order,
            permute=self.permute,
        )

    def budget(self) -> QualityBudget | None:
        """The budget, if there is one."""
        if self.quality_budget is None:
            return None
        from ..models.quality_budget import QualityBudget

        known = {
            name: getattr(self, name)
            for name in ("target", "batch", "context", "objective")
            if getattr(self, name) is not None
        }
        if self.forms is not None:
            known["forms"] = tuple(self.forms.split(","))
        return QualityBudget(self.quality_budget, additive=self.fast, **known)

    def settings(self) -> SparsifyOptions:
        """Texts, sizes and places."""
        from ..models.options import SparsifyOptions

        names = (
            *("calibration", "evaluate", "windows", "window_tokens", "eval_windows", "samples"),
            *("device", "resume", "overwrite", "plan"),
        )
        return SparsifyOptions(**{name: getattr(self, name) for name in names})


def _given(options: Mapping[str, object]) -> list[str]:
    return [name for name, value in options.items() if value not in (None, [], ())]


def _refuse(option: str, others: Iterable[str], need: str, hint: str) -> None:
    for other in others:
        raise ArgumentError(f"{option} with {other}", need=need, hint=hint)


def _damping(text: str) -> float | str:
    if text == "search":
        return text
    try:
        return float(text)
    except ValueError:
        raise ArgumentError(
            f"--damping {text!r}", need="a number above 0, or search", hint="--damping 0.01"
        ) from None


def _glob_and_form(text: str) -> tuple[str, str]:
    glob, equals, form = text.rpartition("=")
    if not (equals and glob):
        raise ArgumentError(
            f"--form {text!r}", need="GLOB=FORM", hint="--form '*.down_proj=6:8+int8'"
        )
    return glob, form
