"""Named problems of spmm_csr: what tests check, the tuner tunes and benchmarks time."""

from __future__ import annotations

from .._product import Case

SMOKE = (Case("smoke", 16, 128, 128, "unstructured:0.9"),)

#: Tokens off every tile, ragged shapes, nearly empty and nearly full.
EDGE = (
    Case("one-token", 1, 256, 256, "unstructured:0.9"),
    Case("three-tokens", 3, 256, 256, "unstructured:0.5"),
    Case("seven-tokens", 7, 256, 256, "unstructured:0.8"),
    Case("seventeen-tokens", 17, 256, 256, "unstructured:0.99"),
    Case("no-tokens", 0, 64, 64, "unstructured:0.9"),
    Case("k-4160", 5, 64, 4160, "unstructured:0.9"),
    Case("k-2064", 5, 64, 2064, "unstructured:0.9"),
    Case("ragged", 9, 71, 53, "unstructured:0.7"),
    Case("one-row", 3, 1, 300, "unstructured:0.9"),
    Case("one-column", 3, 300, 1, "unstructured:0.5"),
    Case("nearly-full", 5, 64, 64, "unstructured:0.01"),
)

#: Projections of Llama-2-7B and Llama-3-8B.
MODEL = (
    Case("llama2-7b-up-prefill", 2048, 11008, 4096, "unstructured:0.9"),
    Case("llama2-7b-down-prefill", 2048, 4096, 11008, "unstructured:0.95"),
    Case("llama3-8b-up-decode", 1, 14336, 4096, "unstructured:0.9"),
)
