"""Which tile several weights run on: the cost model's, for experts that share the tokens evenly.

How many tokens an expert has is known to the GPU alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ceil

from ....errors import ArgumentError
from ....plan import KernelSpec
from ..cost import Problem, fastest, predicted_us, suits
from ..kernel import MOST_EXPERTS, Config, Numbers, spec_of_numbers
from ..plan import for_experts

# Token counts of every tile are multiples of it.
_STEP = 16


@dataclass(frozen=True)
class ExpertsProblem:
    """y[tokens, out]: each row of x[tokens, k] times one of `experts` weights [out, k].

    Raises:
        ArgumentError: A size is no whole number above zero, or there are too many experts.
    """

    tokens: int
    experts: int
    out: int
    k: int

    def __post_init__(self) -> None:
        Problem(self.tokens, self.out, self.k)
        if type(self.experts) is not int or not 1 <= self.experts <= MOST_EXPERTS:
            raise ArgumentError(
                f"{self.experts!r} experts",
                need=f"1 to {MOST_EXPERTS}",
                hint="two calls, each with half of the experts",
            )

    @property
    def stacked(self) -> Problem:
        """The product of all weights, one below the other, with an even share of the tokens.

        As many bytes of w and of y, and as many tiles.

        Example:
            >>> ExpertsProblem(100, 8, 768, 2048).stacked
            Problem(tokens=16, out=6144, k=2048)
        """
        share = ceil(self.tokens / (self.experts * _STEP)) * _STEP
        return Problem(share, self.experts * self.out, self.k)


def candidates_experts(problem: ExpertsProblem, sm_count: int) -> list[Config]:
    """The tiles that suit a problem, the one that is predicted to be fastest first."""
    stacked = problem.stacked
    suited = [
        config
        for config in for_experts()
        # A cluster stays within one weight.
        if ceil(problem.out / config.out) >= config.cluster_out and suits(config, stacked, sm_count)
    ]
    return sorted(suited, key=lambda config: predicted_us(config, stacked, sm_count))


@lru_cache(maxsize=1 << 14)
def choose_experts(problem: ExpertsProblem, sm_count: int) -> Config:
    """The tile that runs.

    Args:
        problem: Sizes, all positive.
        sm_count: SMs of the GPU.

    Example:
        >>> choose_experts(ExpertsProblem(64, 8, 1024, 1024), 132).experts
        True
    """
    return fastest(candidates_experts(problem, sm_count), problem.stacked, sm_count)


def most_clusters(problem: ExpertsProblem, config: Config) -> int:
    """Clusters that may have work, however tokens are shared: each expert ends within a tile.

    Example:
        >>> one = ExpertsProblem(100, 1, 64, 64)
        >>> most_clusters(one, Config(1, 1, 16, 2, 8, experts=True))
        7
    """
    along_out = ceil(ceil(problem.out / config.out) / config.cluster_out)
    return along_out * (problem.tokens // (config.tokens * config.cluster_tokens) + problem.experts)


def experts_spec(config: Config, numbers: Numbers, activation: str) -> KernelSpec:
    """The kernel of a tile; results of 32 bits are stored a number at a time."""
    return spec_of_numbers(config, numbers, activation, False, numbers.out == "float32")
