"""Which counters a chip has, asked of NVIDIA's own library without a GPU.

`libnvperf_host.so` lies in the wheel of `ncu_report` (`pip install 'hopsparse[profile]'`) and in
every installation of Nsight Compute.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ...errors import UnsupportedError
from .install import library_path

_SIZE, _POINTER, _TEXT = ctypes.c_size_t, ctypes.c_void_p, ctypes.c_char_p


class Catalogue:
    """The counters of one chip.

    Args:
        chip: As NVIDIA names it, such as `GH100`.
        library: Path of libnvperf_host.so; searched for if left out.

    Raises:
        UnsupportedError: There is no such library here, or it does not know the chip.
    """

    def __init__(self, chip: str, library: Path | None = None) -> None:
        path = library or library_path()
        if path is None:
            raise UnsupportedError(
                "no libnvperf_host.so",
                need="the catalogue",
                hint="pip install 'hopsparse[profile]'",
            )
        self._library = ctypes.CDLL(str(path))
        self._chip = chip.encode()
        self._call("NVPW_InitializeHost", [])
        sized = self._call(
            "NVPW_CUDA_MetricsEvaluator_CalculateScratchBufferSize",
            [("chip", _TEXT, self._chip), ("available", _POINTER, None), ("size", _SIZE, 0)],
        )
        self._scratch = (ctypes.c_uint8 * sized.size)()
        self._evaluator = self._call(
            "NVPW_CUDA_MetricsEvaluator_Initialize",
            [
                ("scratch", _POINTER, ctypes.addressof(self._scratch)),
                ("size", _SIZE, sized.size),
                ("chip", _TEXT, self._chip),
                ("available", _POINTER, None),
                ("data", _POINTER, None),
                ("data_size", _SIZE, 0),
                ("evaluator", _POINTER, None),
            ],
        ).evaluator

    def unknown(self, metrics: Iterable[str]) -> list[str]:
        """Those of `metrics`, with roll-up and submetric as ncu takes them, that do not exist."""
        return [metric for metric in metrics if not self._knows(metric)]

    def _knows(self, metric: str) -> bool:
        request = (ctypes.c_uint8 * 16)()
        fields = [
            ("evaluator", _POINTER, self._evaluator),
            ("metric", _TEXT, metric.encode()),
            ("request", _POINTER, ctypes.addressof(request)),
            ("size", _SIZE, len(request)),
        ]
        name = "NVPW_MetricsEvaluator_ConvertMetricNameToMetricEvalRequest"
        return self._status(name, fields)[0] == 0

    def _call(self, name: str, fields: list[tuple[str, Any, Any]]) -> Any:
        status, result = self._status(name, fields)
        if status != 0:
            raise UnsupportedError(
                f"{name} of {self._chip.decode()} returns {status}",
                need="a chip that this catalogue has",
                hint="another release of ncu_report",
            )
        return result

    def _status(self, name: str, fields: list[tuple[str, Any, Any]]) -> tuple[int, Any]:
        """Call a function of the library: all take one struct that begins with its size."""
        kinds = [("struct_size", _SIZE), ("private", _POINTER)]
        kinds += [(field, kind) for field, kind, _ in fields]
        struct = type("Struct", (ctypes.Structure,), {"_fields_": kinds})()
        struct.struct_size = ctypes.sizeof(struct)
        for field, _, value in fields:
            setattr(struct, field, value)
        return int(getattr(self._library, name)(ctypes.byref(struct))), struct
