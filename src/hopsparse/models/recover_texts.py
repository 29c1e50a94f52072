"""Texts of a recovery run: windows to train on, to stop by, and to judge by."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..errors import ArgumentError, CalibrationError
from ..recover import Corpus, RecoverOptions
from .text import CALIBRATION, HELD_OUT, Text, bundled_text, leading_windows, read_text

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase


@dataclass(frozen=True)
class RecoverTexts:
    """Texts of a recovery run, and where it runs.

    Attributes:
        calibration: Text file to train on; the bundled text when None.
        evaluate: Text file to evaluate on; the two bundled held-out texts when None.
        windows: Training windows; they are seen again when they run out.
        held_out: Windows of the calibration text that are kept from training, to stop by.
        eval_windows: Windows of each evaluation text.
        eval_tokens: Tokens of such a window.
        device: `cpu`, or `auto`: what accelerate finds.
        resume: Continue an interrupted run of the same command.
        overwrite: Replace an existing checkpoint, and discard an interrupted run.
    """

    calibration: Path | None = None
    evaluate: Path | None = None
    windows: int = 256
    held_out: int = 8
    eval_windows: int = 8
    eval_tokens: int = 512
    device: str = "cpu"
    resume: bool = False
    overwrite: bool = False

    def __post_init__(self) -> None:
        least = {"windows": 1, "held_out": 0, "eval_windows": 1, "eval_tokens": 8}
        for name, value in least.items():
            if getattr(self, name) < value:
                got = f"{name} = {getattr(self, name)}"
                raise ArgumentError(got, need=f"at least {value}", hint=f"{value}")
        if self.resume and self.overwrite:
            raise ArgumentError(
                "resume and overwrite together", need="one of the two", hint="--resume alone"
            )


def split_windows(
    ids: Tensor, corpus_windows: int, held_out: int, tokens: int, seed: int
) -> Corpus:
    """Windows to train on, and others that share no token with them.

    The text is divided into slots of one window. Some of them, all over the text, are held out;
    training windows are drawn from everywhere else.

    Args:
        ids: int64 [n], the whole text.
        corpus_windows: Windows to train on.
        held_out: Windows to hold out.
        tokens: Tokens of a window.
        seed: Draws both.

    Raises:
        CalibrationError: The text is too short.

    Example:
        >>> corpus = split_windows(torch.arange(64), 3, 2, 8, seed=0)
        >>> [len(corpus.train), len(corpus.held_out), corpus.tokens]
        [3, 2, 8]
    """
    slots = ids.numel() // tokens
    if slots <= held_out:
        raise CalibrationError(
            f"a calibration text of {ids.numel():,} tokens",
            need=f"more than {held_out} windows of {tokens}, so that some are left to train on",
            hint="a longer text, fewer --held-out windows, or fewer --window-tokens",
        )
    draw = random.Random(seed)
    kept = sorted(draw.sample(range(slots), held_out))
    taken = torch.zeros(ids.numel() + 1, dtype=torch.int64)
    for slot in kept:
        taken[slot * tokens + 1 : (slot + 1) * tokens + 1] = 1
    taken = taken.cumsum(0)
    # A window that starts here meets no held-out token.
    starts = (taken[tokens:] == taken[:-tokens]).nonzero().flatten().tolist()
    train = [draw.choice(starts) for _ in range(corpus_windows)]
    return Corpus(
        [ids[start : start + tokens][None] for start in train],
        [ids[slot * tokens : (slot + 1) * tokens][None] for slot in kept],
    )


def cut_texts(
    tokenizer: PreTrainedTokenizerBase,
    options: RecoverOptions,
    texts: RecoverTexts,
    config: PretrainedConfig,
) -> tuple[Corpus, dict[str, list[Tensor]], str]:
    """The corpus, the evaluation windows by text, and the name of the calibration text."""
    given, judged = texts.calibration, texts.evaluate
    text = read_text(given) if given else bundled_text(CALIBRATION)
    others = [read_text(judged)] if judged else [bundled_text(name) for name in HELD_OUT]
    _refuse_the_same(text, others)
    tokens = options.window_tokens
    _check_context(config, tokens, "--window-tokens")
    _check_context(config, texts.eval_tokens, "--eval-tokens")
    ids = torch.cat(leading_windows(text, tokenizer, len(text.content), tokens), dim=1)[0]
    corpus = split_windows(ids, texts.windows, texts.held_out, tokens, options.seed)
    evaluation = {
        each.name: leading_windows(each, tokenizer, texts.eval_windows, texts.eval_tokens)
        for each in others
    }
    largest = max(int(ids.max()), *(int(w.max()) for ws in evaluation.values() for w in ws))
    vocabulary = config.vocab_size
    if largest >= vocabulary:
        raise CalibrationError(
            f"the tokenizer gives token {largest}",
            need=f"tokens below the model's vocabulary of {vocabulary}",
            hint="the tokenizer files that belong to the model",
        )
    return corpus, evaluation, text.name


def _check_context(config: PretrainedConfig, tokens: int, option: str) -> None:
    context = getattr(config, "max_position_embeddings", None)
    if isinstance(context, int) and tokens > context:
        raise ArgumentError(
            f"windows of {tokens} tokens",
            need=f"at most the model's context of {context}",
            hint=f"{option} {context}",
        )


def _refuse_the_same(text: Text, others: list[Text]) -> None:
    if any(text.content == other.content for other in others):
        raise CalibrationError(
            f"the calibration text {text.name!r} as evaluation text too",
            need="a text to evaluate on that was not trained on",
            hint="another --eval, or leave it out",
        )
