"""The report of a sparsify run as plain JSON values (schema in docs/cli.md)."""

from __future__ import annotations

import os
import platform
import resource
import shlex
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..formats import Form
from ..prune import Recipe
from ..version import __version__
from ._family import Family
from ._resume import RunState
from .checkpoint import ModuleEntry, SparseConfig
from .evaluate import Quality
from .options import SparsifyOptions
from .rules import Selection

SCHEMA = 1


def summarize(
    network: nn.Module, family: Family, recipe: Recipe, selection: Selection, state: RunState
) -> dict[str, Any]:
    """Everything that is known of the model, its layers and the machine."""
    layers = [row for shard in state.shards for row in _layer_rows(shard)]
    saved = sum(row["bytes_dense"] - row["bytes_sparse"] for row in layers)
    entries = [entry for shard in state.shards for entry in shard.entries.values()]
    itemsize = getattr(torch, entries[0]["dtype"]).itemsize
    dense = count_parameters(network) * itemsize
    return {
        "schema": SCHEMA,
        "version": __version__,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {"cpu": _cpu_name(), "cores": os.cpu_count(), "torch": torch.__version__},
        "model": {"family": family.name, "parameters": count_parameters(network)},
        "recipe": recipe.to_json(),
        "bytes": {"dense": dense, "sparse": dense - saved},
        "layers": layers,
        "kept_dense": selection.kept_dense,
    }


def sparse_config(recipe: Recipe, selection: Selection, state: RunState) -> SparseConfig:
    """The `quantization_config` of the finished checkpoint."""
    modules = {
        name: ModuleEntry.from_json(name, entry)
        for shard in state.shards
        for name, entry in shard.entries.items()
    }
    return SparseConfig(asked_for(recipe), recipe.method, modules, selection.kept_dense)


def asked_for(recipe: Recipe) -> str:
    """The form of most layers as text, or "mixed" where a recipe names several."""
    return "mixed" if recipe.forms else str(Form(recipe.parsed_pattern, recipe.parsed_scheme))


def quality_rows(quality: dict[str, tuple[Quality, Quality]]) -> list[dict[str, Any]]:
    """Dense against sparse on each text; KL(dense || sparse) in nats a token."""
    return [
        {
            "text": text,
            "windows": len(dense.top1),
            "dense": {"perplexity": dense.perplexity},
            "sparse": {
                "perplexity": sparse.perplexity,
                "agreement": sparse.agreement(dense),
                "kl": sparse.kl,
            },
        }
        for text, (dense, sparse) in quality.items()
    ]


def repeat_command(
    model: str, out: Path, recipe: Recipe, options: SparsifyOptions, more: Sequence[str] = ()
) -> str:
    """The command line that makes the same checkpoint, with `more` words of later phases."""
    words = ["hopsparse", "sparsify", model, "-o", str(out)]
    if options.plan is not None:
        words += ["--plan", str(options.plan)]
    elif "--quality-budget" not in more:
        words += _form_words(recipe)
    words += ["--method", recipe.method, "--damping", str(recipe.damping)]
    words += ["--refit", str(recipe.refit)]
    for flag, name in (("--search", "search"), ("--fit-to", "fit_to"), ("--order", "order")):
        value = getattr(recipe, name)
        words += [flag, value] if value != getattr(Recipe, name) else []
    words += ["--permute"] if recipe.permute else []
    words += ["--seed", str(recipe.seed)]
    words += ["--windows", str(options.windows), "--window-tokens", str(options.window_tokens)]
    words += ["--eval-windows", str(options.eval_windows), "--device", options.device]
    words += [] if options.samples else ["--no-samples"]
    for flag, path in (("--calibration", options.calibration), ("--eval", options.evaluate)):
        words += [flag, str(path)] if path else []
    for glob in recipe.keep:
        words += ["--keep", glob]
    return shlex.join([*words, *more])


def _form_words(recipe: Recipe) -> list[str]:
    words = ["--pattern", str(recipe.pattern)]
    words += [] if recipe.scheme is None else ["--quant", str(recipe.scheme)]
    for glob, form in recipe.parsed_forms:
        words += ["--form", f"{glob}={form}"]
    return words


def count_parameters(network: nn.Module) -> int:
    """Parameters of a model, tied ones once."""
    return sum(weight.numel() for weight in network.parameters())


def peak_memory_bytes() -> int:
    """Most resident memory that this process has had."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _layer_rows(shard: RunState.Shard) -> list[dict[str, Any]]:
    rows = []
    for layer in shard.layers:
        entry = ModuleEntry.from_json(layer["name"], shard.entries[layer["name"]])
        out_features, k = entry.shape
        specs = entry.part_specs().values()
        stored = sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in specs)
        row = {
            "name": layer["name"],
            "shape": [out_features, k],
            "format": entry.stored_as,
            "dtype": entry.dtype,
            "bytes_dense": out_features * k * entry.torch_dtype.itemsize,
            "bytes_sparse": stored,
        }
        rows.append(layer | row)
    return rows


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
