from __future__ import annotations

from itertools import pairwise

import pytest

from hopsparse.errors import ArgumentError
from hopsparse.tune import token_class, token_classes

EDGES = [(1, 16), (17, 32), (33, 64), (65, 128), (129, 256), (257, 512), (513, 1024)]
EDGES += [(1025, 2048), (2049, 4096)]


def test_classes_are_these() -> None:
    assert [(each.first, each.last) for each in token_classes()] == [*EDGES, (4097, None)]


def test_every_count_is_in_one_class_and_in_no_other() -> None:
    for tokens in range(1, 5000):
        (found,) = [
            each
            for each in token_classes()
            if each.first <= tokens and (each.last is None or tokens <= each.last)
        ]
        assert token_class(tokens) == found


def test_classes_leave_no_gap_and_are_measured_at_a_count_of_their_own() -> None:
    for low, high in pairwise(token_classes()):
        assert low.last is not None
        assert low.last + 1 == high.first
    assert all(token_class(each.measured) == each for each in token_classes())


@pytest.mark.parametrize(("most", "count"), [(1, 1), (16, 1), (17, 2), (4096, 9), (4097, 10)])
def test_classes_up_to_a_count(most: int, count: int) -> None:
    assert token_classes(most) == token_classes()[:count]


@pytest.mark.parametrize("tokens", [0, -1])
def test_no_tokens_are_in_no_class(tokens: int) -> None:
    with pytest.raises(ArgumentError, match="at least one"):
        token_class(tokens)
