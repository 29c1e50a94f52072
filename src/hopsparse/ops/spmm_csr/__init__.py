"""Products with a CSR matrix: y = x @ w.T + bias, y = a @ x, and dot products at its entries."""

# The module first: imported later, it would take the name of the function below.
from . import plan as _plan  # noqa: F401
from .op import csr_matmul, plan, plan_matmul, sddmm_csr, spmm_csr

__all__ = ["csr_matmul", "plan", "plan_matmul", "sddmm_csr", "spmm_csr"]
