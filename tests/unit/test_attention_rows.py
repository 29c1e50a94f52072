"""What was measured on an H200 is what attention's pages say, and how scoring chooses clusters."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest

from hopsparse.ops.score_blocks import plan
from hopsparse.plan import TARGETS

ROOT = Path(__file__).parents[2]
DOCS, ROWS = ROOT / "docs", ROOT / "benchmarks" / "results" / "h200"
KV_HEADS, BLOCK = 8, 64  # of all rows of decode and of scores
COPY_TBPS = 4.35
#: Batch and context: of decode and of scores.
Case = tuple[int, int]
STEP = "append, score, select, attend"

Times = dict[str, float]


@cache
def times(name: str, *keys: str) -> dict[tuple[float, ...], Times]:
    """Device time of every contender, by what the rows of a case have in common."""
    found: dict[tuple[float, ...], Times] = {}
    for line in (ROWS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        here = found.setdefault(tuple(row[key] for key in keys), {})
        assert row["contender"] not in here, "a case that was measured twice"
        here[row["contender"]] = row["us"]
    return found


def scores() -> dict[tuple[float, ...], Times]:
    """score_blocks and append_keys."""
    return times("attention_scores", "batch", "context")


def steps() -> dict[tuple[float, ...], Times]:
    """attend_decode and whole steps."""
    return times("attention_decode", "batch", "context")


def by_cluster(us: Times) -> dict[int, float]:
    """Scores by bound, by clusters that were measured."""
    names = {size: f"score_blocks, bound, clusters of {size}" for size in plan.CLUSTERS}
    return {size: us[name] for size, name in names.items() if name in us}


def floor_us(batch: float, context: float, entry_bytes: int) -> float:
    """What an entry of every block takes at the rate of a copy."""
    return batch * KV_HEADS * (context // BLOCK) * 128 * entry_bytes / COPY_TBPS * 1e-6


def told(context: float) -> str:
    """32K, or 128K."""
    return f"{context / 1024:.0f}K"


def line(*cells: object) -> str:
    """A row of a table."""
    return f"| {' | '.join(map(str, cells))} |"


def score_table() -> list[str]:
    """Floors, what is chosen, every cluster; mean, mass, append, and three kernels in a row."""
    lines = []
    for (batch, context), us in scores().items():
        low, high = floor_us(batch, context, 4), floor_us(batch, context, 8)
        others = (f"score_blocks, {kind}" for kind in ("mean", "mass"))
        in_a_row = min(us["append, score, select"], us["append, score, select, early"])
        cells = [f"{batch} x {told(context)}", f"{low:.1f}"]
        cells += [f"{time:.1f}" for time in by_cluster(us).values()]
        cells += [f"{us[name]:.1f}" for name in others]
        cells += [f"{high:.1f}", f"{us['append_keys']:.1f}", f"{in_a_row:.1f}"]
        lines.append(line(*cells))
    return lines


def attend_table() -> list[str]:
    """2,048 tokens, and all: us and TB/s; flash and cuDNN over all."""
    lines = []
    for (batch, context), us in steps().items():
        cells = [f"{batch} x {told(context)}"]
        for name, tokens in (("attend_decode", 2048), ("attend_decode, all tokens", context)):
            rate = batch * tokens * 2 * 2 * KV_HEADS * 128 / us[name] * 1e-6
            cells += [f"{us[name]:.1f}", f"{rate:.2f}"]
            cells += [f"{rate / COPY_TBPS:.0%}"] if tokens == 2048 else []
        cells += [f"{us[f'dense, {rival}']:.1f}" for rival in ("flash", "cuDNN")]
        lines.append(line(*cells))
    return lines


def step_us(us: Times) -> float:
    """The whole step, as it is quicker."""
    return min(us[STEP], us[f"{STEP}, early"])


def step_table() -> list[str]:
    """The whole step, and dense attention."""
    lines = []
    for (batch, context), us in steps().items():
        names = ("score, select, attend", STEP, f"{STEP}, early", "dense, cuDNN")
        cells = [f"{us[name]:.1f}" for name in names]
        cells.append(f"{us['dense, cuDNN'] / step_us(us):.1f} x")
        lines.append(line(f"{batch} x {told(context)}", *cells))
    return lines


def prefill_table() -> list[str]:
    """Both with lists at hand, and from a mask; dense attention where all is kept."""
    lines = []
    for (context, part, kept), us in times(
        "attention_prefill", "context", "part", "kept_blocks"
    ).items():
        rate = 4 * 128**3 * kept * 4 / us["attend_prefill"] * 1e-6
        flex = us["FlexAttention, from a mask"]
        masked = us["attend_prefill, from a mask"]
        cells = [told(context), f"{part:.0%}", f"{us['attend_prefill'] / 1e3:.2f}", f"{rate:.0f}"]
        cells += [f"{masked / 1e3:.2f}", f"{us['FlexAttention'] / 1e3:.2f}", f"{flex / 1e3:.2f}"]
        cells.append(f"{flex / masked:.2f} x")
        dense = us.get("dense, cuDNN")
        cells.append("" if dense is None else f"{dense / 1e3:.2f}")
        cells.append("" if dense is None else f"{dense / us['attend_prefill']:.0%}")
        lines.append(line(*cells))
    return lines


def select_table() -> list[str]:
    """select, torch.topk, by mass, and the worst input by rank."""
    lines = []
    for (rows, columns, k, commit), us in times(
        "selection", "rows", "columns", "k", "commit"
    ).items():
        ours, rival = us["select"], us["torch.topk"]
        worst = max(us[f"select, {kind}"] for kind in ("equal", "crowded", "ascending"))
        cells = [f"{rows} x {columns:,}", f"{k:,}", f"{ours:.1f}", f"{rival:.1f}"]
        cells += [f"{rival / ours:.2f} x", f"{us['select, by mass']:.1f}", f"{worst / ours:.2f}"]
        lines.append(line(*cells, commit))
    return lines


PAGES = (
    ("ops/score_blocks.md", score_table),
    ("ops/attend_decode.md", attend_table),
    ("ops/attend_decode.md", step_table),
    ("ops/attend_prefill.md", prefill_table),
    ("ops/select.md", select_table),
)


@pytest.mark.parametrize(("page", "table"), PAGES, ids=[table.__name__ for _, table in PAGES])
def test_pages_have_the_committed_rows(page: str, table: object) -> None:
    text = (DOCS / page).read_text(encoding="utf-8")
    assert callable(table)
    lines = table()
    assert len(lines) >= 5
    assert "\n".join(lines) in text


def test_clusters_that_are_tried_first_were_the_fastest() -> None:
    for (batch, context), us in scores().items():
        pairs, rows = int(batch) * KV_HEADS, int(context) // BLOCK
        measured = by_cluster(us)
        chosen = plan.clusters_for(pairs, rows, TARGETS["h200"].sm_count)[0]
        assert measured[chosen] == min(measured.values()), (batch, context, measured)


def test_the_steps_between_clusters_are_where_lines_through_the_rows_say() -> None:
    """As the docstring and the comment of `plan` have it."""

    def crossing(one: float, other: float, first: float, second: float) -> float:
        return one + (other - one) * first / (first - second)

    found = {case: by_cluster(us) for case, us in scores().items()}
    lost = {key: found[1, key][16] - found[1, key][8] for key in (32_768, 131_072)}
    assert round(crossing(512, 2048, lost[32_768], lost[131_072])) == 1630
    for context, pairs in ((32_768, 26), (131_072, 50)):
        gap = {batch: found[batch, context][2] - found[batch, context][8] for batch in (1, 8)}
        assert round(crossing(8, 64, gap[1], gap[8])) == pairs
