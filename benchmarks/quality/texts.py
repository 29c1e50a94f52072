"""The calibration and evaluation texts of the quality anchors, cut into token windows.

Text A is the King James Bible as `bible -f gen1:1-rev22:21` prints it (Debian packages bible-kjv
and bible-kjv-text), text B the topics of Python's own help. Both are read from the machine.
"""

from __future__ import annotations

import importlib
import random
import re
import subprocess
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Encode = Callable[[str], Sequence[int]]
TOKENS = 512


def book() -> str:
    """The whole of text A."""
    command = ["bible", "-f", "gen1:1-rev22:21"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def topics() -> str:
    """The whole of text B: paragraphs in the order of sorted topics, duplicates dropped."""
    found: dict[str, None] = {}
    pages: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    for key in sorted(pages):
        for paragraph in re.split(r"\n\s*\n", pages[key]):
            if paragraph.strip():
                found.setdefault(paragraph)
    return "\n\n".join(found)


def calibration(encode: Encode, count: int) -> list[Tensor]:
    """`count` windows [1, 512], alternating between the two texts, drawn with random.Random(0)."""
    sources = [encode(book()[:1_500_000]), encode(topics()[:295_000])]
    draw = random.Random(0)
    windows = []
    for index in range(count):
        ids = sources[index % 2]
        start = draw.randrange(len(ids) - TOKENS)
        windows.append(torch.tensor([ids[start : start + TOKENS]]))
    return windows


def evaluation(encode: Encode, which: str) -> dict[str, list[Tensor]]:
    """Windows of texts A and B (`anchors`), or of text neither of them uses (`heldout`)."""
    if which == "anchors":
        texts = {"a": book()[2_000_000:2_400_000], "b": topics()[300_000:]}
        return {name: _first(encode(text), 16) for name, text in texts.items()}
    texts = {"heldout_a": book()[1_500_000:1_600_000], "heldout_b": topics()[295_000:300_000]}
    return {name: _first(encode(text), 8) for name, text in texts.items()}


def _first(ids: Sequence[int], count: int) -> list[Tensor]:
    count = min(count, len(ids) // TOKENS)
    return [torch.tensor([ids[i * TOKENS : (i + 1) * TOKENS]]) for i in range(count)]
