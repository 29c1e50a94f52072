"""Named problems of spmm_nm: what tests check, the tuner tunes and benchmarks time."""

from __future__ import annotations

from .._product import Case

SMOKE = (
    Case("smoke", 16, 128, 128, "2:4"),
    Case("smoke-6:8", 16, 128, 128, "6:8"),
)

#: Tokens off every tile; k that no tile divides; ragged rows and columns; sparser patterns.
EDGE = (
    Case("one-token", 1, 256, 256, "2:4"),
    Case("three-tokens", 3, 256, 256, "2:4"),
    Case("seven-tokens", 7, 256, 256, "2:4"),
    Case("seventeen-tokens", 17, 256, 256, "2:4"),
    Case("no-tokens", 0, 64, 64, "2:4"),
    Case("k-4160", 5, 64, 4160, "2:4"),
    Case("k-2064", 5, 64, 2064, "2:4"),
    Case("ragged", 9, 70, 50, "2:4"),
    Case("one-group", 2, 1, 4, "2:4"),
    Case("narrow", 2, 65, 3, "2:4"),
    Case("1:4", 5, 96, 96, "1:4"),
    Case("4:6", 5, 96, 96, "4:6"),
    Case("6:8-ragged", 5, 70, 60, "6:8"),
)

#: Projections of Llama-2-7B, Llama-3-8B and SmolLM2-135M; prefill and decode.
MODEL = (
    Case("llama2-7b-qkv-prefill", 2048, 4096, 4096, "2:4"),
    Case("llama2-7b-up-prefill", 2048, 11008, 4096, "2:4"),
    Case("llama2-7b-down-prefill", 2048, 4096, 11008, "2:4"),
    Case("llama3-8b-up-prefill", 4096, 14336, 4096, "2:4"),
    Case("llama3-8b-down-prefill", 4096, 4096, 14336, "2:4"),
    Case("llama3-8b-up-decode", 1, 14336, 4096, "2:4"),
    Case("llama3-8b-up-decode-17", 17, 14336, 4096, "2:4"),
    Case("smollm2-135m-up", 1024, 1536, 576, "2:4"),
    Case("wide-k", 3072, 3072, 10240, "2:4"),
)
