"""Killed and resumed is the same, bit by bit, as never interrupted."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from hopsparse.errors import CheckpointError, UnsupportedError
from hopsparse.files import read_header
from hopsparse.recover import STATE_FILE, LowRank, Recovered, StateFile
from tests.helpers.tiny_recover import corpus, dense_weights, run, teacher_and_student

# What makes the state of a run larger, one at a time.
KINDS: dict[str, dict[str, Any]] = {
    "plain": {"weight_decay": 0.1},
    "all": {"train": "all", "ema": 0.5, "position_fraction": 0.5},
    "sr-ste": {"masks": "sr-ste", "lr": 0.02, "mask_every": 2, "mask_freeze": 0.3},
    "low-rank": {"lora_rank": 2},
    "layer-wise": {"level": "layer-wise", "steps": 5},
    "layer-wise sr-ste": {"level": "layer-wise", "steps": 5, "masks": "sr-ste", "lr": 0.02},
    "cached": {"cache_teacher": True, "cache_top": 5},
}


class Killed(Exception):
    """Stands for the end of a process."""


def state_file(folder: Path, **identity: Any) -> StateFile:
    return StateFile(folder / STATE_FILE, identity)


def weights(student: torch.nn.Module) -> dict[str, torch.Tensor]:
    found = dense_weights(student)
    for name, module in student.named_modules():
        if isinstance(module, LowRank):
            found |= {f"{name}.a": module.a.detach(), f"{name}.b": module.b.detach()}
    return found | {"norm": student.get_parameter("norm.weight").detach()}


def trained(folder: Path, kill_at: int | None = None, **changes: Any) -> tuple[Recovered, Any]:
    """A run, killed after so many steps and resumed with another student if asked."""
    options: dict[str, Any] = {"steps": 10, "evaluate_every": 3, "save_every": 1} | changes
    told = 0

    def tell(*_: Any) -> None:
        nonlocal told
        told += 1
        if told == kill_at:
            raise Killed

    teacher, student = teacher_and_student()
    file = state_file(folder)
    if kill_at is not None:
        with pytest.raises(Killed):
            run(student, teacher, file=file, tell=tell, **options)
        teacher, student = teacher_and_student()
    return run(student, teacher, file=file, resume=True, **options), student


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kill_at", [1, 5, 8])
def test_resumed_is_uninterrupted(kind: str, kill_at: int, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    whole.mkdir()
    expected, student = trained(whole, **KINDS[kind])
    found, resumed = trained(tmp_path, kill_at, **KINDS[kind])
    assert found.trajectory.curve == expected.trajectory.curve
    one, other = weights(student), weights(resumed)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_state_some_steps_old_gives_the_same(tmp_path: Path) -> None:
    """Killed at step 9 with the state of step 4."""
    whole = tmp_path / "whole"
    whole.mkdir()
    _, student = trained(whole)
    _, resumed = trained(tmp_path, 9, save_every=4)
    one, other = weights(student), weights(resumed)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_interrupt_finishes_the_step_and_saves(tmp_path: Path) -> None:
    handler = signal.getsignal(signal.SIGINT)
    teacher, student = teacher_and_student()

    def tell(done: int, *_: Any) -> None:
        if done == 2:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run(student, teacher, file=state_file(tmp_path), tell=tell)
    # It came after step 2 was told of: the next step notices.
    saved = state_file(tmp_path).read()
    assert saved is not None
    assert saved.trajectory.step == 3
    assert signal.getsignal(signal.SIGINT) is handler
    # What was trained so far is sparse again.
    assert len(dense_weights(student)) == 4


@pytest.mark.parametrize("level", ["end-to-end", "layer-wise"])
def test_an_interrupt_behind_the_last_step_counts(level: str, tmp_path: Path) -> None:
    teacher, twin = teacher_and_student()
    run(twin, teacher, level=level)
    teacher, student = teacher_and_student()

    def tell(done: int, total: int, *_: Any) -> None:
        if done == total:
            os.kill(os.getpid(), signal.SIGINT)

    file = state_file(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        run(student, teacher, file=file, tell=tell, level=level)
    teacher, student = teacher_and_student()
    run(student, teacher, file=file, resume=True, level=level)
    one, other = weights(twin), weights(student)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_the_second_interrupt_is_one_at_once(tmp_path: Path) -> None:
    teacher, student = teacher_and_student()

    def tell(done: int, *_: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run(student, teacher, file=state_file(tmp_path), tell=tell)
    assert not (tmp_path / STATE_FILE).exists()


def test_the_state_of_another_run_is_refused(tmp_path: Path) -> None:
    teacher, student = teacher_and_student()
    run(student, teacher, file=state_file(tmp_path, seed=1), save_every=1)
    with pytest.raises(CheckpointError, match=r"seed = 1\. .* this one has 2"):
        run(student, teacher, file=state_file(tmp_path, seed=2), resume=True)
    # Without resume it is replaced.
    run(student, teacher, file=state_file(tmp_path, seed=2), save_every=1)
    assert state_file(tmp_path, seed=2).read() is not None


def test_a_damaged_state_is_refused(tmp_path: Path) -> None:
    teacher, student = teacher_and_student()
    run(student, teacher, file=state_file(tmp_path), save_every=1)
    path = tmp_path / STATE_FILE
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError, match="truncated or corrupt"):
        state_file(tmp_path).read()
    path.write_bytes(content.replace(b'\\"stage\\"', b'\\"stale\\"', 1))
    with pytest.raises(CheckpointError, match="is damaged"):
        state_file(tmp_path).read()


def test_the_state_is_tensors_and_json(tmp_path: Path) -> None:
    teacher, student = teacher_and_student()
    run(student, teacher, file=state_file(tmp_path, a=[1]), save_every=2, windows=corpus())
    facts = json.loads(read_header(tmp_path / STATE_FILE).metadata["hopsparse.recover"])
    assert facts["identity"] == {"a": [1]}
    assert facts["trajectory"]["step"] == 4
    assert [row["step"] for row in facts["trajectory"]["curve"]] == [0, 3]


def test_an_optimizer_that_cannot_be_saved_is_refused(tmp_path: Path) -> None:
    class Odd(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            super().step()
            self.state[self.param_groups[0]["params"][0]]["past"] = [torch.zeros(1)]

    teacher, student = teacher_and_student()
    with pytest.raises(UnsupportedError, match="optimizer Odd, which keeps a list under 'past'"):
        run(
            student,
            teacher,
            file=state_file(tmp_path),
            save_every=1,
            make_optimizer=lambda groups: Odd(groups, lr=0.1),
        )


def test_nothing_is_saved_after_a_loss_that_is_not_finite(tmp_path: Path) -> None:
    class Poison(torch.optim.SGD):
        steps = 0

        def step(self, closure: Any = None) -> None:
            super().step()
            self.steps += 1
            if self.steps == 3:
                with torch.no_grad():
                    self.param_groups[0]["params"][0].fill_(float("nan"))

    teacher, student = teacher_and_student()
    with pytest.raises(Exception, match="the loss is nan at step 4"):
        run(
            student,
            teacher,
            file=state_file(tmp_path),
            save_every=2,
            make_optimizer=lambda groups: Poison(groups, lr=0.1),
        )
    saved = state_file(tmp_path).read()
    assert saved is not None
    assert saved.trajectory.step == 2
    assert all(bool(each.isfinite().all()) for each in saved.part("student.").values())
