"""Statistics are sums over calls, shared where inputs are shared."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hopsparse.errors import CalibrationError
from hopsparse.prune import Gatherer, Statistics


def make(inputs: Tensor) -> Statistics:
    return Statistics(inputs.shape[-1])


def integers(*shape: int) -> Tensor:
    """Small integers: float32 sums of their products are exact."""
    return torch.randint(-4, 5, shape).float()


@pytest.mark.parametrize("features", [5, 512, 700])
def test_sums_are_exact_whichever_way_calls_are_cut(features: int) -> None:
    rows = integers(64, features)
    whole, parts = Statistics(features), Statistics(features)
    whole.add(rows)
    for part in rows.split([1, 0, 30, 33]):
        parts.add(part.view(1, -1, features))
    assert whole.tokens == parts.tokens == 64
    for statistics in (whole, parts, parts.copy()):
        assert torch.equal(statistics.hessian(), rows.T @ rows / 64)
        assert torch.equal(statistics.input_norm(), (rows**2).sum(0).sqrt())


def test_a_stride_samples_the_same_tokens_whichever_way_calls_are_cut() -> None:
    rows = integers(50, 6)
    statistics = Statistics(6, stride=16)
    for part in rows.split([7, 20, 23]):
        statistics.add(part)
    sample = rows[::16]
    assert torch.equal(statistics.hessian(), sample.T @ sample / 4)
    squares = (rows.double() ** 2).sum(0).sqrt()
    eps = torch.finfo(torch.float32).eps
    assert ((statistics.input_norm() - squares).abs() <= 50 * eps * squares).all()


def test_tokens_kept_out_have_sums_of_their_own_whichever_way_calls_are_cut() -> None:
    rows, dense, target = integers(45, 6), integers(45, 6), integers(45, 3)
    statistics = Statistics(6, holdout=8)
    parts = (part.split([5, 20, 20]) for part in (rows, dense, target))
    for x, x_dense, y in zip(*parts, strict=True):
        statistics.add(x, "layer", x_dense)
        statistics.add_stream("layer", y, x)
    out = torch.arange(45) % 8 == 0
    held_out = statistics.held_out
    assert held_out is not None
    for sums, which in ((statistics, ~out), (held_out, out)):
        x, y = rows[which], target[which]
        assert torch.equal(sums.hessian(), x.T @ x / len(x))
        assert torch.equal(sums.target_product("layer", torch.ones(3, 6)), y.T @ x / len(x))
        assert sums.target_energy("layer", torch.zeros(3, 6)) == float(y.square().sum()) / len(x)
        other = sums.target_product("other", torch.eye(6))
        assert torch.equal(other, dense[which].T @ x / len(x))
    assert (statistics.tokens, held_out.tokens) == (45, 6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("stride", [1, 16])
def test_activations_that_are_not_finite_name_layer_and_feature(bad: float, stride: int) -> None:
    rows = torch.randn(40, 4)
    rows[33, 2] = bad
    with pytest.raises(CalibrationError, match="layer up: its input feature"):
        Statistics(4, stride=stride).add(rows, "up")


def test_half_precision_inputs_are_summed_in_float32() -> None:
    rows = integers(3000, 4)
    statistics = Statistics(4)
    statistics.add(rows.bfloat16())
    assert torch.equal(statistics.hessian(), rows.T @ rows / 3000)


def test_the_factor_is_computed_once_and_again_after_more_data() -> None:
    statistics = Statistics(4)
    statistics.add(torch.randn(20, 4))
    first = statistics.factor(0.01)
    assert statistics.factor(0.01) is first
    statistics.add(torch.randn(20, 4))
    assert statistics.factor(0.01) is not first


def test_layers_with_the_same_tensor_share() -> None:
    layers = {name: nn.Linear(4, 4) for name in "qkvo"}
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    with Gatherer(layers, make) as gatherer:
        for _ in range(2):
            gatherer.run(lambda: [layers[n](y if n == "o" else x) for n in "qkvo"])
    found = gatherer.found
    assert found["q"] is found["k"] is found["v"]
    assert found["o"] is not found["q"]
    assert found["q"].tokens == found["o"].tokens == 16


def test_equal_tensors_that_are_not_the_same_do_not_share() -> None:
    layers = {name: nn.Linear(4, 4) for name in "ab"}
    x = torch.randn(8, 4)
    with Gatherer(layers, make) as gatherer:
        gatherer.run(lambda: [layers["a"](x), layers["b"](x.clone())])
    assert gatherer.found["a"] is not gatherer.found["b"]


def test_sharers_part_when_their_inputs_differ() -> None:
    layers = {name: nn.Linear(2, 2) for name in "abc"}
    x, y = integers(3, 2), integers(5, 2)
    with Gatherer(layers, make) as gatherer:
        gatherer.run(lambda: [layers[n](x) for n in "abc"])
        gatherer.run(lambda: [layers["a"](x), layers["b"](y)])
    sums = {"a": 2 * x.T @ x, "b": x.T @ x + y.T @ y, "c": x.T @ x}
    for name, expected in sums.items():
        found = gatherer.found[name]
        assert torch.equal(found.hessian(), expected / found.tokens)


def test_a_layer_called_twice_sees_both_inputs() -> None:
    layers = {"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)}
    x, y = integers(3, 2), integers(5, 2)
    with Gatherer(layers, make) as gatherer:
        for _ in range(2):
            gatherer.run(lambda: [layers["a"](x), layers["b"](x), layers["a"](y)])
    assert torch.equal(gatherer.found["a"].hessian(), (x.T @ x + y.T @ y) / 8)
    assert torch.equal(gatherer.found["b"].hessian(), x.T @ x / 3)


def test_writing_in_place_after_the_call_does_not_reach_the_sums() -> None:
    layers = {name: nn.Linear(2, 2) for name in "ab"}
    x = integers(3, 2)
    before = x.clone()

    def forward() -> None:
        with torch.no_grad():
            layers["a"](x)
            x.add_(1)
            layers["b"](x)

    with Gatherer(layers, make) as gatherer:
        gatherer.run(forward)
    assert torch.equal(gatherer.found["a"].hessian(), before.T @ before / 3)
    after = before + 1
    assert torch.equal(gatherer.found["b"].hessian(), after.T @ after / 3)


def test_later_forwards_stop_after_the_last_layer_and_hooks_go() -> None:
    layer, tail = nn.Linear(2, 2), []
    x = torch.randn(3, 2)

    def forward() -> None:
        layer(x)
        tail.append(1)

    with Gatherer({"a": layer}, make) as gatherer:
        for _ in range(3):
            gatherer.run(forward)
    assert len(tail) == 1
    assert gatherer.found["a"].tokens == 9
    assert not layer._forward_pre_hooks
