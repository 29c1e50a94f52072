"""The calibration and evaluation texts of the quality anchors, cut into token windows.

Text A is the King James Bible as `bible -f gen1:1-rev22:21` prints it (Debian packages bible-kjv
and bible-kjv-text), text B the topics of Python's own help. Both are read from the machine.
"""

from __future__ import annotations

import importlib
import random
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

Encode = Callable[[str], Sequence[int]]
TOKENS = 512
CONSTITUTION = Path(__file__).parents[2] / "src/hopsparse/models/texts/constitution.txt"


def book() -> str:
    """The whole of text A."""
    command = ["bible", "-f", "gen1:1-rev22:21"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def topics() -> str:
    """The whole of text B: paragraphs in the order of sorted topics, duplicates dropped."""
    found: dict[str, None] = {}
    pages: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    for key in sorted(pages):
        for paragraph in pages[key].split("\n\n"):
            if paragraph.strip():
                found.setdefault(paragraph)
    return "\n\n".join(found)


def calibration(encode: Encode, count: int) -> list[Tensor]:
    """`count` windows [1, 512], alternating between the two texts, drawn with random.Random(0)."""
    sources = _sources(encode)
    return [_window(sources[i % 2], start) for i, start in enumerate(_starts(sources, count))]


def evaluation(encode: Encode, which: str) -> dict[str, list[Tensor]]:
    """Windows [1, 512] by name of text.

    Args:
        encode: Text to token ids.
        which: `anchors`: texts A and B; `heldout`: text that neither they nor calibration use;
            `other`: a text of another kind than all of them, a constitution.
    """
    if which == "other":
        return {"other": _first(encode(CONSTITUTION.read_text(encoding="utf-8")), 12)}
    if which == "anchors":
        texts = {"a": book()[2_000_000:2_400_000], "b": topics()[300_000:]}
        return {name: _first(encode(text), 16) for name, text in texts.items()}
    # Text B ends soon after the anchor, so its held-out windows lie between calibration windows.
    sources = _sources(encode)
    drawn = list(_starts(sources, 64))[1::2]
    free, start = [], 0
    while len(free) < 8 and start + TOKENS <= len(sources[1]):
        overlap = [s + TOKENS for s in drawn if s < start + TOKENS and start < s + TOKENS]
        if not overlap:
            free.append(_window(sources[1], start))
        start = max(overlap, default=start + TOKENS)
    return {"heldout_a": _first(encode(book()[1_500_000:1_600_000]), 8), "heldout_b": free}


def _sources(encode: Encode) -> list[Sequence[int]]:
    return [encode(book()[:1_500_000]), encode(topics()[:295_000])]


def _starts(sources: list[Sequence[int]], count: int) -> Iterator[int]:
    draw = random.Random(0)
    return (draw.randrange(len(sources[i % 2]) - TOKENS) for i in range(count))


def _window(ids: Sequence[int], start: int) -> Tensor:
    return torch.tensor([ids[start : start + TOKENS]])


def _first(ids: Sequence[int], count: int) -> list[Tensor]:
    return [_window(ids, i * TOKENS) for i in range(min(count, len(ids) // TOKENS))]
