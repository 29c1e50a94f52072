"""Text into windows of tokens, for calibration and evaluation."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import CalibrationError
from .options import SparsifyOptions

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CALIBRATION = "calibration"
HELD_OUT = ("held_out", "constitution")


@dataclass(frozen=True)
class Text:
    """A named piece of text."""

    name: str
    content: str


def bundled_text(name: str) -> Text:
    """One of the public-domain texts of the package (texts/ORIGIN.md).

    Example:
        >>> bundled_text("held_out").name
        'held_out'
    """
    content = (files(__package__) / "texts" / f"{name}.txt").read_text(encoding="utf-8")
    return Text(name, content)


def read_text(path: Path | str) -> Text:
    """Read a UTF-8 text file.

    Raises:
        CalibrationError: The file is missing, empty, or in another encoding.
    """
    path = Path(path)
    try:
        content = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise CalibrationError(
            f"{path} is not UTF-8: byte {error.object[error.start]:#04x} at offset {error.start}",
            need="plain text in UTF-8",
            hint=f"iconv -f LATIN1 -t UTF-8 {path}",
        ) from error
    except OSError as error:
        raise CalibrationError(
            f"{path} cannot be read ({error.strerror})", need="a text file", hint="check the path"
        ) from error
    if not content.strip():
        raise CalibrationError(
            f"{path} is empty", need="text of at least one window", hint="leave the option out"
        )
    return Text(path.name, content)


def random_windows(
    text: Text, tokenizer: PreTrainedTokenizerBase, count: int, tokens: int, seed: int
) -> list[Tensor]:
    """Draw `count` windows [1, tokens] at random starts, the same for the same seed.

    Raises:
        CalibrationError: The text is shorter than one window.
    """
    ids = _encode(text, tokenizer, tokens)
    starts = random.Random(seed)
    return [_window(ids, starts.randint(0, len(ids) - tokens), tokens) for _ in range(count)]


def leading_windows(
    text: Text, tokenizer: PreTrainedTokenizerBase, count: int, tokens: int
) -> list[Tensor]:
    """The first windows [1, tokens] of a text, side by side; at most `count`.

    Raises:
        CalibrationError: The text is shorter than one window.
    """
    ids = _encode(text, tokenizer, tokens)
    count = min(count, len(ids) // tokens)
    return [_window(ids, index * tokens, tokens) for index in range(count)]


def windows_digest(windows: Iterable[Tensor]) -> str:
    """SHA-256 of token windows, in their order."""
    digest = hashlib.sha256()
    for window in windows:
        digest.update(repr(window.tolist()).encode())
    return digest.hexdigest()


@dataclass(frozen=True)
class Texts:
    """The windows of a run.

    Attributes:
        calibration: Windows to prune by.
        evaluation: Windows to judge by, by text name.
        source: Name of the calibration text.
    """

    calibration: list[Tensor]
    evaluation: dict[str, list[Tensor]]
    source: str

    @classmethod
    def read(cls, tokenizer: PreTrainedTokenizerBase, seed: int, options: SparsifyOptions) -> Texts:
        """Read and cut the texts that `options` names.

        Raises:
            CalibrationError: A text cannot be used.
        """
        given, judged = options.calibration, options.evaluate
        text = read_text(given) if given else bundled_text(CALIBRATION)
        held_out = [read_text(judged)] if judged else [bundled_text(name) for name in HELD_OUT]
        tokens = options.window_tokens
        return cls(
            random_windows(text, tokenizer, options.windows, tokens, seed),
            {
                each.name: leading_windows(each, tokenizer, options.eval_windows, tokens)
                for each in held_out
            },
            text.name,
        )

    def digest(self) -> str:
        """SHA-256 of the calibration windows."""
        return windows_digest(self.calibration)

    def check_vocabulary(self, size: int) -> None:
        """Refuse token ids that a model has no embedding for.

        Raises:
            CalibrationError: The tokenizer knows more tokens than the model.
        """
        windows = self.calibration + [w for each in self.evaluation.values() for w in each]
        largest = max(int(window.max()) for window in windows)
        if largest >= size:
            raise CalibrationError(
                f"the tokenizer gives token {largest}",
                need=f"tokens below the model's vocabulary of {size}",
                hint="the tokenizer files that belong to the model",
            )

    def summary(self) -> dict[str, Any]:
        """What a report says of the calibration."""
        return {
            "text": self.source,
            "windows": len(self.calibration),
            "window_tokens": self.calibration[0].shape[1],
        }


def _encode(text: Text, tokenizer: PreTrainedTokenizerBase, tokens: int) -> list[int]:
    # verbose=False: no warning about texts longer than the context; they are cut into windows.
    ids: list[int] = tokenizer(text.content, add_special_tokens=False, verbose=False)["input_ids"]
    if len(ids) < tokens:
        raise CalibrationError(
            f"text {text.name!r} has {len(ids)} tokens",
            need=f"at least one window of {tokens}",
            hint=f"a longer text, or --window-tokens {max(8, len(ids) // 2)}",
        )
    return ids


def _window(ids: list[int], start: int, tokens: int) -> Tensor:
    return torch.tensor([ids[start : start + tokens]])
