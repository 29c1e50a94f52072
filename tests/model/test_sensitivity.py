from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from hopsparse.errors import ArgumentError, CalibrationError, CheckpointError
from hopsparse.formats import Form, parse_form
from hopsparse.measure import Decoder
from hopsparse.models._fisher import BlockLoader, Sample, layer_samples, run_back
from hopsparse.models._sensitivity_file import SensitivityFile, coherence
from hopsparse.models.options import Progress
from hopsparse.models.rules import family_blocks, family_of
from hopsparse.models.sensitivity import (
    DEFAULT_FORMS,
    LayerCosts,
    Sensitivity,
    SensitivityOptions,
    _Bench,
    check_forms,
    kl_per_token,
    measure_sensitivity,
    split_windows,
)
from hopsparse.models.source import open_source, skeleton
from hopsparse.prune import Recipe, Statistics
from tests.helpers.tiny_models import save_model, tiny_llama, write_text

OUT = "model.layers.2.mlp.down_proj"
EARLY = ("model.layers.0.self_attn.v_proj", "model.layers.0.mlp.up_proj")
FORMS = ("dense", "6:8", "2:4", "2:4+int8", "dense+int4:64")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama whose predictions are far from uniform."""
    model = tiny_llama(tie_word_embeddings=False)
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            parameter.data.mul_(6)
    return save_model(model, tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "text.txt", 4000)


@pytest.fixture
def options(text: Path) -> SensitivityOptions:
    return SensitivityOptions(calibration=text, windows=6, window_tokens=32)


def dense(folder: Path) -> LlamaForCausalLM:
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert isinstance(model, LlamaForCausalLM)
    return model.eval()


def loader(folder: Path) -> BlockLoader:
    source = open_source(str(folder))
    family = family_of(source.config.model_type)
    network = skeleton(source)
    return BlockLoader(network, source, family, family_blocks(family, network), "cpu")


def sample_of(folder: Path, name: str, windows: list[Tensor]) -> Sample:
    """x and g of one layer, by window."""
    blocks = loader(folder)
    trace = run_back(blocks, windows, 0, lambda _: None)
    index = int(name.split(".")[2])
    prefix = f"model.layers.{index}."
    with blocks.block(index) as (block, _):
        layers = {name: block.get_submodule(name.removeprefix(prefix))}
        return layer_samples(block, layers, trace, index)[name]


@torch.no_grad()
def measured_kl(folder: Path, name: str, change: Tensor, windows: list[Tensor]) -> float:
    """KL from the dense model's predictions, summed over the positions of all windows."""
    model = dense(folder)
    before = [model(window).logits.double().log_softmax(-1) for window in windows]
    model.get_submodule(name).weight.data += change
    after = [model(window).logits.double().log_softmax(-1) for window in windows]
    return sum(float((p.exp() * (p - q)).sum()) for p, q in zip(before, after, strict=True))


def perturbation(folder: Path, name: str, size: float) -> Tensor:
    weight = dense(folder).get_submodule(name).weight
    noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
    return size * float(weight.detach().norm()) * noise / noise.norm()


def test_predicted_kl_of_the_last_layer_is_the_measured_one(folder: Path) -> None:
    """Its output acts on its own token alone, so the estimate is unbiased to second order.

    It is the mean of one value a token: five standard errors bound it. The third order of a
    perturbation of 1 % is of the order of 1 % of the second.
    """
    draw = torch.Generator().manual_seed(0)
    windows = [torch.randint(0, 256, (1, 128), generator=draw) for _ in range(16)]
    change = perturbation(folder, OUT, 0.01)
    sample = sample_of(folder, OUT, windows)
    weight = torch.zeros_like(change)
    predicted = kl_per_token(sample, weight, change, Form(), None, 16 * 128).alone
    terms = torch.cat(
        [
            (g * (x @ change.t())).sum(-1).square() / 2
            for x, g in zip(sample.x, sample.g, strict=True)
        ]
    )
    assert predicted == pytest.approx(float(terms.mean(dtype=torch.float64)), rel=1e-5)
    error = float(terms.std()) / len(terms) ** 0.5
    measured = measured_kl(folder, OUT, change, windows) / (16 * 128)
    assert error < 0.1 * measured
    assert abs(predicted - measured) <= 5 * error + 0.02 * measured


@pytest.mark.parametrize("name", EARLY)
def test_squared_sums_over_a_window_are_unbiased_in_every_layer(folder: Path, name: str) -> None:
    """The derivation before products of different tokens are dropped: half the mean square of
    sum_s g_s . dy_s over drawn targets is the KL of the window.
    """
    draws = 300
    window = torch.randint(0, 256, (1, 24), generator=torch.Generator().manual_seed(0))
    change = perturbation(folder, name, 0.01)
    sample = sample_of(folder, name, [window] * draws)
    zero = torch.zeros_like(change)
    halves = torch.tensor(
        [
            kl_per_token(Sample([x], [g]), zero, change, Form(), None, 1).together
            for x, g in zip(sample.x, sample.g, strict=True)
        ]
    )
    error = float(halves.std()) / draws**0.5
    measured = measured_kl(folder, name, change, [window])
    assert error < 0.15 * measured
    assert abs(float(halves.mean()) - measured) <= 5 * error + 0.02 * measured


def test_rounded_inputs_count_as_error() -> None:
    x, g = torch.tensor([[127.0, 0.4]]), torch.tensor([[1.0]])
    weight = torch.tensor([[1.0, 2.0]])
    form = parse_form("dense+int8")
    # 0.4 becomes 0 on a grid of steps of 1: the output moves by 0.8.
    cost = kl_per_token(Sample([x], [g]), weight, weight, form, None, 1)
    assert cost == pytest.approx((0.8**2 / 2, 0.8**2 / 2))
    assert kl_per_token(Sample([x], [g]), weight, weight, Form(), None, 1) == (0, 0)


def test_every_layer_is_measured_in_every_form(folder: Path, options: SensitivityOptions) -> None:
    steps: list[Progress] = []
    forms = (*FORMS, "dense+int8")
    found = measure_sensitivity(
        str(folder), Recipe(), forms, options=options, progress=steps.append
    )
    assert len(found.layers) == 21
    assert all(tuple(layer.costs) == forms for layer in found.layers.values())
    for layer in found.layers.values():
        assert layer.costs["dense"] == 0
        assert all(cost > 0 for form, cost in layer.costs.items() if form != "dense")
    total = {form: sum(layer.costs[form] for layer in found.layers.values()) for form in forms}
    assert total["6:8"] < total["2:4"]
    # Costs are squares of distances. That of int8 goes on top of 2:4's in a direction of its own,
    # so it may shorten it too; rounding while pruning is up to as far off as rounding alone.
    step = total["2:4+int8"] ** 0.5 - total["2:4"] ** 0.5
    assert abs(step) <= 2 * total["dense+int8"] ** 0.5
    assert found.kept_dense == {"lm_head": "outside the blocks"}
    assert found.decoder.head == (257, 32)
    assert (found.decoder.blocks, found.decoder.kv_width) == (3, 16)
    assert found.decoder.layers[OUT] == (32, 64)
    assert [(step.phase, step.done, step.total) for step in steps][-1] == ("sensitivity", 3, 3)
    assert steps[-1].seconds_left == 0


def test_additive_costs_are_sums_of_what_was_measured_alone(
    folder: Path, options: SensitivityOptions, tmp_path: Path
) -> None:
    def measured(name: str, forms: tuple[str, ...], additive: bool) -> dict[str, Any]:
        path, chosen = tmp_path / name, replace(options, additive=additive)
        measure_sensitivity(str(folder), Recipe(), forms, options=chosen, path=path)
        layers: dict[str, Any] = json.loads(path.read_text())["layers"]
        return layers

    added = measured("added.json", ("2:4+int8",), True)
    alone = measured("alone.json", ("2:4", "dense+int8"), False)
    for name, layer in added.items():
        for what in ("costs", "together"):
            assert layer[what] == {"2:4+int8": sum(alone[name][what].values())}


def test_layers_of_one_kind_share_how_errors_add_up() -> None:
    layers = {
        "0.v": LayerCosts(
            (8, 8), {"dense": 0.0, "2:4": 0.1, "6:8": 0.0}, "", {"2:4": 0.5, "6:8": 0.0}
        ),
        "1.v": LayerCosts((8, 8), {"dense": 0.0, "2:4": 0.4}, "", {"2:4": 0.4}),
        "1.q": LayerCosts((8, 8), {"2:4": 0.1}, "", {"2:4": 0.05}),
    }
    # 12 windows of 2 layers say 3, 12 windows of one layer say 0.5; 8 more say 1.
    expected = {("v", "2:4"): (24 * 3 + 8) / 32, ("q", "2:4"): (12 * 0.5 + 8) / 20}
    assert coherence(layers, 12) == pytest.approx(expected)
    file = SensitivityFile(None, {}, layers)
    decoder = Decoder({}, (8, 8), 1, 8)
    forms = {"0.v": ("dense", "2:4"), "1.v": ("2:4",), "1.q": ("2:4",)}
    found = file.result(forms, decoder, {}, 12).layers
    assert found["0.v"].costs == pytest.approx({"dense": 0.0, "2:4": 0.1 * 2.5})
    assert found["1.v"].costs == pytest.approx({"2:4": 0.4 * 2.5})
    assert found["1.q"].costs == pytest.approx({"2:4": 0.1 * 0.7})


def test_a_form_that_does_not_fit_is_left_out(folder: Path, options: SensitivityOptions) -> None:
    # k is 32 or 64: no multiple of 6.
    found = measure_sensitivity(str(folder), Recipe(), ("dense", "4:6"), options=options)
    assert all(dict(layer.costs) == {"dense": 0.0} for layer in found.layers.values())


def test_kept_layers_are_not_planned(folder: Path, options: SensitivityOptions) -> None:
    recipe = Recipe(keep=("*.mlp.*", "lm_head"))
    found = measure_sensitivity(str(folder), recipe, ("6:8",), options=options)
    assert len(found.layers) == 12
    assert found.kept_dense[OUT] == "kept by '*.mlp.*'"
    assert OUT in found.decoder.layers


def test_static_schemes_round_by_one_measured_scale(
    folder: Path, options: SensitivityOptions
) -> None:
    forms = ("dense+int8", "dense+int8/int8:static")
    found = measure_sensitivity(str(folder), Recipe(), forms, options=options)
    dynamic, static = (sum(layer.costs[f] for layer in found.layers.values()) for f in forms)
    assert 0 < dynamic < static


def test_an_interrupted_run_goes_on_and_gives_the_same(
    folder: Path, options: SensitivityOptions, tmp_path: Path
) -> None:
    path, whole = tmp_path / "costs.json", tmp_path / "whole.json"
    expected = measure_sensitivity(str(folder), Recipe(), FORMS, options=options, path=whole)

    def interrupt(step: Progress) -> None:
        if (step.phase, step.done) == ("sensitivity", 2):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure_sensitivity(
            str(folder), Recipe(), FORMS, options=options, path=path, progress=interrupt
        )
    assert len(json.loads(path.read_text())["layers"]) == 14
    assert measure_sensitivity(str(folder), Recipe(), FORMS, options=options, path=path) == expected
    assert path.read_text() == whole.read_text()


def test_what_is_known_is_not_measured_again(
    folder: Path, options: SensitivityOptions, tmp_path: Path
) -> None:
    path, steps = tmp_path / "costs.json", []

    def measure(*forms: str) -> Sensitivity:
        return measure_sensitivity(
            str(folder), Recipe(), forms, options=options, path=path, progress=steps.append
        )

    expected = measure(*FORMS)
    steps.clear()
    assert measure(*FORMS) == expected
    assert measure("6:8").layers[OUT].costs == {"6:8": expected.layers[OUT].costs["6:8"]}
    assert steps == []
    before = json.loads(path.read_text())["layers"][OUT]["costs"]
    measure("2:4+fp8", "dense")
    assert len(steps) == 9
    after = json.loads(path.read_text())["layers"][OUT]["costs"]
    assert after.keys() - before.keys() == {"2:4+fp8"}
    assert before.items() <= after.items()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda o: (Recipe(seed=1), o), "recipe"),
        (lambda o: (Recipe(), SensitivityOptions(o.calibration, 6, 16)), "calibration"),
        (lambda o: (Recipe(), SensitivityOptions(o.calibration, 6, 32, 1)), "fisher_windows"),
    ],
)
def test_costs_of_another_run_are_refused(
    folder: Path,
    options: SensitivityOptions,
    tmp_path: Path,
    change: Callable[[SensitivityOptions], tuple[Recipe, SensitivityOptions]],
    words: str,
) -> None:
    path = tmp_path / "costs.json"
    measure_sensitivity(str(folder), Recipe(), ("6:8",), options=options, path=path)
    recipe, other = change(options)
    with pytest.raises(CheckpointError) as caught:
        measure_sensitivity(str(folder), recipe, ("6:8",), options=other, path=path)
    assert words in caught.value.got
    assert "--remeasure" in caught.value.hint


@pytest.mark.parametrize(
    "damage",
    [
        lambda facts: facts.update(hopsparse_sensitivity=0),
        lambda facts: facts.update(layers=[]),
        lambda facts: facts["layers"][OUT].update(note=3),
        lambda facts: facts["layers"][OUT].update(shape=[32]),
        lambda facts: facts["layers"][OUT].update(costs={}),
        lambda facts: facts["layers"][OUT].update(costs={"2of4": 1.0}),
        lambda facts: facts["layers"][OUT].update(costs={"2:4": -1.0}),
        lambda facts: facts["layers"][OUT].update(costs={"2:4": float("nan")}),
        lambda facts: facts["layers"][OUT].update(costs={"2:4": 10**400}),
        lambda facts: facts["layers"][OUT].update(shape=[-32, 0]),
        lambda facts: facts["layers"][OUT].pop("note"),
        lambda facts: facts["layers"][OUT].update(together={"2:4": 0.1}),
        lambda facts: facts["layers"][OUT].update(together={"6:8": -0.1}),
    ],
)
def test_a_damaged_file_is_refused(
    folder: Path,
    options: SensitivityOptions,
    tmp_path: Path,
    damage: Callable[[dict[str, object]], object],
) -> None:
    path = tmp_path / "costs.json"
    measure_sensitivity(str(folder), Recipe(), ("6:8",), options=options, path=path)
    facts = json.loads(path.read_text())
    damage(facts)
    path.write_text(json.dumps(facts))
    with pytest.raises(CheckpointError, match="damaged"):
        measure_sensitivity(str(folder), Recipe(), ("6:8",), options=options, path=path)


@pytest.mark.parametrize("stored", ["", "[]", '{"identity": ', '{"layers": ' + "9" * 5000 + "}"])
def test_costs_that_cannot_be_read_can_be_measured_again(
    folder: Path, options: SensitivityOptions, tmp_path: Path, stored: str
) -> None:
    path = tmp_path / "costs.json"
    path.write_text(stored)
    with pytest.raises(CheckpointError, match="damaged") as caught:
        measure_sensitivity(str(folder), Recipe(), ("6:8",), options=options, path=path)
    assert "--remeasure" in caught.value.hint


@pytest.mark.parametrize(("calibrated", "words"), [(False, "calibration"), (True, "held-out")])
def test_a_layer_that_no_token_reaches_stays_dense(calibrated: bool, words: str) -> None:
    bench = _Bench(Recipe(), {}, 8, additive=False)
    if calibrated:
        seen = Statistics(4)
        seen.add(torch.ones(3, 4))
        bench.statistics = {"expert": seen}
    found = bench.measure("expert", nn.Linear(4, 2), Sample(), FORMS)
    assert found == LayerCosts((2, 4), {"dense": 0.0}, f"no {words} token reached it: stays dense")


def test_activations_that_overflow_are_refused(options: SensitivityOptions, tmp_path: Path) -> None:
    model = tiny_llama()
    model.model.layers[1].input_layernorm.weight.data.fill_(3e38)
    folder = save_model(model, tmp_path / "huge")
    with pytest.raises(CalibrationError, match="not finite"):
        measure_sensitivity(str(folder), Recipe(), ("6:8",), options=options)


def test_every_fifth_window_is_held_out() -> None:
    windows = [torch.tensor([[index]]) for index in range(24)]
    kept, held_out = split_windows(windows)
    assert [int(window) for window in held_out] == [4, 9, 14, 19]
    assert len(kept) == 20
    kept, held_out = split_windows(windows[:3])
    assert ([int(w) for w in kept], [int(w) for w in held_out]) == ([0, 1], [2])
    with pytest.raises(CalibrationError):
        split_windows(windows[:1])


@pytest.mark.parametrize(
    "make",
    [
        lambda: SensitivityOptions(windows=1),
        lambda: SensitivityOptions(window_tokens=4),
        lambda: SensitivityOptions(fisher_windows=0),
        lambda: check_forms([]),
        lambda: check_forms(["2of4"]),
    ],
)
def test_what_means_nothing_is_refused(make: Callable[[], object]) -> None:
    with pytest.raises(ArgumentError):
        make()


def test_the_default_forms_are_twenty() -> None:
    assert len(check_forms(DEFAULT_FORMS)) == 20
