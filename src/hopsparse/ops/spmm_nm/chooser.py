"""What runs where w is of codes: the tile that was tuned for a problem, else the cost model's.

As plan.py for 16 bits. Operators of codes differ in their tiles, and in what their results are kept
under; this is all that they share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache

from ...plan import KernelSpec
from ...tune import Key, Machine, Store, kernel_hash, token_class, version_of
from .cost import Problem, fastest, predicted_us, suits
from .kernel import Config, Numbers, fold_of, spec_of_numbers

# Token counts of every tile, and of every class, are multiples of it.
_STEP = 16
_BYTES = {"float32": 4, "int32": 4, "bfloat16": 2, "float16": 2}


def coded_us(
    config: Config, problem: Problem, numbers: Numbers, sm_count: int, activation: str = "none"
) -> float:
    """Device time of one product, predicted."""
    return predicted_us(
        config,
        problem,
        sm_count,
        promoted=numbers.promoted or numbers.grouped,
        widened_x=numbers.x == "int4",
        result_bytes=_BYTES.get(numbers.out, 1) / fold_of(activation),
    )


@dataclass(frozen=True)
class Chooser:
    """Chooses among the tiles of one operator.

    Attributes:
        op: Its name, which results are kept under.
        tiles: All that it considers for numbers and an activation.
        kind: Numbers as tuning results have them, in words.
        standing: The numbers that are measured for others, which take the winner too: those change
            nothing in the main loop.
    """

    op: str
    tiles: Callable[[Numbers, str], tuple[Config, ...]]
    kind: Callable[[Numbers], str]
    standing: Callable[[Numbers], Numbers]

    def candidates(
        self,
        problem: Problem,
        numbers: Numbers,
        sm_count: int,
        *,
        activation: str = "none",
        configs: Iterable[Config] | None = None,
    ) -> list[Config]:
        """The tiles that suit a problem, the one that is predicted to be fastest first.

        Args:
            problem: Sizes, all positive.
            numbers: Dtypes, and how sums are taken.
            sm_count: SMs of the GPU.
            activation: One of `kernel.ACTIVATIONS`, or `kernel.SWIGLU`.
            configs: Tiles of these numbers; None is all of them.
        """
        known = self.tiles(numbers, activation) if configs is None else configs
        suited = [config for config in known if suits(config, problem, sm_count)]
        return sorted(suited, key=lambda c: coded_us(c, problem, numbers, sm_count, activation))

    def choose(
        self,
        problem: Problem,
        numbers: Numbers,
        sm_count: int,
        *,
        activation: str = "none",
        machine: Machine | None = None,
    ) -> Config:
        """The tile that runs: the tuned winner of its class of token counts, else the cost model's.

        It is the same for all token counts that round up to one multiple of 16, as for 16 bits.

        Args:
            problem: Sizes, all positive.
            numbers: Dtypes, and how sums are taken.
            sm_count: SMs of the GPU.
            activation: One of `kernel.ACTIVATIONS`, or `kernel.SWIGLU`, which not every tile has.
            machine: The GPU, for what was tuned on its like; None goes by the cost model alone.

        Raises:
            UnsupportedError: The GPU has no SM.
        """
        if machine is not None:
            found = self.tuned(problem, numbers, machine, activation=activation)
            if found is not None:
                return found
        rounded = replace(problem, tokens=-(-problem.tokens // _STEP) * _STEP)
        return _by_model(self, rounded, numbers, sm_count, activation)

    def choices(
        self,
        problem: Problem,
        numbers: Numbers,
        sm_count: int,
        *,
        activation: str = "none",
        machine: Machine | None = None,
    ) -> dict[Config, int]:
        """Every tile that some count from 1 to `problem.tokens` chooses, and the least such count.

        Arguments are those of `choose`; the problem has the most tokens.
        """
        found: dict[Config, int] = {}
        for first in range(1, problem.tokens + 1, _STEP):
            each = replace(problem, tokens=first)
            config = self.choose(each, numbers, sm_count, activation=activation, machine=machine)
            found.setdefault(config, first)
        return found

    def tuned(
        self, problem: Problem, numbers: Numbers, machine: Machine, *, activation: str = "none"
    ) -> Config | None:
        """The fastest tile that was measured for the class of a problem; None if none was.

        Args:
            problem: Sizes, all positive.
            numbers: Dtypes, and how sums are taken.
            machine: The GPU.
            activation: The fastest of those that have it.
        """
        entry = Store.default().get(self.key(problem, numbers, machine))
        if not entry.measured:
            return None
        names = self.versions(numbers, self.tiles(numbers, activation))
        best = entry.best(names)
        return None if best is None else names[best]

    def key(self, problem: Problem, numbers: Numbers, machine: Machine) -> Key:
        """What tuning results of a problem are kept under: its numbers are in the words."""
        standing = self.standing(numbers)
        sizes = f"{problem.out}x{problem.k} {self.kind(numbers)}"
        spec = _plain(self.tiles(standing, "none")[0], standing)
        words = f"{sizes}, tokens {token_class(problem.tokens).name}"
        return Key(self.op, kernel_hash(spec), words, machine)

    def versions(
        self, numbers: Numbers, configs: Sequence[Config] | None = None
    ) -> dict[str, Config]:
        """Tiles by the names that tuning results have them under, in their order.

        Args:
            numbers: Dtypes, and how sums are taken.
            configs: The tiles; None is all of them.
        """
        standing = self.standing(numbers)
        known = self.tiles(standing, "none") if configs is None else configs
        return {_version(config, standing): config for config in known}


def _plain(config: Config, numbers: Numbers) -> KernelSpec:
    return spec_of_numbers(config, numbers, "none", False, False)


@cache
def _version(config: Config, numbers: Numbers) -> str:
    return version_of(config.name, _plain(config, numbers))


@lru_cache(maxsize=1 << 16)
def _by_model(
    chooser: Chooser, problem: Problem, numbers: Numbers, sm_count: int, activation: str
) -> Config:
    found = chooser.candidates(problem, numbers, sm_count, activation=activation)
    return fastest(found, problem, sm_count)
