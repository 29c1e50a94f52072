"""Rules of what is asked for ahead and of early starts, over every row that was measured of them.

`attention_scores.jsonl` is of a kernel that asks for nothing, `attention_scores_prefetch.jsonl` of
one that always asks; between them parts of a head's mass came to be sent between blocks, too.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
import torch

from hopsparse.launch import EarlyStarts
from hopsparse.ops import KeyBlocks
from hopsparse.ops.score_blocks import choose, device, plan, starts
from hopsparse.ops.score_blocks.starts import Asks, Work
from hopsparse.plan import TARGETS

ROOT = Path(__file__).parents[2]
ROWS, DOCS = ROOT / "benchmarks" / "results" / "h200", ROOT / "docs" / "ops"
KV_HEADS, BLOCK, SMS = 8, 64, TARGETS["h200"].sm_count
SHAPE = plan.Shape("bound", "bfloat16", 128, 4)
#: Batch and context.
CASES = ((1, 32_768), (1, 131_072), (8, 32_768), (8, 131_072), (32, 32_768))
NOTHING, ALL = Asks(first=False, later=False), Asks(first=True, later=True)

Case = tuple[int, int]


@cache
def times(name: str) -> dict[tuple[int, int, str], float]:
    """Device time by batch, context and contender."""
    lines = (ROWS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    return {(row["batch"], row["context"], row["contender"]): row["us"] for row in rows}


def without(case: Case, contender: str) -> float:
    """By the kernel that asks for nothing."""
    return times("attention_scores")[(*case, contender)]


def with_asking(case: Case, contender: str) -> float:
    """By the kernel that always asks."""
    return times("attention_scores_prefetch")[(*case, contender)]


def work(case: Case, cluster: int | None = None, kind: str = "bound") -> Work:
    """Of a launch, by clusters as they are chosen where none are given."""
    pairs, rows = case[0] * KV_HEADS, case[1] // BLOCK
    shape = plan.shape_for(kind, "bfloat16", 128, 4)
    assert shape is not None
    return starts.work_of(shape, pairs, rows, cluster or chosen(case))


def chosen(case: Case) -> int:
    """Blocks of threads of a cluster."""
    return plan.clusters_for(case[0] * KV_HEADS, case[1] // BLOCK, SMS)[0]


def noise() -> float:
    """How far two times of the same launch in one run are apart at most, as a part."""
    pairs = [
        (with_asking(case, "score_blocks, bound"), with_asking(case, name))
        for case in CASES
        for name in (f"score_blocks, bound, clusters of {chosen(case)}",)
    ]
    return max(abs(one / other - 1) for one, other in pairs)


# ---- what is asked for ---------------------------------------------------------------------


def test_in_turn_what_is_asked_for_is_what_was_faster() -> None:
    """By bound, with clusters of every size that both kernels were measured with."""
    ties, single, gains = [], [], []
    for case in CASES:
        for cluster in (2, 8, 16):
            name = f"score_blocks, bound, clusters of {cluster}"
            old, new = without(case, name), with_asking(case, name)
            asks = starts.asks_of(work(case, cluster), SMS, early=False)
            assert asks in (NOTHING, ALL)
            if work(case, cluster).pieces == 1:
                # All that there is to ask for is loaded at once: these rows differ by how parts of
                # a head's mass are sent, in clusters of 16.
                single.append((*case, cluster))
                assert asks == NOTHING
            elif abs(new / old - 1) <= noise():
                ties.append((*case, cluster))
            else:
                assert (new < old) == (asks == ALL), (case, cluster, old, new)
                gains += [(*case, cluster)] * (asks == ALL)
    assert single == [(1, 32_768, 16), (8, 32_768, 16), (32, 32_768, 16)]
    assert ties == [(32, 32_768, 8)]
    assert gains == [(8, 131_072, 2)]


@pytest.mark.parametrize("kind", ["mean", "mass"])
def test_by_mean_and_by_mass_nothing_is_asked_for_where_it_lost(kind: str) -> None:
    """Where both kernels ran clusters of the size that is chosen now."""
    for case in ((1, 131_072), (32, 32_768)):
        name = f"score_blocks, {kind}"
        assert without(case, name) < with_asking(case, name) / (1 + noise())
        assert starts.asks_of(work(case, kind=kind), SMS, early=False) == NOTHING


def test_early_what_is_asked_for_is_what_was_faster() -> None:
    """Append, score and select in a row, where both kernels ran clusters of the same size."""
    for case, asks in (((1, 131_072), Asks(first=True, later=False)), ((32, 32_768), NOTHING)):
        old, new = (each(case, "append, score, select, early") for each in (without, with_asking))
        assert abs(new / old - 1) > noise()
        assert starts.early_pays(work(case), SMS)
        assert starts.asks_of(work(case), SMS, early=True) == asks
        assert (new < old) == asks.first


# ---- early starts --------------------------------------------------------------------------


def in_turn_and_early(case: Case) -> dict[str, tuple[float, float]]:
    """What was measured in turn, and with all launches starting early."""
    sources = {
        "attention_scores_prefetch": ("append, score, select", "append, select_blocks"),
        "attention_decode": ("append, score, select, attend", "append, select_blocks, attend"),
    }
    return {
        name: (times(file)[(*case, name)], times(file)[(*case, f"{name}, early")])
        for file, names in sources.items()
        for name in names
    }


def test_what_starts_early_is_what_was_faster() -> None:
    ties = []
    for case in CASES:
        for name, (turn, early) in in_turn_and_early(case).items():
            if abs(early / turn - 1) <= noise():
                ties.append((*case, name))
            else:
                pays = starts.early_pays(work(case), SMS)
                assert (early < turn) == pays, (case, name, turn, early)
    assert ties == [(8, 32_768, "append, score, select")]


def crossing(one: float, other: float, first: float, second: float) -> float:
    """Where a straight line is zero."""
    return one + (other - one) * first / (first - second)


def test_the_steps_of_both_rules_are_where_lines_through_the_rows_say() -> None:
    """As the comments of `starts` have it."""

    def lost(case: Case) -> float:
        name = "score_blocks, bound, clusters of 2"
        return with_asking(case, name) - without(case, name)

    few, long = (8, 32_768), (8, 131_072)
    assert int(crossing(8, 32, lost(few), lost(long))) == starts._FEW_PIECES == 16
    assert round(crossing(16, 128, lost((1, 131_072)), lost(long))) == 72
    one, other = in_turn_and_early((1, 131_072)), in_turn_and_early(few)
    found = [
        crossing(4, 8, one[name][1] - one[name][0], other[name][1] - other[name][0]) for name in one
    ]
    assert (round(min(found), 1), round(max(found), 1)) == (6.6, 7.8)
    assert int(min(found)) == starts._MOST_EARLY


# ---- pages ---------------------------------------------------------------------------------


def told(case: Case) -> str:
    return f"{case[0]} x {case[1] // 1024}K"


def asking_table() -> list[str]:
    """By bound and clusters as chosen: in turn, without and with asking; early in a row."""
    lines = []
    for case in CASES:
        name = f"score_blocks, bound, clusters of {chosen(case)}"
        of, asks = work(case), starts.asks_of(work(case), SMS, early=False)
        pays = starts.early_pays(of, SMS)
        early = starts.asks_of(of, SMS, early=True).first if pays else None
        cells = [told(case), f"{of.programs}", f"{of.pieces}"]
        cells += [f"{without(case, name):.1f}", f"{with_asking(case, name):.1f}"]
        cells += ["all" if asks.later else "nothing"]
        cells += ["does not" if early is None else "first pieces" if early else "nothing"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def early_table() -> list[str]:
    """In turn and early, and whether the launch that scores starts early."""
    lines = []
    for case in CASES:
        found = in_turn_and_early(case)
        names = ("append, select_blocks", "append, select_blocks, attend")
        cells = [told(case), *(f"{time:.1f}" for name in names for time in found[name])]
        cells.append("yes" if starts.early_pays(work(case), SMS) else "no")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


@pytest.mark.parametrize(
    ("page", "table"), [("score_blocks.md", asking_table), ("select_blocks.md", early_table)]
)
def test_pages_have_what_was_measured(page: str, table: object) -> None:
    assert callable(table)
    lines = table()
    assert len(lines) == len(CASES)
    assert "\n".join(lines) in (DOCS / page).read_text(encoding="utf-8")


# ---- launches ------------------------------------------------------------------------------


class _Bound:
    def __call__(self) -> None:
        """Nothing is launched."""


class _Kernel:
    """Takes a launch, and keeps what it was given."""

    def __init__(self, spec: object) -> None:
        self.spec = spec
        self.launches: list[tuple[tuple[int, int, int], bytes, bool]] = []

    def bind(self, grid: tuple[int, int, int], args: bytes, stream: int, *, pdl: bool) -> _Bound:
        assert stream == 7
        self.launches.append((grid, args, pdl))
        return _Bound()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    ("batch", "count", "may", "early", "asks"),
    [
        (1, 2048, False, False, NOTHING),
        (1, 2048, True, True, Asks(first=True, later=False)),
        (8, 512, True, False, NOTHING),
        (8, 2048, False, False, NOTHING),
        (8, 2048, True, False, NOTHING),
        (32, 512, True, True, NOTHING),
    ],
)
def test_launches_start_by_the_rules(
    batch: int,
    count: int,
    may: bool,
    early: bool,
    asks: Asks,
    fused: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernels: list[_Kernel] = []

    def loaded(spec: object, _: int) -> _Kernel:
        kernels.append(_Kernel(spec))
        return kernels[-1]

    facts = type("Facts", (), {"sm_count": SMS})()
    for module in (device, choose):
        monkeypatch.setattr(module._BOUND, "get", lambda _: None)
        monkeypatch.setattr(module._BOUND, "keep", lambda _, bound: bound)
    monkeypatch.setattr(device, "device_facts", lambda _: facts)
    monkeypatch.setattr(device, "current_stream", lambda _: 7)
    monkeypatch.setattr(device, "max_active_clusters", lambda _: 1000)
    monkeypatch.setattr(device, "_loaded", loaded)
    rows = torch.zeros(1, 1, 1, 128, dtype=torch.bfloat16).expand(batch, 8, count, 128)
    blocks = KeyBlocks(rows, rows, rows.float(), BLOCK)
    kept = (blocks.low, blocks.high, blocks.total)
    q = torch.zeros(batch, 32, 128, dtype=torch.bfloat16)
    lengths = torch.zeros(batch, dtype=torch.int32)
    wanted, starting = device.Wanted("bound", 1.0, False), EarlyStarts()

    def launch() -> None:
        if not fused:
            device.enqueue(torch.zeros(1), q, kept, lengths, BLOCK, wanted)
            return
        results = [torch.zeros(1, dtype=torch.int32)] * 2
        asked = (lengths, BLOCK, wanted, choose.Choice(None, [32, 32, 1, 1]))
        choose.enqueue(results, q, kept, asked)

    if may:
        with starting.use():
            launch()
    else:
        launch()
    ((grid, args, pdl),) = kernels[-1].launches
    assert (grid[1:], pdl, starting.allowed) == ((8, batch), early, int(early))
    of = (
        choose.plan.ChooseArgs.from_buffer_copy(args).of
        if fused
        else plan.Args.from_buffer_copy(args)
    )
    assert Asks(bool(of.ask_first), bool(of.ask_later)) == asks
    assert (of.blocks, of.kv_heads, of.group, of.scale) == (count, 8, 4, 1.0)
