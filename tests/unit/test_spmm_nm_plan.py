"""Which tile a problem runs: by the cost model, or by what was tuned for its class."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import torch

from hopsparse.errors import ArgumentError, UnsupportedError
from hopsparse.formats import NM, NMPattern
from hopsparse.launch import Element, Kernel, Turn
from hopsparse.nn import SparseLinear
from hopsparse.ops.spmm_nm import plan, prepare
from hopsparse.ops.spmm_nm.cost import predicted_us
from hopsparse.ops.spmm_nm.device import Epilogue, Launch, launch_for
from hopsparse.ops.spmm_nm.kernel import Config, spec_for
from hopsparse.ops.spmm_nm.plan import (
    CANDIDATES,
    DENSE,
    Problem,
    candidates,
    choices,
    choose,
    key_of,
    tuned,
    versions,
)
from hopsparse.ops.spmm_nm.tuning import measured_problem, named_candidates
from hopsparse.plan import parse_target
from hopsparse.plan.budget import check, warpgroup_registers
from hopsparse.prune import magnitude
from hopsparse.tune import Machine, Measured, Store, token_classes, version_of

HERE = Machine("NVIDIA H200", 132, "580.65.06")
LAYER = Problem(300, 4096, 4096)
# Of no kernel: what it refuses it refuses before it needs one.
LAUNCH = Launch(cast(Kernel, None), CANDIDATES[0], LAYER, Element.BF16, 1, (1,) * 7)


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOPSPARSE_CACHE_DIR", str(tmp_path))


def store_winner(problem: Problem, winner: Config, dtype: str = "bfloat16") -> None:
    """As if every tile had been measured, and `winner` were the fastest."""
    times = {
        name: Measured(us := 1.0 if config == winner else 2.0, us, us)
        for name, config in versions(dtype).items()
    }
    Store.default().put(key_of(problem, dtype, HERE), times)


def slowest(problem: Problem) -> Config:
    return candidates(problem, 132)[-1]


def test_every_tile_takes_whole_steps_of_tokens() -> None:
    # `choose` rounds token counts up to a multiple of 16: no tile may tell finer ones apart.
    assert all(config.tokens % 16 == 0 for config in CANDIDATES)
    assert all(each.measured % 16 == 0 for each in token_classes())


@pytest.mark.parametrize("gpu", ["h200", "h100", "h200:1/7"])
def test_every_tile_fits_an_sm(gpu: str) -> None:
    for config in CANDIDATES:
        producer, consumer = warpgroup_registers(config.warpgroups)
        for dtype in ("bfloat16", "float16"):
            registers = (producer, *[consumer] * config.warpgroups)
            check(spec_for(config, dtype), parse_target(gpu), registers)


@pytest.mark.parametrize("sm_count", [16, 132])
def test_without_results_the_model_chooses(sm_count: int) -> None:
    for tokens in (16, 256, 4096):
        problem = replace(LAYER, tokens=tokens)
        times = {predicted_us(config, problem, sm_count): config for config in CANDIDATES}
        chosen = choose(problem, sm_count, machine=HERE)
        assert predicted_us(chosen, problem, sm_count) == min(times)


def test_a_stored_winner_runs_for_its_class_alone() -> None:
    store_winner(LAYER, slowest(LAYER))
    for tokens in (257, 300, 512):
        assert choose(replace(LAYER, tokens=tokens), 132, machine=HERE) == slowest(LAYER)
    for other in (
        replace(LAYER, tokens=256),
        replace(LAYER, tokens=513),
        replace(LAYER, out=4160),
        replace(LAYER, k=4160),
    ):
        assert tuned(other, "bfloat16", HERE) is None
        assert choose(other, 132, machine=HERE) == choose(other, 132)


def test_a_stored_winner_is_of_one_dtype_and_one_kind_of_machine() -> None:
    store_winner(LAYER, slowest(LAYER))
    assert tuned(LAYER, "bfloat16", HERE) == slowest(LAYER)
    assert tuned(LAYER, "float16", HERE) is None
    for other in (
        replace(HERE, gpu="NVIDIA H200 MIG 1g.18gb"),
        replace(HERE, sm_count=114),
        replace(HERE, driver="590"),
    ):
        assert tuned(LAYER, "bfloat16", other) is None
    assert choose(LAYER, 132) != slowest(LAYER)


def test_a_tile_whose_text_has_changed_is_not_the_one_that_was_measured() -> None:
    config = slowest(LAYER)
    spec = spec_for(config, "bfloat16")
    edited = version_of(config.name, replace(spec, text=spec.text + "// edited"))
    Store.default().put(key_of(LAYER, "bfloat16", HERE), {edited: Measured(1.0, 1.0, 1.0)})
    assert tuned(LAYER, "bfloat16", HERE) is None


def test_a_wrong_tile_and_the_dense_product_never_run() -> None:
    first, second = list(versions("bfloat16"))[:2]
    times = {DENSE: Measured(0.1, 0.1, 0.1), second: Measured(5.0, 5.0, 5.0)}
    times[first] = Measured.wrong("wrong")
    Store.default().put(key_of(LAYER, "bfloat16", HERE), times)
    assert tuned(LAYER, "bfloat16", HERE) == versions("bfloat16")[second]


@pytest.mark.parametrize("most", [1, 16, 17, 530])
@pytest.mark.parametrize("is_tuned", [False, True])
def test_choices_are_all_that_any_count_chooses(most: int, is_tuned: bool) -> None:
    by_model = {choose(replace(LAYER, tokens=tokens), 132) for tokens in range(1, 531)}
    never = next(config for config in CANDIDATES if config not in by_model)
    if is_tuned:
        store_winner(replace(LAYER, tokens=20), never)
    found = choices(replace(LAYER, tokens=most), 132, machine=HERE)
    chosen = [
        choose(replace(LAYER, tokens=tokens), 132, machine=HERE) for tokens in range(1, most + 1)
    ]
    assert set(found) == set(chosen)
    assert {config: chosen.index(config) + 1 for config in found} == found
    assert (never in found) == (is_tuned and most > 16)


def test_candidates_are_named_with_the_models_choice_first_and_dense_second() -> None:
    named = named_candidates(LAYER, "float16", 132)
    first, dense, *_ = named
    assert named[first] == candidates(measured_problem(LAYER), 132)[0]
    assert (dense, named[dense]) == (DENSE, None)
    assert len(named) == len(candidates(measured_problem(LAYER), 132)) + 1
    assert set(named) - {DENSE} <= set(versions("float16"))


def packed() -> NM:
    dense = magnitude(torch.randn(8, 16), NMPattern(2, 4))
    return NM.from_dense(dense)


def test_on_the_cpu_there_is_no_kernel_to_prepare() -> None:
    assert prepare(packed(), 4096) == ()
    assert plan(packed(), torch.randn(2, 16)).name == "reference"


@pytest.mark.parametrize(("tokens", "act"), [(0, None), (-1, None), (16, "tanh")])
def test_what_no_call_can_be_is_refused(tokens: int, act: str | None) -> None:
    with pytest.raises(ArgumentError, match="max_tokens"):
        prepare(packed(), tokens, act=act)


def test_a_prepared_layer_has_decoded_what_no_kernel_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    w, x = packed(), torch.randn(3, 16)
    layer = SparseLinear(w)
    expected = SparseLinear(w)(x)
    layer.prepare(max_tokens=8)

    def refuse(self: NM) -> torch.Tensor:
        raise AssertionError("decoded after it was prepared")

    monkeypatch.setattr(NM, "to_dense", refuse)
    assert torch.equal(layer(x), expected)


@pytest.mark.parametrize(
    "numbers",
    [
        (0, 1, 64, 1, 2),
        (5, 1, 64, 1, 2),
        (1, 0, 64, 1, 2),
        (1, 1, 24, 1, 2),
        (1, 1, 272, 1, 2),
        (1, 1, 64, 0, 2),
        (1, 1, 64, 1, 1),
        (1, 1, 16, 1, 2, 4, 1),
        (1, 1, 64, 1, 2, 1, 4),
        (1, 1, 64, 1, 2, 0, 1),
    ],
    ids=str,
)
def test_a_tile_that_the_kernel_does_not_have_is_refused(numbers: tuple[int, ...]) -> None:
    with pytest.raises(ArgumentError, match=r"(Config\(|warpgroups).*Try: "):
        Config(*numbers)


def test_a_tile_that_fits_no_sm_is_refused() -> None:
    with pytest.raises(ArgumentError, match="bytes of shared memory. Required: at most 232448"):
        Config(4, 1, 256, 1, 8)


@pytest.mark.parametrize("sizes", [(2**31, 64, 64), (16, 2**31, 64), (16, 64, 2**31)], ids=str)
def test_sides_beyond_32_bits_are_refused_before_anything_else(sizes: tuple[int, ...]) -> None:
    with pytest.raises(UnsupportedError, match="a side of 2147483648"):
        launch_for(Problem(*sizes), torch.bfloat16, Epilogue(torch.bfloat16), 0)


@pytest.mark.parametrize("alpha", [torch.tensor(2.0), "2"], ids=str)
def test_alpha_is_a_number(alpha: float) -> None:
    """A tensor too is refused: launches are found again by what they were made of."""
    with pytest.raises(ArgumentError, match="alpha=.*a number"):
        LAUNCH.bind(Turn(0), (0, 0, 0, 0), 4096, (0, 0), alpha)


@pytest.mark.parametrize("addresses", [(0, 8, 0, 0), (0, 0, 8, 0)], ids=["values", "meta"])
def test_a_weight_off_16_bytes_is_refused_by_name(addresses: tuple[int, int, int, int]) -> None:
    with pytest.raises(ArgumentError, match="a weight with values at .* 16 bytes"):
        LAUNCH.bind(Turn(0), addresses, 4096, (0, 0), 1.0)
