"""One model on disk, and one way to prune it: opened, divided, pruned and written."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..errors import ArgumentError
from ..formats import Form, parse_form
from ..plan import ModelPlan
from ..prune import Activations, Recipe
from ..version import __version__
from ._family import Family
from ._resume import STATE_NAME, RunState
from ._stream import BlockStream
from ._summary import (
    count_parameters,
    peak_memory_bytes,
    quality_rows,
    sparse_config,
    summarize,
)
from .checkpoint import CheckpointWriter
from .options import Progress, ProgressCallback, SparsifyOptions, StepClock
from .rules import FITS_ALL, Selection, family_blocks, family_of, select
from .samples import generate_pair
from .source import WeightSource, open_source, skeleton
from .text import Texts

if TYPE_CHECKING:
    from transformers import PreTrainedModel

REPORT_NAME = "report.json"
PLAN_NAME = "plan.json"
# Samples hold the whole model in float32: only where that is 4 GB or less.
_SAMPLES_MAX_PARAMETERS = 1_000_000_000


@dataclass(frozen=True)
class Job:
    """One model and what is to be done to it; made before anything is written.

    Attributes:
        source: Where its weights come from.
        family: Where its parts are.
        network: The skeleton.
        selection: What to prune.
        texts: Windows to prune by and to judge by.
        recipe: How; a plan file has been read into its forms.
        plan: That plan, if there was one.
        options: As given.
    """

    source: WeightSource
    family: Family
    network: PreTrainedModel
    selection: Selection
    texts: Texts
    recipe: Recipe
    plan: ModelPlan | None
    options: SparsifyOptions

    @classmethod
    def of(cls, model: str, recipe: Recipe, options: SparsifyOptions) -> Job:
        """Open the model, divide its layers, and cut the texts.

        Raises:
            CheckpointError: The model or the plan cannot be read.
            ArgumentError: The plan is none of this model.
            CalibrationError: A text cannot be used.
            UnsupportedError: The architecture is unknown, or no layer can be pruned.
        """
        source = open_source(model)
        family = family_of(source.config.model_type)
        network = skeleton(source)
        blocks = family_blocks(family, network)
        plan = None
        if options.plan is not None:
            known = select(network, blocks, Recipe(FITS_ALL)).eligible
            plan = ModelPlan.read(options.plan, [n for names in known.values() for n in names])
            recipe = replace(recipe, forms=plan.forms())
        selection = select(network, blocks, recipe)
        if plan is not None:
            _check_fit(options.plan, plan, selection)
        texts = Texts.read(source.tokenizer(), recipe.seed, options)
        texts.check_vocabulary(source.config.vocab_size)
        return cls(source, family, network, selection, texts, recipe, plan, options)

    def with_forms(self, forms: Mapping[str, str]) -> Job:
        """The same with other forms, on a skeleton that nothing has run on."""
        recipe = replace(self.recipe, forms=forms)
        network = skeleton(self.source)
        selection = select(network, self.selection.blocks, recipe)
        return replace(self, recipe=recipe, network=network, selection=selection)

    @property
    def shows_samples(self) -> bool:
        """Whether samples are asked for, and the model is small enough to be loaded whole."""
        small = count_parameters(self.network) <= _SAMPLES_MAX_PARAMETERS
        return self.options.samples and small

    def identity(self) -> dict[str, Any]:
        """What a resumed run must have in common with the interrupted one."""
        return {
            "model": self.source.identity(),
            "recipe": self.recipe.to_json(),
            "calibration": self.texts.digest(),
            "device": self.options.device,
            # Other arithmetic gives other last digits, and masks that turn on them.
            "software": f"hopsparse {__version__}, torch {torch.__version__}",
            "threads": torch.get_num_threads(),
        }

    def run(
        self,
        out: Path | str,
        *,
        command: str,
        progress: ProgressCallback,
        dense: Activations | None = None,
    ) -> dict[str, Any]:
        """Prune, write the checkpoint, and return the report that it holds.

        Args:
            out: Folder to make.
            command: The command line that makes the same.
            progress: Called after each block and at each later phase.
            dense: The evaluation windows behind the dense blocks: filled by the first of several
                runs over the same texts, used by the others.
        """
        started = time.monotonic()
        options = self.options
        with CheckpointWriter(out, overwrite=options.overwrite, resume=options.resume) as writer:
            identity = self.identity()
            state = RunState.resume(writer, identity) if options.resume else RunState(identity)
            stream = BlockStream(
                self.network, self.source, self.family, self.selection, self.recipe, options.device
            )
            clock = StepClock("prune", len(self.selection.blocks), progress)
            texts = self.texts
            quality = stream.run(texts.calibration, texts.evaluation, writer, state, clock, dense)
            blocks_seconds = time.monotonic() - started
            samples = []
            if self.shows_samples:
                progress(Progress("samples", 0, 1, "generating samples", None))
                samples = generate_pair(self.source, state, writer.partial, options.device)
            progress(Progress("write", 0, 1, "writing the checkpoint", None))
            report = summarize(self.network, self.family, self.recipe, self.selection, state) | {
                "command": command,
                "calibration": texts.summary(),
                "evaluation": quality_rows(quality),
                "samples": samples,
                "seconds": {
                    "prune and evaluate": round(blocks_seconds, 1),
                    "total": round(time.monotonic() - started, 1),
                },
                "peak_memory_bytes": peak_memory_bytes(),
            }
            report["model"]["name"] = self.source.name
            self._finish(writer, state, report)
        return report

    def _finish(self, writer: CheckpointWriter, state: RunState, report: dict[str, Any]) -> None:
        """Write the small files, and give the folder its name."""
        self.source.save_extras(writer.partial)
        writer.write_json(REPORT_NAME, report)
        if self.plan is not None:
            self.plan.write(writer.partial / PLAN_NAME)
        writer.remove(STATE_NAME)
        sparse = sparse_config(self.recipe, self.selection, state)
        writer.commit(self.source.config_json() | {"quantization_config": sparse.to_json()})


def _check_fit(path: Path | None, plan: ModelPlan, selection: Selection) -> None:
    """Refuse a form that its layer cannot take: a plan means exactly what it says."""
    for name, form in plan.layers.items():
        reason = selection.kept_dense.get(name)
        if reason is not None and parse_form(form) != Form():
            raise ArgumentError(
                f"{path}: layer {name} as {form}: {reason}",
                need="a form that fits the layer",
                hint="dense, or unstructured:0.5",
            )
