"""Progress of a run on disk: one safetensors file, whose metadata holds the numbers as JSON.

One file, renamed into its place: weights, moments and counters always belong together.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..errors import CheckpointError
from ..files import read_header, unreadable, written_whole

STATE_FILE = "recover-state.safetensors"
_KEY = "hopsparse.recover"


@dataclass
class Trajectory:
    """Where a run is, and what it saw on the way.

    Attributes:
        stage: Block that is trained, in a layer-wise run; 0 otherwise.
        step: Next step of that stage.
        best: Least held-out loss of the stage; None before the first look.
        best_step: Steps that were done when it was seen.
        stale: Looks since then.
        stopped: Whether the stage stopped early.
        curve: Every look: {"stage", "step", "train_loss", "held_out_loss"}.
        seconds: Time spent in training, over all sessions.
    """

    stage: int = 0
    step: int = 0
    best: float | None = None
    best_step: int = 0
    stale: int = 0
    stopped: bool = False
    curve: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0

    def steps_of_all(self, planned: int) -> int:
        """Steps of all stages together; a stage that nobody looked at had all that were planned.

        Example:
            >>> Trajectory(stage=1, curve=[{"stage": 0, "step": 3}]).steps_of_all(5)
            8
        """
        done = dict.fromkeys(range(self.stage + 1), planned)
        # The last step of a stage is always looked at, if any is.
        return sum((done | {look["stage"]: look["step"] for look in self.curve}).values())

    def next_stage(self) -> None:
        """Begin the next block."""
        self.stage += 1
        self.step, self.best, self.best_step, self.stale = 0, None, 0, 0
        self.stopped = False


@dataclass
class Saved:
    """What a file holds.

    Attributes:
        trajectory: Where the run was.
        tensors: By name.
        numbers: Other plain values, by name.
    """

    trajectory: Trajectory
    tensors: dict[str, Tensor]
    numbers: dict[str, Any]

    def part(self, prefix: str) -> dict[str, Tensor]:
        """The tensors whose names start with `prefix`, without it."""
        return {
            name.removeprefix(prefix): tensor
            for name, tensor in self.tensors.items()
            if name.startswith(prefix)
        }


@dataclass(frozen=True)
class StateFile:
    """Where a run keeps its state, and what a resumed run must have in common with it.

    Attributes:
        path: The file.
        identity: Plain values.
    """

    path: Path
    identity: Mapping[str, Any]

    def write(
        self, trajectory: Trajectory, tensors: Mapping[str, Tensor], numbers: Mapping[str, Any]
    ) -> None:
        """Replace the file; a failure leaves the one before.

        Raises:
            CheckpointError: It cannot be written.
        """
        facts = {
            "identity": dict(self.identity),
            "trajectory": asdict(trajectory),
            "numbers": dict(numbers),
        }
        whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        with written_whole(self.path, "free some space, then the same with --resume") as temporary:
            save_file(whole, temporary, metadata={_KEY: json.dumps(facts)})

    def read(self) -> Saved | None:
        """What was written last; None if nothing was.

        Raises:
            CheckpointError: The file is damaged, or of another run.
        """
        if not self.path.exists():
            return None
        facts = self._facts()
        for key, value in self.identity.items():
            if facts["identity"].get(key) != value:
                raise CheckpointError(
                    f"the interrupted run has {key} = {facts['identity'].get(key)!r:.200}",
                    need=f"the same command; this one has {value!r:.200}",
                    hint="--overwrite to start again",
                )
        try:
            tensors: dict[str, Tensor] = load_file(self.path)
        except (SafetensorError, OSError) as error:
            raise unreadable(self.path, error) from error
        return Saved(Trajectory(**facts["trajectory"]), tensors, facts["numbers"])

    def _facts(self) -> dict[str, Any]:
        try:
            facts = json.loads(read_header(self.path).metadata.get(_KEY, ""))
        except ValueError as error:
            raise self._damaged() from error
        known = {each.name for each in fields(Trajectory)}
        parts = ("identity", "trajectory", "numbers")
        whole = isinstance(facts, dict) and all(isinstance(facts.get(part), dict) for part in parts)
        if not whole or facts["trajectory"].keys() != known:
            raise self._damaged()
        return dict(facts)

    def _damaged(self) -> CheckpointError:
        return CheckpointError(
            f"{self.path} is damaged",
            need="what an interrupted `hopsparse recover` left",
            hint="--overwrite to start again",
        )
