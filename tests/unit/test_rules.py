from __future__ import annotations

import pytest
from torch import nn

from hopsparse.errors import UnsupportedError
from hopsparse.formats import NMPattern, Unstructured
from hopsparse.models.rules import family_of, find_blocks, replace_module, select


def block(width: int = 8) -> nn.Module:
    return nn.ModuleDict({"up": nn.Linear(width, 16), "down": nn.Linear(16, width)})


def network(blocks: int = 3) -> nn.Module:
    return nn.ModuleDict(
        {
            "heads": nn.ModuleList([nn.Linear(8, 2) for _ in range(2)]),
            "layers": nn.ModuleList([block() for _ in range(blocks)]),
            "norms": nn.ModuleList([nn.LayerNorm(8) for _ in range(9)]),
        }
    )


def test_blocks_are_the_longest_list_of_alike_modules_that_hold_linear_layers() -> None:
    assert find_blocks(network()) == ("layers.0", "layers.1", "layers.2")


def test_a_model_without_a_list_is_one_block() -> None:
    assert find_blocks(nn.Sequential(nn.Linear(4, 4))) == ("",)
    mixed = nn.ModuleList([nn.Linear(4, 4), nn.ReLU()])
    assert find_blocks(nn.ModuleDict({"mixed": mixed})) == ("",)


def test_selection_divides_every_linear_layer_once() -> None:
    model = network()
    selection = select(model, find_blocks(model), NMPattern(2, 4), ["*.1.up"])
    assert selection.eligible == {
        "layers.0": ("layers.0.up", "layers.0.down"),
        "layers.1": ("layers.1.down",),
        "layers.2": ("layers.2.up", "layers.2.down"),
    }
    assert selection.kept_dense == {
        "heads.0": "outside the blocks",
        "heads.1": "outside the blocks",
        "layers.1.up": "kept by '*.1.up'",
    }


def test_k_that_the_pattern_does_not_divide() -> None:
    model = nn.ModuleDict({"layers": nn.ModuleList([block(10) for _ in range(2)])})
    selection = select(model, find_blocks(model), NMPattern(2, 4))
    assert selection.kept_dense["layers.0.up"] == "k = 10 is not a multiple of 4"
    assert (
        "layers.0.up" in select(model, find_blocks(model), Unstructured(0.5)).eligible["layers.0"]
    )


def test_nothing_left_says_why() -> None:
    model = nn.Sequential(nn.Linear(6, 4))
    with pytest.raises(UnsupportedError, match="0: k = 6 is not a multiple of 4"):
        select(model, find_blocks(model), NMPattern(2, 4))


def test_families() -> None:
    assert family_of("llama").name == "Llama"
    assert family_of("qwen3").name == "Qwen"
    with pytest.raises(UnsupportedError, match="model type 'mamba'.*llama"):
        family_of("mamba")


def test_replacing_a_module_touches_only_its_place() -> None:
    model = network()
    before = model["layers"][1]["down"]
    replace_module(model, "layers.1.up", lambda old: nn.Identity())
    assert isinstance(model["layers"][1]["up"], nn.Identity)
    assert model["layers"][1]["down"] is before
