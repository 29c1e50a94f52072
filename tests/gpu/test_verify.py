"""`hopsparse verify` on a GPU: kernels are named, and numbers that are wrong are found."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import import_module

import pytest
import torch

from hopsparse.ops.checks import all_checks
from hopsparse.ops.plans import every_spec, plans
from hopsparse.verify import Check, outcome_of

_PROGRAM = "import sys; sys.argv[0] = 'hopsparse'; from hopsparse.cli import main; main()"


def check(name: str) -> Check:
    return next(each for each in all_checks() if each.name == name)


def test_the_quick_set_is_right_and_its_kernels_are_those_compiled_ahead(
    device: torch.device,
) -> None:
    command = [sys.executable, "-c", _PROGRAM, "verify", "--device", "cuda", "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    found = json.loads(done.stdout)
    wrong = [f"{row['name']}: {row['detail']}" for row in found["checks"] if not row["ok"]]
    assert wrong == []
    assert done.returncode == 0
    assert found["left"] == 0
    ran = {kernel for row in found["checks"] for kernel in row["kernels"]}
    # Every operator has kernels, and so do layers; one of Triton shows no launch of ours.
    named = {row["op"] for row in found["checks"] if row["kernels"]}
    assert named == {row["op"] for row in found["checks"]} - {"sddmm_bsr"}
    # What `hopsparse compile --all` does not compile is compiled by this, and takes seconds.
    ahead = {f"{spec.op}/{spec.name}" for op in plans() for spec in every_spec(op)}
    assert sorted(ran - ahead) == []


def test_a_wrong_number_of_a_kernel_is_told(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = import_module("hopsparse.ops.spmm_nm.checks")
    original = module.spmm_nm

    def wrong(*given: object, **named: object) -> torch.Tensor:
        y: torch.Tensor = original(*given, **named)
        y[1, 3] = 1000
        return y

    monkeypatch.setattr(module, "spmm_nm", wrong)
    found = outcome_of(check("spmm_nm ragged nm-2:4 bfloat16"), device)
    assert not found.ok
    assert "y[1, 3] is 0x447a (1000) and must be 0x" in found.detail
    assert found.kernels[0].startswith("spmm_nm/bf16")


def test_a_dense_product_verifies_no_kernel(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = import_module("hopsparse.ops.spmm_nm.checks")

    def dense(w: object, x: torch.Tensor, *, bias: torch.Tensor | None = None) -> torch.Tensor:
        return torch.nn.functional.linear(x, w.to_dense(), bias)  # type: ignore[attr-defined]

    monkeypatch.setattr(module, "spmm_nm", dense)
    found = outcome_of(check("spmm_nm ragged nm-2:4 bfloat16"), device)
    assert not found.ok
    assert "no kernel was launched" in found.detail
