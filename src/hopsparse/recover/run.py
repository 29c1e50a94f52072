"""`recover`: a student, its teacher and windows of text in, a better student out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..errors import ArgumentError
from ..prune import Activations, advance, capture_inputs, without_cache
from .capture import Layout
from .fit import Fit, StepCallback
from .machine import Machine
from .objectives import EndToEnd, Objective, OneBlock
from .optimizers import OptimizerFactory
from .options import RecoverOptions
from .state import Saved, StateFile, Trajectory
from .student import Student, training
from .teacher import Cached, Live, Teacher
from .windows import Corpus, check_split, step_parts


@dataclass(frozen=True)
class Recovered:
    """What a run did.

    Attributes:
        trajectory: Steps, curve and seconds; of the last block, in a layer-wise run.
        layers: Names of the layers that were recovered.
        cache_bytes: Size of the teacher's cache; 0 without one.
    """

    trajectory: Trajectory
    layers: tuple[str, ...]
    cache_bytes: int


@dataclass(frozen=True)
class Task:
    """One run.

    Attributes:
        layout: Where the parts of student and teacher are.
        corpus: The windows.
        options: How to train.
        machine: Where.
        file: Where the state is kept; None: nowhere.
        resume: Continue from it.
        make_optimizer: The optimizer; AdamW when None.
        tell: Called after each step.
        tell_cache: Called after each window that the teacher's cache holds: windows done, in all.
    """

    layout: Layout
    corpus: Corpus
    options: RecoverOptions
    machine: Machine
    file: StateFile | None = None
    resume: bool = False
    make_optimizer: OptimizerFactory | None = None
    tell: StepCallback = lambda *_: None
    tell_cache: Callable[[int, int], None] = lambda *_: None

    def __post_init__(self) -> None:
        self.corpus.check_length(self.options.window_tokens)
        check_split(self.options, self.machine.world)

    def saved(self) -> Saved | None:
        """What an interrupted run left, if this one continues it."""
        return self.file.read() if self.file is not None and self.resume else None

    def fit(self, objective: Objective, student: Student, trajectory: Trajectory) -> Fit:
        """The loop of one stage."""
        return Fit(
            objective,
            student,
            self.corpus,
            self.options,
            self.machine,
            trajectory,
            self.make_optimizer,
        )


def recover(
    student: nn.Module, teacher: nn.Module | Callable[[], nn.Module], task: Task
) -> Recovered:
    """Train the sparse layers of `student` in place; they are sparse again afterwards.

    Dropout stays off in both models. The zeros of fixed masks are exact zeros at every step, and
    the best weights by held-out loss are kept: the student never ends worse than it began, as far
    as the held-out windows can tell.

    Args:
        student: A language model with `SparseLinear` layers in float32.
        teacher: The dense model, or a function that makes it. It is moved to the device. With
            `cache_teacher` a teacher that was made is dropped when the cache is full.
        task: Windows, options, machine.

    Raises:
        ArgumentError: No sparse layer, or options that do not fit the models.
        CalibrationError: Windows of another length than the options say.
        CheckpointError: The state cannot be written, or belongs to another run.
        VerificationError: The loss is not finite; the student has the best weights so far.
        KeyboardInterrupt: Ctrl-C, after the state was saved.

    Example:
        >>> import torch
        >>> from hopsparse.recover import open_machine
        >>> options = RecoverOptions(steps=1, batch_windows=1, window_tokens=8)
        >>> corpus = Corpus([torch.zeros(1, 8, dtype=torch.int64)])
        >>> with open_machine(options) as machine:
        ...     task = Task(Layout((), "1"), corpus, options, machine)
        ...     recover(nn.Sequential(nn.Embedding(4, 8), nn.Linear(8, 4)), nn.Identity(), task)
        Traceback (most recent call last):
        hopsparse.errors.ArgumentError: a Sequential without sparse layers. Required: ...
    """
    student.to(task.machine.device)
    was_training = student.training
    with training(student.eval(), task.options, task.layout.head) as trained:
        if task.options.level == "layer-wise":
            made = _block_by_block(trained, teacher, task)
        else:
            made = _end_to_end(trained, teacher, task)
    student.train(was_training)
    return made


def _end_to_end(
    student: Student, teacher: nn.Module | Callable[[], nn.Module], task: Task
) -> Recovered:
    saved = task.saved()
    trajectory = saved.trajectory if saved else Trajectory()
    lessons: Teacher = Live.of(_made(teacher), task.layout, task.corpus, task.options, task.machine)
    cached = 0
    if task.options.cache_teacher:
        assert isinstance(lessons, Live)
        kept = Cached(lessons, _asked_for(task, trajectory.step), task.options, task.tell_cache)
        lessons, cached = kept, kept.nbytes
    objective = EndToEnd(
        student.model, task.layout, lessons, task.corpus, task.options, task.machine
    )
    fit = task.fit(objective, student, trajectory)
    if saved:
        fit.resume(saved)
    fit.run(task.tell, task.file)
    return Recovered(trajectory, _names(student), cached)


def _asked_for(task: Task, first: int) -> set[int]:
    """Windows that this process will ask its teacher about, from step `first` on."""
    machine, options, count = task.machine, task.options, len(task.corpus.train)
    found: set[int] = set()
    for step in range(first, options.steps):
        for part in step_parts(step, count, options, machine.rank, machine.world):
            found.update(part.indices)
    held_out = range(machine.rank, len(task.corpus.held_out), machine.world)
    return found | {count + index for index in held_out}


def _block_by_block(
    student: Student, teacher: nn.Module | Callable[[], nn.Module], task: Task
) -> Recovered:
    saved = task.saved()
    trajectory = saved.trajectory if saved else Trajectory()
    blocks = [path for path in task.layout.blocks if student.inside(path).trained]
    if not blocks:
        raise ArgumentError(
            "no sparse layer inside the blocks",
            need="sparse layers in the blocks of the layout",
            hint="level='end-to-end'",
        )
    dense = _made(teacher).to(task.machine.device)
    if saved:
        student.restore_some(saved.part("done."))
    first = trajectory.stage
    inputs = _first_inputs(student.model, task)
    for path in task.layout.blocks:
        stage = blocks.index(path) if path in blocks else -1
        block = student.model.get_submodule(path)
        if stage >= trajectory.stage:
            part = student.inside(path)
            objective = OneBlock(block, dense.get_submodule(path), inputs, task.machine)
            fit = task.fit(objective, part, trajectory)
            if saved and stage == first:
                fit.resume(saved)
            fit.run(
                _numbered(task.tell, stage, len(blocks)), task.file, _done(student, blocks[:stage])
            )
            if stage + 1 < len(blocks):
                trajectory.next_stage()
        elif stage >= 0:
            for layer in student.inside(path).layers.values():
                layer.freeze()
        advance(block, inputs)
    return Recovered(trajectory, _names(student), 0)


def _first_inputs(model: nn.Module, task: Task) -> Activations:
    """How the first block is called for every window, held-out ones last."""
    options = without_cache(model)
    windows = [*task.corpus.train, *task.corpus.held_out]
    placed = [window.to(task.machine.device) for window in windows]
    first = model.get_submodule(task.layout.blocks[0])
    return capture_inputs(lambda window: model(window, **options), first, placed)


def _done(student: Student, paths: list[str]) -> Mapping[str, Tensor]:
    """What finished blocks hold, by name."""
    inside = tuple(f"{path}." for path in paths)
    return {f"done.{name}": each for name, each in student.snapshot(inside).items()}


def _numbered(tell: StepCallback, stage: int, stages: int) -> StepCallback:
    """Steps of one block as steps of the whole run."""

    def told(done: int, steps: int, loss: float, left: float | None) -> None:
        rest = None
        if left is not None:
            rest = left + (stages - stage - 1) * left * steps / max(1, steps - done)
        tell(stage * steps + done, stages * steps, loss, rest if done < steps else None)

    return told


def _made(teacher: nn.Module | Callable[[], nn.Module]) -> nn.Module:
    made: Any = teacher if isinstance(teacher, nn.Module) else teacher()
    if not isinstance(made, nn.Module):
        raise ArgumentError(
            f"a {type(made).__name__} as the teacher", need="an nn.Module", hint="the dense model"
        )
    return made.requires_grad_(False)


def _names(student: Student) -> tuple[str, ...]:
    return tuple(student.layers) + tuple(student.low_rank)
