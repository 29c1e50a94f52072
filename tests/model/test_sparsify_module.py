"""`hopsparse.sparsify` on modules in memory."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

import hopsparse
from hopsparse.errors import ArgumentError, CalibrationError, UnsupportedError
from hopsparse.models.sparsify import sparsify
from hopsparse.nn import SparseLinear
from hopsparse.prune import Activations, Recipe, Reference, prune_block, trace_groups
from hopsparse.quant import store_matrix
from tests.helpers.tiny_models import tiny_llama


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    """Blocks in a chain, with a layer before and one behind."""

    def __init__(self, between: nn.Module | None = None) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(8, 16), nn.Linear(16, 4)
        self.blocks = nn.ModuleList(Residual(16) for _ in range(3))
        self.between = between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x if self.between is None else self.between(x))
        return self.head(x)


def test_any_module_with_a_chain_of_blocks() -> None:
    model = Net().train()
    model.embed.eval()
    reports = sparsify(model, "2:4", [torch.randn(32, 8) for _ in range(3)])
    assert [report.name for report in reports] == [
        f"blocks.{index}.{name}" for index in range(3) for name in ("up", "down")
    ]
    assert isinstance(model.blocks[1].up, SparseLinear)
    assert type(model.embed) is nn.Linear
    # Every module keeps the mode it had, frozen ones too.
    assert model.training
    assert model.blocks[1].up.training
    assert not model.embed.training
    model(torch.randn(2, 8)).sum().backward()
    assert model.embed.weight.grad is not None


class Parallel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(16, 16)
        self.heads = nn.ModuleList(Residual(16) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x).relu()
        return sum(head(x) for head in self.heads)


@pytest.mark.parametrize("make", [Parallel, lambda: Net(nn.LayerNorm(16))])
def test_a_list_that_is_no_chain_is_pruned_as_one_block(make: Callable[[], nn.Module]) -> None:
    """Statistics of each layer are of what it sees in the whole model."""
    model = make()
    width = next(model.parameters()).shape[1]
    inputs = [torch.randn(64, width) for _ in range(2)]
    expected = copy.deepcopy(model)
    names = [name for name, layer in model.named_modules() if isinstance(layer, nn.Linear)]
    groups = trace_groups(expected, names, lambda: expected(inputs[0]))
    activations = Activations(list(inputs), [(), ()], [{}, {}])
    activations.reference = Reference(activations)
    activations.reference.enter(expected)
    wanted = prune_block(expected, groups, activations, Recipe("2:4"))
    reports = sparsify(model, "2:4", inputs)
    found = {report.name: report.output_error for report in reports}
    assert found == {report.name: report.output_error for report in wanted}


@pytest.mark.parametrize("kind", [nn.ModuleList, nn.Sequential])
def test_a_plain_list_of_linear_layers(kind: type[nn.Module]) -> None:
    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layers = [nn.Linear(16, 16) for _ in range(3)]
            self.layers = nn.Sequential(*layers) if kind is nn.Sequential else kind(layers)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x).relu()
            return x

    model = Stack()
    reports = sparsify(model, "2:4", [torch.randn(64, 16)])
    assert [report.name for report in reports] == [f"layers.{index}" for index in range(3)]


def test_magnitude_needs_no_inputs() -> None:
    model = Net()
    reports = sparsify(model, Recipe("2:4", "magnitude"))
    assert len(reports) == 6
    with pytest.raises(ArgumentError, match="without activations"):
        sparsify(Net(), "2:4")


def test_inputs_by_name() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 8)

        def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
            return self.linear(x * scale)

    reports = sparsify(Named(), "2:4", [{"x": torch.randn(32, 16), "scale": 2.0}])
    assert reports[0].tokens == 32
    with pytest.raises(CalibrationError, match="a tensor for 'x'"):
        sparsify(Named(), "2:4", [{"scale": 2.0}])


def test_a_transformers_model_in_memory_saves_and_loads(tmp_path: Path) -> None:
    model = tiny_llama().float()
    ids = torch.randint(0, 200, (4, 24))
    sparsify(model, "2:4", [row[None] for row in ids])
    with torch.no_grad():
        expected = model(ids).logits
    model.save_pretrained(tmp_path / "theirs")
    hopsparse.save(model, tmp_path / "ours")
    for folder in ("theirs", "ours"):
        for load in (AutoModelForCausalLM.from_pretrained, hopsparse.load):
            again = load(tmp_path / folder)
            with torch.no_grad():
                assert torch.equal(again(ids).logits, expected)


def test_any_module_saves_and_loads_into_its_like(tmp_path: Path) -> None:
    model, x = Net(), torch.randn(5, 8)
    sparsify(model, "2:4", [torch.randn(32, 8)])
    hopsparse.save(model, tmp_path / "out")
    again = hopsparse.load(tmp_path / "out", into=Net())
    assert torch.equal(again(x), model(x))
    with pytest.raises(ArgumentError, match="without sparse layers"):
        hopsparse.save(Net(), tmp_path / "other")


def test_a_module_without_linear_layers() -> None:
    with pytest.raises(UnsupportedError, match="without any layer"):
        sparsify(nn.Sequential(nn.ReLU()), "2:4", [torch.randn(2, 4)])


@pytest.mark.parametrize(
    ("model", "fits"), [("encoder", False), ("decoder", True), ("attention", True)]
)
def test_the_modules_of_torch_keep_running(model: str, fits: bool) -> None:
    x = torch.randn(2, 4, 16)

    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.out = nn.MultiheadAttention(16, 2), nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(self.attention(x, x, x)[0])

    class Decoding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.TransformerDecoderLayer(16, 2, 32, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x, x)

    encoder = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    made = {"encoder": encoder, "decoder": Decoding(), "attention": Attending()}[model]
    if not fits:
        made = nn.Sequential(made, nn.Linear(16, 16))
    sparsify(made, "2:4", [x])
    assert any(isinstance(layer, SparseLinear) for layer in made.modules())
    for mode in (True, False):
        assert made.train(mode)(x).isfinite().all()
        with torch.no_grad():
            assert made(x).isfinite().all()


def test_every_place_of_a_layer_is_replaced() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(16, 16)
            self.c = self.a

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.c(self.a(x))

    twice = Twice()
    assert [report.name for report in sparsify(twice, "2:4", [torch.randn(32, 16)])] == ["a"]
    assert isinstance(twice.a, SparseLinear)
    assert twice.c is twice.a
    block = Residual(16)
    net = Net()
    net.blocks = nn.ModuleList([block, block, Residual(16)])
    for recipe, inputs in ((Recipe("2:4"), [torch.randn(32, 8)]), (Recipe("2:4", "magnitude"), [])):
        model = copy.deepcopy(net)
        names = [report.name for report in sparsify(model, recipe, inputs)]
        inner = [f"blocks.{index}.{name}" for index in (0, 2) for name in ("up", "down")]
        assert set(names) - {"embed", "head"} == set(inner)
        assert model.blocks[0] is model.blocks[1]
        assert isinstance(model.blocks[1].up, SparseLinear)


def test_an_error_while_packing_replaces_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = Net(), []

    def failing(*args: object) -> None:
        calls.append(args)
        if len(calls) == 4:
            raise MemoryError
        return store_matrix(*args)

    monkeypatch.setattr("hopsparse.models._block.store_matrix", failing)
    with pytest.raises(MemoryError):
        sparsify(model, Recipe("2:4", "magnitude"))
    assert not any(isinstance(layer, SparseLinear) for layer in model.modules())


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self) -> torch.Tensor:
        return self.linear(torch.ones(1, 16))


@pytest.mark.parametrize(
    ("model", "recipe", "inputs", "message"),
    [
        (nn.Linear(16, 16), "2:4", [], "itself an nn.Linear.*nn.Sequential"),
        (lambda x: x, "2:4", [], "a function as the model"),
        (nn.Linear, "2:4", [], "a type as the model"),
        (nn.Sequential(nn.Linear(16, 16, device="meta")), "2:4", [], "0.weight is on the meta"),
        (nn.Sequential(nn.Linear(16, 16)), 24, [], "a int as the recipe"),
        (nn.Sequential(nn.Linear(16, 16)), "2:4", None, "a NoneType as the calibration"),
        (nn.Sequential(nn.Linear(16, 16)), "2:4", {"x": 1}, "a dict as the calibration"),
        (Bare(), "2:4", [()], "forward takes no argument"),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(
    model: nn.Module, recipe: Recipe, inputs: list[object], message: str
) -> None:
    with pytest.raises((ArgumentError, CalibrationError), match=message):
        sparsify(model, recipe, inputs)


def test_a_scripted_model_is_refused() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(nn.Sequential(nn.Linear(16, 16)))
    with pytest.raises(ArgumentError, match="a scripted Sequential"):
        sparsify(scripted, "2:4", [torch.randn(4, 16)])


@pytest.mark.parametrize("pattern", [2, None])
def test_a_pattern_of_another_type(pattern: object) -> None:
    with pytest.raises(ArgumentError, match="pattern="):
        Recipe(pattern=pattern)  # type: ignore[arg-type]


def test_a_weight_that_is_not_finite_is_named_before_anything_is_pruned() -> None:
    model = Net()
    with torch.no_grad():
        model.blocks[1].up.weight[3, 5] = float("nan")
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ArgumentError, match=r"blocks\.1\.up: weight holds nan at row 3, column 5"):
        sparsify(model, "2:4", [torch.randn(32, 8)])
    for name, value in model.state_dict().items():
        assert torch.equal(value.nan_to_num(), before[name].nan_to_num())


def test_a_model_that_cannot_run_is_refused_by_its_weights() -> None:
    model = Net().requires_grad_(False).to(torch.float8_e4m3fn)
    with pytest.raises(UnsupportedError, match="its weight is float8_e4m3fn"):
        sparsify(model, "2:4", [torch.randn(4, 8)])


def test_the_configuration_of_a_model_made_sparse_is_its_own() -> None:
    """Another model made from the same configuration stays what it is: dense."""
    model = tiny_llama().float()
    config = model.config
    sparsify(model, "2:4", [torch.randint(0, 200, (1, 24))])
    assert model.config.quantization_config is not None
    assert getattr(config, "quantization_config", None) is None
