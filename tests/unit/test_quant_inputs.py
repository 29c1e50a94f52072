"""Rounding of inputs, measured scales, and gradients that pass through rounding."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hopsparse.errors import ArgumentError, CalibrationError
from hopsparse.formats import Scheme, parse_scheme
from hopsparse.prune import Gatherer, Statistics
from hopsparse.quant import (
    InputPeak,
    Rounding,
    expand_scales,
    fake_inputs,
    fake_weight,
    input_scales,
    measure_scales,
    round_inputs,
    round_weight,
    rounded_inputs,
    weight_scales,
)

LARGEST = {"int8": 127, "fp8": 448, "int4": 7}
KINDS = sorted(LARGEST)
SPECIAL = (float("nan"), float("inf"), -float("inf"))


def scheme_of(activations: str, static: bool = False) -> Scheme:
    return Scheme("int8", 0, activations, static)


def random_inputs(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(3, 5, 40, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("kind", KINDS)
def test_integers_up_to_the_largest_code_stay_what_they_are(kind: str) -> None:
    """The scale is 1, so that small integers lie on every grid."""
    x = torch.tensor([[float(LARGEST[kind]), -3.0, 0.0, 2.0], [-float(LARGEST[kind]), 1, 0, 0]])
    assert torch.equal(round_inputs(x, scheme_of(kind)), x)
    assert torch.equal(round_inputs(x, scheme_of(kind, True), torch.ones(1)), x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_every_token_has_a_scale_of_its_own(kind: str, dtype: torch.dtype) -> None:
    x = random_inputs(dtype)
    x[1] *= 100
    whole = round_inputs(x, scheme_of(kind))
    assert whole.dtype == dtype
    for place in ((0, 0), (1, 4), (2, 3)):
        assert torch.equal(whole[place], round_inputs(x[place], scheme_of(kind)))
        levels = (whole[place].float() / input_scales(x[place], scheme_of(kind))).round()
        assert int(levels.abs().max()) == LARGEST[kind]
    assert len(whole.unique()) < x.numel()


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_of_zeros_and_no_tokens(kind: str) -> None:
    x = torch.zeros(4, 8)
    x[1] = -0.0
    assert not round_inputs(x, scheme_of(kind)).view(torch.int32).any()
    assert round_inputs(x[:0], scheme_of(kind)).shape == (0, 8)
    tiny = torch.full((1, 2), torch.finfo(torch.float32).smallest_normal / 8)
    assert bool(round_inputs(tiny, scheme_of(kind)).isfinite().all())


@pytest.mark.parametrize("value", SPECIAL)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_finite_is_never_hidden(kind: str, value: float) -> None:
    x = random_inputs()
    x[1, 2, 3] = value
    dynamic = round_inputs(x, scheme_of(kind))
    assert bool(dynamic[1, 2].isnan().all())
    dynamic[1, 2], x[1, 2] = 0.0, 0.0
    assert torch.equal(dynamic, round_inputs(x, scheme_of(kind)))
    static = round_inputs(torch.tensor([value, 1.0]), scheme_of(kind, True), torch.ones(1))
    assert str(static[0].item()) == str(value)
    assert float(static[1]) == 1.0


def test_a_static_scale_clips_and_is_required() -> None:
    scheme = parse_scheme("int8/int4:static")
    x = torch.tensor([100.0, -100.0, 3.4])
    assert round_inputs(x, scheme, torch.ones(1)).tolist() == [7.0, -8.0, 3.0]
    with pytest.raises(ArgumentError, match="without a scale"):
        round_inputs(x, scheme)
    plain = parse_scheme("int4")
    assert round_inputs(x, plain) is x
    assert fake_inputs(x, plain) is x


def test_the_peak_is_the_largest_magnitude_of_all_batches() -> None:
    peak, scheme = InputPeak(), scheme_of("int8", True)
    for x in (torch.tensor([[1.0]]), torch.zeros(0, 4), torch.tensor([[-254.0]]), torch.ones(2, 2)):
        peak.add(x)
    assert peak.scale(scheme).tolist() == [2.0]
    zero = InputPeak()
    zero.add(torch.zeros(3, 4))
    assert zero.scale(scheme).tolist() == [1.0]
    bad = InputPeak()
    bad.add(torch.tensor([float("inf")]))
    for empty in (InputPeak(), bad):
        with pytest.raises(CalibrationError, match="int8/int8:static"):
            empty.scale(scheme)


def test_measuring_names_the_layer_that_saw_nothing() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    scheme = scheme_of("int8", True)
    layers = {name: (layer, scheme) for name, layer in model.items()}
    with pytest.raises(CalibrationError, match="layer b: no input token"):
        measure_scales(layers, lambda: model["a"](torch.ones(1, 2)))
    assert not any(layer._forward_pre_hooks for layer in model.values())
    found = measure_scales(
        layers, lambda: model["b"](input=model["a"](torch.ones(1, 2)) * 0 + 127.0)
    )
    assert found["b"].tolist() == [1.0]


def test_layers_round_while_the_context_is_open_and_share_what_they_shared() -> None:
    torch.manual_seed(0)
    layers = {name: nn.Linear(8, 4) for name in "abc"}
    x, scheme = torch.randn(6, 8), scheme_of("int4")
    how = {"a": Rounding(scheme), "b": Rounding(scheme), "c": Rounding(scheme_of("fp8"))}
    before = layers["a"](x)
    with rounded_inputs((layers[name], rounding) for name, rounding in how.items()):
        assert torch.equal(
            layers["a"](x), nn.functional.linear(round_inputs(x, scheme), *params(layers["a"]))
        )
        assert torch.equal(layers["a"](input=x), layers["a"](x))
        with Gatherer(layers, lambda inputs: Statistics(8)) as gatherer:
            gatherer.run(lambda: [layer(x) for layer in layers.values()])
        assert gatherer.found["a"] is gatherer.found["b"]
        assert gatherer.found["a"] is not gatherer.found["c"]
        old = layers["a"](x)
        x.mul_(2.0)  # A change in place is another input.
        assert torch.equal(
            layers["a"](x), nn.functional.linear(round_inputs(x, scheme), *params(layers["a"]))
        )
        assert not torch.equal(layers["a"](x), old)
        x.div_(2.0)
    assert torch.equal(layers["a"](x), before)
    assert not any(layer._forward_pre_hooks for layer in layers.values())


def params(layer: nn.Linear) -> tuple[Tensor, Tensor]:
    return layer.weight, layer.bias


@pytest.mark.parametrize("text", ["int8", "fp8:32", "int4:32"])
def test_fake_weights_have_the_values_of_rounding_bit_for_bit(text: str) -> None:
    scheme = parse_scheme(text)
    weight = torch.randn(6, 70, generator=torch.Generator().manual_seed(1))
    weight[:, ::2] = 0.0
    weight[2] = 0.0
    for dtype in (torch.float32, torch.bfloat16):
        leaf = weight.to(dtype, copy=True).requires_grad_()
        faked = fake_weight(leaf, scheme)
        assert torch.equal(faked, round_weight(leaf.detach(), scheme))
        assert not faked[:, ::2].any()
        (faked * 3).sum().backward()
        assert leaf.grad is not None
        wide = expand_scales(weight_scales(leaf.detach(), scheme), 70, scheme)
        nearest = leaf.detach().float() / wide
        if scheme.weights == "fp8":
            clipped = torch.zeros_like(nearest, dtype=torch.bool)  # The largest is kept.
        else:
            least = -8 if scheme.weights == "int4" else -127
            clipped = (nearest.round() > LARGEST[scheme.weights]) | (nearest.round() < least)
        assert torch.equal(leaf.grad == 0, clipped)
        assert set(leaf.grad.unique().tolist()) <= {0.0, 3.0}


def test_training_with_fake_rounding_keeps_zeros_and_learns_the_grid() -> None:
    torch.manual_seed(0)
    scheme = parse_scheme("int4:32")
    target, x = torch.randn(4, 32) * 0.1, torch.randn(256, 32)
    weight = (target + 0.05 * torch.randn(4, 32)).requires_grad_()
    mask = torch.rand(4, 32) > 0.5
    optimizer = torch.optim.Adam([weight], 1e-2)
    losses = []
    for _ in range(60):
        faked = fake_weight(weight * mask, scheme)
        loss = ((x @ faked.T - x @ (target * mask).T) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        assert not faked[~mask].any()
    assert losses[-1] < losses[0] / 4


# The compiler makes a context of a Function, and keeps that warning quiet unless it is an error.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_fake_rounding_is_one_graph(kind: str) -> None:
    scheme = Scheme(kind, 0, kind)

    def step(x: Tensor, weight: Tensor) -> Tensor:
        return fake_inputs(x, scheme) @ fake_weight(weight, scheme).T

    x, weight = random_inputs(), torch.randn(6, 40, requires_grad=True)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, weight), step(x, weight))


@pytest.mark.parametrize("static", [False, True])
def test_tangents_and_functional_gradients_pass_as_gradients_do(static: bool) -> None:
    scheme, scale = scheme_of("int8", static), torch.tensor([0.01]) if static else None
    x, moved = random_inputs().requires_grad_(), torch.randn(3, 5, 40)

    def rounded(x: Tensor) -> Tensor:
        return fake_inputs(x, scheme, scale)

    (passed,) = torch.autograd.grad(rounded(x), x, moved)
    assert static == bool((passed == 0).any())  # where the static scale clips
    x = x.detach()
    found, tangent = torch.func.jvp(rounded, (x,), (moved,))
    assert torch.equal(found, round_inputs(x, scheme, scale))
    assert torch.equal(tangent, passed)
    of_sum = torch.func.grad(lambda x: (rounded(x) * moved).sum())(x)
    assert torch.equal(of_sum, passed)
