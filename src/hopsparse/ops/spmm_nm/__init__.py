"""y = x @ w.T + bias for a weight in NM format."""

from .ahead import prepare
from .op import plan, spmm_nm

__all__ = ["plan", "prepare", "spmm_nm"]
