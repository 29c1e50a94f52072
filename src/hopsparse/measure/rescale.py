"""The kernel that a user needs behind a product which leaves out scales: one pass over its sums."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import UnsupportedError


def rescale(sums: Tensor, rows: Tensor | None, columns: Tensor | None) -> Tensor:
    """`rows * columns * sums` in float32, rounded to bfloat16.

    On a GPU one Triton kernel, which reads the sums once and writes the result once; on a CPU
    torch.

    Args:
        sums: [tokens, out], int32 or a 16-bit float, contiguous.
        rows: float32 [tokens, 1] or None.
        columns: float32 [out] or None.

    Returns:
        bfloat16 [tokens, out].

    Raises:
        UnsupportedError: A GPU, and no Triton.

    Example:
        >>> sums = torch.tensor([[2, 4]], dtype=torch.int32)
        >>> rescale(sums, torch.tensor([[0.5]]), torch.tensor([1.0, 2.0]))
        tensor([[1., 4.]], dtype=torch.bfloat16)
    """
    if sums.is_cuda:
        check_triton()
        # Here, because only a torch for GPUs brings Triton.
        from .rescale_kernel import launch

        return launch(sums, rows, columns)
    y = sums.float()
    for scale in (rows, columns):
        y = y if scale is None else y * scale
    return y.to(torch.bfloat16)


def check_triton() -> None:
    """Refuse to go on without Triton.

    Raises:
        UnsupportedError: It is not installed.
    """
    try:
        import triton  # noqa: F401
    except ImportError as error:
        raise UnsupportedError(
            "scales that cuBLAS and cuSPARSELt do not take, and no Triton to multiply them with",
            need="Triton, which a torch for GPUs brings",
            hint="pip install triton, or --scaling none",
        ) from error
