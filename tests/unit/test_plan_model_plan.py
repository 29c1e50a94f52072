from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hopsparse.errors import ArgumentError, CheckpointError
from hopsparse.plan import ModelPlan
from hopsparse.prune import Recipe

LAYERS = {"model.layers.0.self_attn.q_proj": "dense", "model.layers.0.mlp.up_proj": "2:4+int4:64"}
PLAN = ModelPlan(
    LAYERS, "tiny", "h100", 4, 1024, "floor", 1.1, {"time_us": 12.5, "perplexity_ratio": 1.09}
)


def edited(**changes: Any) -> dict[str, Any]:
    return PLAN.to_json() | changes


def test_a_file_gives_the_plan_back(tmp_path: Path) -> None:
    PLAN.write(tmp_path / "plan.json")
    assert ModelPlan.read(tmp_path / "plan.json", known=LAYERS) == PLAN


def test_a_plan_by_hand_needs_only_its_layers(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text('{"hopsparse_plan": 1, "layers": {"up": "6:8"}}')
    assert ModelPlan.read(tmp_path / "plan.json") == ModelPlan({"up": "6:8"})


def test_a_recipe_takes_the_forms_and_leaves_the_rest_dense() -> None:
    recipe = Recipe(forms=PLAN.forms())
    for name, form in LAYERS.items():
        assert str(recipe.form_of(name)) == form
    assert recipe.keeps("model.layers.1.mlp.up_proj")


def test_a_name_is_not_taken_for_a_glob() -> None:
    recipe = Recipe(forms=ModelPlan({"layers[0]*": "2:4"}).forms())
    assert not recipe.keeps("layers[0]*")
    assert recipe.keeps("layers0x")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hopsparse_plan": 2}, "hopsparse_plan 2"),
        ({"hopsparse_plan": "1"}, "hopsparse_plan '1'"),
        ({"colour": "red"}, "colour"),
        ({"model": 3}, "model 3"),
        ({"target": "b200"}, "b200"),
        ({"target": None}, "target None"),
        ({"batch": 0}, "batch 0"),
        ({"batch": True}, "batch True"),
        ({"context": 1.5}, "context 1.5"),
        ({"objective": "speed"}, "speed"),
        ({"budget": 0.9}, "budget 0.9"),
        ({"budget": "1.1"}, "budget '1.1'"),
        ({"predicted": [1]}, "predicted"),
        ({"predicted": {"time_us": "fast"}}, "predicted"),
        ({"layers": ["up"]}, "layers"),
    ],
)
def test_every_malformed_field_is_named(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(edited(**changes)))
    with pytest.raises(ArgumentError) as caught:
        ModelPlan.read(path)
    assert words in caught.value.got
    assert str(path) in caught.value.got


def test_a_plan_without_layers_is_refused() -> None:
    with pytest.raises(ArgumentError, match="without layers"):
        ModelPlan.from_json({"hopsparse_plan": 1})


@pytest.mark.parametrize("form", ["2of4", "2:4+int3", "", 24])
def test_a_wrong_form_names_its_line_and_layer(form: object, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    layers = {"model.layers.0.mlp.up_proj": "2:4", "model.layers.1.mlp.up_proj": form}
    path.write_text(json.dumps(edited(layers=layers), indent=2))
    lines = path.read_text().splitlines()
    number = next(i for i, line in enumerate(lines, 1) if "model.layers.1.mlp.up_proj" in line)
    with pytest.raises(ArgumentError) as caught:
        ModelPlan.read(path)
    assert f"line {number}: layer model.layers.1.mlp.up_proj" in caught.value.got


def test_an_unknown_layer_names_its_line_and_the_nearest_one(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(edited(layers={"model.layers.0.mlp.upproj": "2:4"}), indent=2))
    with pytest.raises(ArgumentError) as caught:
        ModelPlan.read(path, known=LAYERS)
    assert "line 14: layer 'model.layers.0.mlp.upproj'" in caught.value.got
    assert caught.value.hint == "model.layers.0.mlp.up_proj"


def test_a_layer_named_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text('{"hopsparse_plan": 1, "layers": {\n"up": "6:8",\n"up": "2:4"}}')
    with pytest.raises(ArgumentError, match="line 3: 'up' twice"):
        ModelPlan.read(path)


LONG = f'{{"hopsparse_plan": 1, "layers": {{}}, "batch": {"9" * 5000}}}'


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"hopsparse_plan": 1,\n}', "[" * 100_000, LONG])
def test_what_is_no_plan_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises((CheckpointError, ArgumentError), match="plan.json"):
        ModelPlan.read(path)


def test_files_that_cannot_be_read_or_written_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be read"):
        ModelPlan.read(tmp_path / "none.json")
    (tmp_path / "latin.json").write_bytes(b"\xe9")
    with pytest.raises(CheckpointError, match="UTF-8"):
        ModelPlan.read(tmp_path / "latin.json")
    with pytest.raises(CheckpointError, match="cannot be written"):
        PLAN.write(tmp_path / "no" / "plan.json")
