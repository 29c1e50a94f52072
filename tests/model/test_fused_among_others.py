"""Fused blocks whose modules others hold, watch or replace; and what of torch is around a call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hopsparse
from hopsparse import fuse_blocks
from hopsparse.errors import ArgumentError
from tests.helpers.tiny_models import tiny_llama

TOKENS = torch.arange(9)[None]


def sparse(form: str = "2:4", **changes: Any) -> Any:
    model = tiny_llama(**changes).float()
    pattern, _, scheme = form.partition("+")
    hopsparse.sparsify(model, hopsparse.Recipe(pattern, "magnitude", scheme=scheme or None))
    return model.eval().requires_grad_(False)


def listen(module: nn.Module) -> None:
    module.register_forward_hook(lambda *found: found[-1] * 0)


def replace(module: nn.Module) -> None:
    old = module.forward
    setattr(module, "forward", lambda x: old(x) * 2)  # noqa: B010


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (listen, "mlp"),
        (listen, "mlp.act_fn"),
        (replace, "mlp"),
        (replace, "self_attn.q_proj"),
        (replace, "mlp.gate_proj"),
    ],
)
def test_what_watches_or_replaces_a_forward_keeps_working(
    change: Callable[[nn.Module], None], name: str
) -> None:
    model = sparse()
    change(model.model.layers[0].get_submodule(name))
    right = model(TOKENS).logits
    assert len(fuse_blocks(model).left) == 1
    torch.testing.assert_close(model(TOKENS).logits, right)


def test_an_mlp_of_another_class_is_left_alone() -> None:
    class Doubled(nn.Module):
        def __init__(self, mlp: Any) -> None:
            super().__init__()
            self.gate_proj, self.up_proj = mlp.gate_proj, mlp.up_proj
            self.down_proj, self.act_fn = mlp.down_proj, mlp.act_fn

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.down_proj(2 * self.act_fn(self.gate_proj(x)) * self.up_proj(x))
            return y

    model = sparse()
    model.model.layers[0].mlp = Doubled(model.model.layers[0].mlp)
    right = model(TOKENS).logits
    (why,) = fuse_blocks(model).left.values()
    assert why == "a Doubled may do something else with them"
    torch.testing.assert_close(model(TOKENS).logits, right)


def test_another_model_that_shares_the_mlp_says_the_same() -> None:
    one, other = sparse(intermediate_size=32), sparse(intermediate_size=32, seed=3)
    other.model.layers[0].mlp = one.model.layers[0].mlp
    right = other(TOKENS).logits
    fuse_blocks(one)
    torch.testing.assert_close(other(TOKENS).logits, right)


@pytest.mark.parametrize("name", ["mlp", "self_attn"])
def test_blocks_that_share_a_module_say_the_same(name: str) -> None:
    model = sparse("2:4+int8", intermediate_size=32)
    first, second = (model.model.layers[i] for i in (0, 1))
    setattr(second, name, getattr(first, name))
    for each in model.model.layers:
        each.input_layernorm.weight.uniform_(0.5, 2)
    right = model(TOKENS, use_cache=False).logits
    why = set(fuse_blocks(model).left.values())
    assert why == {"one of their modules stands in two places"}
    torch.testing.assert_close(model(TOKENS, use_cache=False).logits, right)


def test_a_block_without_a_layer_is_left_alone() -> None:
    model = sparse()
    model.model.layers[1].self_attn.k_proj = None
    (why,) = fuse_blocks(model).left.values()
    assert why == "one is missing"


def test_half_a_model_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"a LlamaModel without model\.layers"):
        fuse_blocks(sparse().model)


def test_what_happened_in_between_stays_when_undone() -> None:
    model = sparse(attention_bias=True)
    block = model.model.layers[0]
    biases = [block.self_attn.q_proj.bias, block.self_attn.k_proj.bias]
    done = fuse_blocks(model)
    model.train()
    block.mlp.down_proj = down = nn.Linear(64, 32)
    block.self_attn.q_proj.shared.linear.bias.data.add_(1)
    done.undo()
    assert all(each.training for each in model.modules())
    assert block.mlp.down_proj is down
    assert [block.self_attn.q_proj.bias, block.self_attn.k_proj.bias] == biases
    assert torch.equal(biases[0], torch.ones_like(biases[0]))


def test_an_input_that_changed_is_another() -> None:
    model = sparse()
    attention, x = model.model.layers[0].self_attn, torch.randn(2, 32)
    right = attention.k_proj(model.model.layers[0].input_layernorm(x + 1))
    fuse_blocks(model)  # The norm goes with them.
    attention.q_proj(x)
    x.add_(1)
    torch.testing.assert_close(attention.k_proj(x), right)


def test_gradient_and_autocast_belong_to_the_call() -> None:
    model = sparse()
    attention, x = model.model.layers[0].self_attn, torch.randn(2, 32, requires_grad=True)
    fuse_blocks(model)
    with torch.no_grad():
        attention.q_proj(x)
    assert attention.k_proj(x).requires_grad
    attention.v_proj(x)
    with torch.autocast("cpu", torch.bfloat16):
        attention.q_proj(x)
    assert attention.k_proj(x).dtype == torch.float32
    with torch.inference_mode():
        attention.q_proj(x)
    assert not attention.k_proj(x).is_inference()
