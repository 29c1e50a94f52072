"""Which algorithm ids cuSPARSELt takes for 8-bit codes, and which of them end the process.

    PYTHONPATH=src python benchmarks/probes/cusparselt_ids.py --out rows.jsonl    # on an H200

An id past the last one may run a kernel that fails, and the process can use the GPU no more. So
each dtype, token count and scaling is tried in a process of its own, one id after the other, and a
process that is lost ends the list. Results are held to the bound of their sums. Prints, for each,
the ids that are right and the first that was lost, then for each dtype the largest id that is safe
everywhere, which is what `_IDS` of src/hopsparse/measure/cusparselt.py may have.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch

from hopsparse.errors import HopsparseError
from hopsparse.measure import record
from hopsparse.measure.coded_contest import CodedReference
from hopsparse.measure.coded_peers import CodedCuSPARSELt, FastestCoded
from hopsparse.measure.codes import SCALINGS, CodedInput, random_input, random_weight
from hopsparse.measure.cusparselt import Algorithm, check_available
from hopsparse.measure.fault import named, wait_for

DTYPES = {"int8": "exact", "float8_e4m3fn": "fast"}
CHILD_S = 120.0  # a kernel may hang, too
Row = dict[str, Any]


@dataclass(frozen=True)
class Attempt:
    """What one process tries."""

    dtype: str
    tokens: int
    out: int
    k: int
    scaling: str
    most: int


def main() -> None:
    """Run the attempts, or, as a child, one of them."""
    options = parse()
    if options.child:
        try_ids(Attempt(**json.loads(options.child)))
        return
    check_available()
    tokens = [int(each) for each in options.tokens.split(",")]
    sides = [int(each) for each in options.shape.split("x")]
    facts = record.environment()
    rows = []
    for dtype, count, scaling in product(DTYPES, tokens, SCALINGS):
        row = tried(Attempt(dtype, count, sides[0], sides[1], scaling, options.most))
        rows.append(row)
        print(json.dumps(row), flush=True)
        if options.out:
            record.append(options.out, row | facts)
    for dtype in DTYPES:
        of_it = [row for row in rows if row["dtype"] == dtype]
        print(dtype, "largest safe id:", largest_safe(of_it))


def tried(attempt: Attempt) -> Row:
    """What a process of its own made of the ids.

    `lost` is the id whose kernel failed, or None; `limit` is what cuSPARSELt itself says.
    """
    command = [sys.executable, __file__, "--child", json.dumps(asdict(attempt))]
    output, errors = finished(command)
    found: dict[str, list[str]] = {"right": [], "wrong": [], "refused": []}
    begun, limit = None, None
    for line in output.splitlines():
        word, _, what = line.partition(" ")
        if word == "limit":
            limit = int(what)
        elif word == "try":
            begun = what
        elif word in found:
            found[word].append(what)
            begun = None
    lost = None if begun is None else int(begun.split()[0])
    return {**asdict(attempt), **found, "lost": lost, "limit": limit, "errors": errors}


def finished(command: list[str]) -> tuple[str, str]:
    """What a process wrote, and the end of its errors where it ended badly or not at all."""
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        try:
            output, errors = child.communicate(timeout=CHILD_S)
        except subprocess.TimeoutExpired:
            child.kill()
            output, errors = child.communicate()
    return output, "" if child.returncode == 0 else " ".join(errors.split())[-300:]


def largest_safe(rows: list[Row]) -> int | None:
    """The largest id that is right somewhere and before the first that was lost anywhere.

    Example:
        >>> rows = [{"right": ["3", "3 alpha"], "lost": None}, {"right": ["1", "5"], "lost": 4}]
        >>> largest_safe(rows)
        3
    """
    lost = min((row["lost"] for row in rows if row["lost"] is not None), default=1 << 30)
    right = {int(each.split()[0]) for row in rows for each in row["right"]}
    return max((number for number in right if number < lost), default=None)


def try_ids(attempt: Attempt) -> None:
    """Print what each id does, before and after it runs; the process may end at any of them."""
    dtype = getattr(torch, attempt.dtype)
    generator = torch.Generator("cuda").manual_seed(0)
    weight = random_weight((attempt.out, attempt.k), dtype, attempt.scaling, generator)
    x = random_input((attempt.tokens, attempt.k), dtype, attempt.scaling, generator)
    reference = CodedReference(x, weight)
    peer = CodedCuSPARSELt.prepare(weight)
    for number in range(attempt.most):
        for form in peer.forms(number):
            name = f"{number}{' alpha' * form.alpha}"
            print(f"try {name}", flush=True)
            print(f"{verdict(peer, x, form, reference, DTYPES[attempt.dtype])} {name}", flush=True)
    # Last, because it runs whatever the library likes.
    print(f"limit {library_limit(peer, x)}", flush=True)


def verdict(
    peer: FastestCoded, x: CodedInput, form: Algorithm, reference: CodedReference, sums: str
) -> str:
    """`right`, `wrong` or `refused`; a kernel that fails ends the process with an error."""
    try:
        with named(str(form), wait_for(x.codes.device)):
            y = peer.run(x, form)
    except HopsparseError:
        raise
    except RuntimeError:
        return "refused"
    return "right" if reference.excess(y, sums, roundings=2) <= 1 else "wrong"


def library_limit(peer: FastestCoded, x: CodedInput) -> int:
    """How many ids cuSPARSELt says that it has for the problem."""
    search = torch._C._cusparselt.mm_search  # type: ignore[attr-defined]
    return int(search(peer.packed, x.codes.t(), None, None, torch.bfloat16, True)[3])


def parse() -> argparse.Namespace:
    """Read the options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tokens", default="16,4096")
    parser.add_argument("--shape", default="4096x4096", help="OUTxK")
    parser.add_argument("--most", type=int, default=64, help="ids to try")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
