"""Makes transformers know our checkpoints, without importing or patching it.

transformers has a registry for quantisation methods; ours is entered when transformers is
imported, before or after hopsparse. Until then this costs a dictionary entry.
"""

from __future__ import annotations

import contextlib
from types import ModuleType

import wrapt

_REGISTRY = "transformers.quantizers.auto"
_hooked = False


def register() -> None:
    """Enter the method "hopsparse" as soon as transformers is imported; safe to call again."""
    global _hooked
    if not _hooked:
        _hooked = True
        wrapt.register_post_import_hook(_enter, _REGISTRY)


def _enter(_: ModuleType) -> None:
    # Imported here, because it derives from classes of transformers; importing it registers them.
    # A transformers too old for it stays importable, and says itself that it knows no "hopsparse".
    with contextlib.suppress(ImportError):
        from . import quantizer as quantizer
