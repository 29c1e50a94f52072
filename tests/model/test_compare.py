"""Two models on the same windows, and what a model is told about its own numbers."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from hopsparse.errors import ArgumentError, VerificationError
from hopsparse.models import evaluate as module
from hopsparse.models.evaluate import Quality, compare, evaluate
from hopsparse.models.text import bundled_text, leading_windows
from tests.helpers.tiny_models import byte_tokenizer, tiny_llama


def windows(count: int = 3, tokens: int = 24) -> list[Tensor]:
    return leading_windows(bundled_text("held_out"), byte_tokenizer(), count, tokens)


def test_divergence_is_that_of_the_definition() -> None:
    a, b = tiny_llama(0).float(), tiny_llama(1).float()
    expected, count = 0.0, 0
    with torch.no_grad():
        for window in windows():
            p = a(window).logits[0, :-1].double().softmax(-1)
            q = b(window).logits[0, :-1].double().softmax(-1)
            for mine, theirs in zip(p, q, strict=True):
                expected += sum(
                    x * math.log(x / y) for x, y in zip(mine.tolist(), theirs.tolist(), strict=True)
                )
                count += 1
    found = compare(a, b, windows())
    assert found.b.tokens == count
    assert found.kl == pytest.approx(expected / count, rel=1e-4)
    # It is no distance: the other direction is another number.
    assert compare(b, a, windows()).kl != found.kl


def test_each_side_is_what_it_is_alone() -> None:
    a, b = tiny_llama(0), tiny_llama(1)
    found = compare(a, b, windows())
    for mine, model in ((found.a, a), (found.b, b)):
        alone = evaluate(model, windows())
        assert (mine.nll, mine.tokens) == (alone.nll, alone.tokens)
        assert mine.standard_error == alone.standard_error
    assert found.ratio.value == pytest.approx(found.b.perplexity / found.a.perplexity)
    assert found.agreement == found.b.agreement(found.a) < 1
    low, high = found.ratio.low, found.ratio.high
    assert low is not None
    assert high is not None
    assert low < found.ratio.value < high


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_model_and_its_copy_are_exactly_alike(dtype: torch.dtype) -> None:
    a, b = tiny_llama(0).to(dtype), tiny_llama(0).to(dtype)
    for other in (a, b):
        found = compare(a, other, windows())
        assert (found.ratio.value, found.ratio.low, found.ratio.high) == (1.0, 1.0, 1.0)
        assert (found.kl, found.agreement) == (0.0, 1.0)


def test_positions_are_taken_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is counted does not depend on how much memory a piece may take."""
    a, b = tiny_llama(0), tiny_llama(1)
    whole = compare(a, b, windows())
    monkeypatch.setattr(module, "_CHUNK_ENTRIES", 257 * 5)
    pieces = compare(a, b, windows())
    assert pieces.b.nll == whole.b.nll
    assert pieces.kl == pytest.approx(whole.kl, rel=1e-12)
    assert all(map(torch.equal, pieces.b.top1, whole.b.top1))


def test_token_that_the_reference_rules_out_adds_nothing() -> None:
    reference = torch.tensor([[[0.0, 0.0, -math.inf], [0.0, 0.0, 0.0]]])
    logits = torch.tensor([[[0.0, 0.0, -math.inf], [0.0, 0.0, 0.0]]])
    quality = Quality()
    quality.add(logits, torch.tensor([[0, 1]]), reference)
    assert quality.kl == 0.0
    quality.add(torch.zeros(1, 2, 3), torch.tensor([[0, 1]]), reference)
    assert quality.window_kl[1] == pytest.approx(math.log(1.5))


def test_standard_error_is_over_windows() -> None:
    losses = [evaluate(tiny_llama(), [window]).mean_nll for window in windows()]
    quality = evaluate(tiny_llama(), windows())
    mean = sum(losses) / 3
    spread = math.sqrt(sum((loss - mean) ** 2 for loss in losses) / 2)
    assert quality.standard_error == pytest.approx(spread / math.sqrt(3))
    assert evaluate(tiny_llama(), windows(1)).standard_error is None


def test_parts_are_added_up_with_their_windows() -> None:
    found = compare(tiny_llama(0), tiny_llama(1), windows())
    parts = [compare(tiny_llama(0), tiny_llama(1), [window]).b for window in windows()]
    total = Quality.sum(parts)
    assert total.kl == found.kl
    assert total.kl_standard_error == found.b.kl_standard_error
    assert total.standard_error == found.b.standard_error
    # One window without a reference: no number that would be of the others only.
    assert Quality.sum([*parts, evaluate(tiny_llama(), windows(1))]).kl is None


def test_nan_is_said_with_its_place() -> None:
    def broken(ids: Tensor) -> Tensor:
        logits = torch.zeros(1, ids.shape[1], 300)
        logits[0, 4:, 7] = math.nan
        return logits

    with pytest.raises(VerificationError, match="the model gives NaN .* window 1.* token 5 of 24"):
        evaluate(broken, windows())
    with pytest.raises(VerificationError, match="the second model gives NaN"):
        compare(tiny_llama(), broken, windows())


def test_infinite_logits_are_no_nan() -> None:
    """A model may rule tokens out; one that rules out the right one has infinite perplexity."""

    def certain(ids: Tensor) -> Tensor:
        logits = torch.full((1, ids.shape[1], 300), -math.inf)
        logits[..., 0] = 0.0
        return logits

    quality = evaluate(certain, windows())
    assert quality.perplexity == math.inf
    assert quality.standard_error is None


def test_vocabularies_of_other_sizes() -> None:
    with pytest.raises(ArgumentError, match="vocabularies differ"):
        compare(tiny_llama(), lambda ids: torch.zeros(1, ids.shape[1], 300), windows())


def test_nothing_to_compare_on() -> None:
    with pytest.raises(ArgumentError, match="no window"):
        compare(tiny_llama(), tiny_llama(1), [])
