"""What spmm_nm runs for a problem: which kernels may, and which one does."""

from __future__ import annotations

from functools import lru_cache

from ...plan import KernelSpec
from .cost import Problem, fills_cluster, predicted_us
from .kernel import Config, deepest, spec_for

__all__ = ["CANDIDATES", "SASS", "Problem", "candidates", "choose", "every_spec"]

#: Instructions that every kernel of this operator must hold.
SASS = ("HGMMA.SP", "UTMALDG", "USETMAXREG")


def _tile(
    warpgroups: int, panels: int, tokens: int, units: int, cluster: tuple[int, int] = (1, 1)
) -> Config:
    return deepest(Config(warpgroups, panels, tokens, units, 2, *cluster))


#: Every tile that is ever considered, the largest first.
CANDIDATES: tuple[Config, ...] = (
    _tile(2, 1, 256, 1, (2, 1)),
    _tile(2, 1, 256, 1),
    _tile(2, 2, 192, 1, (2, 1)),
    _tile(2, 2, 192, 1),
    _tile(2, 2, 128, 1, (2, 1)),
    _tile(2, 2, 128, 1, (1, 2)),
    _tile(2, 2, 128, 1),
    _tile(3, 1, 192, 1, (2, 1)),
    _tile(3, 1, 128, 1, (1, 2)),
    _tile(3, 1, 128, 1),
    _tile(2, 1, 128, 2, (1, 2)),
    _tile(2, 1, 128, 2, (2, 1)),
    _tile(2, 1, 128, 2),
    _tile(1, 1, 128, 2),
    _tile(3, 1, 64, 2, (1, 2)),
    _tile(2, 1, 64, 2, (1, 2)),
    _tile(2, 1, 64, 2),
    _tile(1, 1, 64, 2, (1, 2)),
    _tile(1, 1, 64, 2),
    _tile(2, 1, 32, 2),
    _tile(1, 1, 32, 2, (1, 2)),
    _tile(1, 1, 32, 2),
    _tile(2, 1, 16, 2),
    _tile(1, 1, 16, 2),
)


def candidates(problem: Problem, sm_count: int) -> list[Config]:
    """The tiles that suit a problem, the one that is predicted to be fastest first."""
    suited = [config for config in CANDIDATES if fills_cluster(config, problem)]
    return sorted(suited, key=lambda config: predicted_us(config, problem, sm_count))


@lru_cache(maxsize=4096)
def choose(problem: Problem, sm_count: int) -> Config:
    """The tile that runs."""
    return candidates(problem, sm_count)[0]


def every_spec() -> list[KernelSpec]:
    """Every kernel that a plain product may run, and one of each kind of epilogue."""
    specs = [spec_for(config, dtype) for dtype in ("bfloat16", "float16") for config in CANDIDATES]
    for config in (CANDIDATES[0], CANDIDATES[2], CANDIDATES[-1]):
        specs += [spec_for(config, "bfloat16", activation=act) for act in ("relu", "gelu", "silu")]
        specs.append(spec_for(config, "bfloat16", activation="gelu_tanh", residual=True))
        specs.append(spec_for(config, "float16", out_dtype="float32"))
        specs.append(spec_for(config, "bfloat16", direct=True))
    return specs
