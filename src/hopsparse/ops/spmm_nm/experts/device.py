"""spmm_nm_experts on a GPU: a call that was seen before is one look-up and one launch."""

from __future__ import annotations

from functools import lru_cache
from math import ceil

from torch import Tensor

from ....compiler import KernelCache
from ....formats.nm import NM
from ....launch import (
    KnownLaunches,
    Turn,
    current_stream,
    device_facts,
    kernel_for,
    max_active_clusters,
    starts_early,
)
from ....ranges import in_phase
from ..._rows import rows_for_tma
from ..cost import Problem, rows_of_x, stages_of_k
from ..device import ELEMENTS, RASTER_TOKENS, Launch, address_of, check_sides
from ..facts import Experts, PlainCall
from ..kernel import Config, Numbers, fold_of
from .plan import ExpertsProblem, choose_experts, experts_spec, most_clusters

_BOUND = KnownLaunches()


@in_phase("sparse", "spmm_nm_experts")
def run(w: NM, x: Tensor, offs: Tensor, bias: Tensor | None, call: PlainCall) -> Tensor:
    """The product of arguments that were checked; as for `dispatch.by_experts`."""
    (rows, k), experts, device = w.shape, len(offs), x.get_device()
    tokens, out = len(x), rows // experts
    y = x.new_empty((tokens, out // fold_of(call.activation)), dtype=call.out_dtype)
    if tokens == 0:
        return y
    row = k
    if not x.is_contiguous() or k % 8 or x.data_ptr() % 16:
        x = rows_for_tma(x)
        row = x.stride(0)
    bias = None if bias is None else bias.contiguous()
    offs = offs.contiguous()
    turn = Turn(current_stream(device), starts_early())
    key = (
        (x.data_ptr(), w.values.data_ptr(), w.meta.data_ptr(), y.data_ptr()),
        (address_of(bias), offs.data_ptr()),
        *(tokens, experts, out, k, row, x.dtype, call, device, turn),
    )
    bound = _BOUND.get(key)
    if bound is None:
        problem = ExpertsProblem(tokens, experts, out, k)
        of_x, of_y = (str(each).removeprefix("torch.") for each in (x.dtype, call.out_dtype))
        launch = _launch(problem, Numbers(of_x, of_x, of_y), call.activation, device, call.config)
        who = Experts(key[1][1], experts)
        made = launch.bind(turn, key[0], row, (key[1][0], 0), 1.0, experts=who)
        bound = _BOUND.keep(key, made)
    bound()
    return y


@lru_cache(maxsize=4096)
def _launch(
    problem: ExpertsProblem,
    numbers: Numbers,
    activation: str,
    device: int,
    config: Config | None,
) -> Launch:
    stored = Problem(problem.tokens, problem.experts * problem.out, problem.k)
    check_sides(stored)
    config = config or choose_experts(problem, device_facts(device).sm_count)
    spec = experts_spec(config, numbers, activation)
    kernel = kernel_for(spec, device, lambda missing: KernelCache.default().get(missing).image)
    out_tiles = ceil(ceil(problem.out / config.out) / config.cluster_out)
    clusters = min(most_clusters(problem, config), max_active_clusters(kernel))
    group = max(1, RASTER_TOKENS // (config.tokens * config.cluster_tokens))
    stages, of_x = stages_of_k(config, stored), rows_of_x(config, problem.tokens)
    # How many token tiles there are the kernel counts for itself.
    sizes = (problem.tokens, problem.out, stages, out_tiles, 0, group, of_x)
    return Launch(kernel, config, stored, ELEMENTS[numbers.x], clusters * config.cluster, sizes)


def describe(problem: ExpertsProblem, device: int) -> str:
    """What runs for a problem, as a clause."""
    config = choose_experts(problem, device_facts(device).sm_count)
    return f"wgmma.sp, tile {config.name}, predicted; one launch for {problem.experts} experts"
