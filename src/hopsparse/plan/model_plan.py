"""The plan of a whole model as a JSON file that people edit and run again."""

from __future__ import annotations

import glob
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import ArgumentError, CheckpointError
from .target import target as look_up_target

SCHEMA = 1
OBJECTIVES = ("time", "floor", "bytes")
_REST = "*"


@dataclass(frozen=True)
class ModelPlan:
    """Which form each layer gets, and for what it was chosen.

    Attributes:
        layers: Form of each planned layer by its full name, as text such as `2:4+int8`.
        model: The model it was made for, as the user named it.
        target: Name of the GPU it is meant for.
        batch: Sequences decoded at once.
        context: Tokens in the cache of each.
        objective: `time` (predicted), `floor` (what no kernel can be faster than) or `bytes`.
        budget: Allowed perplexity, as a multiple of the dense model's; None when made by hand.
        predicted: Predicted numbers by name. Nothing reads them; they may be missing.

    Raises:
        ArgumentError: A field that cannot mean anything; it names the layer of a wrong form.

    Example:
        >>> plan = ModelPlan({"model.layers.0.mlp.up_proj": "2:4+int8"})
        >>> plan.forms()
        {'model.layers.0.mlp.up_proj': '2:4+int8', '*': 'dense'}
        >>> ModelPlan.from_json(plan.to_json()) == plan
        True
    """

    layers: Mapping[str, str]
    model: str = ""
    target: str = "h200"
    batch: int = 1
    context: int = 2048
    objective: str = "time"
    budget: float | None = None
    predicted: Mapping[str, float] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        _check_layers(self.layers)
        _check_text("model", self.model)
        _check_text("target", self.target)
        look_up_target(self.target)
        for what, value in (("batch", self.batch), ("context", self.context)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ArgumentError(f"{what} {value!r}", need="an integer of at least 1", hint="1")
        if self.objective not in OBJECTIVES:
            raise ArgumentError(
                f"objective {self.objective!r}", need="one of " + ", ".join(OBJECTIVES), hint="time"
            )
        if self.budget is not None and not (_is_number(self.budget) and self.budget >= 1):
            raise ArgumentError(
                f"budget {self.budget!r}", need="a multiple of at least 1, or null", hint="1.05"
            )
        if not isinstance(self.predicted, Mapping) or not all(
            isinstance(key, str) and _is_number(value) for key, value in self.predicted.items()
        ):
            raise ArgumentError(
                f"predicted {self.predicted!r:.80}", need="numbers by name", hint="{}"
            )

    def forms(self) -> dict[str, str]:
        """What `Recipe.forms` takes: a form for each layer, and dense for all that are not named.

        Names are escaped, so that a plan never matches more than it says.
        """
        return {glob.escape(name): form for name, form in self.layers.items()} | {_REST: "dense"}

    def check_names(self, known: Iterable[str]) -> None:
        """Refuse layers that a model does not have.

        Raises:
            ArgumentError: It names the layer, and the nearest one that there is.
        """
        names = list(known)
        for name in self.layers:
            if name not in names:
                raise _unknown(name, names)

    def to_json(self) -> dict[str, Any]:
        """The plan as plain JSON values."""
        return {
            "hopsparse_plan": SCHEMA,
            "model": self.model,
            "target": self.target,
            "batch": self.batch,
            "context": self.context,
            "objective": self.objective,
            "budget": self.budget,
            "predicted": dict(self.predicted),
            "layers": dict(self.layers),
        }

    @classmethod
    def from_json(cls, facts: Mapping[str, Any]) -> ModelPlan:
        """Read what `to_json` wrote; everything but the schema and the layers may be missing.

        Raises:
            ArgumentError: Another schema, an unknown or missing entry, or a wrong value.
        """
        if not isinstance(facts, Mapping) or facts.get("hopsparse_plan") != SCHEMA:
            version = facts.get("hopsparse_plan") if isinstance(facts, Mapping) else None
            raise ArgumentError(
                f"hopsparse_plan {version!r}",
                need=f"a plan of version {SCHEMA}",
                hint="`hopsparse plan MODEL -o plan.json` writes one",
            )
        rest = {key: value for key, value in facts.items() if key != "hopsparse_plan"}
        known = list(cls.__dataclass_fields__)
        if unknown := sorted(set(rest) - set(known)):
            raise ArgumentError(
                f"plan entry {unknown[0]!r}", need="one of the entries below", hint=", ".join(known)
            )
        if "layers" not in rest:
            raise ArgumentError(
                "a plan without layers", need="an entry layers", hint='"layers": {}'
            )
        return cls(**rest)

    def write(self, path: Path | str) -> None:
        """Write the plan; the file appears whole or not at all.

        Raises:
            CheckpointError: It cannot be written.
        """
        from ..files import written_whole  # it knows safetensors, and planning needs none of that

        with written_whole(Path(path)) as temporary:
            temporary.write_text(json.dumps(self.to_json(), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path | str, known: Iterable[str] | None = None) -> ModelPlan:
        """Read a plan that may have been edited by hand.

        Args:
            path: The JSON file.
            known: Names of the layers that a model has; not checked when None.

        Raises:
            CheckpointError: The file cannot be read, or is no JSON; it says the line.
            ArgumentError: It is no plan of that model; it says the line of a layer.
        """
        path = Path(path)
        text = _read(path)
        try:
            plan = cls.from_json(json.loads(text, object_pairs_hook=_unique))
            if known is not None:
                plan.check_names(known)
        except json.JSONDecodeError as error:
            raise CheckpointError(
                f"{path}, line {error.lineno}: no JSON ({error.msg})",
                need="a plan in JSON",
                hint="look for a comma or a quote that is missing or too many",
            ) from None
        except RecursionError:
            raise CheckpointError(f"{path}: nested too deeply", need="a plan", hint="{}") from None
        except _PlaceError as error:
            place = f"{path}{_line_of(text, error.layer)}"
            raise ArgumentError(f"{place}: {error.got}", need=error.need, hint=error.hint) from None
        except ArgumentError as error:
            raise ArgumentError(f"{path}: {error.got}", need=error.need, hint=error.hint) from None
        except ValueError as error:
            # Python reads no integer of more than some thousand digits.
            raise CheckpointError(f"{path}: {error}", need="a plan", hint="{}") from None
        return plan


class _PlaceError(ArgumentError):
    """An error about one layer, which a file has on some line."""

    layer = ""

    @classmethod
    def at(cls, layer: str, got: str, need: str, hint: str) -> _PlaceError:
        """An error that knows its layer."""
        error = cls(got, need=need, hint=hint)
        error.layer = layer
        return error


def _check_layers(layers: object) -> None:
    from ..formats.scheme import parse_form  # the package around it loads torch

    if not isinstance(layers, Mapping):
        raise ArgumentError(
            f"layers {layers!r:.80}", need="forms by layer name", hint='{"...up_proj": "2:4"}'
        )
    for name, form in layers.items():
        if not isinstance(name, str) or not isinstance(form, str):
            raise _PlaceError.at(
                str(name), f"layer {name}: form {form!r:.80}", "a form as text", '"2:4+int8"'
            )
        try:
            parse_form(form)
        except ArgumentError as error:
            got = f"layer {name}, form {form!r}: {error.got}"
            raise _PlaceError.at(name, got, error.need, error.hint) from None


def _check_text(what: str, value: object) -> None:
    if not isinstance(value, str):
        raise ArgumentError(f"{what} {value!r:.80}", need="text", hint=f'"{what}": "h200"')


def _is_number(value: object) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and math.isfinite(float(str(value)))


def _unknown(name: str, known: list[str]) -> _PlaceError:
    import difflib

    near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
    return _PlaceError.at(
        name,
        f"layer {name!r}, which the model does not have or cannot prune",
        f"one of its {len(known)} layers",
        near[0] if near else "another model",
    )


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """JSON takes the last of two equal keys; in an edited plan the first one was meant as well."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise _PlaceError.at(key, f"{key!r} twice", "each entry once", "delete one of them")
        found[key] = value
    return found


def _line_of(text: str, key: str) -> str:
    """The last line that has the key, as a clause, or nothing."""
    quoted = json.dumps(key)
    lines = [number for number, line in enumerate(text.splitlines(), 1) if quoted in line]
    return f", line {lines[-1]}" if lines else ""


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read ({error.strerror})",
            need="a plan in JSON",
            hint="`hopsparse plan MODEL -o plan.json` writes one",
        ) from error
    except UnicodeDecodeError:
        raise CheckpointError(
            f"{path} is not UTF-8", need="a plan in JSON", hint="save it as UTF-8"
        ) from None
