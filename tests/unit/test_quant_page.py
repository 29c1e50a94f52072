"""docs/quant.md says which schemes have a kernel; the code decides."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from hopsparse.cli.problems import FOUR_BITS
from hopsparse.cli.tune_problems import _CODES_OF
from hopsparse.formats.scheme import parse_scheme
from hopsparse.nn._codes import _PAIRS
from hopsparse.ops.spmm_nm.int4.plan import Kind

PAGE = Path(__file__).parents[2] / "docs" / "quant.md"


def test_the_page_names_the_schemes_that_have_a_kernel() -> None:
    found, names = set(), {}
    for schemes, dtypes in table():
        for scheme in map(parse_scheme, schemes):
            pair = scheme.weights, scheme.activations
            found.add((*pair, scheme.group))
            names[pair] = dtypes[0]
    assert found == {(*pair, group) for pair, groups in _PAIRS.items() for group in groups}
    assert {pair: name for pair, name in names.items() if pair[0] != "int4"} == _CODES_OF


def test_the_page_names_all_weights_of_4_bits_beside_their_schemes() -> None:
    told = set()
    for schemes, dtypes in table():
        for dtype in dtypes:
            if dtype.startswith("int4:"):
                of_layers = {str(parse_scheme(scheme)) for scheme in schemes}
                assert str(parse_scheme(Kind.parse(dtype).scheme)) in of_layers
                told.add(dtype)
                if "/float16" in dtypes:
                    told.add(dtype.replace("/bfloat16", "/float16"))
    assert told == set(FOUR_BITS)


def table() -> Iterator[tuple[list[str], list[str]]]:
    """Schemes and `--dtype` of each row."""
    text = PAGE.read_text(encoding="utf-8")
    for row in text.split("| scheme | what runs |")[1].split("\n\n")[0].splitlines()[2:]:
        _, schemes, _, dtypes, _ = row.split("|")
        yield re.findall("`(.+?)`", schemes), re.findall("`(.+?)`", dtypes)
