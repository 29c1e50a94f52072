"""Measured costs of forms as values, and as a JSON file that grows block by block."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import ArgumentError, CheckpointError
from ..formats import parse_form
from ..measure import Decoder
from ._files import read_json, write_json

SCHEMA = 1
_PRIOR_WINDOWS = 8
_DENSE = "dense"
_AGAIN = "--remeasure, or another output file"


@dataclass(frozen=True)
class LayerCosts:
    """One layer.

    Attributes:
        shape: [out, k].
        costs: Nats of KL a token by form; dense costs nothing.
        note: Anything out of the ordinary, or empty.
        together: The same with products of different tokens counted, where it was measured: exact
            on average, and noisy.
    """

    shape: tuple[int, int]
    costs: Mapping[str, float]
    note: str = ""
    together: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Sensitivity:
    """What each form costs each layer of a model.

    Attributes:
        layers: By full name, in run order.
        decoder: What a decode step of the model reads.
        kept_dense: Why each other linear layer stays dense.
    """

    layers: Mapping[str, LayerCosts]
    decoder: Decoder
    kept_dense: Mapping[str, str] = field(default_factory=dict)

    @property
    def notes(self) -> dict[str, str]:
        """What is out of the ordinary, by layer."""
        return {name: layer.note for name, layer in self.layers.items() if layer.note}


class SensitivityFile:
    """The costs that are known, and where they are kept.

    Args:
        path: The JSON file; None keeps nothing.
        identity: Model, recipe and text of the measurement, as JSON values.
        layers: Costs that are known already.
    """

    def __init__(
        self, path: Path | None, identity: Mapping[str, Any], layers: Mapping[str, LayerCosts]
    ) -> None:
        self._path = path
        self._identity = dict(identity)
        self._layers = dict(layers)

    @classmethod
    def open(
        cls, path: Path | None, identity: Mapping[str, Any], remeasure: bool
    ) -> SensitivityFile:
        """Read what an earlier run left, if it measured the same.

        Raises:
            CheckpointError: The file is damaged, or about something else.
        """
        if path is None or remeasure or not path.exists():
            return cls(path, identity, {})
        try:
            stored = read_json(path)
        except CheckpointError:
            # It can be measured again, where a checkpoint has to be restored.
            raise _damaged(path) from None
        before, layers = stored.get("identity"), stored.get("layers")
        if stored.get("hopsparse_sensitivity") != SCHEMA or not (
            isinstance(before, dict) and isinstance(layers, dict)
        ):
            raise _damaged(path)
        for key, value in identity.items():
            if before.get(key) != value:
                raise CheckpointError(
                    f"{path} was measured with {key} = {before.get(key)!r:.200}",
                    need=f"the same; this run has {value!r:.200}",
                    hint=_AGAIN,
                )
        return cls(path, identity, {name: _layer(path, facts) for name, facts in layers.items()})

    def missing(self, name: str, forms: Sequence[str]) -> tuple[str, ...]:
        """Those of `forms` to be measured; none of a layer that no token reached."""
        known = self._layers.get(name)
        if known is None:
            return tuple(forms)
        if known.note and known.costs.keys() == {_DENSE}:
            return ()
        return tuple(form for form in forms if form != _DENSE and form not in known.costs)

    def add(self, layers: Mapping[str, LayerCosts]) -> None:
        """Keep the costs of some layers; those of other forms, known before, stay.

        Raises:
            CheckpointError: The file cannot be written.
        """
        for name, layer in layers.items():
            old = self._layers.get(name, LayerCosts(layer.shape, {}))
            costs, together = {**old.costs, **layer.costs}, {**old.together, **layer.together}
            notes = dict.fromkeys(note for note in (old.note, layer.note) if note)
            self._layers[name] = LayerCosts(layer.shape, costs, "; ".join(notes), together)
        if self._path is not None:
            known = {name: _json(layer) for name, layer in self._layers.items()}
            identity = {"hopsparse_sensitivity": SCHEMA, "identity": self._identity}
            write_json(self._path, identity | {"layers": known})

    def result(
        self,
        forms: Mapping[str, Sequence[str]],
        decoder: Decoder,
        kept_dense: Mapping[str, str],
        windows: int,
    ) -> Sensitivity:
        """The costs of `forms` by layer, corrected by `coherence`, measured on some windows."""
        known = {name: self._layers[name] for name in forms}
        factors = coherence(known, windows)
        layers = {}
        for name, wanted in forms.items():
            layer, kind = known[name], _kind(name)
            costs = {
                form: layer.costs.get(form, 0.0) * factors.get((kind, form), 1.0)
                for form in wanted
                if form == _DENSE or form in layer.costs
            }
            layers[name] = LayerCosts(layer.shape, costs or layer.costs, layer.note)
        return Sensitivity(layers, decoder, kept_dense)


def coherence(layers: Mapping[str, LayerCosts], windows: int) -> dict[tuple[str, str], float]:
    """How much more a form costs where errors of different tokens add up instead of cancelling.

    For one layer the ratio of the two estimates is far too noisy to be of use; layers of one kind
    (the last part of their name) share one, drawn towards 1 as if 8 windows had said so.

    Args:
        layers: Costs by layer name.
        windows: Windows that they were measured on.

    Returns:
        The factor of each kind and form.

    Example:
        >>> layer = LayerCosts((8, 8), {"2:4": 0.5}, "", {"2:4": 1.5})
        >>> coherence({"0.v_proj": layer, "1.v_proj": layer}, 4)
        {('v_proj', '2:4'): 2.0}
    """
    ratios: dict[tuple[str, str], list[float]] = {}
    for name, layer in layers.items():
        for form, together in layer.together.items():
            if layer.costs[form] > 0:
                found = ratios.setdefault((_kind(name), form), [])
                found.append(together / layer.costs[form])
    factors = {}
    for key, found in ratios.items():
        samples = windows * len(found)
        mean = math.fsum(found) / len(found)
        factors[key] = (samples * mean + _PRIOR_WINDOWS) / (samples + _PRIOR_WINDOWS)
    return factors


def _kind(name: str) -> str:
    return name.rpartition(".")[2]


def _json(layer: LayerCosts) -> dict[str, Any]:
    return {
        "shape": list(layer.shape),
        "costs": dict(layer.costs),
        "together": dict(layer.together),
        "note": layer.note,
    }


def _layer(path: Path, facts: object) -> LayerCosts:
    """Read one layer.

    Raises:
        CheckpointError: It is none.
    """
    if not isinstance(facts, dict) or facts.keys() != {"shape", "costs", "together", "note"}:
        raise _damaged(path)
    shape, costs, note, together = (facts[key] for key in ("shape", "costs", "note", "together"))
    sides = isinstance(shape, list) and len(shape) == 2
    sides = sides and all(type(side) is int and side > 0 for side in shape)
    if not sides or not isinstance(note, str) or not isinstance(costs, dict) or not costs:
        raise _damaged(path)
    if not isinstance(together, dict) or not together.keys() <= costs.keys():
        raise _damaged(path)
    for form, cost in (*costs.items(), *together.items()):
        try:
            parse_form(form)
        except ArgumentError:
            raise _damaged(path) from None
        number = isinstance(cost, (int, float)) and not isinstance(cost, bool)
        # As a float: JSON has integers that are too large for one.
        if not number or not 0 <= float(str(cost)) < math.inf:
            raise _damaged(path)
    return LayerCosts((shape[0], shape[1]), costs, note, together)


def _damaged(path: Path) -> CheckpointError:
    return CheckpointError(
        f"{path} is damaged, or no file of measured costs",
        need="what an earlier `hopsparse plan` left",
        hint=_AGAIN,
    )
