"""The gate: statistics on simulated noise, operators on a CPU, another build, baselines."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hopsparse
from hopsparse.cli import gate as command
from hopsparse.cli.gate import Sampler, read_baseline
from hopsparse.cli.gate_cases import SUITES, Case, cases_of
from hopsparse.errors import ArgumentError, CheckpointError
from hopsparse.measure import pairs
from hopsparse.measure.gate import Limits, Samples, decide, judge, judge_stored
from hopsparse.measure.other_build import load_build, package_in
from hopsparse.measure.pairs import paired, slowed

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")


class Noise:
    """A machine that drifts, differs a little from one memory layout to the next, and is sometimes
    interrupted."""

    def __init__(self, seed: int, part: float, noise: float, interrupted: float = 0.05) -> None:
        self._random = np.random.default_rng(seed)
        self._part, self._noise, self._interrupted = part, noise, interrupted
        self._drift, self._layout = 0.0, self._random.normal(0, 0.002)

    def __call__(self, rounds: int) -> Samples:
        if rounds == 0:
            self._layout = self._random.normal(0, 0.002)
        base, new = [], []
        for _ in range(rounds):
            self._drift += self._random.normal(0, self._noise / 2)
            now = 100 * np.exp(self._drift)
            base.append(now * self._one())
            new.append(now * self._one() * (1 + self._part) * np.exp(self._layout))
        return base, new

    def _one(self) -> float:
        late = self._random.exponential(0.5) if self._random.random() < self._interrupted else 0.0
        return float(np.exp(self._random.normal(0, self._noise)) * (1 + late))


@pytest.mark.parametrize("noise", [0.005, 0.02])
def test_five_percent_is_seen_and_nothing_is_not(noise: float) -> None:
    """At least 95 of 100 slower builds, at most 1 of 100 equal ones."""
    runs = 100
    same = [decide(Noise(seed, 0.0, noise), Limits())[0] for seed in range(runs)]
    slow = [decide(Noise(seed, 0.05, noise), Limits())[0] for seed in range(runs)]
    assert sum(each.slower for each in same) <= 1
    assert sum(each.slower for each in slow) >= 95
    assert np.median([each.ratio for each in slow]) == pytest.approx(1.05, abs=0.003)


class Processor:
    """A core that others share: it is slower for some milliseconds at a time, and every fifth call
    is interrupted and finds its caches empty. Rates as recorded on two busy cores."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self._now_ns, self._until_ns, self._speed = 0.0, 0.0, 1.0

    def process_time_ns(self) -> int:
        return int(self._now_ns)

    def monotonic(self) -> float:
        return self._now_ns / 1e9

    def call(self) -> None:
        while self._now_ns >= self._until_ns:
            self._until_ns += self._random.exponential(10e6)
            self._speed = 1 + 0.4 * self._random.random() ** 3
        late = self._random.exponential(0.8) if self._random.random() < 0.2 else 0.0
        self._now_ns += 220e3 * self._speed * (1 + late + 0.02 * abs(self._random.normal()))


@pytest.mark.parametrize(("part", "least", "most"), [(0.0, 0, 0), (0.05, 19, 20)])
def test_interruptions_hide_no_five_percent(
    part: float, least: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    alarms = 0
    for seed in range(20):
        processor = Processor(seed)
        monkeypatch.setattr(pairs, "time", processor)
        plain, slower = slowed([processor.call], 0.05)
        judged = slower if part else plain
        sample = partial(_in_turns, plain, judged)
        alarms += decide(sample, Limits(floor_us=2), least=25)[0].slower
    assert least <= alarms <= most


def _in_turns(base: list[pairs.Call], new: list[pairs.Call], rounds: int) -> Samples:
    return paired(base, new, rounds, CPU) if rounds else ([], [])


def test_calls_of_both_are_neighbours_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock is read around one long call, or around some short ones."""
    asked: list[str] = []
    processor = Processor(0)
    monkeypatch.setattr(pairs, "time", processor)

    def of(name: str, count: int) -> list[pairs.Call]:
        return [lambda: (asked.append(name), processor.call()) for _ in range(count)]  # type: ignore[func-returns-value]

    paired(of("a", 20), of("b", 20), 2, CPU)
    timed = asked[-2 * 2 * 20 * 5 :]
    both = {"".join(timed[place : place + 2]) for place in range(0, len(timed), 2)}
    assert both == {"ab", "ba"}
    short = pairs._slots([lambda: None] * 20, 10.0)
    assert {len(slot) for slot in short} == {10}
    assert sum(map(len, short)) == 300
    assert [len(slot) for slot in pairs._slots([lambda: None] * 3, 5000.0)] == [1, 1, 1]


def test_a_slow_case_is_given_fewer_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    processor = Processor(0)
    monkeypatch.setattr(pairs, "time", processor)
    calls = slowed([processor.call], 0.05)[0]
    counts = []
    for seconds in (0.0, 0.3, 30.0):
        monkeypatch.setattr(pairs, "_BUDGET_S", seconds)
        counts.append(len(paired(calls, calls, 25, CPU)[1]))
    assert counts[0] == 3 < counts[1] < counts[2] == 25


def test_sampling_ends_when_it_is_decided() -> None:
    """Either way at once, at the limit only after all rounds, and each look shares the level."""

    def rounds_of(part: float, noise: float = 0.005) -> tuple[int, bool]:
        found, _ = decide(Noise(3, part, noise, 0.0), Limits(), confirm=False)
        return found.rounds, found.slower

    assert rounds_of(0.0) == (25, False)
    assert rounds_of(0.08) == (25, True)
    assert rounds_of(0.02, 0.02) == (200, False)
    base, new = Noise(3, 0.0, 0.005, 0.0)(25)
    alone, _ = decide(lambda rounds: (base, new), Limits(most=25))
    one_of_four, _ = decide(lambda rounds: (base, new), Limits(most=200))
    assert one_of_four.low < alone.low < alone.ratio < alone.high < one_of_four.high


def test_no_alarm_at_the_limit_though_it_looks_often() -> None:
    """A build that is slower by the limit itself alarms in at most 1 of 100 first decisions."""
    found = [decide(Noise(seed, 0.02, 0.01), Limits(), confirm=False)[0] for seed in range(40)]
    assert sum(each.slower for each in found) <= 1
    assert np.median([each.rounds for each in found]) == Limits().most


def test_a_faster_build_is_no_alarm() -> None:
    assert not any(decide(Noise(seed, -0.05, 0.01), Limits())[0].slower for seed in range(20))


def test_noise_that_hides_everything_makes_wide_intervals_and_no_alarm() -> None:
    found = [decide(Noise(seed, 0.0, 0.3, 0.3), Limits())[0] for seed in range(20)]
    assert not any(each.slower for each in found)
    assert all(each.rounds >= Limits().most for each in found)
    assert min(each.width for each in found) > 0.01


def test_an_alarm_is_confirmed_on_new_data() -> None:
    """What is slower in one memory layout alone does not count."""
    calls: list[int] = []

    def sample(rounds: int) -> Samples:
        calls.append(rounds)
        factor = 1.2 if 0 not in calls else 1.0
        return [100.0] * rounds, [100.0 * factor] * rounds

    verdict, first = decide(sample, Limits())
    assert first is not None
    assert (first.slower, verdict.slower, calls) == (True, False, [25, 0, 25])
    alone, none = decide(
        lambda rounds: ([100.0] * rounds, [120.0] * rounds), Limits(), confirm=False
    )
    assert (alone.slower, none) == (True, None)


def test_a_difference_below_the_floor_is_no_alarm() -> None:
    base = [1.0] * 30
    assert not judge(base, [1.1] * 30, Limits(floor_us=0.2)).slower
    assert judge(base, [1.1] * 30, Limits(floor_us=0.05)).slower


def test_sampling_ends_where_it_is_out_of_time() -> None:
    asked: list[int] = []

    def sample(rounds: int) -> Samples:
        asked.append(rounds)
        return [1.0, 2.0], [3.0, 1.0]

    assert decide(sample, Limits())[0].rounds == 2
    assert asked == [25]


def test_a_stored_run_is_compared_by_its_anchor() -> None:
    """The machine got 30 % slower as a whole: that is no regression; 5 % of the case alone is."""
    random = np.random.default_rng(0)

    def run(part: float, machine: float) -> Samples:
        noise = random.normal(0, 0.004, (2, 100))
        own = 50 * machine * (1 + part) * np.exp(noise[0])
        return list(own), list(20 * machine * np.exp(noise[1]))

    stored = run(0, 1)
    assert not judge_stored(stored, run(0, 1.3), Limits()).slower
    verdict = judge_stored(stored, run(0.05, 1.3), Limits())
    assert verdict.slower
    assert verdict.ratio == pytest.approx(1.05, abs=0.01)
    assert verdict.base_us == pytest.approx(65, rel=0.02)


@pytest.mark.parametrize(
    ("base", "new"), [([], []), ([1.0], [1.0, 2.0]), ([0.0], [1.0]), ([1.0], [float("nan")])]
)
def test_times_that_mean_nothing_are_refused(base: list[float], new: list[float]) -> None:
    with pytest.raises(ArgumentError, match="times of the base"):
        judge(base, new, Limits())


@pytest.mark.parametrize("wrong", [{"ratio": 0.9}, {"floor_us": -1.0}, {"level": 1.0}, {"most": 0}])
def test_limits_that_mean_nothing_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match="Limits"):
        Limits(**wrong)


def test_a_real_operator_that_runs_half_as_often_again_is_seen() -> None:
    """On this machine, however busy: half as much again is far beyond its noise."""
    case = Case("nm", 64, 128, 4)

    def change(base: list[Any], new: list[Any]) -> tuple[list[Any], list[Any]]:
        return slowed(base, 0.5)[0], slowed(new, 0.5)[1]

    sample = Sampler(case, (hopsparse, hopsparse), CPU, change)
    verdict, _ = decide(sample, Limits(floor_us=1.0, most=25))
    assert verdict.slower
    assert 1.2 < verdict.ratio < 1.8


def test_samples_of_two_lists_need_one_length() -> None:
    with pytest.raises(ArgumentError, match="one length"):
        paired([int], [int, int], 3, CPU)
    with pytest.raises(ArgumentError, match="slower by"):
        slowed([int], 0.3)


@pytest.mark.parametrize("suite", SUITES)
def test_every_case_of_a_cpu_runs_in_two_builds(suite: str) -> None:
    other = load_build(ROOT, "hopsparse_tested")
    for case in cases_of(suite, CPU):
        (own,), (theirs,) = (case.calls(build, CPU, 3) for build in (hopsparse, other))
        first, second = own(), theirs()
        if isinstance(first, torch.Tensor):
            assert torch.equal(first, second), case.name


def test_gpu_cases_are_named_apart() -> None:
    names = [case.name for suite in SUITES for case in cases_of(suite, torch.device("cuda"))]
    assert len(set(names)) == len(names)


def test_two_builds_share_no_module_and_no_operator() -> None:
    other = load_build(ROOT / "src", "hopsparse_tested")
    assert other is load_build(ROOT, "hopsparse_tested")
    assert other.formats.NM is not hopsparse.formats.NM
    packed = other.formats.NM.from_dense(torch.eye(8))
    assert torch.equal(packed.to_dense(), torch.eye(8))
    assert other.__file__ == hopsparse.__file__


def test_a_build_that_cannot_be_imported_leaves_nothing_behind(tmp_path: Path) -> None:
    root = tmp_path / "hopsparse"
    (root / "ops").mkdir(parents=True)
    (root / "__init__.py").write_text("from . import gone\n", encoding="utf-8")
    with pytest.raises(ArgumentError, match="cannot be imported beside"):
        load_build(tmp_path, "hopsparse_broken")
    (root / "gone.py").write_text("here = 1\n", encoding="utf-8")
    assert load_build(tmp_path, "hopsparse_broken").gone.here == 1
    with pytest.raises(ArgumentError, match="no hopsparse in it"):
        package_in(tmp_path / "elsewhere")
    with pytest.raises(ArgumentError, match="hopsparse_broken is"):
        load_build(ROOT, "hopsparse_broken")


FACTS = {"gpu": None, "cpu": "this one", "torch": "2", "suite": "micro"}
HEAD = {"kind": "gate baseline", "schema": 1, **FACTS}
ROW = {"case": "nm", "us": [1.0], "anchor_us": [1.0]}


def write(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_a_baseline_is_read_again(tmp_path: Path) -> None:
    assert read_baseline(write(tmp_path / "base", HEAD, ROW), FACTS) == {"nm": ([1.0], [1.0])}


@pytest.mark.parametrize(
    ("head", "rows", "kind", "words"),
    [
        ({"gpu": "NVIDIA A100"}, [ROW], ArgumentError, "A100"),
        ({"torch": "1"}, [ROW], ArgumentError, "same torch"),
        ({"suite": "e2e"}, [ROW], ArgumentError, "same suite"),
        ({"schema": 2}, [ROW], CheckpointError, "schema 2"),
        ({"kind": "rows"}, [ROW], CheckpointError, "kind 'rows'"),
        ({}, [], CheckpointError, "no times"),
        ({}, [{"case": "nm"}], CheckpointError, "no times"),
    ],
)
def test_another_baseline_is_refused(
    head: dict[str, Any], rows: list[Any], kind: type[Exception], words: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "base", HEAD | head, *rows)
    with pytest.raises(kind, match=words):
        read_baseline(path, FACTS)


def test_a_file_that_is_no_baseline_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("", encoding="utf-8")
    with pytest.raises(CheckpointError, match="kind None"):
        read_baseline(tmp_path / "empty", FACTS)
    (tmp_path / "text").write_text("not json\n", encoding="utf-8")
    with pytest.raises(CheckpointError, match="no JSON object"):
        read_baseline(tmp_path / "text", FACTS)


def test_a_case_that_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> Any:
        raise RuntimeError("of the new build")

    row = command._row(Case("nm", 4, 4), fails)
    assert (row["error"], row["slower"]) == ("RuntimeError: of the new build", False)
    assert partial(command._row, Case("nm", 4, 4))(lambda: (judge([1], [1], Limits()), None))
