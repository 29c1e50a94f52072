"""What spmm_csr means: the product that all formats share."""

from .._product import reference_product as spmm_csr

__all__ = ["spmm_csr"]
