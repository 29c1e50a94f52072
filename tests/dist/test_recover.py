"""Two processes with half of the windows each are one process with all of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hopsparse.recover import STATE_FILE, StateFile
from tests.helpers.tiny_recover import corpus, dense_weights, run, teacher_and_student

ROOT = Path(__file__).parents[2]
# Each process runs one window at a time, so every gradient is made by the same products; a sum
# of two, halved, does not depend on who holds which.
SAME: dict[str, Any] = {"batch_windows": 2, "steps": 8, "evaluate_every": 4, "save_every": 3}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {"weight_decay": 0.1},
    "drawn": {"position_fraction": 0.5, "train": "all", "ema": 0.5},
    "sr-ste": {"masks": "sr-ste", "lr": 0.02},
    "hidden": {"kl": 0.0, "hidden": 1.0, "hidden_blocks": (0,)},
    "layer-wise": {"level": "layer-wise"},
    "cached": {"cache_teacher": True, "cache_top": 5},
}


def launch(folder: Path, *kinds: str, interrupt_after: int = 0) -> subprocess.Popen[str]:
    """This file as the program of two processes."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "src"), *sys.path])
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    return subprocess.Popen(
        [*launcher, __file__, str(folder), str(interrupt_after), *kinds],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def weights(kind: str, folder: Path, **changes: Any) -> dict[str, torch.Tensor]:
    """Train in this process; with the state in `folder`, which a run may resume from."""
    teacher, student = teacher_and_student()
    file = StateFile(folder / STATE_FILE, {"kind": kind})
    torch.set_num_threads(1)
    run(student, teacher, windows=corpus(), file=file, **(SAME | KINDS[kind] | changes))
    return dense_weights(student)


@pytest.fixture(scope="module")
def made_by_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every kind, trained by two processes; started once, because starting takes longest."""
    folder = tmp_path_factory.mktemp("two")
    process = launch(folder, *KINDS)
    _, told = process.communicate(timeout=240)
    assert process.returncode == 0, told
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_are_one_bit_by_bit(kind: str, made_by_two: Path, tmp_path: Path) -> None:
    found = load_file(made_by_two / f"{kind}.safetensors")
    expected = weights(kind, tmp_path, accumulation=2)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_what_two_processes_began_one_finishes(tmp_path: Path) -> None:
    """One gets SIGINT after step 4: they agree on a step, and save it once."""
    process = launch(tmp_path, "plain", interrupt_after=4)
    out, told = process.communicate(timeout=240)
    assert process.returncode != 0
    assert out.count("interrupted") == 2, told
    resumed = weights("plain", tmp_path, accumulation=2, resume=True)
    alone = tmp_path / "alone"
    alone.mkdir()
    expected = weights("plain", alone, accumulation=2)
    assert all(torch.equal(resumed[name], expected[name]) for name in expected)


def main() -> None:
    """One of the two processes."""
    folder, interrupt_after, kinds = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    rank = int(os.environ["RANK"])

    def tell(done: int, *_: object) -> None:
        # One process alone is interrupted: the other must hear of it.
        if done == interrupt_after and rank == 1:
            os.kill(os.getpid(), signal.SIGINT)

    try:
        for kind in kinds:
            found = weights(kind, folder, tell=tell)
            if rank == 0:
                save_file(found, folder / f"{kind}.safetensors")
    except KeyboardInterrupt:
        print("interrupted", flush=True)
        sys.exit(130)


if __name__ == "__main__":
    main()
