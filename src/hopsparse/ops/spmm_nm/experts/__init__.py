"""`spmm_nm_experts`: several 2:4 weights in one launch, by the kernel of spmm_nm."""
