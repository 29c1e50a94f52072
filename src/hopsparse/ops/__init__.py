"""Operators: one folder each, strangers to one another.

An operator's name is its folder, its function, its test id and its page in docs/ops. The names
here are the functions: `from hopsparse.ops import spmm_nm`. An operator's other modules are
reached through its folder, `from hopsparse.ops.spmm_nm import cases`.
"""

from __future__ import annotations

from ._product import COMPUTE_DTYPES, Case, Plan, decompress, product

# Importing a folder sets the name of the folder here, and the next lines set it to the function.
# Python imports a folder once, so that nothing sets it back.
from .pack_nm.op import pack_nm
from .quantize_rows.op import quantize_rows
from .spmm_bsr.op import spmm_bsr
from .spmm_csr.op import csr_matmul, sddmm_csr, spmm_csr
from .spmm_nm.experts.op import spmm_nm_experts
from .spmm_nm.int4.op import spmm_nm_int4
from .spmm_nm.op import spmm_nm
from .spmm_nm.scaled.op import Scaling, interleave_gate_up, spmm_nm_scaled

#: The products y = x @ w.T + bias, which share their tests. `pack_nm` makes a weight for one,
#: `quantize_rows` its inputs. `csr_matmul` is y = a @ x, and `sddmm_csr` its gradient.
OPS = ("spmm_nm", "spmm_bsr", "spmm_csr")

__all__ = [
    "COMPUTE_DTYPES",
    "OPS",
    "Case",
    "Plan",
    "Scaling",
    "csr_matmul",
    "decompress",
    "interleave_gate_up",
    "pack_nm",
    "product",
    "quantize_rows",
    "sddmm_csr",
    "spmm_bsr",
    "spmm_csr",
    "spmm_nm",
    "spmm_nm_experts",
    "spmm_nm_int4",
    "spmm_nm_scaled",
]
