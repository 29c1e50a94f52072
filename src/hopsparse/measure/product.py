"""What y = x @ w.T has to do, before any GPU is named: bytes stored, bytes moved, operations."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from ..errors import ArgumentError
from ..formats import storage_for
from ..formats.nm import NM, packed_k
from ..formats.pattern import BlockPattern, NMPattern, parse_pattern
from ..formats.scheme import Form, Scheme, parse_scheme
from ..quant import groups_of, scale_dtype

#: Tensor-core path of each dtype.
FAMILY = {
    "bfloat16": "half",
    "float16": "half",
    "float8_e4m3fn": "float8",
    "float8_e5m2": "float8",
    "int8": "int8",
}
_INPUT_BITS = {"int8": 8, "fp8": 8, "int4": 4}
# Which 8-bit path multiplies (weights, inputs); the rest is widened to 16 bits. Hopper multiplies
# no 4-bit integers: they are widened to 8.
_PATHS = {
    ("int8", "int8"): "int8",
    ("int4", "int8"): "int8",
    ("int8", "int4"): "int8",
    ("int4", "int4"): "int8",
    ("fp8", "fp8"): "float8_e4m3fn",
    ("int4", "fp8"): "float8_e4m3fn",
    ("fp8", "int4"): "float8_e4m3fn",
}
# A product with fewer output tiles than SMs leaves SMs idle; 64 x 64 is the smallest tile whose
# wgmma instruction still runs at a useful rate.
_TILE = 64


@dataclass(frozen=True)
class Product:
    """One layer as the model sees it.

    Attributes:
        shape: [out, k] of the weight.
        dtype: `bfloat16`, `float16`, `float8_e4m3fn`, `float8_e5m2` or `int8`.
        fmt: How the weight is stored: `dense` or a name from `hopsparse.formats.FORMATS`.
        pattern: Its pattern, as text; needed by `nm` and `bsr`.
        density: Kept part of the blocks of `bsr`, of the entries of `bitmask`.
        scheme: What a 16-bit weight and its inputs are rounded to, as text; empty: nothing.

    Example:
        >>> Product.of((4096, 4096), Form(NMPattern(2, 4), Scheme("int8", activations="int8")))
        Product(shape=(4096, 4096), dtype='bfloat16', fmt='nm', pattern='2:4', density=0.5,
                scheme='int8')
    """

    shape: tuple[int, int]
    dtype: str = "bfloat16"
    fmt: str = "dense"
    pattern: str = ""
    density: float = 1.0
    scheme: str = ""

    def __post_init__(self) -> None:
        if min(self.shape) < 1:
            raise ArgumentError(
                f"layer of {list(self.shape)}", need="[out, k], both positive", hint="[4096, 4096]"
            )
        if self.dtype not in FAMILY:
            raise ArgumentError(
                f"dtype {self.dtype!r}",
                need="one of " + ", ".join(FAMILY),
                hint="bfloat16, which tensor cores were measured with",
            )
        if self.scheme and FAMILY[self.dtype] != "half":
            raise ArgumentError(
                f"scheme {self.scheme} of a layer in {self.dtype}",
                need="a 16-bit layer",
                hint="dtype bfloat16",
            )

    @classmethod
    def of(cls, shape: tuple[int, int], form: Form, dtype: str = "bfloat16") -> Product:
        """A layer of 16-bit weights in a form, stored as checkpoints store it."""
        pattern, scheme = form.pattern, "" if form.scheme is None else str(form.scheme)
        if pattern is None:
            return cls(shape, dtype, scheme=scheme)
        fmt = storage_for(pattern, shape)
        return cls(shape, dtype, fmt, str(pattern), 1 - pattern.sparsity, scheme)

    @property
    def parsed_scheme(self) -> Scheme | None:
        """The scheme as a value."""
        return parse_scheme(self.scheme) if self.scheme else None

    @property
    def weight_bits(self) -> int:
        """Bits of one stored value."""
        scheme = self.parsed_scheme
        return scheme.bits if scheme else (16 if FAMILY[self.dtype] == "half" else 8)

    @property
    def input_bits(self) -> int:
        """Bits of one entry of x as the product reads it."""
        scheme = self.parsed_scheme
        if scheme is None or scheme.activations == "none":
            return 16 if FAMILY[self.dtype] == "half" else 8
        return _INPUT_BITS[scheme.activations]

    @property
    def compute_dtype(self) -> str:
        """The tensor-core path: both sides in 8 bits where they agree, else the layer's dtype."""
        scheme = self.parsed_scheme
        if scheme is None:
            return self.dtype
        return _PATHS.get((scheme.weights, scheme.activations), self.dtype)

    def as_dense(self) -> Product:
        """The same layer without zeros, in the same scheme: what runs where that is faster."""
        return replace(self, fmt="dense", pattern="", density=1.0)


@dataclass(frozen=True)
class Work:
    """What a plan has to do for one product.

    Attributes:
        plan: `dense`, `nm` or `bsr`.
        bytes: Read and written: weight, activations and result.
        flops: Operations, counted as if dense over the columns that the kernel walks.
        tiles: Output tiles; fewer than SMs leave SMs idle.
        launches: Kernels.
        note: What the reader must know, or "".
    """

    plan: str
    bytes: int
    flops: float
    tiles: int
    launches: int = 1
    note: str = ""


def work(product: Product, tokens: int) -> Work:
    """What `product` does by the plan of its own format.

    Raises:
        ArgumentError: No tokens, or a format and pattern that do not fit together.

    Example:
        >>> work(Product((64, 64)), 1).bytes == 64 * 64 * 2 + 64 * 2 + 64 * 2
        True
    """
    if tokens < 1:
        raise ArgumentError(f"{tokens} tokens", need="at least one", hint="tokens=16")
    done = _nm_work(product, tokens) if product.fmt == "nm" else _other_work(product, tokens)
    return replace(
        done, note="; ".join(part for part in (done.note, _scheme_note(product)) if part)
    )


def weight_bytes(product: Product) -> int:
    """Bytes of the stored weight: values, indices, and the scales of its scheme.

    csr, csc and hyb count as dense, which is how layers run them, but for few tokens by csr.

    Example:
        >>> weight_bytes(Product((64, 64), fmt="nm", pattern="2:4")) / (64 * 64 * 2)
        0.5625
    """
    out, k = product.shape
    if product.fmt == "nm":
        stored = _nm_bytes(product)
    elif product.fmt == "bsr":
        kept, entries = _blocks(product)
        stored = _packed(entries, product.weight_bits) + 4 * kept
    elif product.fmt == "bitmask":
        kept = round(out * k * product.density)
        stored = _packed(kept, product.weight_bits) + out * -(-k // 8)
    else:
        stored = _packed(out * k, product.weight_bits)
    return stored + _scale_bytes(product)


def _other_work(product: Product, tokens: int) -> Work:
    if product.fmt == "bsr":
        moved = weight_bytes(product) + _activation_bytes(product, tokens)
        flops = 2.0 * tokens * _blocks(product)[1]
        return Work("bsr", moved, flops, _tiles(product.shape[0], tokens))
    out, k = product.shape
    moved = weight_bytes(product.as_dense()) + _activation_bytes(product, tokens)
    dense = Work("dense", moved, 2.0 * tokens * out * k, _tiles(out, tokens))
    if product.fmt == "dense":
        return dense
    return replace(dense, note=f"no kernel for {product.fmt} yet: runs as the dense product")


def _nm_work(product: Product, tokens: int) -> Work:
    out, k = product.shape
    pattern = _nm_pattern(product)
    moved = weight_bytes(product) + _activation_bytes(product, tokens)
    columns = packed_k(k, pattern)
    done = Work("nm", moved, 2.0 * tokens * out * columns, _tiles(out, tokens))
    if pattern.m == 4:
        return done
    # Windows overlap, so x is gathered first: packed k columns written, then read instead of k.
    return replace(
        done,
        bytes=moved + 2 * _packed(tokens * columns, product.input_bits),
        launches=2,
        note=f"k grows from {k} to {columns} columns of overlapping windows; x is gathered first",
    )


def _nm_bytes(product: Product) -> int:
    dtype = torch.bfloat16 if product.weight_bits == 16 else torch.int8
    attributes = {"pattern": str(_nm_pattern(product))}
    sizes = {
        part: (math.prod(shape), of.itemsize)
        for part, (shape, of) in NM.part_specs(product.shape, dtype, attributes).items()
    }
    values, _ = sizes.pop("values")
    return _packed(values, product.weight_bits) + sum(n * size for n, size in sizes.values())


def _nm_pattern(product: Product) -> NMPattern:
    pattern = parse_pattern(product.pattern)
    if not isinstance(pattern, NMPattern):
        raise ArgumentError(f"pattern {pattern} in nm", need="an N:M pattern", hint="2:4")
    return pattern


def _blocks(product: Product) -> tuple[int, int]:
    """Kept blocks, and the entries in them."""
    out, k = product.shape
    pattern = parse_pattern(product.pattern)
    if not isinstance(pattern, BlockPattern):
        raise ArgumentError(f"pattern {pattern} in bsr", need="a block pattern", hint="block:32x32")
    kept = round(math.ceil(out / pattern.rows) * math.ceil(k / pattern.cols) * product.density)
    return kept, kept * pattern.rows * pattern.cols


def _packed(entries: int, bits: int) -> int:
    return -(-entries * bits // 8)


def _scale_bytes(product: Product) -> int:
    scheme = product.parsed_scheme
    if scheme is None:
        return 0
    out, k = product.shape
    return out * groups_of(k, scheme) * scale_dtype(scheme).itemsize + 4 * scheme.static


def _activation_bytes(product: Product, tokens: int) -> int:
    # x arrives in the type that is multiplied, its rounding being part of the operator before;
    # results are written in 16 bits, by 8-bit products too.
    out, k = product.shape
    scheme = product.parsed_scheme
    dynamic = scheme is not None and scheme.activations != "none" and not scheme.static
    return _packed(tokens * k, product.input_bits) + tokens * out * 2 + 4 * tokens * dynamic


def _tiles(out: int, tokens: int) -> int:
    return math.ceil(out / _TILE) * math.ceil(tokens / _TILE)


def _scheme_note(product: Product) -> str:
    scheme = product.parsed_scheme
    if scheme is None:
        return ""
    path = FAMILY[product.compute_dtype]
    if path == "half":
        return (
            f"{scheme.weights} weights are widened to 16 bits in the product, "
            "taken to cost no time beside its bytes and operations"
        )
    if "int4" in (scheme.weights, scheme.activations):
        return "4-bit numbers are widened to 8 bits in the product, taken to cost no time"
    return ""
