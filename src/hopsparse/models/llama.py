"""Llama and its kin: SmolLM2, Mistral, and every checkpoint whose model_type is llama."""

from __future__ import annotations

from ._family import Family

FAMILY = Family(
    name="Llama",
    model_types=("llama", "mistral"),
    gguf_architectures=("llama",),
    gguf_interleaves_rotary=True,
)
