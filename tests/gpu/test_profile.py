"""Profiles of a real GPU: events, phases, and what ncu says of sparse instructions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from hopsparse.cli import app
from hopsparse.cli.profile_subjects import FORMATS
from hopsparse.measure.profile.catalogue import Catalogue
from hopsparse.measure.profile.counters import CHIP, METRICS
from hopsparse.measure.profile.install import find_ncu, library_path
from hopsparse.measure.profile.phases import Recorder, marked
from hopsparse.measure.reference import random_24
from hopsparse.ops import pack_nm, spmm_nm

LAYER = ("--shape", "8192x4096", "--tokens", "2048", "--rounds", "7")


def profiled(*words: object) -> dict[str, object]:
    result = CliRunner().invoke(
        app, ["profile", *map(str, words), "--json"], catch_exceptions=False
    )
    assert result.exit_code == 0, result.output
    found: dict[str, object] = json.loads(result.stdout)
    return found


def test_formats_with_counters(device: torch.device, tmp_path: Path) -> None:
    """2:4 runs sparse instructions and nothing else does; a profile costs little besides ncu."""
    if find_ncu() is None:
        pytest.skip("needs a machine with Nsight Compute")
    found = profiled("formats", *LAYER, "--counters", "on", "-o", tmp_path / "out")
    rows = {row["subject"]: row for row in found["rows"]}  # type: ignore[attr-defined]
    print(json.dumps(found["seconds"]), json.dumps(rows, indent=1))
    assert list(rows) == list(FORMATS)
    shares = {name: row["sparse_share"] for name, row in rows.items()}
    assert shares["spmm_nm"] == 1
    assert shares["dense"] == shares["spmm_bsr"] == 0
    assert rows["csr_matmul"]["tensor"] < 5
    assert rows["spmm_nm"]["tensor"] > 40
    for row in rows.values():
        assert row["error"] == ""
        assert 0 < row["of_ceiling"] <= 1
        assert 0 < row["sm_active"] <= 101
        # ncu runs a kernel with cold caches and its own clocks.
        assert 0.5 < row["ncu_us"] / row["us"] < 2
    names = {row["phase"] for row in found["phases"]}  # type: ignore[attr-defined]
    assert {"sparse.spmm_nm", "sparse.spmm_bsr", "sparse.csr_matmul"} <= names
    assert found["seconds"]["rest"] <= 2  # type: ignore[index]
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "profile.json",
        "trace.json",
        "profile.html",
        "profile.ncu-rep",
    }


def test_a_stored_report_of_ncu_is_read_again(device: torch.device, tmp_path: Path) -> None:
    if find_ncu() is None:
        pytest.skip("needs a machine with Nsight Compute")
    small = ("--shape", "1024x1024", "--tokens", "64", "--rounds", "3")
    first = profiled("spmm_nm", *small, "--counters", "on", "-o", tmp_path / "out")
    source = str(first["counters"]["source"])  # type: ignore[index]
    report = tmp_path / "out" / "profile.ncu-rep"
    if source.endswith("ncu_report"):
        (row,) = profiled("--from", report)["rows"]  # type: ignore[misc]
        assert row["sparse_share"] == 1
    report.write_bytes(report.read_bytes()[:-100])
    result = CliRunner().invoke(app, ["profile", "--from", str(report)])
    assert result.exit_code == 2, result.output


def test_the_catalogue_of_this_machine_knows_every_counter(device: torch.device) -> None:
    if library_path() is None:
        pytest.skip("needs a machine with Nsight Compute")
    assert Catalogue(CHIP).unknown(METRICS) == []


def test_times_alone(device: torch.device) -> None:
    small = ("--shape", "1024x1024", "--tokens", "64", "--rounds", "3", "--counters", "off")
    found = profiled("formats", *small)
    assert all(row["us"] > 0 for row in found["rows"])  # type: ignore[attr-defined]
    (row,) = profiled("select", "--shape", "8x16384", "--tokens", "512", "--counters", "off")[
        "rows"
    ]  # type: ignore[misc]
    assert row["us"] > 0


def test_phases_have_device_times(device: torch.device) -> None:
    generator = torch.Generator(device).manual_seed(0)
    w = pack_nm(random_24((4096, 4096), torch.bfloat16, generator))
    x = torch.randn(512, 4096, device=device, dtype=torch.bfloat16, generator=generator)
    spmm_nm(w, x)
    recorder = Recorder(device)
    with recorder.recording("layer"), torch.no_grad():
        spmm_nm(w, x)
    whole, sparse = recorder.spans()
    assert (sparse.phase, sparse.what) == ("sparse", "spmm_nm")
    assert 5 < sparse.us <= whole.us


def test_marks_change_no_result(device: torch.device) -> None:
    generator = torch.Generator(device).manual_seed(0)
    w = pack_nm(random_24((256, 256), torch.bfloat16, generator))
    x = torch.randn(16, 256, device=device, dtype=torch.bfloat16, generator=generator)
    plain = spmm_nm(w, x)
    with marked("layer"):
        assert torch.equal(spmm_nm(w, x), plain)
