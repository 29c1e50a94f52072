"""What spmm_bsr runs for a problem: which kernels may, and whether one does."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ...errors import ArgumentError
from ...measure import Product, predict
from ...measure.roofline import REACHED
from ...plan import KernelSpec, Target
from . import fragments_cost, fragments_kernel
from .fragments import Fragments
from .fragments_kernel import FragmentConfig
from .kernel import WIDTHS, Config, deepest, spec_for, stores_directly
from .schedule import Problem, predicted_us

__all__ = [
    "CANDIDATES",
    "FRAGMENT_CANDIDATES",
    "Decision",
    "Problem",
    "candidates",
    "decide",
    "every_spec",
    "fragment_candidates",
    "sass_of",
    "spec_of",
]

#: Every tile that is ever considered, the largest first. Blocks of 128 rows share their tokens
#: between two panels; lower ones cannot, since their columns differ.
CANDIDATES: tuple[Config, ...] = (
    *(deepest(2, tokens, 64) for tokens in (128, 64, 16)),
    *(deepest(1, tokens, width) for width in WIDTHS for tokens in (256, 128, 64, 16)),
)

#: Those of the kernel of small blocks (fragments.cuh), by the height of its slots.
FRAGMENT_CANDIDATES: tuple[FragmentConfig, ...] = (
    *(FragmentConfig(1, tokens, cluster) for tokens, cluster in ((128, 2), (128, 1), (64, 1))),
    *(FragmentConfig(2, tokens, cluster) for tokens, cluster in ((64, 2), (64, 1), (32, 1))),
)

#: Tiles that are compiled ahead with more than a plain product, and are in the quick set of
#: `hopsparse verify`.
SHOWN: tuple[Config | FragmentConfig, ...] = (
    CANDIDATES[0],
    CANDIDATES[3],
    CANDIDATES[-1],
    *FRAGMENT_CANDIDATES[::3],
)
#: Tiles whose epilogues are verified.
WITH_EPILOGUES: tuple[Config | FragmentConfig, ...] = (CANDIDATES[-3], FRAGMENT_CANDIDATES[1])

# How much longer than predicted a kernel may take before dense would have been the better choice:
# predictions of wgmma are within 7 % of every measured row, those of mma.sync within 6 %.
_DOUBT, _DOUBT_OF_FRAGMENTS = 1.1, 1.07
# How much faster dense must be measured to be: it keeps the decoded weight beside the blocks.
_MARGIN = 1.02
# cuBLAS on weights of mostly zeros, which take less power and so more clocks: 0.89 to 1.01 of the
# sustained ceiling (spmm_bsr.jsonl), where it reaches 0.76 of it with numbers everywhere.
_DENSE_SHARE = 1.0
# Decoding w for one call: written and read once, by about 20 kernels, and three waits of the host.
_DECODING_US, _DECODING_BYTES = 120.0, 6
_SASS = ("HGMMA", "UTMALDG", "UBLKCP", "USETMAXREG", "BAR.ARV")
_SASS_OF_FRAGMENTS = ("HMMA.16816.F32", "LDSM.16.M88.4", "UTMALDG", "USETMAXREG")


@dataclass(frozen=True)
class Decision:
    """Which kernel is the fastest, and how long everything takes.

    Attributes:
        config: The tile.
        kernel_us: Device time of its kernel.
        dense_us: Of PyTorch's product, by a weight that was decoded before.
        decoding_us: Of decoding that weight, predicted.
        measured: Whether the two times before it were measured, and not predicted.
    """

    config: Config | FragmentConfig
    kernel_us: float
    dense_us: float
    decoding_us: float
    measured: bool = False

    def uses_kernel(self, *, kept: bool) -> bool:
        """Whether the kernel runs, and not the dense product.

        Args:
            kept: Whether the decoded weight would be kept between calls.
        """
        dense_us = self.dense_us if kept else self.dense_us + self.decoding_us
        if self.measured:
            return self.kernel_us <= _MARGIN * dense_us
        return doubted_us(self.config, self.kernel_us) <= dense_us

    def why(self, *, kept: bool) -> str:
        """The two times, as a clause."""
        rest = "" if kept else f" and {self.decoding_us:.1f} to decode w"
        return (
            f"tile {self.config.name} {'measured' if self.measured else 'predicted'} "
            f"{self.kernel_us:.1f} us, dense {self.dense_us:.1f}{rest}"
        )

    @property
    def instruction(self) -> str:
        """What its kernel multiplies by: `wgmma`, or `mma.sync` in that of small blocks."""
        return "wgmma" if isinstance(self.config, Config) else "mma.sync"


def doubted_us(config: Config | FragmentConfig, predicted_us: float) -> float:
    """A predicted time, longer by what its model may be wrong."""
    return predicted_us * (_DOUBT if isinstance(config, Config) else _DOUBT_OF_FRAGMENTS)


def candidates(panels: int, width: int) -> list[Config]:
    """The tiles for strips of so many panels, gathered in so many columns.

    Example:
        >>> [config.tokens for config in candidates(2, 64)]
        [128, 64, 16]
    """
    return [each for each in CANDIDATES if (each.panels, each.width) == (panels, width)]


def fragment_candidates(height: int) -> list[FragmentConfig]:
    """The tiles for slots of so many fragments.

    Example:
        >>> [config.tokens for config in fragment_candidates(2)]
        [64, 64, 32]
    """
    return [each for each in FRAGMENT_CANDIDATES if each.height == height]


def decide(
    lengths: Tensor,
    configs: Iterable[Config],
    problem: Problem,
    dtype: str,
    target: Target,
    *,
    fragments: Fragments | None = None,
) -> Decision:
    """The fastest tile for a weight, and the product that it competes with.

    Args:
        lengths: Steps of each strip, falling, on the CPU: `Strips.lengths`.
        configs: Its tiles: `candidates`.
        problem: Sizes.
        dtype: Of x and w.
        target: The GPU.
        fragments: Its layout for the kernel of small blocks, if that may run.

    Raises:
        ArgumentError: There is no tile.
    """
    timed = all_predicted_us(lengths, configs, problem, target, fragments=fragments)
    if not timed:
        raise ArgumentError("spmm_bsr: no tile", need="one or more", hint="plan.candidates(1, 64)")
    best = min(timed, key=lambda config: doubted_us(config, timed[config]))
    return Decision(
        best, timed[best], dense_us(problem, dtype, target), decoding_us(problem, target)
    )


def decoding_us(problem: Problem, target: Target) -> float:
    """Device and host time of decoding a weight for one call."""
    moved_us = 1e6 * _DECODING_BYTES * problem.out * problem.k / target.read_bandwidth
    return _DECODING_US + moved_us


def all_predicted_us(
    lengths: Tensor,
    configs: Iterable[Config],
    problem: Problem,
    target: Target,
    *,
    fragments: Fragments | None = None,
) -> dict[Config | FragmentConfig, float]:
    """Device time by tile; arguments as for `decide`."""
    sm_count = target.sm_count
    timed: dict[Config | FragmentConfig, float] = {
        config: predicted_us(config, lengths, problem, sm_count) for config in configs
    }
    if fragments is not None:
        for each in fragment_candidates(fragments.height):
            timed[each] = fragments_cost.predicted_us(each, fragments, problem, sm_count)
    return timed


def dense_us(problem: Problem, dtype: str, target: Target) -> float:
    """Device time of PyTorch's product by a decoded weight, most of which is zeros.

    Args:
        problem: Sizes.
        dtype: Of x and w.
        target: The GPU.

    Example:
        >>> from ...plan import TARGETS
        >>> round(dense_us(Problem(2048, 16384, 4096), "bfloat16", TARGETS["h200"]))
        319
    """
    found = predict(Product((problem.out, problem.k), dtype), problem.tokens, target)
    reached = REACHED["dense", "half"]
    memory_us = 1e6 * found.bytes / (target.read_bandwidth * reached.bandwidth)
    rest_us = found.time_us - reached.fixed_us
    if found.bound == "compute":
        rest_us = max(memory_us, rest_us * reached.compute / _DENSE_SHARE)
    return reached.fixed_us + rest_us


def spec_of(
    config: Config | FragmentConfig,
    out: int,
    dtype: str,
    *,
    out_dtype: str | None = None,
    activation: str = "none",
    residual: bool = False,
) -> KernelSpec:
    """The kernel of a tile for a weight of `out` rows; the rest is as for `spec_for`."""
    direct = stores_directly(out, out_dtype or dtype)
    facts = (out_dtype or dtype, activation, residual, direct)
    return tile_spec(config, dtype, *facts)


def tile_spec(
    config: Config | FragmentConfig,
    dtype: str,
    out_dtype: str | None = None,
    activation: str = "none",
    residual: bool = False,
    direct: bool = False,
) -> KernelSpec:
    """The kernel of a tile of either kind; arguments as for `kernel.spec_for`."""
    facts: dict[str, Any] = {
        "out_dtype": out_dtype,
        "activation": activation,
        "residual": residual,
        "direct": direct,
    }
    if isinstance(config, Config):
        return spec_for(config, dtype, **facts)
    return fragments_kernel.spec_for(config, dtype, **facts)


def sass_of(spec: KernelSpec) -> tuple[str, ...]:
    """Instructions that a kernel must hold."""
    return _SASS if spec.entry == "spmm_bsr_kernel" else _SASS_OF_FRAGMENTS


def every_spec() -> list[KernelSpec]:
    """Every kernel that a plain product may run, and one of each kind of epilogue."""
    tiles: tuple[Config | FragmentConfig, ...] = (*CANDIDATES, *FRAGMENT_CANDIDATES)
    specs = [tile_spec(config, dtype) for dtype in ("bfloat16", "float16") for config in tiles]
    for config in SHOWN:
        specs += [tile_spec(config, "bfloat16", activation=act) for act in ("relu", "gelu", "silu")]
        specs.append(tile_spec(config, "bfloat16", activation="gelu_tanh", residual=True))
        specs.append(tile_spec(config, "float16", out_dtype="float32"))
        specs.append(tile_spec(config, "bfloat16", direct=True))
    for config in WITH_EPILOGUES:
        behind: dict[str, Any] = {"activation": "silu", "residual": True}
        specs.append(tile_spec(config, "bfloat16", **behind))
        specs.append(tile_spec(config, "bfloat16", direct=True, **behind))
        specs.append(tile_spec(config, "bfloat16", out_dtype="float32", direct=True, **behind))
    return list(dict.fromkeys(specs))
