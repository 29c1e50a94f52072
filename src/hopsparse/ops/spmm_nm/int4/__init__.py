"""`spmm_nm_int4`: the product with weights of 4 bits, by the kernel of spmm_nm."""
