"""hybrid_gradient on the CPU: what it refuses, what it tells torch, and what its kernels are."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hopsparse.errors import ArgumentError
from hopsparse.ops import hybrid_gradient
from hopsparse.ops.hybrid_gradient import cases, plan
from hopsparse.ops.hybrid_gradient.remainder import CODERS
from tests.helpers.hybrid_gradients import DTYPES, KINDS, differing, gradient_of

NAMES = ("values", "counts", "offsets", "codes", "scales", "rest", "finite")
GRADIENT = torch.ones(8)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ((torch.ones(2, 2), None, 1), r"gradient \[2, 2\]"),
        ((torch.ones(8, dtype=torch.float64), None, 1), "float64"),
        ((GRADIENT.to_sparse(), None, 1), "sparse"),
        ((GRADIENT, torch.ones(7), 1), r"residual \[7\]"),
        ((GRADIENT, torch.ones(8).half(), 1), "float16"),
        ((GRADIENT, None, -1), "k = -1"),
        ((GRADIENT, None, 9), "k = 9 of 8"),
        ((GRADIENT, None, 1, "int5"), "remainder='int5'"),
    ],
)
def test_arguments_that_do_not_fit_are_named(given: tuple[Any, ...], told: str) -> None:
    with pytest.raises(ArgumentError, match=told):
        hybrid_gradient(*given)


@pytest.mark.parametrize(("every", "phase"), [(0, 0), (2, 2), (1, -1)])
def test_turns_that_mean_nothing_are_named(every: int, phase: int) -> None:
    with pytest.raises(ArgumentError, match=f"phase {phase} of {every}"):
        hybrid_gradient(GRADIENT, None, 1, every=every, phase=phase)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("remainder", [None, *CODERS])
def test_torch_knows_the_shapes(remainder: Any, dtype: torch.dtype) -> None:
    operator = torch.ops.hopsparse.hybrid_gradient.default
    for n in (0, 1, 1000):
        given = (torch.randn(n).to(dtype), torch.randn(n), n // 10, remainder, 2, 1)
        torch.library.opcheck(operator, given)


@pytest.mark.parametrize("kind", ["nan", "infinity", "overflow"])
@pytest.mark.parametrize("remainder", [None, *CODERS])
def test_what_is_not_finite_is_sent_as_zeros(remainder: Any, kind: str) -> None:
    gradient, residual = gradient_of(kind, 700, torch.float32)
    got = hybrid_gradient(gradient, residual, 7, remainder)
    zeros = hybrid_gradient(torch.zeros(700), None, 7, remainder)
    assert got[-1].tolist() == [0]
    assert zeros[-1].tolist() == [1]
    assert differing(got[:-1], zeros[:-1], NAMES[:-1]) == []


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("nan", "infinity")])
def test_a_16_bit_gradient_is_its_float32(kind: str) -> None:
    for dtype in DTYPES[1:]:
        gradient, residual = gradient_of(kind, 700, dtype)
        wide = hybrid_gradient(gradient.float(), residual, 7, "int3.5")
        assert differing(hybrid_gradient(gradient, residual, 7, "int3.5"), wide, NAMES) == []


def test_kernels_know_every_coder() -> None:
    sizes = {name: (coder.block, coder.most) for name, coder in CODERS.items()}
    assert {name: facts[1:] for name, facts in plan.REMAINDERS.items() if name} == sizes
    assert len(plan.every_spec()) == 4 + len(DTYPES) * (1 + len(plan.REMAINDERS)) + len(
        plan.REMAINDERS
    )


def test_kernels_that_are_not_there_are_refused() -> None:
    for wrong in (
        ("sort", "float32", "int4"),
        ("emit", "float64", "int4"),
        ("emit", "float32", ""),
    ):
        with pytest.raises(ArgumentError, match="kernel"):
            plan.spec_for(*wrong)


@pytest.mark.parametrize("case", cases.TIMED, ids=lambda case: case.name)
def test_a_sample_promises_more_than_is_taken_and_not_much_more(case: cases.Case) -> None:
    samples, stride, wanted = plan.sampling(case.n, case.k)
    assert samples * stride <= case.n < samples * (stride + 1)
    assert 1 <= wanted * case.n / (samples * case.k) <= 1.5
    assert plan.blocks_for("code_all", case.n) <= 132 * 8
