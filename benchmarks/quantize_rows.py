"""The row quantiser against a copy of the same bytes, and against the same chain in torch.

    PYTHONPATH=src python benchmarks/quantize_rows.py --out rows.jsonl

The copy reads half of the bytes that a call reads and writes, and writes the other half. Rivals
are the chain as torch runs it eagerly, and as torch.compile fuses it; their norms and gates are in
float32 too. Each call works on its own copy of x and of the residual, so that the L2 cache holds
neither. What is plain is checked against the reference first. Appends one JSON row a case, source
and contender. Rows of the case "host" are the host time of an eager call, and of F.linear.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hopsparse.measure import record
from hopsparse.measure.clock import (
    Contender,
    copies_to_defeat_l2,
    gpu,
    host_time,
    time_side_by_side,
)
from hopsparse.ops import quantize_rows
from hopsparse.ops.quantize_rows import reference
from hopsparse.ops.quantize_rows.cases import MODEL, TIMED, Case

CODES: dict[str, Any] = {"int8": torch.int8, "fp8": torch.float8_e4m3fn, "int4": "int4"}
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
#: An input, and the options under which it is rounded.
Inputs = tuple[Tensor, dict[str, Any]]
# `norm` with a residual, which engines always have but in front of the first layer.
SOURCES = (*TIMED, "norm and residual")


def main() -> None:
    """Measure, print and append."""
    options = parse()
    facts = record.environment(gpu())
    for case in MODEL:
        if options.only not in case.name:
            continue
        for source in options.sources.split(","):
            for kind in options.codes.split(","):
                for row in measured(case, source, kind, options.dtype, options.rounds):
                    record.append(options.out, row | facts)
                    print(line(row), flush=True)
    for row in host_rows():
        record.append(options.out, row | facts)
        print(row, flush=True)


def measured(case: Case, source: str, kind: str, dtype: str, rounds: int) -> list[record.Row]:
    """Rows of one case: the operator, torch twice, and the copy."""
    first = inputs(case, source, DTYPES[dtype])
    results = ours(kind)(*first)
    checked(first, results, kind)
    moved = bytes_of(first, results)
    l2_bytes = torch.cuda.get_device_properties(first[0].device).L2_cache_size
    copies = copies_to_defeat_l2(first[0].nbytes, l2_bytes)
    rows = [first, *(copied(first) for _ in range(copies - 1))]
    torch.compiler.reset()
    contenders = [
        contender("quantize_rows", ours(kind), rows),
        contender("torch", chain_of(kind), rows),
        contender("torch.compile", torch.compile(chain_of(kind), dynamic=False), rows),
        contender("copy", copier(moved // 2), [(empty(moved // 2), {}) for _ in range(copies)]),
    ]
    timings = time_side_by_side(contenders, rounds=rounds)
    if timings[0].error or timings[-1].error:
        raise SystemExit(f"{case.name} {source} {kind}: {timings[0].error or timings[-1].error}")
    return [
        {
            "case": case.name,
            "rows": case.rows,
            "k": case.k,
            "source": source,
            "dtype": dtype,
            "codes": kind,
            "contender": timing.name,
            "error": timing.error,
            "us": None if timing.error else timing.us,
            "tbps": None if timing.error else moved / timing.us * 1e-6,
            "of_copy": None if timing.error else timings[-1].us / timing.us,
        }
        for timing in timings
    ]


def inputs(case: Case, source: str, dtype: torch.dtype) -> Inputs:
    """A random input, and the options of the operator."""
    gate = source if source in ("halves", "interleaved") else None
    x = torch.randn(case.rows, case.k * (2 if gate else 1), dtype=dtype, device="cuda")
    options: dict[str, Any] = {"gate": gate}
    if source.startswith("norm"):
        options["norm"] = torch.randn(case.k, dtype=dtype, device="cuda")
    if source.endswith("residual"):
        options["residual"] = torch.randn_like(x)
    return x, options


def copied(each: Inputs) -> Inputs:
    """The same in other memory; the weights of a norm stay, which all rows share."""
    x, options = each
    residual = options.get("residual")
    return x.clone(), options | ({} if residual is None else {"residual": residual.clone()})


def bytes_of(each: Inputs, results: tuple[Tensor, ...]) -> int:
    """What must be read and written."""
    x, options = each
    read = [x, *(option for option in options.values() if isinstance(option, Tensor))]
    return sum(tensor.nbytes for tensor in (*read, *results))


def checked(each: Inputs, results: tuple[Tensor, ...], kind: str) -> None:
    """Stop if plain rows are not, bit for bit, what the CPU makes of them."""
    x, options = each
    if options != {"gate": None}:
        return
    want = reference.quantize_rows(x[:16].cpu(), kind)
    for mine, other in zip(results, want, strict=True):
        if not torch.equal(mine[:16].cpu().view(torch.uint8), other.view(torch.uint8)):
            raise SystemExit(f"{kind} of {tuple(x.shape)} is wrong")


def ours(kind: str) -> Callable[..., tuple[Tensor, ...]]:
    """The operator."""

    def run(x: Tensor, options: dict[str, Any]) -> tuple[Tensor, ...]:
        return quantize_rows(x, CODES[kind], **options)

    return run


def chain_of(kind: str) -> Callable[..., list[Tensor]]:
    """The same in torch."""
    largest = {"int8": 127.0, "fp8": 448.0, "int4": 7.0}[kind]

    def chain(x: Tensor, options: dict[str, Any]) -> list[Tensor]:
        values, sums = x.float(), []
        if options.get("residual") is not None:
            values = values + options["residual"].float()
            sums = [values.to(x.dtype)]
        if options.get("norm") is not None:
            values = reference.normalised(values, options["norm"], 1e-6)
        if options["gate"] is not None:
            values = reference.gated(values, options["gate"])
        scales = F.threshold(values.abs().amax(-1, keepdim=True) / largest, 0.0, 1.0)
        scaled = (values / scales).clamp(-largest, largest)
        if kind == "fp8":
            return [scaled.to(torch.float8_e4m3fn), scales, *sums]
        whole = scaled.round().to(torch.int8)
        if kind == "int4":
            whole = whole[..., ::2] & 15 | whole[..., 1::2] << 4
        return [whole, scales, *sums]

    return chain


def contender(name: str, run: Callable[..., Any], rows: list[Inputs]) -> Contender:
    """One call for each copy of the input."""
    return Contender(name, [lambda each=each: run(*each) for each in rows])  # type: ignore[misc]


def copier(nbytes: int) -> Callable[..., Tensor]:
    """Copies so many bytes to one place."""
    target = empty(nbytes)
    return lambda source, _: target.copy_(source)


def empty(nbytes: int) -> Tensor:
    """Bytes that are zero."""
    return torch.zeros(nbytes, dtype=torch.uint8, device="cuda")


def host_rows() -> list[record.Row]:
    """Host time of an eager call, beside that of a linear layer."""
    x = torch.randn(16, 4096, dtype=torch.bfloat16, device="cuda")
    norm, weight = torch.ones_like(x[0]), torch.zeros_like(x[:, :4096])
    calls: dict[str, Callable[[], Any]] = {
        "quantize_rows": lambda: quantize_rows(x, torch.int8),
        "quantize_rows with norm and residual": lambda: quantize_rows(
            x, torch.int8, norm=norm, residual=x
        ),
        "F.linear": lambda: F.linear(x, weight),
    }
    with torch.no_grad():
        return [
            {"case": "host", "contender": name, "us": 1e6 * host_time(call)}
            for name, call in calls.items()
        ]


def line(row: record.Row) -> str:
    """One row for people."""
    head = f"{row['case']:<12} {row['source']:<18} {row['codes']:<5} {row['contender']:<14}"
    if row["error"]:
        return f"{head} {row['error']}"
    return f"{head} {row['us']:8.1f} us {row['tbps']:5.2f} TB/s {100 * row['of_copy']:5.1f} %"


def parse() -> argparse.Namespace:
    """Options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("quantize_rows.jsonl"))
    parser.add_argument("--codes", default=",".join(CODES), help="comma-separated")
    parser.add_argument("--sources", default=",".join(SOURCES), help="comma-separated")
    parser.add_argument("--dtype", default="bfloat16", choices=sorted(DTYPES))
    parser.add_argument("--only", default="", help="part of the name of a case")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    for name, known in (("codes", CODES), ("sources", SOURCES)):
        for word in getattr(options, name).split(","):
            if word not in known:
                parser.error(f"--{name} {word!r}: one of {', '.join(known)}")
    if options.rounds < 1:
        parser.error(f"--rounds {options.rounds}: at least 1")
    return options


if __name__ == "__main__":
    main()
