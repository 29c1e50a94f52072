"""Kernels with pauses compile like those without, whose text and entry they leave alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from hopsparse.compiler import KernelCache, translation_unit
from hopsparse.compiler.delays import delayed
from hopsparse.errors import ArgumentError, CompileError
from hopsparse.ops.plans import plans
from hopsparse.plan import KernelSpec
from hopsparse.settings import DELAYS_VARIABLE, Settings
from tests.helpers.mutations import CAUGHT, Mutation, copy_of_kernels

_FIRST = {op: plan.every_spec()[0] for op, plan in plans().items()}


def spec_with(path: str, text: str) -> KernelSpec:
    """A kernel that a file is part of."""
    name = f"// {path}"
    for plan in plans().values():
        for spec in plan.every_spec():
            if spec.kernel.rpartition("/")[0] != path.rpartition("/")[0]:
                continue
            if text in translation_unit(spec):
                return spec
    raise AssertionError(name)


@pytest.mark.parametrize("op", _FIRST)
def test_every_operator_compiles_with_pauses(op: str, tmp_path: Path) -> None:
    cubin = KernelCache(tmp_path, delays=7).get(_FIRST[op])
    assert cubin.advice == ()
    assert cubin.warnings == ()
    assert cubin.stack_bytes == 0


def test_every_wait_and_every_copy_pauses() -> None:
    """One way to wait that is not known here would go unverified."""
    known = ("mbarrier_wait", "tma_load", "tma_load_multicast", "bulk_load", "store_async_x4")
    waits = ("named_barrier", "wait_for_turn", "cluster_sync", "cluster_wait", "wait_copies")
    specs = [*_FIRST.values(), spec_with("ops/spmm_bsr/kernel.cuh", "bulk_load(")]
    units = "".join(delayed(translation_unit(spec), 1) for spec in specs)
    for name in (*known, *waits):
        place = units.index(f"void {name}(")
        body = units[units.index("{\n", place) : units.index("{\n", place) + 12]
        assert body == "{\n  delay(" + body[10:], name


def test_without_pauses_nothing_is_another(tmp_path: Path) -> None:
    spec = _FIRST["spmm_nm"]
    plain, paused = KernelCache(tmp_path), KernelCache(tmp_path, delays=7)
    assert "delay" not in translation_unit(spec)
    assert plain.key(spec) == KernelCache(tmp_path, delays=None).key(spec)
    keys = {plain.key(spec), paused.key(spec), KernelCache(tmp_path, delays=8).key(spec)}
    assert len(keys) == 3


def test_the_seed_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Settings.from_environment({}).delays is None
    monkeypatch.setenv(DELAYS_VARIABLE, "5")
    assert KernelCache.default().delays == 5
    monkeypatch.delenv(DELAYS_VARIABLE)
    assert KernelCache.default().delays is None
    for wrong in ("yes", "-1", "4294967296"):
        with pytest.raises(ArgumentError, match=wrong):
            Settings.from_environment({DELAYS_VARIABLE: wrong})
    with pytest.raises(CompileError, match="seed -1"):
        delayed("", -1)


@pytest.mark.parametrize("mutation", CAUGHT, ids=lambda each: each.name)
def test_what_forgets_to_wait_compiles(mutation: Mutation, tmp_path: Path) -> None:
    """Else a GPU would notice an error of the compiler, and not a missing wait."""
    root = copy_of_kernels(tmp_path / "package")
    mutation.apply(root)
    spec = spec_with(mutation.path, mutation.old)
    cubin = KernelCache(tmp_path / "kernels", root=root, delays=1).get(spec)
    assert cubin.image
