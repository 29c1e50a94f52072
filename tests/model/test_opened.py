from __future__ import annotations

from pathlib import Path

import torch

from hopsparse.models.evaluate import compare
from hopsparse.models.opened import check_alike, open_model
from hopsparse.models.text import bundled_text
from tests.helpers.tiny_models import save_model, tiny_llama
from tests.model.test_source import dense_state, write_gguf


def test_gguf_file_is_the_model_of_its_folder(tmp_path: Path) -> None:
    model = tiny_llama()
    model.load_state_dict(dense_state(), strict=False)
    folder = open_model(str(save_model(model, tmp_path / "folder")))
    file = open_model(str(write_gguf(tmp_path / "m.gguf", dense_state())))
    text = bundled_text("held_out")
    check_alike(folder, file, [text])
    found = compare(folder.model, file.model, folder.windows(text, 2, 32))
    assert (found.ratio.value, found.kl, found.agreement) == (1.0, 0.0, 1.0)
    # As a checkpoint would store it, so that sizes of folder and file can be compared.
    assert file.nbytes == folder.nbytes == 2 * sum(w.numel() for w in model.parameters())


def test_weights_are_float32_whatever_is_stored(tmp_path: Path) -> None:
    opened = open_model(str(save_model(tiny_llama(), tmp_path / "m")))
    assert {weight.dtype for weight in opened.model.parameters()} == {torch.float32}
    assert not opened.model.training
