"""All ranks of a job choose what rank 0 measured, whatever they would have measured themselves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from hopsparse.errors import UnsupportedError
from hopsparse.measure.timing import Timing
from hopsparse.tune import Store, tune
from tests.helpers.tuning import KEY, WAYS, Numpy

ROOT = Path(__file__).parents[2]


def launch(folder: Path, mode: str) -> dict[int, dict[str, object]]:
    """This file as the program of two processes; gives what each rank wrote."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "src"), *sys.path])
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*launcher, __file__, str(folder), mode],
        capture_output=True,
        text=True,
        env=environment,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return {rank: json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)}


def test_both_ranks_choose_what_rank_0_measured(tmp_path: Path) -> None:
    told = launch(tmp_path, "apart")
    assert told[0]["order"] == told[1]["order"] == ["rows", "whole", "columns"]
    assert told[0]["best"] == told[1]["best"] == told[1]["later"] == "rows"
    # Rank 1 would have found another winner, and measured nothing.
    assert (told[0]["heats"], told[1]["heats"]) == (1, 0)
    assert told[0]["failed"] == told[1]["failed"]


def test_a_failure_of_rank_0_reaches_the_other(tmp_path: Path) -> None:
    told = launch(tmp_path, "failing")
    assert told[0]["error"] == "ZeroDivisionError"
    assert told[1]["error"] == "UnsupportedError"
    assert "ZeroDivisionError on rank 0" in str(told[1]["told"])


def test_ranks_that_tune_different_problems_are_told(tmp_path: Path) -> None:
    told = launch(tmp_path, "different")
    assert told[1]["error"] == "UnsupportedError"
    assert "not what rank 0 tuned" in str(told[1]["told"])


def run(folder: Path, mode: str, rank: int) -> dict[str, object]:
    """Each rank has a folder of its own, as on machines that share none."""
    store, numpy = Store(folder / f"store{rank}"), Numpy()
    store.get(KEY)
    key = replace(KEY, problem=f"{rank}") if mode == "different" else KEY
    steps = numpy.steps()
    if mode == "failing":
        steps = replace(steps, time=fail)
    elif rank == 1:
        steps = replace(steps, time=backwards)
    try:
        ranking = tune(store, key, WAYS, steps)
    except (UnsupportedError, ZeroDivisionError) as error:
        return {"error": type(error).__name__, "told": str(error)}
    return {
        "order": ranking.order,
        "failed": dict(ranking.failed),
        "best": store.best(KEY, WAYS),
        "later": Store(store.folder).best(KEY, WAYS),
        "heats": len(numpy.heats),
    }


def fail(ready: Mapping[str, object], seconds: float) -> list[Timing]:
    raise ZeroDivisionError


def backwards(ready: Mapping[str, object], seconds: float) -> list[Timing]:
    return [Timing(name, (1 / (1 + place),)) for place, name in enumerate(ready)]


def main() -> None:
    """One of the two processes."""
    folder, mode = Path(sys.argv[1]), sys.argv[2]
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    (folder / f"{rank}.json").write_text(json.dumps(run(folder, mode, rank)))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
