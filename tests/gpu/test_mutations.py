"""Kernels that forget to wait are noticed under delays, and those that do not forget are right.

Each runs in a process of its own: a kernel that fails costs a process its GPU, and one that waits
for ever ends in a trap after some seconds.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.helpers.mutated import CONTROL
from tests.helpers.mutations import CAUGHT, Mutation

_SEEDS = (1, 2, 3)
# Of one process: compiling three kernels with delays, and a trap.
_SECONDS = 120


def exit_code(name: str, seed: int, folder: Path) -> tuple[int, str]:
    command = [sys.executable, "-m", "tests.helpers.mutated", name, str(seed), str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        return 1, "did not end"
    return done.returncode, done.stdout + done.stderr


@pytest.mark.timeout(600)
@pytest.mark.parametrize("mutation", CAUGHT, ids=lambda each: each.name)
def test_what_forgets_to_wait_is_noticed(
    mutation: Mutation, tmp_path: Path, device: torch.device
) -> None:
    """By one seed of a few: the first one nearly always."""
    told = []
    for seed in _SEEDS:
        code, said = exit_code(mutation.name, seed, tmp_path / str(seed))
        # 1 is a wrong number or a lost GPU, a negative one the end by a signal; others are a bug of
        # the test, such as text that is not there.
        assert code in (0, 1) or code < 0, said
        assert "Traceback" not in said or "CUDA" in said, said
        if code != 0:
            return
        told.append(said)
    pytest.fail("nothing was noticed:\n" + "\n".join(told))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", _SEEDS)
def test_what_does_not_forget_is_right_under_delays(
    seed: int, tmp_path: Path, device: torch.device
) -> None:
    code, said = exit_code(CONTROL, seed, tmp_path)
    assert code == 0, said
