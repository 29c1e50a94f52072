"""The training loop: steps, looks at held-out windows, the best weights, and state on disk."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import VerificationError
from .machine import Interrupt, Machine, deferred_interrupt
from .objectives import Objective
from .optimizers import (
    OptimizerFactory,
    adamw,
    flat_state,
    load_flat_state,
    parameter_groups,
)
from .options import RecoverOptions
from .state import Saved, StateFile, Trajectory
from .student import Student
from .windows import Corpus, step_parts

#: Called after each step with: steps done in this stage, steps of the stage, loss, seconds left.
StepCallback = Callable[[int, int, float, float | None], None]


class Fit:
    """One stage of training.

    Args:
        objective: What is minimised.
        student: What trains, below the module of the objective.
        corpus: Counts windows.
        options: How.
        machine: Where.
        trajectory: Where the run is; changed in place.
        make_optimizer: The optimizer; AdamW when None.
    """

    def __init__(
        self,
        objective: Objective,
        student: Student,
        corpus: Corpus,
        options: RecoverOptions,
        machine: Machine,
        trajectory: Trajectory,
        make_optimizer: OptimizerFactory | None = None,
    ) -> None:
        self._objective = objective
        self._student = student
        self._corpus = corpus
        self._options = options
        self._machine = machine
        self._trajectory = trajectory
        self._exact = make_optimizer is None
        groups = parameter_groups(student.trained, options.weight_decay)
        self._optimizer = (make_optimizer or adamw(options))(groups)
        self._run, self._stepper = machine.prepare(objective.module, self._optimizer)
        self._mean: dict[str, Tensor] = {}
        if options.ema:
            self._mean = {name: each.detach().clone() for name, each in student.trained.items()}
        self._best: dict[str, Tensor] = {}

    def resume(self, saved: Saved) -> None:
        """Continue with what `tensors` and `numbers` gave."""
        self._student.restore(saved.part("student."))
        self._student.resume_masks(saved.trajectory.step)
        moments = {n: v for n, v in saved.numbers.items() if n[0].isdigit()}
        load_flat_state(self._optimizer, saved.part("optimizer."), moments)
        self._machine.load_scaler_state(saved.numbers.get("scaler", {}))
        for name, tensor in saved.part("mean.").items():
            self._mean[name].copy_(tensor)
        self._best = saved.part("best.")
        torch.set_rng_state(saved.tensors["random"])

    def tensors_and_numbers(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Everything that the next step depends on, beside the trajectory."""
        moments, numbers = flat_state(self._optimizer)
        tensors = {"random": torch.get_rng_state()}
        for prefix, part in (
            ("student.", self._student.snapshot()),
            ("optimizer.", moments),
            ("mean.", self._mean),
            ("best.", self._best),
        ):
            tensors |= {prefix + name: tensor for name, tensor in part.items()}
        return tensors, {**numbers, "scaler": self._machine.scaler_state()}

    def run(
        self,
        tell: StepCallback = lambda *_: None,
        file: StateFile | None = None,
        others: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Train until the steps are done, or held-out loss no longer falls; keep the best weights.

        Args:
            tell: Called after each step.
            file: Where to keep the state.
            others: Tensors to keep beside it: what earlier stages made.

        Raises:
            VerificationError: The loss is not finite. The weights are those of the best look.
            KeyboardInterrupt: Ctrl-C; the step was finished and the state saved.
        """
        trajectory, options = self._trajectory, self._options
        if trajectory.step == 0 and trajectory.best is None:
            self._look(train_loss=None)
        clock = _Clock(trajectory.step, options.steps)
        with deferred_interrupt() as interrupt:
            while trajectory.step < options.steps and not trajectory.stopped:
                loss, asked = self._step(trajectory.step, interrupt)
                trajectory.step += 1
                trajectory.seconds += clock.lap()
                done = trajectory.step
                tell(done, options.steps, loss, clock.left(done))
                if done % options.evaluate_every == 0 or done == options.steps:
                    self._look(loss)
                if done == options.steps or trajectory.stopped:
                    # No further step would ask.
                    asked = asked or self._machine.total(float(interrupt.asked))[0] > 0
                due = done % options.save_every == 0 and done < options.steps
                if file is not None and (asked or due):
                    self._save(file, others or {})
                if asked:
                    raise KeyboardInterrupt
        self._finish()

    def _step(self, step: int, interrupt: Interrupt) -> tuple[float, bool]:
        options, machine = self._options, self._machine
        for group in self._optimizer.param_groups:
            group["lr"] = options.learning_rate(step)
        parts = step_parts(step, len(self._corpus.train), options, machine.rank, machine.world)
        loss = torch.zeros((), device=machine.device)
        for number, part in enumerate(parts, 1):
            with machine.together(self._run, last=number == len(parts)):
                mine = self._objective.loss(self._run, part, step) / len(parts)
                machine.backward(mine)
            loss += mine.detach()
        summed, asked = machine.total(float(loss), float(interrupt.asked))
        self._check_finite(summed, step)
        if not options.clip:
            machine.unscale()
        else:
            norm = float(machine.clip(list(self._student.trained.values()), options.clip))
            if not machine.skips_steps:
                self._check_finite(norm, step, "the gradient's norm")
        self._student.before_step()
        self._stepper.step()
        self._stepper.zero_grad(set_to_none=True)
        self._student.after_step(step, exact=self._exact)
        with torch.no_grad():
            for name, mean in self._mean.items():
                mean.lerp_(self._student.trained[name], 1 - options.ema)
        return summed / machine.world, asked > 0

    def _check_finite(self, value: float, step: int, what: str = "the loss") -> None:
        if math.isfinite(value):
            return
        if self._best:
            self._student.restore(self._best)
        raise VerificationError(
            f"{what} is {value} at step {step + 1}",
            need="a finite number",
            hint=f"a smaller lr, such as {self._options.lr / 4:g}, or another precision; "
            "the state saved last is as it was",
        )

    def _look(self, train_loss: float | None) -> None:
        """Judge the weights, or their mean, by the held-out windows."""
        count, trajectory = len(self._corpus.held_out), self._trajectory
        if not count:
            return
        with self._averaged():
            loss = self._held_out_loss(count)
            trajectory.curve.append(
                {
                    "stage": trajectory.stage,
                    "step": trajectory.step,
                    "train_loss": train_loss,
                    "held_out_loss": loss if math.isfinite(loss) else None,
                }
            )
            better = math.isfinite(loss) and (trajectory.best is None or loss < trajectory.best)
            if better or not self._best:
                self._best = self._student.snapshot()
        if better:
            trajectory.best, trajectory.best_step, trajectory.stale = loss, trajectory.step, 0
        else:
            trajectory.stale += 1
            patience = self._options.patience
            trajectory.stopped = bool(patience) and trajectory.stale >= patience

    def _held_out_loss(self, count: int) -> float:
        machine, first = self._machine, len(self._corpus.train)
        self._student.rescale()
        mine = range(machine.rank, count, machine.world)
        losses = [self._objective.held_out(first + index) for index in mine]
        return machine.total(sum(losses))[0] / count

    def _averaged(self) -> _Swapped:
        return _Swapped(self._student, self._mean)

    def _save(self, file: StateFile, others: Mapping[str, Tensor]) -> None:
        if self._machine.is_main:
            tensors, numbers = self.tensors_and_numbers()
            file.write(self._trajectory, {**tensors, **others}, numbers)
        self._machine.wait()

    def _finish(self) -> None:
        """The best weights, or the mean, or the last ones; with masks that stay."""
        if self._best:
            self._student.restore(self._best)
        elif self._mean:
            self._student.restore(self._student.snapshot() | self._mean)
        for layer in self._student.layers.values():
            layer.freeze()
        self._student.check_zeros()
        self._machine.release()


class _Swapped:
    """Puts the mean of the weights in their place, and the weights and their scales back."""

    def __init__(self, student: Student, mean: Mapping[str, Tensor]) -> None:
        self._student = student
        self._mean = mean
        self._before: dict[str, Tensor] = {}

    def __enter__(self) -> None:
        # Scales are looked at too: they follow the weights that are judged.
        self._before = self._student.snapshot() if self._mean else self._student.scales()
        if self._mean:
            self._student.restore(self._before | dict(self._mean))

    def __exit__(self, *_: object) -> None:
        self._student.restore_some(self._before)


class _Clock:
    """Time of each step, and what is left by their mean."""

    def __init__(self, first: int, total: int) -> None:
        self._first, self._total = first, total
        self._started = self._lap = time.monotonic()

    def lap(self) -> float:
        """Seconds since the last call."""
        now = time.monotonic()
        passed, self._lap = now - self._lap, now
        return passed

    def left(self, done: int) -> float | None:
        """Seconds left after `done` steps."""
        if done <= self._first:
            return None
        return (self._lap - self._started) / (done - self._first) * (self._total - done)
