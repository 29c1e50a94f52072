"""Tiles of 4-bit weights tuned end to end, and layers that are ready before their first call."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from hopsparse.formats import Quantized
from hopsparse.nn import SparseLinear
from hopsparse.ops import spmm_nm_int4
from hopsparse.ops.spmm_nm.chosen import coded_launch
from hopsparse.ops.spmm_nm.cost import Problem
from hopsparse.ops.spmm_nm.int4.ahead import prepare_int4
from hopsparse.ops.spmm_nm.int4.op import plan_int4
from hopsparse.ops.spmm_nm.int4.plan import INT4, Kind, choices_int4, int4_key, int4_versions
from hopsparse.ops.spmm_nm.int4.tuning import Int4Layer, named_int4_candidates, tune_int4
from hopsparse.ops.spmm_nm.kernel import Config
from hopsparse.ops.spmm_nm.plan import four_bit
from hopsparse.ops.spmm_nm.scaled.tuning import Ready
from hopsparse.ops.spmm_nm.tuning import measured_problem
from hopsparse.tune import Machine, Measured, Store, tune
from tests.helpers.prepared import refuse_to_compile

OUT, K, TOKENS = 512, 512, 100
PROBLEM = Problem(TOKENS, OUT, K)
# One of each that has results of its own.
TEXTS = (
    "int4:128/bfloat16",
    "int4:64/float16",
    "int4:32/bfloat16",
    "int4:32/float16",
    "int4:128/int8",
    "int4:128/float8_e4m3fn",
)
EVERY_KIND = pytest.mark.parametrize("kind", [Kind.parse(text) for text in TEXTS], ids=TEXTS)
CODES = Kind.parse("int4:128/float8_e4m3fn")


def weight(kind: Kind, device: torch.device) -> Quantized:
    """Whole numbers, of which every tile makes the same bits."""
    return Int4Layer(PROBLEM, kind, device).whole.w


def inputs(tokens: int, kind: Kind, device: torch.device) -> Tensor:
    return torch.randint(-2, 3, (tokens, K), device=device).to(kind.x_dtype)


@EVERY_KIND
def test_every_tile_is_right_and_the_winner_is_what_runs(
    kind: Kind, here: Machine, device: torch.device
) -> None:
    ranking = tune_int4(PROBLEM, kind, device=device)
    assert ranking.failed == {}
    assert ranking.unmeasured == ()
    assert {name: each.error for name, each in ranking.measured.items() if each.error} == {}
    assert set(ranking.timed) == set(named_int4_candidates(PROBLEM, kind.numbers, here.sm_count))
    assert all(0 < each.us < 1000 for each in ranking.measured.values())

    tile = int4_versions(kind.numbers)[ranking.order[0]]
    w = weight(kind, device)
    for tokens in (65, TOKENS, 128):
        told = plan_int4(w, inputs(tokens, kind, device)).describe()
        assert f"tile {tile.name}, tuned" in told
    assert "predicted" in plan_int4(w, inputs(129, kind, device)).describe()
    for numbers in (kind.numbers, replace(kind.numbers, out="float32")):
        launch = coded_launch(INT4, PROBLEM, numbers, "silu", True, device.index)
        assert launch.config == tile

    again = tune_int4(replace(PROBLEM, tokens=70), kind, device=device)
    assert again.timed == ()
    assert again.measured == ranking.measured


def test_groups_of_64_and_of_128_share_a_result(here: Machine, device: torch.device) -> None:
    ranking = tune_int4(PROBLEM, Kind(128, "bfloat16"), device=device)
    assert tune_int4(PROBLEM, Kind(64, "bfloat16"), device=device).timed == ()
    tile = int4_versions(Kind(64, "bfloat16").numbers)[ranking.order[0]]
    for group, told in ((64, f"tile {tile.name}, tuned"), (32, "predicted")):
        kind = Kind(group, "bfloat16")
        plan = plan_int4(weight(kind, device), inputs(TOKENS, kind, device))
        assert told in plan.describe()


def test_a_launch_that_was_planned_before_goes_by_the_new_result(
    here: Machine, device: torch.device
) -> None:
    kind = Kind(64, "bfloat16")
    w, x = weight(kind, device), inputs(TOKENS, kind, device)
    y = spmm_nm_int4(w, x)
    assert "predicted" in plan_int4(w, x).describe()
    ranking = tune_int4(PROBLEM, kind, device=device)
    assert torch.equal(spmm_nm_int4(w, x), y)
    tile = int4_versions(kind.numbers)[ranking.order[0]]
    assert f"tile {tile.name}, tuned" in plan_int4(w, x).describe()
    launch = coded_launch(INT4, PROBLEM, kind.numbers, "none", False, device.index)
    assert launch.config == tile


@pytest.mark.parametrize("kind", [Kind(64, "bfloat16"), CODES], ids=str)
@pytest.mark.parametrize("on", ["checked", "timed"])
def test_a_wrong_tile_is_dropped_and_never_timed(
    on: str, kind: Kind, here: Machine, device: torch.device
) -> None:
    stands = measured_problem(PROBLEM)
    named = dict(list(named_int4_candidates(PROBLEM, kind.numbers, here.sm_count).items())[:4])
    name, victim = list(named.items())[1]
    steps = Int4Layer(stands, kind, device).steps()

    def prepared(config: Config) -> Ready:
        """One tile forgets the last out-feature, of whole numbers or of what is timed alone."""
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

    key = int4_key(PROBLEM, kind.numbers, here)
    ranking = tune(Store.default(), key, named, replace(steps, prepare=prepared))
    assert "times the bound, so it was not timed" in ranking.measured[name].error
    assert len(ranking.timed) == len(named) - 1
    assert Store.default().best(key, [name]) is None


@EVERY_KIND
def test_scales_of_a_neighbouring_group_are_found_wrong(
    kind: Kind, here: Machine, device: torch.device
) -> None:
    """On whole numbers and on what is timed: a tile that reads them has the right magnitude."""
    layer = Int4Layer(measured_problem(PROBLEM), kind, device)
    steps = layer.steps()
    ready = steps.prepare(four_bit(kind.numbers)[-1])
    assert steps.verify(ready) <= 1

    def turned(w: Quantized, x: Tensor, scale: Tensor | None) -> Tensor:
        parts = w.parts() | {"scales": w.scales.roll(1, 1)}
        return spmm_nm_int4(w.with_parts(parts), x, scale)

    whole, x = layer.whole, layer.input
    checked = replace(ready, checked=lambda: turned(whole.w, whole.x.codes, whole.x.scale))
    assert steps.verify(checked) > 1
    timed = [lambda: turned(layer.first, x.codes, x.scale), *ready.timed[1:]]
    assert steps.verify(replace(ready, timed=timed)) > 1


@EVERY_KIND
@pytest.mark.parametrize("is_tuned", [False, True])
def test_nothing_is_compiled_or_loaded_after_it_was_prepared(
    kind: Kind,
    is_tuned: bool,
    here: Machine,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    most = 300
    if is_tuned:  # a tile that the model chooses nowhere here
        chosen = choices_int4(Problem(most, OUT, K), kind.numbers, here.sm_count)
        names = int4_versions(kind.numbers)
        name, tile = next(pair for pair in names.items() if pair[1] not in chosen)
        key = int4_key(Problem(40, OUT, K), kind.numbers, here)
        Store.default().put(key, {name: Measured(1.0, 1.0, 1.0)})
    w = weight(kind, device)
    found = prepare_int4(w, most, x_dtype=kind.x_dtype)
    assert found
    assert not is_tuned or tile in found
    refuse_to_compile(monkeypatch)
    for tokens in range(1, most + 1):
        spmm_nm_int4(w, inputs(tokens, kind, device))
    torch.cuda.synchronize()


@EVERY_KIND
def test_a_layer_says_which_tile_runs_and_who_chose_it(
    kind: Kind, here: Machine, device: torch.device
) -> None:
    layer = SparseLinear(weight(kind, device))
    x = torch.randn(TOKENS, K, device=device).to(kind.logical)
    with torch.no_grad():
        told = layer.plan(x).describe()
        assert "predicted; w widened in registers" in told
        assert ("quantize_rows, then" in told) == kind.numbers.grouped
        last = list(named_int4_candidates(PROBLEM, kind.numbers, here.sm_count))[-1]
        key = int4_key(PROBLEM, kind.numbers, here)
        Store.default().put(key, {last: Measured(1.0, 1.0, 1.0)})
        tile = int4_versions(kind.numbers)[last]
        assert f"tile {tile.name}, tuned; w widened in registers" in layer.plan(x).describe()
        layer(x)
    torch.cuda.synchronize()
