"""y = x @ w.T + bias for a weight in NM format."""

from .op import plan, spmm_nm

__all__ = ["plan", "spmm_nm"]
