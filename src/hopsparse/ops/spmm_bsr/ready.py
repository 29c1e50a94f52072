"""A weight made ready for the kernel: laid out once, and again only when it was changed."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ...formats.bsr import BSR
from ...launch import hold, is_capturing, is_holding
from ...plan import Target
from ...tune import Machine
from .._product import check_capture, finish_decoding
from .choose import by_measurement, by_model
from .fragments import TILE, Fragments, fragments_of
from .grains import OF_FRAGMENTS, Counts, Grain, counts_of, digest, grains_for, own_grains
from .kernel import PANEL
from .plan import Decision, Problem
from .strips import Strips, strips_of

_HINT = (
    "one call of the layer before the capture, or of spmm_bsr with config= before it and in it; "
    "w as it was then"
)
_LEAST_CLASS = 16


def class_of(tokens: int) -> int:
    """The largest of the token counts that run one tile: four classes an octave, none below 16.

    Example:
        >>> [class_of(tokens) for tokens in (1, 16, 17, 100, 1000, 4097)]
        [16, 16, 32, 112, 1024, 5120]
    """
    step = max(_LEAST_CLASS, 1 << max(0, (tokens - 1).bit_length() - 3))
    return -(-tokens // step) * step


@dataclass(eq=False)
class Packed:
    """The weights of a matrix in one layout.

    Attributes:
        values: None until a kernel runs. When values change they are written here again, so that a
            captured graph goes on to read this.
        version: Of the values that they were made of.
    """

    values: Tensor | None = None
    version: int = -1


@dataclass(eq=False)
class Laid:
    """A weight in one grain.

    Attributes:
        layout: What a kernel walks.
        packed: Its weights.
    """

    layout: Strips | Fragments
    packed: Packed = field(default_factory=Packed)


@dataclass(eq=False)
class Ready:
    """What a launch reads of a weight.

    Attributes:
        pattern: The weight without its values, which would keep it alive.
        digest: What tuning results know it by.
        counts: What it multiplies in each grain that it can run in.
        laid: It in the grains that were asked for.
        decided: What runs, by tokens.
    """

    pattern: BSR
    digest: str
    counts: dict[Grain, Counts]
    laid: dict[Grain, Laid] = field(default_factory=dict)
    decided: dict[int, Decision] = field(default_factory=dict)

    @property
    def strips(self) -> Strips:
        """Its layout for wgmma in its own grain."""
        layout = self.in_grain(own_grains(self.pattern.block)[0]).layout
        assert isinstance(layout, Strips)
        return layout

    @property
    def fragments(self) -> Fragments | None:
        """Its layout for the kernel of small blocks in its own grain; None where it has none."""
        own = own_grains(self.pattern.block)
        if len(own) < 2:
            return None
        layout = self.in_grain(own[1]).layout
        assert isinstance(layout, Fragments)
        return layout

    @property
    def values(self) -> Tensor | None:
        """The weights as strips of its own grain, if they were laid out."""
        return self.in_grain(own_grains(self.pattern.block)[0]).packed.values

    def in_grain(self, grain: Grain) -> Laid:
        """It in a grain, one of `grains_for` its blocks; laid out where it was not yet.

        Raises:
            UnsupportedError: It was not, and a CUDA graph is being captured.
        """
        found = self.laid.get(grain)
        if found is None:
            check_capture(self.pattern, _HINT)
            with torch.inference_mode(False), torch.no_grad():
                if grain in OF_FRAGMENTS:
                    found = Laid(fragments_of(self.pattern, grain[0] // TILE))
                else:
                    found = Laid(strips_of(self.pattern, grain[0] // PANEL, grain[1]))
            finish_decoding(self.pattern.values)  # Calls on any stream may read it from now on.
            self.laid[grain] = found
        return found

    def take(self, w: BSR, grain: Grain) -> tuple[Strips | Fragments, Tensor]:
        """The weight in a grain, from the last call where its values were not changed since.

        Args:
            w: The weight that this was made of.
            grain: One of `grains_for` its blocks.

        Returns:
            The layout, and the weights as its `pack` has them.

        Raises:
            UnsupportedError: It is laid out anew, and a CUDA graph is being captured.
        """
        laid = self.in_grain(grain)
        return laid.layout, _packed(w, laid)

    def decide(
        self, problem: Problem, dtype: str, target: Target, machine: Machine | None = None
    ) -> Decision:
        """What runs for a problem; the same for all tokens of a class.

        Args:
            problem: Sizes; those of w are the weight's.
            dtype: Of x and w.
            target: The GPU that the weight is on.
            machine: The same, for what was tuned on its like; None goes by the cost model alone.
        """
        rounded = class_of(problem.tokens)
        found = self.decided.get(rounded)
        if found is None:
            sizes = replace(problem, tokens=rounded)
            if machine is not None:
                found = by_measurement(self.digest, sizes, dtype, machine, target)
            if found is None:
                found = by_model(self.counts, self.pattern.block, sizes, dtype, target)
            self.decided[rounded] = found
        return found


@dataclass(eq=False)
class _Known:
    facts: tuple[Any, ...]
    pattern: tuple[Tensor, Tensor]  # indices and indptr
    ready: Ready

    def is_current(self, values: Tensor, packed: Packed) -> bool:
        """Whether the weight still is what was laid out; `values` are those it was found by."""
        versions = tuple(part._version for part in self.pattern)
        fits = packed.version == values._version and self.facts[-2:] == versions
        return fits and _KNOWN.get(values) is self


# By the tensor of the values: a layer puts its matrix together anew at every call, and the parts of
# a program that torch compiled come without one.
_KNOWN: Any = WeakTensorKeyDictionary()


def layout_of(w: BSR) -> Ready:
    """The layout of a weight, its weights perhaps not laid out yet.

    Args:
        w: [out, k], blocks that `strips.width_of` has a width for; parts that count their changes,
            so none that was made in inference mode.

    Raises:
        UnsupportedError: A CUDA graph is being captured, and the pattern is new, or was changed.
    """
    return _known(w).ready


def takes_fragments(block: tuple[int, int]) -> bool:
    """Whether the kernel of small blocks has a grain of its own: not where wgmma fills up nothing.

    Example:
        >>> takes_fragments((16, 16)), takes_fragments((64, 64)), takes_fragments((8, 16))
        (True, False, False)
    """
    return len(own_grains(block)) > 1


def ready(w: BSR) -> tuple[Strips, Tensor]:
    """The weight for the kernel, from the last call where nothing of it was changed since.

    Args:
        w: As for `layout_of`, of 16-bit values.

    Returns:
        Its layout, and its weights: `Strips.pack`.

    Raises:
        UnsupportedError: A CUDA graph is being captured, and the weight is new, or was changed.

    Example:
        >>> w = BSR.from_dense(torch.eye(64, dtype=torch.bfloat16), (64, 64))
        >>> ready(w)[1] is ready(w)[1]
        True
    """
    layout, values = layout_of(w).take(w, own_grains(w.block)[0])
    assert isinstance(layout, Strips)
    return layout, values


def ready_fragments(w: BSR) -> tuple[Fragments, Tensor]:
    """`ready` for the kernel of small blocks.

    Args:
        w: As for `ready`, of blocks that `takes_fragments`.

    Returns:
        Its layout, and its weights: `Fragments.pack`.

    Raises:
        UnsupportedError: As for `ready`.

    Example:
        >>> w = BSR.from_dense(torch.eye(64, dtype=torch.bfloat16), (16, 16))
        >>> ready_fragments(w)[1].shape
        torch.Size([4, 1, 32, 8])
    """
    layout, values = layout_of(w).take(w, own_grains(w.block)[1])
    assert isinstance(layout, Fragments)  # Whoever chose this kernel asked.
    return layout, values


def _packed(w: BSR, laid: Laid) -> Tensor:
    packed = laid.packed
    if (values := packed.values) is not None and packed.version == w.values._version:
        return values
    check_capture(w, _HINT)
    version = w.values._version
    # A tensor made in inference mode could not be written again by a call outside it.
    with torch.inference_mode(False), torch.no_grad():
        made = laid.layout.pack(w.values)
        packed.values = values = made if values is None else values.copy_(made)
    finish_decoding(values)
    packed.version = version  # Last: other threads may take it from now on.
    return values


def forget_decisions() -> None:
    """Decide anew for every weight there is; layouts stay."""
    for known in list(_KNOWN.values()):
        known.ready.decided.clear()


# What graphs read that nobody watches over.
_CAPTURED: dict[int, _Known] = {}


def keep_for_graph(w: BSR, grain: Grain | None = None) -> None:
    """Keep what a capture reads of a weight for as long as its graph, if one is under way.

    Args:
        w: As `ready` was given it.
        grain: That it was taken in; None is its own of wgmma.
    """
    known: _Known = _KNOWN[w.values]
    if is_holding():
        packed = known.ready.in_grain(grain or own_grains(w.block)[0]).packed
        hold(known, partial(known.is_current, w.values, packed))
    elif w.values.is_cuda and is_capturing(w.values.get_device()):
        _CAPTURED[id(known)] = known


def _known(w: BSR) -> _Known:
    known: _Known | None = _KNOWN.get(w.values)
    indices, indptr = w.indices, w.indptr
    facts = (w.shape, w.block, w.values.data_ptr(), indices._version, indptr._version)
    if (
        known is not None
        and known.facts == facts
        and known.pattern[0] is indices
        and known.pattern[1] is indptr
    ):
        return known
    check_capture(w, _HINT)
    w.check_indices()
    with torch.inference_mode(False), torch.no_grad():
        pattern = _without_values(w)
        counts = {grain: counts_of(pattern, grain) for grain in grains_for(w.block)}
        known = _Known(facts, (indices, indptr), Ready(pattern, digest(pattern), counts))
    finish_decoding(w.values)  # Calls on any stream may read it from now on.
    _KNOWN[w.values] = known
    return known


def _without_values(w: BSR) -> BSR:
    """Shaped and placed as w, all of its values one number."""
    values = torch.zeros((), dtype=w.dtype, device=w.device).expand(w.values.shape)
    return BSR(w.shape, values, w.indices, w.indptr, w.block)
