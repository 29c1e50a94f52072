"""Writing a checkpoint folder so that it appears complete or not at all."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torch import Tensor

from ..errors import CheckpointError
from ..files import TEMPORARY_GLOB, flush_folder, read_header
from ._entries import QUANT_METHOD, quantization_of
from ._files import (
    INDEX_NAME,
    LOCK_NAME,
    STATE_NAME,
    check_result,
    copy_extras,
    exclusive,
    held_elsewhere,
    is_held,
    partial_of,
    read_json,
    sha256,
    write_json,
)
from ._files import write_tensors as _write_tensors

# Written into an unfinished folder: only what carries it is ever cleared.
MARK_NAME = ".hopsparse-unfinished"
IDENTITY_NAME = "stages.json"
_RUN, _CONVERSION, _STAGES = "run", "conversion", "stages"


class CheckpointWriter:
    """Writes a checkpoint folder that appears complete or not at all.

    Everything goes to `OUT.partial` until `commit` renames it. Leaving the context without a
    commit keeps `OUT.partial`, so that a run can be resumed, unless it holds no finished part or
    `resumable` is false.

    Args:
        out: The folder to make.
        overwrite: Replace an existing hopsparse checkpoint, and discard an interrupted run.
        resume: Continue in an existing `OUT.partial`.
        resumable: Whether an unfinished folder is of any use; if not it is removed on failure.

    Raises:
        CheckpointError: `out` exists, is something else, or another process writes it;
            `OUT.partial` is not ours.
    """

    _kind = _RUN

    def __init__(
        self,
        out: Path | str,
        *,
        overwrite: bool = False,
        resume: bool = False,
        resumable: bool = True,
    ) -> None:
        self.out = Path(out)
        self.partial = partial_of(self.out)
        self._overwrite = overwrite
        self._resume = resume
        self._resumable = resumable
        self._superfluous = [MARK_NAME, LOCK_NAME]
        self._committed = False
        self._digests: dict[str, str] = {}
        check_result(self.out)
        check_result(self.partial)
        self._check_out()
        self._check_partial()
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        try:
            self.partial.mkdir(parents=True, exist_ok=True)
            self._stack.enter_context(exclusive(self.partial))
        except OSError as error:
            raise CheckpointError(
                f"{self.partial} cannot be made ({error})",
                need="a folder to write in",
                hint="another -o",
            ) from error
        try:
            # Once more: now nobody else writes here.
            self._check_partial()
            self._clear(keep_all=self._resume and self._mark() == self._kind)
            kind = self._kind if self._resumable else _CONVERSION
            (self.partial / MARK_NAME).write_text(kind + "\n", encoding="utf-8")
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._committed and not (self._resumable and self._holds_finished()):
            shutil.rmtree(self.partial, ignore_errors=True)
        self._stack.close()

    def write_shard(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Write one complete safetensors file."""
        _write_tensors(self.partial / name, tensors, self._no_room())
        self._digests[name] = sha256(self.partial / name)

    def keep_shard(self, name: str, digest: str) -> None:
        """Take over a shard of an interrupted run.

        Raises:
            CheckpointError: It is not what that run wrote.
        """
        path = self.partial / name
        if sha256(path) != digest:
            raise CheckpointError(
                f"{path} is damaged: its SHA-256 is not the recorded one",
                need="the shard that the interrupted run wrote",
                hint="--overwrite to start again",
            )
        self._digests[name] = digest

    def digest(self, shard: str) -> str:
        """SHA-256 of a shard that was written or kept."""
        return self._digests[shard]

    def write_json(self, name: str, value: object) -> None:
        """Write one complete JSON file."""
        write_json(self.partial / name, value, self._no_room())

    def copy_extras(self, source: Path) -> None:
        """Copy the small files of a model folder, such as its tokenizer."""
        copy_extras(source, self.partial)

    def remove(self, name: str) -> None:
        """Leave a file of the unfinished folder out of the finished one."""
        self._superfluous.append(name)

    def commit(self, config: Mapping[str, Any]) -> None:
        """Write config.json and the index of the shards, then give the folder its name.

        Shards that were neither written nor kept are no part of the checkpoint and are deleted.

        Raises:
            CheckpointError: Two shards hold the same tensor, or something took the name `out` in
                the meantime; it is left alone.
        """
        self.write_json(INDEX_NAME, self._index())
        self.write_json("config.json", config)
        self._check_out()
        self._rename(self.partial)
        self._committed = True
        # The lock goes with the folder until here: no second writer gets in between.
        for name in self._superfluous:
            (self.out / name).unlink(missing_ok=True)
        flush_folder(self.out)

    def _index(self) -> dict[str, Any]:
        weight_map: dict[str, str] = {}
        total = 0
        for path in sorted(self.partial.glob("*.safetensors")):
            if path.name not in self._digests:
                path.unlink()
        for shard in sorted(self._digests):
            for name in sorted(read_header(self.partial / shard).tensors):
                if name in weight_map:
                    raise CheckpointError(
                        f"tensor {name} is in both {weight_map[name]} and {shard}",
                        need="every tensor in one shard",
                        hint="--overwrite to start again",
                    )
                weight_map[name] = shard
            total += (self.partial / shard).stat().st_size
        digests = dict(sorted(self._digests.items()))
        return {"metadata": {"total_size": total, "sha256": digests}, "weight_map": weight_map}

    def _holds_finished(self) -> bool:
        state = self.partial / STATE_NAME
        return state.exists() or any(self.partial.glob("*.safetensors"))

    def _rename(self, finished: Path) -> None:
        """Give the folder `finished` the name `out`."""
        old: Path | None = None
        try:
            if self._overwrite and self.out.exists():
                parent = self.out.absolute().parent
                old = Path(tempfile.mkdtemp(prefix=f"{self.out.name}.replaced.", dir=parent))
                self.out.rename(old)
            # Fails where anything but an empty folder stands.
            finished.rename(self.out)
        except OSError as error:
            if old is not None and any(old.iterdir()):
                if not self.out.exists():
                    old.rename(self.out)
            elif old is not None:
                old.rmdir()
            raise CheckpointError(
                f"{finished} cannot become {self.out} ({error})",
                need="a name that nothing else has",
                hint="move what is there away, then the same command again",
            ) from error
        flush_folder(self.out.absolute().parent)
        if old is not None:
            shutil.rmtree(old, ignore_errors=True)

    def _clear(self, *, keep_all: bool) -> None:
        """Delete what an earlier run left, or only the files that it was writing when it died."""
        for path in list(self.partial.glob(TEMPORARY_GLOB if keep_all else "*")):
            if path.name in (LOCK_NAME, MARK_NAME):
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()

    def _mark(self) -> str:
        """Who left `OUT.partial`: a run, a conversion, or someone else ("")."""
        try:
            return (self.partial / MARK_NAME).read_text(encoding="utf-8").strip()
        except (OSError, ValueError):
            return ""

    def _check_partial(self) -> None:
        try:
            names = {path.name for path in self.partial.iterdir()} - {LOCK_NAME}
        except FileNotFoundError:
            return
        except NotADirectoryError:
            names = {self.partial.name}
        mark = self._mark()
        resumable = mark in (_RUN, _STAGES)
        if resumable and not (self._resume or self._overwrite) and is_held(self.partial):
            raise held_elsewhere(self.partial)
        if names and not resumable and mark != _CONVERSION:
            raise CheckpointError(
                f"{self.partial} exists and was not left by hopsparse",
                need="that name for the unfinished folder",
                hint="move it away, or another -o",
            )
        if resumable and self._resume and mark != self._kind:
            without = "with" if mark == _STAGES else "without"
            raise CheckpointError(
                f"{self.partial} holds an interrupted run {without} a quality budget or recovery",
                need="the same command",
                hint="--overwrite to start again",
            )
        if resumable and not (self._resume or self._overwrite):
            raise CheckpointError(
                f"{self.partial} holds an interrupted run",
                need="a decision",
                hint="--resume to continue it, or --overwrite to start again"
                if self._resumable
                else "finish it with `hopsparse sparsify --resume`, delete it, or another -o",
            )

    def _check_out(self) -> None:
        if not self.out.exists():
            return
        if self.out.is_dir() and not any(self.out.iterdir()):
            return
        if not self._overwrite:
            raise CheckpointError(
                f"{self.out} exists", need="a new folder", hint="another -o, or --overwrite"
            )
        # Overwriting deletes a folder: only ever one that this package wrote.
        with_config = self.out.is_dir() and (self.out / "config.json").is_file()
        config = read_json(self.out / "config.json") if with_config else {}
        if quantization_of(config).get("quant_method") != QUANT_METHOD:
            raise CheckpointError(
                f"{self.out} exists and is no hopsparse checkpoint",
                need="a new folder, or one that hopsparse wrote",
                hint="another -o",
            )

    def _no_room(self) -> str:
        if self._resumable:
            return "free some space and run the same command with --resume; finished parts are kept"
        return "free some space and run the same command again"


class StagedWriter(CheckpointWriter):
    """Several checkpoints on the way to one: each is a folder of `OUT.partial`, one becomes `out`.

    `adopt` takes the place of `commit`.

    Args:
        out: The folder to make.
        identity: What a resumed run must have in common with the interrupted one, as JSON values.
        overwrite: As in `CheckpointWriter`.
        resume: Likewise.

    Raises:
        CheckpointError: As `CheckpointWriter`; and on entering, if the interrupted run was another.
    """

    _kind = _STAGES

    def __init__(
        self,
        out: Path | str,
        identity: Mapping[str, Any],
        *,
        overwrite: bool = False,
        resume: bool = False,
    ) -> None:
        super().__init__(out, overwrite=overwrite, resume=resume)
        self._identity = dict(identity)

    def __enter__(self) -> Self:
        super().__enter__()
        try:
            self._check_same()
            self.write_json(IDENTITY_NAME, self._identity)
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self

    def adopt(self, stage: Path) -> None:
        """Give the folder of a finished stage the name `out`, and remove all others.

        Raises:
            CheckpointError: Something took that name in the meantime; it is left alone.
        """
        self._check_out()
        self._rename(stage)
        self._committed = True
        for name in self._superfluous:
            (self.out / name).unlink(missing_ok=True)
        shutil.rmtree(self.partial, ignore_errors=True)

    def _check_same(self) -> None:
        path = self.partial / IDENTITY_NAME
        before = read_json(path) if path.exists() else self._identity
        for key, value in self._identity.items():
            if before.get(key) != value:
                raise CheckpointError(
                    f"the interrupted run has {key} = {before.get(key)!r:.200}",
                    need=f"the same command; this one has {value!r:.200}",
                    hint="--overwrite to start again",
                )

    def _holds_finished(self) -> bool:
        return any(self.partial.glob("*/*.safetensors"))
