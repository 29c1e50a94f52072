"""A language model accelerated: chunks and steps say what the model says, and it comes back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import hopsparse
from hopsparse.errors import ArgumentError, UnsupportedError
from hopsparse.models.accelerated import AcceleratedModel, accelerate
from tests.helpers.tiny_models import tiny_llama, tiny_qwen3


def sparse(make: Any = tiny_llama, form: str = "2:4") -> Any:
    model = make().float()
    pattern, _, scheme = form.partition("+")
    hopsparse.sparsify(model, hopsparse.Recipe(pattern, "magnitude", scheme=scheme or None))
    return model.eval().requires_grad_(False)


@pytest.mark.parametrize("form", ["2:4", "2:4+int8"])
@pytest.mark.parametrize("make", [tiny_llama, tiny_qwen3])
def test_prompts_of_any_length_and_steps(make: Any, form: str) -> None:
    model = sparse(make, form)
    texts = torch.randint(0, 200, (2, 60))
    right = model(texts).logits
    before = [type(each) for each in model.modules()]
    with accelerate(model, batch=2, max_tokens=60, chunks=(16, 4)) as run:
        for prompt in (1, 3, 4, 5, 16, 17, 37, 2):
            torch.testing.assert_close(run.prefill(texts[:, :prompt]), right[:, prompt - 1])
            assert run.tokens == prompt
            for at in range(prompt, prompt + 3):
                torch.testing.assert_close(run.step(texts[:, at : at + 1]), right[:, at])
        assert set(run._graphs) == {1, 4, 16}
    assert [type(each) for each in model.modules()] == before
    torch.testing.assert_close(model(texts).logits, right)


def test_two_hundred_tokens_are_those_of_the_model() -> None:
    model = sparse(lambda: tiny_llama(max_position_embeddings=256))
    ids = torch.tensor([[5, 6, 7]])
    right = model.generate(ids, max_new_tokens=200, do_sample=False, eos_token_id=None)
    run = accelerate(model, max_tokens=256)
    found, logits = [], run.prefill(ids)
    for _ in range(200):
        token = logits.argmax(-1, keepdim=True)
        found.append(int(token))
        logits = run.step(token)
    run.release()
    assert found == right[0, 3:].tolist()


def test_a_cache_that_counts_on_the_host_runs_eagerly() -> None:
    transformers = pytest.importorskip("transformers")
    from tests.helpers.tiny_models import SIZES

    torch.manual_seed(0)
    config = transformers.MistralConfig(**SIZES, sliding_window=16)
    model = transformers.MistralForCausalLM(config).eval().requires_grad_(False)
    hopsparse.sparsify(model, hopsparse.Recipe("2:4", "magnitude"))
    texts = torch.randint(0, 200, (1, 30))
    right = model(texts).logits
    run = accelerate(model, max_tokens=30, chunks=(8,))
    torch.testing.assert_close(run.prefill(texts[:, :21]), right[:, 20])
    torch.testing.assert_close(run.step(texts[:, 21:22]), right[:, 21])
    assert run._graphs == {}


def test_any_module_with_an_example_as_before() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval()
    run = hopsparse.accelerate(model, torch.ones(2, 4), buckets=(1, 2))
    with torch.no_grad():
        assert torch.equal(run(torch.ones(2, 4)), model(torch.ones(2, 4)))


def test_bad_input_is_refused() -> None:
    model = sparse()
    run = accelerate(model, batch=2, max_tokens=8)
    assert isinstance(run, AcceleratedModel)
    with pytest.raises(ArgumentError, match="fused already"):
        accelerate(model)
    ids = torch.zeros(2, 4, dtype=torch.long)
    with pytest.raises(ArgumentError, match="a prompt first"):
        run.step(ids[:, :1])
    for wrong in (ids[:1], torch.zeros(3, 4).long(), ids.int(), ids[:, :0], ids[0], [[1]]):
        with pytest.raises(ArgumentError, match=r"int64 \[2, 1 to 8\]"):
            run.prefill(wrong)  # type: ignore[arg-type]
    run.prefill(torch.zeros(2, 8).long())
    with pytest.raises(ArgumentError, match="a token behind 8"):
        run.step(ids[:, :1])
    run.release()
    run.release()
    with pytest.raises(ArgumentError, match="was released"):
        run.prefill(ids)
    with pytest.raises(ArgumentError, match="in training mode"):
        accelerate(model.train())
    with pytest.raises(ArgumentError, match="without an example"):
        accelerate(nn.Linear(2, 2))
    for words in (
        {"batch": 0},
        {"max_tokens": 0},
        {"chunks": ()},
        {"chunks": (0,)},
        {"chunks": 5.0},
    ):
        with pytest.raises(ArgumentError, match="whole numbers"):
            accelerate(model.eval(), **words)  # type: ignore[call-overload]
    model.config.model_type = "mamba"
    with pytest.raises(UnsupportedError, match="model type"):
        accelerate(model)
