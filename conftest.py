"""Modules whose examples are not looked for, because the library that they are for is missing."""

from __future__ import annotations

from importlib.util import find_spec

_NEED = {
    "triton": [
        "src/hopsparse/ops/spmm_bsr/sddmm_triton.py",
        "src/hopsparse/ops/attend_prefill/triton.py",
        "src/hopsparse/ops/attend_prefill/triton_code.py",
        "src/hopsparse/ops/attend_prefill/triton_gradient.py",
    ],
    "vllm": ["src/hopsparse/models/vllm_linear.py"],
}

collect_ignore = [path for name, paths in _NEED.items() if not find_spec(name) for path in paths]
