from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from hopsparse.errors import ArgumentError, CalibrationError
from hopsparse.models.evaluate import Quality, evaluate
from hopsparse.models.options import SparsifyOptions
from hopsparse.models.text import (
    HELD_OUT,
    Text,
    Texts,
    bundled_text,
    leading_windows,
    random_windows,
)
from tests.helpers.tiny_models import byte_tokenizer, tiny_llama, write_text


def test_perplexity_is_that_of_the_definition() -> None:
    model = tiny_llama().float()
    windows = leading_windows(bundled_text("held_out"), byte_tokenizer(), 3, 40)
    nll, count = 0.0, 0
    with torch.no_grad():
        for window in windows:
            chances = model(window).logits[0].double().softmax(-1)
            for position in range(39):
                nll -= math.log(float(chances[position, window[0, position + 1]]))
                count += 1
    quality = evaluate(model, windows)
    assert quality.tokens == count == 3 * 39
    assert quality.perplexity == pytest.approx(math.exp(nll / count))


def test_agreement() -> None:
    windows = leading_windows(bundled_text("held_out"), byte_tokenizer(), 2, 16)
    quality = evaluate(tiny_llama(), windows)
    assert quality.agreement(quality) == 1.0
    other = Quality(quality.nll, quality.tokens, [top.clone() for top in quality.top1])
    other.top1[0][:3] = -1
    assert quality.agreement(other) == (30 - 3) / 30
    assert Quality.sum([quality, other]).tokens == 60


def test_uniform_model_has_the_perplexity_of_its_vocabulary() -> None:
    quality = evaluate(lambda window: torch.zeros(1, window.shape[1], 50), [torch.arange(9)[None]])
    assert quality.perplexity == pytest.approx(50)


def test_windows_are_the_same_for_the_same_seed() -> None:
    text, tokenizer = bundled_text("calibration"), byte_tokenizer()
    first = random_windows(text, tokenizer, 4, 32, seed=1)
    again = random_windows(text, tokenizer, 4, 32, seed=1)
    assert torch.equal(torch.cat(first), torch.cat(again))
    other = random_windows(text, tokenizer, 4, 32, seed=2)
    assert not torch.equal(torch.cat(first), torch.cat(other))
    assert {window.shape for window in first} == {(1, 32)}


def test_leading_windows_lie_side_by_side() -> None:
    ids = byte_tokenizer()("abcdefghij")["input_ids"]
    windows = leading_windows(Text("t", "abcdefghij"), byte_tokenizer(), 5, 4)
    assert [window.tolist() for window in windows] == [[ids[:4]], [ids[4:8]]]


def test_text_of_exactly_one_window(tmp_path: Path) -> None:
    text = Text("t", "abcdefgh")
    assert len(random_windows(text, byte_tokenizer(), 3, 8, 0)) == 3
    with pytest.raises(CalibrationError, match="'t' has 8 tokens.*at least one window of 9"):
        random_windows(text, byte_tokenizer(), 3, 9, 0)


def test_calibration_and_evaluation_do_not_overlap() -> None:
    calibration = bundled_text("calibration").content
    lines = {line for line in calibration.splitlines() if len(line) > 40}
    for name in HELD_OUT:
        held_out = bundled_text(name).content.splitlines()
        assert not lines & set(held_out)


def test_texts_that_are_named_are_used(tmp_path: Path) -> None:
    path = write_text(tmp_path / "mine.txt")
    options = SparsifyOptions(
        calibration=path, evaluate=path, windows=2, eval_windows=1, window_tokens=16
    )
    texts = Texts.read(byte_tokenizer(), 0, options)
    assert list(texts.evaluation) == ["mine.txt"]
    assert texts.summary() == {"text": "mine.txt", "windows": 2, "window_tokens": 16}
    assert texts.digest() != Texts.read(byte_tokenizer(), 1, options).digest()


@pytest.mark.parametrize(
    "wrong",
    [
        {"windows": 0},
        {"eval_windows": 0},
        {"window_tokens": 1},
        {"resume": True, "overwrite": True},
    ],
)
def test_options_that_mean_nothing(wrong: dict[str, int]) -> None:
    with pytest.raises(ArgumentError):
        SparsifyOptions(**wrong)


def test_window_that_is_a_batch() -> None:
    with pytest.raises(ArgumentError, match=r"shape \[2, 8\]. Required: \[1, tokens\]"):
        evaluate(tiny_llama(), [torch.zeros(2, 8, dtype=torch.int64)])


def test_model_keeps_its_mode() -> None:
    model = tiny_llama().train()
    model.lm_head.eval()
    evaluate(model, [torch.arange(8)[None]])
    assert model.training
    assert not model.lm_head.training
