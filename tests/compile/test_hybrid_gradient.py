"""The kernels of hybrid_gradient give the bits of the reference: their text, run by a CPU."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch

from hopsparse.compiler import KernelCache, Nvrtc
from hopsparse.ops.hybrid_gradient import plan, reference
from tests.helpers.hybrid_gradients import DTYPES, KINDS, differing, gradient_of
from tests.helpers.hybrid_kernels import NAMES, Emulated
from tests.helpers.kernels import disassemble

REMAINDERS = tuple(plan.REMAINDERS)
SIZES = ((1, 1), (127, 0), (1030, 1030), (3001, 30))


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Emulated:
    if shutil.which("g++") is None:
        pytest.skip("this machine has no g++")
    return Emulated(tmp_path_factory.mktemp("kernels"))


def wrong(emulated: Emulated, gradient: torch.Tensor, *given: object) -> list[str]:
    wanted = reference.hybrid_gradient(gradient, *given)  # type: ignore[arg-type]
    return differing(emulated.run(gradient, *given), wanted, NAMES)  # type: ignore[arg-type]


@pytest.mark.parametrize("remainder", REMAINDERS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_size_gives_the_bits_of_the_reference(
    emulated: Emulated, dtype: torch.dtype, remainder: str | None
) -> None:
    for n, k in SIZES:
        gradient, _ = gradient_of("normal", n, dtype)
        for residual in (None, torch.randn(n) * 0.01):
            assert wrong(emulated, gradient, residual, k, remainder, 1, 0) == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("remainder", REMAINDERS)
def test_hard_gradients_give_the_bits_of_the_reference(
    emulated: Emulated, remainder: str | None, kind: str
) -> None:
    for dtype in DTYPES:
        gradient, residual = gradient_of(kind, 1501, dtype)
        assert wrong(emulated, gradient, residual, 15, remainder, 1, 0) == []
    assert wrong(emulated, gradient, residual, 5, remainder, 3, 2) == []
    assert wrong(emulated, gradient, residual, 0, remainder, 2, 1) == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sure", [4, -1000])
def test_a_sample_is_enough_and_a_misleading_one_is_noticed(
    emulated: Emulated, sure: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With so few deviations the threshold is too high, and everything is read once more."""
    monkeypatch.setattr(plan, "SAMPLES", 512)
    monkeypatch.setattr(plan, "_SURE", sure)
    gradient, residual = gradient_of(kind, 5001, torch.float32)
    assert wrong(emulated, gradient, residual, 50, "int4", 1, 0) == []


def test_places_go_on_behind_65536(emulated: Emulated) -> None:
    gradient, residual = gradient_of("few values", 70_001, torch.float32)
    assert wrong(emulated, gradient, residual, 9_000, "sign", 1, 0) == []


def test_what_does_not_start_on_16_bytes_is_read_as_well(emulated: Emulated) -> None:
    for dtype in DTYPES:
        gradient, _ = gradient_of("normal", 3001, dtype)
        residual = torch.randn(3001)
        assert wrong(emulated, gradient[1:], residual[1:], 30, "int4", 1, 0) == []
        assert wrong(emulated, gradient[1:], None, 30, "int3.5", 1, 0) == []


@pytest.mark.parametrize("remainder", [name for name in REMAINDERS if name])
def test_a_strip_is_asked_for_at_once(nvrtc: Nvrtc, remainder: str, tmp_path: Path) -> None:
    """Gradient and residual of 512 values, 16 bytes at a time, before the first is added."""
    cache = KernelCache(tmp_path, nvrtc=nvrtc)
    cubin = cache.get(plan.spec_for("code_all", "float32", remainder))
    (sass,) = disassemble([cubin.image])
    loads = [found.start() for found in re.finditer(r"LDG\.E\S*\.128", sass)]
    assert len(loads) == 8
    assert not re.search(r"\bFADD\b", sass[loads[0] : loads[-1]])
    # By Little's law: 4.8 TB/s over 132 SMs, for the microsecond that a read takes.
    registers = -(-cubin.registers // 8) * 8
    threads = 65_536 // (registers * 256) * 256
    assert threads * 8 * 16 >= 4.8e12 / 132 * 1e-6
