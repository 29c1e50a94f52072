from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from safetensors.torch import load_file, save_file

import hopsparse.cli.selfcheck as selfcheck
from hopsparse.cli import verify_operators
from hopsparse.compiler import Built, KernelCache
from hopsparse.errors import GpuLostError
from hopsparse.formats import CSR, write_matrices
from hopsparse.ops.plans import every_spec
from tests.cli.conftest import Run, start

RunJson = Callable[..., Any]


def shard_with(folder: Path, name: str) -> Path:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    return folder / index["weight_map"][name]


def rewrite(folder: Path, name: str, value: torch.Tensor) -> None:
    path = shard_with(folder, name)
    tensors = load_file(path)
    tensors[name] = value
    save_file(tensors, path, metadata={"format": "pt"})


def test_self_check_passes_and_covers_formats_and_operators(
    run_json: RunJson, tmp_path: Path
) -> None:
    junit = tmp_path / "verify.xml"
    found = run_json("verify", "--device", "cpu", "--junit", junit)
    assert found["ok"]
    assert (found["path"], found["device"], found["set"], found["left"]) == (
        *(None, "cpu", "quick", 0),
    )
    assert found["environment"]["torch"] == torch.__version__
    names = {check["name"] for check in found["checks"]}
    assert {f"product {fmt}" for fmt in ("nm", "bsr", "csr", "csc", "hyb", "bitmask")} <= names
    assert {f"csr_matmul short-rows {fmt} bfloat16" for fmt in ("csr", "csc", "hyb")} <= names
    assert all(check["seconds"] >= 0 and check["kernels"] == [] for check in found["checks"])
    suites = ElementTree.parse(junit).getroot()
    assert sum(int(suite.attrib["tests"]) for suite in suites) == len(found["checks"])
    assert {suite.attrib["failures"] for suite in suites} == {"0"}


def test_one_operator_and_all_of_its_checks(run_json: RunJson) -> None:
    quick = run_json("verify", "--device", "cpu", "--op", "spmm_nm")
    every = run_json("verify", "--device", "cpu", "--op", "spmm_nm", "--all")
    assert every["set"] == "all"
    assert {check["op"] for check in every["checks"]} == {"spmm_nm"}
    assert len(every["checks"]) > len(quick["checks"]) > 10
    # Tiles are choices of kernels, of which the CPU has none.
    assert not [check for check in every["checks"] if "tile" in check["case"]]


def test_a_wrong_operator_is_told_with_coordinates_and_bits(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = import_module("hopsparse.ops.spmm_bsr.checks")
    original = module.spmm_bsr

    def wrong(*given: Any, **named: Any) -> torch.Tensor:
        y: torch.Tensor = original(*given, **named)
        if y.shape == (3, 256):
            y[2, 17] = -1024
        return y

    monkeypatch.setattr(module, "spmm_bsr", wrong)
    junit = tmp_path / "verify.xml"
    result = run("verify", "--device", "cpu", "--op", "spmm_bsr", "--junit", junit)
    assert result.exit_code == 1
    assert "the first: spmm_bsr three-tokens bsr-64x64 bfloat16: y[2, 17] is 0xc480 (-1024)" in (
        result.stdout
    )
    assert "must be 0x" in result.stdout
    failed = ElementTree.parse(junit).getroot().findall(".//failure")
    assert len(failed) == 2
    assert "y[2, 17] is 0xc480" in failed[0].attrib["message"]


def test_what_was_done_before_ctrl_c_is_told(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, calls = verify_operators.outcome_of, []

    def interrupted(*given: Any) -> Any:
        calls.append(given)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return original(*given)

    monkeypatch.setattr(verify_operators, "outcome_of", interrupted)
    junit = tmp_path / "verify.xml"
    result = run("verify", "--device", "cpu", "--op", "sddmm_csr", "--junit", junit)
    assert result.exit_code == 130
    assert "3 checks on cpu" in result.stdout
    assert ", 21 not run" in result.stdout
    assert len(ElementTree.parse(junit).getroot().findall(".//testcase")) == 3


def test_every_check_of_a_gpu_compiles_many_kernels_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[list[Any]] = []

    class Cache:
        def compile_all(self, specs: list[Any]) -> Iterator[Any]:
            asked.append(specs)
            yield from (Built(spec, None, was_cached=True) for spec in specs)

    made: list[int] = []
    monkeypatch.setattr(KernelCache, "default", classmethod(lambda cls: Cache()))
    monkeypatch.setattr(verify_operators, "_device", lambda device: "cuda")
    monkeypatch.setattr(
        verify_operators, "_make", lambda steps, report, started: made.append(len(asked))
    )
    verify_operators.verify_operators("cuda", ["spmm_nm_int4", "select"], every=True)
    # Before the checks, and of these operators alone.
    assert made == [1]
    assert {spec.op for spec in asked[0]} == {"spmm_nm", "select"}
    assert len(set(asked[0])) == len(asked[0]) > len(every_spec("spmm_nm")) + 300
    verify_operators.verify_operators("cuda", [], every=False)
    assert made == [1, 1]


def test_a_lost_gpu_ends_the_run(run_json: RunJson, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*given: Any) -> Any:
        raise GpuLostError("a kernel that failed", need="another", hint="none")

    monkeypatch.setattr(verify_operators, "outcome_of", lost)
    found = run_json("verify", "--device", "cpu", "--op", "sddmm_csr", exit_code=1)
    assert (len(found["checks"]), found["left"], found["ok"]) == (1, 23, False)
    assert "GpuLostError: a kernel that failed" in found["checks"][0]["detail"]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (("--op", "spmm"), "operator 'spmm'"),
        (("--device", "tpu"), "device 'tpu'"),
        (("--device", "cpu", "--delays", "3"), "--delays on the CPU"),
        (("somewhere", "--all"), "--all beside a PATH"),
        (("somewhere", "--op", "select", "--junit", "x"), "--op and --junit beside a PATH"),
    ],
)
def test_options_that_do_not_fit_are_refused(run: Run, given: tuple[str, ...], told: str) -> None:
    result = run("verify", *given)
    assert result.exit_code == 2
    assert told in result.stderr


def test_self_check_notices_a_wrong_product(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A check that cannot fail proves nothing: one flipped sign must be seen."""
    monkeypatch.setattr(selfcheck, "_SHAPES", ((16, 16),))
    original = selfcheck.SparseLinear.forward

    def wrong(self: Any, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = original(self, x)
        y[0, 0] = -y[0, 0] - 1
        return y

    monkeypatch.setattr(selfcheck.SparseLinear, "forward", wrong)
    result = run("verify", "--device", "cpu", "--op", "formats")
    assert result.exit_code == 1
    assert "the first: product nm" in result.stdout
    assert "float64 gives" in result.stdout


def test_whole_checkpoint_passes(run_json: RunJson, sparse_model: Path) -> None:
    found = run_json("verify", sparse_model)
    assert found["ok"]
    details = [check["detail"] for check in found["checks"]]
    assert "21 weights agree" in details
    assert details[-1] == "as written"


def test_packed_checkpoint_passes(run_json: RunJson, sparse_model: Path, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    run_json("convert", sparse_model, "-o", theirs, "--to", "sparse-24-bitmask")
    found = run_json("verify", theirs)
    details = [check["detail"] for check in found["checks"]]
    assert "21 weights agree" in details
    assert details[-1] == "as written"
    assert sum("sparse-24-bitmask" in check["detail"] for check in found["checks"]) == 14


def test_dense_checkpoint_passes(run: Run, dense_model: Path) -> None:
    assert run("verify", dense_model).exit_code == 0


@pytest.mark.parametrize("damage", ["missing", "truncated", "no index entry"])
def test_shards_are_present_and_readable(run_json: RunJson, damaged: Path, damage: str) -> None:
    shard = sorted(damaged.glob("*.safetensors"))[0]
    if damage == "missing":
        shard.unlink()
    elif damage == "truncated":
        shard.write_bytes(shard.read_bytes()[:-100])
    else:
        path = damaged / "model.safetensors.index.json"
        index = json.loads(path.read_text())
        del index["weight_map"]["model.layers.0.mlp.up_proj.meta"]
        path.write_text(json.dumps(index))
    found = run_json("verify", damaged, exit_code=1)
    assert not found["ok"]
    first = next(check for check in found["checks"] if not check["ok"])
    named = "up_proj" if damage == "no index entry" else shard.name
    assert named in first["name"] + first["detail"]


def test_damaged_index_words_are_found(run: Run, damaged: Path) -> None:
    name = "model.layers.0.mlp.up_proj.meta"
    meta = load_file(shard_with(damaged, name))[name]
    rewrite(damaged, name, torch.zeros_like(meta))
    result = run("verify", damaged)
    assert result.exit_code == 1
    assert "the first: model.layers.0.mlp.up_proj" in result.stdout


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.mlp.up_proj.values"])
def test_values_that_are_no_numbers_are_found(run: Run, damaged: Path, name: str) -> None:
    values = load_file(shard_with(damaged, name))[name].clone()
    places = (values != 0).flatten().nonzero().flatten()
    values.view(-1)[places[3]] = float("nan")
    rewrite(damaged, name, values)
    result = run("verify", damaged)
    assert result.exit_code == 1
    assert "not finite" in result.stdout


def test_sizes_must_agree_with_config(run: Run, damaged: Path) -> None:
    config = json.loads((damaged / "config.json").read_text())
    config["intermediate_size"] = 128
    (damaged / "config.json").write_text(json.dumps(config))
    result = run("verify", damaged)
    assert result.exit_code == 1
    assert "config.json describes" in result.stdout


def change_config(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def test_a_config_with_fewer_layers_than_are_stored(run: Run, damaged: Path) -> None:
    config = json.loads((damaged / "config.json").read_text())
    change_config(damaged, num_hidden_layers=config["num_hidden_layers"] - 1)
    result = run("verify", damaged)
    assert result.exit_code == 1
    assert "is stored, config.json describes no such weight" in result.stdout


@pytest.mark.parametrize("changes", [{"hidden_size": "x"}, {"hidden_act": "nope"}])
def test_a_config_that_describes_no_model(
    run: Run, damaged: Path, changes: dict[str, object]
) -> None:
    change_config(damaged, **changes)
    result = run("verify", damaged)
    assert result.exit_code == 1
    assert "no model can be built" in result.stdout


def test_a_flipped_bit_is_found(run: Run, damaged: Path) -> None:
    """The lowest bit of a value: still finite, of the same pattern, and wrong."""
    name = "model.layers.0.mlp.up_proj.values"
    shard = shard_with(damaged, name)
    data = bytearray(shard.read_bytes())
    size = int.from_bytes(data[:8], "little")
    start = json.loads(data[8 : 8 + size])[name]["data_offsets"][0]
    data[8 + size + start] ^= 1
    shard.write_bytes(data)
    result = run("verify", damaged)
    assert result.exit_code == 1
    assert f"the first: SHA-256 of {shard.name}" in result.stdout


def test_file_of_matrices(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    write_matrices(path, {"w": CSR.from_dense(torch.eye(8))})
    assert run("verify", path).exit_code == 0
    bad = tmp_path / "bad.safetensors"
    write_matrices(bad, {"w": CSR.from_dense(torch.full((2, 2), float("inf")))})
    result = run("verify", bad)
    assert result.exit_code == 1
    assert "not finite" in result.stdout


def test_nothing_there_is_a_usage_error(run: Run, tmp_path: Path) -> None:
    assert run("verify", tmp_path / "nowhere").exit_code == 2


def test_exit_code_reaches_the_shell(damaged: Path) -> None:
    sorted(damaged.glob("*.safetensors"))[0].unlink()
    process = start("verify", damaged, "--json")
    told, _ = process.communicate(timeout=120)
    assert process.returncode == 1
    assert json.loads(told)["ok"] is False
