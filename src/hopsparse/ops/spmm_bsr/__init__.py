"""y = x @ w.T + bias for a weight in BSR format."""

from .op import plan, spmm_bsr

__all__ = ["plan", "spmm_bsr"]
