"""y = x @ w.T + bias for a weight in CSR format."""

from .op import plan, spmm_csr

__all__ = ["plan", "spmm_csr"]
