"""Text from whole models: that of transformers, drawn again by its seed, in whole characters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import hopsparse
from hopsparse.errors import ArgumentError
from hopsparse.graphs import Captured
from hopsparse.models.fused import GatedMLP
from hopsparse.models.generate import Generator, Sampling, chosen
from hopsparse.models.opened import OpenedModel
from tests.helpers.tiny_models import SIZES, byte_tokenizer, tiny_qwen3

PROMPT = [5, 6, 7, 8]


def opened(make: Any = tiny_qwen3, *, sparse: bool = True) -> OpenedModel:
    model = make().float()
    if sparse:
        hopsparse.sparsify(model, hopsparse.Recipe("2:4", "magnitude"))
    return OpenedModel("tiny", model.eval(), byte_tokenizer(), "sparse", 0, {})


@pytest.mark.parametrize("fuse", [False, True])
def test_the_likeliest_tokens_are_those_of_transformers(fuse: bool) -> None:
    source = opened()
    ids = torch.tensor([PROMPT])
    want = source.model.generate(ids, max_new_tokens=40, do_sample=False)  # type: ignore[operator]
    assert len(set(want[0].tolist())) > 8  # Position, cache and token all count.
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


def mistral() -> Any:
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    return MistralForCausalLM(MistralConfig(**SIZES, sliding_window=4)).to(torch.bfloat16)


def test_a_cache_that_counts_on_the_host_is_not_captured() -> None:
    writer = Generator(opened(mistral), 64)
    found = list(writer.tokens(PROMPT, max_new_tokens=20))
    assert writer._step == writer._forward
    ids = torch.tensor([PROMPT])
    model: Any = writer.opened.model
    assert model.generate(ids, max_new_tokens=20, do_sample=False)[0, 4:].tolist() == found
    assert isinstance(Generator(opened(), 64)._decode_step(), Captured)


def test_one_text_at_a_time() -> None:
    writer = Generator(opened(), 64)
    first = writer.tokens(PROMPT, max_new_tokens=5)
    next(first)
    assert len(list(writer.tokens(PROMPT, max_new_tokens=5))) == 5
    with pytest.raises(ArgumentError, match="one text at a time"):
        next(first)


def test_it_runs_the_model_once_a_token_and_gives_it_back() -> None:
    source, runs = opened(), []
    with Generator(source, 64) as writer:
        list(writer.tokens(PROMPT, max_new_tokens=1))
        handle = source.model.register_forward_hook(lambda *_: runs.append(1))
        list(writer.tokens(PROMPT, max_new_tokens=5))
        handle.remove()
    assert len(runs) == 5
    assert not any(isinstance(each, GatedMLP) for each in source.model.modules())


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
    assert int(chosen(logits * 1e4, Sampling(temperature=1e-40), draws)) == 1


def test_pieces_of_words_keep_their_first_space(monkeypatch: pytest.MonkeyPatch) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"\u2581": 0, "a": 1, "b": 2, "\u2581a": 3, "\u2581b": 4, "<unk>": 5}
    merges = [("\u2581", "a"), ("\u2581", "b")]
    made = Tokenizer(models.BPE(vocab=words, merges=merges, unk_token="<unk>"))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<unk>")
    model = opened(sparse=False).model
    writer = Generator(OpenedModel("words", model, tokenizer, "dense", 0, {}), 64)
    ids = tokenizer("a b a")["input_ids"]
    monkeypatch.setattr(writer, "tokens", lambda *_, **__: iter(ids[1:]))
    assert "a" + "".join(writer.text("a")) == "a b a"
    with pytest.raises(ArgumentError, match="text in UTF-8"):
        writer.text("\udcff")


def test_pieces_are_whole_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    source = opened()
    writer = Generator(source, 64)
    text = "aé€😀b"
    ids: list[int] = source.tokenizer(text)["input_ids"]
    assert len(ids) == len(text.encode())
    monkeypatch.setattr(writer, "tokens", lambda *_, **__: iter([*ids, ids[1]]))
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
    "wrong",
    [
        *({"temperature": -1.0}, {"temperature": float("nan")}, {"temperature": float("inf")}),
        *({"top_k": -1}, {"top_k": 1.5}, {"seed": -1}, {"seed": 2**70}),
    ],
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
