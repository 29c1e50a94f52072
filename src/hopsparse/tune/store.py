"""Results of tuning kept by content.

One entry is one file: all that was measured for one class of problems, with one kernel text, on
one class of GPUs. Its name is a hash of those, so an edited kernel or another driver finds nothing
and is tuned anew. A file appears whole and is checked when read; processes may share a folder, be
killed in it, or find it damaged. No fault of the folder is an error: nothing is known then, and
plans go by the cost model.

Within a process a look-up asks the disk once. What another process stores later is not seen, so a
choice never changes under a running model. Ranks of one job that read one folder find the same;
`session.tune` hands what rank 0 measured to all of them.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from ..compiler import translation_unit
from ..entry_folder import EntryFolder
from ..plan import KernelSpec
from ..settings import Settings
from .machine import Machine

#: Goes up when the layout of an entry, or how a time is measured, changes.
SCHEMA = 1
_LOSS = "tuning results cannot be kept in %s (%s) and are lost with this process"
_VERSION_DIGITS = 12


@dataclass(frozen=True)
class Key:
    """What decides which kernel is fastest.

    Attributes:
        op: Name of the operator.
        kernel: `kernel_hash` of its specs.
        problem: The class of problems, as the operator writes it.
        machine: The class of GPUs.
    """

    op: str
    kernel: str
    problem: str
    machine: Machine

    @property
    def name(self) -> str:
        """Name of the entry: SHA-256, in hexadecimal digits, of all of it."""
        return hashlib.sha256(json.dumps([SCHEMA, asdict(self)]).encode()).hexdigest()


@dataclass(frozen=True)
class Measured:
    """What one candidate did.

    Attributes:
        us: Median time of a call; infinite where it was not timed.
        q1_us: First quartile.
        q3_us: Third quartile.
        error: Why it must not run, or "".
    """

    us: float
    q1_us: float
    q3_us: float
    error: str = ""

    @classmethod
    def wrong(cls, error: str) -> Measured:
        """A candidate that computes something else, and was not timed."""
        return cls(math.inf, math.inf, math.inf, error)

    @property
    def spread(self) -> float:
        """Distance of the quartiles as a part of the median; NaN where there is none."""
        return (self.q3_us - self.q1_us) / self.us


@dataclass(frozen=True)
class Entry:
    """All that is known of one key.

    Attributes:
        key: As passed.
        measured: By name of the candidate.
    """

    key: Key
    measured: Mapping[str, Measured] = field(default_factory=dict, hash=False)

    def best(self, among: Iterable[str]) -> str | None:
        """The fastest of some candidates; None if none of them was timed.

        Equal times go to the one that is named first.

        Example:
            >>> key = Key("op", "", "", Machine("H200", 132, "580"))
            >>> times = {name: Measured(us, us, us) for name, us in (("a", 2.0), ("b", 1.0))}
            >>> Entry(key, times).best(["a", "b"]), Entry(key, times).best(["a", "c"])
            ('b', 'a')
        """
        timed = [name for name in among if math.isfinite(self._us(name))]
        return min(timed, key=self._us) if timed else None

    def merged(self, other: Mapping[str, Measured]) -> Entry:
        """With what `other` has besides."""
        return replace(self, measured={**other, **self.measured})

    def _us(self, name: str) -> float:
        found = self.measured.get(name)
        return math.inf if found is None else found.us


def kernel_hash(spec: KernelSpec) -> str:
    """Hash of a kernel's text with its headers, without the config that a spec appends.

    Raises:
        CompileError: A file of its text is not there.
    """
    return _hash_of(spec.kernel)


def version_of(name: str, spec: KernelSpec) -> str:
    """Name of a candidate in entries: another config of the same name is another candidate."""
    return f"{name} {hashlib.sha256(spec.text.encode()).hexdigest()[:_VERSION_DIGITS]}"


class Store:
    """Entries in memory and in a folder.

    Args:
        folder: Where they are kept; made when the first is stored.

    Example:
        >>> import tempfile
        >>> key = Key("op", "", "4096x4096", Machine("NVIDIA H200", 132, "580.65.06"))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     Store(Path(folder)).put(key, {"wide": Measured(2.0, 1.9, 2.1)})
        ...     Store(Path(folder)).best(key, ["wide", "tall"])
        'wide'
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._known: dict[Key, Entry] = {}
        self._files = EntryFolder(folder, ".json", _LOSS)

    @classmethod
    def default(cls) -> Store:
        """The store that the settings name, one for the whole process."""
        return _shared(Settings.from_environment().cache_dir / "tuning")

    def get(self, key: Key) -> Entry:
        """What is known; an entry without measurements if nothing is."""
        if (known := self._known.get(key)) is None:
            known = self._known[key] = self._read(key) or Entry(key)
        return known

    def best(self, key: Key, among: Iterable[str]) -> str | None:
        """The fastest of some candidates; None if nothing is known of them."""
        return self.get(key).best(among)

    def put(self, key: Key, measured: Mapping[str, Measured]) -> None:
        """Add measurements, in memory and on disk. What a file has already stays as it is.

        Two processes that add to one entry at the same moment may lose what one of them added; it
        is then measured again.
        """
        entry = (self._read(key) or Entry(key)).merged(self.get(key).measured).merged(measured)
        self._known[key] = entry
        # One that is there was merged into this one, or it is damaged.
        self._files.write(key.name, encode(entry), stays=lambda: False)

    def replace(self, entry: Entry) -> None:
        """Know exactly this from now on; on disk what a file has already stays as it is."""
        self.put(entry.key, entry.measured)
        self._known[entry.key] = entry

    def entries(self, op: str, kernel: str, problem: str) -> list[Entry]:
        """What the folder has of a problem, for any machine; it reads every file."""
        try:
            found = [parse(path.read_bytes()) for path in self._files.entries()]
        except OSError:
            return []
        wanted = (op, kernel, problem)
        return [
            entry
            for entry in found
            if entry and (entry.key.op, entry.key.kernel, entry.key.problem) == wanted
        ]

    def forget(self) -> None:
        """Look at the disk again for every key."""
        self._known.clear()

    def _read(self, key: Key) -> Entry | None:
        data = self._files.read(key.name)
        return None if data is None else decode(data, key)


def encode(entry: Entry) -> bytes:
    """An entry as JSON, with the SHA-256 of its content."""
    content = {
        "schema": SCHEMA,
        "key": asdict(entry.key),
        "measured": {name: _row(each) for name, each in sorted(entry.measured.items())},
    }
    document = {"content": content, "sha256": _digest(content)}
    return json.dumps(document, indent=1, allow_nan=False).encode() + b"\n"


def decode(data: bytes, key: Key) -> Entry | None:
    """Read an entry; None if it is not what was written for `key`."""
    entry = parse(data)
    return entry if entry is not None and entry.key == key else None


def parse(data: bytes) -> Entry | None:
    """Read an entry of any key; None if it is not, bit by bit, what was written."""
    try:
        document: dict[str, Any] = json.loads(data)
        content = document["content"]
        if document["sha256"] != _digest(content) or content["schema"] != SCHEMA:
            return None
        key = dict(content["key"])
        key["machine"] = Machine(**key["machine"])
        rows = content["measured"].items()
        return Entry(Key(**key), {name: _measured(row) for name, row in rows})
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def _row(measured: Measured) -> list[Any]:
    if not math.isfinite(measured.us):
        return [None, None, None, measured.error]
    return [measured.us, measured.q1_us, measured.q3_us, measured.error]


def _measured(row: list[Any]) -> Measured:
    us, low, high, error = row
    if us is None:
        return Measured.wrong(str(error))
    return Measured(float(us), float(low), float(high), str(error))


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


@cache
def _hash_of(kernel: str) -> str:
    spec = KernelSpec("", "", kernel, "", "", 0, (1, 1, 1), 0, 0)
    return hashlib.sha256(translation_unit(spec).encode()).hexdigest()


@cache
def _shared(folder: Path) -> Store:
    return Store(folder)
