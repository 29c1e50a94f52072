"""What spmm_nm means: the product that all formats share."""

from .._product import reference_product as spmm_nm

__all__ = ["spmm_nm"]
