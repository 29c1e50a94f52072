"""Which tile a product with a weight of 4 bits runs, and what tiles of it are checked on."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hopsparse.errors import ArgumentError
from hopsparse.formats.scheme import parse_scheme
from hopsparse.measure.contest import Reference
from hopsparse.measure.suite import Int4Problem
from hopsparse.ops import spmm_nm_int4
from hopsparse.ops.spmm_nm.cost import Problem, predicted_us, stages_of_k, unit_clocks
from hopsparse.ops.spmm_nm.int4.op import plan_int4
from hopsparse.ops.spmm_nm.int4.plan import (
    KINDS,
    Kind,
    candidates_int4,
    choices_int4,
    choose_int4,
    int4_key,
    int4_versions,
    tuned_int4,
)
from hopsparse.ops.spmm_nm.int4.tuning import Int4Layer, named_int4_candidates
from hopsparse.ops.spmm_nm.kernel import Config, Numbers, spec_of_numbers
from hopsparse.ops.spmm_nm.plan import four_bit, key_of
from hopsparse.ops.spmm_nm.tuning import measured_problem
from hopsparse.quant import quantize_matrix
from hopsparse.tune import Machine, Measured, Store, version_of

HERE = Machine("NVIDIA H200", 132, "580.65.06")
LAYER = Problem(300, 4096, 4096)
# One of each that has results of its own.
DISTINCT = {
    "int4/bfloat16": Numbers("int4", "bfloat16", "bfloat16"),
    "int4/float16": Numbers("int4", "float16", "float16"),
    "int4:32/bfloat16": Numbers("int4", "bfloat16", "bfloat16", fine=True),
    "int4:32/float16": Numbers("int4", "float16", "float16", fine=True),
    "int4/int8": Numbers("int4", "int8", "bfloat16", grouped=True),
    "int4/float8_e4m3fn": Numbers("int4", "float8_e4m3fn", "bfloat16", grouped=True),
}
EVERY = pytest.mark.parametrize("numbers", DISTINCT.values(), ids=DISTINCT)
EVERY_KIND = pytest.mark.parametrize("kind", [Kind.parse(text) for text in KINDS], ids=KINDS)


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOPSPARSE_CACHE_DIR", str(tmp_path))


def store_times(problem: Problem, numbers: Numbers, times: dict[Config, float]) -> None:
    names = {config: name for name, config in int4_versions(numbers).items()}
    measured = {names[config]: Measured(us, us, us) for config, us in times.items()}
    Store.default().put(int4_key(problem, numbers, HERE), measured)


def test_kinds_are_what_kernels_multiply() -> None:
    assert tuple(Int4Problem.DTYPES) == KINDS
    for text in KINDS:
        kind = Kind.parse(text)
        assert str(kind) == text
        assert parse_scheme(kind.scheme).group == kind.group
        assert Int4Problem("", 64, 64, 1, text).torch_dtype == kind.x_dtype
        assert kind.numbers == Numbers(
            "int4",
            kind.x,
            "bfloat16" if kind.numbers.grouped else kind.x,
            grouped=kind.x in ("int8", "float8_e4m3fn"),
            fine=kind.group == 32,
        )
    assert {Kind.parse(text).numbers for text in KINDS} == set(DISTINCT.values())


@pytest.mark.parametrize("text", ["int4", "int4:64/int8", "int4:0/bfloat16", "int8:64/bfloat16"])
def test_what_no_kernel_multiplies_is_no_kind(text: str) -> None:
    with pytest.raises(ArgumentError, match=r"Required: one of int4:128/bfloat16, .*Try: "):
        Kind.parse(text)


def test_a_kind_cannot_be_made_of_what_no_kernel_multiplies() -> None:
    with pytest.raises(ArgumentError, match="'int4:32/int8'"):
        Kind(32, "int8")


def test_keys_name_x_and_fine_groups() -> None:
    found = {name: int4_key(LAYER, numbers, HERE) for name, numbers in DISTINCT.items()}
    for name, key in found.items():
        assert key.problem == f"4096x4096 {name}, tokens 257-512"
        assert key.op == "spmm_nm_int4"
    assert len({key.name for key in found.values()}) == len(DISTINCT)
    # The text of the kernel is that of 16 bits: what is edited in it is tuned anew in both.
    assert {key.kernel for key in found.values()} == {key_of(LAYER, "bfloat16", HERE).kernel}


@EVERY
@pytest.mark.parametrize("sm_count", [16, 132])
def test_without_results_the_model_chooses(numbers: Numbers, sm_count: int) -> None:
    for tokens in (16, 256, 4096):
        problem = replace(LAYER, tokens=tokens)
        times = {
            predicted_us(config, problem, sm_count, promoted=numbers.grouped): config
            for config in candidates_int4(problem, numbers, sm_count)
        }
        chosen = choose_int4(problem, numbers, sm_count, machine=HERE)
        assert chosen == times[min(times)]
        # As at every count that rounds up to the same multiple of 16.
        assert choose_int4(replace(problem, tokens=tokens - 15), numbers, sm_count) == chosen


@EVERY
def test_a_stored_winner_runs_for_its_class_and_its_numbers_alone(numbers: Numbers) -> None:
    ordered = candidates_int4(LAYER, numbers, 132)
    winner = ordered[-1]
    store_times(LAYER, numbers, {winner: 1.0, ordered[0]: 2.0})
    for tokens in (257, 300, 512):
        problem = replace(LAYER, tokens=tokens)
        assert choose_int4(problem, numbers, 132, machine=HERE) == winner
        assert choose_int4(problem, numbers, 132) != winner
        # An activation or another dtype of the result changes no main loop.
        wide = replace(numbers, out="float32")
        assert choose_int4(problem, wide, 132, machine=HERE, activation="silu") == winner
    for other in (replace(LAYER, tokens=256), replace(LAYER, out=4160), replace(LAYER, k=4160)):
        assert tuned_int4(other, numbers, HERE) is None
    for another in DISTINCT.values():
        assert (tuned_int4(LAYER, another, HERE) == winner) == (another == numbers)
    for machine in (replace(HERE, sm_count=114), replace(HERE, driver="590")):
        assert choose_int4(LAYER, numbers, 132, machine=machine) == ordered[0]


def test_a_wrong_tile_and_one_whose_text_has_changed_never_run() -> None:
    numbers = DISTINCT["int4/bfloat16"]
    first, second, *_ = int4_versions(numbers)
    config = int4_versions(numbers)[second]
    spec = spec_of_numbers(config, numbers, "none", False, False)
    edited = version_of(config.name, replace(spec, text=spec.text + "// edited"))
    times = {first: Measured.wrong("wrong"), edited: Measured(1.0, 1.0, 1.0)}
    Store.default().put(int4_key(LAYER, numbers, HERE), times)
    assert tuned_int4(LAYER, numbers, HERE) is None


def test_fine_groups_have_kernels_of_their_own() -> None:
    coarse, fine = (set(int4_versions(DISTINCT[f"int4{g}/bfloat16"])) for g in ("", ":32"))
    assert len(coarse) == len(fine) == len(four_bit(DISTINCT["int4/bfloat16"]))
    assert not coarse & fine


@EVERY
@pytest.mark.parametrize("is_tuned", [False, True])
def test_choices_are_all_that_any_count_chooses(numbers: Numbers, is_tuned: bool) -> None:
    if is_tuned:
        by_model = choices_int4(replace(LAYER, tokens=530), numbers, 132)
        never = next(each for each in four_bit(numbers) if each not in by_model)
        store_times(replace(LAYER, tokens=20), numbers, {never: 1.0})
    for most in (1, 16, 17, 530):
        found = choices_int4(replace(LAYER, tokens=most), numbers, 132, machine=HERE)
        chosen = [
            choose_int4(replace(LAYER, tokens=tokens), numbers, 132, machine=HERE)
            for tokens in range(1, most + 1)
        ]
        assert {config: chosen.index(config) + 1 for config in found} == found
        assert set(found) == set(chosen)
        if is_tuned:
            assert (never in found) == (most > 16)


@EVERY
def test_candidates_are_named_with_the_models_choice_first(numbers: Numbers) -> None:
    named = named_int4_candidates(LAYER, numbers, 132)
    assert list(named.values()) == candidates_int4(measured_problem(LAYER), numbers, 132)
    assert set(named) <= set(int4_versions(numbers))


@EVERY_KIND
@pytest.mark.parametrize(("tokens", "out", "k"), [(33, 48, 272), (16, 70, 2068)])
def test_what_tiles_are_checked_on_is_exact_and_tells_a_wrong_result(
    kind: Kind, tokens: int, out: int, k: int
) -> None:
    whole = Int4Layer(Problem(tokens, out, k), kind, torch.device("cpu")).whole
    assert set(whole.w.codes().to_dense().unique().tolist()) == set(range(-8, 8))
    reference = Reference(whole.wide_x, whole.wide_w)
    x, scale = whole.x.codes, whole.x.scale
    run = partial(spmm_nm_int4, whole.w)
    right = whole.wide_x.double() @ whole.wide_w.double().T
    assert torch.equal(run(x, scale), right.to(kind.logical))
    # Columns that are not walked, scales of the wrong group, and scales of the wrong token.
    short = x.float()
    short[:, -16:] = 0
    turned = whole.w.with_parts(whole.w.parts() | {"scales": whole.w.scales.roll(1, 1)})
    wrong = [run(short.to(x.dtype), scale), spmm_nm_int4(turned, x, scale)]
    wrong += [] if scale is None else [run(x, scale.roll(1, 0))]
    for y in wrong:
        assert reference.excess(y) > 1


@EVERY_KIND
def test_what_tiles_are_timed_on_is_in_bound_and_tells_a_wrong_result(kind: Kind) -> None:
    layer = Int4Layer(Problem(33, 70, 2068), kind, torch.device("cpu"))
    w, x, scale = layer.first, layer.input.codes, layer.input.scale
    assert str(w.scheme) == kind.scheme
    assert (w.dtype, x.dtype) == (kind.logical, kind.x_dtype)
    y = spmm_nm_int4(w, x, scale)
    assert layer.reference.excess(y) <= 1
    short = x.float()
    short[:, -160:] = 0
    for wrong in (
        spmm_nm_int4(w, short.to(x.dtype), scale),
        y.roll(1, 1),
        y.roll(1, 0),
        torch.full_like(y, torch.nan),
    ):
        assert layer.reference.excess(wrong) > 1


def test_a_plan_refuses_what_the_product_refuses() -> None:
    w = quantize_matrix(torch.zeros(16, 64).bfloat16(), "2:4+int4:64")
    x: Tensor = torch.ones(3, 64)
    with pytest.raises(ArgumentError, match="x_dtype=torch.float32"):
        plan_int4(w, x)


def test_teams_serve_few_tokens_and_share_the_units_of_k() -> None:
    for kind in ("int4:128/bfloat16", "int4:128/int8"):
        numbers = Kind.parse(kind).numbers
        few = choose_int4(Problem(1, 8192, 28672), numbers, 132)
        assert few.ways == few.warpgroups == 3
        assert few.out == 64
        assert few.stages >= 3 * few.ways
        assert choose_int4(Problem(4096, 8192, 28672), numbers, 132).ways == 1
        alone = replace(few, warpgroups=1, ways=1)
        assert unit_clocks(few, 1) < unit_clocks(alone, 1)
        stages = stages_of_k(few, Problem(1, 64, 4160))
        assert stages % (2 * few.ways) == 0
        assert stages * few.columns >= 4160


@pytest.mark.parametrize("changes", [{"ways": 2}, {"ways": 3, "stages": 5}])
def test_a_team_is_whole_and_has_two_stages_for_each(changes: dict[str, int]) -> None:
    sizes = {"warpgroups": 3, "panels": 1, "tokens": 16, "units": 2, "stages": 6}
    Config(**sizes, four_bit_w=True, ways=3)
    with pytest.raises(ArgumentError, match="whole teams of consumers, and two stages"):
        Config(**sizes | {"ways": 3} | changes, four_bit_w=True)
