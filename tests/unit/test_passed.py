"""Calls that passed are not checked again; those that look otherwise are."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hopsparse.errors import ArgumentError
from hopsparse.formats import NM, NMPattern
from hopsparse.ops import Scaling, spmm_nm_int4, spmm_nm_scaled
from hopsparse.ops.spmm_nm.int4 import op as int4_op
from hopsparse.ops.spmm_nm.passed import looks_of
from hopsparse.ops.spmm_nm.scaled import op as scaled_op
from hopsparse.prune import magnitude
from hopsparse.quant import quantize_matrix


def weight() -> NM:
    dense = magnitude(torch.randint(-3, 4, (16, 32)).float(), NMPattern(2, 4))
    return NM.from_dense(dense.to(torch.int8))


def counted(monkeypatch: pytest.MonkeyPatch, module: Any) -> list[int]:
    checks: list[int] = []
    check = module._checked

    def count(*arguments: Any) -> Any:
        checks.append(1)
        return check(*arguments)

    monkeypatch.setattr(module, "_checked", count)
    return checks


def test_a_call_of_codes_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    checks, w = counted(monkeypatch, scaled_op), weight()
    scale = torch.rand(16)
    for _ in range(3):
        x = torch.randint(-3, 4, (5, 32), dtype=torch.int8)
        y = spmm_nm_scaled(w, x, Scaling(w=scale), out_dtype=torch.float32)
        torch.testing.assert_close(y, (x.double() @ w.to_dense().double().T).float() * scale)
    assert len(checks) == 1


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"x": torch.ones(5, 28, dtype=torch.int8)}, "x of shape"),
        ({"x": torch.ones(5, 32)}, "x is torch.float32"),
        ({"x": torch.ones(5, 32, dtype=torch.int8).to_sparse()}, "x Tensor|x .*sparse"),
        ({"scaling": Scaling(w=torch.ones(15))}, "scale of w"),
        ({"scaling": Scaling(w=torch.ones(16, requires_grad=True))}, "requires a gradient"),
        ({"scaling": 0.5}, "scaling"),
        ({"scaling": Scaling(w=0.5)}, "scale of w"),  # type: ignore[arg-type]
        ({"scaling": Scaling(sums="slow")}, "sums='slow'"),
        ({"scaling": Scaling(out=True), "out_dtype": torch.int8}, ""),
        ({"scaling": Scaling(out=[1.0])}, "scaling.out"),  # type: ignore[arg-type]
        ({"bias": torch.ones(15)}, "bias"),
        ({"act": "tanh"}, "act='tanh'"),
        ({"act": ["relu"]}, "act="),
        ({"out_dtype": torch.int64}, "out_dtype"),
        ({"config": 3}, "config"),
    ],
)
def test_what_looks_otherwise_is_checked_again(
    change: dict[str, Any], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    w = weight()
    good: dict[str, Any] = {
        "x": torch.ones(5, 32, dtype=torch.int8),
        "scaling": Scaling(w=torch.ones(16)),
        "out_dtype": torch.float32,
    }
    spmm_nm_scaled(w, **good)
    checks = counted(monkeypatch, scaled_op)
    if told:
        with pytest.raises(ArgumentError, match=told):
            spmm_nm_scaled(w, **good | change)
    else:
        spmm_nm_scaled(w, **good | change)
    assert len(checks) == 1


def test_weights_of_four_bits_too(monkeypatch: pytest.MonkeyPatch) -> None:
    checks = counted(monkeypatch, int4_op)
    dense = magnitude(torch.randint(-3, 4, (16, 32)).bfloat16(), NMPattern(2, 4))
    w, x = quantize_matrix(dense, "2:4+int4:32"), torch.ones(5, 32).bfloat16()
    first = spmm_nm_int4(w, x)
    assert torch.equal(spmm_nm_int4(w, x + 0), first)
    assert len(checks) == 1
    with pytest.raises(ArgumentError, match="x"):
        spmm_nm_int4(w, x[:, :28])
    with pytest.raises(ArgumentError, match="w of NM"):
        spmm_nm_int4(weight(), x)  # type: ignore[arg-type]
    with torch.no_grad():
        spmm_nm_int4(w, x.clone().requires_grad_())
    assert len(checks) == 3 + 0


def test_a_memory_of_calls_has_an_end() -> None:
    w = weight()
    for tokens in range(1, 200):
        spmm_nm_scaled(w, torch.ones(tokens, 32, dtype=torch.int8))
    assert 0 < len(w.__dict__["_passed_scaled"]) <= 64


def test_gradients_and_places_are_seen() -> None:
    x = torch.ones(2, 2)
    same = looks_of((x,), ())
    assert same == looks_of((x.mT,), ())
    assert same != looks_of((x.double(),), ())
    assert same != looks_of((x.to("meta"),), ())
    assert same != looks_of((x.clone().requires_grad_(),), ())
    with torch.no_grad():
        assert same == looks_of((x.clone().requires_grad_(),), ())
    assert looks_of((x.to_sparse(),), ()) != same
