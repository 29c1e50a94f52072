"""What must be there before a call: kernels that a test lets nobody compile any more."""

from __future__ import annotations

import pytest

from hopsparse.compiler import cache as compiler_cache


def refuse_to_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor read from the cache: a kernel is looked up there only where it is not loaded."""

    def refuse(*arguments: object) -> None:
        raise AssertionError("compiled after it was prepared")

    monkeypatch.setattr(compiler_cache, "compile_unit", refuse)
    monkeypatch.setattr(compiler_cache.KernelCache, "get", refuse)
