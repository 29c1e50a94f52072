"""Tiles of codes tuned end to end, and layers of codes that are ready before their first call."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from hopsparse.formats import NM, NMPattern
from hopsparse.nn import SparseLinear
from hopsparse.ops import Scaling, spmm_nm_scaled
from hopsparse.ops.spmm_nm.chosen import coded_launch
from hopsparse.ops.spmm_nm.kernel import SWIGLU, Config, Numbers
from hopsparse.ops.spmm_nm.plan import Problem, eight_bit
from hopsparse.ops.spmm_nm.scaled.ahead import prepare_scaled
from hopsparse.ops.spmm_nm.scaled.op import plan_scaled
from hopsparse.ops.spmm_nm.scaled.plan import (
    SCALED,
    choices_scaled,
    numbers_for,
    scaled_key,
    scaled_versions,
)
from hopsparse.ops.spmm_nm.scaled.tuning import (
    CodesLayer,
    Ready,
    named_scaled_candidates,
    tune_scaled,
)
from hopsparse.ops.spmm_nm.tuning import measured_problem
from hopsparse.prune import magnitude
from hopsparse.quant import quantize_matrix
from hopsparse.tune import Machine, Measured, Store, tune
from tests.helpers.prepared import refuse_to_compile

OUT, K, TOKENS = 512, 512, 100
PROBLEM = Problem(TOKENS, OUT, K)
FP8 = "float8_e4m3fn"
DTYPES = {"int8": torch.int8, FP8: torch.float8_e4m3fn}
KINDS = {
    "int8": numbers_for("int8"),
    "promoted": numbers_for(FP8),
    "fast": numbers_for(FP8, "fast"),
    "grouped": numbers_for(FP8, grouped=True),
    "int4": numbers_for(f"{FP8}/int4"),
}
EVERY_KIND = pytest.mark.parametrize("numbers", KINDS.values(), ids=KINDS)


def weight(numbers: Numbers, device: torch.device) -> NM:
    dense = magnitude(torch.randint(-3, 4, (OUT, K), device=device).float(), NMPattern(2, 4))
    return NM.from_dense(dense.to(DTYPES[numbers.w]))


def inputs(tokens: int, numbers: Numbers, device: torch.device) -> Tensor:
    """Small integers: every tile gives the same bits."""
    if numbers.x == "int4":
        return torch.randint(-128, 128, (tokens, K // 2), device=device).to(torch.int8)
    return torch.randint(-2, 3, (tokens, K), device=device).to(DTYPES[numbers.x])


@EVERY_KIND
def test_every_tile_is_right_and_the_winner_is_what_runs(
    numbers: Numbers, here: Machine, device: torch.device
) -> None:
    ranking = tune_scaled(PROBLEM, numbers, device=device)
    assert ranking.failed == {}
    assert ranking.unmeasured == ()
    assert {name: each.error for name, each in ranking.measured.items() if each.error} == {}
    assert set(ranking.timed) == set(named_scaled_candidates(PROBLEM, numbers, here.sm_count))
    assert all(0 < each.us < 1000 for each in ranking.measured.values())

    tile = scaled_versions(numbers)[ranking.order[0]]
    groups = torch.ones(OUT, K // 128, device=device) if numbers.grouped else None
    scaling = Scaling(w=groups, sums="promoted" if numbers.promoted else "fast")
    w = weight(numbers, device)
    for tokens in (65, TOKENS, 128):
        told = plan_scaled(w, inputs(tokens, numbers, device), scaling).describe()
        assert f"tile {tile.name}, tuned" in told
    assert "predicted" in plan_scaled(w, inputs(129, numbers, device), scaling).describe()
    launch = coded_launch(SCALED, PROBLEM, numbers, "none", False, device.index)
    assert launch.config == tile

    again = tune_scaled(replace(PROBLEM, tokens=70), numbers, device=device)
    assert again.timed == ()
    assert again.measured == ranking.measured


def test_a_launch_that_was_planned_before_goes_by_the_new_result(
    here: Machine, device: torch.device
) -> None:
    w, x = weight(KINDS["int8"], device), inputs(TOKENS, KINDS["int8"], device)
    y = spmm_nm_scaled(w, x)
    assert "predicted" in plan_scaled(w, x).describe()
    ranking = tune_scaled(PROBLEM, KINDS["int8"], device=device)
    assert torch.equal(spmm_nm_scaled(w, x), y)
    tile = scaled_versions(KINDS["int8"])[ranking.order[0]]
    assert f"tile {tile.name}, tuned" in plan_scaled(w, x).describe()


@pytest.mark.parametrize("on", ["checked", "timed"])
def test_a_wrong_tile_is_dropped_and_never_timed(
    on: str, here: Machine, device: torch.device
) -> None:
    numbers = KINDS["promoted"]
    stands = measured_problem(PROBLEM)
    named = dict(list(named_scaled_candidates(PROBLEM, numbers, here.sm_count).items())[:4])
    name, victim = list(named.items())[1]
    steps = CodesLayer(stands, numbers, device).steps()

    def prepared(config: Config) -> Ready:
        """One tile forgets the last out-feature, of integers or of codes alone."""
        ready = steps.prepare(config)
        if config != victim:
            return ready
        right = ready.checked if on == "checked" else ready.timed[0]

        def forget() -> Tensor:
            y = right()
            y[:, -1] = 0
            return y

        if on == "checked":
            return replace(ready, checked=forget)
        return replace(ready, timed=[forget, *ready.timed[1:]])

    key = scaled_key(PROBLEM, numbers, here)
    ranking = tune(Store.default(), key, named, replace(steps, prepare=prepared))
    assert "times the bound, so it was not timed" in ranking.measured[name].error
    assert len(ranking.timed) == len(named) - 1
    assert Store.default().best(key, [name]) is None


def test_sums_that_are_not_promoted_are_found_wrong_where_they_should_be(
    here: Machine, device: torch.device
) -> None:
    """What a tile of promoted sums is checked on tells fast ones apart."""
    numbers = KINDS["promoted"]
    layer = CodesLayer(replace(measured_problem(PROBLEM), k=8192), numbers, device)
    steps = layer.steps()
    ready = steps.prepare(eight_bit(numbers)[0])
    assert steps.verify(ready) <= 1
    whole = layer.whole

    def fast() -> Tensor:
        return spmm_nm_scaled(whole.w, whole.x, replace(whole.scaling, sums="fast"))

    assert steps.verify(replace(ready, checked=fast)) > 1


@EVERY_KIND
@pytest.mark.parametrize("is_tuned", [False, True])
@pytest.mark.parametrize("act", [None, SWIGLU])
def test_nothing_is_compiled_or_loaded_after_it_was_prepared(
    numbers: Numbers,
    is_tuned: bool,
    act: str | None,
    here: Machine,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    most, activation = 300, act or "none"
    if is_tuned:  # a tile that the model chooses nowhere here
        problem = Problem(most, OUT, K)
        chosen = choices_scaled(problem, numbers, here.sm_count, activation=activation)
        names = scaled_versions(numbers, eight_bit(numbers, activation))
        name = next(name for name, each in names.items() if each not in chosen)
        key = scaled_key(Problem(40, OUT, K), numbers, here)
        Store.default().put(key, {name: Measured(1.0, 1.0, 1.0)})
    w = weight(numbers, device)
    groups = torch.ones(OUT, K // 128, device=device) if numbers.grouped else None
    scaling = Scaling(w=groups, sums="promoted" if numbers.promoted else "fast")
    x_dtype = torch.int8 if numbers.x == "int4" else None
    found = prepare_scaled(w, most, scaling, x_dtype=x_dtype, act=act)
    assert found
    assert all(each.bits == 8 for each in found)
    refuse_to_compile(monkeypatch)
    for tokens in range(1, most + 1):
        spmm_nm_scaled(w, inputs(tokens, numbers, device), scaling, act=act)
    torch.cuda.synchronize()


@pytest.mark.parametrize(
    "scheme", ["int8", "fp8", "fp8/int4", "int8/int8:static", "int4:64", "int4:128/int8"]
)
def test_a_layer_of_codes_is_prepared_with_what_rounds_its_inputs(
    scheme: str, here: Machine, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    dense = magnitude(torch.randn(OUT, K).bfloat16(), NMPattern(2, 4))
    scale = torch.tensor([0.05]) if "static" in scheme else None
    layer = SparseLinear(quantize_matrix(dense, f"2:4+{scheme}", input_scale=scale)).to(device)
    layer.prepare(max_tokens=200)
    assert layer._decoded is None
    refuse_to_compile(monkeypatch)
    with torch.no_grad():
        for tokens in (1, 16, 17, 64, 100, 200):
            x = torch.randn(tokens, K, device=device).bfloat16()
            assert layer.plan(x).name == "kernel"
            assert "tile" in layer.plan(x).describe()
            layer(x)
            # Rows off 16 bytes are rounded by another kernel.
            layer(torch.randn(tokens * K + 1, device=device).bfloat16()[1:].view(tokens, K))
    torch.cuda.synchronize()
