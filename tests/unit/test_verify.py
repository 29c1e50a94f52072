"""Verification itself: what is wrong is seen, with coordinates and bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import import_module

import pytest
import torch
from torch import Tensor

from hopsparse.errors import GpuLostError
from hopsparse.launch import Bound, launches
from hopsparse.nn.checks import checks as layer_checks
from hopsparse.ops.checks import all_checks
from hopsparse.verify import Check, Expected, Trial, first_mismatch, made_once, outcome_of
from hopsparse.verify import check as verify_check

CPU = torch.device("cpu")
BF16 = torch.bfloat16


def check_of(run: Callable[[], Tensor], expected: Expected, **facts: bool) -> Check:
    def trials(device: torch.device) -> Iterator[Trial]:
        yield Trial(run, [expected])

    return Check("op", "case", "bfloat16", "nm", trials, **facts)


def test_the_first_wrong_number_is_told_with_its_bits() -> None:
    right = torch.arange(12.0).view(3, 4)
    y = right.to(BF16)
    y[1, 2], y[2, 0] = 6.5, 9.0
    told = first_mismatch(y, Expected(right.double(), BF16))
    assert told == "y[1, 2] is 0x40d0 (6.5) and must be 0x40c0 (6); 2 of 12 differ"


@pytest.mark.parametrize(
    ("dtype", "value", "bits"),
    [
        (torch.float32, 1.5, "0x3fc00000"),
        (torch.float16, 1.5, "0x3e00"),
        (torch.float8_e4m3fn, 1.5, "0x3c"),
        (torch.int8, -2, "0xfe"),
        (torch.int32, -2, "0xfffffffe"),
        (torch.int64, 5, "0x0000000000000005"),
    ],
)
def test_bits_of_every_size(dtype: torch.dtype, value: float, bits: str) -> None:
    y = torch.tensor([value]).to(dtype)
    told = first_mismatch(y, Expected(torch.tensor([0.0]).double(), dtype))
    assert told is not None
    assert f"[0] is {bits} " in told


def test_a_bound_is_kept_and_told() -> None:
    right, slack = torch.tensor([1.0, 2.0]).double(), torch.tensor([0.5, 0.25]).double()
    assert first_mismatch(torch.tensor([1.5, 1.75]), Expected(right, torch.float32, slack)) is None
    told = first_mismatch(torch.tensor([1.0, 2.3]), Expected(right, torch.float32, slack))
    assert told is not None
    assert "[1] is" in told
    assert "at most 0.25 off, and is 0.3 off" in told


def test_nan_is_wrong_unless_it_is_expected() -> None:
    nan = float("nan")
    y = torch.tensor([nan, 1.0])
    slack = torch.tensor([1e9, 1e9]).double()
    assert first_mismatch(y, Expected(torch.tensor([1.0, 1.0]).double(), torch.float32, slack))
    assert first_mismatch(y, Expected(torch.tensor([nan, 1.0]).double(), torch.float32)) is None
    assert first_mismatch(y, Expected(torch.tensor([nan, nan]).double(), torch.float32))


def test_bits_are_compared_where_they_are_asked_for() -> None:
    zeros = torch.tensor([0.0, -0.0])
    assert first_mismatch(zeros, Expected(torch.zeros(2).double(), torch.float32)) is None
    told = first_mismatch(zeros, Expected.bits(torch.zeros(2)))
    assert told is not None
    assert "y[1] is 0x80000000" in told


def test_shape_and_dtype_are_part_of_a_result() -> None:
    expected = Expected(torch.zeros(2, 3).double(), BF16)
    assert first_mismatch(torch.zeros(3, 2).bfloat16(), expected)
    assert first_mismatch(torch.zeros(2, 3), expected)
    assert first_mismatch(torch.zeros(2, 3).bfloat16(), expected) is None
    assert first_mismatch(torch.zeros(0, 3), Expected(torch.zeros(0, 3), torch.float32)) is None


def test_ends_of_a_range_are_inside() -> None:
    least, most = torch.tensor([0.1, -7.3]), torch.tensor([0.3, 1e-7])
    expected = Expected.within(least, most, torch.float32)
    assert first_mismatch(least, expected) is None
    assert first_mismatch(most, expected) is None
    assert first_mismatch(most + 0.01, expected) is not None


def test_a_check_without_a_call_fails() -> None:
    nothing = replace(check_of(lambda: torch.ones(1), Expected.bits(torch.ones(1))), kernel=False)
    found = outcome_of(replace(nothing, trials=lambda device: []), CPU)
    assert (found.ok, found.detail) == (False, "no call was made")


def test_a_check_that_wants_a_kernel_fails_where_none_ran(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A dense product of the right numbers verifies no kernel."""
    right = torch.ones(2)
    good = check_of(lambda: right.clone(), Expected.bits(right))
    monkeypatch.setattr(verify_check, "wait_for", lambda device: lambda: None)
    monkeypatch.setattr(verify_check, "_poison", lambda expected, device: None)
    gpu = torch.device("cuda")
    assert outcome_of(good, CPU).ok
    found = outcome_of(good, gpu)
    assert not found.ok
    assert "no kernel was launched" in found.detail
    assert outcome_of(replace(good, kernel=False), gpu).ok


def launched(name: str) -> Bound:
    """A launch without a driver."""
    bound = object.__new__(Bound)
    bound._launch, bound.name = lambda: 0, name  # type: ignore[assignment]
    return bound


def test_kernels_that_ran_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    right, kernel = torch.ones(2), launched("spmm_nm/tile")

    def run() -> Tensor:
        kernel()
        kernel()
        return right.clone()

    monkeypatch.setattr(verify_check, "wait_for", lambda device: lambda: None)
    monkeypatch.setattr(verify_check, "_poison", lambda expected, device: None)
    found = outcome_of(check_of(run, Expected.bits(right)), torch.device("cuda"))
    assert found.ok
    assert found.kernels == ("spmm_nm/tile",)


def test_launches_are_seen_inside_a_block_alone() -> None:
    kernel = launched("a/b")
    kernel()
    with launches() as names:
        kernel()
    kernel()
    assert names == ["a/b"]
    with pytest.raises(ValueError, match="no"), launches():
        raise ValueError("no")
    kernel()
    assert names == ["a/b"]


def test_a_kernel_that_fails_is_told_by_the_name_of_its_check(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails() -> None:
        raise RuntimeError("an illegal memory access")

    monkeypatch.setattr(verify_check, "wait_for", lambda device: fails)
    monkeypatch.setattr(verify_check, "_poison", lambda expected, device: None)
    right = torch.ones(2)
    with pytest.raises(GpuLostError, match="op case nm bfloat16 ran a kernel that failed"):
        outcome_of(check_of(lambda: right, Expected.bits(right)), torch.device("cuda"))


def test_names_are_unique_and_every_operator_is_there() -> None:
    checks = [*all_checks(), *layer_checks()]
    names = [check.name for check in checks]
    assert len(set(names)) == len(names)
    quick = {check.op for check in checks if check.quick}
    assert quick == {check.op for check in checks}
    public = {
        *("pack_nm", "spmm_nm", "spmm_nm_scaled", "spmm_nm_int4", "spmm_nm_experts", "spmm_bsr"),
        *("spmm_csr", "csr_matmul", "sddmm_csr", "quantize_rows", "select", "score_blocks"),
        *("append_keys", "attend_decode", "attend_prefill", "hybrid_gradient", "SparseLinear"),
        *("im2col", "rope_append", "select_blocks", "sddmm_bsr"),
    }
    assert quick == public


def test_a_problem_is_made_once_of_numbers_of_its_own() -> None:
    calls = []

    @made_once
    def problem(size: int) -> Tensor:
        calls.append(size)
        return torch.rand(size)

    torch.manual_seed(1)
    first = problem(3)
    torch.manual_seed(2)
    behind = torch.rand(1)
    assert problem(3) is first
    assert calls == [3]
    # Whoever asks first, and whatever it drew before.
    assert not torch.equal(first, problem(4)[:3])
    torch.manual_seed(2)
    assert torch.equal(torch.rand(1), behind)

    @made_once
    def again(size: int) -> Tensor:
        return torch.rand(size)

    assert torch.equal(again(3), first)


# Where each operator's checks look it up.
_PLACES = {
    "pack_nm": "pack_nm",
    "spmm_nm": "spmm_nm",
    "spmm_nm_scaled": "spmm_nm.scaled",
    "spmm_nm_int4": "spmm_nm.int4",
    "spmm_nm_experts": "spmm_nm.experts",
    "spmm_bsr": "spmm_bsr",
    "csr_matmul": "spmm_csr",
    "sddmm_csr": "spmm_csr",
    "spmm_csr": "spmm_csr",
    "quantize_rows": "quantize_rows",
    "select": "select",
    "score_blocks": "score_blocks",
    "attend_decode": "attend_decode",
    "attend_prefill": "attend_prefill",
    "hybrid_gradient": "hybrid_gradient",
    "rope_append": "rope_append",
    "select_blocks": "select_blocks",
}


@pytest.mark.parametrize("op", _PLACES)
def test_one_wrong_number_of_every_operator_is_seen(
    op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last number of its first result, by a bit of its exponent or by one."""
    module = import_module(f"hopsparse.ops.{_PLACES[op]}.checks")
    original = getattr(module, op)

    def wrong(*given: object, **named: object) -> object:
        found = original(*given, **named)
        first = found.values if op == "pack_nm" else found
        flat = (first if isinstance(first, Tensor) else first[0]).view(-1)
        number = flat[-1:].double()
        # A code may be at the end of its range.
        flat[-1:] = torch.where(number > 0, -number - 1, number + 1).to(flat.dtype)
        return found

    checks = [c for c in all_checks() if c.op == op and c.quick and not c.only_gpu]
    chosen = next(c for c in checks if "no-tokens" not in c.case and c.case != "nothing")
    assert outcome_of(chosen, CPU).ok
    monkeypatch.setattr(module, op, wrong)
    found = outcome_of(chosen, CPU)
    assert not found.ok
    assert " is 0x" in found.detail
