"""Kernels that forget to wait, on the CPU: their texts run by threads notice some of them.

Those on a GPU are in tests/gpu/test_mutations.py; here it is only seen that each names text that
stands where it says, and checks that would run.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.mutated import checks_for
from tests.helpers.mutations import CAUGHT, PACKAGE, Mutation

_PREFILL, _DECODE = "ops/attend_prefill/", "ops/attend_decode/"
_WIDE = "ops/spmm_csr/wide.cuh"
_ON_CPU = {
    "values are overwritten while they are read": (
        _PREFILL + "producer.cuh",
        "  wait_together(bars.values_empty(stage), ring.parity);\n",
    ),
    "scores are read before they are there": (
        _PREFILL + "kernel.cuh",
        "    wgmma_wait<1>();  // the scores\n",
    ),
    "a slab is read before it is there": (
        "ops/spmm_bsr/fragments.cuh",
        "    mbarrier_wait(smem + Smem<C>::kFullAt + ring.stage * 8, ring.parity);\n",
    ),
    "copies are read while they are under way": (
        _DECODE + "kernel.cuh",
        "    wait_copies<C::kStages - 1>();\n",
    ),
    "a unit is unpacked into registers that are read": (
        _WIDE,
        "      wgmma_wait<1>();  // the unit before this one is read, its registers are free\n",
    ),
    "a unit is unpacked before it is there": (
        _WIDE,
        "      if (next < args.steps) warp.wait(ring);\n",
    ),
    "tokens and units are overwritten while they are read": (
        _WIDE,
        "      mbarrier_wait(smem + Smem<C>::kEmptyAt + ring.stage * 8, ring.parity);\n",
    ),
    "parts are merged before they have come": (
        _DECODE + "kernel.cuh",
        "  mbarrier_wait(shared_address(&s.arrived), 0);\n",
    ),
}


@pytest.mark.parametrize("mutation", CAUGHT, ids=lambda each: each.name)
def test_each_edits_a_wait_that_is_there(mutation: Mutation) -> None:
    text = (PACKAGE / mutation.path).read_text(encoding="utf-8")
    assert text.count(mutation.old) == 1
    assert mutation.new != mutation.old
    assert any(check.kernel for check in checks_for(mutation))


def test_names_are_unique() -> None:
    assert len({mutation.name for mutation in CAUGHT}) == len(CAUGHT)


def exit_code(path: str, old: str, new: str, folder: Path) -> tuple[int, str]:
    command = [sys.executable, "-m", "tests.helpers.mutated_on_cpu", path, old, new, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.returncode, done.stderr


def test_an_edit_that_changes_nothing_is_right(tmp_path: Path) -> None:
    path, old = _ON_CPU["parts are merged before they have come"]
    assert exit_code(path, old, "  \n" + old, tmp_path) == (0, "")


@pytest.mark.parametrize("name", _ON_CPU)
def test_a_forgotten_wait_is_noticed(name: str, tmp_path: Path) -> None:
    path, old = _ON_CPU[name]
    code, told = exit_code(path, old, "", tmp_path)
    # A wrong number, or the end of a barrier that nobody completes.
    assert code in (1, 3, -6), told
    assert "Traceback" not in told
