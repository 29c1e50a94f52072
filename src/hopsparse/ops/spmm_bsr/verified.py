"""Kernels that all checks of `hopsparse verify` launch, beside those that are compiled ahead."""

from __future__ import annotations

from typing import Any

from ...plan import KernelSpec
from .fragments_kernel import FragmentConfig
from .kernel import ACTIVATIONS, Config
from .plan import CANDIDATES, FRAGMENT_CANDIDATES, WITH_EPILOGUES, tile_spec


def specs_of_all() -> list[KernelSpec]:
    """Every tile with rows of y that are no whole lines, and every epilogue of those verified."""
    tiles: tuple[Config | FragmentConfig, ...] = (*CANDIDATES, *FRAGMENT_CANDIDATES)
    dtypes = ("bfloat16", "float16")
    specs = [tile_spec(config, dtype, direct=True) for dtype in dtypes for config in tiles]
    for config in WITH_EPILOGUES:
        for act in ACTIVATIONS:
            for out, direct in (("bfloat16", False), ("bfloat16", True), ("float32", True)):
                facts: dict[str, Any] = {"activation": act, "residual": True, "direct": direct}
                specs.append(tile_spec(config, "bfloat16", out_dtype=out, **facts))
    return list(dict.fromkeys(specs))
