"""What `hopsparse bench --gate` times: operators one by one, and blocks of layers end to end.

A case is made from a package, this one or another build of it, by names that both have. Weights
and inputs are drawn from a seed, so that both get the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..errors import ArgumentError
from ..measure.clock import copies_to_defeat_l2
from ..measure.pairs import Call
from ..measure.reference import random_24

#: The suites of the gate.
SUITES = ("micro", "e2e")

_MEMORY_BYTES, _MOST_COPIES = 4 << 30, 16
_CODE_SCALE, _BLOCK, _KEPT = 24.0, 64, 0.2


@dataclass(frozen=True)
class Case:
    """One thing to time.

    Attributes:
        kind: Which function of this module makes it.
        out: Rows of the weight, or of what is read.
        k: Columns.
        tokens: Rows of x, or what is chosen.

    Example:
        >>> Case("nm", 64, 128, 4).name
        'nm 64x128 4'
    """

    kind: str
    out: int
    k: int
    tokens: int = 0

    @property
    def name(self) -> str:
        """As tables call it."""
        return f"{self.kind} {self.out}x{self.k} {self.tokens}".removesuffix(" 0")

    def calls(self, package: ModuleType, device: torch.device, seed: int) -> list[Call]:
        """Calls of a build, each on its own copy of the weights where there is an L2 cache.

        Args:
            package: The build.
            device: Where.
            seed: Of weights and inputs.
        """
        generator = torch.Generator(device).manual_seed(seed)
        make = _MAKERS[self.kind]
        build = _Build(package)
        with torch.no_grad():
            return [_quiet(make(build, self, generator)) for _ in range(self._copies(device))]

    def _copies(self, device: torch.device) -> int:
        if device.type != "cuda":
            return 1
        l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
        nbytes = self.out * self.k * (6 if self.kind == "mlp" else 1)
        return copies_to_defeat_l2(nbytes, l2_bytes, memory_bytes=_MEMORY_BYTES, most=_MOST_COPIES)


def cases_of(suite: str, device: torch.device) -> list[Case]:
    """The cases of a suite: on a CPU smaller ones, of the reference paths.

    Raises:
        ArgumentError: There is no such suite.

    Example:
        >>> [case.name for case in cases_of("e2e", torch.device("cpu"))]
        ['mlp 384x128 1', 'mlp 384x128 16']
    """
    if suite not in SUITES:
        raise ArgumentError(
            f"--suite {suite} of the gate", need="one of " + ", ".join(SUITES), hint="micro"
        )
    on_gpu = device.type == "cuda"
    if suite == "e2e":
        shape = (14336, 4096) if on_gpu else (384, 128)
        return [Case("mlp", *shape, tokens) for tokens in ((1, 16, 2048) if on_gpu else (1, 16))]
    return list(_ON_GPU if on_gpu else _ON_CPU)


_ON_GPU = (
    *(Case("nm", 4096, 4096, tokens) for tokens in (1, 16, 256, 2048)),
    *(Case("nm", 28672, 4096, tokens) for tokens in (1, 64, 2048)),
    *(Case("fp8", 8192, 8192, tokens) for tokens in (16, 1024)),
    *(Case("int8", 8192, 8192, tokens) for tokens in (16, 1024)),
    *(Case("bsr", 16384, 4096, tokens) for tokens in (64, 2048)),
    *(Case("csr", 16384, 4096, tokens) for tokens in (1, 16)),
    Case("csr_matmul", 16384, 4096, 64),
    Case("select", 64, 131072, 2048),
    Case("quantize_rows", 2048, 8192),
)
_ON_CPU = (
    *(Case("nm", 256, 256, tokens) for tokens in (1, 16)),
    Case("int8", 256, 256, 16),
    Case("bsr", 256, 256, 16),
    Case("csr", 256, 256, 16),
    Case("csr_matmul", 256, 256, 16),
    Case("select", 8, 2048, 64),
    Case("quantize_rows", 64, 1024),
    Case("pack", 256, 256),
    Case("decode", 256, 256),
)


class _Build:
    """Modules of one build by their names."""

    def __init__(self, package: ModuleType) -> None:
        self._name = package.__name__

    def __getattr__(self, name: str) -> Any:
        return import_module(f"{self._name}.{name}")

    def module(self, name: str) -> Any:
        return import_module(f"{self._name}.{name}")


Make = Callable[[_Build, Case, torch.Generator], Call]


def _quiet(call: Call) -> Call:
    def run() -> Any:
        with torch.no_grad():
            return call()

    return run


def _dtype(generator: torch.Generator) -> torch.dtype:
    return torch.bfloat16 if generator.device.type == "cuda" else torch.float32


def _x(case: Case, generator: torch.Generator) -> Tensor:
    shape, dtype = (case.tokens, case.k), _dtype(generator)
    return torch.randn(shape, generator=generator, device=generator.device, dtype=dtype)


def _two_four(case: Case, generator: torch.Generator) -> Tensor:
    return random_24((case.out, case.k), _dtype(generator), generator)


def _holed(case: Case, generator: torch.Generator, side: int, kept: float) -> Tensor:
    shape, device = (case.out, case.k), generator.device
    dense = torch.randn(shape, generator=generator, device=device, dtype=_dtype(generator))
    grid = (case.out // side, case.k // side)
    mask = torch.rand(grid, generator=generator, device=device) < kept
    return dense * mask.repeat_interleave(side, 0).repeat_interleave(side, 1)


def _nm(build: _Build, case: Case, generator: torch.Generator) -> Call:
    w = build.formats.NM.from_dense(_two_four(case, generator))
    return partial(build.ops.spmm_nm, w, _x(case, generator))


def _codes(dtype: torch.dtype) -> Make:
    def make(build: _Build, case: Case, generator: torch.Generator) -> Call:
        def coded(numbers: Tensor) -> Tensor:
            return (numbers.float() * _CODE_SCALE).round().clamp(-127, 127).to(dtype)

        codes = build.module("measure.codes")
        product = build.module("ops.spmm_nm.contenders").CodedProduct(
            codes.CodedWeight(coded(_two_four(case, generator)))
        )
        return partial(product, codes.CodedInput(coded(_x(case, generator))))

    return make


def _bsr(build: _Build, case: Case, generator: torch.Generator) -> Call:
    w = build.formats.BSR.from_dense(_holed(case, generator, _BLOCK, 0.5), (_BLOCK, _BLOCK))
    return partial(build.ops.spmm_bsr, w, _x(case, generator))


def _csr(build: _Build, case: Case, generator: torch.Generator) -> Call:
    w = build.formats.CSR.from_dense(_holed(case, generator, 1, _KEPT))
    return partial(build.ops.spmm_csr, w, _x(case, generator))


def _csr_matmul(build: _Build, case: Case, generator: torch.Generator) -> Call:
    a = build.formats.CSR.from_dense(_holed(case, generator, 1, _KEPT))
    return partial(build.ops.csr_matmul, a, _x(case, generator).T.contiguous())


def _select(build: _Build, case: Case, generator: torch.Generator) -> Call:
    scores = torch.randn((case.out, case.k), generator=generator, device=generator.device)
    return partial(build.ops.select, scores, case.tokens)


def _quantize_rows(build: _Build, case: Case, generator: torch.Generator) -> Call:
    shape, dtype = (case.out, case.k), torch.bfloat16
    x = torch.randn(shape, generator=generator, device=generator.device).to(dtype)
    return partial(build.ops.quantize_rows, x, torch.int8)


def _pack(build: _Build, case: Case, generator: torch.Generator) -> Call:
    return partial(build.formats.NM.from_dense, _two_four(case, generator))


def _decode(build: _Build, case: Case, generator: torch.Generator) -> Call:
    packed = build.formats.NM.from_dense(_two_four(case, generator))
    return lambda: packed.to_dense()


def _mlp(build: _Build, case: Case, generator: torch.Generator) -> Call:
    """A block as models have it: gate and up, SiLU, down, with the residual."""

    def layer(out: int, k: int) -> Any:
        weight = _two_four(Case("nm", out, k), generator) * k**-0.5
        return build.nn.SparseLinear(build.formats.NM.from_dense(weight), None)

    gate, up = layer(case.out, case.k), layer(case.out, case.k)
    down, x = layer(case.k, case.out), _x(case, generator)
    return lambda: x + down(F.silu(gate(x)) * up(x))


_MAKERS: dict[str, Make] = {
    "nm": _nm,
    "fp8": _codes(torch.float8_e4m3fn),
    "int8": _codes(torch.int8),
    "bsr": _bsr,
    "csr": _csr,
    "csr_matmul": _csr_matmul,
    "select": _select,
    "quantize_rows": _quantize_rows,
    "pack": _pack,
    "decode": _decode,
    "mlp": _mlp,
}
