"""What doctor knows of faults: versions, damaged kernels, MIG slices, the smoke test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hopsparse.cli import health, probe
from hopsparse.cli.doctor import abilities
from hopsparse.cli.health import cache_health, faults_of, smoke
from hopsparse.compiler import KernelCache
from hopsparse.errors import DriverError
from hopsparse.launch.smoke import SMOKE
from tests.cli.conftest import Run
from tests.cli.test_doctor import GPU

# As the driver shows slices of an H100 and an H200: name, SMs, bytes, and what they are planned as.
SLICES = (
    ("NVIDIA H200 MIG 1g.18gb", 16, 17 << 30, "h200 slice of 16 SMs", 1 / 8),
    ("NVIDIA H200 MIG 2g.35gb", 32, 34 << 30, "h200 slice of 32 SMs", 2 / 8),
    ("NVIDIA H200 MIG 3g.71gb", 60, 69 << 30, "h200 slice of 60 SMs", 4 / 8),
    ("NVIDIA H200 MIG 7g.141gb", 132, 139 << 30, "h200 slice of 132 SMs", 1),
    ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 16, 9 << 30, "h100 slice of 16 SMs", 1 / 8),
    ("NVIDIA H100 80GB HBM3 MIG 1g.20gb", 26, 19 << 30, "h100 slice of 26 SMs", 2 / 8),
)


def facts(gpus: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """Facts of a machine with these GPUs, judged without touching one."""
    found = probe.gather()
    driver = {"libcuda": True, "cuda": "13.0", "version": "580.159"}
    torch = {"version": "2.11.0+cu130", "cuda": "13.0", "sees_gpu": True}
    return {**found, "driver": driver, "torch": torch, "gpus": gpus, **more}


def judged(found: dict[str, Any], name: str) -> Any:
    (ability,) = [each for each in abilities(found) if each.name.startswith(name)]
    return ability


@pytest.mark.parametrize(("name", "sms", "nbytes", "planned", "share"), SLICES)
def test_mig_slices_are_recognised(
    name: str, sms: int, nbytes: int, planned: str, share: float
) -> None:
    gpu = {**GPU, "name": name, "sm_count": sms, "memory_bytes": nbytes, "mig": True, "peers": []}
    target = probe.planned_for(gpu)
    assert target is not None
    assert (target.name, target.sm_count) == (planned, sms)
    whole = probe.planned_for({**gpu, "name": name.partition(" MIG")[0]})
    assert whole is not None
    assert target.read_bandwidth == pytest.approx(share * whole.read_bandwidth)


def test_a_slice_is_told(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = {**GPU, "name": "NVIDIA H200 MIG 1g.18gb", "sm_count": 16, "mig": True}
    monkeypatch.setattr(probe, "probe_gpus", lambda: [gpu])
    assert "a MIG slice" in run("doctor", "--no-smoke").stdout


@pytest.mark.parametrize(
    ("packages", "cuda", "words"),
    [
        ({"torch": "2.9.1+cu130"}, None, ["torch 2.9.1"]),
        ({"nvidia-cuda-nvrtc": "12.9.86"}, "13.0", ["nvrtc 12.9.86"]),
        ({"nvidia-cuda-nvrtc": "13.0.88"}, "12.8", ["driver for CUDA 12.8"]),
        ({"transformers": "4.57.1", "torch": "2.10.0"}, None, ["torch 2.10", "transformers 4.57"]),
        ({"nvidia-cuda-nvrtc": "13.0.88", "torch": "2.11.0", "transformers": None}, "13.0", []),
    ],
)
def test_versions_with_known_faults(
    packages: dict[str, str | None], cuda: str | None, words: list[str]
) -> None:
    found = faults_of(packages, {"cuda": cuda})
    assert len(found) == len(words)
    assert all(word in each["what"] for word, each in zip(words, found, strict=True))
    assert all(each["install"] for each in found)
    ability = judged(facts([], faults=found), "versions")
    assert ability.works == (not words)
    assert all(word in ability.detail for word in words)


def test_damaged_kernels_are_counted_and_left_alone(tmp_path: Path) -> None:
    cache = KernelCache(tmp_path / "kernels")
    assert cache_health(cache) == {"kernels": 0, "damaged": 0, "unfinished": 0}
    assert not (tmp_path / "kernels").exists()
    cache.get(SMOKE)
    assert cache_health(cache) == {"kernels": 1, "damaged": 0, "unfinished": 0}
    (entry,) = cache.entries()
    content = bytearray(entry.read_bytes())
    content[len(content) // 2] ^= 1
    entry.write_bytes(bytes(content))
    health_now = cache_health(cache)
    assert health_now == {"kernels": 1, "damaged": 1, "unfinished": 0}
    assert entry.read_bytes() == bytes(content)
    ability = judged(facts([], kernels=health_now), "kernel cache")
    assert not ability.works
    assert "1 of 1 kernels" in ability.detail


def test_the_smoke_test_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = [GPU, {**GPU, "index": 1}]
    assert smoke(gpus, sees_gpu=False) == {"ran": [], "failed": {}}
    assert smoke([{**GPU, "compute_capability": "8.0"}], sees_gpu=True)["ran"] == []

    def fails(index: int) -> None:
        if index == 1:
            raise DriverError("7 numbers are wrong", need="clusters", hint="another")

    monkeypatch.setattr("hopsparse.launch.smoke.smoke_test", fails)
    found = health.smoke(gpus, sees_gpu=True)
    assert list(found["failed"]) == ["1"]
    ability = judged(facts(gpus, smoke=found), "clusters")
    assert not ability.works
    assert "GPU 1: 7 numbers are wrong" in ability.detail
    assert judged(facts(gpus, smoke={"ran": [0, 1], "failed": {}}), "clusters").works
    assert judged(facts(gpus), "clusters").detail == "not run"


def test_permission_of_counters_is_told() -> None:
    found = facts([GPU], profiling={"ncu": "/usr/bin/ncu", "counters_allowed": False})
    ability = judged(found, "hardware counters")
    assert "NVreg_RestrictProfilingToAdminUsers=0" in ability.install
    allowed = facts([GPU], profiling={"ncu": "/usr/bin/ncu", "counters_allowed": True})
    assert judged(allowed, "hardware counters").works
