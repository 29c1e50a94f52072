from __future__ import annotations

import pytest
import torch
from torch import nn

from hopsparse.errors import ArgumentError, UnsupportedError
from hopsparse.formats import BlockPattern, NMPattern, Pattern
from hopsparse.models.rules import family_of, find_blocks, linear_names, replace_module, select
from hopsparse.nn import Pointwise
from hopsparse.prune import Recipe


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


def test_a_model_whose_blocks_hold_1x1_convolutions_is_one_block() -> None:
    model = network()
    assert find_blocks(model) != ("",)
    model["layers"][1]["point"] = Pointwise(nn.Linear(8, 8))
    assert find_blocks(model) == ("",)


def test_selection_divides_every_linear_layer_once() -> None:
    model = network()
    selection = select(model, find_blocks(model), Recipe("2:4", keep=("*.1.up",)))
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
    selection = select(model, find_blocks(model), Recipe("2:4"))
    assert selection.kept_dense["layers.0.up"] == "k = 10 is not a multiple of 4"
    assert (
        "layers.0.up"
        in select(model, find_blocks(model), Recipe("unstructured:0.5")).eligible["layers.0"]
    )


def test_nothing_left_says_why() -> None:
    model = nn.Sequential(nn.Linear(6, 4))
    with pytest.raises(UnsupportedError, match="0: k = 6 is not a multiple of 4"):
        select(model, find_blocks(model), Recipe("2:4"))


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


def reasons(model: nn.Module, pattern: Pattern = NMPattern(2, 4)) -> dict[str, str]:  # noqa: B008
    return select(model, ("",), Recipe(pattern)).kept_dense


class Doubled(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * 2


def test_only_plain_linear_layers_are_pruned() -> None:
    hooked = [nn.Linear(8, 8) for _ in range(4)]
    hooked[0].register_forward_hook(lambda *_: None)
    hooked[1].register_forward_pre_hook(lambda *_: None)
    hooked[2].register_full_backward_hook(lambda *_: None)
    hooked[3].register_full_backward_pre_hook(lambda *_: None)
    wrapped = nn.Linear(8, 8)
    wrapped.forward = lambda x: x  # type: ignore[method-assign]
    model = nn.Sequential(
        nn.Linear(8, 8),
        Doubled(8, 8),
        nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)),
        wrapped,
        nn.Linear(8, 8, dtype=torch.float64),
        nn.Linear(8, 8).requires_grad_(False).to(torch.float8_e4m3fn),
        *hooked,
    )
    assert reasons(model) == {
        "1": "it is a Doubled, a subclass of nn.Linear",
        "2": "it has a parametrization",
        "3": "its forward was replaced",
        "4": "its weight is float64",
        "5": "its weight is float8_e4m3fn",
        **{str(index): "it has hooks" for index in range(6, 10)},
    }


def test_a_weight_computed_from_others_stays_dense() -> None:
    computed = nn.Linear(8, 8)
    weight = computed.weight.detach().requires_grad_() * 2
    del computed.weight
    computed.weight = weight
    model = nn.Sequential(nn.Linear(8, 8), computed)
    assert reasons(model) == {"1": "its weight is computed from other tensors"}


def test_layers_whose_weight_torch_reads_stay_dense() -> None:
    model = nn.ModuleDict(
        {
            "encoder": nn.TransformerEncoderLayer(8, 2, 16),
            "decoder": nn.TransformerDecoderLayer(8, 2, 16),
        }
    )
    attention = "nn.MultiheadAttention reads its weight without calling it"
    encoder = "nn.TransformerEncoderLayer reads its weight without calling it"
    assert reasons(model) == {
        "encoder.self_attn.out_proj": attention,
        "encoder.linear1": encoder,
        "encoder.linear2": encoder,
        "decoder.self_attn.out_proj": attention,
        "decoder.multihead_attn.out_proj": attention,
    }


def test_a_shared_weight_stays_dense() -> None:
    model = nn.ModuleDict({"tokens": nn.Embedding(8, 8), "head": nn.Linear(8, 8)})
    model["head"].weight = model["tokens"].weight
    model["up"], model["down"], model["free"] = (nn.Linear(8, 8) for _ in range(3))
    model["down"].weight = model["up"].weight
    assert reasons(model) == {
        "head": "weight shared with tokens.weight",
        "up": "weight shared with down.weight",
        "down": "weight shared with up.weight",
    }


def test_a_block_and_a_layer_in_two_places_are_selected_once() -> None:
    repeated, other = block(), block()
    model = nn.ModuleDict({"first": other["up"]})
    model["layers"] = nn.ModuleList([repeated, repeated, other])
    selection = select(model, find_blocks(model), Recipe("2:4"))
    assert selection.eligible == {
        "layers.0": ("layers.0.up", "layers.0.down"),
        "layers.2": ("layers.2.up", "layers.2.down"),
    }
    assert linear_names(model)[other["up"]] == ["first", "layers.2.up"]
    kept = select(model, find_blocks(model), Recipe("2:4", keep=("layers.1.*",))).kept_dense
    assert list(kept) == ["layers.0.up", "layers.0.down"]


def test_a_layer_of_which_all_blocks_or_none_would_stay_is_kept_dense() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(65, 64))
    assert reasons(model, BlockPattern(64, 64)) == {
        "0": "block:64x64:0.5 zeroes 0 of its 1 blocks",
    }
    assert reasons(model, BlockPattern(32, 32, 0.9)) == {
        "0": "block:32x32:0.9 zeroes 4 of its 4 blocks",
    }


def test_a_glob_that_matches_nothing() -> None:
    with pytest.raises(ArgumentError, match=r"'\*nothing'.*heads\.0"):
        select(network(), ("",), Recipe("2:4", keep=("*nothing",)))
