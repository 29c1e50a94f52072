"""The text of two chained wgmma products: operands, and where their descriptors go."""

from __future__ import annotations

import re

import pytest

from hopsparse.compiler.wgmma_chain import chained_products
from hopsparse.errors import ArgumentError


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("keys", [64, 128])
def test_every_operand_is_used(keys: int, dim: int) -> None:
    for member in chained_products("bf16", keys, dim).split("static")[1:]:
        used = {int(each) for each in re.findall(r"%(\d+)", member)}
        given = len(re.findall(r'"[=+]?[flr]"\(', member))
        assert used == set(range(given))


def test_descriptors_walk_through_panels() -> None:
    """16 columns are 32 bytes of a row; a panel has 64, and as many rows as its operand."""
    score, weigh = chained_products("f16", 128, 128).split("void weigh(")
    for register, rows in (("a", 64), ("b", 128)):
        found = [int(each) for each in re.findall(rf"add\.s64 {register}, %\d+, (\d+)", score)]
        inside = [0, 2, 4, 6]
        assert found == inside + [rows * 128 // 16 + each for each in inside]
    found = [int(each) for each in re.findall(r"add\.s64 b, %\d+, (\d+)", weigh)]
    assert found == [16 * 128 // 16 * step for step in range(8)]


def test_the_first_instruction_clears_scores_and_none_clears_outputs() -> None:
    score, weigh = chained_products("bf16", 128, 64).split("void weigh(")
    assert re.findall(r"(first|add), 1, 1, 0, 0;", score) == ["first", "add", "add", "add"]
    assert re.findall(r", add, 1, 1, 1;", weigh) == [", add, 1, 1, 1;"] * 8


@pytest.mark.parametrize("wrong", [("f32", 128, 64), ("bf16", 120, 64), ("bf16", 128, 256)])
def test_what_does_not_exist_is_refused(wrong: tuple[str, int, int]) -> None:
    with pytest.raises(ArgumentError, match="products of"):
        chained_products(*wrong)
