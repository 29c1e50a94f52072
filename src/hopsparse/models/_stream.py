"""One pass over a model on disk: load a block, evaluate it dense, prune it, evaluate it sparse.

Only one block is in memory at a time (two while it is fitted to what it was), with four sets of
hidden states: of the calibration windows and of the evaluation windows, each behind the sparse
blocks and behind the dense ones. Compute is float32; pruned weights are rounded to what is stored
before they are run, and inputs to what their layer's scheme says, so that what was measured is what
will run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..errors import ArgumentError, UnsupportedError
from ..prune import Activations, Recipe, Reference, advance, capture_inputs
from ._block import Pruned, prepare, prune_path, restore_shard, rounding_in
from ._family import Family
from ._resume import RunState
from .checkpoint import CheckpointWriter, ModuleEntry
from .evaluate import Quality
from .options import StepClock
from .rules import Selection
from .source import WeightSource, dematerialize, materialize, materialize_outside

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# One batch of calibration windows may take this much for the activations of a block.
_BATCH_BYTES = 1 << 30


class BlockStream:
    """Prunes the blocks of one model in order, writing a shard for each.

    Args:
        model: The skeleton, weights on the meta device.
        source: Where its weights come from.
        family: Where its parts are.
        selection: What to prune.
        recipe: How.
        device: Where blocks are run and pruned.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        source: WeightSource,
        family: Family,
        selection: Selection,
        recipe: Recipe,
        device: str,
    ) -> None:
        self._model = model
        self._source = source
        self._family = family
        self._selection = selection
        self._recipe = recipe
        self._device = device
        self._outer = materialize_outside(model, selection.blocks, source, device)
        _check_finite(model, "")

    @torch.no_grad()
    def run(
        self,
        calibration: list[Tensor],
        evaluation: dict[str, list[Tensor]],
        writer: CheckpointWriter,
        state: RunState,
        clock: StepClock,
        dense: Activations | None = None,
    ) -> dict[str, tuple[Quality, Quality]]:
        """Prune every block; return (dense, sparse) quality by text name.

        `dense` gets the evaluation windows behind the dense blocks; another run over the same
        windows takes them from there and does not run the dense model again.
        """
        windows = [window for windows in evaluation.values() for window in windows]
        calibrating = self._capture(self._batched(calibration))
        if self._recipe.resolved_fit_to != "layer":
            calibrating.reference = Reference(calibrating, dict(self._family.residual))
        dense = Activations() if dense is None else dense
        is_known = len(dense) > 0
        if not is_known:
            vars(dense).update(vars(self._capture(windows)))
        sparse = self._capture(windows)
        for index, path in enumerate(self._selection.blocks):
            block = self._model.get_submodule(path)
            dtypes = materialize(block, path, self._source, self._device)
            _check_finite(block, path)
            if not is_known:
                advance(block, dense)
            if state.is_done(index):
                if calibrating.reference is not None:
                    # As before the interruption, so that the dense model's sums are the same too.
                    prepare(block, path, calibrating, self._recipe, self._family)
                    calibrating.reference.advance()
                rounding = restore_shard(self._model, writer.partial, state.shard(index))
                with rounding_in(self._model, rounding):
                    advance(block, calibrating)
            else:
                pruned = self._prune(block, path, calibrating, dtypes)
                tensors, entries = self._packed(block, path, pruned, dtypes)
                shard = _shard_name(index, len(self._selection.blocks) + 1)
                writer.write_shard(shard, tensors)
                state.add((shard, entries), pruned.reports, writer)
                rounding = pruned.rounding
            with rounding_in(self._model, rounding):
                advance(block, sparse)
            clock.step(path, timed=not state.was_resumed(index))
            dematerialize(block)
        self._write_outer(writer)
        return _by_text(evaluation, list(self._scores(dense, sparse, windows)))

    def _capture(self, windows: list[Tensor]) -> Activations:
        first = self._model.get_submodule(self._selection.blocks[0])
        placed = [window.to(self._device) for window in windows]
        return capture_inputs(lambda window: self._model(window, use_cache=False), first, placed)

    def _batched(self, windows: list[Tensor]) -> list[Tensor]:
        """All windows as one batch where that saves forwards and their activations fit.

        With refresh "group" one batch is pruned in the forward that also moves it on. With "block"
        there are two forwards either way, and single windows stay in the cache.
        """
        if self._recipe.resolved_refresh == "block":
            return windows
        block = self._model.get_submodule(self._selection.blocks[0])
        widths = sum(layer.out_features for layer in _linears(block))
        needed = sum(window.numel() for window in windows) * widths * torch.float32.itemsize
        return [torch.cat(windows)] if needed <= _BATCH_BYTES else windows

    def _prune(
        self, block: nn.Module, path: str, activations: Activations, dtypes: dict[str, torch.dtype]
    ) -> Pruned:
        """Prune the layers of a block and move the activations behind it."""
        eligible = self._selection.eligible.get(path, ())
        stored = {dtypes[f"{name}.weight"] for name in eligible}
        if len(stored) > 1:
            raise UnsupportedError(
                f"{path} stores its projections in {', '.join(sorted(map(str, stored)))}",
                need="one dtype for the projections of a block",
                hint="save the model in one dtype first",
            )
        store_dtype = next(iter(stored), None)
        return prune_path(
            block,
            path,
            eligible,
            activations,
            self._recipe,
            store_dtype=store_dtype,
            family=self._family,
        )

    def _packed(
        self, block: nn.Module, path: str, pruned: Pruned, dtypes: dict[str, torch.dtype]
    ) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The tensors of a pruned block as they are stored, and the entries of its layers."""
        tensors: dict[str, Tensor] = {}
        entries: dict[str, Any] = {}
        sparse = set(self._selection.eligible.get(path, ()))
        for name, parameter in block.named_parameters():
            full = f"{path}.{name}"
            module = full.removesuffix(".weight")
            if full.endswith(".weight") and module in sparse:
                form = self._recipe.form_of(module)
                matrix = pruned.pack(module, parameter, form, dtypes[full])
                entries[module] = asdict(ModuleEntry.of(matrix))
                tensors |= {f"{module}.{part}": value for part, value in matrix.parts().items()}
            else:
                tensors[full] = parameter.to(dtypes[full])
        return tensors, entries

    def _write_outer(self, writer: CheckpointWriter) -> None:
        total = len(self._selection.blocks) + 1
        tensors = {name: self._source.load(name) for name in self._outer}
        writer.write_shard(_shard_name(total - 1, total), tensors)

    def _scores(
        self, dense: Activations, sparse: Activations, windows: list[Tensor]
    ) -> Iterator[tuple[Quality, Quality]]:
        """(dense, sparse) quality on each window, from the hidden states behind the last block.

        Logits of one window are in memory at a time, of both.
        """
        norm = self._model.get_submodule(self._family.final_norm)
        head: Callable[[Tensor], Tensor] = self._model.get_submodule(self._family.head)
        for before, after, window in zip(dense.hidden, sparse.hidden, windows, strict=True):
            was, now = Quality(), Quality()
            reference = head(norm(before))
            was.add(reference, window)
            now.add(head(norm(after)), window, reference)
            yield was, now


def _check_finite(module: nn.Module, path: str) -> None:
    for name, parameter in module.named_parameters():
        if parameter.device.type != "meta" and not bool(parameter.isfinite().all()):
            raise ArgumentError(
                f"weight {f'{path}.{name}'.strip('.')} holds NaN or infinity",
                need="finite weights",
                hint="download the model again, or check how it was converted",
            )


def _linears(block: nn.Module) -> list[nn.Linear]:
    return [module for module in block.modules() if isinstance(module, nn.Linear)]


def _by_text(
    evaluation: dict[str, list[Tensor]], scores: list[tuple[Quality, Quality]]
) -> dict[str, tuple[Quality, Quality]]:
    result, first = {}, 0
    for name, windows in evaluation.items():
        mine = scores[first : first + len(windows)]
        first += len(windows)
        result[name] = (Quality.sum(d for d, _ in mine), Quality.sum(s for _, s in mine))
    return result


def _shard_name(index: int, total: int) -> str:
    return f"model-{index + 1:05d}-of-{total:05d}.safetensors"
