"""Recipes are values: checked when made, the same after JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hopsparse.errors import ArgumentError
from hopsparse.formats.pattern import NMPattern
from hopsparse.prune import LayerReport, Recipe


@pytest.mark.parametrize("pattern", ["2:4", "4:6", "unstructured:0.5", "block:32x16:0.25"])
@pytest.mark.parametrize("method", ["magnitude", "wanda", "sparsegpt"])
def test_json_round_trip(pattern: str, method: str) -> None:
    recipe = Recipe(pattern, method, keep=("lm_head", "*.0.*"), seed=3, refresh="block")
    again = Recipe.from_json(json.loads(json.dumps(recipe.to_json())))
    assert again == recipe
    assert hash(again) == hash(recipe)
    assert str(again.parsed_pattern) == pattern


def test_every_entry_survives_json() -> None:
    recipe = Recipe(
        "6:8",
        "wanda",
        keep=("lm_head",),
        seed=3,
        damping="search",
        block_size=64,
        refit=0,
        refresh="group",
        scheme="int4:32/fp8",
        fit_to="input",
        search="admm",
        order="activation",
        bias=False,
        permute=True,
        smooth=False,
        forms={"*.0.*": "2:4+int8", "*": "dense"},
    )
    facts = recipe.to_json()
    usual = Recipe().to_json()
    assert [name for name in facts if facts[name] == usual[name]] == []
    again = Recipe.from_json(json.loads(json.dumps(facts)))
    assert again == recipe
    assert [glob for glob, _ in again.parsed_forms] == ["*.0.*", "*"]


def test_the_order_of_forms_is_part_of_the_recipe() -> None:
    forms = {"*.0.*": "6:8", "*": "dense"}
    recipe, turned = Recipe(forms=forms), Recipe(forms=dict(reversed(forms.items())))
    assert str(recipe.form_of("a.0.b")) == "6:8"
    assert str(turned.form_of("a.0.b")) == "dense"
    assert recipe != turned
    assert recipe == Recipe(forms=list(forms.items()))
    assert hash(recipe) == hash(Recipe(forms=list(forms.items())))
    forms.clear()
    assert len(recipe.parsed_forms) == 2


def test_text_and_value_are_the_same_pattern() -> None:
    assert Recipe("2:4") == Recipe(NMPattern(2, 4))


def test_auto_refresh_depends_on_the_method() -> None:
    found = {m: Recipe(method=m).resolved_refresh for m in ("magnitude", "wanda", "sparsegpt")}
    assert found == {"magnitude": "group", "wanda": "block", "sparsegpt": "group"}
    assert Recipe(method="wanda", refresh="group").resolved_refresh == "group"


def test_keep_matches_full_names() -> None:
    recipe = Recipe(keep=("lm_head", "model.layers.0.*"))
    assert recipe.keeps("model.layers.0.mlp.up_proj")
    assert recipe.keeps("lm_head")
    assert not recipe.keeps("model.layers.10.mlp.up_proj")


@pytest.mark.parametrize(
    ("entry", "value", "shown"),
    [
        ("pattern", "4:2", "4:2"),
        ("method", "obd", "method='obd'"),
        ("refresh", "never", "refresh='never'"),
        ("fit_to", "sideways", "fit_to='sideways'"),
        ("search", "sideways", "search='sideways'"),
        ("order", "sideways", "order='sideways'"),
        ("scheme", "int5", "int5"),
        ("forms", {"*": "2of4"}, "2of4"),
        ("forms", {"*": 24}, "24"),
        ("forms", [["*", "2:4", "6:8"]], "6:8"),
        ("forms", "6:8", "forms='6:8'"),
        ("damping", 0.0, "damping=0.0"),
        ("damping", -1.0, "damping=-1.0"),
        ("damping", float("nan"), "damping=nan"),
        ("damping", "0.01", "damping='0.01'"),
        ("damping", "seek", "damping='seek'"),
        ("block_size", 0, "block_size=0"),
        ("block_size", True, "block_size=True"),
        ("seed", -1, "seed=-1"),
        ("keep", "lm_head", "keep='lm_head'"),
        ("keep", [1], "keep=[1]"),
        ("unknown", 1, "unknown"),
    ],
)
def test_what_means_nothing_is_refused_and_shown(entry: str, value: Any, shown: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        Recipe.from_json({entry: value})
    assert shown in caught.value.got


@pytest.mark.parametrize("entry", ["method", "refresh", "fit_to", "search", "order"])
def test_the_usual_choice_is_what_to_try(entry: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        Recipe.from_json({entry: "sideways"})
    assert caught.value.hint == f"{entry}={Recipe().to_json()[entry]!r}"


def test_report_is_plain_json() -> None:
    report = LayerReport("a", (2, 4), "2:4", "wanda", 0.5, None, 7, None, 0.1, "why")
    facts = json.loads(json.dumps(report.to_json()))
    assert facts["shape"] == [2, 4]
    assert facts["output_error"] is None
