"""What each form costs each layer, in nats of KL divergence a token (docs/plan.md derives it).

Changing the output of one layer by dy_s at each token s moves the predictions of a window by
KL = E[(sum_s g_s . dy_s)^2] / 2 nats, to second order, where g_s is the gradient of a loss whose
targets are drawn from the model itself. For one layer that square is mostly noise, so its cost is
sum_s (g_s . dy_s)^2 / (2 tokens), which leaves out products of different tokens; what they add on
average is measured over all layers of one kind (`_sensitivity_file.coherence`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from glob import escape
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import ArgumentError, CalibrationError
from ..formats import Form, parse_form
from ..prune import Activations, Gatherer, Recipe, Statistics, advance, prune_layer
from ..prune.activations import call
from ..prune.hooks import layer_input
from ..prune.layer import new_statistics
from ..quant.inputs import InputPeak, round_inputs
from ._fisher import BlockLoader, Sample, layer_samples, run_back
from ._sensitivity_file import LayerCosts as LayerCosts
from ._sensitivity_file import Sensitivity as Sensitivity
from ._sensitivity_file import SensitivityFile
from ._subject import Subject
from .options import ProgressCallback, StepClock

PATTERNS = ("dense", "6:8", "4:6", "2:4", "unstructured:0.5")
SCHEMES = ("", "+int8", "+fp8", "+int4:64")
#: Every pattern alone and with every scheme.
DEFAULT_FORMS = tuple(pattern + scheme for pattern in PATTERNS for scheme in SCHEMES)
HELD_OUT_EVERY = 5
_DENSE = str(Form())


@dataclass(frozen=True)
class SensitivityOptions:
    """Texts and sizes of a measurement.

    Attributes:
        calibration: Text file to draw windows from; the bundled text when None.
        windows: Windows drawn; every 5th is held out.
        window_tokens: Tokens a window.
        fisher_windows: Held-out windows that gradients are taken on, at most.
        additive: Measure patterns and schemes alone, and add up what they cost together: as many
            layers are pruned as there are patterns, not forms.
        device: Where blocks are run and pruned.
        remeasure: Measure again what an earlier file says of another model, text or recipe.
    """

    calibration: Path | None = None
    windows: int = 24
    window_tokens: int = 512
    fisher_windows: int = 4
    additive: bool = False
    device: str = "cpu"
    remeasure: bool = False

    def __post_init__(self) -> None:
        for name, least in (("windows", 2), ("window_tokens", 8), ("fisher_windows", 1)):
            value = getattr(self, name)
            if value < least:
                raise ArgumentError(f"{name} = {value}", need=f"at least {least}", hint=f"{least}")


def split_windows(windows: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Windows to calibrate on, and every 5th (of fewer than 5, the last), which is held out.

    Raises:
        CalibrationError: Fewer than two windows.

    Example:
        >>> kept, held_out = split_windows([torch.tensor([[i]]) for i in range(10)])
        >>> [int(window) for window in held_out]
        [4, 9]
    """
    if len(windows) < 2:
        raise CalibrationError(
            f"{len(windows)} windows", need="at least 2, one of them held out", hint="--windows 24"
        )
    every = min(HELD_OUT_EVERY, len(windows))
    held_out = [window for index, window in enumerate(windows, 1) if index % every == 0]
    kept = [window for index, window in enumerate(windows, 1) if index % every]
    return kept, held_out


def check_forms(forms: Iterable[str]) -> tuple[str, ...]:
    """Forms as canonical text, each once, in order.

    Raises:
        ArgumentError: No form, or one that is none.

    Example:
        >>> check_forms(["2:4", "dense", "2:4+int4"])
        ('2:4', 'dense', '2:4+int4:64')
    """
    found = tuple(dict.fromkeys(str(parse_form(form)) for form in forms))
    if not found:
        raise ArgumentError("no forms", need="at least one form", hint="dense,6:8,2:4+int8")
    return found


def measure_sensitivity(
    model: str,
    recipe: Recipe,
    forms: Iterable[str] = DEFAULT_FORMS,
    *,
    options: SensitivityOptions = SensitivityOptions(),
    path: Path | None = None,
    progress: ProgressCallback = lambda _: None,
) -> Sensitivity:
    """Measure what each form costs each layer of a model on disk.

    Every layer is pruned alone, from dense inputs; how errors of layers compound is left to the
    one factor that `models.budget.fit_scale` fits.

    Args:
        model: A local HF folder, a .gguf file, or a packaged model.
        recipe: How to prune: method, damping, keep, seed. Its pattern, scheme and forms are not
            used.
        forms: Forms to measure, as text.
        options: Texts and sizes.
        path: A JSON file for the result, written after each block. What it holds of the same
            model, text and recipe is not measured again.
        progress: Called after each block.

    Returns:
        The costs. A layer takes the forms that fit its shape; one that no token reached is dense
        only, and its note says so.

    Raises:
        CheckpointError: The model or the file cannot be read or written, or the file is about
            something else.
        CalibrationError: The text cannot be used, or activations are not finite.
        UnsupportedError: The architecture is unknown, or no layer can be pruned.
    """
    subject = Subject.of(model, recipe, check_forms(forms), options)
    file = SensitivityFile.open(path, subject.identity(recipe, options), options.remeasure)
    if any(file.missing(name, fitting) for name, fitting in subject.forms.items()):
        _measure_all(subject, file, recipe, options, progress)
    windows = len(_fisher_windows(subject, options))
    return file.result(subject.forms, subject.decoder, subject.kept_dense, windows)


def _fisher_windows(subject: Subject, options: SensitivityOptions) -> list[Tensor]:
    return split_windows(subject.windows)[1][: options.fisher_windows]


def _measure_all(
    subject: Subject,
    file: SensitivityFile,
    recipe: Recipe,
    options: SensitivityOptions,
    progress: ProgressCallback,
) -> None:
    """Add what the file does not know yet, block by block."""
    calibration, _ = split_windows(subject.windows)
    source, family, paths = subject.source, subject.family, subject.paths
    blocks = BlockLoader(subject.network, source, family, paths, options.device)
    clock = StepClock("gradients", 2 * len(paths), progress)
    trace = run_back(blocks, _fisher_windows(subject, options), recipe.seed, clock.step)
    clock = StepClock("sensitivity", len(paths), progress)
    calibrating = blocks.capture(calibration)
    for index, path in enumerate(paths):
        missing = {
            name: file.missing(name, subject.forms[name]) for name in subject.eligible.get(path, ())
        }
        names = [name for name, forms in missing.items() if forms]
        with blocks.block(index) as (block, dtypes):
            layers = {name: block.get_submodule(name.removeprefix(f"{path}.")) for name in names}
            if layers:
                bench = _Bench(recipe, dtypes, trace.tokens, options.additive)
                bench.statistics = gather(block, layers, calibrating, recipe, bench.peaks)
                samples = layer_samples(block, layers, trace, index)
                file.add(
                    {
                        name: bench.measure(name, layer, samples[name], missing[name])
                        for name, layer in layers.items()
                    }
                )
            advance(block, calibrating)
        clock.step(path, timed=bool(names))


class Divergence(NamedTuple):
    """Two estimates of one KL divergence, in nats a token.

    Attributes:
        alone: Without the products of different tokens: little noise, and biased where errors of
            tokens add up.
        together: With them: unbiased, with the noise of one value a window.
    """

    alone: float
    together: float


def kl_per_token(
    sample: Sample, old: Tensor, new: Tensor, form: Form, scale: Tensor | None, tokens: int
) -> Divergence:
    """Predicted KL, in nats a token, of a layer whose weight becomes `new`.

    Args:
        sample: Its inputs x and gradients g, by window.
        old: [out, k] before, float32.
        new: [out, k] after.
        form: Its scheme rounds the inputs of the new layer.
        scale: Input scale of a static scheme.
        tokens: Predictions in the windows of the sample.

    Example:
        >>> sample = Sample([torch.tensor([[2.0], [2.0]])], [torch.tensor([[3.0], [-3.0]])])
        >>> kl_per_token(sample, torch.tensor([[1.0]]), torch.tensor([[0.0]]), Form(), None, 4)
        Divergence(alone=9.0, together=0.0)
    """
    alone = together = 0.0
    gap = new - old
    for x, g in zip(sample.x, sample.g, strict=True):
        moved = x @ gap.t()
        if form.scheme is not None and form.scheme.activations != "none":
            moved += (round_inputs(x, form.scheme, scale) - x) @ new.t()
        products = (g * moved).sum(-1, dtype=torch.float64)
        alone += float(products.square().sum())
        together += float(products.sum().square())
    return Divergence(alone / (2 * tokens), together / (2 * tokens))


def gather(
    block: nn.Module,
    layers: Mapping[str, nn.Module],
    activations: Activations,
    recipe: Recipe,
    peaks: dict[str, InputPeak],
) -> dict[str, Statistics]:
    """Statistics of the dense inputs of each layer that was called, and their largest entries."""

    def look(name: str) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            peaks.setdefault(name, InputPeak()).add(layer_input(args, kwargs))

        return hook

    # Before the gatherer's own hooks: it leaves a forward at the last layer.
    handles = [
        layer.register_forward_pre_hook(look(name), with_kwargs=True)
        for name, layer in layers.items()
    ]
    try:
        with torch.no_grad(), Gatherer(layers, lambda x: new_statistics(x, recipe)) as gatherer:
            for index in range(len(activations)):
                gatherer.run(partial(call, block, activations, index))
    finally:
        for handle in handles:
            handle.remove()
    return gatherer.found


@dataclass(frozen=True)
class _Tried:
    """One layer, what it saw, and what is known of it so far."""

    layer: nn.Linear
    sample: Sample
    known: dict[str, Divergence]
    notes: list[str]


class _Bench:
    """Where the layers of one block are tried in all their forms."""

    def __init__(
        self, recipe: Recipe, dtypes: Mapping[str, torch.dtype], tokens: int, additive: bool
    ) -> None:
        self.statistics: Mapping[str, Statistics] = {}
        self.peaks: dict[str, InputPeak] = {}
        self._recipe = recipe
        self._dtypes = dtypes
        self._tokens = tokens
        self._additive = additive

    def measure(
        self, name: str, layer: nn.Module, sample: Sample, forms: Sequence[str]
    ) -> LayerCosts:
        """The cost of each form, or of dense alone where no token came by."""
        assert isinstance(layer, nn.Linear)
        shape = (layer.out_features, layer.in_features)
        for where, missing in (
            ("calibration", name not in self.statistics or not self.statistics[name].tokens),
            ("held-out", not sum(len(x) for x in sample.x)),
        ):
            if missing:
                note = f"no {where} token reached it: stays dense"
                return LayerCosts(shape, {_DENSE: 0.0}, note)
        notes: list[str] = []
        tried = _Tried(layer, sample, {_DENSE: Divergence(0.0, 0.0)}, notes)
        found = {form: self._cost(name, tried, parse_form(form)) for form in forms}
        costs = {form: kl.alone for form, kl in found.items()}
        together = {form: kl.together for form, kl in found.items() if form != _DENSE}
        return LayerCosts(shape, costs, "; ".join(dict.fromkeys(notes)), together)

    def _cost(self, name: str, tried: _Tried, form: Form) -> Divergence:
        if str(form) not in tried.known:
            both = form.pattern is not None and form.scheme is not None
            if self._additive and both:
                pattern = self._cost(name, tried, replace(form, scheme=None))
                scheme = self._cost(name, tried, replace(form, pattern=None))
                cost = Divergence(pattern.alone + scheme.alone, pattern.together + scheme.together)
            else:
                cost = self._measured(name, tried, form)
            tried.known[str(form)] = cost
        return tried.known[str(form)]

    def _measured(self, name: str, tried: _Tried, form: Form) -> Divergence:
        twin = deepcopy(tried.layer)
        recipe = replace(self._recipe, keep=(), forms={escape(name): form})
        store_dtype = self._dtypes[f"{name}.weight"]
        report = prune_layer(name, twin, self.statistics[name], recipe, store_dtype=store_dtype)
        if report.note:
            tried.notes.append(report.note)
        static = form.scheme is not None and form.scheme.static
        scale = self.peaks[name].scale(form.scheme) if static and form.scheme else None
        old, new = tried.layer.weight.detach(), twin.weight.detach()
        cost = kl_per_token(tried.sample, old, new, form, scale, self._tokens)
        if not math.isfinite(cost.together):
            raise CalibrationError(
                f"layer {name}, form {form}: a cost of {cost.together}",
                need="finite activations and gradients",
                hint="another calibration text",
            )
        return cost
