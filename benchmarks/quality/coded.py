"""A linear layer as a kernel of few bits computes it: products of codes, sums, then scales.

`Product` says how; `coded` puts it in place of the projections of a model. int8 sums are exact, and
those of 8-bit floats are what `hopsparse.measure.fp8` says that tensor cores make of them.
"""

from __future__ import annotations

import ctypes
import functools
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hopsparse.formats import NM, Scheme, parse_form
from hopsparse.measure.fp8 import exponents, fp8_sums
from hopsparse.ops import Scaling, quantize_rows, spmm_nm_scaled
from hopsparse.quant import expand_scales, input_scales, quantize_matrix, to_codes, weight_scales

SUMS = ("exact", "float32", "promoted", "fast")
GROUP = 128  # columns between promotions, and those that share a scale where there are groups
COLUMNS, KEPT, LANES = 64, 32, 32  # of one instruction; products it adds; tokens in a block
E4M3 = torch.float8_e4m3fn
LEAST_EXPONENT, NO_EXPONENT = -6, -200  # of E4M3, and of zero


@dataclass(frozen=True)
class Product:
    """How codes are made, multiplied and added.

    Attributes:
        form: Pattern and scheme, such as `2:4+int4:128/fp8`.
        sums: `exact` integers; or of 8-bit floats `fast` or `promoted`, every 128 columns, as the
            tensor cores take them, or in `float32`, as the CPU reference does.
        x_group: Columns of x that share a scale: 0, all of a token, or 128.
    """

    form: str
    sums: str = "float32"
    x_group: int = 0

    @property
    def scheme(self) -> Scheme | None:
        """Of weights and inputs."""
        return parse_form(self.form).scheme


class Chain:
    """`fp8_sums` of one 2:4 weight, in compiled code; tokens in blocks of 32.

    Args:
        codes: float32 [out, k] E4M3 numbers, k a multiple of 64.
        library: What `compiled` returns.
    """

    def __init__(self, codes: Tensor, library: Any) -> None:
        out, k = codes.shape
        if k % COLUMNS:
            raise ValueError(f"k = {k} is no multiple of {COLUMNS}")
        groups = codes.view(out, k // 4, 4)
        kept = (groups != 0).int().topk(2, -1).indices
        self._values = self._packed(groups.gather(-1, kept))
        self._columns = self._packed(
            kept.int() + 4 * torch.arange(k // 4, dtype=torch.int32)[:, None]
        )
        self._exponents = exponents(self._values.to(E4M3))
        self._out, self._library = out, library

    @staticmethod
    def _packed(parts: Tensor) -> Tensor:
        """[out, groups, 2] -> [instructions, out, 32]."""
        return parts.reshape(len(parts), -1, KEPT).transpose(0, 1).contiguous()

    def sums(self, x: Blocks, start: int, end: int) -> Tensor:
        """[tokens, out]: the sum over columns from start to end, multiples of 64."""
        made = torch.empty(x.count, self._out, LANES)
        self._library.fp8_chain(
            *(_pointer(each) for each in (self._values, self._exponents, self._columns)),
            *(ctypes.c_long(each) for each in (self._out, start // COLUMNS, end // COLUMNS)),
            *(_pointer(each) for each in (x.values, x.exponents)),
            *(ctypes.c_long(each) for each in (x.k, x.count)),
            _pointer(made),
        )
        return made.transpose(1, 2).reshape(-1, self._out)


class Blocks:
    """Inputs as `Chain` reads them.

    Args:
        codes: float32 [tokens, k] E4M3 numbers, a multiple of 32 tokens.
    """

    def __init__(self, codes: Tensor) -> None:
        tokens, self.k = codes.shape
        self.count = tokens // LANES
        if tokens % LANES:
            raise ValueError(f"{tokens} tokens are no multiple of {LANES}")
        self.values = codes.view(self.count, LANES, self.k).transpose(1, 2).contiguous()
        # Those of `exponents`, read off float32; a cast to E4M3 would take longer than the sums.
        found = (self.values.view(torch.int32) >> 23).bitwise_and_(255).sub_(127)
        zero = self.values == 0
        self.exponents = found.clamp_(min=LEAST_EXPONENT).masked_fill_(zero, NO_EXPONENT)


class Coded(nn.Module):
    """y = x @ w.T in codes, a window of tokens at a time.

    Args:
        weight: float32 [out, k]; obeys the pattern.
        product: With a scheme.
        scales: [out, groups] of the weight; None: of rounding to nearest.
        library: What `compiled` returns.
    """

    def __init__(
        self, weight: Tensor, product: Product, scales: Tensor | None, library: Any
    ) -> None:
        super().__init__()
        scheme = product.scheme
        assert scheme is not None
        self.product, self.scheme, self.k = product, scheme, weight.shape[1]
        self.scales = weight_scales(weight, scheme) if scales is None else scales.float()
        wide = expand_scales(self.scales, self.k, scheme)
        self.codes = to_codes(weight, wide, scheme.weights)
        self.chain = None
        if scheme.activations == "none":
            self.codes = self.codes * wide
        elif product.sums in ("promoted", "fast"):
            self.chain = Chain(self.codes, library)
        elif product.sums == "exact":
            # Sums of integers below 2^24 are exact in float32, in any order.
            largest = int(self.codes.abs().sum(1).max()) * 127
            if largest >= 2**24:
                raise ValueError(f"a sum of {largest} in float32")

    def forward(self, x: Tensor) -> Tensor:
        """[..., k] -> [..., out], float32."""
        rows = x.reshape(-1, self.k)
        if self.scheme.activations == "none":
            return F.linear(x, self.codes)
        codes, scales = self._inputs(rows)
        y = self._sums(codes, scales)
        if not self.scheme.group:
            y = y * self.scales.view(-1)
        if not self.product.x_group:
            y = y * scales
        return y.view(*x.shape[:-1], -1)

    def _inputs(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Codes [tokens, k], and scales [tokens, groups]."""
        kind = self.scheme.activations
        width = self.product.x_group or self.k
        parts = rows.split(width, dim=1)
        scales = [input_scales(part, self.scheme) for part in parts]
        codes = [to_codes(part, each, kind) for part, each in zip(parts, scales, strict=True)]
        return torch.cat(codes, 1), torch.cat(scales, 1)

    def _sums(self, codes: Tensor, scales: Tensor) -> Tensor:
        """[tokens, out], with the scales that belong to groups of columns."""
        product, grouped = self.product, bool(self.scheme.group or self.product.x_group)
        blocks = Blocks(codes) if self.chain else None
        width = self.k if product.sums == "fast" or not (grouped or self.chain) else GROUP
        y = torch.zeros(len(codes), len(self.codes))
        for index, start in enumerate(range(0, self.k, width)):
            end = min(start + width, self.k)
            if self.chain and blocks:
                part = self.chain.sums(blocks, start, end)
            else:
                part = F.linear(codes[:, start:end], self.codes[:, start:end])
            if self.scheme.group:
                part *= self.scales[:, index]
            if product.x_group:
                part *= scales[:, index : index + 1]
            y += part
        return y


@contextmanager
def coded(
    model: nn.Module, product: Product, scales: Mapping[str, Tensor], library: Any
) -> Iterator[None]:
    """While open, the projections of `model` compute as `product` says.

    Args:
        model: A Llama of 2:4 weights, float32.
        product: Without a scheme everything stays as it is.
        scales: Of weights that lie on the grid of `product` already, by name of the layer.
        library: What `compiled` returns.
    """
    found = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.Linear) and "proj" in n]
    if product.scheme is None:
        found = []
    for name, layer in found:
        made = Coded(layer.weight.detach(), product, scales.get(name), library)
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, made)
    try:
        yield
    finally:
        for name, layer in found:
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, layer)


def compiled(folder: Path) -> Any:
    """fp8_chain.cpp as a library, compared with `fp8_sums` and the operator bit for bit."""
    source = Path(__file__).with_name("fp8_chain.cpp")
    made = folder / "fp8_chain.so"
    command = ["c++", "-O3", "-march=native", "-shared", "-fPIC", str(source), "-o", str(made)]
    subprocess.run(command, check=True)
    library = ctypes.CDLL(str(made.resolve()))
    draw = torch.Generator().manual_seed(0)
    for out, k, spread in ((40, 576, 1.0), (24, 1536, 4.0), (8, 64, 0.0)):
        # Numbers of many sizes, subnormal ones and zeros among them.
        x, w = (
            torch.randn(n, k, generator=draw) * (torch.randn(n, k, generator=draw) * spread).exp2()
            for n in (64, out)
        )
        rank = torch.rand(out, k // 4, 4, generator=draw).argsort(-1)
        _compare_sums(x.clamp(-448, 448).to(E4M3), (w * (rank < 2).flatten(1)).to(E4M3), library)
    weight = torch.randn(24, 64, 4, generator=draw)
    weight[..., 1:3] = 0
    for product in (Product("2:4+int8", "exact"), Product("2:4+fp8")):
        _compare_layer(torch.randn(3, 256, generator=draw), weight.flatten(1), product)
    return library


def _compare_sums(x: Tensor, w: Tensor, library: Any) -> None:
    chain, blocks, k = Chain(w.float(), library), Blocks(x.float()), x.shape[1]
    parts = [chain.sums(blocks, at, min(at + GROUP, k)) for at in range(0, k, GROUP)]
    assert torch.equal(blocks.exponents, exponents(blocks.values.to(E4M3)))
    assert torch.equal(chain.sums(blocks, 0, k), fp8_sums(x, w)), x.shape
    assert torch.equal(functools.reduce(torch.add, parts), fp8_sums(x, w, batch=GROUP)), x.shape


def _compare_layer(x: Tensor, weight: Tensor, product: Product) -> None:
    w = quantize_matrix(weight, product.form)
    codes, scales = quantize_rows(x, w.codes().dtype)
    scaling = Scaling(w=w.scales, x=scales)
    expected = spmm_nm_scaled(cast(NM, w.codes()), codes, scaling, out_dtype=torch.float32)
    assert torch.equal(Coded(weight, product, None, None)(x), expected), product.form


def _pointer(tensor: Tensor) -> ctypes.c_void_p:
    assert tensor.is_contiguous()
    return ctypes.c_void_p(tensor.data_ptr())
