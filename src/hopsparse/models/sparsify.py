"""Make a model sparse: one in memory, or a checkpoint on disk a block at a time."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..nn import SparseLinear
from ..prune import LayerReport, Recipe, capture_inputs
from ._family import Family
from ._resume import STATE_NAME, RunState
from ._stream import BlockStream, pack, prune_path
from ._summary import (
    count_parameters,
    peak_memory_bytes,
    quality_rows,
    repeat_command,
    sparse_config,
    summarize,
)
from .checkpoint import CheckpointWriter
from .options import Progress, ProgressCallback, SparsifyOptions, StepClock
from .rules import Selection, family_of, find_blocks, replace_module, select
from .samples import generate_pair
from .source import WeightSource, open_source, skeleton
from .text import Texts

if TYPE_CHECKING:
    from transformers import PreTrainedModel

REPORT_NAME = "report.json"
# Samples hold two whole models in memory: only for models of which that is no burden.
_SAMPLES_MAX_PARAMETERS = 2_000_000_000


def sparsify(
    model: nn.Module,
    recipe: Recipe | str = "2:4",
    calibration: Iterable[Any] = (),
    *,
    progress: ProgressCallback = lambda _: None,
) -> list[LayerReport]:
    """Prune the linear layers of a model in place and replace them by `SparseLinear`.

    Args:
        model: Any module. Its longest list of alike modules counts as its blocks and is walked a
            block at a time, so that later blocks are calibrated behind pruned ones; a model
            without such a list is one block.
        recipe: How to prune; a pattern such as "2:4" stands for `Recipe(pattern)`.
        calibration: Inputs for `model(...)`: tensors, tuples of arguments, or mappings of keyword
            arguments. Not needed for magnitude pruning.
        progress: Called after each block.

    Returns:
        One report for each pruned layer, in run order.

    Raises:
        UnsupportedError: No layer can be pruned to the pattern.
        CalibrationError: Inputs are missing or not finite.

    Example:
        >>> mlp = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 8))
        >>> reports = sparsify(mlp, "2:4", [torch.randn(32, 64) for _ in range(4)])
        >>> mlp[0].matrix.pattern
        NMPattern(n=2, m=4)
    """
    chosen = Recipe(pattern=recipe) if isinstance(recipe, str) else recipe
    selection = select(model, find_blocks(model), chosen.parsed_pattern, chosen.keep)
    was_training = model.training
    model.eval()
    reports: list[LayerReport] = []
    clock = StepClock("prune", len(selection.blocks), progress)
    with torch.no_grad():
        first = model.get_submodule(selection.blocks[0])
        activations = capture_inputs(lambda item: _call(model, item), first, list(calibration))
        for path in selection.blocks:
            names = selection.eligible.get(path, ())
            more = path != selection.blocks[-1]
            block = model.get_submodule(path)
            reports += prune_path(block, path, names, activations, chosen, then_advance=more)
            for name in names:
                replace_module(model, name, lambda old: _sparse(old, chosen))
            clock.step(path or type(model).__name__)
    model.train(was_training)
    return reports


def sparsify_checkpoint(
    model: str,
    out: Path | str,
    recipe: Recipe,
    *,
    options: SparsifyOptions = SparsifyOptions(),  # noqa: B008
    progress: ProgressCallback = lambda _: None,
) -> dict[str, Any]:
    """Read a dense model, prune it a block at a time, and write a sparse checkpoint.

    Args:
        model: A local HF folder, a .gguf file, or a packaged model such as "smollm2-135m".
        out: Folder to make; it appears when it is complete. Until then OUT.partial holds what is
            finished, block by block.
        recipe: How to prune.
        options: Texts, sizes, device, resume and overwrite.
        progress: Called after each block and at each later phase.

    Returns:
        The report that is also written as OUT/report.json.

    Raises:
        CheckpointError: The model cannot be read, or OUT cannot be written.
        CalibrationError: A text cannot be used.
        UnsupportedError: The architecture is unknown, or no layer can be pruned.
    """
    started = time.monotonic()
    job = _Job.of(model, recipe, options)
    with CheckpointWriter(out, overwrite=options.overwrite, resume=options.resume) as writer:
        identity = job.identity()
        state = RunState.resume(writer, identity) if options.resume else RunState(identity)
        stream = BlockStream(
            job.network, job.source, job.family, job.selection, recipe, options.device
        )
        clock = StepClock("prune", len(job.selection.blocks), progress)
        quality = stream.run(job.texts.calibration, job.texts.evaluation, writer, state, clock)
        blocks_seconds = time.monotonic() - started
        samples = []
        if options.samples and count_parameters(job.network) <= _SAMPLES_MAX_PARAMETERS:
            progress(Progress("samples", 0, 1, "generating samples", None))
            samples = generate_pair(job.source, state, writer.partial, options.device)
        progress(Progress("write", 0, 1, "writing the checkpoint", None))
        report = summarize(job.network, job.family, recipe, job.selection, state) | {
            "command": repeat_command(model, Path(out), recipe, options),
            "calibration": job.texts.summary(),
            "evaluation": quality_rows(quality),
            "samples": samples,
            "seconds": {
                "prune and evaluate": round(blocks_seconds, 1),
                "total": round(time.monotonic() - started, 1),
            },
            "peak_memory_bytes": peak_memory_bytes(),
        }
        report["model"]["name"] = job.source.name
        job.finish(writer, state, report)
    return report


@dataclass(frozen=True)
class _Job:
    """One model and what is to be done to it; made before anything is written."""

    source: WeightSource
    family: Family
    network: PreTrainedModel
    selection: Selection
    texts: Texts
    recipe: Recipe
    device: str

    @classmethod
    def of(cls, model: str, recipe: Recipe, options: SparsifyOptions) -> _Job:
        """Open the model, divide its layers, and cut the texts."""
        source = open_source(model)
        family = family_of(source.config.model_type)
        network = skeleton(source)
        selection = select(network, find_blocks(network), recipe.parsed_pattern, recipe.keep)
        texts = Texts.read(source.tokenizer(), recipe.seed, options)
        return cls(source, family, network, selection, texts, recipe, options.device)

    def identity(self) -> dict[str, Any]:
        """What a resumed run must have in common with the interrupted one."""
        return {
            "model": self.source.identity(),
            "recipe": self.recipe.to_json(),
            "calibration": self.texts.digest(),
            "device": self.device,
        }

    def finish(self, writer: CheckpointWriter, state: RunState, report: dict[str, Any]) -> None:
        """Write the small files, and give the folder its name."""
        self.source.save_extras(writer.partial)
        writer.write_json(REPORT_NAME, report)
        writer.remove(STATE_NAME)
        config = self.source.config.to_dict()
        sparse = sparse_config(self.recipe, self.selection, state)
        writer.commit(config | {"quantization_config": sparse.to_json()})


def _call(model: nn.Module, item: Any) -> Any:
    if isinstance(item, Mapping):
        return model(**item)
    return model(*item) if isinstance(item, tuple) else model(item)


def _sparse(linear: nn.Module, recipe: Recipe) -> SparseLinear:
    assert isinstance(linear, nn.Linear)
    return SparseLinear(pack(linear.weight.detach(), recipe.parsed_pattern), linear.bias)
