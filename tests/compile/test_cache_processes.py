"""Many processes, killed processes, and folders that take nothing: nothing here is made up."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from hopsparse.compiler import KernelCache
from hopsparse.compiler.cache import decode
from tests.helpers.tiny_kernels import start_child, tiny_spec, told_by

# Prints name and hash of each image, and how many were compiled here.
COMPILE = """
import hashlib, sys
from pathlib import Path
first, count = int(sys.argv[2]), int(sys.argv[3])
specs = [tiny_spec((first + number) % count) for number in range(count)]
for built in KernelCache(Path(sys.argv[1])).compile_all(specs, workers=1):
    print(built.spec.name, hashlib.sha256(built.cubin.image).hexdigest(), built.was_cached)
"""
# Compiles eight kernels, whatever the folder is, and prints what was said about it.
TRY = """
import logging, os, sys
from pathlib import Path

class Said(logging.Handler):
    def emit(self, record):
        said.append(record.getMessage())

said = []
logging.getLogger("hopsparse").addHandler(Said())

def get_all(cache):
    for value in range(8):
        assert cache.get(tiny_spec(value)).image
    print(len(said), *said)
"""
GET_ALL = "get_all(KernelCache(Path(sys.argv[1])))"
# Root may write anywhere, so root becomes somebody else, who has no way to the copy of the package
# but from the folder that the process is in already.
AS_NOBODY = """
os.chdir(sys.argv[1])
KernelCache(Path(os.devnull, "none"), root=Path("root")).get(tiny_spec())
said.clear()
if os.geteuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
get_all(KernelCache(Path("cache"), root=Path("root")))
"""
# Ends itself, as by `kill -9`, when it comes to a call.
KILLED = """
import os, signal, sys
from pathlib import Path

def die(*arguments, **named):
    if sys.argv[3] == "half":
        os.ftruncate(arguments[0], 1000)
    os.kill(os.getpid(), signal.SIGKILL)

setattr({"os": os, "Path": Path}[sys.argv[2].split(".")[0]], sys.argv[2].split(".")[1], die)
KernelCache(Path(sys.argv[1])).get(tiny_spec())
"""
LIMITED = ("sh", "-c", 'ulimit -f 1 && exec "$@"', "sh")
SMALL_DISK = ("unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=16k none "$0" && exec "$@"')


def may_mount() -> bool:
    return os.path.exists("/usr/bin/unshare") and not os.system(
        "unshare -m mount -t tmpfs none /tmp 2>/dev/null"
    )


def test_eight_processes_fill_one_cold_cache(package: Path, tmp_path: Path) -> None:
    folder, count = tmp_path / "cache", 50
    # Pairs go through the kernels in the same order and meet at each; pairs meet each other later.
    firsts = [number // 2 * 12 for number in range(8)]
    children = [start_child(package, COMPILE, folder, first, count) for first in firsts]
    told = [told_by(child).split("\n")[:-1] for child in children]
    images = {tuple(sorted(line.rsplit(" ", 1)[0] for line in each)) for each in told}
    assert len(images) == 1
    assert len(next(iter(images))) == len({line.split(" ")[1] for line in told[0]}) == count
    entries = list(folder.iterdir())
    assert len(entries) == count
    assert all(decode(path.read_bytes(), path.stem) for path in entries)
    last = told_by(start_child(package, COMPILE, folder, 0, count))
    assert last.count("True\n") == count


@pytest.mark.parametrize(
    ("call", "size", "is_there"),
    [
        ("os.fsync", "half", False),
        ("os.fsync", "whole", False),
        ("os.link", "whole", False),
        ("Path.unlink", "whole", True),
    ],
)
def test_a_process_killed_in_mid_write_leaves_nothing_that_counts(
    package: Path, tmp_path: Path, call: str, size: str, is_there: bool
) -> None:
    folder = tmp_path / "cache"
    told_by(start_child(package, KILLED, folder, call, size), returncode=-signal.SIGKILL)
    (left,) = folder.glob(".*.tmp")
    cache = KernelCache(folder, root=package / "hopsparse")
    assert cache.contains(tiny_spec()) is is_there
    cubin = cache.get(tiny_spec())
    (entry,) = cache.entries()
    assert decode(entry.read_bytes(), entry.stem) == cubin
    os.utime(left, (time.time() - 7200,) * 2)
    KernelCache(folder, root=package / "hopsparse").get(tiny_spec(1))
    assert not left.exists()


def test_a_read_only_folder_is_read_and_no_more(package: Path, root: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    KernelCache(folder, root=root).get(tiny_spec())
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    tmp_path.chmod(0o755)
    folder.chmod(0o555)
    told = told_by(start_child(package, TRY + AS_NOBODY, tmp_path))
    assert told.startswith("1 kernels cannot be kept in cache (Permission denied)")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize("way", ["limit", *(["disk"] if may_mount() else [])])
def test_a_full_disk_keeps_whole_entries_and_no_rest(
    package: Path, tmp_path: Path, way: str
) -> None:
    prefix = LIMITED if way == "limit" else (*SMALL_DISK, str(tmp_path))
    look = """
cache = KernelCache(Path(sys.argv[1]))
whole = sum(cache.contains(tiny_spec(value)) for value in range(8))
print(whole, len(cache.entries()), len(os.listdir(cache.folder)))
"""
    told = told_by(start_child(package, TRY + GET_ALL + look, tmp_path, prefix=prefix))
    said, counts = told.splitlines()
    assert said.startswith(f"1 kernels cannot be kept in {tmp_path} (")
    whole, entries, files = map(int, counts.split())
    assert whole == entries == files
    assert whole == 0 if way == "limit" else 0 < whole < 8


def test_a_missing_home_does_no_harm(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "XDG_CACHE_HOME", "HOPSPARSE_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    # This user is in no user database, which is asked when HOME is missing.
    nobody = "KernelCache(Path(os.devnull, 'none')).get(tiny_spec())\nsaid.clear()\n"
    nobody += "os.geteuid() or os.setuid(54321)\n"
    program = TRY + nobody + "print(KernelCache.default().folder)"
    told = told_by(start_child(package, program))
    if os.geteuid() == 0:
        assert told == f"{os.devnull}/~/.cache/hopsparse/kernels\n"
