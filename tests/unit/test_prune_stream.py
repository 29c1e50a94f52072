"""Streaming a toy transformer gives what the same steps give without streaming."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hopsparse.errors import ArgumentError, CalibrationError
from hopsparse.formats.pattern import NMPattern
from hopsparse.prune import (
    Activations,
    LayerReport,
    Recipe,
    advance,
    capture_inputs,
    magnitude,
    prune_block,
    refit,
    sparsegpt,
    wanda,
)

WIDTH, INNER, TOKENS = 16, 24, 32
GROUPS = [["q", "k"], ["o"], ["up"], ["down"]]


class Block(nn.Module):
    """Gated mixing and a two-layer perceptron; hidden states in, a tuple out."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.up = nn.Linear(WIDTH, INNER)
        self.down = nn.Linear(INNER, WIDTH)
        self.drop = nn.Dropout(0.5)

    def forward(self, hidden: Tensor, *, scale: Tensor, cache: Any = None) -> tuple[Tensor, None]:
        normal = nn.functional.layer_norm(hidden, (WIDTH,))
        hidden += self.drop(self.o(torch.tanh(self.q(normal)) * self.k(normal)) * scale)
        inner = torch.relu(self.up(nn.functional.layer_norm(hidden, (WIDTH,))))
        return hidden + self.down(inner), None


class Model(nn.Module):
    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.train()  # pruning must not be disturbed by dropout

    def forward(self, ids: Tensor, cache: Any = None) -> Tensor:
        hidden = self.embed(ids)
        scale = torch.full((1, ids.shape[1], 1), 0.5)
        for block in self.blocks:
            hidden = block(hidden, scale=scale, cache=cache)[0]
        raise AssertionError("the forward goes on after the first block was recorded")


@pytest.fixture
def model() -> Model:
    return Model()


def windows(count: int, batch: int = 1) -> list[Tensor]:
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 50, (count, TOKENS), generator=draw)
    return list(ids.split(batch))


def stream(model: Model, recipe: Recipe, batches: list[Tensor], fused: bool) -> list[LayerReport]:
    activations = capture_inputs(model, model.blocks[0], batches)
    reports = []
    for index, block in enumerate(model.blocks):
        reports += prune_block(
            block, GROUPS, activations, recipe, prefix=f"{index}.", then_advance=fused
        )
        if not fused:
            advance(block, activations)
    return reports


def look(seen: dict[str, Tensor], name: str, _: nn.Module, args: tuple[Tensor]) -> None:
    seen[name] = args[0].reshape(-1, args[0].shape[-1])


def plain(model: Model, recipe: Recipe, ids: Tensor) -> None:
    """The definition: before each group, run everything again and look at its inputs."""
    model.eval()
    pattern = recipe.parsed_pattern
    scale = torch.full((1, TOKENS, 1), 0.5)
    for index, block in enumerate(model.blocks):
        groups = GROUPS if recipe.resolved_refresh == "group" else [[n for g in GROUPS for n in g]]
        for group in groups:
            seen: dict[str, Tensor] = {}
            handles = [
                block.get_submodule(name).register_forward_pre_hook(partial(look, seen, name))
                for name in group
            ]
            with torch.no_grad():
                hidden = model.embed(ids)
                for earlier in list(model.blocks)[: index + 1]:
                    hidden = earlier(hidden, scale=scale)[0]
            for handle in handles:
                handle.remove()
            for name in group:
                weight, x = block.get_submodule(name).weight.data, seen[name]
                if recipe.method == "sparsegpt":
                    new = sparsegpt(weight, pattern, x.T @ x / len(x))
                    new = refit(weight, new, x.T @ x / len(x))
                elif recipe.method == "wanda":
                    new = wanda(weight, pattern, x.norm(dim=0))
                else:
                    new = magnitude(weight, pattern)
                weight.copy_(new)


def largest_gap(a: nn.Module, b: nn.Module) -> float:
    other = b.state_dict()
    return max(float((t - other[n]).abs().max()) for n, t in a.state_dict().items())


@pytest.mark.parametrize("batch", [1, 3, 8])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("refresh", ["group", "block"])
@pytest.mark.parametrize("method", ["magnitude", "wanda", "sparsegpt"])
def test_equals_pruning_without_streaming(
    model: Model, method: str, refresh: str, fused: bool, batch: int
) -> None:
    """Sums in another order (statistics are float32) may move weights by rounding, but no mask."""
    model.double()
    expected = copy.deepcopy(model)
    recipe = Recipe("2:4", method, refresh=refresh, bias=False)
    reports = stream(model, recipe, windows(8, batch), fused)
    plain(expected, recipe, torch.cat(windows(8)))
    assert [r.name for r in reports] == [f"{i}.{n}" for i in range(2) for g in GROUPS for n in g]
    assert all(r.density == 0.5 and r.tokens == 8 * TOKENS for r in reports)
    other = expected.state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor != 0, other[name] != 0), name
    if method != "sparsegpt":
        assert largest_gap(model, expected) == 0
    assert all(module.training for module in model.modules())


def test_reported_error_is_the_error_of_the_outputs(model: Model) -> None:
    block, x = model.blocks[0], torch.randn(1, 200, WIDTH)
    before = copy.deepcopy(block)
    scale = torch.ones(1, 200, 1)
    acts = Activations([x], [()], [{"scale": scale}])
    report = prune_block(block, [["q"]], acts, Recipe("2:4"))[0]
    normal = nn.functional.layer_norm(x, (WIDTH,)).double()
    old, new = (b.q.weight.detach().double() for b in (before, block))
    expected = float((normal @ (old - new).T).norm() / (normal @ old.T).norm())
    # Squared norms from float32 sums over 200 tokens and 16 features.
    assert abs(report.output_error - expected) <= 216 * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("refresh", ["group", "block"])
@pytest.mark.parametrize("batch", [2, 8])
def test_the_same_twice_is_bit_identical(refresh: str, batch: int) -> None:
    states = []
    for _ in range(2):
        torch.manual_seed(5)
        model = Model()
        stream(model, Recipe("2:4", refresh=refresh), windows(8, batch), fused=True)
        states.append(model)
    assert largest_gap(*states) == 0


def test_one_batch_takes_one_forward_and_the_fused_output_is_that_of_advance(model: Model) -> None:
    twin, calls = copy.deepcopy(model), []
    model.blocks[0].register_forward_pre_hook(lambda *_: calls.append(1))
    recipe = Recipe("2:4")
    fused, apart = (capture_inputs(m, m.blocks[0], windows(8, 8)) for m in (model, twin))
    calls.clear()
    prune_block(model.blocks[0], GROUPS, fused, recipe, then_advance=True)
    assert len(calls) == 1
    prune_block(twin.blocks[0], GROUPS, apart, recipe)
    advance(twin.blocks[0], apart)
    assert torch.equal(fused.hidden[0], apart.hidden[0])


def test_kept_layers_are_reported_and_untouched(model: Model) -> None:
    before = copy.deepcopy(model)
    reports = stream(model, Recipe("2:4", keep=("*.q", "1.*")), windows(4, 2), fused=False)
    dense = [r.name for r in reports if r.method == "dense"]
    assert dense == ["0.q", "1.q", "1.k", "1.o", "1.up", "1.down"]
    assert largest_gap(model.blocks[1], before.blocks[1]) == 0
    assert torch.equal(model.blocks[0].q.weight, before.blocks[0].q.weight)


class Routed(nn.Module):
    """Has a layer that no token reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.used(hidden)


@pytest.mark.parametrize("calls", [1, 3])
@pytest.mark.parametrize("method", ["sparsegpt", "wanda"])
def test_an_unreached_layer_falls_back_to_magnitude_and_says_so(calls: int, method: str) -> None:
    block = Routed()
    expected = magnitude(block.idle.weight.data, NMPattern(2, 4))
    acts = Activations(
        [torch.randn(1, 40, WIDTH) for _ in range(calls)], [()] * calls, [{}] * calls
    )
    used, idle = prune_block(block, [["used", "idle"]], acts, Recipe("2:4", method))
    assert used.method == method
    assert idle.method == "magnitude"
    assert "no calibration token reached it" in idle.note
    assert idle.output_error is None
    assert torch.equal(block.idle.weight.data, expected)


def test_magnitude_needs_no_activations(model: Model) -> None:
    reports = prune_block(model.blocks[0], GROUPS, None, Recipe("2:4", "magnitude"))
    assert [report.density for report in reports] == [0.5] * len(reports)
    with pytest.raises(ArgumentError, match="without activations"):
        prune_block(model.blocks[0], GROUPS, None, Recipe("2:4", "wanda"))


@pytest.mark.parametrize("name", ["drop", "nothing", "q"])
def test_names_that_are_no_layer_are_refused(model: Model, name: str) -> None:
    acts = capture_inputs(model, model.blocks[0], windows(1))
    with pytest.raises(ArgumentError, match=name):
        prune_block(model.blocks[0], [["q"], [name]], acts, Recipe())


@pytest.mark.parametrize("calls", [1, 2])
def test_activations_that_are_not_finite_name_the_layer(model: Model, calls: int) -> None:
    acts = capture_inputs(model, model.blocks[0], windows(calls))
    acts.hidden[-1][0, 3, 2] = float("nan")
    with pytest.raises(CalibrationError, match=r"layer 0\.q"):
        prune_block(model.blocks[0], GROUPS, acts, Recipe(), prefix="0.")
    with pytest.raises(CalibrationError, match="not finite"):
        advance(model.blocks[0], acts)
    assert not model.blocks[0].q._forward_pre_hooks


def test_weights_that_are_not_finite_name_layer_and_position(model: Model) -> None:
    model.blocks[0].o.weight.data[3, 4] = float("inf")
    acts = capture_inputs(model, model.blocks[0], windows(2))
    with pytest.raises(ArgumentError, match=r"layer 0\.o: .*row 3, column 4"):
        prune_block(model.blocks[0], GROUPS, acts, Recipe(), prefix="0.")


def test_capture_shares_equal_arguments_and_copies_no_hidden_state(model: Model) -> None:
    acts = capture_inputs(model, model.blocks[0], windows(3))
    assert len(acts) == 3
    assert acts.kwargs[0] is acts.kwargs[1] is acts.kwargs[2]
    assert not any(hidden.requires_grad for hidden in acts.hidden)
    assert not model.blocks[0]._forward_pre_hooks


def test_capture_refuses_what_cannot_be_run_again(model: Model) -> None:
    with pytest.raises(CalibrationError, match="no window"):
        capture_inputs(model, model.blocks[0], [])
    with pytest.raises(CalibrationError, match="never reached"):
        capture_inputs(lambda ids: model.embed(ids), model.blocks[0], windows(1))
    with pytest.raises(CalibrationError, match="use_cache=False"):
        capture_inputs(lambda ids: model(ids, cache=object()), model.blocks[0], windows(1))


def test_advance_refuses_what_is_no_hidden_state() -> None:
    acts = Activations([torch.ones(1, 2, 4)], [()], [{}])
    with pytest.raises(CalibrationError, match="same shape"):
        advance(nn.Linear(4, 5), acts)


@pytest.mark.parametrize("batch", [2, 8])
def test_weights_run_as_they_will_be_stored(model: Model, batch: int) -> None:
    """Rounded before the layer runs: the fused output is that of the rounded weights."""
    acts, again = (capture_inputs(model, model.blocks[0], windows(8, batch)) for _ in range(2))
    block = model.blocks[0]
    prune_block(block, GROUPS, acts, Recipe(), store_dtype=torch.bfloat16, then_advance=True)
    for name in (n for g in GROUPS for n in g):
        weight = block.get_submodule(name).weight.data
        assert weight.dtype == torch.float32
        assert torch.equal(weight, weight.bfloat16().float())
        bias = block.get_submodule(name).bias
        assert bias is None or torch.equal(bias, bias.bfloat16().float())
    assert any(block.get_submodule(n).bias is not None for g in GROUPS for n in g)
    advance(block, again)
    assert all(torch.equal(a, b) for a, b in zip(acts.hidden, again.hidden, strict=True))
