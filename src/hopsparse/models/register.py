"""Makes transformers know our checkpoints and our attention, without importing or patching it.

transformers has registries for quantisation methods and for functions of attention; ours are
entered when transformers is imported, before or after hopsparse. Until then this costs two
dictionary entries.
"""

from __future__ import annotations

import contextlib
from types import ModuleType

import wrapt

_QUANTIZERS, _MODELS = "transformers.quantizers.auto", "transformers.modeling_utils"
_hooked = False


def register() -> None:
    """Enter the method and the attention "hopsparse" as soon as transformers is imported."""
    global _hooked
    if not _hooked:
        _hooked = True
        wrapt.register_post_import_hook(_enter_quantizer, _QUANTIZERS)
        wrapt.register_post_import_hook(_enter_attention, _MODELS)


def _enter_quantizer(_: ModuleType) -> None:
    # Imported here, because it derives from classes of transformers; importing it registers them.
    # A transformers too old for it stays importable, and says itself that it knows no "hopsparse".
    with contextlib.suppress(ImportError):
        from . import quantizer as quantizer


def _enter_attention(_: ModuleType) -> None:
    with contextlib.suppress(ImportError):
        from . import attention as attention
