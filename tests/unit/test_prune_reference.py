"""Layers fitted to the dense model: its outputs, and its residual stream."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from hopsparse.formats import Form
from hopsparse.measure.error import gamma
from hopsparse.prune import Activations, Recipe, Reference, Statistics, capture_inputs, prune_block
from hopsparse.prune.fit import fit

WIDTH, INNER, TOKENS = 16, 32, 64
GROUPS = [["mix"], ["up"], ["down"]]
RESIDUAL = {"mix": "first", "down": "second"}


class Block(nn.Module):
    """Two sublayers on a residual stream that is changed in place."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH, bias=bias)
        self.up = nn.Linear(WIDTH, INNER, bias=bias)
        self.down = nn.Linear(INNER, WIDTH, bias=bias)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden += self.mix(torch.tanh(self.first(hidden)))
        hidden += self.down(torch.relu(self.up(self.second(hidden))))
        return hidden


class Model(nn.Module):
    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(bias) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


def inputs(batches: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(3)
    return list(torch.randn(8, TOKENS, WIDTH, generator=draw).split(8 // batches))


def prune(model: Model, recipe: Recipe, batches: int, *, fused: bool = True) -> None:
    activations = capture_inputs(model, model.blocks[0], inputs(batches))
    reference = activations.reference = Reference(activations, RESIDUAL)
    for index, block in enumerate(model.blocks):
        reference.enter(block)
        prune_block(
            block, GROUPS, activations, recipe, prefix=f"blocks.{index}.", then_advance=fused
        )
        if not fused:
            with torch.no_grad():
                activations.hidden = [block(hidden) for hidden in activations.hidden]
            reference.advance()


@torch.no_grad()
def look(model: Model, index: int, name: str) -> tuple[Tensor, Tensor, Tensor]:
    """Input and output of a layer, and the stream its output is added to, over all windows."""
    seen: dict[str, Tensor] = {}

    def keep(key: str, _: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
        seen[key], seen[key + ".out"] = args[0].clone(), output.clone()

    block = model.blocks[index]
    layers = [block.get_submodule(name), block.get_submodule(RESIDUAL.get(name, "first"))]
    handles = [
        layer.register_forward_hook(partial(keep, key))
        for layer, key in zip(layers, ("layer", "norm"), strict=True)
    ]
    model(inputs(1)[0])
    for handle in handles:
        handle.remove()
    width = layers[0].weight.shape
    rows = (seen["layer"].view(-1, width[1]), seen["layer.out"].view(-1, width[0]))
    return *rows, seen["norm"].view(-1, WIDTH)


@pytest.mark.parametrize("batches", [1, 2, 8])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("target", ["layer", "input", "residual"])
def test_each_weight_solves_least_squares_against_its_target(
    target: str, fused: bool, batches: int
) -> None:
    """The definition: with the zeros given, the kept weights of a row are a ridge solution."""
    model = Model()
    dense = copy.deepcopy(model)
    recipe = Recipe("2:4", fit_to=target, refit=200, damping=0.01)
    prune(model, recipe, batches, fused=fused)
    for index in range(3):
        for name in ("mix", "up", "down"):
            x, _, stream = look(model, index, name)
            _, y_dense, stream_dense = look(dense, index, name)
            weight = dense.blocks[index].get_submodule(name).weight.detach().double()
            x, wanted = x.double(), y_dense.double()
            if target == "layer":
                wanted = x @ weight.T
            elif target == "residual" and name in RESIDUAL:
                wanted = wanted + (stream_dense - stream).double()
            gram = x.T @ x / len(x)
            unit = gram.diagonal().mean() * torch.eye(len(gram))
            damped = gram + 0.01 * unit
            # Ridge towards the dense weight gives the best weight without zeros; then the zeros.
            ridge = damped + min(5 * len(gram) / len(x), 10 - 0.01) * unit
            free = weight + torch.linalg.solve(ridge, (wanted.T @ x / len(x) - weight @ gram).T).T
            found = model.blocks[index].get_submodule(name).weight.detach().double()
            gradient = ((free - found) @ damped) * (found != 0)
            scale = (free @ damped).abs().max()
            # float32 sums over 512 tokens, solved by conjugate gradients in float32.
            assert float(gradient.abs().max() / scale) < 1e-4, (index, name)


@pytest.mark.parametrize(("tokens", "ridge"), [(1, 10.0), (512, 0.01 + 5 * 64 / 512)])
def test_few_tokens_draw_a_weight_less_far(tokens: int, ridge: float) -> None:
    """Along the only direction that inputs have, ridge regression goes this part of the way."""
    torch.manual_seed(0)
    direction, weight = torch.randn(64), torch.randn(4, 64)
    x = direction * torch.randn(tokens, 1)
    target = torch.outer(x @ direction, torch.randn(4))
    statistics = Statistics(64)
    statistics.add(x)
    statistics.add_stream("layer", target, x)
    found = fit("layer", weight, Form(), statistics, Recipe()).weight
    whole = target - x @ weight.T
    part = (x @ (found - weight).T) / whole
    # The mean of the diagonal is a 64th of the only eigenvalue. It is the largest there is, so that
    # only the sums over tokens and inputs round, and no condition number makes more of it.
    expected = 64 / (64 + ridge)
    assert float((part / expected - 1).abs().max()) <= gamma(tokens + 64, torch.float32)


def test_pulling_at_the_residual_stream_keeps_the_output_of_the_model() -> None:
    dense = Model()
    lost = {}
    for target in ("layer", "input", "residual"):
        model = copy.deepcopy(dense)
        prune(model, Recipe("2:4", fit_to=target), 1)
        with torch.no_grad():
            lost[target] = float((model(inputs(1)[0]) - dense(inputs(1)[0])).norm())
    assert lost["residual"] < 0.9 * lost["layer"]
    assert lost["input"] < lost["layer"]


def test_a_method_that_moves_no_weight_ignores_the_reference() -> None:
    recipe = Recipe("2:4", "wanda", fit_to="residual")
    assert recipe.resolved_fit_to == "layer"
    with_reference, without = Model(), Model()
    without.load_state_dict(with_reference.state_dict())
    prune(with_reference, recipe, 1)
    activations = capture_inputs(without, without.blocks[0], inputs(1))
    for block in without.blocks:
        prune_block(block, GROUPS, activations, recipe, then_advance=True)
    for name, tensor in with_reference.state_dict().items():
        assert torch.equal(tensor, without.state_dict()[name])


def test_a_corrected_bias_removes_the_mean_error_of_the_outputs() -> None:
    model = Model(bias=True)
    with torch.no_grad():
        for block in model.blocks:
            block.up.bias += 2.0  # inputs of `down` far from zero
    dense = copy.deepcopy(model)
    lost = {}
    for bias in (False, True):
        pruned = copy.deepcopy(dense)
        prune(pruned, Recipe("2:4", fit_to="residual", bias=bias), 1)
        with torch.no_grad():
            gap = pruned(inputs(1)[0]) - dense(inputs(1)[0])
        lost[bias] = (float(gap.norm()), float(gap.mean((0, 1)).norm()))
    assert lost[True][0] < lost[False][0]
    # The last layer adds to the stream, and its target holds what the stream has lost so far.
    assert lost[True][1] < 1e-5 * float(dense(inputs(1)[0]).detach().norm())


def test_a_layer_called_twice_or_with_other_tokens_is_fitted_to_itself() -> None:
    statistics = Statistics(4)
    x, weight = torch.randn(8, 4), torch.randn(3, 4)
    statistics.add(x)
    statistics.add(x, dense=torch.randn(8, 4))
    assert statistics.target_product("any", weight) is None
    assert torch.allclose(statistics.mean_target("any", weight), weight @ statistics.mean())


def test_the_dense_model_is_not_disturbed_by_what_happens_to_the_block() -> None:
    block = Block()
    hidden = torch.randn(2, 5, WIDTH)
    activations = Activations([hidden.clone()], [()], [{}])
    reference = Reference(activations, RESIDUAL)
    reference.enter(block)
    with torch.no_grad():
        expected = block(hidden.clone())
        block.mix.weight.zero_()
    found = reference.calls(0, ["mix", "down"], then_advance=True)
    assert torch.equal(reference.activations.hidden[0], expected)
    assert torch.equal(found["down"].stream, expected)
    assert torch.equal(activations.hidden[0], hidden)
