"""Runs of several phases: plans that are built and measured, pruning, recovery; one checkpoint out.

Every phase makes a whole checkpoint in a folder of OUT.partial; the last one becomes OUT.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..errors import ArgumentError
from ..prune import Recipe
from ..recover import RecoverOptions, open_machine
from ._files import read_json, write_json
from ._prune_job import REPORT_NAME, Job
from ._recovery_report import with_recovery
from ._summary import peak_memory_bytes, repeat_command
from .checkpoint import StagedWriter
from .options import Progress, ProgressCallback, SparsifyOptions
from .quality_budget import QualityBudget, Search
from .recover import RECOVER_REPORT, recover_checkpoint
from .recover_texts import RecoverTexts, cut_texts
from .rules import FITS_ALL
from .samples import compare_samples

_PRUNED, _RECOVERED = "pruned", "recovered"
_WINDOW_TOKENS = 256


def plan_and_sparsify(
    model: str,
    out: Path | str,
    recipe: Recipe,
    budget: QualityBudget,
    *,
    options: SparsifyOptions = SparsifyOptions(),  # noqa: B008
    recover_steps: int = 0,
    progress: ProgressCallback = lambda _: None,
) -> dict[str, Any]:
    """Find the best plan within a quality budget, and write the checkpoint that it makes.

    Plans are built, measured on held-out windows of the calibration text, and corrected
    (docs/plan.md). Evaluation texts are run along for the report and decide nothing.

    Args:
        model: A local HF folder, a .gguf file, or a packaged model such as "smollm2-135m".
        out: Folder to make; OUT.partial holds all phases until then. Measured costs are kept in
            OUT.costs.json, for other budgets.
        recipe: How to prune; its pattern, scheme and forms are not used.
        budget: Allowed loss of quality, and what to gain for it.
        options: Texts, sizes, device, resume and overwrite. Every 5th window is held out.
        recover_steps: Training steps behind it, as in `sparsify_and_recover`; 0: none.
        progress: Called after each step of each phase.

    Returns:
        The report that is also written as OUT/report.json; "budget" and "pareto" are about plans.

    Raises:
        UnsupportedError: No plan that gains anything is within the budget; it says the best that
            was reached. Or the architecture is unknown.
        ArgumentError: Options that do not go together.
        CheckpointError: The model cannot be read, or OUT cannot be written.
        CalibrationError: A text cannot be used.

    Example:
        >>> plan_and_sparsify("no/such", "out", Recipe(), QualityBudget(1.05))
        Traceback (most recent call last):
        hopsparse.errors.CheckpointError: 'no/such' is no folder, no .gguf file and no ...
    """
    if options.plan is not None:
        raise ArgumentError(
            f"a quality budget with the plan {options.plan}",
            need="a plan, or a budget to find one for",
            hint="one of the two",
        )
    # Every pattern may be among the forms: what fits none of them is sorted out by the search.
    free = replace(recipe, pattern=FITS_ALL, scheme=None, forms={})
    job = Job.of(model, free, options)
    words = budget.command_words()
    run = _Run(model, Path(out), job, recover_steps, words, progress)
    with run.open({"budget": budget.to_json()}) as writer:
        search = Search(model, job, budget, Path(out), writer.partial, progress)
        folder, report = search.run()
        return run.finish(writer, folder, report)


def sparsify_and_recover(
    model: str,
    out: Path | str,
    recipe: Recipe,
    recover_steps: int,
    *,
    options: SparsifyOptions = SparsifyOptions(),  # noqa: B008
    progress: ProgressCallback = lambda _: None,
) -> dict[str, Any]:
    """Prune a model, then train the kept weights towards the dense one (docs/recover.md).

    Training takes the defaults of `RecoverOptions`, and the calibration text; `recover_checkpoint`
    takes all options, for a checkpoint that is there already.

    Args:
        model: The dense model, as `sparsify_checkpoint` takes it; also the teacher.
        out: Folder to make; OUT.partial holds both phases until then.
        recipe: How to prune.
        recover_steps: Optimizer steps, at least 1.
        options: Texts, sizes, device, plan, resume and overwrite.
        progress: Called after each step of each phase.

    Returns:
        The report that is also written as OUT/report.json. Its "evaluation" is of the recovered
        model; "recover" has the curve, and perplexities before and after.

    Raises:
        ArgumentError: Fewer than one step, or a device that training cannot use.
        CheckpointError: The model cannot be read, or OUT cannot be written.
        CalibrationError: A text cannot be used.
        UnsupportedError: The architecture is unknown, no layer can be pruned, or a library is
            missing.
        VerificationError: The loss is not finite.

    Example:
        >>> sparsify_and_recover("no/such", "out", Recipe(), 0)
        Traceback (most recent call last):
        hopsparse.errors.ArgumentError: steps=0. Required: an integer of at least 1. Try: steps=1.
    """
    RecoverOptions(steps=recover_steps)
    job = Job.of(model, recipe, options)
    run = _Run(model, Path(out), job, recover_steps, [], progress)
    with run.open({}) as writer:
        folder = writer.partial / _PRUNED
        if folder.exists():
            report = read_json(folder / REPORT_NAME)
        else:
            # The folder is inside of OUT.partial: what is there is continued.
            inner = replace(options, samples=False, resume=True, overwrite=False)
            report = replace(job, options=inner).run(folder, command="", progress=progress)
        return run.finish(writer, folder, report)


@dataclass(frozen=True)
class _Recovery:
    """How a pruned checkpoint is trained."""

    options: RecoverOptions
    texts: RecoverTexts

    @classmethod
    def of(cls, job: Job, steps: int) -> _Recovery:
        """Refuse what would stop the training, before anything is pruned."""
        settings = job.options
        device = {"cpu": "cpu", "cuda": "auto", "cuda:0": "auto"}.get(settings.device)
        if device is None:
            raise ArgumentError(
                f"recovery on device {settings.device!r}",
                need="cpu, or the first GPU",
                hint="CUDA_VISIBLE_DEVICES=1 and --device cuda",
            )
        tokens = min(_WINDOW_TOKENS, settings.window_tokens)
        options = RecoverOptions(steps=steps, seed=job.recipe.seed, window_tokens=tokens)
        texts = RecoverTexts(
            calibration=settings.calibration,
            evaluate=settings.evaluate,
            eval_windows=settings.eval_windows,
            eval_tokens=settings.window_tokens,
            device=device,
            resume=True,
        )
        cut_texts(job.source.tokenizer(), options, texts, job.source.config)
        with open_machine(options, device):
            pass
        return cls(options, texts)


class _Run:
    """What runs of several phases have in common: their unfinished folder, and their end."""

    def __init__(
        self,
        model: str,
        out: Path,
        job: Job,
        recover_steps: int,
        words: list[str],
        progress: ProgressCallback,
    ) -> None:
        self._started = time.monotonic()
        self._model, self._out, self._job, self._progress = model, out, job, progress
        self._steps = recover_steps
        self._recovery = _Recovery.of(job, recover_steps) if recover_steps else None
        more = [*words, *(["--recover", str(recover_steps)] if recover_steps else [])]
        self._command = repeat_command(model, out, job.recipe, job.options, more)

    def open(self, facts: Mapping[str, Any]) -> StagedWriter:
        """The folder of all phases; one that another command left is refused."""
        evaluation = {
            name: [window.tolist() for window in windows]
            for name, windows in self._job.texts.evaluation.items()
        }
        digest = hashlib.sha256(repr(evaluation).encode()).hexdigest()
        own = {"evaluation": digest, "recover": self._steps}
        identity = {**self._job.identity(), **own, **facts}
        options = self._job.options
        return StagedWriter(self._out, identity, overwrite=options.overwrite, resume=options.resume)

    def finish(self, writer: StagedWriter, folder: Path, report: dict[str, Any]) -> dict[str, Any]:
        """Recover what is in `folder`, if asked to, and give the result its name."""
        report = {**report, "command": self._command}
        if self._recovery is not None:
            folder, found = self._recover(writer.partial, folder)
            report = with_recovery(report, found)
        if self._job.shows_samples:
            self._progress(Progress("samples", 0, 1, "generating samples", None))
            job = self._job
            report["samples"] = compare_samples(job.source, folder, job.options.device)
        total = round(time.monotonic() - self._started, 1)
        report["seconds"] = {**report["seconds"], "total": total}
        report["peak_memory_bytes"] = peak_memory_bytes()
        write_json(folder / REPORT_NAME, report)
        writer.remove(RECOVER_REPORT)
        writer.adopt(folder)
        return report

    def _recover(self, partial: Path, pruned: Path) -> tuple[Path, dict[str, Any]]:
        assert self._recovery is not None
        out = partial / _RECOVERED
        if out.exists():
            return out, read_json(out / RECOVER_REPORT)
        found = recover_checkpoint(
            pruned,
            out,
            teacher=self._model,
            options=self._recovery.options,
            texts=self._recovery.texts,
            progress=self._progress,
        )
        return out, found
