from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import hopsparse.report as report_module
from hopsparse.errors import ArgumentError, CheckpointError, UnsupportedError
from hopsparse.models.budget import solve_within
from hopsparse.models.pareto import pareto_of
from hopsparse.report import check_extras, predict_layers, write_report
from tests.helpers.report_dict import example_report
from tests.unit.test_budget import problem

_LINKS = ("src", "href", "xlink:href", "action", "srcset", "poster", "data")


class Page(HTMLParser):
    """What a page shows, asks for and contains."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.text = ""
        self.paths_in_svg: list[int] = []
        self.ids: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attributes if name in _LINKS]
        self.ids += [value or "" for name, value in attributes if name == "id"]
        if tag == "svg":
            self.paths_in_svg.append(0)
        elif tag == "path" and self.paths_in_svg:
            self.paths_in_svg[-1] += 1

    def handle_data(self, data: str) -> None:
        self.text += data


def read(path: Path) -> Page:
    page = Page()
    page.feed(path.read_text(encoding="utf-8"))
    return page


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(example_report(), tmp_path_factory.mktemp("report") / "report.html")


def test_page_is_self_contained(written: Path) -> None:
    page = read(written)
    assert "script" not in page.tags
    outside = [link for link in page.links if not link.startswith(("data:", "#"))]
    assert outside == []
    text = written.read_text(encoding="utf-8")
    assert re.findall(r"url\((?!#)", text) == []
    assert "@import" not in text


def test_every_figure_draws_something(written: Path) -> None:
    page = read(written)
    # Two figures, each for a desktop and for a phone.
    assert len(page.paths_in_svg) == 4
    assert min(page.paths_in_svg) > 4
    # One path a layer, in both versions of the first figure.
    assert page.paths_in_svg[0] > 210


def test_ids_are_unique(written: Path) -> None:
    page = read(written)
    assert len(page.ids) == len(set(page.ids))


def test_page_is_readable_on_a_phone_and_in_the_dark(written: Path) -> None:
    text = written.read_text(encoding="utf-8")
    assert 'name="viewport" content="width=device-width' in text
    assert "prefers-color-scheme: dark" in text
    assert "currentColor" in text


def test_page_shows_what_the_report_says(written: Path) -> None:
    text = read(written).text
    report = example_report()
    wanted = [
        report["command"],
        report["version"],
        report["machine"]["torch"],
        "predicted, not measured",
        "35.90",
        "61.2 %",
        "KL to dense",
        "0.388",
        "tied to the embedding",
        "k = 3 is no multiple of 4",
        "a city of & about <two> million",
        "damping raised to 0.1",
        "2026-11-29 16:02 UTC",
    ]
    assert [words for words in wanted if words not in text] == []
    assert all(layer["name"] in text for layer in report["layers"])


def test_same_report_gives_the_same_page(written: Path, tmp_path: Path) -> None:
    again = write_report(example_report(), tmp_path / "again.html")
    assert again.read_bytes() == written.read_bytes()


def test_least_report_renders(tmp_path: Path) -> None:
    report = example_report(blocks=1)
    report |= {"evaluation": [], "samples": [], "kept_dense": {}}
    report["layers"] = [{**layer, "output_error": None} for layer in report["layers"]]
    text = read(write_report(report, tmp_path / "least.html")).text
    assert "evaluated no text" in text
    assert "Every linear layer became sparse" in text


def test_a_report_of_an_older_version_has_no_divergence(tmp_path: Path) -> None:
    report = example_report(blocks=1)
    for row in report["evaluation"]:
        del row["sparse"]["kl"]
    text = read(write_report(report, tmp_path / "older.html")).text
    assert "61.2 %" in text
    assert "KL" not in text


def test_values_are_escaped(tmp_path: Path) -> None:
    report = example_report(blocks=1)
    report["model"]["name"] = "<img src=https://example.org/x.png>"
    page = read(write_report(report, tmp_path / "escaped.html"))
    assert "img" not in page.tags


def test_other_schema_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    with pytest.raises(ArgumentError, match="schema 2"):
        write_report({**example_report(blocks=1), "schema": 2}, path)
    assert not path.exists()


def test_failed_render_leaves_nothing(tmp_path: Path) -> None:
    report: dict[str, Any] = example_report(blocks=1)
    del report["recipe"]
    with pytest.raises(Exception, match="recipe"):
        write_report(report, tmp_path / "report.html")
    assert list(tmp_path.iterdir()) == []


def test_unwritable_page_is_a_typed_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be written"):
        write_report(example_report(blocks=1), tmp_path / "no" / "such" / "report.html")


def test_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_module, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedError, match=r"hopsparse\[report\]"):
        check_extras()


def test_predictions_cover_every_layer_and_say_what_they_assume() -> None:
    report = example_report(blocks=2)
    predicted = predict_layers(report["layers"])
    assert [layer.name for layer in predicted.layers] == [row["name"] for row in report["layers"]]
    assert predicted.to_json()["measured"] is False
    wide = [{**layer, "bytes_dense": 2 * layer["bytes_dense"]} for layer in report["layers"]]
    assert any("32-bit" in note for note in predict_layers(wide).notes)


def test_a_quantised_layer_gains_over_the_dense_one_without_a_scheme() -> None:
    layer = example_report(blocks=1)["layers"][0] | {"shape": [8192, 8192], "scheme": "int8"}
    layer["bytes_dense"] = 2 * 8192 * 8192
    (found,) = predict_layers([layer]).layers
    (plain,) = predict_layers([{**layer, "scheme": ""}]).layers
    for rounded, half in zip(found.choices, plain.choices, strict=True):
        assert rounded.dense == half.dense
        assert rounded.chosen.time_us < half.chosen.time_us


@pytest.mark.parametrize("budget", [1.05, None])
def test_the_page_shows_the_plans_of_a_front(tmp_path: Path, budget: float | None) -> None:
    made = problem(layers=8)
    _, solution = solve_within(made, 1.05)
    pareto = pareto_of(made, solution, budget=budget)
    report = example_report(blocks=1) | {"pareto": pareto.to_json()}
    page = read(write_report(report, tmp_path / "report.html"))
    for words in ("Quality against predicted speed", "all 2:4+int8", "100 % 2:4+int8"):
        assert words in page.text
    assert ("a budget of 1.05" in page.text) == (budget is not None)
