"""Quality of a model that changes, against a dense one that may be gone by then."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from ..prune import quiet
from ..recover import Layout
from ..recover.capture import Head, UpToHead
from ._summary import quality_rows
from .evaluate import Comparison, compare


class Judge:
    """Compares models with the dense one on windows of text.

    It keeps the dense model's head, and its last hidden states: logits of all windows would take a
    hundred times the memory, and with a cache nobody needs the model while the student trains.

    Args:
        dense: The dense model.
        layout: Where its head is.
        evaluation: Windows of token ids [1, tokens], by text.
    """

    def __init__(
        self, dense: nn.Module, layout: Layout, evaluation: Mapping[str, list[Tensor]]
    ) -> None:
        self._head = Head.of(dense, layout)
        self._evaluation = evaluation
        runner = UpToHead(dense, layout.head, ())
        with quiet(runner):
            self._last = {
                text: [runner(window).last for window in windows]
                for text, windows in evaluation.items()
            }

    def __call__(self, model: nn.Module) -> dict[str, Comparison]:
        """The model against the dense one, by text."""
        return {
            text: compare(self._dense(text), model, windows)
            for text, windows in self._evaluation.items()
        }

    def _dense(self, text: str) -> Callable[[Tensor], Tensor]:
        kept = iter(self._last[text])
        return lambda _: self._head(next(kept))


def before_and_after(
    before: Mapping[str, Comparison], after: Mapping[str, Comparison]
) -> list[dict[str, Any]]:
    """A row a text: the dense model, and the student before and after it was trained."""
    firsts, seconds = (
        quality_rows({text: (found.a, found.b) for text, found in role.items()})
        for role in (before, after)
    )
    return [
        {key: first[key] for key in ("text", "windows", "dense")}
        | {"before": first["sparse"], "after": second["sparse"]}
        for first, second in zip(firsts, seconds, strict=True)
    ]
