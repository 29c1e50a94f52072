"""A module made quick to call: activations in the kernels, and all launches in one graph."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor, nn

from ..errors import ArgumentError
from .captured import Captured, capture
from .fuse import fuse_activations


def accelerate(
    model: nn.Module,
    example: Tensor | Sequence[Tensor],
    *,
    buckets: Iterable[int] | None = None,
    reuse_outputs: bool = False,
) -> Captured:
    """Fuse the activations of a module into its sparse layers, and capture its forward pass.

    Args:
        model: In evaluation mode. It stays usable, and its state dict the same.
        example: Its inputs; as for `capture`, like all the rest.
        buckets: Numbers of tokens, or None.
        reuse_outputs: Return the memory of the graph, and no copies of it.

    Returns:
        The captured forward pass; its `release()` gives the model back as it was.

    Raises:
        ArgumentError: The module is in training mode, or `capture` refuses.
        UnsupportedError: A CUDA graph is being captured already.

    Example:
        >>> import torch
        >>> from hopsparse.nn import SparseLinear
        >>> layer = SparseLinear.from_linear(nn.Linear(8, 8, bias=False), "csr")
        >>> model = nn.Sequential(layer, nn.ReLU()).eval()
        >>> run = accelerate(model, torch.ones(4, 8), buckets=(1, 4))
        >>> run(-torch.ones(2, 8)).shape
        torch.Size([2, 8])
    """
    if not isinstance(model, nn.Module) or model.training:
        what = "in training mode" if isinstance(model, nn.Module) else "that is none"
        raise ArgumentError(
            f"a module {what}", need="a torch module in evaluation mode", hint="model.eval()"
        )
    fused = fuse_activations(model)
    try:
        return capture(
            model,
            example,
            buckets=buckets,
            reuse_outputs=reuse_outputs,
            on_release=fused.undo,
        )
    except BaseException:
        fused.undo()
        raise
