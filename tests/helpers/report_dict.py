"""A report as large and as shaped as that of SmolLM2-135M, made up."""

from __future__ import annotations

import math
from typing import Any

_SHAPES = {
    "self_attn.q_proj": (576, 576),
    "self_attn.k_proj": (192, 576),
    "self_attn.v_proj": (192, 576),
    "self_attn.o_proj": (576, 576),
    "mlp.gate_proj": (1536, 576),
    "mlp.up_proj": (1536, 576),
    "mlp.down_proj": (576, 1536),
}


def example_report(blocks: int = 30, scale: int = 1) -> dict[str, Any]:
    """A report of `blocks` x 7 layers, `scale` times as wide as SmolLM2-135M."""
    layers = [
        _layer(block, index, name, (out * scale, k * scale))
        for block in range(blocks)
        for index, (name, (out, k)) in enumerate(_SHAPES.items())
    ]
    dense = sum(layer["bytes_dense"] for layer in layers)
    return {
        "schema": 1,
        "command": "hopsparse sparsify smollm2-135m -o OUT --pattern 2:4 --seed 0",
        "version": "0.1.0",
        "date": "2026-11-29T16:02:11+00:00",
        "machine": {"cpu": "x86_64 <8 MB cache>", "cores": 2, "torch": "2.13.0+cpu"},
        "model": {"name": "smollm2-135m", "family": "llama", "parameters": 134_515_008},
        "recipe": {"pattern": "2:4", "method": "sparsegpt", "keep": [], "seed": 0, "damping": 0.01},
        "calibration": {"text": "calibration", "windows": 24, "window_tokens": 512},
        "seconds": {"prune": 96.2, "evaluate": 41.0, "total": 152.8},
        "peak_memory_bytes": 1_904_000_000,
        "bytes": {"dense": dense, "sparse": round(dense * 0.5625)},
        "layers": layers,
        "kept_dense": {"lm_head": "tied to the embedding", "score": "k = 3 is no multiple of 4"},
        "evaluation": [
            _quality("held_out", 13.24, 35.9, 0.612),
            _quality("constitution", 17.02, 31.7, 0.588),
        ],
        "samples": [
            {
                "prompt": "The capital of France is",
                "dense": "Paris. The city has been the capital for long,\nand so on.",
                "sparse": "Paris, a city of & about <two> million people on the Seine.",
            },
            {
                "prompt": "Water boils at",
                "dense": "100 degrees Celsius at sea level, and lower on a mountain.",
                "sparse": "100 degrees, which is the temperature of the water in the kettle.",
            },
        ],
    }


def _layer(block: int, index: int, name: str, shape: tuple[int, int]) -> dict[str, Any]:
    dense = shape[0] * shape[1] * 2
    wave = 0.5 + 0.5 * math.sin(1.7 * index + 0.35 * block)
    return {
        "name": f"model.layers.{block}.{name}",
        "shape": list(shape),
        "pattern": "2:4",
        "format": "nm",
        "density": 0.5,
        "bytes_dense": dense,
        "bytes_sparse": dense * 9 // 16,
        "output_error": 0.06 + 0.18 * wave * (1 + block / 40),
        "seconds": 0.4,
        "note": "damping raised to 0.1" if (block, index) == (3, 6) else "",
    }


def _quality(text: str, dense: float, sparse: float, agreement: float) -> dict[str, Any]:
    return {
        "text": text,
        "windows": 8,
        "dense": {"perplexity": dense},
        "sparse": {"perplexity": sparse, "agreement": agreement, "kl": 1 - agreement},
    }
