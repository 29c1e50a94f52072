"""What the user chose: a value that travels into checkpoints and back."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from fnmatch import fnmatchcase
from typing import Any, cast

from ..errors import ArgumentError
from ..formats.pattern import Pattern, parse_pattern
from ..formats.scheme import Form, Scheme, parse_form, parse_scheme

METHODS = ("magnitude", "wanda", "sparsegpt")
REFRESH = ("auto", "group", "block")
FITS = ("auto", "layer", "input", "residual")
SEARCHES = ("greedy", "admm")
ORDERS = ("natural", "activation")


@dataclass(frozen=True)
class Recipe:
    """How to prune a model.

    Args:
        pattern: Which entries may stay, as a value or as text such as `"2:4"`.
        method: `magnitude`, `wanda` (arXiv:2306.11695) or `sparsegpt` (arXiv:2301.00774).
        keep: Globs over full layer names; a matching layer stays dense.
        seed: For whoever draws calibration windows; pruning itself draws nothing.
        damping: SparseGPT only: added to the Hessian's diagonal, as a part of its mean; `search`
            takes for each layer what does best on every eighth token, kept out of the fit.
        block_size: SparseGPT only: columns between two updates of all later columns.
        refit: SparseGPT only: conjugate-gradient steps that then refit the kept weights; 0 is the
            method as published.
        refresh: `group`: a group of layers sees inputs made by the pruned groups before it;
            `block`: all groups of a block see inputs made by the dense block; `auto`: `block`
            for Wanda, `group` for the others (docs/prune.md has the measurement).
        fit_to: SparseGPT only, what a layer is fitted to: `layer`: its dense output on the inputs
            it gets; `input`: its output in the dense model; `residual`: also what the residual
            stream has lost so far, where the family of the model says which layers add to it, else
            as `input`; `auto`: `residual`.
        search: SparseGPT only: `greedy`: column by column, as published; `admm`: all weights of a
            layer together, after ALPS (arXiv:2406.07831): lower error, in about half as much
            time again.
        order: SparseGPT with search `greedy`: `natural`, or `activation`: groups of columns with
            strong inputs first.
        bias: SparseGPT only: let the bias of a layer that has one take up the mean of its error.
        permute: Reorder the channels inside a block first, so that N:M keeps more; for families
            that say which channels have no order of their own.
        smooth: Where inputs will be rounded to integers, first move the range of strong channels
            into the weights, by powers of two; for families that say where that is possible.
        scheme: Rounds the kept weights to fewer bits, as a value or as text such as `"int8"`.
        forms: Glob over full layer names -> form, as a value or as text such as `"6:8+int8"` or
            `"dense"`; the first that matches replaces `pattern` and `scheme`. A mapping or pairs;
            kept as a tuple of pairs, because their order counts.

    Raises:
        ArgumentError: A value that cannot mean anything.

    Example:
        >>> recipe = Recipe("2:4", keep=("lm_head",))
        >>> Recipe.from_json(recipe.to_json()) == recipe
        True
    """

    pattern: Pattern | str = "2:4"
    method: str = "sparsegpt"
    keep: tuple[str, ...] = ()
    seed: int = 0
    damping: float | str = 0.01
    block_size: int = 128
    refit: int = 10
    refresh: str = "auto"
    scheme: Scheme | str | None = None
    fit_to: str = "auto"
    search: str = "greedy"
    order: str = "natural"
    bias: bool = True
    permute: bool = False
    smooth: bool = True
    forms: Mapping[str, Form | str] | Sequence[tuple[str, Form | str]] = ()

    def __post_init__(self) -> None:
        if isinstance(self.pattern, str):
            object.__setattr__(self, "pattern", parse_pattern(self.pattern))
        elif not isinstance(self.pattern, Pattern):
            raise ArgumentError(f"pattern={self.pattern!r}", need="a pattern", hint='pattern="2:4"')
        if isinstance(self.scheme, str):
            object.__setattr__(self, "scheme", parse_scheme(self.scheme))
        object.__setattr__(self, "forms", _forms(self.forms))
        object.__setattr__(self, "keep", _globs(self.keep))
        _check_choice("method", self.method, METHODS)
        _check_choice("refresh", self.refresh, REFRESH)
        for what, choices in (("fit_to", FITS), ("search", SEARCHES), ("order", ORDERS)):
            _check_choice(what, getattr(self, what), choices)
        if self.damping != "search":
            _check_number("damping", self.damping, '0.01, or "search"')
        _check_integer("block_size", self.block_size, 1, "128")
        _check_integer("refit", self.refit, 0, "10")
        _check_integer("seed", self.seed, 0, "0")

    @property
    def parsed_pattern(self) -> Pattern:
        """The pattern as a value, whichever way it was given."""
        return parse_pattern(self.pattern) if isinstance(self.pattern, str) else self.pattern

    @property
    def parsed_scheme(self) -> Scheme | None:
        """The scheme as a value, whichever way it was given."""
        return parse_scheme(self.scheme) if isinstance(self.scheme, str) else self.scheme

    @property
    def parsed_forms(self) -> tuple[tuple[str, Form], ...]:
        """Globs and forms as values, in the order in which they are tried."""
        # Checked once: a plan names every layer, and every layer asks.
        return cast("tuple[tuple[str, Form], ...]", self.forms)

    @property
    def resolved_refresh(self) -> str:
        """`group` or `block`: what `auto` stands for."""
        if self.refresh != "auto":
            return self.refresh
        return "block" if self.method == "wanda" else "group"

    @property
    def resolved_fit_to(self) -> str:
        """`layer`, `input` or `residual`: what `auto` stands for; only SparseGPT moves weights."""
        if self.method != "sparsegpt":
            return "layer"
        return "residual" if self.fit_to == "auto" else self.fit_to

    def keeps(self, name: str) -> bool:
        """Whether the layer of this full name stays as it is."""
        return self.form_of(name) == Form()

    def form_of(self, name: str) -> Form:
        """What becomes of the layer of this full name; `Form()` leaves it alone."""
        if any(fnmatchcase(name, glob) for glob in self.keep):
            return Form()
        for glob, form in self.parsed_forms:
            if fnmatchcase(name, glob):
                return form
        return Form(self.parsed_pattern, self.parsed_scheme)

    def to_json(self) -> dict[str, Any]:
        """The recipe as plain JSON values."""
        facts = {f.name: getattr(self, f.name) for f in fields(self)}
        return facts | {
            "pattern": str(self.pattern),
            "scheme": None if self.scheme is None else str(self.scheme),
            "forms": [[glob, str(form)] for glob, form in self.parsed_forms],
            "keep": list(self.keep),
        }

    @classmethod
    def from_json(cls, facts: Mapping[str, Any]) -> Recipe:
        """Read what `to_json` wrote.

        Args:
            facts: The mapping; missing entries take their defaults.

        Raises:
            ArgumentError: An unknown entry, or a value that cannot mean anything.
        """
        known = [f.name for f in fields(cls)]
        if unknown := sorted(set(facts) - set(known)):
            raise ArgumentError(
                f"recipe entry {unknown[0]!r}",
                need="one of the entries below",
                hint=", ".join(known),
            )
        return cls(**facts)


@dataclass(frozen=True)
class LayerReport:
    """What happened to one layer; `to_json()` is plain JSON.

    Args:
        name: Full name of the layer.
        shape: (out, k) of its weight.
        pattern: The pattern asked for, as text; "dense" where all entries may stay.
        method: The method that ran: `magnitude` where statistics were missing, `dense` if kept.
        density: Part of the entries that the pattern keeps and that are not zero.
        output_error: ‖Y - X W'ᵀ‖_F / ‖Y‖_F over the calibration tokens, for the target Y that the
            layer was fitted to (`Recipe.fit_to`); None if not measured.
        tokens: Calibration tokens that reached the layer.
        damping: The damping that SparseGPT used in the end; None for other methods.
        seconds: Time to prune the layer, statistics excluded.
        note: Anything out of the ordinary, or empty.
        scheme: What the weights were rounded to, as text, or empty.
    """

    name: str
    shape: tuple[int, int]
    pattern: str
    method: str
    density: float
    output_error: float | None
    tokens: int
    damping: float | None
    seconds: float
    note: str = ""
    scheme: str = ""

    def to_json(self) -> dict[str, Any]:
        """The report as plain JSON values."""
        return asdict(self) | {"shape": list(self.shape)}


def _globs(value: object) -> tuple[str, ...]:
    if isinstance(value, (list, tuple)) and all(isinstance(glob, str) for glob in value):
        return tuple(value)
    raise ArgumentError(f"keep={value!r}", need="a tuple of globs", hint='keep=("lm_head",)')


def _forms(value: object) -> tuple[tuple[str, Form], ...]:
    pairs = tuple(value.items()) if isinstance(value, Mapping) else value
    if not isinstance(pairs, (list, tuple)) or not all(_is_glob_and_form(pair) for pair in pairs):
        raise ArgumentError(
            f"forms={value!r:.80}", need="a map from globs to forms", hint='forms={"*.0.*": "6:8"}'
        )
    return tuple((g, parse_form(form) if isinstance(form, str) else form) for g, form in pairs)


def _is_glob_and_form(pair: object) -> bool:
    match pair:
        case [str(), str() | Form()]:
            return True
    return False


def _check_choice(what: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        usual = getattr(Recipe, what)
        raise ArgumentError(
            f"{what}={value!r}", need="one of " + ", ".join(choices), hint=f"{what}={usual!r}"
        )


def _check_number(what: str, value: object, hint: str) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not math.isfinite(float(str(value))) or float(str(value)) <= 0:
        raise ArgumentError(f"{what}={value!r}", need="a finite number above 0", hint=hint)


def _check_integer(what: str, value: object, least: int, hint: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ArgumentError(f"{what}={value!r}", need=f"an integer of at least {least}", hint=hint)
