"""Operators: one folder each, strangers to one another.

An operator's name is its folder, its function, its test id and its page in docs/ops. The names
here are the functions: `from hopsparse.ops import spmm_nm`. An operator's other modules are
reached through its folder, `from hopsparse.ops.spmm_nm import cases`.
"""

from __future__ import annotations

from ._paged import PagedKV, contiguous_pages
from ._product import COMPUTE_DTYPES, Case, Plan, decompress, product
from ._windows import Windows
from .attend_decode.op import attend_decode
from .attend_prefill.op import attend_prefill
from .attend_prefill.tiles import score_tiles

# Importing a folder sets the name of the folder here, and the next lines set it to the function.
# Python imports a folder once, so that nothing sets it back.
from .hybrid_gradient.op import hybrid_gradient
from .im2col.op import im2col
from .pack_nm.op import pack_nm
from .quantize_rows.op import quantize_rows
from .rope_append.op import rope_append
from .score_blocks.certificate import missed_mass, select_certified
from .score_blocks.key_blocks import KeyBlocks, append_keys
from .score_blocks.op import Masses, block_masses, score_blocks
from .select.op import select
from .select_blocks.op import BlockBudget, select_blocks
from .spmm_bsr.op import spmm_bsr
from .spmm_bsr.sddmm import sddmm_bsr
from .spmm_csr.op import csr_matmul, sddmm_csr, spmm_csr
from .spmm_nm.experts.op import spmm_nm_experts
from .spmm_nm.int4.op import spmm_nm_int4
from .spmm_nm.op import spmm_nm
from .spmm_nm.scaled.op import Scaling, interleave_gate_up, spmm_nm_scaled

#: The products y = x @ w.T + bias, which share their tests. `pack_nm` makes a weight for one,
#: `quantize_rows` and `im2col` its inputs; `hybrid_gradient` makes what is sent of gradients.
#: `csr_matmul` is y = a @ x, and `sddmm_csr` its gradient, as `sddmm_bsr` is that of the blocks
#: of `spmm_bsr`.
OPS = ("spmm_nm", "spmm_bsr", "spmm_csr")

__all__ = [
    "COMPUTE_DTYPES",
    "OPS",
    "BlockBudget",
    "Case",
    "KeyBlocks",
    "Masses",
    "PagedKV",
    "Plan",
    "Scaling",
    "Windows",
    "append_keys",
    "attend_decode",
    "attend_prefill",
    "block_masses",
    "contiguous_pages",
    "csr_matmul",
    "decompress",
    "hybrid_gradient",
    "im2col",
    "interleave_gate_up",
    "missed_mass",
    "pack_nm",
    "product",
    "quantize_rows",
    "rope_append",
    "score_blocks",
    "score_tiles",
    "sddmm_bsr",
    "sddmm_csr",
    "select",
    "select_blocks",
    "select_certified",
    "spmm_bsr",
    "spmm_csr",
    "spmm_nm",
    "spmm_nm_experts",
    "spmm_nm_int4",
    "spmm_nm_scaled",
]
