"""What `explain` says, computed again by hand for problems that fit on a sheet of paper."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from hopsparse.cli.explain import _print, facts
from hopsparse.ops.spmm_nm.cost import Problem, blocks_at_once, predicted_us
from hopsparse.ops.spmm_nm.explain import explain, target_of
from hopsparse.ops.spmm_nm.int4.explain import explain_int4
from hopsparse.ops.spmm_nm.int4.plan import (
    KINDS,
    Kind,
    candidates_int4,
    int4_key,
    int4_versions,
)
from hopsparse.ops.spmm_nm.kernel import Numbers
from hopsparse.ops.spmm_nm.plan import CANDIDATES, DENSE, candidates, key_of, versions
from hopsparse.ops.spmm_nm.scaled.explain import explain_scaled
from hopsparse.ops.spmm_nm.scaled.plan import candidates_scaled, scaled_key, scaled_versions
from hopsparse.plan import TARGETS, parse_target
from hopsparse.tune import Machine, Measured, Store
from tests.cli.conftest import Run

H200 = TARGETS["h200"]
HERE = Machine("NVIDIA H200", 132, "580.65.06")


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOPSPARSE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.parametrize("tokens", [1, 17, 300, 4096])
def test_tiles_waves_and_use_are_those_of_the_grid(
    tokens: int, run_json: Callable[..., Any]
) -> None:
    told = run_json("explain", "--shape", "6144x4096", "--tokens", tokens)["planned"]
    for tile in (told["tile"], *told["next"]):
        config = next(each for each in CANDIDATES if each.name == tile["name"])
        # Whole clusters along both sides.
        out = ceil(6144 / config.out / config.cluster_out) * config.cluster_out
        along = ceil(tokens / config.tokens / config.cluster_tokens) * config.cluster_tokens
        assert tile["tiles"] == out * along
        # Blocks that share a tile, each a part of k, are one of those that run at once.
        assert tile["at_once"] == blocks_at_once(config, 132) // config.cluster_k
        assert tile["waves"] == ceil(tile["tiles"] / tile["at_once"])
        blocks = tile["tiles"] * config.cluster_k
        assert tile["sm_use"] == pytest.approx(blocks / (tile["waves"] * 132))
        assert tile["cluster"] == [config.cluster_out, config.cluster_tokens, config.cluster_k]
        assert 0 < tile["sm_use"] <= 1
        # A stage: tokens of 128 bytes a unit, panels of 4 KiB of values and 512 bytes of indices.
        panels = config.out // 64
        stage = config.units * (config.tokens * 128 + panels * 4608) + 16
        store = 2 * config.warpgroups * (32 if config.tokens % 32 == 0 else 16) * 128
        assert tile["smem_bytes"] == config.stages * stage + store
        assert tile["smem_bytes"] + tile["smem_left_bytes"] == 227 * 1024
        assert sum(tile["registers"]) * 128 <= 65536
        assert tile["threads"] == 128 * (config.warpgroups + 1)
        assert tile["predicted_us"] == predicted_us(config, Problem(tokens, 6144, 4096), 132)


def test_floors_are_bytes_and_operations_over_the_ceilings(run_json: Callable[..., Any]) -> None:
    floor = run_json("explain", "--shape", "4096x4096", "--tokens", 4096)["planned"]["floor"]
    # Half of the values in 2 bytes, 2 bits of index for each; x and y in 2 bytes.
    weight = 4096 * 4096 // 2 * 2 + 4096 * 4096 // 2 * 2 // 8
    assert floor["bytes"] == weight + 2 * 4096 * 4096 * 2
    assert floor["operations"] == 2 * 4096**3
    assert floor["bytes_us"] == pytest.approx(1e6 * floor["bytes"] / 4.35e12)
    assert floor["operations_us"] == pytest.approx(1e6 * 2 * 4096**3 / 1441.7e12)
    assert floor["us"] == max(floor["bytes_us"], floor["operations_us"])


def test_the_chosen_tile_is_the_first_of_the_model_and_the_next_follow(
    run_json: Callable[..., Any],
) -> None:
    told = run_json("explain", "--shape", "4096x4096", "--tokens", 256)["planned"]
    ordered = [each.name for each in candidates(Problem(256, 4096, 4096), 132)]
    assert [told["tile"]["name"], *(each["name"] for each in told["next"])] == ordered[:4]
    assert told["chosen_by"] == "cost model"
    assert told["tuning"] == []


def test_a_tuning_result_is_told_and_taken_on_the_like_of_its_machine(
    run_json: Callable[..., Any],
) -> None:
    problem = Problem(256, 4096, 4096)
    *_, last = candidates(problem, 132)
    name = next(key for key, config in versions("bfloat16").items() if config == last)
    Store.default().put(key_of(problem, "bfloat16", HERE), {name: Measured(7.0, 6.9, 7.1)})
    told = run_json("explain", "--shape", "4096x4096", "--tokens", 200)["planned"]
    assert told["tuning"] == [
        {
            "gpu": "NVIDIA H200",
            "sm_count": 132,
            "driver": "580.65.06",
            "problems": "4096x4096 bfloat16, tokens 129-256",
            "tile": last.name,
            "us": 7.0,
            "dense_us": None,
            "measured": 1,
        }
    ]
    assert told["tile"]["name"] != last.name  # nothing says that this machine is one of those
    here = explain(problem, "bfloat16", H200, machine=HERE)
    assert (here.is_tuned, here.chosen.config) == (True, last)
    other = explain(problem, "bfloat16", H200, machine=replace(HERE, driver="590"))
    assert (other.is_tuned, other.chosen.config.name) == (False, told["tile"]["name"])
    for words in (("--tokens", 257), ("--tokens", 200, "--dtype", "float16")):
        assert run_json("explain", "--shape", "4096x4096", *words)["planned"]["tuning"] == []


def test_dense_is_told_where_it_was_measured_to_win(run_json: Callable[..., Any]) -> None:
    problem = Problem(1024, 1536, 576)
    tile = next(iter(versions("bfloat16")))
    times = {tile: Measured(6.6, 6.6, 6.6), DENSE: Measured(5.5, 5.5, 5.5)}
    Store.default().put(key_of(problem, "bfloat16", HERE), times)
    here = explain(problem, "bfloat16", H200, machine=HERE)
    console = Console(width=200)
    with console.capture() as captured:
        _print(console, here)
    said = {line[:14].strip(): line[14:] for line in captured.get().splitlines()}
    assert said["runs"] == "dense, tuned: 5.5 us against 6.6 of the fastest tile"
    assert said["tuned"].endswith("6.6 us, of 2 measured; dense 5.5 us")
    assert "the function spmm_nm" in said["note"]
    assert facts(here)["runs"] == "dense"
    # Nothing says that a GPU which is planned for is the one that was measured.
    told = run_json("explain", "--shape", "1536x576", "--tokens", 1024)["planned"]
    assert (told["runs"], told["tuning"][0]["dense_us"]) == ("kernel", 5.5)
    assert "tuning measured it to be faster" in told["dense_runs_when"]


@pytest.mark.parametrize(
    ("dtype", "words", "sums"),
    [
        ("int8", (), "exact"),
        ("float8_e4m3fn", (), "promoted"),
        ("float8_e4m3fn", ("--sums", "fast"), "fast"),
        ("float8_e4m3fn", ("--grouped",), "grouped"),
        ("float8_e4m3fn/int4", (), "promoted"),
    ],
)
def test_codes_have_their_own_tiles_floors_and_reasons(
    dtype: str, words: tuple[str, ...], sums: str, run_json: Callable[..., Any]
) -> None:
    asked = ("explain", "--shape", "4096x4096", "--tokens", 4096, "--dtype", dtype, *words)
    told = run_json(*asked)["planned"]
    assert (told["dtype"], told["sums"], told["runs"]) == (dtype, sums, "kernel")
    w, _, x = dtype.partition("/")
    promoted, grouped = sums in ("promoted", "grouped"), sums == "grouped"
    # x of 4 bits is widened once ahead of this problem: its tiles are those of w's codes.
    numbers = Numbers(w, w, "bfloat16", sums == "promoted", grouped)
    assert any("widened once ahead" in note for note in told["notes"]) == (x == "int4")
    problem = Problem(4096, 4096, 4096)
    ordered = candidates_scaled(problem, numbers, 132)
    assert [told["tile"]["name"], *(each["name"] for each in told["next"])] == [
        each.name for each in ordered[:4]
    ]
    assert told["tile"]["predicted_us"] == predicted_us(ordered[0], problem, 132, promoted=promoted)
    # Half of the codes, 2 bits of index for each, a scale of 32 bits a row or group; codes of x
    # with a scale each; 16-bit results.
    weight = 4096 * 4096 // 2 * 10 // 8 + 4096 * 4 * (32 if grouped else 1)
    floor = told["floor"]
    codes = 4096 * 4096 // (2 if x else 1)
    assert floor["bytes"] == weight + codes + 4096 * 4 + 4096 * 4096 * 2
    peak = H200.sparse_peak[w].sustained
    assert floor["operations_us"] == pytest.approx(1e6 * 2 * 4096**3 / peak)
    assert "a gradient is to be kept" in told["dense_runs_when"]
    assert not any("was fitted to" in each for each in told["notes"])
    fewer = run_json(*asked[:4], 255, *asked[5:])["planned"]
    assert any("8 bits was fitted to 256 tokens" in each for each in fewer["notes"])
    calls_alone = any(f"no layer has {sums} sums" in each for each in told["notes"])
    assert calls_alone == (sums in ("fast", "grouped"))


def test_a_winner_of_codes_is_told_for_its_sums_alone(run_json: Callable[..., Any]) -> None:
    numbers, problem = Numbers("float8_e4m3fn", "float8_e4m3fn", "bfloat16"), Problem(256, 512, 512)
    *_, last = candidates_scaled(problem, numbers, 132)
    name = next(key for key, config in scaled_versions(numbers).items() if config == last)
    Store.default().put(scaled_key(problem, numbers, HERE), {name: Measured(7.0, 6.9, 7.1)})
    words = ("explain", "--shape", "512x512", "--tokens", 200, "--dtype", "float8_e4m3fn")
    (told,) = run_json(*words, "--sums", "fast")["planned"]["tuning"]
    assert (told["tile"], told["us"], told["dense_us"]) == (last.name, 7.0, None)
    assert told["problems"] == "512x512 float8_e4m3fn fast, tokens 129-256"
    assert run_json(*words)["planned"]["tuning"] == []
    here = explain_scaled(problem, numbers, H200, machine=HERE)
    assert (here.is_tuned, here.chosen.config) == (True, last)


@pytest.mark.parametrize("kind", [Kind.parse(text) for text in KINDS], ids=KINDS)
@pytest.mark.parametrize("tokens", [16, 4096])
def test_weights_of_4_bits_have_their_own_tiles_floors_and_reasons(
    kind: Kind, tokens: int, run_json: Callable[..., Any]
) -> None:
    words = ("--shape", "4096x4096", "--tokens", tokens, "--dtype", str(kind))
    told = run_json("explain", *words)["planned"]
    assert (told["dtype"], told["sums"], told["runs"]) == (str(kind), None, "kernel")
    problem, codes = Problem(tokens, 4096, 4096), kind.x in ("int8", "float8_e4m3fn")
    x = "bfloat16" if codes else kind.x
    numbers = Numbers("int4", kind.x, x, grouped=codes, fine=kind.group == 32)
    ordered = candidates_int4(problem, numbers, 132)
    assert [told["tile"]["name"], *(each["name"] for each in told["next"])] == [
        each.name for each in ordered[:4]
    ]
    assert told["tile"]["predicted_us"] == predicted_us(ordered[0], problem, 132, promoted=codes)
    # 3 bits a weight, and 16 a group; x in 2 bytes, or in 1 with a scale of 4 a token; y in 2.
    weight = 4096 * 4096 * 3 // 8 + 4096 * (4096 // kind.group) * 2
    of_x = tokens * (4096 + 4) if codes else tokens * 4096 * 2
    floor = told["floor"]
    assert floor["bytes"] == weight + of_x + tokens * 4096 * 2
    assert floor["operations_us"] == pytest.approx(
        1e6 * 2 * tokens * 4096**2 / H200.sparse_peak[kind.x].sustained
    )
    # Dense is what layers of 16 bits run.
    plain = run_json("explain", *words[:4], "--dtype", x)["planned"]
    assert told["dense_us"] == plain["dense_us"]
    assert "x is float32, or rounded to int4" in told["dense_runs_when"]
    bits = 8 if codes else 16
    assert any(f"that of {bits} bits with the bytes of 4" in each for each in told["notes"])
    assert any("8 bits was fitted to" in each for each in told["notes"]) == (codes and tokens < 256)


def test_a_winner_of_4_bit_weights_is_told_for_both_coarse_groups(
    run_json: Callable[..., Any],
) -> None:
    kind, problem = Kind(128, "bfloat16"), Problem(256, 512, 512)
    *_, last = candidates_int4(problem, kind.numbers, 132)
    name = next(key for key, config in int4_versions(kind.numbers).items() if config == last)
    Store.default().put(int4_key(problem, kind.numbers, HERE), {name: Measured(7.0, 6.9, 7.1)})
    words = ("explain", "--shape", "512x512", "--tokens", 200, "--dtype")
    for group in (64, 128):
        (told,) = run_json(*words, f"int4:{group}/bfloat16")["planned"]["tuning"]
        assert (told["tile"], told["us"], told["dense_us"]) == (last.name, 7.0, None)
        assert told["problems"] == "512x512 int4/bfloat16, tokens 129-256"
        here = explain_int4(problem, Kind(group, "bfloat16"), H200, machine=HERE)
        assert (here.is_tuned, here.chosen.config) == (True, last)
    for other in ("int4:32/bfloat16", "int4:64/float16", "int4:128/int8"):
        assert run_json(*words, other)["planned"]["tuning"] == []


def test_dense_is_noted_where_it_is_predicted_to_be_faster_than_codes(
    run_json: Callable[..., Any],
) -> None:
    words = ("explain", "--shape", "64x64", "--tokens", 4096, "--dtype", "int4:128/bfloat16")
    told = run_json(*words)["planned"]
    faster = told["dense_us"] < told["tile"]["predicted_us"]
    assert any("no layer runs codes dense" in each for each in told["notes"]) == faster


def test_one_wave_is_no_waves(run: Run) -> None:
    said = run("explain", "--shape", "64x64", "--tokens", "16").stdout
    assert "1 tile, " in said
    assert " 1 wave, " in said


def test_a_slice_has_fewer_sms_and_is_noted(run: Run, run_json: Callable[..., Any]) -> None:
    words = ("explain", "--shape", "4096x4096", "--tokens", 16, "--target", "h200:1/7")
    told = run_json(*words)["planned"]
    assert told["sm_count"] == parse_target("h200:1/7").sm_count == 16
    assert told["tile"]["at_once"] <= 16
    assert told["floor"]["bytes_us"] == pytest.approx(8e6 * told["floor"]["bytes"] / 4.35e12)
    assert "memory of a whole H200" in told["notes"][0]
    assert "planned for: h200 slice of 16 SMs\n" in run(*words).stdout


@pytest.mark.parametrize(
    ("name", "sm_count", "expected"),
    [
        ("NVIDIA H200", 132, "h200"),
        ("NVIDIA H100 80GB HBM3", 132, "h100"),
        ("NVIDIA H200 MIG 3g.71gb", 60, "h200:3/7"),
    ],
)
def test_a_gpu_is_judged_by_its_own_ceilings(name: str, sm_count: int, expected: str) -> None:
    assert target_of(Machine(name, sm_count, "580")) == parse_target(expected)


def test_the_text_says_what_runs_and_why(run: Run) -> None:
    lines = run("explain", "--shape", "4096x4096", "--tokens", 4096).stdout.splitlines()
    said = {line[:14].strip(): line[14:] for line in lines}
    assert said["runs"].startswith("wgmma.sp, tile ")
    assert said["runs"].endswith("fastest by the cost model")
    for label in ("predicted", "floor", "waves", "shared memory", "registers", "cluster"):
        assert said[label]
    assert sum(line.startswith("next ") for line in lines) == 3
    assert said["tuned"].startswith("no;")
    assert said["dense runs"].startswith("where values are float32")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--shape", "4096", "--tokens", "1"), "shape '4096'"),
        (("--shape", "0x5", "--tokens", "1"), "[0, 5]"),
        (("--shape", "9" * 5000 + "x4", "--tokens", "1"), "shape '999"),
        (("--shape", "٤x٤", "--tokens", "1"), "shape '٤x٤'"),
        (("--shape", "64x64", "--tokens", "0"), "0 tokens"),
        (("--shape", "64x64", "--tokens", "-1"), "-1 tokens"),
        (("--shape", "64x64", "--tokens", str(2**31)), "below 2^31"),
        (("--shape", f"{2**31}x64", "--tokens", "1"), "below 2^31"),
        (("--shape", "64x66", "--tokens", "1"), "k = 66"),
        (("--shape", "64x64", "--tokens", "1", "--dtype", "int4"), "float16, int8, float8_e4m3fn"),
        (("--shape", "64x64", "--tokens", "1", "--dtype", "int4"), "--dtype int4:64/bfloat16"),
        (("--shape", "64x64", "--tokens", "1", "--dtype", "int4:64/int8"), "int4:128/int8"),
        (
            ("--shape", "64x64", "--tokens", "1", "--dtype", "int4:128/int8", "--grouped"),
            "--grouped of int4:128/int8",
        ),
        (("--shape", "64x64", "--tokens", "1", "--sums", "fast"), "--sums fast of bfloat16"),
        (("--shape", "64x64", "--tokens", "1", "--grouped"), "--grouped of bfloat16"),
        (("--shape", "64x64", "--tokens", "1", "--dtype", "int8", "--grouped"), "of int8"),
        (
            ("--shape", "64x64", "--tokens", "1", "--dtype", "int8", "--sums", "fast"),
            "--sums fast of int8",
        ),
        (
            ("--shape", "64x64", "--tokens", "1", "--dtype", "float8_e4m3fn", "--sums", "exact"),
            "sums 'exact'",
        ),
        (("--shape", "64x64", "--tokens", "1", "--target", "h200:1/9"), "h200:1/9"),
        (("--shape", "64x64", "--tokens", "1", "--target", "b200"), "target 'b200'"),
        (("--shape", "64x64", "--tokens", "1", "--target", ""), "target ''"),
    ],
)
def test_what_is_no_problem_is_refused(run: Run, words: tuple[str, ...], told: str) -> None:
    result = run("explain", *words)
    assert result.exit_code == 2
    assert told in result.stderr
