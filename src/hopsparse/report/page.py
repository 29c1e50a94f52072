"""Facts of a report, put into the words and numbers of the page."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from ..models.pareto import Pareto, share_text
from ..units import bytes_text, duration_text, time_text
from .figures import NARROW, PAIR, PALETTE, TIMES, WIDE, LayerError, error_bars, predicted_bars
from .pareto import pareto_svg
from .predicted import TOKENS, LayerTimes, Predicted
from .recovery import curve_svg, loss_text, recovery_facts, recovery_rows, stages_of


def render(report: Mapping[str, Any], predicted: Predicted) -> str:
    """Return the HTML of one report."""
    environment = Environment(
        loader=PackageLoader(__package__ or "hopsparse.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        size=bytes_text, duration=duration_text, micros=lambda us: time_text(us, "µ")
    )
    environment.filters |= {"shares": share_text, "loss": loss_text}
    errors = layer_errors(report["layers"])
    colours = colours_of(errors)
    pareto = Pareto.from_json(report["pareto"]) if report.get("pareto") else None
    recover = report.get("recover")
    stages = stages_of(recover) if recover else []
    return environment.get_template("page.html.j2").render(
        pareto=pareto,
        budget=_budget(report.get("budget")),
        recover=recover,
        facts=recovery_facts(recover, stages) if recover else {},
        recovered=recovery_rows(recover) if recover else [],
        stages=stages,
        report=report,
        asked=_asked(report["recipe"]),
        tokens=TOKENS,
        date=_date(report["date"]),
        predicted=predicted,
        quality=_quality(report["evaluation"]),
        headline=_headline(report, predicted),
        figures={
            "errors": [error_bars(errors, colours, width) for width in (WIDE, NARROW)]
            if errors
            else [],
            "predicted": [
                predicted_bars(predicted.totals, PAIR, width) for width in (WIDE, NARROW)
            ],
            "pareto": [pareto_svg(pareto, width) for width in (WIDE, NARROW)] if pareto else [],
            "curve": [curve_svg(stages, width) for width in (WIDE, NARROW)] if stages else [],
        },
        layers=_layer_rows(report["layers"], predicted.layers),
        kept=_grouped(report["kept_dense"]),
    )


def layer_errors(layers: Sequence[Mapping[str, Any]]) -> list[LayerError]:
    """Block, kind and error of each layer that has an error; names give block and kind."""
    errors = []
    for layer in layers:
        if layer["output_error"] is None:
            continue
        name = str(layer["name"])
        found = re.search(r"(?:^|\.)(\d+)\.", name)
        errors.append(
            LayerError(
                int(found[1]) if found else 0, name.rpartition(".")[2], layer["output_error"]
            )
        )
    return errors


def colours_of(errors: Sequence[LayerError]) -> dict[str, str]:
    """A colour for each kind of projection, in order of appearance."""
    kinds = list(dict.fromkeys(error.kind for error in errors))
    return {kind: PALETTE[index % len(PALETTE)] for index, kind in enumerate(kinds)}


def _headline(report: Mapping[str, Any], predicted: Predicted) -> list[tuple[str, str, str]]:
    """Value, label and remark of the numbers at the top."""
    rows = []
    quality = _quality(report["evaluation"])
    if quality:
        worst = max(quality, key=lambda row: row["ratio"])
        rows.append(
            (f"{worst['ratio']:.2f}{TIMES}", "perplexity", f"of the dense model, {worst['text']}")
        )
        agreement = f"{100 * worst['agreement']:.1f} %"
        rows.append((agreement, "top-1 agreement", f"with the dense model, {worst['text']}"))
    stored = report["bytes"]
    rows.append(
        (
            f"{stored['sparse'] / max(1, stored['dense']):.2f}{TIMES}",
            "size",
            f"{bytes_text(stored['dense'])} → {bytes_text(stored['sparse'])}",
        )
    )
    if predicted.totals:
        gains = [total.speedup for total in predicted.totals]
        low, high = f"{min(gains):.2f}", f"{max(gains):.2f}"
        value = f"{low}{TIMES}" if low == high else f"{low}\N{EN DASH}{high}{TIMES}"
        remark = f"1 to {TOKENS[-1]:,} tokens on {predicted.target.name.upper()}, not measured"
        rows.append((value, "predicted speed", remark))
    return rows


def _quality(evaluation: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [
        {
            "text": row["text"],
            "windows": row["windows"],
            "dense": row["dense"]["perplexity"],
            "sparse": row["sparse"]["perplexity"],
            "ratio": row["sparse"]["perplexity"] / row["dense"]["perplexity"],
            "agreement": row["sparse"]["agreement"],
            # Reports of older versions have none.
            "kl": row["sparse"].get("kl"),
        }
        for row in evaluation
    ]


def _budget(budget: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The budget with a row for each plan that was built: predicted, measured, and what of it."""
    if budget is None:
        return None
    rows = []
    for number, each in enumerate(budget["rounds"], 1):
        predicted, reached = each["predicted"], each["reached"]
        over = reached is None or reached > budget["asked"]
        rows.append(
            {
                "number": number,
                "predicted": _ratio(predicted["perplexity_ratio"]),
                "reached": "not finite" if reached is None else _ratio(reached),
                "speedup": predicted["speedup"],
                "floor_speedup": predicted["floor_speedup"],
                "bytes": predicted["weight_bytes"],
                "scale": each["scale"],
                # Reports of older versions do not say which plan was kept, nor of what each is.
                "result": "kept" if each.get("kept") else "over" if over else "within",
                "shares": share_text(each.get("layers_by_form", {})),
            }
        )
    return {**budget, "rows": rows}


def _ratio(value: float) -> str:
    return f"{value:.3f}{TIMES}" if value < 1000 else f"{value:.3g}{TIMES}"


def _layer_rows(
    layers: Sequence[Mapping[str, Any]], times: Sequence[LayerTimes]
) -> list[dict[str, Any]]:
    return [
        {
            **layer,
            "form": _form(layer),
            "times": [(choice.dense, choice.chosen) for choice in own.choices],
        }
        for layer, own in zip(layers, times, strict=True)
    ]


def _asked(recipe: Mapping[str, Any]) -> str:
    return "mixed forms" if recipe.get("forms") else _form(recipe)


def _form(facts: Mapping[str, Any]) -> str:
    """Pattern and scheme; reports of older versions have no scheme."""
    return "+".join(text for text in (facts["pattern"], facts.get("scheme")) if text)


def _grouped(kept: Mapping[str, str]) -> dict[str, list[str]]:
    """Layers by the reason why they stayed dense."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in kept.items():
        by_reason.setdefault(reason, []).append(name)
    return by_reason


def _date(text: str) -> str:
    try:
        return datetime.fromisoformat(text).astimezone(UTC).strftime("%Y-%m-%d %H:%M UTC")
    except ValueError:
        return text
