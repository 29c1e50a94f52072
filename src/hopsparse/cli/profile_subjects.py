"""What `hopsparse profile` can run: operators with random weights, and whole models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..errors import ArgumentError, VerificationError
from ..measure.profile.subject import Work
from ..measure.reference import Reference, random_24
from ..ranges import phase

#: Operators by the word that users type, with what is said of them in the help.
OPS: tuple[str, ...] = (
    *("formats", "dense", "spmm_nm", "spmm_nm_scaled", "spmm_bsr", "spmm_csr", "csr_matmul"),
    "select",
)
#: What `formats` stands for: the same layer as dense, CSR, blocks and 2:4.
FORMATS = ("dense", "csr_matmul", "spmm_bsr", "spmm_nm")

_FLOATS = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_CODES = {"int8": torch.int8, "float8_e4m3fn": torch.float8_e4m3fn}
_SEED, _CODE_SCALE = 0, 24.0
# Kept, where nothing is asked for: half for hardware units, a fifth where entries are gathered.
_DENSITY = {"spmm_csr": 0.2, "csr_matmul": 0.2}


@dataclass(frozen=True)
class Setting:
    """What is run; JSON values, so that another process can make the same.

    Attributes:
        op: One of `OPS` but `formats`, or "" for a model.
        model: What `open_model` takes, or "".
        out: Rows of the weight; of `select` rows of scores.
        k: Columns.
        tokens: Rows of x; of `select` how many columns are chosen.
        dtype: Of inputs and weight.
        density: Part of the entries that is kept; None for that of the operator.
        block: Side of a block of `spmm_bsr`.
    """

    op: str
    model: str = ""
    out: int = 0
    k: int = 0
    tokens: int = 0
    dtype: str = "bfloat16"
    density: float | None = None
    block: int = 64

    @property
    def name(self) -> str:
        """In tables and ranges."""
        return self.op or self.model.rstrip("/").rpartition("/")[2]

    @property
    def kept(self) -> float:
        """Part of the entries that is kept."""
        if self.op in ("dense", "select", ""):
            return 1.0
        if self.op in ("spmm_nm", "spmm_nm_scaled"):
            return 0.5
        return _DENSITY.get(self.op, 0.5) if self.density is None else self.density

    def check(self) -> None:
        """Refuse what no operator takes.

        Raises:
            ArgumentError: It says what.
        """
        if self.op == "":
            return
        if min(self.out, self.k, self.tokens) < 1 or self.k % 4:
            raise ArgumentError(
                f"{self.op} of {self.out}x{self.k} with {self.tokens}",
                need="positive sides, and k in whole groups of 4",
                hint="--shape 4096x4096 --tokens 256",
            )
        known = _CODES if self.op == "spmm_nm_scaled" else _FLOATS
        if self.op != "select" and self.dtype not in known:
            raise ArgumentError(
                f"{self.op} in {self.dtype}",
                need="one of " + ", ".join(known),
                hint=next(iter(known)),
            )
        if not 0 < self.kept <= 1:
            raise ArgumentError(
                f"--density {self.density}", need="more than 0 and at most 1", hint="0.5"
            )
        if self.op == "spmm_bsr" and (
            self.block < 1 or self.out % self.block or self.k % self.block
        ):
            raise ArgumentError(
                f"blocks of {self.block} in {self.out}x{self.k}",
                need="sides in whole blocks",
                hint="--block 32",
            )
        if self.op == "select" and self.tokens > self.k:
            raise ArgumentError(
                f"{self.tokens} of {self.k} columns", need="no more than there are", hint="--tokens"
            )


@dataclass(frozen=True)
class Built:
    """Something to run.

    Attributes:
        setting: What it was made from.
        plan: What a call runs.
        work: What it has to do.
        calls: A call on each copy of the weight.
    """

    setting: Setting
    plan: str
    work: Work
    calls: Sequence[Callable[[], Any]]


def build(setting: Setting, device: torch.device, copies: int = 1) -> Built:
    """Make inputs and weights, and check the first result.

    Args:
        setting: What to run, checked.
        device: Where.
        copies: Weights to rotate.

    Raises:
        VerificationError: The operator computes something else than float64 does.
        CheckpointError: There is no such model.
    """
    if not setting.op:
        return _model(setting, device)
    generator = torch.Generator(device).manual_seed(_SEED)
    if setting.op == "select":
        return _select(setting, generator, copies)
    if setting.op == "spmm_nm_scaled":
        return _scaled(setting, generator, copies)
    dtype = _FLOATS[setting.dtype]
    weights = [_weight(setting, generator, dtype) for _ in range(copies)]
    shape = (setting.tokens, setting.k)
    x = torch.randn(shape, generator=generator, device=device, dtype=dtype)
    made = [_product(setting, weight, x) for weight in weights]
    calls, plan, stored_bytes = [call for call, *_ in made], made[0][1], made[0][2]
    y = calls[0]()
    y = y.T if setting.op == "csr_matmul" else y
    excess = Reference(x, weights[0]).excess(y)
    if not excess <= 1:
        raise VerificationError(
            f"{setting.name} is wrong by {excess:.3g} times the bound of its error",
            need="a result within it",
            hint="hopsparse verify, and an issue with what it says",
        )
    nbytes = stored_bytes + x.nbytes + y.nbytes
    return Built(setting, plan, _work(setting, nbytes, setting.op == "spmm_nm"), calls)


def _weight(setting: Setting, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    shape, where = (setting.out, setting.k), generator.device
    if setting.op == "spmm_nm":
        return random_24(shape, dtype, generator)
    dense = torch.randn(shape, generator=generator, device=where, dtype=dtype)
    if setting.op == "dense":
        return dense
    side = setting.block if setting.op == "spmm_bsr" else 1
    grid = (shape[0] // side, shape[1] // side)
    kept = torch.rand(grid, generator=generator, device=where) < setting.kept
    return dense * kept.repeat_interleave(side, 0).repeat_interleave(side, 1)


def _product(setting: Setting, weight: Tensor, x: Tensor) -> tuple[Callable[[], Any], str, int]:
    """A call, what it runs, and the bytes of the stored weight."""
    from ..formats import BSR, CSR, NM
    from ..ops.spmm_bsr import op as spmm_bsr
    from ..ops.spmm_csr import op as spmm_csr
    from ..ops.spmm_nm import op as spmm_nm

    if setting.op == "dense":
        return partial(F.linear, x, weight), "F.linear", weight.nbytes
    with phase("format", setting.op):
        if setting.op == "spmm_nm":
            packed = NM.from_dense(weight)
            return (
                partial(spmm_nm.spmm_nm, packed, x),
                _told(spmm_nm.plan(packed, x)),
                packed.nbytes,
            )
        if setting.op == "spmm_bsr":
            blocks = BSR.from_dense(weight, (setting.block, setting.block))
            found = _told(spmm_bsr.plan(blocks, x))
            return partial(spmm_bsr.spmm_bsr, blocks, x), found, blocks.nbytes
        entries = CSR.from_dense(weight)
        if setting.op == "spmm_csr":
            found = _told(spmm_csr.plan(entries, x))
            return partial(spmm_csr.spmm_csr, entries, x), found, entries.nbytes
        features = x.T.contiguous()
        found = _told(spmm_csr.plan_matmul(entries, features))
        return partial(spmm_csr.csr_matmul, entries, features), found, entries.nbytes


def _told(plan: Any) -> str:
    return f"{plan.name}: {plan.why}"


def _work(setting: Setting, nbytes: int, sparse: bool) -> Work:
    flops = 2 * setting.out * setting.k * setting.tokens
    return Work(flops, round(flops * setting.kept), nbytes, setting.dtype, sparse)


def _scaled(setting: Setting, generator: torch.Generator, copies: int) -> Built:
    from ..measure.codes import CodedInput, CodedWeight
    from ..ops.spmm_nm.contenders import CodedProduct
    from ..ops.spmm_nm.scaled.op import plan_scaled

    dtype = _CODES[setting.dtype]

    def codes(numbers: Tensor) -> Tensor:
        return (numbers * _CODE_SCALE).round().clamp(-127, 127).to(dtype)

    weights = [
        codes(random_24((setting.out, setting.k), torch.float32, generator)) for _ in range(copies)
    ]
    shape = (setting.tokens, setting.k)
    x = CodedInput(codes(torch.randn(shape, generator=generator, device=generator.device)))
    with phase("format", "spmm_nm_scaled"):
        products = [CodedProduct(CodedWeight(each)) for each in weights]
    first = products[0]
    plan = plan_scaled(first.packed, x.codes, first.scaling(x))
    nbytes = first.packed.nbytes + x.codes.nbytes + first(x).nbytes
    return Built(
        setting,
        _told(plan),
        _work(setting, nbytes, sparse=True),
        [partial(product, x) for product in products],
    )


def _select(setting: Setting, generator: torch.Generator, copies: int) -> Built:
    from ..ops import select

    shape = (setting.out, setting.k)
    scores = [
        torch.randn(shape, generator=generator, device=generator.device) for _ in range(copies)
    ]
    indices, counts = select(scores[0], setting.tokens)
    work = Work(0, 0, scores[0].nbytes + indices.nbytes + counts.nbytes, "float32")
    calls = [partial(select, each, setting.tokens) for each in scores]
    return Built(setting, f"the {setting.tokens} largest of each row", work, calls)


def _model(setting: Setting, device: torch.device) -> Built:
    from ..models.opened import open_model

    dtype = _FLOATS[setting.dtype]
    opened = open_model(setting.model, device=str(device), dtype=dtype)
    network: Any = opened.model
    size = int(network.config.vocab_size)
    generator = torch.Generator(device).manual_seed(_SEED)
    ids = torch.randint(size, (1, setting.tokens), generator=generator, device=device)
    forms = ", ".join(f"{count} x {form}" for form, count in opened.forms.items())
    plan = f"{opened.kind}, {setting.tokens} tokens" + (f": {forms}" if forms else "")

    def call() -> Any:
        with torch.no_grad():
            return opened.model(ids, use_cache=False)

    return Built(setting, plan, Work(0, 0, 0, setting.dtype), [call])
