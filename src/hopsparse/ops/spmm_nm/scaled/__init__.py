"""`spmm_nm_scaled`: the product of 8-bit codes, by the kernel of spmm_nm."""
