"""docs/quant.md says which schemes have a kernel; the code decides."""

from __future__ import annotations

import re
from pathlib import Path

from hopsparse.cli.tune_problems import _CODES_OF
from hopsparse.formats.scheme import parse_scheme
from hopsparse.nn._codes import _PAIRS

PAGE = Path(__file__).parents[2] / "docs" / "quant.md"


def test_the_page_names_the_schemes_that_have_a_kernel() -> None:
    text = PAGE.read_text(encoding="utf-8")
    rows = text.split("| scheme | what runs |")[1].split("\n\n")[0].splitlines()[2:]
    found, names = set(), {}
    for row in rows:
        _, schemes, _, dtype, _ = row.split("|")
        for scheme in map(parse_scheme, re.findall("`(.+?)`", schemes)):
            pair = scheme.weights, scheme.activations
            found.add((*pair, scheme.group))
            names[pair] = dtype.strip().strip("`")
    assert found == {(*pair, group) for pair, groups in _PAIRS.items() for group in groups}
    tuned = {pair: name for pair, name in names.items() if name != "none: not tuned"}
    assert tuned == _CODES_OF
