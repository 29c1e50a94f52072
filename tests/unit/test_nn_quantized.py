"""SparseLinear with a quantized weight: what it computes, and where it can go."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from hopsparse.errors import ArgumentError, UnsupportedError
from hopsparse.formats import MatrixFacts, parse_form, parse_pattern
from hopsparse.measure.error import product_bound
from hopsparse.nn import SparseLinear
from hopsparse.ops import decompress
from hopsparse.prune import magnitude
from hopsparse.quant import quantize_matrix, round_inputs

FORMS = (
    "2:4+int8",
    "2:4+int8:64/none",
    "2:4+int8/int8:static",
    "6:8+fp8",
    "4:8+int4:32",
    "dense+int4:32/int4",
    "unstructured:0.5+int4/fp8",
    "block:16x16+fp8:64/fp8:static",
)


def quantized_layer(form: str, dtype: torch.dtype = torch.float32) -> SparseLinear:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(48, 64, generator=generator)
    pattern, scheme = parse_form(form).pattern, parse_form(form).scheme
    weight = weight if pattern is None else magnitude(weight, pattern)
    scale = torch.tensor([0.02]) if scheme is not None and scheme.static else None
    bias = torch.randn(48, generator=generator).to(dtype)
    layer = SparseLinear(quantize_matrix(weight, form, dtype=dtype, input_scale=scale), bias)
    return layer.requires_grad_(False)


def inputs(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(1)).to(dtype)


def parts_of(layer: SparseLinear) -> dict[str, Tensor]:
    return {name: part.clone() for name, part in layer.matrix.parts().items()}


def assert_same_parts(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, part in one.items():
        assert part.dtype == other[name].dtype
        assert torch.equal(part.view(torch.uint8), other[name].view(torch.uint8))


@pytest.fixture(params=FORMS)
def layer(request: pytest.FixtureRequest) -> SparseLinear:
    return quantized_layer(request.param)


@pytest.mark.parametrize("keep", [True, False])
def test_the_product_is_that_of_the_rounded_numbers(layer: SparseLinear, keep: bool) -> None:
    layer.keep_decoded = keep
    matrix, x = layer.matrix, inputs()
    rounded = round_inputs(x, matrix.scheme, matrix.input_scale)
    expected = F.linear(rounded, matrix.to_dense(torch.float32), layer.bias)
    assert torch.equal(layer(x), expected)
    assert torch.equal(layer(x), expected)
    exact = matrix.scheme.activations == "none"
    assert torch.equal(rounded, x) == exact


def test_small_integers_are_exact() -> None:
    """Scales are powers of two and every code is what it was: no bit is lost anywhere."""
    generator = torch.Generator().manual_seed(3)
    weight = torch.randint(-8, 8, (16, 64), generator=generator).float()
    weight = magnitude(weight, parse_pattern("2:4"))
    weight[:, 0] = 127.0
    weight[:, 1:4] = 0.0
    x = torch.randint(-9, 9, (7, 64), generator=generator).float()
    x[:, 1] = -127.0
    for dtype in (torch.float32, torch.bfloat16):
        layer = SparseLinear(quantize_matrix(weight, "2:4+int8", dtype=dtype))
        assert torch.equal(
            layer(x.to(dtype)).double(), (x.double() @ weight.double().T).to(dtype).double()
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bit_inputs_multiply_the_rounded_weight_in_float32(dtype: torch.dtype) -> None:
    for form in FORMS:
        layer, x = quantized_layer(form, dtype), inputs(dtype)
        matrix = layer.matrix
        rounded = round_inputs(x, matrix.scheme, matrix.input_scale)
        exact = F.linear(rounded.double(), matrix.to_dense().double(), layer.bias.double())
        y = layer(x)
        assert y.dtype == dtype
        bound = product_bound(rounded, matrix.to_dense(), torch.float32, dtype, layer.bias)
        assert bool(((y.double() - exact).abs() <= bound).all())


def test_a_cast_touches_neither_codes_nor_scales(layer: SparseLinear) -> None:
    before, x = parts_of(layer), inputs()
    expected = layer(x)
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        layer.to(dtype)
        assert_same_parts(parts_of(layer), before)
        assert (layer.values_dtype, layer.matrix.dtype, layer.bias.dtype) == (dtype,) * 3
        assert layer(x.to(dtype)).dtype == dtype
        layer.matrix.validate()
    layer.bias.copy_(quantized_layer("2:4+int8").bias)
    assert torch.equal(layer(x), expected)
    layer.half()
    assert layer.values_dtype == torch.float16
    layer.float()
    assert_same_parts(parts_of(layer), before)
    with pytest.raises(ArgumentError, match="a cast of a sparse weight to torch.float64"):
        layer.double()
    assert layer.values_dtype == torch.float32


def test_copies_states_and_files(layer: SparseLinear, tmp_path: Path) -> None:
    x, parts = inputs(), parts_of(layer)
    expected = layer(x)
    buffer = io.BytesIO()
    torch.save(layer.state_dict(), buffer)
    buffer.seek(0)
    save_file(layer.state_dict(), tmp_path / "layer.safetensors")
    facts = MatrixFacts.of(layer.matrix)
    for state in (
        torch.load(buffer, weights_only=True),
        load_file(tmp_path / "layer.safetensors"),
    ):
        empty = SparseLinear.empty(
            facts.shape, facts.torch_dtype, facts.format, facts.attributes, bias=True
        )
        empty.load_state_dict(state)
        assert_same_parts(parts_of(empty), parts)
        assert torch.equal(empty(x), expected)
    for twin in (copy.deepcopy(layer), copy.copy(layer)):
        assert torch.equal(twin(x), expected)
        assert repr(twin) == repr(layer)
    meta = SparseLinear.empty(
        facts.shape, facts.torch_dtype, facts.format, facts.attributes, device="meta"
    )
    assert meta.to(torch.bfloat16).values_dtype == torch.bfloat16
    assert meta.to_empty(device="cpu").matrix.device.type == "cpu"


def test_pickled_whole() -> None:
    """Without fp8: plain pickle of torch knows no storage of that type."""
    layer, x = quantized_layer("2:4+int4:32/int8:static"), inputs()
    twin = pickle.loads(pickle.dumps(layer))
    assert torch.equal(twin(x), layer(x))


def test_damaged_parts_are_not_loaded() -> None:
    layer = quantized_layer("2:4+int8")
    state = layer.state_dict()
    state["scales"] = -state["scales"]
    with pytest.raises(RuntimeError, match="the parts of this layer are no quantized matrix"):
        quantized_layer("2:4+int8").load_state_dict(state)


def test_changed_codes_are_decoded_again() -> None:
    layer, x = quantized_layer("2:4+int8"), inputs()
    first = layer(x)
    layer.scales.mul_(2.0)
    rounded = round_inputs(x, layer.matrix.scheme)
    assert torch.equal(layer(x), F.linear(rounded, layer.to_dense(), layer.bias))
    assert not torch.equal(layer(x), first)


def test_one_graph_with_the_same_result(layer: SparseLinear) -> None:
    torch._dynamo.reset()  # Layers that other tests compiled count towards the limit of graphs.
    x = inputs()
    expected = layer(x)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), expected)


def test_gradients_pass_to_inputs_and_stop_at_codes() -> None:
    layer, x = quantized_layer("2:4+int8"), inputs().requires_grad_()
    layer(x).sum().backward()
    assert x.grad is not None
    ones = torch.ones(2, 5, 48)
    assert torch.equal(x.grad, ones @ layer.to_dense())
    matrix = layer.matrix
    matrix.scales.requires_grad_()
    with pytest.raises(UnsupportedError, match="a gradient of stored codes or scales"):
        decompress(matrix)


def test_autocast_and_inference_mode(layer: SparseLinear) -> None:
    x = inputs()
    expected = layer(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x.bfloat16())
    assert y.dtype == torch.bfloat16
    with torch.inference_mode():
        assert torch.equal(layer(x), expected)


def test_arguments_that_do_not_fit() -> None:
    for form in ("2:4+int8", "2:4+int8/int8:static"):
        layer = quantized_layer(form)
        for x in (torch.ones(2, 63), torch.ones(2, 64, dtype=torch.float16), torch.tensor(1.0)):
            with pytest.raises(ArgumentError, match="linear: x"):
                layer(x)
        with pytest.raises(ArgumentError, match="linear: x"):
            layer(torch.ones(2, 64, device="meta"))
        assert layer(torch.ones(0, 64)).shape == (0, 48)


def test_plan_and_repr_say_the_scheme() -> None:
    layer = quantized_layer("2:4+int8", torch.bfloat16)
    assert layer.plan(inputs()).describe() == (
        "linear runs reference: int8 weights, inputs rounded per token; x is on the CPU; "
        f"w is decoded once and kept, {48 * 64 * 2} bytes"
    )
    assert "quantized(codes=nm, scheme=int8, pattern=2:4), bfloat16" in repr(layer)
    four = quantized_layer("4:8+int4:32").plan(inputs())
    assert four.why.startswith("int4 weights by groups of 32; x is on the CPU")
    static = quantized_layer("block:16x16+fp8:64/fp8:static").plan(inputs())
    assert "fp8 weights by groups of 64, inputs rounded by one measured scale" in static.why


def test_a_dense_layer_cannot_be_quantized_by_token() -> None:
    with pytest.raises(ArgumentError, match="format 'quantized'"):
        SparseLinear.from_linear(nn.Linear(4, 4), "quantized")
