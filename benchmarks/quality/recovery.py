"""Recovery of a pruned SmolLM2-135M: perplexity against training tokens and seconds.

    PYTHONPATH=src python benchmarks/quality/anchors.py --method sparsegpt --save pruned.pt
    PYTHONPATH=src python benchmarks/quality/recovery.py --start pruned.pt --steps 150 --out r.jsonl

Training windows come in equal parts from the two texts that the anchors are calibrated on; the
anchors themselves, and a third text of another kind, are only evaluated on.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import sys
import time
from pathlib import Path
from typing import Any

import anchors
import texts
import torch
from torch import Tensor, nn

from hopsparse.formats import parse_form
from hopsparse.models.rules import replace_module
from hopsparse.nn import SparseLinear
from hopsparse.quant import quantize_matrix, store_matrix, weight_scales
from hopsparse.recover import Corpus, Layout, RecoverOptions, Task, open_machine, recover

HELD_OUT = 16


def main() -> None:
    """Recover once, and append a row."""
    given = _options()
    if given.threads:
        torch.set_num_threads(given.threads)
    model, tokenizer = anchors.load_model()
    encode = tokenizer.encode
    windows = anchors.evaluation_windows(tokenizer, given.texts, given.device)
    model.to(given.device)
    reference = anchors.evaluate(model, windows)
    student, _ = anchors.load_model()
    student.load_state_dict(torch.load(given.start, weights_only=True))
    layers = sparse(student, given.form)
    student.to(given.device)
    before = anchors.evaluate(student, windows)
    options = training(given)
    count = min(given.windows, given.steps * given.batch_windows)
    drawn = draw(encode, count + HELD_OUT, given.window_tokens)
    corpus = Corpus(drawn[HELD_OUT:], drawn[:HELD_OUT])
    blocks = tuple(f"model.layers.{i}" for i in range(len(model.model.layers)))
    began = time.perf_counter()
    with open_machine(options, "auto" if given.device == "cuda" else given.device) as machine:
        layout = Layout(blocks, "lm_head")
        done = recover(student, model, Task(layout, corpus, options, machine, tell=_tell))
    seconds = time.perf_counter() - began
    after = anchors.evaluate(student.to(given.device), windows)
    row: dict[str, Any] = {
        "suite": "quality_recovery",
        "start": given.name or given.start.name,
        "options": {k: v for k, v in vars(given).items() if k not in ("start", "out", "name")},
        "layers": len(layers),
        "tokens": given.steps * given.batch_windows * given.window_tokens,
        "seconds": round(seconds, 1),
        "curve": done.trajectory.curve,
        "max_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }
    for name in windows:
        row[f"ppl_{name}_dense"] = round(reference[name][0], 3)
        row[f"ppl_{name}_before"] = round(before[name][0], 3)
    row |= anchors.quality_columns(after, reference)
    print(json.dumps({k: v for k, v in row.items() if k != "curve"}), flush=True)
    if given.out:
        with given.out.open("a") as file:
            file.write(json.dumps(row, default=str) + "\n")


def training(given: Any) -> RecoverOptions:
    """How to train, as the command line says."""
    return RecoverOptions(
        steps=given.steps,
        lr=given.lr,
        batch_windows=given.batch_windows,
        window_tokens=given.window_tokens,
        hidden=given.hidden,
        masks=given.masks,
        level=given.level,
        lora_rank=given.lora_rank,
        train=given.train,
        precision=given.precision,
        evaluate_every=given.evaluate_every,
    )


def sparse(model: nn.Module, text: str) -> list[str]:
    """Replace every projection by a `SparseLinear` of this form; nothing is pruned here."""
    form = parse_form(text)
    names = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and "proj" in n]
    for name in names:
        weight = model.get_parameter(f"{name}.weight").detach()
        if form.scheme is None:
            layer = SparseLinear(store_matrix(weight, form.pattern))
        else:
            scales = weight_scales(weight, form.scheme)
            layer = SparseLinear(quantize_matrix(weight, form, scales, dtype=weight.dtype))
        replace_module(model, name, lambda _, layer=layer: layer)  # type: ignore[misc]
    return names


def draw(encode: texts.Encode, count: int, tokens: int) -> list[Tensor]:
    """Windows [1, tokens], alternating between the two calibration texts, without overlap."""
    chosen = random.Random(0)
    streams = []
    for ids in (encode(texts.book()[:1_500_000]), encode(texts.topics()[:295_000])):
        starts = list(range(0, len(ids) - tokens, tokens))
        chosen.shuffle(starts)
        streams.append([torch.tensor([ids[s : s + tokens]]) for s in starts])
    pairs = [window for pair in zip(*streams, strict=False) for window in pair]
    # The shorter text ends first: the rest comes from the longer one.
    rest = streams[0][len(pairs) // 2 :]
    return (pairs + rest)[:count]


def _tell(step: int, steps: int, loss: float, seconds_left: float | None) -> None:
    if step % 10 == 0:
        left = "" if seconds_left is None else f", {seconds_left:.0f} s left"
        print(f"step {step}/{steps} loss {loss:.4f}{left}", file=sys.stderr, flush=True)


def _options() -> Any:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--start", type=Path, required=True, help="what anchors.py --save wrote")
    parser.add_argument("--name", help="what to call the start in the row")
    parser.add_argument("--form", default="2:4")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--lr", type=float, default=4e-4)
    parser.add_argument("--batch-windows", type=int, default=4)
    parser.add_argument("--window-tokens", type=int, default=256)
    parser.add_argument("--windows", type=int, default=10**9, help="different windows at most")
    parser.add_argument("--hidden", type=float, default=0.0)
    parser.add_argument("--masks", default="fixed")
    parser.add_argument("--level", default="end-to-end")
    parser.add_argument("--train", default="projections")
    parser.add_argument("--lora-rank", type=int, default=0)
    parser.add_argument("--precision", default="no")
    parser.add_argument("--evaluate-every", type=int, default=50)
    parser.add_argument("--texts", nargs="+", default=["anchors", "other"])
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
