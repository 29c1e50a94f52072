"""Which tile a product of codes runs: by the cost model, or by what was tuned for its class."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hopsparse.errors import ArgumentError, UnsupportedError
from hopsparse.formats import NM
from hopsparse.measure.contest import Reference
from hopsparse.nn import SparseLinear
from hopsparse.ops import spmm_nm_scaled
from hopsparse.ops.spmm_nm.chooser import coded_us
from hopsparse.ops.spmm_nm.cost import (
    FITTED,
    Problem,
    predicted_us,
    unit_clocks,
    widen_once_us,
)
from hopsparse.ops.spmm_nm.int4.ahead import prepare_int4
from hopsparse.ops.spmm_nm.int4.plan import choose_int4
from hopsparse.ops.spmm_nm.kernel import SWIGLU, Config, Numbers, spec_of_numbers
from hopsparse.ops.spmm_nm.plan import choose, eight_bit, key_of
from hopsparse.ops.spmm_nm.scaled.ahead import prepare_scaled
from hopsparse.ops.spmm_nm.scaled.plan import (
    as_widened,
    candidates_scaled,
    choices_scaled,
    choose_scaled,
    kind_of,
    numbers_for,
    scaled_key,
    scaled_versions,
    tuned_scaled,
    widens_once,
)
from hopsparse.ops.spmm_nm.scaled.tuning import (
    CodesLayer,
    named_scaled_candidates,
)
from hopsparse.ops.spmm_nm.tuning import measured_problem
from hopsparse.quant import quantize_matrix
from hopsparse.tune import Machine, Measured, Store, version_of

HERE = Machine("NVIDIA H200", 132, "580.65.06")
LAYER = Problem(300, 4096, 4096)
FP8 = "float8_e4m3fn"
KINDS = {
    "int8": numbers_for("int8"),
    f"{FP8} promoted": numbers_for(FP8),
    f"{FP8} fast": numbers_for(FP8, "fast"),
    f"{FP8} grouped": numbers_for(FP8, grouped=True),
    f"{FP8}/int4 promoted": numbers_for(f"{FP8}/int4"),
}
EVERY_KIND = pytest.mark.parametrize("numbers", KINDS.values(), ids=KINDS)


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOPSPARSE_CACHE_DIR", str(tmp_path))


def store_times(problem: Problem, numbers: Numbers, times: dict[Config, float]) -> None:
    names = {config: name for name, config in scaled_versions(numbers).items()}
    measured = {names[config]: Measured(us, us, us) for config, us in times.items()}
    Store.default().put(scaled_key(problem, numbers, HERE), measured)


def slowest(problem: Problem, numbers: Numbers) -> Config:
    return candidates_scaled(problem, numbers, 132)[-1]


def test_keys_name_codes_sums_and_groups() -> None:
    found = {name: scaled_key(LAYER, numbers, HERE) for name, numbers in KINDS.items()}
    assert [kind_of(numbers) for numbers in KINDS.values()] == list(KINDS)
    for name, key in found.items():
        assert key.problem == f"4096x4096 {name}, tokens 257-512"
        assert key.op == "spmm_nm_scaled"
    assert len({key.name for key in found.values()}) == len(KINDS)
    # The text of the kernel is that of 16 bits: what is edited in it is tuned anew in both.
    assert {key.kernel for key in found.values()} == {key_of(LAYER, "bfloat16", HERE).kernel}


@pytest.mark.parametrize(
    ("dtype", "sums", "grouped"),
    [("bfloat16", "fast", False), (FP8, "exact", False), ("int8", "promoted", True)],
)
def test_what_no_product_of_codes_computes_with_is_refused(
    dtype: str, sums: str, grouped: bool
) -> None:
    with pytest.raises(ArgumentError, match=r"Required: .*Try: "):
        numbers_for(dtype, sums, grouped=grouped)


@EVERY_KIND
@pytest.mark.parametrize("sm_count", [16, 132])
def test_without_results_the_model_chooses(numbers: Numbers, sm_count: int) -> None:
    for tokens in (16, 256, 4096):
        problem = replace(LAYER, tokens=tokens)
        how = {
            "promoted": numbers.promoted or numbers.grouped,
            "widened_x": numbers.x == "int4",
        }
        times = {
            predicted_us(config, problem, sm_count, **how): config
            for config in candidates_scaled(problem, numbers, sm_count)
        }
        chosen = choose_scaled(problem, numbers, sm_count, machine=HERE)
        assert chosen == times[min(times)]
        # As at every count that rounds up to the same multiple of 16.
        assert choose_scaled(replace(problem, tokens=tokens - 15), numbers, sm_count) == chosen


@EVERY_KIND
def test_a_stored_winner_runs_for_its_class_and_its_kind_alone(numbers: Numbers) -> None:
    winner = slowest(LAYER, numbers)
    store_times(LAYER, numbers, {winner: 1.0, candidates_scaled(LAYER, numbers, 132)[0]: 2.0})
    for tokens in (257, 300, 512):
        problem = replace(LAYER, tokens=tokens)
        assert choose_scaled(problem, numbers, 132, machine=HERE) == winner
        assert choose_scaled(problem, numbers, 132) != winner
    for other in (replace(LAYER, tokens=256), replace(LAYER, out=4160), replace(LAYER, k=4160)):
        assert tuned_scaled(other, numbers, HERE) is None
    for another in KINDS.values():
        assert (tuned_scaled(LAYER, another, HERE) == winner) == (another == numbers)
    for machine in (replace(HERE, sm_count=114), replace(HERE, driver="590")):
        assert choose_scaled(LAYER, numbers, 132, machine=machine) == choose_scaled(
            LAYER, numbers, 132
        )
    assert choose(LAYER, 132, machine=HERE) == choose(LAYER, 132)


def test_other_results_and_e5m2_take_the_same_winner() -> None:
    numbers = KINDS[f"{FP8} promoted"]
    winner = slowest(LAYER, numbers)
    store_times(LAYER, numbers, {winner: 1.0})
    for other in (replace(numbers, out="float32"), replace(numbers, x="float8_e5m2", out=FP8)):
        assert choose_scaled(LAYER, other, 132, machine=HERE) == winner


def test_swiglu_takes_the_fastest_of_the_tiles_that_have_it() -> None:
    numbers, problem = KINDS["int8"], replace(LAYER, tokens=16)
    folding = eight_bit(numbers, SWIGLU)
    without = next(c for c in candidates_scaled(problem, numbers, 132) if c not in folding)
    second, third = (c for c in folding[-2:])
    store_times(problem, numbers, {without: 1.0, second: 2.0, third: 3.0})
    assert tuned_scaled(problem, numbers, HERE) == without
    assert choose_scaled(problem, numbers, 132, activation=SWIGLU, machine=HERE) == second
    store_times(replace(problem, k=64), numbers, {without: 1.0})
    assert tuned_scaled(replace(problem, k=64), numbers, HERE, activation=SWIGLU) is None


def test_a_wrong_tile_and_one_whose_text_has_changed_never_run() -> None:
    numbers = KINDS["int8"]
    first, second, *_ = scaled_versions(numbers)
    config = scaled_versions(numbers)[second]
    spec = spec_of_numbers(config, numbers, "none", False, False)
    edited = version_of(config.name, replace(spec, text=spec.text + "// edited"))
    times = {first: Measured.wrong("wrong"), edited: Measured(1.0, 1.0, 1.0)}
    Store.default().put(scaled_key(LAYER, numbers, HERE), times)
    assert tuned_scaled(LAYER, numbers, HERE) is None


@EVERY_KIND
@pytest.mark.parametrize("is_tuned", [False, True])
@pytest.mark.parametrize("activation", ["none", SWIGLU])
def test_choices_are_all_that_any_count_chooses(
    numbers: Numbers, is_tuned: bool, activation: str
) -> None:
    how = {"activation": activation, "machine": HERE}
    if is_tuned:
        by_model = choices_scaled(replace(LAYER, tokens=530), numbers, 132, activation=activation)
        never = next(each for each in eight_bit(numbers, activation) if each not in by_model)
        store_times(replace(LAYER, tokens=20), numbers, {never: 1.0})
    for most in (1, 16, 17, 530):
        found = choices_scaled(replace(LAYER, tokens=most), numbers, 132, **how)  # type: ignore[arg-type]
        chosen = [
            choose_scaled(replace(LAYER, tokens=tokens), numbers, 132, **how)  # type: ignore[arg-type]
            for tokens in range(1, most + 1)
        ]
        assert {config: chosen.index(config) + 1 for config in found} == found
        assert set(found) == set(chosen)
        if is_tuned:
            assert (never in found) == (most > 16)


def test_candidates_are_named_with_the_models_choice_first() -> None:
    numbers = KINDS[f"{FP8} fast"]
    named = named_scaled_candidates(LAYER, numbers, 132)
    ordered = candidates_scaled(measured_problem(LAYER), numbers, 132)
    assert list(named.values()) == ordered
    assert set(named) <= set(scaled_versions(numbers))


def test_bytes_and_operations_of_8_bits_are_half_of_those_of_16(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where one bound is all that counts, the constants of both being equal."""
    monkeypatch.setitem(FITTED, 8, FITTED[16])
    wide = Config(2, 1, 128, 1, 4)
    narrow = replace(wide, bits=8)
    # A unit takes the same instructions and is twice the columns.
    assert narrow.columns == 2 * wide.columns
    clocks = unit_clocks(wide, 4096)
    assert clocks <= unit_clocks(narrow, 4096) < 1.02 * clocks  # index words, from L2
    # Few tokens on a large weight: bytes alone, 9 bits an entry against 5, and y.
    problem = Problem(16, 65536, 65536)
    cells = 65536 * 65536
    for config, bits in ((wide, 9), (narrow, 5)):
        floor = (cells * bits / 8 + 16 * 65536 * 2) / FITTED[16].memory_bytes_us
        assert predicted_us(config, problem, 10**6) >= floor + FITTED[16].fixed_us
        less = predicted_us(config, problem, 10**6, result_bytes=1.0)
        assert less < predicted_us(config, problem, 10**6)


def test_promoted_sums_cost_more_the_fewer_warpgroups_multiply_meanwhile() -> None:
    for one in eight_bit(KINDS[f"{FP8} promoted"]):
        assert unit_clocks(one, 4096, promoted=True) > unit_clocks(one, 4096)
    alone, two = (Config(n, 1, 128, 1, 4, bits=8) for n in (1, 2))
    alone_cost, two_cost = (
        unit_clocks(each, 4096, promoted=True) / unit_clocks(each, 4096) for each in (alone, two)
    )
    assert alone_cost > two_cost


@EVERY_KIND
@pytest.mark.parametrize(("tokens", "out", "k"), [(33, 48, 272), (16, 70, 2068)])
def test_what_tiles_are_checked_on_is_exact_and_tells_a_wrong_result(
    numbers: Numbers, tokens: int, out: int, k: int
) -> None:
    whole = CodesLayer(Problem(tokens, out, k), numbers, torch.device("cpu")).whole
    reference = Reference(whole.wide_x, whole.wide_w)
    assert reference.excess(spmm_nm_scaled(whole.w, whole.x, whole.scaling)) <= 1
    # Columns that are not walked, and scales of the wrong token or row.
    short = whole.x.float()
    short[:, -16:] = 0
    assert whole.scaling.w is not None
    assert whole.scaling.x is not None
    for x, scaling in (
        (short.to(whole.x.dtype), whole.scaling),
        (whole.x, replace(whole.scaling, x=whole.scaling.x.roll(1, 0))),
        (whole.x, replace(whole.scaling, w=whole.scaling.w.roll(1, 0))),
    ):
        assert reference.excess(spmm_nm_scaled(whole.w, x, scaling)) > 1


def test_on_the_cpu_there_is_no_kernel_to_prepare() -> None:
    codes = NM.from_dense(torch.zeros(16, 64, dtype=torch.int8))
    assert prepare_scaled(codes, 4096, act="swiglu") == ()
    layer = SparseLinear(
        quantize_matrix(torch.ones(16, 64) * torch.tensor([1, 0, 0, 1] * 16), "2:4+int8")
    )
    layer.prepare(8)
    assert layer._decoded is not None


def test_4_bit_weights_have_nothing_to_prepare_on_the_cpu_either() -> None:
    w = quantize_matrix(torch.zeros(16, 64).bfloat16(), "2:4+int4:128/fp8")
    assert prepare_int4(w, 4096, x_dtype=torch.float8_e4m3fn) == ()
    with pytest.raises(ArgumentError, match="max_tokens=0"):
        prepare_int4(w, 0)


@pytest.mark.parametrize(
    ("tokens", "act", "told"),
    [(0, None, "max_tokens=0"), (-1, None, "max_tokens=-1"), (16, "tanh", "'tanh'")],
)
def test_what_no_call_can_be_is_refused(tokens: int, act: str | None, told: str) -> None:
    codes = NM.from_dense(torch.zeros(16, 64, dtype=torch.int8))
    with pytest.raises(ArgumentError, match=told):
        prepare_scaled(codes, tokens, act=act)


@pytest.mark.parametrize("sides", [(0, 64, 64), (5, -1, 64), (5, 64, 2.5), ("5", 64, 64)])
def test_sizes_are_whole_and_positive(sides: Any) -> None:
    with pytest.raises(ArgumentError, match="whole numbers above 0"):
        Problem(*sides)


@pytest.mark.parametrize("sm_count", [1, 2, 3])
def test_a_slice_of_few_sms_takes_no_larger_cluster(sm_count: int) -> None:
    four = Numbers("int4", "bfloat16", "bfloat16")
    for problem in (Problem(1, 1, 1), Problem(16, 4096, 2**31 - 2**13), Problem(4096, 4096, 64)):
        assert choose(problem, sm_count).cluster <= sm_count
        assert choose_scaled(problem, KINDS["int8"], sm_count).cluster <= sm_count
        assert choose_int4(problem, four, sm_count).cluster <= sm_count


def test_without_an_sm_nothing_is_chosen() -> None:
    problem, four = Problem(16, 64, 64), Numbers("int4", "bfloat16", "bfloat16")
    with pytest.raises(UnsupportedError, match="0 SMs"):
        choose_scaled(problem, KINDS["int8"], 0)
    with pytest.raises(UnsupportedError, match="0 SMs"):
        choose_int4(problem, four, 0)
    with pytest.raises(UnsupportedError, match="0 SMs"):
        choose(problem, 0)


def test_x_of_4_bits_is_widened_once_where_that_is_predicted_to_be_faster() -> None:
    for sums in ("promoted", "fast"):
        numbers = numbers_for("float8_e4m3fn/int4", sums)
        behind = as_widened(numbers)
        assert behind == numbers_for("float8_e4m3fn", sums)
        for tokens, out in ((1, 4096), (1024, 4096), (1024, 64), (16, 64)):
            problem = replace(LAYER, tokens=-(-tokens // 16) * 16, out=out)
            in_tile = coded_us(choose_scaled(problem, numbers, 132), problem, numbers, 132)
            apart = coded_us(choose_scaled(problem, behind, 132), problem, behind, 132)
            once = widen_once_us(problem) + apart < in_tile
            assert widens_once(replace(problem, tokens=tokens), numbers, 132) == once
    assert widens_once(replace(LAYER, tokens=1024), numbers, 132)
    assert not widens_once(Problem(1024, 64, 4096), numbers, 132)
    assert not widens_once(replace(LAYER, tokens=1024), behind, 132)


def test_more_than_the_pass_counts_is_widened_in_the_tile() -> None:
    numbers = numbers_for("float8_e4m3fn/int4")
    assert widens_once(Problem(2**16, 4096, 2**18), numbers, 132)
    assert not widens_once(Problem(2**18, 4096, 2**18), numbers, 132)


def test_a_tuned_tile_counts_in_the_decision() -> None:
    """A tuned tile that is predicted to be slower makes the other way the faster one."""
    numbers = numbers_for("float8_e4m3fn/int4")
    problem = replace(LAYER, tokens=1024)
    behind = as_widened(numbers)
    times = dict.fromkeys(candidates_scaled(problem, behind, HERE.sm_count), 100.0)
    times[max(times, key=lambda c: coded_us(c, problem, behind, HERE.sm_count))] = 1.0
    store_times(problem, behind, times)
    slow = choose_scaled(problem, behind, HERE.sm_count, machine=HERE)
    us = widen_once_us(problem) + coded_us(slow, problem, behind, HERE.sm_count)
    own = coded_us(choose_scaled(problem, numbers, HERE.sm_count), problem, numbers, HERE.sm_count)
    assert widens_once(problem, numbers, HERE.sm_count, machine=HERE) == (us < own)
    assert us > own
