"""Named problems of spmm_bsr: what tests check, the tuner tunes and benchmarks time."""

from __future__ import annotations

from .._product import Case

SMOKE = (Case("smoke", 16, 128, 128, "block:32x32:0.5"),)

#: Tokens off every tile, each block size, rectangular blocks, nearly empty and nearly full.
EDGE = (
    Case("one-token", 1, 256, 256, "block:32x32:0.5"),
    Case("three-tokens", 3, 256, 256, "block:64x64:0.5"),
    Case("seven-tokens", 7, 256, 256, "block:16x16:0.5"),
    Case("seventeen-tokens", 17, 256, 256, "block:128x128:0.5"),
    Case("no-tokens", 0, 64, 64, "block:32x32:0.5"),
    Case("k-4160", 5, 64, 4160, "block:32x32:0.7"),
    Case("k-2064", 5, 64, 2064, "block:16x16:0.7"),
    Case("rectangular", 5, 128, 192, "block:64x32:0.5"),
    Case("nearly-empty", 5, 256, 256, "block:32x32:0.97"),
    Case("nearly-full", 5, 128, 128, "block:32x32:0.07"),
)

#: Projections of Llama-2-7B and Llama-3-8B.
MODEL = (
    Case("llama2-7b-up-prefill", 2048, 11008, 4096, "block:64x64:0.5"),
    Case("llama2-7b-down-prefill", 2048, 4096, 11008, "block:128x128:0.8"),
    Case("llama3-8b-up-decode", 1, 14336, 4096, "block:32x32:0.5"),
)
