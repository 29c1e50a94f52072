"""Checkpoints with low-rank products: nothing that loads one may lose them in silence."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import hopsparse
from hopsparse.errors import UnsupportedError
from hopsparse.models.options import SparsifyOptions
from hopsparse.recover import LowRank
from tests.helpers.tiny_models import byte_tokenizer, save_model, tiny_llama, write_text


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint that was recovered with products of rank 2."""
    made = tmp_path_factory.mktemp("low-rank")
    text = write_text(made / "train.txt", 6000)
    (made / "eval.txt").write_text("Not the same text at all, and not a long one. " * 30)
    dense = save_model(tiny_llama(), made / "dense")
    settings = SparsifyOptions(
        calibration=text, evaluate=made / "eval.txt", windows=2, window_tokens=24, samples=False
    )
    recipe = hopsparse.Recipe(method="magnitude")
    hopsparse.sparsify_checkpoint(str(dense), made / "sparse", recipe, options=settings)
    options = hopsparse.RecoverOptions(
        steps=4, batch_windows=2, window_tokens=24, evaluate_every=2, lora_rank=2, lr=1e-2
    )
    texts = hopsparse.RecoverTexts(
        calibration=text,
        evaluate=made / "eval.txt",
        windows=4,
        held_out=2,
        eval_windows=2,
        eval_tokens=24,
    )
    hopsparse.recover_checkpoint(
        made / "sparse", made / "out", teacher=str(dense), options=options, texts=texts
    )
    return made


def logits(model: torch.nn.Module) -> torch.Tensor:
    ids = byte_tokenizer()("In the beginning", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        return model(ids).logits  # type: ignore[no-any-return]


def test_load_adds_the_products_without_a_warning(folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = hopsparse.load(folder / "out", dtype=torch.float32)
    products = [module for module in model.modules() if isinstance(module, LowRank)]
    assert len(products) == 21
    assert all(product.a.dtype == torch.float32 for product in products)
    bare = hopsparse.load(folder / "sparse", dtype=torch.float32)
    assert not torch.equal(logits(model), logits(bare))
    # Into a model as well, and a second time it changes nothing.
    into = hopsparse.load(folder / "out", into=tiny_llama(), dtype=torch.float32)
    assert torch.equal(logits(into), logits(model))
    assert len(hopsparse.load_low_rank(model, folder / "out")) == 21
    assert torch.equal(logits(into), logits(model))


def test_from_pretrained_warns_and_what_it_left_out_can_be_added(folder: Path) -> None:
    with pytest.warns(UserWarning, match="low-rank products, which from_pretrained leaves out"):
        model = AutoModelForCausalLM.from_pretrained(folder / "out", dtype=torch.float32)
    whole = hopsparse.load(folder / "out", dtype=torch.float32)
    assert not torch.equal(logits(model), logits(whole))
    hopsparse.load_low_rank(model, folder / "out")
    assert torch.equal(logits(model), logits(whole))


def test_a_checkpoint_without_products_loads_without_a_warning(folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*low-rank.*")
        AutoModelForCausalLM.from_pretrained(folder / "sparse")


def test_saving_and_converting_refuse_to_lose_products(folder: Path, tmp_path: Path) -> None:
    model = hopsparse.load(folder / "out")
    with pytest.raises(UnsupportedError, match="low-rank products beside its sparse layers"):
        hopsparse.save(model, tmp_path / "saved")
    with pytest.raises(UnsupportedError, match="low-rank products"):
        model.save_pretrained(tmp_path / "saved")  # type: ignore[operator]
    for to in ("csr", "dense", "sparse-24-bitmask"):
        with pytest.raises(UnsupportedError, match="has low-rank products beside its weights"):
            hopsparse.convert_checkpoint(folder / "out", tmp_path / "converted", to=to)
    assert not (tmp_path / "converted").exists()
    assert not list((tmp_path / "saved").glob("*.safetensors"))
