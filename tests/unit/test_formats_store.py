"""Files: exact, whole or absent, and refused when anything about them is wrong."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from hopsparse.errors import ArgumentError, CheckpointError
from hopsparse.formats import (
    BSR,
    CSR,
    FORMATS,
    METADATA_KEY,
    NM,
    Bitmask,
    NMPattern,
    convert,
    describe_matrix,
    read_facts,
    read_matrices,
    restore_matrix,
    write_matrices,
)
from tests.helpers import matrices as mk


@given(
    st.sampled_from(list(FORMATS)), mk.dtypes, mk.shapes, st.sampled_from(["2:4", "6:8"]), mk.seeds
)
@settings(deadline=None, max_examples=50)
def test_files_return_what_was_written(tmp_path_factory, fmt, dtype, shape, text, seed):
    path = tmp_path_factory.mktemp("store") / "m.safetensors"
    dense = mk.random_nm(shape, NMPattern(2, 4), dtype, seed)
    options = {"pattern": text} if fmt == "nm" else {}
    matrix = convert(CSR.from_dense(dense), fmt, **options)
    write_matrices(path, {"a.weight": matrix, "a.bias": dense[0]})
    read = read_matrices(path, validate=True)
    assert list(read) == ["a.weight", "a.bias"]
    again = read["a.weight"]
    assert describe_matrix(again) == describe_matrix(matrix) == read_facts(path)["a.weight"]
    for part, tensor in matrix.parts().items():
        assert torch.equal(mk.bits(again.parts()[part]), mk.bits(tensor)), part
    assert torch.equal(mk.bits(read["a.bias"]), mk.bits(dense[0]))


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "m.safetensors"
    csr = CSR.from_dense(torch.eye(8))
    # The bitmask shares its values with the CSR matrix, and "norm" is a slice: both are stored.
    write_matrices(
        file,
        {
            "c": csr,
            "m": convert(csr, "bitmask"),
            "norm": torch.arange(9.0)[::2],
            "nm": NM.from_dense(torch.eye(8)),
        },
    )
    return file


def refused(path, *words, **options):
    with pytest.raises(CheckpointError) as caught:
        read_matrices(path, **options)
    error = caught.value
    assert error.got
    assert error.need
    assert error.hint
    for word in words:
        assert word in str(error), str(error)


def rewrite(path, change):
    """Apply `change(tensors, header)` to a file."""
    tensors = load_file(path)
    with safe_open(path, framework="pt") as file:
        header = json.loads(file.metadata()[METADATA_KEY])
    change(tensors, header)
    save_file(tensors, path, {METADATA_KEY: json.dumps(header)})


def test_keys_are_those_of_the_specification(path):
    with safe_open(path, framework="pt") as file:
        keys, header = set(file.keys()), json.loads(file.metadata()["hopsparse"])
    assert keys == {
        "c.values",
        "c.indices",
        "c.indptr",
        "m.values",
        "m.mask",
        "norm",
        "nm.values",
        "nm.meta",
    }
    assert header["format_version"] == 1
    assert header["matrices"]["c"] == {
        "format": "csr",
        "shape": [8, 8],
        "dtype": "float32",
        "attributes": {"nnz": 8},
    }


def test_shared_and_strided_tensors_are_stored(path):
    read = read_matrices(path, validate=True)
    assert read["norm"].tolist() == [0, 2, 4, 6, 8]
    assert torch.equal(read["m"].to_dense(), torch.eye(8))


def test_one_matrix_is_read_without_the_rest(path):
    """A file whose other tensors are damaged still gives the one that is asked for."""

    def damage(tensors, header):
        tensors["c.indptr"] = tensors["c.indptr"][:-1].clone()

    rewrite(path, damage)
    assert list(read_matrices(path, ["m"])) == ["m"]
    refused(path, "'c'", "'indptr'", names=["c"])
    refused(path, "no matrix 'x'", "one of c, m", names=["x"])


def test_reading_touches_only_the_named_bytes(tmp_path):
    """Peak memory of reading one small matrix beside a 256 MB one, in a process of its own."""
    path = tmp_path / "big.safetensors"
    write_matrices(path, {"big": torch.zeros(256 << 20, dtype=torch.uint8), "small": torch.ones(4)})
    code = (
        "import resource, sys; from hopsparse.formats import read_matrices\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10\n"
        "before = peak(); read_matrices(sys.argv[1], sys.argv[2:] or None)\n"
        "print(peak() - before)"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, path, "small"], capture_output=True, text=True, check=True
    )
    assert int(run.stdout) < 64


@pytest.mark.parametrize("kept", [0, 1, 7, 8, 100, -1])
def test_truncated(path, kept):
    data = path.read_bytes()
    path.write_bytes(data[:kept])
    refused(path, "truncated or corrupt", "complete safetensors file")


def test_noise(path):
    path.write_bytes(b"\x80\x04\x95pickle, or anything else" * 100)
    refused(path, "truncated or corrupt")


def test_missing_file(path):
    refused(path.with_name("other"), "does not exist")
    refused(path.parent, "does not exist")


def test_foreign_file(path):
    save_file({"w": torch.ones(2)}, path)
    refused(path, "'hopsparse' metadata", "load_file")
    save_file({"w": torch.ones(2)}, path, {METADATA_KEY: "{not json"})
    refused(path, "'hopsparse' metadata")
    save_file({"w": torch.ones(2)}, path, {METADATA_KEY: '{"format_version": 1, "matrices": [3]}'})
    refused(path, "'hopsparse' metadata")


def _drop(tensors, header):
    del tensors["c.indices"]


def _newer(tensors, header):
    header["format_version"] = 2


def _facts(**facts):
    return lambda tensors, header: header["matrices"]["c"].update(facts)


def _bad_content(tensors, header):
    tensors["c.indices"][3] = 100


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_drop, ["matrix 'c'", "part 'indices'", "missing"]),
        (_newer, ["format_version 2", "up to 1", "upgrade"]),
        (_facts(attributes={"nnz": 9}), ["part 'values'", "[8]", "[9]"]),
        (_facts(attributes={}), ["'nnz' is None"]),
        (_facts(attributes=None), ["attributes None"]),
        (_facts(shape=[8]), ["shape [8]"]),
        (_facts(shape=[8, 0]), ["shape [8, 0]"]),
        (_facts(shape=[9, 8]), ["part 'indptr'", "[9]", "[10]"]),
        (_facts(shape="88"), ["shape '88'"]),
        (_facts(dtype="bfloat16"), ["part 'values'", "torch.bfloat16 [8]"]),
        (_facts(dtype="Tensor"), ["dtype 'Tensor'"]),
        (_facts(format="zip"), ["format 'zip'", "nm, bsr"]),
        (_facts(format="nm", attributes={"pattern": "2:4:6"}), ["pattern '2:4:6'"]),
    ],
)
def test_facts_and_tensors_that_disagree(path, change, words):
    rewrite(path, change)
    refused(path, *words)


def test_contents_are_validated_on_request(path):
    rewrite(path, _bad_content)
    assert "c" in read_matrices(path)
    refused(path, "matrix 'c'", "row 3 has column 100", validate=True)


def test_two_items_of_one_key(tmp_path):
    with pytest.raises(ArgumentError, match=r"c\.mask"):
        write_matrices(
            tmp_path / "x", {"c": Bitmask.from_dense(torch.eye(2)), "c.mask": torch.ones(1)}
        )
    assert not list(tmp_path.iterdir())


def test_folder_that_does_not_exist(tmp_path):
    with pytest.raises(CheckpointError, match="cannot be written") as caught:
        write_matrices(tmp_path / "no" / "x", {})
    assert "existing folder" in caught.value.need


def test_a_full_disk_leaves_the_old_file(path):
    """A file-size limit fails the write in the middle, as a full disk does."""
    before = path.read_bytes()
    code = (
        "import resource, sys, torch; from hopsparse.formats import write_matrices\n"
        "from hopsparse.errors import CheckpointError\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))\n"
        "try: write_matrices(sys.argv[1], {'w': torch.ones(1 << 20)})\n"
        "except CheckpointError as error: print(error.got)"
    )
    run = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True)
    assert "cannot be written" in run.stdout, run.stderr
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


def test_files_have_ordinary_rights(path):
    plain = path.with_name("plain")
    plain.touch()
    assert path.stat().st_mode == plain.stat().st_mode


def test_restore_from_facts_alone():
    matrix = BSR.from_dense(torch.eye(64), (16, 32))
    facts = json.loads(json.dumps(describe_matrix(matrix)))
    again = restore_matrix(facts, matrix.parts())
    assert again.block == (16, 32)
    assert torch.equal(again.to_dense(), torch.eye(64))
