"""Problems of the products and their weights, shared by the tiers that run them."""

from __future__ import annotations

import importlib

import torch
from torch import Tensor

from hopsparse.formats import BSR, CSR, NM, BlockPattern, NMPattern, SparseMatrix, parse_pattern
from hopsparse.ops import OPS, Case

OPERATORS = {name: importlib.import_module(f"hopsparse.ops.{name}.op") for name in OPS}
CASES = {name: importlib.import_module(f"hopsparse.ops.{name}.cases") for name in OPS}
SMALL = [(op, case) for op in OPS for case in CASES[op].SMOKE + CASES[op].EDGE]
SMALL_IDS = [f"{op}-{case.name}" for op, case in SMALL]


def dense_weight(case: Case, dtype: torch.dtype, *, exact: bool) -> Tensor:
    """A weight with the zeros of the case; small integers when results must be exact."""
    torch.manual_seed(case.k + case.out)
    shape = (case.out, case.k)
    dense = torch.randint(-4, 5, shape).to(dtype) if exact else torch.randn(shape).to(dtype)
    pattern = parse_pattern(case.pattern)
    if isinstance(pattern, NMPattern):
        groups = -(-case.k // pattern.m)
        rank = torch.rand(case.out, groups, pattern.m).argsort(-1)
        return dense * (rank < pattern.n).flatten(1)[:, : case.k]
    if isinstance(pattern, BlockPattern):
        kept = torch.rand(-(-case.out // pattern.rows), -(-case.k // pattern.cols))
        kept = (kept > pattern.sparsity).repeat_interleave(pattern.rows, 0)
        return dense * kept.repeat_interleave(pattern.cols, 1)[: case.out, : case.k]
    return dense * (torch.rand(shape) > pattern.sparsity)


def store(op: str, case: Case, dense: Tensor) -> SparseMatrix:
    pattern = parse_pattern(case.pattern)
    if op == "spmm_nm":
        return NM.from_dense(dense, pattern)
    if op == "spmm_bsr":
        return BSR.from_dense(dense, (pattern.rows, pattern.cols))
    return CSR.from_dense(dense)


def run(op: str, w: SparseMatrix, x: Tensor, bias: Tensor | None = None) -> Tensor:
    return getattr(OPERATORS[op], op)(w, x, bias=bias)
