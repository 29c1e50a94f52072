"""What vLLM calls in each of its processes, as a plug-in of the group `vllm.general_plugins`."""

from __future__ import annotations


def register() -> None:
    """Enter the quantisation "hopsparse" in vLLM. A second time does nothing.

    vLLM then loads checkpoints of hopsparse, and with `quantization="hopsparse"` those that
    compressed-tensors left as `sparse-24-bitmask`.
    """
    from . import vllm_linear as vllm_linear  # Importing it enters the class.
