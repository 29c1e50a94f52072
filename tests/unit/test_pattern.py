from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hopsparse.errors import ArgumentError
from hopsparse.formats.pattern import (
    BlockPattern,
    NMPattern,
    Pattern,
    Unstructured,
    parse_pattern,
)

FRACTIONS = st.floats(0, 1, exclude_min=True, exclude_max=True)
PATTERNS = st.one_of(
    st.tuples(st.integers(1, 63), st.integers(2, 64))
    .filter(lambda pair: pair[0] < pair[1])
    .map(lambda pair: NMPattern(*pair)),
    FRACTIONS.map(Unstructured),
    st.builds(BlockPattern, st.integers(1, 256), st.integers(1, 256), FRACTIONS),
)


@given(PATTERNS)
def test_text_round_trip(pattern: Pattern) -> None:
    assert parse_pattern(str(pattern)) == pattern


@pytest.mark.parametrize("fraction", [1 / 3, 0.9999999, 1 - 2**-53, 5e-324, 0.5])
def test_text_keeps_every_digit(fraction: float) -> None:
    for pattern in (Unstructured(fraction), BlockPattern(32, 16, fraction)):
        assert parse_pattern(str(pattern)) == pattern
    assert str(Unstructured(0.5)) == "unstructured:0.5"


def test_what_users_write() -> None:
    assert parse_pattern(" 2:4 ") == NMPattern(2, 4)
    assert parse_pattern("block:32x32") == BlockPattern(32, 32, 0.5)
    assert parse_pattern("unstructured:0.5").sparsity == 0.5
    assert NMPattern(6, 8).sparsity == 0.25


@pytest.mark.parametrize(
    "text",
    ["", "2:", "4:2", "0:4", "2:128", "block:0x4", "unstructured:1.0", "unstructured:x", "a"],
)
def test_refusal_says_what_would_work(text: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        parse_pattern(text)
    assert caught.value.hint


def test_refused_pattern_is_named() -> None:
    with pytest.raises(ArgumentError, match=r"pattern '2-4'.*N:M.*2:4, 6:8"):
        parse_pattern("2-4")
