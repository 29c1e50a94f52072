from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hopsparse.cli import probe
from hopsparse.cli.doctor import abilities
from hopsparse.compiler import Cubin, Nvrtc, compile_unit
from tests.cli.conftest import Run, start

GPU: dict[str, Any] = {
    "index": 0,
    "name": "NVIDIA H200",
    "compute_capability": "9.0",
    "memory_bytes": 150_109_880_320,
    "sm_count": 132,
    "l2_bytes": 62_914_560,
    "smem_per_block": 232_448,
    "cluster_launch": True,
    "tensor_map": True,
    "peers": [1],
    "mig": False,
    "planned_as": "h200",
}


def without_nvrtc(text: str, entry: str) -> Cubin:
    return compile_unit(text, entry, nvrtc=Nvrtc(Path("nowhere")))


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """The facts of a machine without GPU and without extras, whatever this one has."""
    monkeypatch.setattr(probe, "_load", lambda library: None)
    monkeypatch.setattr(probe, "_version", lambda package: None)
    monkeypatch.setattr(probe, "compile_unit", without_nvrtc)
    monkeypatch.setenv("HOPSPARSE_CACHE_DIR", str(tmp_path / "cache" / "deep"))
    return probe.gather()


def works(facts: dict[str, Any]) -> dict[str, bool]:
    return {each.name.split(":")[0]: each.works for each in abilities(facts)}


def test_bare_machine_says_what_works_and_what_to_install(bare: dict[str, Any]) -> None:
    judged = {each.name: each for each in abilities(bare)}
    assert judged["formats, pruning, reference products"].works
    assert judged["HTML report"].install == "pip install 'hopsparse[report]'"
    assert "nvidia-cuda-nvrtc" in judged["compile kernels for sm_90a (needs no GPU)"].install
    assert "libcuda" in judged["run on a Hopper GPU"].detail
    assert all(each.install for each in judged.values() if not each.works)


def test_bare_machine_prints(run: Run, bare: dict[str, Any]) -> None:
    result = run("doctor")
    assert result.exit_code == 0
    assert "no NVIDIA driver" in result.stdout
    assert "pip install 'hopsparse[models]'" in result.stdout


def test_probing_creates_no_folder(bare: dict[str, Any], tmp_path: Path) -> None:
    assert bare["cache"]["exists"] is False
    assert bare["cache"]["writable"] is True
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["file", "file/cache", "x" * 300, "x" * 300 + "/cache"])
def test_cache_that_cannot_be_written_is_named(
    bare: dict[str, Any], tmp_path: Path, name: str
) -> None:
    (tmp_path / "file").write_text("")
    facts = {**bare, "cache": probe.probe_cache(tmp_path / name)}
    judged = {each.name: each for each in abilities(facts)}
    assert not judged["kernel cache"].works
    assert "HOPSPARSE_CACHE_DIR" in judged["kernel cache"].install


def test_hopper_is_judged_by_driver_torch_and_capability(bare: dict[str, Any]) -> None:
    name = "run on a Hopper GPU"
    driver = {"libcuda": True, "cuda": "13.0", "version": "580.159"}
    torch = {"version": "2.11.0+cu130", "cuda": "13.0", "sees_gpu": True}
    good = {**bare, "driver": driver, "torch": torch, "gpus": [GPU]}
    assert works(good)[name]
    assert not works({**good, "torch": {**torch, "sees_gpu": False}})[name]
    assert not works({**good, "gpus": []})[name]
    ampere = {**GPU, "name": "NVIDIA A100", "compute_capability": "8.0"}
    assert not works({**good, "gpus": [ampere]})[name]


def test_gpus_are_planned_for_by_name_and_slice() -> None:
    plain = probe.planned_for(GPU)
    assert plain is not None
    assert plain.name == "h200"
    hopper = probe.planned_for({**GPU, "name": "NVIDIA H100 80GB HBM3"})
    assert hopper is not None
    assert hopper.name == "h100"
    part = {**GPU, "name": "NVIDIA H200 MIG 1g.18gb", "sm_count": 16, "memory_bytes": 18 * 10**9}
    sliced = probe.planned_for(part)
    assert sliced is not None
    assert sliced.sm_count == 16
    assert sliced.read_bandwidth == pytest.approx(plain.read_bandwidth / 8)
    assert probe.planned_for({**GPU, "compute_capability": "10.0"}) is None


def test_gpu_is_printed_with_what_it_has(
    run: Run, bare: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "probe_gpus", lambda: [GPU])
    told = run("doctor").stdout
    for words in ("132 SMs", "compute capability 9.0", "planned as h200", "TMA", "reaches GPUs 1"):
        assert words in told


def test_json_in_a_process_of_its_own() -> None:
    process = start("doctor", "--json")
    told, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    found = json.loads(told)
    assert {"cpu", "driver", "gpus", "nvrtc", "torch", "cache", "abilities"} <= found.keys()
    assert found["cpu"]["cores"] >= 1
    assert found["nvrtc"]["version"].startswith("13.")
    assert found["nvrtc"]["problem"] is None


def test_json(run_json: Callable[..., Any]) -> None:
    assert run_json("doctor")["hopsparse"]
