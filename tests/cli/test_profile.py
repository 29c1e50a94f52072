"""`hopsparse profile` without a GPU: times of the host, stored profiles, and a program for ncu."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hopsparse.cli import profile as command
from hopsparse.cli.profile import Profile, settings_of, with_kernels
from hopsparse.cli.profile_subjects import FORMATS
from hopsparse.errors import DriverError, UnsupportedError
from hopsparse.measure.profile.files import parse_csv
from hopsparse.measure.profile.ncu import Profiled
from hopsparse.measure.profile.subject import Subject, Work
from hopsparse.measure.timing import Timing
from hopsparse.plan import TARGETS
from hopsparse.report.profile import render_profile
from tests.helpers.look_at_report import VIEWS, chromium, find_chromium, look
from tests.helpers.profiles import four_formats, stand_in_for_ncu

Run = Callable[..., Any]
SMALL = ("--shape", "64x128", "--tokens", "4", "--rounds", "3", "--device", "cpu")


def subjects() -> list[Subject]:
    """The four formats as they would be timed on a GPU."""
    flops = 2 * 16384 * 4096 * 2048
    kept = {"dense": 1.0, "csr_matmul": 0.2, "spmm_bsr": 0.5, "spmm_nm": 0.5}
    times = {"dense": 400.0, "csr_matmul": 8000.0, "spmm_bsr": 250.0, "spmm_nm": 240.0}
    return [
        Subject(
            name,
            f"plan of {name}",
            Work(flops, round(flops * kept[name]), 200 << 20, "bfloat16", name == "spmm_nm"),
            Timing(name, (times[name],) * 3),
            "gpu events",
        )
        for name in FORMATS
    ]


def profiled(text: str) -> Profiled:
    return Profiled(parse_csv(text), "2025.3.1.0", Path("p.ncu-rep"), "ncu --import", 1.0)


def test_formats_on_the_cpu(run_json: Run) -> None:
    found = run_json("profile", "formats", *SMALL)
    assert [row["subject"] for row in found["rows"]] == list(FORMATS)
    assert all(row["us"] > 0 and row["clock"] == "host" for row in found["rows"])
    assert {row["samples"] for row in found["rows"]} == {3}
    assert found["counters"] == {"source": "none", "why": "no GPU"}
    assert {row["phase"] for row in found["phases"] if row["subject"] == "spmm_nm"} == {
        "format.spmm_nm",
        "format.decode_nm",
        "sparse.reference",
    }
    assert found["ceilings"] is None
    assert all(row["of_ceiling"] is None for row in found["rows"])


@pytest.mark.parametrize("name", ["spmm_nm_scaled", "spmm_csr", "select"])
def test_each_operator(name: str, run_json: Run) -> None:
    (row,) = run_json("profile", name, *SMALL)["rows"]
    assert row["subject"] == name
    assert row["us"] > 0


def test_a_model(run_json: Run, sparse_model: Path) -> None:
    options = ("--tokens", "8", "--rounds", "2", "--device", "cpu")
    found = run_json("profile", sparse_model, *options)
    assert found["rows"][0]["plan"].startswith("sparse, 8 tokens: ")
    sparse = [row for row in found["phases"] if row["phase"].startswith("sparse.")]
    assert sparse[0]["calls"] > 1


def test_a_folder_gets_json_trace_and_page(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "new" / "profile"
    shown = run("profile", "spmm_nm", *SMALL, "-o", out)
    assert shown.exit_code == 0
    assert "counters: none (no GPU)" in shown.stdout
    stored = json.loads((out / "profile.json").read_text(encoding="utf-8"))
    events = json.loads((out / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    assert stored["rows"][0]["subject"] == "spmm_nm"
    assert "format spmm_nm" in {event["name"] for event in events}
    page = (out / "profile.html").read_text(encoding="utf-8")
    assert "<script" not in page
    refused = run("profile", "spmm_nm", *SMALL, "-o", out)
    assert (refused.exit_code, "--overwrite" in refused.stderr) == (2, True)
    assert run("profile", "spmm_nm", *SMALL, "-o", out, "--overwrite").exit_code == 0


def test_a_stored_profile(run_json: Run, tmp_path: Path) -> None:
    path = tmp_path / "raw.csv"
    path.write_text(four_formats(), encoding="utf-8")
    rows = {row["subject"]: row for row in run_json("profile", "--from", path)["rows"]}
    assert (rows["csr_matmul"]["kernels"], rows["csr_matmul"]["ncu_us"]) == (2, 8040)
    assert [rows[name]["sparse_share"] for name in FORMATS] == [0, None, 0, 1]
    assert rows["dense"]["us"] is None


def test_a_stored_profile_gets_a_page(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "raw.csv"
    path.write_text(four_formats(), encoding="utf-8")
    shown = run("profile", "--from", path, "-o", tmp_path / "out")
    assert shown.exit_code == 0, shown.output
    assert "sparse.spmm_nm" in shown.stdout
    assert "80" in (tmp_path / "out" / "profile.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ((), "neither OP"),
        (("formats", "--from", "x.csv"), "both OP and --from"),
        (("formats", "--counters", "maybe"), "--counters maybe"),
        (("formats", "--device", "tpu"), "--device tpu"),
        (("formats", "--rounds", "0"), "--rounds 0"),
        (("spmm_nm", "--shape", "64x66"), "groups of 4"),
        (("spmm_nm", "--tokens", "0"), "positive sides"),
        (("spmm_nm", "--dtype", "int8"), "int8"),
        (("spmm_bsr", "--block", "48"), "whole blocks"),
        (("spmm_csr", "--density", "1.5"), "at most 1"),
        (("select", "--shape", "2x64", "--tokens", "65"), "65 of 64"),
        (("no-such-model",), "no folder"),
    ],
)
def test_bad_input_is_refused(words: tuple[str, ...], told: str, run_json: Run) -> None:
    device = () if "--device" in words else ("--device", "cpu")
    error = run_json("profile", *words, *device, exit_code=2)["error"]
    assert told in " ".join(error.values())


def test_a_truncated_file_is_refused(run_json: Run, tmp_path: Path) -> None:
    path = tmp_path / "raw.csv"
    path.write_text(four_formats()[:-30], encoding="utf-8")
    assert "cut off" in run_json("profile", "--from", path, exit_code=2)["error"]["got"]


def test_counters_that_are_wanted_and_missing_are_an_error(run_json: Run) -> None:
    error = run_json("profile", "spmm_nm", *SMALL, "--counters", "on", exit_code=2)["error"]
    assert "no GPU" in error["got"]


def options(counters: str = "auto") -> Profile:
    return Profile("formats", device="cuda", counters=counters)


def test_without_permission_times_remain_and_the_reason_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission"
    program = stand_in_for_ncu(tmp_path, "", said=said, writes=False)
    monkeypatch.setattr("hopsparse.measure.profile.install.find_ncu", lambda: program)
    settings, report = settings_of(options(), "cuda"), tmp_path / "p.ncu-rep"
    found, why = command._counted(options(), settings, report, "cuda")
    assert found is None
    assert "ERR_NVGPUCTRPERM" in why
    with pytest.raises(UnsupportedError, match="ERR_NVGPUCTRPERM"):
        command._counted(options("on"), settings, report, "cuda")
    monkeypatch.setattr("hopsparse.measure.profile.install.find_ncu", lambda: None)
    assert command._counted(options(), settings, report, "cuda")[1] == "ncu is not installed"


def test_no_kernel_at_all_is_an_error_even_where_counters_may_be_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = "==WARNING== No kernels were profiled."
    program = stand_in_for_ncu(tmp_path, "", said=said, writes=False)
    monkeypatch.setattr("hopsparse.measure.profile.install.find_ncu", lambda: program)
    settings = settings_of(options(), "cuda")
    with pytest.raises(DriverError, match="No kernels"):
        command._counted(options(), settings, tmp_path / "p.ncu-rep", "cuda")


def test_every_subject_needs_a_kernel() -> None:
    found = with_kernels(subjects(), profiled(four_formats()))
    assert [len(subject.kernels) for subject in found] == [1, 2, 1, 1]
    one_less = "\n".join(four_formats().splitlines()[:-1]) + "\n"
    with pytest.raises(DriverError, match="no kernel of spmm_nm"):
        with_kernels(subjects(), profiled(one_less))


def test_the_worker_gets_what_was_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = stand_in_for_ncu(tmp_path, four_formats())
    monkeypatch.setattr("hopsparse.measure.profile.install.find_ncu", lambda: program)
    monkeypatch.setattr("hopsparse.measure.profile.ncu.report_module", lambda: None)
    settings = settings_of(options(), "cuda")
    found, why = command._counted(options(), settings, tmp_path / "p.ncu-rep", "cuda")
    assert (why, found is not None) == ("", True)
    words = (tmp_path / "ncu.log").read_text(encoding="utf-8").splitlines()[0].split("\t")
    told = json.loads(words[-1])
    assert words[-2] == "hopsparse.cli.profile_worker"
    assert [each["op"] for each in told] == list(FORMATS)


@pytest.mark.skipif(find_chromium() is None, reason="needs a machine with Chromium")
def test_the_page_in_a_browser(tmp_path: Path) -> None:
    target = TARGETS["h200"]
    found = with_kernels(subjects(), profiled(four_formats()))
    document = command._document(found, target) | {
        "counters": {"source": "ncu", "why": ""},
        "environment": {"gpu": "NVIDIA H200", "driver": "580", "torch": "2"},
    }
    page = tmp_path / "profile.html"
    page.write_text(render_profile(document), encoding="utf-8")
    program = find_chromium()
    assert program is not None
    with chromium(program) as browser:
        browser.attach()
        assert {view: look(browser, page, view, None) for view in VIEWS} == {
            view: [] for view in VIEWS
        }


def test_a_name_that_is_marked_up_is_text() -> None:
    (first, *_) = subjects()
    bad = replace(first, name="<b>kernel</b>", plan="<script>")
    document = command._document([bad], None) | {
        "counters": {"source": "x", "why": ""},
        "environment": {"gpu": None, "driver": None, "torch": None},
    }
    page = render_profile(document)
    assert "<b>kernel" not in page
    assert "<script>" not in page
