"""The protocol of device/pipe/turns.cuh, played through: a ring that two warpgroups read in turns.

Barriers are those of the hardware: an mbarrier counts phases and tells one bit of the count.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

Process = Iterator[Callable[[], bool]]  # what it waits for


@dataclass
class Phased:
    """An mbarrier that one arrival completes."""

    completed: int = 0

    def passes(self, parity: int) -> bool:
        """As `mbarrier.try_wait.parity`: whether the phase of this parity is over."""
        return self.completed % 2 != parity


@dataclass
class Block:
    """A producer, two consumers, and what they share."""

    steps: list[int]  # of each item
    stages: int
    takes_turns: bool = True
    full: list[Phased] = field(default_factory=list)
    empty: list[Phased] = field(default_factory=list)
    held: dict[int, int] = field(default_factory=dict)  # by stage: the position in it
    given: list[int] = field(default_factory=lambda: [0, 0])
    read: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.full = [Phased() for _ in range(self.stages)]
        self.empty = [Phased() for _ in range(self.stages)]

    def produce(self) -> Process:
        stage, parity = 0, 1
        for position in range(sum(self.steps)):
            yield lambda stage=stage, parity=parity: self.empty[stage].passes(parity)  # type: ignore[misc]
            self.held[stage] = position
            self.full[stage].completed += 1
            stage, parity = self.advanced(stage, parity, 1)

    def consume(self, wg: int) -> Process:
        stage, parity, position, taken = 0, 0, 0, 0
        for item, steps in enumerate(self.steps):
            if item % 2 != wg:
                position += steps
                stage, parity = self.advanced(stage, parity, steps)
                continue
            if item > 0 and self.takes_turns:
                taken += 1
                yield lambda taken=taken: self.given[wg] >= taken  # type: ignore[misc]
            for step in range(steps):
                yield lambda stage=stage, parity=parity: self.full[stage].passes(parity)  # type: ignore[misc]
                assert self.held.get(stage) == position, "another step lies in this stage"
                self.read.append(position)
                if step + 1 == steps:
                    self.given[1 - wg] += 1
                yield lambda: True  # others may run before it is released
                self.empty[stage].completed += 1
                position += 1
                stage, parity = self.advanced(stage, parity, 1)
            yield lambda: True  # stores

    def advanced(self, stage: int, parity: int, count: int) -> tuple[int, int]:
        """`pass_over` of the same file, and `Ring.advance`."""
        at = stage + count
        return at % self.stages, parity ^ (at // self.stages & 1)

    def run(self, seed: int) -> None:
        """In a random order of all that could go on."""
        chance = random.Random(seed)
        waiting = {}
        for process in (self.produce(), self.consume(0), self.consume(1)):
            if (first := next(process, None)) is not None:
                waiting[process] = first
        while waiting:
            able = [process for process, passes in waiting.items() if passes()]
            assert able, "all wait for each other"
            chosen = chance.choice(able)
            following = next(chosen, None)
            if following is None:
                del waiting[chosen]
            else:
                waiting[chosen] = following


ITEMS = [[1], [3, 1], [7, 9, 2, 2, 1], [1] * 9, [64, 1, 64, 1], [12, 20, 12, 5, 5, 17], [2, 30, 2]]


@pytest.mark.parametrize("stages", [2, 5, 8])
@pytest.mark.parametrize("steps", ITEMS, ids=str)
def test_every_step_is_read_once_and_nobody_waits_for_ever(steps: list[int], stages: int) -> None:
    for seed in range(40):
        block = Block(steps, stages)
        block.run(seed)
        assert sorted(block.read) == list(range(sum(steps)))


def test_without_turns_a_parity_is_that_of_another_round() -> None:
    block = Block([12, 20, 12, 5, 5, 17], 5, takes_turns=False)
    with pytest.raises(AssertionError, match="another step lies in this stage"):
        block.run(0)
