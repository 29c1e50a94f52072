"""Win back what pruning cost: a sparse checkpoint and its dense teacher in, a better one out."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ArgumentError, CheckpointError, UnsupportedError
from ..formats import Quantized, SparseMatrix
from ..nn import SparseLinear
from ..plan import TARGETS
from ..recover import (
    STATE_FILE,
    Corpus,
    Layout,
    LowRank,
    Machine,
    OptimizerFactory,
    Recovered,
    RecoverOptions,
    StateFile,
    Storage,
    Task,
    low_rank_cost,
    open_machine,
    recover,
)
from ..version import __version__
from ._entries import ModuleEntry, SparseConfig
from ._files import partial_of, sha256
from ._judge import Judge, before_and_after
from ._layers import require_sparse
from ._prune_job import REPORT_NAME
from ._recovery_report import continued, recover_command, report_of
from ._summary import peak_memory_bytes
from .checkpoint import CheckpointReader, CheckpointWriter
from .load import load
from .low_rank import LOW_RANK_FOLDER, write_low_rank
from .options import Progress, ProgressCallback
from .recover_texts import RecoverTexts, cut_texts
from .rules import family_blocks, family_of, replace_module
from .source import WeightSource, materialize_outside, open_source, skeleton

RECOVER_REPORT = "recover.json"
# A resumed run may go on at another rate, and save more or less often.
_FREE = ("lr", "save_every")


def recover_checkpoint(
    sparse: Path | str,
    out: Path | str,
    *,
    teacher: str | None,
    options: RecoverOptions,
    texts: RecoverTexts = RecoverTexts(),  # noqa: B008
    progress: ProgressCallback = lambda _: None,
    make_optimizer: OptimizerFactory | None = None,
) -> dict[str, Any]:
    """Train the sparse layers of a checkpoint towards its dense model, and write a new checkpoint.

    Formats, patterns, schemes and dtypes stay as they are. Under torchrun every process calls this
    with the same arguments; the first one evaluates and writes.

    Args:
        sparse: The folder that `hopsparse sparsify` wrote.
        out: Folder to make; until it is complete OUT.partial holds the state of the run.
        teacher: The dense model, as `hopsparse sparsify` takes it.
        options: How to train.
        texts: What to train and evaluate on, and where.
        progress: Called after each step and at each phase.
        make_optimizer: Makes the optimizer from parameter groups; AdamW when None.

    Returns:
        The report that is also OUT/recover.json, and in OUT/report.json if SPARSE has one.

    Raises:
        ArgumentError: No teacher, or options that do not fit the models.
        CalibrationError: A text cannot be used.
        CheckpointError: A model cannot be read, or OUT cannot be written.
        UnsupportedError: The architecture is unknown, or a library is missing.
        VerificationError: The loss is not finite.

    Example:
        >>> recover_checkpoint("no/such", "out", teacher=None, options=RecoverOptions())
        Traceback (most recent call last):
        hopsparse.errors.ArgumentError: no teacher. Required: the dense model that no/such was ...
    """
    if teacher is None:
        raise ArgumentError(
            "no teacher",
            need=f"the dense model that {sparse} was made from: a checkpoint does not record it",
            hint="--teacher MODEL, as it was given to `hopsparse sparsify`",
        )
    started = time.monotonic()
    with CheckpointReader(sparse) as reader:
        job = _Job.of(reader, teacher, options, texts)
        with open_machine(options, texts.device) as machine:
            with _writer(Path(out), texts, machine) as writer:
                machine.wait()
                tell = progress if machine.is_main else _nothing
                report = job.run(Path(out), machine, tell, make_optimizer)
                if writer is not None:
                    report["seconds"]["total"] = round(time.monotonic() - started, 1)
                    report["peak_memory_bytes"] = peak_memory_bytes()
                    again = recover_command(Path(sparse), Path(out), teacher, options, texts)
                    job.write(writer, report, again)
            machine.wait()
    return report


class _Job:
    """One run: models, windows, and what is known of them."""

    def __init__(
        self,
        reader: CheckpointReader,
        source: WeightSource,
        options: RecoverOptions,
        texts: RecoverTexts,
        cut: tuple[Corpus, dict[str, list[Tensor]], str],
    ) -> None:
        self.reader = reader
        self.sparse: SparseConfig = require_sparse(reader)
        self.source = source
        self.options = options
        self.texts = texts
        self.corpus, self.evaluation, self.text_name = cut
        self.student: nn.Module = nn.Identity()
        self.earlier = report_of(reader.folder)

    @classmethod
    def of(
        cls, reader: CheckpointReader, teacher: str, options: RecoverOptions, texts: RecoverTexts
    ) -> _Job:
        """Open everything that can be refused before a model is in memory."""
        sparse = require_sparse(reader)
        if (reader.folder / LOW_RANK_FOLDER).exists():
            raise UnsupportedError(
                f"{reader.folder} has low-rank products beside its weights",
                need="a checkpoint without them: a second run would train towards both",
                hint="the checkpoint that those products were trained for",
            )
        if not sparse.modules:
            raise CheckpointError(
                f"{reader.folder} has no sparse weight",
                need="at least one",
                hint="`hopsparse sparsify` first",
            )
        source = open_source(teacher)
        cut = cut_texts(source.tokenizer(), options, texts, source.config)
        return cls(reader, source, options, texts, cut)

    def run(
        self,
        out: Path,
        machine: Machine,
        progress: ProgressCallback,
        make_optimizer: OptimizerFactory | None,
    ) -> dict[str, Any]:
        """Load both models, train, and judge what will be stored."""
        progress(Progress("load", 0, 1, "loading both models", None))
        self.student = load(self.reader.folder, dtype=torch.float32)
        network = skeleton(self.source)
        _check_teacher(network, self.sparse, self.source.name)
        family = family_of(self.source.config.model_type)
        layout = Layout(family_blocks(family, network), family.head)
        materialize_outside(network, (), self.source, "cpu")
        # In a box: with a cache nobody needs the teacher while the student trains.
        box: list[nn.Module] = [network]
        del network
        progress(Progress("evaluate", 0, 1, "dense", None))
        # The first process alone has something to judge by.
        judge = Judge(box[0], layout, self.evaluation if machine.is_main else {})
        progress(Progress("evaluate", 0, 1, "before", None))
        before = judge(self.student)
        file = StateFile(partial_of(out) / STATE_FILE, self._identity())
        began = time.monotonic()
        done = recover(
            self.student,
            box.pop,
            Task(
                layout,
                self.corpus,
                self.options,
                machine,
                file,
                self.texts.resume,
                make_optimizer,
                tell=_told(progress),
                tell_cache=lambda n, total: progress(Progress("teacher", n, total, "", None)),
            ),
        )
        seconds = time.monotonic() - began
        self.student.to("cpu")
        self._round()
        progress(Progress("evaluate", 0, 1, "after", None))
        after = judge(self.student)
        progress(Progress("write", 0, 1, "writing the checkpoint", None))
        return self._report(done, before_and_after(before, after), seconds)

    def write(self, writer: CheckpointWriter, report: dict[str, Any], command: str) -> None:
        """Write the checkpoint, with its reports; `command` makes the same."""
        layers = {
            name: module.matrix
            for name, module in _sparse_layers(self.student).items()
            if name in self.sparse.modules
        }
        stored = {name: _as_stored(layers[name], self.sparse.modules[name]) for name in layers}
        values = dict(self.student.named_parameters()) if self.options.train == "all" else {}
        for shard in self.reader.shards():
            writer.write_shard(shard, self._shard(shard, stored, values))
        writer.copy_extras(self.reader.folder)
        dtype = next(iter(self.sparse.modules.values())).torch_dtype
        write_low_rank(writer.partial, self.student, dtype)
        writer.write_json(RECOVER_REPORT, report)
        if self.earlier is not None:
            writer.write_json(REPORT_NAME, continued(self.earlier, report, command))
        modules = {name: ModuleEntry.of(stored[name]) for name in self.sparse.modules}
        config = {k: v for k, v in self.reader.config.items() if k != "quantization_config"}
        config["quantization_config"] = replace(self.sparse, modules=modules).to_json()
        writer.commit(config)

    def _shard(
        self, shard: str, stored: dict[str, SparseMatrix], values: dict[str, nn.Parameter]
    ) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        for name in self.reader.names_in(shard):
            module, _, part = name.rpartition(".")
            entry = self.sparse.modules.get(module)
            if entry is not None and part in entry.parts:
                tensors[name] = stored[module].parts()[part]
            else:
                old = self.reader.load(name)
                tensors[name] = values[name].detach().to(old.dtype) if name in values else old
        return tensors

    def _round(self) -> None:
        """Give the student what will be stored: what is judged is what loads."""
        for name, layer in _sparse_layers(self.student).items():
            entry = self.sparse.modules[name]
            rounded = _as_stored(layer.matrix, entry)
            if isinstance(rounded, Quantized):
                continue
            matrix = Storage.of(layer.matrix).pack(rounded.to_dense().float())
            new = SparseLinear(matrix, layer.bias)
            place = f"{name}.base" if self.options.lora_rank else name
            replace_module(self.student, place, lambda _, new=new: new)  # type: ignore[misc]

        names = set(self.reader.names())
        for name, parameter in self.student.named_parameters():
            if name in names:
                dtype = self.reader.load(name).dtype
                parameter.data = parameter.detach().to(dtype).to(parameter.dtype)
        dtype = next(iter(self.sparse.modules.values())).torch_dtype
        for module in self.student.modules():
            if isinstance(module, LowRank):
                for factor in (module.a, module.b):
                    factor.data = factor.detach().to(dtype).to(factor.dtype)

    def _identity(self) -> dict[str, Any]:
        """What a resumed run must have in common with the interrupted one."""
        options = {k: v for k, v in self.options.to_json().items() if k not in _FREE}
        return {
            "student": {
                "folder": str(self.reader.folder.resolve()),
                "sha256": sha256(self.reader.folder / "config.json"),
                "shards": self.reader.digests,
            },
            "teacher": self.source.identity(),
            "options": options,
            "windows": self.corpus.digest(),
        }

    def _report(
        self, done: Recovered, evaluation: list[dict[str, Any]], seconds: float
    ) -> dict[str, Any]:
        trajectory, options = done.trajectory, self.options
        step_tokens = options.batch_windows * options.window_tokens
        shapes = [entry.shape for entry in self.sparse.modules.values()]
        rank = options.lora_rank
        cost = low_rank_cost(shapes, rank, TARGETS["h200"]) if rank else None
        return {
            "version": __version__,
            "student": str(self.reader.folder),
            "teacher": self.source.name,
            "options": options.to_json(),
            "text": {
                "name": self.text_name,
                "windows": len(self.corpus.train),
                "held_out": len(self.corpus.held_out),
                "window_tokens": self.corpus.tokens,
            },
            "layers": list(done.layers),
            "steps": trajectory.step,
            "tokens": trajectory.steps_of_all(options.steps) * step_tokens,
            "stopped_early": trajectory.stopped,
            "best": {"held_out_loss": trajectory.best, "step": trajectory.best_step},
            "curve": trajectory.curve,
            "evaluation": evaluation,
            "low_rank": None if cost is None else {**asdict(cost), "target": "h200"},
            "cache_bytes": done.cache_bytes,
            "seconds": {
                "training": round(trajectory.seconds, 1),
                "recover": round(seconds, 1),
            },
        }


def _check_teacher(network: nn.Module, sparse: SparseConfig, name: str) -> None:
    """Refuse a dense model that the checkpoint cannot have been made from."""
    shapes = {
        path: (module.out_features, module.in_features)
        for path, module in network.named_modules()
        if isinstance(module, nn.Linear)
    }
    for path, entry in sparse.modules.items():
        if shapes.get(path) != entry.shape:
            found = f"{list(shapes[path])}" if path in shapes else "missing"
            raise ArgumentError(
                f"a teacher {name} in which {path} is {found}",
                need=f"{list(entry.shape)}, as in the checkpoint",
                hint="the dense model that the checkpoint was made from",
            )


@contextmanager
def _writer(out: Path, texts: RecoverTexts, machine: Machine) -> Iterator[CheckpointWriter | None]:
    """The writer of the first process; None in the others."""
    if not machine.is_main:
        yield None
        return
    with CheckpointWriter(out, overwrite=texts.overwrite, resume=texts.resume) as writer:
        yield writer


def _sparse_layers(model: nn.Module) -> dict[str, SparseLinear]:
    """Sparse layers by the name that the checkpoint knows them by."""
    beside = {
        id(module.base): name
        for name, module in model.named_modules()
        if isinstance(module, LowRank)
    }
    return {
        beside.get(id(module), name): module
        for name, module in model.named_modules()
        if isinstance(module, SparseLinear)
    }


def _as_stored(matrix: SparseMatrix, entry: ModuleEntry) -> SparseMatrix:
    """A trained float32 matrix in the dtype of its predecessor."""
    if isinstance(matrix, Quantized):
        return matrix.with_dtype(entry.torch_dtype)
    return Storage.of(matrix).with_dtype(entry.torch_dtype).pack(matrix.to_dense())


def _told(progress: ProgressCallback) -> Callable[[int, int, float, float | None], None]:
    def told(done: int, steps: int, loss: float, left: float | None) -> None:
        progress(Progress("recover", done, steps, f"loss {loss:.4f}", left))

    return told


def _nothing(_: Progress) -> None:
    pass
