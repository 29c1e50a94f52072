"""One layer that trains: what it computes, what moves, and how it is stored again."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hopsparse.formats import BSR, NM, NMPattern, Quantized, parse_form, parse_pattern
from hopsparse.nn import SparseLinear
from hopsparse.plan import TARGETS
from hopsparse.prune import magnitude
from hopsparse.quant import fake_inputs, quantize_matrix, weight_scales
from hopsparse.recover import RecoverOptions, Storage, low_rank_cost
from hopsparse.recover.layers import MaskedLinear
from hopsparse.recover.storage import stored_entries
from hopsparse.recover.student import Student

SCHEMES = ("2:4+int8", "6:8+fp8", "2:4+int4:32", "unstructured:0.5+int8", "dense+int8")


def quantized(form: str) -> SparseLinear:
    parsed = parse_form(form)
    weight = torch.randn(8, 32)
    if parsed.pattern is not None:
        weight = magnitude(weight, parsed.pattern)
    return SparseLinear(quantize_matrix(weight, parsed))


def test_a_group_trains_no_more_entries_than_its_pattern_allows() -> None:
    """1:4 and 3:8 lie in windows with two slots for every four columns: more than they may use."""
    for pattern in (NMPattern(1, 4), NMPattern(3, 8), NMPattern(2, 4), NMPattern(6, 8)):
        weight = magnitude(torch.randn(8, 32), pattern)
        weight[0] = 0
        places = stored_entries(NM.from_dense(weight, pattern))
        assert bool(places[weight != 0].all())
        assert int(places.unflatten(1, (-1, pattern.m)).sum(-1).max()) <= pattern.n
        NM.from_dense(places.float(), pattern)


def test_gradients_of_pruned_weights_are_zero_and_of_the_others_those_of_the_dense_layer() -> None:
    weight = magnitude(torch.randn(8, 16), NMPattern(2, 4))
    layer = MaskedLinear(SparseLinear(NM.from_dense(weight, NMPattern(2, 4))))
    x = torch.randn(5, 16)
    layer(x).square().sum().backward()
    dense = weight.clone().requires_grad_(True)
    torch.nn.functional.linear(x, dense).square().sum().backward()
    assert layer.weight.grad is not None
    assert dense.grad is not None
    kept = weight != 0
    assert torch.equal(layer.weight.grad[kept], dense.grad[kept])
    assert not bool(layer.weight.grad[~kept].any())


def test_slots_of_nm_and_blocks_train_and_zeros_of_others_do_not() -> None:
    weight = torch.zeros(4, 8)
    weight[0, 1] = weight[1, 5] = 3.0
    packed = stored_entries(NM.from_dense(weight, NMPattern(2, 4)))
    assert packed.view(4, 2, 4).sum(-1).tolist() == [[2, 2]] * 4
    assert bool(packed[0, 1])
    assert bool(packed[1, 5])
    blocks = stored_entries(BSR.from_dense(weight, (2, 4)))
    assert blocks.tolist() == [[True] * 8] * 2 + [[False] * 8] * 2
    for fmt in ("csr", "csc", "hyb", "bitmask"):
        linear = torch.nn.Linear(8, 4, bias=False)
        linear.weight.data.copy_(weight)
        found = stored_entries(SparseLinear.from_linear(linear, fmt).matrix)
        assert torch.equal(found, weight != 0)


def test_slots_of_overlapping_windows_obey_the_pattern() -> None:
    """6:8 stores a group in three windows of four columns; a free slot may name any of them."""
    weight = torch.zeros(64, 64)
    weight.view(-1, 8)[::3, 3] = 1.0
    for pattern in ("6:8", "4:6"):
        parsed = parse_pattern(pattern)
        assert isinstance(parsed, NMPattern)
        matrix = NM.from_dense(weight[:, : 8 * parsed.m], parsed)
        slots = stored_entries(matrix)
        assert int(slots.view(-1, parsed.m).sum(-1).max()) <= parsed.n
        assert bool(slots[matrix.to_dense() != 0].all())


@pytest.mark.parametrize("form", SCHEMES)
def test_a_quantized_layer_trains_as_it_will_run(form: str) -> None:
    sparse, x = quantized(form), torch.randn(3, 32)
    layer = MaskedLinear(sparse)
    matrix = sparse.matrix
    assert isinstance(matrix, Quantized)
    expected = torch.nn.functional.linear(fake_inputs(x, matrix.scheme), matrix.to_dense())
    assert torch.equal(layer(x), expected)
    assert torch.equal(layer.packed().to_dense(), sparse.to_dense())


@pytest.mark.parametrize("form", SCHEMES)
def test_what_is_packed_is_what_was_trained(form: str) -> None:
    sparse, x = quantized(form), torch.randn(3, 32)
    layer = MaskedLinear(sparse)
    with torch.no_grad():
        layer.weight.add_(torch.randn(8, 32), alpha=0.3)
    layer.clean()
    layer.rescale()
    packed = layer.packed()
    matrix = packed.matrix
    assert isinstance(matrix, Quantized)
    matrix.validate()
    assert matrix.attributes()["scheme"] == str(parse_form(form).scheme)
    assert torch.equal(
        layer(x), torch.nn.functional.linear(fake_inputs(x, matrix.scheme), packed.to_dense())
    )
    assert not bool((packed.to_dense() != 0)[layer.pruned].any())


def test_gradients_pass_the_rounding_and_stop_at_zeros() -> None:
    layer = MaskedLinear(quantized("2:4+int8"))
    layer(torch.ones(1, 32)).sum().backward()
    assert layer.weight.grad is not None
    assert not bool(layer.weight.grad[layer.pruned].any())
    assert bool((layer.weight.grad[~layer.pruned] != 0).all())


def test_scales_follow_when_asked() -> None:
    layer = MaskedLinear(quantized("2:4+int8"))
    before: Tensor | None = layer.scales
    with torch.no_grad():
        layer.weight.mul_(2)
    assert layer.scales is before
    layer.rescale()
    scheme = parse_form("2:4+int8").scheme
    assert scheme is not None
    assert torch.equal(layer.scales, weight_scales(layer.weight.detach(), scheme))  # type: ignore[arg-type]


def test_storage_remembers_everything_but_the_numbers() -> None:
    weight = magnitude(torch.randn(64, 64), NMPattern(6, 8))
    for matrix in (NM.from_dense(weight, NMPattern(6, 8)), BSR.from_dense(weight, (16, 16))):
        again = Storage.of(matrix).pack(weight)
        assert again.attributes() == matrix.attributes()
        assert all(torch.equal(part, matrix.parts()[name]) for name, part in again.parts().items())
        half = Storage.of(matrix).with_dtype(torch.bfloat16).pack(weight)
        assert half.dtype == torch.bfloat16


def test_low_rank_costs_both_factors_and_both_products() -> None:
    shapes = [(576, 576), (1536, 576)]
    one, two = (low_rank_cost(shapes, rank, TARGETS["h200"]) for rank in (8, 16))
    assert one.bytes == 8 * (576 + 576 + 1536 + 576) * 2
    assert two.bytes == 2 * one.bytes
    # Four products, none faster than a launch.
    assert one.time_us >= 4 * TARGETS["h200"].launch_us


class Shared(torch.nn.Module):
    """Three layers that are called with one tensor, as queries, keys and values are."""

    def __init__(self, forms: tuple[str, ...]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(quantized(form) for form in forms)
        self.gain = torch.nn.Parameter(torch.ones(32))

    def forward(self, x: Tensor) -> Tensor:
        normed = x * self.gain
        return torch.cat([layer(normed) for layer in self.layers], -1)


@pytest.mark.parametrize(
    ("forms", "roundings", "shared"),
    [(("2:4+int8",) * 3, 3, 1), (("2:4+int8", "2:4+fp8", "2:4+int4:32"), 2, 2)],
)
def test_layers_of_a_student_round_a_shared_input_once(
    forms: tuple[str, ...], roundings: int, shared: int
) -> None:
    x = torch.randn(5, 32)
    student, alone = Student(Shared(forms), RecoverOptions(train="all")), Shared(forms)
    alone.layers = torch.nn.ModuleList(MaskedLinear(layer) for layer in alone.layers)
    results = []
    for model, count in ((student.model, shared), (alone, roundings)):
        with torch.profiler.profile() as profile:
            y = model(x)
        # Each rounding looks for the largest entry of a token.
        assert sum(event.name == "aten::amax" for event in profile.events()) == count
        y.square().sum().backward()
        results.append([y, *(parameter.grad for parameter in model.parameters())])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
    student.before_step()
    assert student.layers["layers.0"]._shared._x is None


@pytest.mark.parametrize("form", ["2:4+int8", "2:4+int4:32", "6:8+fp8"])
def test_mixed_precision_rounds_in_float32_and_multiplies_in_16_bits(form: str) -> None:
    layer, x = MaskedLinear(quantized(form)), torch.randn(3, 32, requires_grad=True)
    scheme = parse_form(form).scheme
    assert scheme is not None
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
        y.float().sum().backward()
        narrow = layer(x.detach().bfloat16())
    weight = layer.packed().to_dense().bfloat16()
    for found, inputs in ((y, x.detach()), (narrow, x.detach().bfloat16())):
        rounded = fake_inputs(inputs, scheme).bfloat16()
        assert torch.equal(found, torch.nn.functional.linear(rounded, weight))
    assert layer.weight.grad is not None
    assert layer.weight.grad.dtype == torch.float32
