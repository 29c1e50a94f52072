"""How wrong sums of 8-bit floats are by their length, as tensor cores and as float32 take them.

    PYTHONPATH=src python benchmarks/quality/sums.py --out rows.jsonl

By the model in `hopsparse.measure.fp8`, of 32 x 32 results: normal numbers, of which w keeps the
two larger of four, and the same without their signs, where the sum outgrows all that is added to
it. Errors are relative to the results (Frobenius norms): of sums of the codes, and of the codes.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from torch import Tensor

from hopsparse.formats import Scheme
from hopsparse.measure.fp8 import fp8_sums
from hopsparse.quant import input_scales, to_codes

SCHEME = Scheme("fp8", activations="fp8")
ROWS = 32


def main() -> None:
    """Append one row a length and kind of numbers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--k", type=int, nargs="+", default=[576, 1536, 4096, 14336, 28672])
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    for k in options.k:
        torch.manual_seed(k)
        x, w = torch.randn(ROWS, k), torch.randn(ROWS, k // 4, 4)
        w = (w * (w.abs().argsort(-1).argsort(-1) >= 2)).flatten(1)
        for signs in (True, False):
            row = {"suite": "fp8_sums", "k": k, "signs": signs, "torch": torch.__version__}
            row |= errors(x if signs else x.abs(), w if signs else w.abs())
            print(json.dumps(row), flush=True)
            with options.out.open("a") as file:
                file.write(json.dumps(row) + "\n")


def errors(x: Tensor, w: Tensor) -> dict[str, float]:
    """Relative errors of x @ w.T, by what makes them."""
    (a, a_scales), (b, b_scales) = codes(x), codes(w)
    exact = a.double() @ b.double().T
    found = {
        "fast": fp8_sums(a, b),
        "promoted_256": fp8_sums(a, b, batch=256),
        "promoted_128": fp8_sums(a, b, batch=128),
        "float32": a.float() @ b.float().T,
    }
    made = {name: relative(sums, exact) for name, sums in found.items()}
    scaled = exact * a_scales.double() * b_scales.double().T
    return made | {"codes": relative(scaled, x.double() @ w.double().T)}


def codes(values: Tensor) -> tuple[Tensor, Tensor]:
    """E4M3, and a scale a row [rows, 1]."""
    scales = input_scales(values, SCHEME)
    return to_codes(values, scales, "fp8").to(torch.float8_e4m3fn), scales


def relative(found: Tensor, exact: Tensor) -> float:
    """Frobenius norm of the difference to that of `exact`, three digits."""
    return float(f"{float((found.double() - exact).norm() / exact.norm()):.3g}")


if __name__ == "__main__":
    main()
