"""select on the CPU against a sort that is written out; what it chooses first, and refuses."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hopsparse.errors import ArgumentError
from hopsparse.ops import select
from hopsparse.ops.select import cases, reference
from tests.helpers.scores import KINDS, float64_top, scores_of

NAN, INF = float("nan"), float("inf")
NUMBERS = st.one_of(
    st.sampled_from([NAN, INF, -INF, 0.0, -0.0, 1.0, -1.0, 2.0**-149]),
    st.floats(width=32, allow_nan=True),
    st.integers(-2, 2).map(float),
)


def by_hand(
    row: list[float], k: int, n: int, sink: int, recent: int, least: float | None = None
) -> list[int]:
    """The order of the docstring, one comparison at a time."""

    def rank(column: int) -> tuple[int, float, int]:
        if column >= n - recent:
            return (0, -column, 0)
        if column < sink:
            return (1, column, 0)
        value = row[column]
        return (2, 0.0, column) if math.isnan(value) else (3, -value, column)

    def there(column: int) -> bool:
        if column >= n - recent or column < sink:
            return True
        value = row[column]
        return value != -INF and not (least is not None and value < least)

    return sorted(sorted(filter(there, range(n)), key=rank)[:k])


def chosen(found: tuple[Tensor, Tensor]) -> list[list[int]]:
    """The indices that count, of each row; behind them is -1."""
    indices, counts = found
    rows = []
    for row, count in zip(indices.tolist(), counts.tolist(), strict=True):
        assert row[count:] == [-1] * (len(row) - count)
        rows.append(row[:count])
    return rows


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_rows_are_chosen_in_the_order_that_is_written(data: st.DataObject) -> None:
    columns = data.draw(st.integers(1, 24))
    rows = data.draw(
        st.lists(st.lists(NUMBERS, min_size=columns, max_size=columns), min_size=1, max_size=4)
    )
    own = st.lists(st.integers(0, columns), min_size=len(rows), max_size=len(rows))
    ks, ns = data.draw(own), data.draw(own)
    sink, recent = data.draw(st.integers(0, 3)), data.draw(st.integers(0, 3))
    least = data.draw(st.none() | st.floats(-2, 2, width=32))
    found = select(
        torch.tensor(rows, dtype=torch.float32),
        torch.tensor(ks, dtype=torch.int32),
        lengths=torch.tensor(ns, dtype=torch.int32),
        threshold=least,
        sink=sink,
        recent=recent,
    )
    want = [by_hand(row, k, n, sink, recent, least) for row, k, n in zip(rows, ks, ns, strict=True)]
    assert chosen(found) == want


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_mass_is_reached_and_not_without_the_last_one(data: st.DataObject) -> None:
    columns = data.draw(st.integers(1, 40))
    row = data.draw(st.lists(st.floats(-30, 30, width=32), min_size=columns, max_size=columns))
    part = data.draw(st.floats(2**-7, 1.0, width=32))
    sink, recent = data.draw(st.integers(0, 2)), data.draw(st.integers(0, 2))
    scores = torch.tensor([row], dtype=torch.float32)
    (got,) = chosen(select(scores, columns, top_p=part, sink=sink, recent=recent))
    rank = reference.ranks(scores)
    weight = reference.weights(scores, rank)[0].tolist()
    target = min(math.ceil(float(torch.tensor(part)) * sum(weight)), sum(weight))
    assert sum(weight[column] for column in got) >= target
    forced = {*range(min(sink, columns)), *range(max(0, columns - recent), columns)}
    assert forced <= set(got)
    free = [column for column in got if column not in forced]
    if free:
        last = min(free, key=lambda column: (row[column], -column))
        assert sum(weight[column] for column in got if column != last) < target
        # Nothing that was left is larger.
        left = [row[column] for column in range(columns) if column not in got]
        assert all(row[last] >= each for each in left)


def test_weights_are_the_exponential() -> None:
    scores = torch.cat((torch.linspace(-20, 0, 4001), torch.tensor([-1e30, -INF]))).unsqueeze(0)
    weight = reference.weights(scores, reference.ranks(scores))
    exact = scores.double().exp()
    # 2e-6 of the polynomial, a rounded argument of 29 at most, and a number that is cut.
    bound = exact * (2e-6 + 32 * 2**-23) + 2**-32
    assert ((weight / reference.ONE - exact).abs() <= bound).all()
    assert weight[0].tolist() == [*sorted(weight[0, :-2].tolist()), 0, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", [each for each in cases.EDGE if each.columns <= 8193], ids=str)
def test_values_are_those_of_a_float64_sort(
    case: cases.Case, kind: str, dtype: torch.dtype
) -> None:
    scores = scores_of(kind, case.rows, case.columns).to(dtype)
    indices, counts = select(scores, case.k)
    k = min(case.k, case.columns)
    assert counts.tolist() == [k] * case.rows
    values = scores.gather(1, indices.long()).double().sort(1, descending=True).values
    assert torch.equal(values, float64_top(scores, k))
    assert torch.equal(indices, indices.sort(1).values)


def test_twenty_thousand_that_share_their_top_bits() -> None:
    scores = scores_of("crowded", 1, 262_144)
    indices, _ = select(scores, 2048)
    values = scores.gather(1, indices.long()).double().sort(1, descending=True).values
    assert torch.equal(values, float64_top(scores, 2048))


@pytest.mark.parametrize("columns", [16_384, 16_448, 32_768])
def test_linearly_spaced_rows(columns: int) -> None:
    indices, _ = select(torch.linspace(-1, 1, columns), 2048)
    assert indices.tolist() == list(range(columns - 2048, columns))


def test_infinity_and_nan_come_first_and_minus_infinity_never() -> None:
    row = torch.tensor([INF] * 5 + [NAN] * 10 + [-INF] * 17)[torch.randperm(32)]
    indices, counts = select(row, 16)
    assert counts.item() == 15
    assert indices[:15].tolist() == (row != -INF).nonzero().flatten().tolist()
    assert indices[15] == -1
    first = select(row, 10)[0].tolist()
    assert first == row.isnan().nonzero().flatten().tolist()


def test_nan_of_every_sign_and_payload_is_one_score() -> None:
    bits = torch.tensor([0x7FC00000, -0x400000, 0x7F800001, 0x7FFFFFFF], dtype=torch.int32)
    assert select(bits.view(torch.float32), 2)[0].tolist() == [0, 1]


def test_a_budget_of_one_is_the_last_column() -> None:
    lengths = torch.tensor([4, 1, 0]).int()
    indices, counts = select(torch.randn(3, 6), 1, lengths=lengths, sink=1, recent=1)
    assert indices.tolist() == [[3], [0], [-1]]
    assert counts.tolist() == [1, 1, 0]


def test_mass_of_what_is_not_finite() -> None:
    assert chosen(select(torch.tensor([[0.0, INF, 5.0, INF]]), 4, top_p=0.9)) == [[1, 3]]
    assert chosen(select(torch.tensor([[0.0, NAN, 5.0]]), 3, top_p=0.5)) == [[1]]
    assert chosen(select(torch.full((1, 3), -INF), 3, top_p=0.5)) == [[]]


@pytest.mark.parametrize("options", [{}, {"top_p": 0.5}, {"threshold": 0.0}], ids=str)
def test_shapes_strides_and_widths(options: dict[str, Any]) -> None:
    scores = torch.randn(5, 3, 40).transpose(0, 1)
    indices, counts = select(scores, 7, **options)
    assert (indices.shape, counts.shape) == ((3, 5, 7), (3, 5))
    alone = [select(row.contiguous(), 7, **options)[0] for row in scores.flatten(0, 1)]
    assert torch.equal(indices.flatten(0, 1), torch.stack(alone))
    ks = torch.full((3, 5), 7, dtype=torch.int32)
    wide, same = select(scores, ks, most=9, **options)
    assert torch.equal(wide[..., :7], indices)
    assert torch.equal(same, counts)
    assert (wide[..., 7:] == -1).all()


@pytest.mark.parametrize("shape", [(0, 8), (2, 0), (0,)])
def test_nothing_gives_nothing(shape: tuple[int, ...]) -> None:
    indices, counts = select(torch.zeros(shape), 3)
    assert indices.shape == (*shape[:-1], min(3, shape[-1]))
    assert counts.tolist() == ([0] * shape[0] if len(shape) > 1 else 0)


def test_torch_compile_sees_one_operator() -> None:
    scores = torch.randn(3, 50)
    compiled = torch.compile(select, fullgraph=True, backend="eager")
    for mine, other in zip(compiled(scores, 4), select(scores, 4), strict=True):
        assert torch.equal(mine, other)
    torch.library.opcheck(
        torch.ops.hopsparse.select.default,
        (scores, None, None, "mass", None, 0.5, [4, 4, 1, 1]),
        test_utils=("test_schema", "test_faketensor"),
    )


SCORES = torch.randn(2, 8)
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"scores": torch.ones(2, 8).int()}, "scores"),
    ({"scores": torch.eye(2).to_sparse()}, "scores"),
    ({"scores": torch.tensor(1.0)}, "scores"),
    ({"scores": [1.0, 2.0]}, "scores"),
    ({"k": 0}, "k=0"),
    ({"k": True}, "k=True"),
    ({"k": 2.0}, "k=2.0"),
    ({"k": torch.tensor([1, 2])}, "int64"),
    ({"k": torch.tensor([1]).int()}, r"\[1\]"),
    ({"k": torch.tensor([1, -1]).int()}, "k of row 1 is -1"),
    ({"lengths": torch.tensor([9, 1]).int()}, "lengths of row 0 is 9"),
    ({"lengths": torch.tensor([0, -1]).int()}, "lengths of row 1 is -1"),
    ({"top_p": 0.0}, "top_p=0.0"),
    ({"top_p": 1.1}, "top_p=1.1"),
    ({"top_p": NAN}, "top_p=nan"),
    ({"top_p": torch.tensor([0.5, 2.0])}, "top_p of row 1"),
    ({"top_p": 0.5, "threshold": 0.5}, "together"),
    ({"threshold": NAN}, "threshold=nan"),
    ({"threshold": torch.tensor([NAN, 1.0])}, "threshold of row 0"),
    ({"sink": -1}, "sink=-1"),
    ({"recent": 1.5}, "recent=1.5"),
    ({"most": 0}, "most=0"),
]


@pytest.mark.parametrize(("changes", "told"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_means_nothing_is_refused(changes: dict[str, Any], told: str) -> None:
    arguments: dict[str, Any] = {"scores": SCORES, "k": 3} | changes
    with pytest.raises(ArgumentError, match=told):
        select(arguments.pop("scores"), arguments.pop("k"), **arguments)
