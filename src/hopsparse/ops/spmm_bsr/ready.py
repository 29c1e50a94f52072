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
from .._product import check_capture, finish_decoding
from .fragments import Fragments, fragments_of, height_of
from .kernel import PANEL, STEP
from .plan import Decision, Problem, candidates, decide
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
class Ready:
    """What a launch reads of a weight.

    Attributes:
        strips: Its layout for wgmma.
        fragments: Its layout for the kernel of small blocks, where that may run.
        by_strips: Its weights in the one layout.
        by_fragments: In the other.
        decided: What runs, by tokens.
    """

    strips: Strips
    fragments: Fragments | None = None
    by_strips: Packed = field(default_factory=Packed)
    by_fragments: Packed = field(default_factory=Packed)
    decided: dict[int, Decision] = field(default_factory=dict)

    @property
    def values(self) -> Tensor | None:
        """The weights as strips, if they were laid out."""
        return self.by_strips.values

    def decide(self, problem: Problem, dtype: str, target: Target) -> Decision:
        """What runs for a problem; the same for all tokens of a class.

        Args:
            problem: Sizes; those of w are the weight's.
            dtype: Of x and w.
            target: The GPU that the weight is on.
        """
        rounded = class_of(problem.tokens)
        found = self.decided.get(rounded)
        if found is None:
            strips = self.strips
            found = self.decided[rounded] = decide(
                strips.lengths,
                candidates(strips.panels, strips.width),
                replace(problem, tokens=rounded),
                dtype,
                target,
                fragments=self.fragments,
            )
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
    """Whether the kernel of small blocks may run; not where wgmma multiplies no zeros.

    Example:
        >>> takes_fragments((16, 16)), takes_fragments((64, 64)), takes_fragments((8, 16))
        (True, False, False)
    """
    return height_of(block) is not None and bool(block[0] % PANEL or block[1] % STEP)


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
    made = _known(w).ready
    return made.strips, _packed(w, made.strips, made.by_strips)


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
    made = _known(w).ready
    assert made.fragments is not None  # Whoever chose this kernel asked.
    return made.fragments, _packed(w, made.fragments, made.by_fragments)


def _packed(w: BSR, layout: Strips | Fragments, packed: Packed) -> Tensor:
    if (values := packed.values) is not None and packed.version == w.values._version:
        return values
    check_capture(w, _HINT)
    version = w.values._version
    # A tensor made in inference mode could not be written again by a call outside it.
    with torch.inference_mode(False), torch.no_grad():
        made = layout.pack(w.values)
        packed.values = values = made if values is None else values.copy_(made)
    finish_decoding(values)
    packed.version = version  # Last: other threads may take it from now on.
    return values


# What graphs read that nobody watches over.
_CAPTURED: dict[int, _Known] = {}


def keep_for_graph(w: BSR, *, fragments: bool = False) -> None:
    """Keep what a capture reads of a weight for as long as its graph, if one is under way.

    Args:
        w: As `ready` was given it.
        fragments: Whether `ready_fragments` was.
    """
    known: _Known = _KNOWN[w.values]
    if is_holding():
        packed = known.ready.by_fragments if fragments else known.ready.by_strips
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
        fragments = fragments_of(w) if takes_fragments(w.block) else None
        known = _Known(facts, (indices, indptr), Ready(strips_of(w), fragments))
    finish_decoding(w.values)  # Calls on any stream may read it from now on.
    _KNOWN[w.values] = known
    return known
