"""What a server does before its first call: kernels compiled and loaded, the weight laid out."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ...formats.bsr import BSR
from .fragments_kernel import FragmentConfig
from .grains import grain_of
from .kernel import Config
from .op import decided, why_no_kernel
from .plan import spec_of
from .ready import class_of, layout_of


def classes(max_tokens: int) -> Iterator[int]:
    """The largest count of each class of token counts up to that of `max_tokens`.

    Example:
        >>> list(classes(80))
        [16, 32, 48, 64, 80]
    """
    tokens = 0
    while tokens < max_tokens:
        tokens = class_of(tokens + 1)
        yield tokens


def prepare(w: BSR, max_tokens: int, *, act: str | None = None) -> bool:
    """Make ready what calls of a layer with up to `max_tokens` rows of x run.

    Args:
        w: The weight.
        max_tokens: 1 or more.
        act: As for `spmm_bsr`.

    Returns:
        Whether all of them run the kernel, so that nothing needs to be decoded.

    Raises:
        CompileError: A kernel does not compile.
        UnsupportedError: A CUDA graph is being captured.
    """
    # Only facts of x are asked for: none of its memory is there.
    if not w.values.is_cuda or why_no_kernel(w, w.values) is not None:
        return False
    found = {tokens: decided(w, _rows(w, tokens)) for tokens in classes(max_tokens)}
    chosen = [each for each in found.values() if each.uses_kernel(kept=True)]
    if chosen:
        configs = list(dict.fromkeys(each.config for each in chosen))
        _load(w, configs, act or "none")
        for grain in dict.fromkeys(map(grain_of, configs)):
            layout_of(w).take(w, grain)
    return len(chosen) == len(found)


def _load(w: BSR, configs: list[Config | FragmentConfig], activation: str) -> None:
    from ...compiler import KernelCache
    from ...launch import kernel_for

    dtype = str(w.dtype).removeprefix("torch.")
    specs = [spec_of(config, w.shape[0], dtype, activation=activation) for config in configs]
    cache = KernelCache.default()
    # Side by side what is then loaded one after the other.
    for built in cache.compile_all(specs):
        if built.error is not None:
            raise built.error
    for spec in specs:
        kernel_for(spec, w.values.get_device(), lambda missing: cache.get(missing).image)


def _rows(w: BSR, tokens: int) -> Tensor:
    """Something shaped and placed as x, which takes no memory."""
    return torch.empty(1, dtype=w.dtype, device=w.device).expand(tokens, w.shape[1])
