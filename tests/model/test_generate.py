"""Text from whole models: that of transformers, drawn again by its seed, in whole characters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import hopsparse
from hopsparse.errors import ArgumentError
from hopsparse.models.fused import GatedMLP
from hopsparse.models.generate import Generator, Sampling, chosen
from hopsparse.models.opened import OpenedModel
from tests.helpers.tiny_models import byte_tokenizer, tiny_llama, tiny_qwen3

PROMPT = [5, 6, 7, 8]


def opened(make: Any = tiny_llama, *, sparse: bool = True) -> OpenedModel:
    model = make().float()
    if sparse:
        hopsparse.sparsify(model, hopsparse.Recipe("2:4", "magnitude"))
    return OpenedModel("tiny", model.eval(), byte_tokenizer(), "sparse", 0, {})


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("make", [tiny_llama, tiny_qwen3])
def test_the_likeliest_tokens_are_those_of_transformers(make: Any, fuse: bool) -> None:
    source = opened(make)
    ids = torch.tensor([PROMPT])
    want = source.model.generate(ids, max_new_tokens=40, do_sample=False)  # type: ignore[operator]
    writer = Generator(source, 64, fuse)
    assert (writer.fused is not None) is fuse
    for _ in range(2):  # The second text knows nothing of the first.
        assert list(writer.tokens(PROMPT, max_new_tokens=40)) == want[0, 4:].tolist()
    writer.close()
    assert not any(isinstance(each, GatedMLP) for each in source.model.modules())


def test_it_ends_where_there_is_no_room_or_at_an_end_token() -> None:
    source = opened(sparse=False)
    writer = Generator(source, 10)
    found = list(writer.tokens(PROMPT, max_new_tokens=100))
    assert (len(found), writer.written) == (10 - 4 + 1, 7)
    config: Any = source.model.generation_config
    config.eos_token_id = [found[2], 3]
    assert list(writer.tokens(PROMPT, max_new_tokens=100)) == found[: found.index(found[2]) + 1]


def test_a_seed_draws_the_same_text_again() -> None:
    writer = Generator(opened(), 64)

    def drawn(seed: int) -> list[int]:
        return list(writer.tokens(PROMPT, max_new_tokens=30, sampling=Sampling(1.5, seed=seed)))

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)


def test_only_the_likeliest_are_drawn() -> None:
    logits, draws = torch.tensor([0.0, 3.0, 1.0, 2.9]), torch.Generator().manual_seed(0)
    for top_k, known in ((1, {1}), (2, {1, 3}), (0, {0, 1, 2, 3}), (9, {0, 1, 2, 3})):
        sampling = Sampling(temperature=2.0, top_k=top_k)
        assert {int(chosen(logits, sampling, draws)) for _ in range(200)} == known


def test_pieces_are_whole_characters() -> None:
    source = opened()
    writer = Generator(source, 64)
    text = "aé€😀b"
    ids: list[int] = source.tokenizer(text)["input_ids"]
    assert len(ids) == len(text.encode())
    writer.tokens = lambda *_, **__: iter([*ids, ids[1]])  # type: ignore[method-assign]
    # The last byte starts a character that never ends.
    assert list(writer.text("x")) == [*text, "�"]


@pytest.mark.parametrize(
    ("ids", "most", "told"),
    [([], 5, "a prompt of 0 tokens"), ([1] * 8, 5, "at most 7 of the prompt"), ([1], 0, "0 new")],
)
def test_prompts_without_room_are_refused(ids: list[int], most: int, told: str) -> None:
    with pytest.raises(ArgumentError, match=told):
        Generator(opened(), 8).tokens(ids, max_new_tokens=most)


@pytest.mark.parametrize("tokens", [1, 129])
def test_more_tokens_than_the_context_are_refused(tokens: int) -> None:
    with pytest.raises(ArgumentError, match=f"{tokens} tokens for tiny. Required: 2 to its conte"):
        Generator(opened(), tokens)


@pytest.mark.parametrize(
    "wrong", [{"temperature": -1.0}, {"temperature": float("nan")}, {"top_k": -1}, {"seed": -1}]
)
def test_sampling_that_means_nothing_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match="Sampling"):
        Sampling(**wrong)


def test_a_family_without_fusing_runs_as_it_is(tmp_path: Path) -> None:
    source = opened(sparse=False)
    config: Any = source.model.config
    config.model_type = "other"
    writer = Generator(source, 64)
    assert writer.fused is None
    assert len(list(writer.tokens(PROMPT, max_new_tokens=3))) == 3
