"""Qwen2, Qwen2.5 and Qwen3 (dense)."""

from __future__ import annotations

from ._family import Family

FAMILY = Family(name="Qwen", model_types=("qwen2", "qwen3"), gguf_architectures=("qwen2", "qwen3"))
