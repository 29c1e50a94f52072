"""y = x @ w.T + bias for a weight in BSR format."""

from .op import plan, spmm_bsr
from .sddmm import sddmm_bsr

__all__ = ["plan", "sddmm_bsr", "spmm_bsr"]
