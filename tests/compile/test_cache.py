from __future__ import annotations

import _ctypes
import errno
import json
import logging
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest

from hopsparse.compiler import KernelCache, Nvrtc, cache_key
from hopsparse.compiler.cache import decode, encode
from hopsparse.errors import CompileError, UnsupportedError
from hopsparse.settings import Settings
from tests.helpers.tiny_kernels import BESIDE, HEADER, OTHER, start_child, tiny_spec, told_by

BOTH = (tiny_spec(kernel="kernel"), tiny_spec(kernel="alone"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "kernels"


def one_entry(folder: Path, root: Path) -> Path:
    KernelCache(folder, root=root).get(tiny_spec())
    (entry,) = folder.iterdir()
    return entry


def keys(root: Path) -> list[str]:
    return [KernelCache(Path("unused"), root=root).key(spec) for spec in BOTH]


def test_a_kernel_is_compiled_once_and_then_read(folder: Path, root: Path) -> None:
    first, again = (KernelCache(folder, root=root) for _ in range(2))
    assert not first.contains(tiny_spec())
    cubin = first.get(tiny_spec())
    assert first.get(tiny_spec()) is cubin
    assert again.contains(tiny_spec())
    read = again.get(tiny_spec())
    # An equal time of compilation shows that it was not compiled a second time.
    assert (read, read.compile_ms) == (cubin, cubin.compile_ms)
    assert [path.name for path in folder.iterdir()] == [f"{first.key(tiny_spec())}.kernel"]


def test_entries_are_counted_and_cleared(folder: Path, root: Path) -> None:
    cache = KernelCache(folder, root=root)
    assert (cache.entries(), cache.size_bytes(), cache.clear()) == ([], 0, 0)
    for spec in BOTH:
        cache.get(spec)
    (folder / ".dead.tmp").write_bytes(b"half of an entry")
    (folder / "notes.txt").write_text("of the user")
    assert len(cache.entries()) == 2
    assert cache.size_bytes() == sum(path.stat().st_size for path in folder.glob("*.kernel"))
    assert cache.clear() == 2
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]
    assert not cache.contains(BOTH[0])


def test_an_edited_header_changes_the_keys_of_those_that_have_it(root: Path) -> None:
    before = keys(root)
    for name, changed in ((HEADER, [True, False]), (BESIDE, [True, False]), (OTHER, [False, True])):
        old = (root / name).read_text()
        (root / name).write_text(old + "// edited\n")
        assert [a != b for a, b in zip(before, keys(root), strict=True)] == changed
        (root / name).write_text(old)
    assert keys(root) == before


def test_times_of_files_do_not_matter(root: Path) -> None:
    before = keys(root)
    for number, path in enumerate(sorted(root.rglob("*.cuh"))):
        os.utime(path, (10**9 - number, 10**9 + 5 * number))
    assert keys(root) == before


def test_a_moved_package_has_the_same_keys(package: Path, tmp_path: Path) -> None:
    moved, link = tmp_path / "other" / "site", tmp_path / "link"
    shutil.copytree(package, moved)
    link.symlink_to(package)
    program = "print(KernelCache.default().key(tiny_spec()), KernelCache.__module__)"
    told = {told_by(start_child(place, program)) for place in (package, moved, link)}
    assert len(told) == 1


def test_two_compilers_have_two_keys(folder: Path, root: Path, newer_nvrtc: Nvrtc) -> None:
    usual, newer = KernelCache(folder, root=root), KernelCache(folder, root=root, nvrtc=newer_nvrtc)
    usual.get(tiny_spec())
    assert not newer.contains(tiny_spec())
    assert newer.get(tiny_spec()).nvrtc != usual.get(tiny_spec()).nvrtc
    assert len(usual.entries()) == 2


def test_all_that_decides_a_compilation_is_in_its_key() -> None:
    facts = ("text", "entry", "sm_90a", ("-a", "-b"), "13.0+1")
    other = ("Text", "other", "sm_90", ("-a",), "13.0+2")
    changed = [(*facts[:i], other[i], *facts[i + 1 :]) for i in range(len(facts))]
    assert len({cache_key(*each) for each in [facts, *changed]}) == 6
    assert cache_key(*facts[:3], ("-b", "-a"), "13.0+1") == cache_key(*facts)


@pytest.mark.parametrize("place", [0.0, 0.05, 0.2, 0.5, 0.9, 0.998, 1.0])
def test_one_flipped_bit_is_compiled_again_and_replaced(
    folder: Path, root: Path, place: float
) -> None:
    entry = one_entry(folder, root)
    whole = entry.read_bytes()
    good = decode(whole, entry.stem)
    damaged = bytearray(whole)
    damaged[round(place * (len(whole) - 1))] ^= 0x10
    entry.write_bytes(damaged)
    assert not KernelCache(folder, root=root).contains(tiny_spec())
    assert KernelCache(folder, root=root).get(tiny_spec()) == good
    assert decode(entry.read_bytes(), entry.stem) == good
    assert list(folder.iterdir()) == [entry]


@pytest.mark.parametrize("part", [0.0, 0.1, 0.5, 0.99])
def test_a_truncated_entry_is_replaced(folder: Path, root: Path, part: float) -> None:
    entry = one_entry(folder, root)
    whole = entry.read_bytes()
    entry.write_bytes(whole[: int(part * len(whole))])
    assert KernelCache(folder, root=root).get(tiny_spec()) == decode(whole, entry.stem)
    assert decode(entry.read_bytes(), entry.stem) is not None


def test_an_entry_under_the_name_of_another_is_replaced(folder: Path, root: Path) -> None:
    entry = one_entry(folder, root)
    other = KernelCache(folder, root=root)
    other.get(tiny_spec(1))
    (wrong,) = set(other.entries()) - {entry}
    entry.write_bytes(wrong.read_bytes())
    cubin = KernelCache(folder, root=root).get(tiny_spec())
    assert cubin != other.get(tiny_spec(1))
    assert decode(entry.read_bytes(), entry.stem) == cubin


def test_a_whole_entry_of_another_layout_is_no_entry(folder: Path, root: Path) -> None:
    from hashlib import sha256

    cubin = KernelCache(folder, root=root).get(tiny_spec())
    head, _, image = encode(cubin, "key")[:-32].partition(b"\n")
    facts = json.loads(head)
    for header in ([], {}, {"key": "key"}, {**facts, "added": 1}, {**facts, "advice": None}):
        body = json.dumps(header).encode() + b"\n" + image
        assert decode(body + sha256(body).digest(), "key") is None
    assert decode(encode(cubin, "key"), "key") == cubin


def test_a_folder_where_an_entry_should_be_does_no_harm(
    folder: Path, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    entry = one_entry(folder, root)
    entry.unlink()
    entry.mkdir()
    assert KernelCache(folder, root=root).get(tiny_spec()).image
    assert len(caplog.records) == 1


@pytest.mark.parametrize("below", ["", "deep/er"])
def test_a_file_where_the_folder_should_be_does_no_harm(
    tmp_path: Path, root: Path, below: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("of the user")
    cache = KernelCache(tmp_path / "file" / below, root=root)
    for value in range(3):
        assert cache.get(tiny_spec(value)).image
    assert cache.get(tiny_spec(0)) is cache.get(tiny_spec(0))
    assert (cache.entries(), cache.size_bytes(), cache.clear()) == ([], 0, 0)
    # Said once, however often.
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert str(tmp_path / "file") in record.getMessage()
    assert (tmp_path / "file").read_text() == "of the user"


def test_a_user_without_a_home_has_no_cache_and_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home(path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    # Every user of a test machine is in its user database, which is asked when HOME is missing.
    monkeypatch.setattr(Path, "expanduser", no_home)
    folder = Settings.from_environment({}).cache_dir
    assert KernelCache(folder).entries() == []
    with pytest.raises(NotADirectoryError):
        folder.mkdir(parents=True)


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOTSUP, errno.EBUSY])
def test_a_file_system_without_links_gets_whole_entries(
    folder: Path, root: Path, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Such a file system cannot be mounted everywhere.
    def refuse(source: Path, target: Path) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "link", refuse)
    entry = one_entry(folder, root)
    assert decode(entry.read_bytes(), entry.stem) is not None


def test_a_busy_file_system_costs_the_entry_and_nothing_else(
    folder: Path, root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def busy(*paths: Path) -> None:
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))

    # Network file systems do this now and then.
    monkeypatch.setattr(os, "link", busy)
    monkeypatch.setattr(Path, "replace", busy)
    assert KernelCache(folder, root=root).get(tiny_spec()).image
    assert list(folder.iterdir()) == []
    assert len(caplog.records) == 1


def test_the_loser_of_a_race_who_cannot_see_the_winner_keeps_its_own(
    folder: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # NFS does this: the name is taken, and for a while nobody is there.
    def taken(source: Path, target: Path) -> None:
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))

    monkeypatch.setattr(os, "link", taken)
    assert KernelCache(folder, root=root).get(tiny_spec()).image
    assert len(list(folder.iterdir())) == 1


def test_what_killed_writers_left_is_swept_when_it_is_old(folder: Path, root: Path) -> None:
    folder.mkdir(parents=True)
    old, young = folder / ".1.tmp", folder / ".2.tmp"
    for path, age_s in ((old, 7200), (young, 60)):
        path.write_bytes(b"half of an entry")
        os.utime(path, (time.time() - age_s,) * 2)
    KernelCache(folder, root=root).get(tiny_spec())
    assert not old.exists()
    assert young.exists()


def test_many_kernels_come_as_they_are_ready(folder: Path, root: Path) -> None:
    specs = [tiny_spec(value) for value in range(6)]
    cache = KernelCache(folder, root=root)
    cache.get(specs[3])
    built = list(cache.compile_all([*specs, specs[0]], workers=2))
    assert sorted(each.spec.name for each in built) == [spec.name for spec in specs]
    assert [each.spec for each in built if each.was_cached] == [specs[3]]
    assert all(each.cubin == cache.get(each.spec) for each in built)
    assert all(each.was_cached for each in cache.compile_all(specs))


def test_a_kernel_that_does_not_compile_stops_no_other(folder: Path, root: Path) -> None:
    wrong = tiny_spec(1, extra="oops;")
    built = {each.spec: each for each in KernelCache(folder, root=root).compile_all([wrong, *BOTH])}
    error = built[wrong].error
    assert isinstance(error, CompileError)
    assert error.got.startswith("tiny/kernel1: ")
    assert built[wrong].cubin is None
    assert all(built[spec].cubin for spec in BOTH)


def test_a_compiler_that_does_not_load_is_one_error(folder: Path, root: Path) -> None:
    """And not one a kernel."""
    library = root / "libnvrtc.so.13"
    library.symlink_to(_ctypes.__file__)
    cache = KernelCache(folder, nvrtc=Nvrtc(library), root=root)
    with pytest.raises(UnsupportedError, match="does not load .* --force-reinstall"):
        list(cache.compile_all(BOTH))
    assert cache.entries() == []


def test_leaving_early_drops_what_has_not_begun(folder: Path, root: Path) -> None:
    cache = KernelCache(folder, root=root)
    running = cache.compile_all([tiny_spec(value) for value in range(50)], workers=2)
    next(running)
    running.close()
    assert len(cache.entries()) < 10
    assert all(decode(path.read_bytes(), path.stem) for path in cache.entries())


def test_arguments_of_another_size_are_refused(folder: Path, root: Path) -> None:
    with pytest.raises(CompileError, match="args_bytes is 24, and its code takes 16 bytes"):
        KernelCache(folder, root=root).get(replace(tiny_spec(), args_bytes=24))


def test_an_early_start_needs_a_wait(folder: Path, root: Path) -> None:
    cache = KernelCache(folder, root=root)
    wait = 'asm volatile("griddepcontrol.wait;" ::: "memory");'
    assert cache.get(tiny_spec(0, extra=wait, pdl=True)).has_grid_wait
    for spec in (tiny_spec(1, extra=wait), tiny_spec(2, pdl=True)):
        for _ in range(2):  # compiled, and read
            with pytest.raises(CompileError, match="griddepcontrol.wait"):
                cache.get(spec)
