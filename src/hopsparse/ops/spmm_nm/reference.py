"""What spmm_nm means: the product that all formats share, and its epilogue in float32."""

from .._call import apply_activation
from .._call import finished_product as spmm_nm

__all__ = ["apply_activation", "spmm_nm"]
