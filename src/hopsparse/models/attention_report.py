"""What sparse attention costs a model: recall, output error, perplexity and needles, measured.

A run is a list of steps, each a window, a context length and a budget; what is finished is kept
beside the result, so that an interrupted run goes on where it was.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import ArgumentError, CheckpointError
from ._files import STATE_NAME, check_result, exclusive, partial_of, read_json, write_json
from .attention_config import AttentionConfig
from .evaluate import evaluate
from .needle import Needle, needles
from .opened import OpenedModel
from .options import ProgressCallback, StepClock
from .text import Text, windows_digest

REPORT = "report.json"


@dataclass(frozen=True)
class AttentionReport:
    """What is measured.

    Attributes:
        contexts: Tokens of windows.
        budgets: Most tokens attended; those below a context are measured in it.
        config: Everything else of the attention; its budget and crossover are not used.
        windows: Of each context.
        needles: Trials of each context; 0: none.
        samples: Queries of each window whose recall and error are measured.
        resume: Continue an interrupted run.
        overwrite: Replace an earlier report, and discard an interrupted run.

    Raises:
        ArgumentError: A value means nothing.
    """

    contexts: tuple[int, ...] = (1024, 2048)
    budgets: tuple[int, ...] = (256, 512)
    config: AttentionConfig = field(default_factory=AttentionConfig)
    windows: int = 2
    needles: int = 4
    samples: int = 32
    resume: bool = False
    overwrite: bool = False

    def __post_init__(self) -> None:
        for name, least in (("windows", 1), ("needles", 0), ("samples", 1)):
            value = getattr(self, name)
            if value < least:
                raise ArgumentError(f"{name} = {value}", need=f"at least {least}", hint=str(least))
        if self.resume and self.overwrite:
            raise ArgumentError(
                "resume and overwrite together", need="one of the two", hint="--resume alone"
            )
        if not self.contexts or min(self.contexts) < 16 or not self.budgets:
            raise ArgumentError(
                f"contexts {self.contexts}, budgets {self.budgets}",
                need="at least one of each, contexts of 16 tokens and more",
                hint="--context 1024 --budget 256",
            )
        for budget in self.budgets:
            self.of(budget)

    def of(self, budget: int) -> AttentionConfig:
        """The attention of one budget, which is sparse from the first token on."""
        return replace(self.config, budget=budget, crossover=0)

    def within(self, context: int) -> list[int]:
        """The budgets that leave something out of a context."""
        return sorted(budget for budget in set(self.budgets) if budget < context)


def attention_report(
    opened: OpenedModel,
    text: Text,
    out: Path,
    *,
    asked: AttentionReport,
    progress: ProgressCallback = lambda _: None,
) -> dict[str, Any]:
    """Measure a model of transformers on a text, and write OUT/report.json.

    Args:
        opened: The model, on the CPU or a GPU.
        text: Long enough for one window of the longest context.
        out: Folder to make.
        asked: What is measured.
        progress: Told of every step.

    Raises:
        ArgumentError: A context that the model or the text does not have.
        CheckpointError: OUT exists, or an interrupted run was another one.
        UnsupportedError: The attention of the model cannot be exchanged.
    """
    check_result(out)
    if out.exists() and not asked.overwrite:
        raise CheckpointError(f"{out} exists", need="a free name", hint="--overwrite")
    steps = list(_steps(opened, text, asked))
    partial = partial_of(out)
    if asked.overwrite and partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True, exist_ok=True)
    with exclusive(partial):
        identity = _identity(opened, text, asked, steps)
        done = _resumed(partial / STATE_NAME, identity, asked)
        clock = StepClock("attention", len(steps), progress)
        for key, label, work in steps:
            if key not in done:
                started = time.monotonic()
                done[key] = {**work(), "seconds": round(time.monotonic() - started, 2)}
                write_json(partial / STATE_NAME, {"identity": identity, "done": done})
            clock.step(label)
        report = _summary(opened, identity, done)
        write_json(partial / REPORT, report)
        (partial / STATE_NAME).unlink()
        if out.exists():
            shutil.rmtree(out)
        os.replace(partial, out)
    return report


Step = tuple[str, str, Callable[[], dict[str, Any]]]


def _steps(opened: OpenedModel, text: Text, asked: AttentionReport) -> Iterator[Step]:
    """Every step: its key, what people are told of it, and its work."""
    for context in asked.contexts:
        budgets = asked.within(context)
        for number, window in enumerate(opened.windows(text, asked.windows, context)):
            name = f"{context} tokens, window {number + 1}"
            yield f"dense {context} {number}", name, _dense(opened, window, budgets, asked)
            for budget in budgets:
                told = f"{name}, {budget} attended"
                config = asked.of(budget)
                yield f"sparse {context} {number} {budget}", told, _sparse(opened, window, config)
        if asked.needles:
            trials = needles(text.content, opened.tokenizer, context, asked.needles)
            for number, trial in enumerate(trials):
                for budget in (0, *budgets):
                    told = f"{context} tokens, needle {number + 1}, {budget or 'all'} attended"
                    chosen = asked.of(budget) if budget else None
                    yield f"needle {context} {number} {budget}", told, _found(opened, trial, chosen)


def _dense(
    opened: OpenedModel, window: Tensor, budgets: list[int], asked: AttentionReport
) -> Callable[[], dict[str, Any]]:
    def work() -> dict[str, Any]:
        from .attention_study import Study, studied

        configs = tuple(asked.of(budget) for budget in budgets)
        study = Study(configs, samples=asked.samples)
        with studied(opened.model, study):
            quality = evaluate(opened.model, [window])
        layers = [
            {"budget": budgets[number], "layer": layer, **_layer(seen)}
            for (number, layer), seen in sorted(study.seen.items())
        ]
        return {"nll": quality.nll, "tokens": quality.tokens, "layers": layers}

    return work


def _layer(seen: Any) -> dict[str, Any]:
    recall, bound = torch.cat(seen.recall), torch.cat(seen.bound).double()
    return {
        "recall": recall.mean().item(),
        "recall_p1": recall.quantile(0.01).item(),
        "error": (seen.error / max(seen.size, 1e-300)) ** 0.5,
        "attended": torch.cat(seen.tokens).mean().item(),
        "bound": bound.mean().item(),
        # Weights are those of float32, which the certificate allows for.
        "bound_broken": int((bound < 1 - recall - 1e-6).sum()),
        "queries": recall.numel(),
    }


def _sparse(
    opened: OpenedModel, window: Tensor, config: AttentionConfig
) -> Callable[[], dict[str, Any]]:
    def work() -> dict[str, Any]:
        from .attention_study import Study, studied

        with studied(opened.model, Study((config,), flows=True)):
            quality = evaluate(opened.model, [window])
        return {"nll": quality.nll, "tokens": quality.tokens}

    return work


def _found(
    opened: OpenedModel, trial: Needle, config: AttentionConfig | None
) -> Callable[[], dict[str, Any]]:
    def work() -> dict[str, Any]:
        from .attention_study import Study, studied

        device = next(opened.model.parameters()).device
        study = Study((config,) if config else (), flows=config is not None)
        with torch.no_grad(), studied(opened.model, study):
            logits = opened.model(trial.window.to(device), use_cache=False).logits
        found, loss = trial.judged(logits)
        return {"found": found, "loss": loss, "depth": trial.depth}

    return work


def _identity(
    opened: OpenedModel, text: Text, asked: AttentionReport, steps: list[Step]
) -> dict[str, Any]:
    windows = opened.windows(text, asked.windows, max(asked.contexts))
    return {
        "model": opened.name,
        "text": text.name,
        "windows": windows_digest(windows),
        "config": {key: value for key, value in asdict(asked.config).items() if key != "budget"},
        "samples": asked.samples,
        "steps": [key for key, _, _ in steps],
    }


def _resumed(path: Path, identity: dict[str, Any], asked: AttentionReport) -> dict[str, Any]:
    """What an interrupted run has finished.

    Raises:
        CheckpointError: It is there and not to be resumed, or it was another run.
    """
    if not path.exists():
        return {}
    if not asked.resume:
        raise CheckpointError(
            f"{path.parent} holds an interrupted run",
            need="--resume or --overwrite",
            hint="--resume",
        )
    stored = read_json(path)
    if stored.get("identity") != identity or not isinstance(stored.get("done"), dict):
        raise CheckpointError(
            f"{path} is of another run", need="the same command", hint="--overwrite to start again"
        )
    done: dict[str, Any] = stored["done"]
    return done


def _summary(opened: OpenedModel, identity: dict[str, Any], done: dict[str, Any]) -> dict[str, Any]:
    """The report: rows by context and budget, and by layer."""
    rows: dict[tuple[int, int], dict[str, Any]] = {}
    layers: dict[tuple[int, int, int], list[dict[str, Any]]] = {}
    for key, value in done.items():
        kind, context, _, *budget = key.split()
        place = (int(context), int(budget[0]) if budget else 0)
        row = rows.setdefault(place, {"nll": 0.0, "tokens": 0, "found": [], "loss": []})
        if kind == "needle":
            row["found"].append(value["found"])
            row["loss"].append(value["loss"])
            continue
        row["nll"] += value["nll"]
        row["tokens"] += value["tokens"]
        for layer in value.get("layers", ()):
            layers.setdefault((place[0], layer["budget"], layer["layer"]), []).append(layer)
    return {
        "model": opened.to_json(),
        **{key: identity[key] for key in ("text", "config", "samples")},
        "seconds": round(sum(each["seconds"] for each in done.values()), 1),
        "contexts": [_row(place, row, rows) for place, row in sorted(rows.items())],
        "layers": [_layer_row(place, found) for place, found in sorted(layers.items())],
    }


def _row(
    place: tuple[int, int], row: dict[str, Any], rows: dict[tuple[int, int], dict[str, Any]]
) -> dict[str, Any]:
    """One context and budget; budget 0 is dense."""
    dense = rows[(place[0], 0)]
    nll, of_dense = row["nll"] / row["tokens"], dense["nll"] / dense["tokens"]
    trials = len(row["found"])
    return {
        "context": place[0],
        "budget": place[1] or None,
        "tokens": row["tokens"],
        "perplexity": float(torch.tensor(nll).exp()),
        "ratio": float(torch.tensor(nll - of_dense).exp()),
        "needles": trials,
        "needles_found": sum(row["found"]),
        "needle_loss": sum(row["loss"]) / trials if trials else None,
    }


def _layer_row(place: tuple[int, int, int], found: list[dict[str, Any]]) -> dict[str, Any]:
    """Means over windows, which have as many queries each; errors as roots of means of squares."""
    mean = {
        key: sum(each[key] for each in found) / len(found)
        for key in ("recall", "recall_p1", "attended", "bound")
    }
    return {
        **dict(zip(("context", "budget", "layer"), place, strict=True)),
        **mean,
        "error": (sum(each["error"] ** 2 for each in found) / len(found)) ** 0.5,
        "bound_broken": sum(each["bound_broken"] for each in found),
        "queries": sum(each["queries"] for each in found),
    }
