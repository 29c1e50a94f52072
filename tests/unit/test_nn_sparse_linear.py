"""SparseLinear behaves as the nn.Linear it replaces, wherever a module can go."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from hopsparse.errors import ArgumentError, FormatError
from hopsparse.formats import BSR, FORMATS, NM, NMPattern
from hopsparse.measure.error import product_bound
from hopsparse.nn import SparseLinear
from hopsparse.ops import _product

FORMAT_NAMES = sorted(FORMATS)


def dense_layer(dtype: torch.dtype = torch.float32, bias: bool = True) -> nn.Linear:
    linear = nn.Linear(64, 48, bias=bias).requires_grad_(False)
    linear.weight.view(-1, 4)[:, 1:3] = 0.0
    return linear.to(dtype)


def all_parts(layer: SparseLinear) -> dict[str, Tensor]:
    return {**layer.matrix.parts(), "bias": layer.bias}


def assert_same(first: SparseLinear, second: SparseLinear) -> None:
    assert first.matrix.shape == second.matrix.shape
    assert first.matrix.attributes() == second.matrix.attributes()
    for name, part in all_parts(first).items():
        other = all_parts(second)[name]
        assert part.dtype == other.dtype
        assert torch.equal(part, other)


@pytest.fixture(params=FORMAT_NAMES)
def layer(request: pytest.FixtureRequest) -> SparseLinear:
    return SparseLinear.from_linear(dense_layer(), request.param)


def test_output_equals_the_dense_layer_bit_for_bit(layer: SparseLinear) -> None:
    torch.manual_seed(0)
    dense = nn.Linear(64, 48).requires_grad_(False)
    dense.weight.copy_(layer.to_dense())
    dense.bias.copy_(layer.bias)
    x = torch.randn(2, 5, 64)
    assert torch.equal(layer(x), dense(x))
    layer.keep_decoded = False
    assert torch.equal(layer(x), dense(x))


def test_says_what_it_is() -> None:
    layer = SparseLinear.from_linear(dense_layer(torch.bfloat16))
    assert (layer.in_features, layer.out_features) == (64, 48)
    assert "nm(pattern=2:4), bfloat16, 4608 bytes" in repr(layer)
    assert sorted(layer.state_dict()) == ["bias", "meta", "values"]
    plan = layer.plan(torch.ones(1, 64))
    assert (plan.op, plan.name) == ("spmm_nm", "reference")


@pytest.mark.parametrize("fmt", FORMAT_NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_plan_tells_the_memory_it_keeps(fmt: str, dtype: torch.dtype) -> None:
    layer, x = SparseLinear.from_linear(dense_layer(dtype), fmt), torch.ones(1, 64, dtype=dtype)
    said = layer.plan(x).describe()
    layer(x)
    kept = layer._decoded[1]
    assert kept.dtype == dtype
    assert said.endswith(f"w is decoded once and kept, {kept.nbytes} bytes")
    layer.keep_decoded = False
    assert layer.plan(x).why.endswith("w is decoded at every call")


def test_state_dict_round_trip(layer: SparseLinear) -> None:
    matrix = layer.matrix
    fresh = SparseLinear.empty(
        matrix.shape, matrix.dtype, matrix.name, matrix.attributes(), bias=True
    )
    fresh.load_state_dict(layer.state_dict())
    assert_same(layer, fresh)


def test_meta_device_allocates_nothing_and_takes_assigned_tensors(layer: SparseLinear) -> None:
    matrix = layer.matrix
    with torch.device("meta"):
        fresh = SparseLinear.empty(
            matrix.shape, matrix.dtype, matrix.name, matrix.attributes(), bias=True
        )
    assert all(part.is_meta for part in all_parts(fresh).values())
    fresh.load_state_dict(layer.state_dict(), assign=True)
    assert_same(layer, fresh)


def test_copies_and_pickles_leave_the_decoded_weight_behind(layer: SparseLinear) -> None:
    x = torch.randn(3, 64)
    expected = layer(x)
    assert layer._decoded is not None
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert twin._decoded is None
        assert_same(layer, twin)
        assert torch.equal(twin(x), expected)


def test_torch_save_needs_no_pickled_code(layer: SparseLinear) -> None:
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    twin = copy.deepcopy(layer)
    for part in twin.state_dict().values():
        part.zero_()
    twin.load_state_dict(state)
    assert_same(layer, twin)


def test_safetensors(layer: SparseLinear, tmp_path: Path) -> None:
    save_file(layer.state_dict(), tmp_path / "layer.safetensors")
    twin = copy.deepcopy(layer)
    twin.load_state_dict(load_file(tmp_path / "layer.safetensors"), assign=True)
    assert_same(layer, twin)


@pytest.mark.parametrize("cast", [torch.bfloat16, torch.float16], ids=str)
def test_casts_touch_values_only(layer: SparseLinear, cast: torch.dtype) -> None:
    before = {name: part.clone() for name, part in all_parts(layer).items()}
    dense = layer.to_dense()
    layer(torch.ones(1, 64))
    assert layer.to(cast) is layer
    assert layer._decoded is None
    for name, part in all_parts(layer).items():
        assert part.dtype == (cast if before[name].is_floating_point() else before[name].dtype)
    layer.matrix.validate()
    assert torch.equal(layer.to_dense(), dense.to(cast))
    x = torch.randn(3, 64)
    assert layer(x.to(cast)).dtype == cast
    layer.type(torch.float32)  # reaches integer buffers too, unless they are guarded
    layer.matrix.validate()


def test_small_blocks_are_aligned_again_by_a_cast() -> None:
    layer = SparseLinear.from_linear(dense_layer(), "bsr", block=(4, 4))
    dense = layer.to_dense()
    layer.bfloat16()
    layer.matrix.validate()
    assert torch.equal(layer.to_dense(), dense.bfloat16())


def test_eight_bit_values_keep_their_dtype() -> None:
    weight = dense_layer().weight.to(torch.float8_e4m3fn)
    layer = SparseLinear(NM.from_dense(weight))
    layer.bfloat16()
    layer.matrix.validate()
    assert torch.equal(layer.to_dense().float(), weight.float())


def test_cast_to_double_is_refused_before_anything_changes() -> None:
    layer = SparseLinear.from_linear(dense_layer())
    with pytest.raises(ArgumentError, match=r"cast of a sparse weight to torch\.float64"):
        layer.double()
    assert layer.bias.dtype == layer.matrix.dtype == torch.float32


class TestDecodedWeight:
    x = torch.ones(1, 64)

    def test_is_made_once(self, layer: SparseLinear) -> None:
        layer(self.x)
        kept = layer._decoded
        layer(self.x)
        assert layer._decoded is kept

    def test_notices_changes_in_place_and_replacements(self) -> None:
        layer = SparseLinear.from_linear(dense_layer(bias=False))
        first = layer(self.x)
        layer.values.mul_(2)
        assert torch.equal(layer(self.x), 2 * first)
        layer.values = layer.values / 2
        assert torch.equal(layer(self.x), first)
        state = {name: torch.zeros_like(part) for name, part in layer.state_dict().items()}
        state["meta"] = layer.meta.clone()
        layer.load_state_dict(state)
        assert not layer(self.x).any()

    def test_of_inference_mode_serves_training_later(self) -> None:
        layer = SparseLinear.from_linear(dense_layer()).requires_grad_(True)
        with torch.inference_mode():
            layer(self.x)
        x = self.x.clone().requires_grad_()
        layer(x)[0, 7].backward()
        assert torch.equal(x.grad[0], layer.to_dense()[7])
        assert layer.bias.grad.nonzero().tolist() == [[7]]

    def test_can_be_turned_off(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(SparseLinear, "keep_decoded", False)
        layer = SparseLinear.from_linear(dense_layer())
        layer(self.x)
        assert layer._decoded is None

    def test_is_not_made_for_trained_values(self) -> None:
        layer = SparseLinear.from_linear(dense_layer())
        layer.values = nn.Parameter(layer.values)
        layer(self.x).sum().backward()
        assert layer._decoded is None
        assert torch.equal(layer.values.grad != 0, layer.values != 0)
        assert "values" in layer.state_dict()


@pytest.mark.parametrize("fmt", FORMAT_NAMES)
def test_compiles_to_one_graph_for_any_number_of_tokens(fmt: str) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    layer = SparseLinear.from_linear(dense_layer(), fmt)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=counter)
    for tokens in (2, 3, 7, 17, 160):
        x = torch.randn(tokens, 64)
        assert torch.equal(compiled(x), layer(x))
    assert counter.frame_count == 1


def test_an_exported_program_runs_where_hopsparse_is_imported(tmp_path: Path) -> None:
    """Importing the package registers its operators, also where none of its names is used."""
    layer = SparseLinear.from_linear(dense_layer(), "nm").requires_grad_(False)
    x = torch.randn(2, 64)
    # Inside another module: torch finds no room for a buffer `meta` at the top of a program.
    exported = torch.export.export(nn.Sequential(layer), (x,))
    torch.export.save(exported, tmp_path / "layer.pt2")
    save_file({"x": x, "y": layer(x)}, tmp_path / "xy.safetensors")
    program = (
        "import sys, torch, hopsparse\n"
        "from safetensors.torch import load_file\n"
        "xy = load_file(sys.argv[2])\n"
        "exported = torch.export.load(sys.argv[1]).module()\n"
        "assert torch.equal(exported(xy['x']), xy['y'])\n"
    )
    paths = [str(tmp_path / name) for name in ("layer.pt2", "xy.safetensors")]
    subprocess.run([sys.executable, "-c", program, *paths], check=True)


def test_compiled_training_step() -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    layer = SparseLinear.from_linear(dense_layer()).requires_grad_(True)
    layer.values = nn.Parameter(layer.values)
    twin = copy.deepcopy(layer)
    x = torch.randn(5, 64)
    compiled = torch.compile(layer, fullgraph=True, backend=CompileCounterWithBackend("aot_eager"))
    compiled(x).square().sum().backward()
    twin(x).square().sum().backward()
    assert torch.equal(layer.values.grad, twin.values.grad)
    assert torch.equal(layer.bias.grad, twin.bias.grad)


def test_autocast_follows_the_weight() -> None:
    layer = SparseLinear.from_linear(dense_layer(torch.bfloat16))
    x = torch.randn(3, 64)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(layer(x), layer(x.bfloat16()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("cast", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_returns_what_the_dense_layer_returns(
    dtype: torch.dtype, given: torch.dtype, cast: torch.dtype
) -> None:
    dense = dense_layer(dtype)
    sparse, x = SparseLinear.from_linear(dense), torch.ones(3, 64, dtype=given)
    with torch.autocast("cpu", cast):
        assert sparse(x).dtype == dense(x).dtype == cast
    assert sparse(x.to(dtype)).dtype == dtype


@pytest.mark.parametrize("tokens", [(), (1,), (1, 1), (2,), (3, 5), (0,)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_sixteen_bit_weights_are_multiplied_in_float32_pieces(
    tokens: tuple[int, ...], dtype: torch.dtype, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_product, "WIDE_ELEMENTS", 5 * 64)  # 48 rows, the last piece ragged
    dense = dense_layer(dtype, bias)
    layer, x = SparseLinear.from_linear(dense), torch.randn(*tokens, 64).to(dtype)
    y = layer(x)
    assert y.dtype == dtype
    assert y.shape == (*tokens, 48)
    exact = x.double() @ dense.weight.double().T
    exact = exact + dense.bias.double() if bias else exact
    bound = product_bound(x, dense.weight, torch.float32, dtype, dense.bias)
    assert ((y.double() - exact).abs() <= bound).all()


def test_meta_forward_gives_the_shape() -> None:
    layer = SparseLinear.from_linear(dense_layer()).to("meta")
    assert layer(torch.ones(2, 3, 64, device="meta")).shape == (2, 3, 48)


def test_wrong_width_is_refused(layer: SparseLinear) -> None:
    with pytest.raises(ArgumentError, match=r"x of shape \[3, 60\]"):
        layer(torch.ones(3, 60))


class TestConstruction:
    def test_pattern_as_text(self) -> None:
        layer = SparseLinear.from_linear(dense_layer(), pattern="6:8")
        assert layer.matrix.pattern == NMPattern(6, 8)

    def test_block(self) -> None:
        layer = SparseLinear.from_linear(dense_layer(), "bsr", block=(16, 16))
        assert isinstance(layer.matrix, BSR)
        assert layer.matrix.block == (16, 16)

    def test_the_bias_is_shared(self) -> None:
        linear = dense_layer()
        assert SparseLinear.from_linear(linear).bias is linear.bias

    def test_dense_weight_is_refused(self) -> None:
        with pytest.raises(FormatError, match="row 0, group 0"):
            SparseLinear.from_linear(nn.Linear(8, 8))

    def test_unknown_format_option_and_module(self) -> None:
        with pytest.raises(ArgumentError, match="format 'coo'"):
            SparseLinear.from_linear(dense_layer(), "coo")
        with pytest.raises(ArgumentError, match="options \\['block'\\] for format 'csr'"):
            SparseLinear.from_linear(dense_layer(), "csr", block=(4, 4))
        with pytest.raises(ArgumentError, match="class ReLU"):
            SparseLinear.from_linear(nn.ReLU())  # type: ignore[arg-type]

    def test_bias_of_wrong_length(self) -> None:
        with pytest.raises(ArgumentError, match=r"bias of shape \[5\]"):
            SparseLinear(NM.from_dense(torch.zeros(4, 4)), torch.zeros(5))


def test_only_matrices_of_known_shape_and_dtype_become_layers() -> None:
    with pytest.raises(ArgumentError, match="a Tensor as the matrix"):
        SparseLinear(torch.eye(4))  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="a module of class LazyLinear"):
        SparseLinear.from_linear(nn.LazyLinear(4))
    with pytest.raises(ArgumentError, match="int64"):
        SparseLinear(NM.from_dense(torch.zeros(4, 4)), torch.ones(4, dtype=torch.int64))
    for shape, dtype in (((-1, 4), torch.float32), ((4, 8), torch.float64)):
        with pytest.raises(FormatError):
            SparseLinear.empty(shape, dtype, "nm", {"pattern": "2:4"})


@pytest.mark.parametrize("assign", [False, True])
def test_parts_of_another_matrix_are_refused(assign: bool) -> None:
    """[8, 48] and [8, 64] fill the same tiles, and so do 2:4 and 1:4."""
    other = SparseLinear(NM.from_dense(torch.ones(8, 64) * torch.tensor([1.0, 1, 0, 0] * 16)))
    for k, pattern in ((48, "2:4"), (64, "1:4")):
        layer = SparseLinear.empty((8, k), torch.float32, "nm", {"pattern": pattern})
        with pytest.raises(
            RuntimeError, match=rf"the parts of this layer are no nm matrix of \[8, {k}\]"
        ):
            layer.load_state_dict(other.state_dict(), assign=assign)
    same = SparseLinear.empty((8, 64), torch.float32, "nm", {"pattern": "2:4"})
    same.load_state_dict(other.state_dict(), assign=assign)
    assert torch.equal(same.to_dense(), other.to_dense())


def test_the_kernel_gets_values_that_became_a_parameter() -> None:
    dense = torch.ones(4, 8)
    dense.view(-1, 4)[:, 2:] = 0.0
    layer = SparseLinear(NM.from_dense(dense))
    assert layer._packed() is layer._packed()
    layer.values = nn.Parameter(layer.values)
    assert layer._packed().values is layer.values
