"""What spmm_bsr means: the product that all formats share."""

from .._product import reference_product as spmm_bsr

__all__ = ["spmm_bsr"]
