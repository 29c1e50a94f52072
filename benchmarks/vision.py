r"""Images a second of ViT-L/16 and ResNet-50, sparse against dense as torch.compile makes it.

    PYTHONPATH=src python benchmarks/vision.py --model vit --out rows.jsonl
    PYTHONPATH=src python benchmarks/vision.py --model resnet --out rows.jsonl
    PYTHONPATH=src python benchmarks/vision.py --model vit --out rows.jsonl \
        --forms block:16x16:0.95 block:16x16:0.97

Random weights of the true shapes, none of them zero before pruning by magnitude, random images, all
in CUDA graphs that take turns in one run. Rivals are the dense model: `eager` as it is, `compiled`
by torch.compile block by block in the default mode, `max-autotune` in that mode (without its own
graphs). Ours runs its kernels, those of 2:4 with the residual added, and what lies between two
products is one function that torch.compile makes for all blocks; the stem is compiled too.
`--three` says whether 3x3 convolutions of ResNet are sparse (im2col and a product), sparse with
windows gathered inside the kernel (`implicit`, of 2:4 weights), dense as torch has them, or several
of these as variants.

Each variant is compared with the same numbers in float32 before it is timed: `error` is the
relative distance of the scores of two images. Appends one JSON row a variant; the table comes last.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from vision_models import (
    Convolution,
    ResNet,
    ResNetSizes,
    SparseLinear,
    Vit,
    VitSizes,
    add_relu,
    exact,
    resnet,
    sparse_resnet,
    sparse_vit,
)

from hopsparse.errors import HopsparseError
from hopsparse.formats import parse_form
from hopsparse.measure import record
from hopsparse.measure.clock import Contender, gpu, time_side_by_side
from hopsparse.measure.timing import Timing, ratio

RIVALS = ("eager", "compiled", "max-autotune")
THREES = ("sparse", "implicit", "dense")
#: What is measured where no form is named; 37 % of the blocks are kept where ResNet is asked for.
FORMS = {
    "vit": ("2:4", "2:4+fp8", "block:16x16:0.9", "block:32x32:0.9"),
    "resnet": ("2:4", "block:16x16:0.63", "block:32x32:0.63", "block:64x64:0.63"),
}
TINY = {
    "vit": VitSizes(width=64, depth=2, heads=2, hidden=128, image=32, patch=16, classes=10),
    "resnet": ResNetSizes(width=16, depths=(1, 1), image=32, classes=10),
}
FULL = {"vit": VitSizes(), "resnet": ResNetSizes()}
#: Scores further from float32 than this are no result: bfloat16, and 8 bits.
MOST_ERROR, MOST_ERROR_OF_CODES = 0.05, 0.25

Run = Callable[[Tensor], Tensor]


@torch.no_grad()
def main() -> None:
    """Build, check, time, append, print."""
    options = parse()
    # Shapes and variants share the code of a block: none of them may run uncompiled.
    torch._dynamo.config.recompile_limit = 64
    torch.backends.cudnn.benchmark = True  # Dense convolutions take the fastest that there is.
    device = gpu() if options.device == "cuda" else torch.device("cpu")
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    sizes = TINY[options.model] if options.tiny else FULL[options.model]
    dense = dense_model(options.model, sizes).to(device, dtype)
    images = torch.randn(options.batch, 3, sizes.image, sizes.image, device=device, dtype=dtype)
    if options.model == "resnet":
        images = images.to(memory_format=torch.channels_last)
    facts = record.environment() | {
        "suite": "vision",
        "model": options.model,
        "sizes": str(sizes),
        "batch": options.batch,
        "dtype": str(dtype).removeprefix("torch."),
        "most_mb": options.most_mb,
    }
    rows, runs = [], []
    for name, build in variants(options, dense):
        started = time.monotonic()
        row, run = checked(name, build, images)
        row["build_s"] = round(time.monotonic() - started, 1)
        rows.append(row)
        runs.append(Contender(name, [lambda run=run: run(images)]))  # type: ignore[misc]
        print(f"{name}: {row['error'] if row['error'] is not None else row['why']}", flush=True)
    sound = [i for i, row in enumerate(rows) if not row["why"]]
    timings = timed([runs[i] for i in sound], options, device)
    for i, timing in zip(sound, timings, strict=True):
        rows[i] |= timing_row(timing, options.batch)
        rows[i]["why"] = timing.error
    best = fastest_rival([rows[i] for i in sound])
    base = next((t for t in timings if t.name == best), None)
    for row in rows:
        mine = next((t for t in timings if t.name == row["variant"] and t.samples_us), None)
        if mine is not None and base is not None:
            row |= {"against": best, "speedup": round(ratio(base, mine).value, 4)}
        record.append(options.out, row | facts)
    print_table(rows)


def dense_model(kind: str, sizes: Any) -> nn.Module:
    """The dense model in evaluation, batch norms folded."""
    if kind == "resnet":
        return resnet(sizes)
    return Vit(sizes).eval().requires_grad_(False)


def variants(options: Any, dense: nn.Module) -> list[tuple[str, Callable[[], nn.Module]]]:
    """Name, and how to build it, of all that is compared."""
    found: list[tuple[str, Callable[[], nn.Module]]] = [
        (name, lambda name=name: rival(name, dense, options.backend))  # type: ignore[misc]
        for name in options.rivals
    ]
    for text in options.forms:
        parts = ("",) if options.model == "vit" else options.three
        for three in parts:
            name = f"{text}, 3x3 {three}" if three else text
            found.append((name, lambda t=text, h=three: ours(options, dense, t, h)))  # type: ignore[misc]
    return found


def rival(name: str, dense: nn.Module, backend: str) -> nn.Module:
    """The dense model; blocks that are alike are compiled once."""
    if name == "eager":
        return dense
    model = copy.deepcopy(dense)
    mode = (
        "max-autotune-no-cudagraphs" if name == "max-autotune" and backend == "inductor" else None
    )
    how: dict[str, Any] = {"fullgraph": True, "dynamic": False, "backend": backend, "mode": mode}
    if isinstance(model, ResNet):
        model.compile(**how)
        return model
    assert isinstance(model, Vit)
    for block in model.blocks:
        block.compile(**how)
    return model


def ours(options: Any, dense: nn.Module, text: str, three: str) -> nn.Module:
    """The sparse model, its element-wise parts compiled."""
    how: dict[str, Any] = {"fullgraph": True, "dynamic": False, "backend": options.backend}
    if isinstance(dense, Vit):
        return sparse_vit(dense, text, partial(torch.compile, **how))
    assert isinstance(dense, ResNet)
    model = sparse_resnet(dense, text, torch.compile(add_relu, **how), three)
    model.stem.compile(**how)
    for layer in (each for each in model.modules() if isinstance(each, Convolution)):
        layer.most_bytes = options.most_mb << 20 if options.most_mb else None
        layer.implicit = three == "implicit"
    return model


def checked(name: str, build: Callable[[], nn.Module], images: Tensor) -> tuple[record.Row, Run]:
    """A row without times, and the model."""
    model = build()
    plans: Counter[str] = Counter()
    layers = [each for each in model.modules() if isinstance(each, SparseLinear)]

    def note(layer: nn.Module, inputs: tuple[Tensor]) -> None:
        assert isinstance(layer, SparseLinear)
        plans[layer.plan(inputs[0]).name] += 1

    handles = [layer.register_forward_pre_hook(note) for layer in layers]
    why, error = "", None
    try:
        model(images)
        for handle in handles:
            handle.remove()
        want = exact(model)(images[:2].float())
        scores = model(images)[:2].float()
        error = float((scores - want).norm() / want.norm())
        coded = "+" in name
        if not error < (MOST_ERROR_OF_CODES if coded else MOST_ERROR):
            why = f"{error:.3g} from the same numbers in float32"
    except (HopsparseError, RuntimeError) as failure:
        why = " ".join(f"{type(failure).__name__}: {failure}".split())
    finally:
        for handle in handles:
            handle.remove()
    matrices = [layer.matrix for layer in layers]
    row: record.Row = {
        "variant": name,
        "error": error,
        "why": why,
        "plans": dict(plans),
        "layers": len(layers),
        "bytes_sparse": sum(matrix.nbytes for matrix in matrices),
    }
    return row, model


def timed(contenders: list[Contender], options: Any, device: torch.device) -> list[Timing]:
    """Time of a forward, in graphs on a GPU, by the clock on the CPU."""
    if not contenders:
        return []
    if device.type == "cuda":
        return time_side_by_side(contenders, rounds=options.rounds, budget_s=options.budget_s)
    samples: dict[str, list[float]] = {each.name: [] for each in contenders}
    for _ in range(options.rounds):
        for each in contenders:
            started = time.perf_counter()
            each.calls[0]()
            samples[each.name].append(1e6 * (time.perf_counter() - started))
    return [Timing(name, tuple(found), 1) for name, found in samples.items()]


def timing_row(timing: Timing, batch: int) -> record.Row:
    """Times of a forward, None where it failed."""
    if not timing.samples_us:
        return {"us": None, "images_per_s": None}
    low, high = timing.quartiles_us
    return {
        "us": timing.us,
        "us_quartiles": [low, high],
        "images_per_s": batch * 1e6 / timing.us,
        "rounds": len(timing.samples_us),
    }


def fastest_rival(rows: list[record.Row]) -> str | None:
    """The dense variant to compare with: the fastest that was compiled, else any."""
    known = [row for row in rows if row["variant"] in RIVALS and row.get("us")]
    compiled = [row for row in known if row["variant"] != "eager"] or known
    return min(compiled, key=lambda row: float(row["us"]))["variant"] if compiled else None


def print_table(rows: list[record.Row]) -> None:
    """Images a second, speed-up, and what the layers ran."""
    print(f"\n{'variant':<32}{'ms':>9}{'images/s':>11}{'speed-up':>10}{'error':>9}  layers")
    for row in rows:
        if row.get("us") is None:
            print(f"{row['variant']:<32}  {row['why']}")
            continue
        plans = ", ".join(f"{count} {name}" for name, count in row["plans"].items())
        speedup = f"{row['speedup']:.2f}" if "speedup" in row else ""
        print(
            f"{row['variant']:<32}{row['us'] / 1e3:>9.3f}{row['images_per_s']:>11.0f}"
            f"{speedup:>10}{row['error']:>9.4f}  {plans}"
        )
    print(f"spread: {statistics.median(spreads(rows)):.1%}" if spreads(rows) else "")


def spreads(rows: list[record.Row]) -> list[float]:
    """Distance of the quartiles as a part of the median."""
    known = [row for row in rows if row.get("us")]
    return [(row["us_quartiles"][1] - row["us_quartiles"][0]) / row["us"] for row in known]


def parse() -> argparse.Namespace:
    """Options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, choices=sorted(FULL))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--forms", nargs="*", help="such as 2:4, 2:4+fp8, block:16x16:0.9")
    parser.add_argument("--rivals", nargs="*", default=["eager", "compiled"], choices=RIVALS)
    parser.add_argument("--three", nargs="+", default=["sparse"], choices=THREES)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--most-mb", type=int, default=0, help="windows at one time; 0: all")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--budget-s", type=float, default=60.0)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--backend", default="inductor", choices=("inductor", "eager"))
    parser.add_argument("--tiny", action="store_true", help="a model for tests")
    options = parser.parse_args()
    for name in ("batch", "rounds"):
        if getattr(options, name) < 1 + (name == "batch"):
            parser.error(f"--{name} {getattr(options, name)}: at least {1 + (name == 'batch')}")
    if options.forms is None:
        options.forms = list(FORMS[options.model])
    for text in options.forms:
        try:
            form = parse_form(text)
        except HopsparseError as error:
            parser.error(f"--forms {text}: {error}")
        if form.pattern is None:
            parser.error(f"--forms {text}: no pattern")
    return options


if __name__ == "__main__":
    main()
