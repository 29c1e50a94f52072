"""What `hopsparse inspect` does with a large file takes a few times what its numbers alone take.

In seconds of the processor beside numpy's own on the same machine at the same moment, so that a
slow or a busy machine changes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from hopsparse.formats import CSR
from hopsparse.formats.exchange.matrix_market import read_mtx
from hopsparse.formats.exchange.numbers import integers, reals
from hopsparse.measure.structure import analyse

NODES, EDGES = 50_000, 400_000


def times_as_long(run: Callable[[], object], other: Callable[[], object]) -> float:
    """By seconds of the processor, the least of nine each.

    In turn: whoever shares the caches or the core makes one call in a few take up to twice as long.
    """
    spans: tuple[list[float], list[float]] = ([], [])
    for _ in range(9):
        for call, found in zip((run, other), spans, strict=True):
            started = time.process_time()
            call()
            found.append(time.process_time() - started)
    return min(spans[0]) / min(spans[1])


@pytest.fixture(scope="module")
def places() -> np.ndarray:
    """Of a graph whose rows follow a power law, in order, none twice."""
    generator = np.random.default_rng(0)
    rows = (NODES * generator.random(EDGES + EDGES // 5) ** 2).astype(np.int64)
    keys = np.unique(rows * NODES + generator.integers(0, NODES, len(rows)))
    return np.stack(np.divmod(np.sort(generator.permutation(keys)[:EDGES]), NODES), 1)


@pytest.mark.parametrize(
    ("end", "most"), [("\n", 4), ("\r\n", 6)], ids=["lines", "carriage returns"]
)
def test_reading_takes_few_times_what_the_numbers_take(
    places: np.ndarray, tmp_path: Path, end: str, most: int
) -> None:
    values = np.random.default_rng(1).standard_normal(EDGES)
    lines = [f"{r} {c} {v:.6g}" for (r, c), v in zip((places + 1).tolist(), values, strict=True)]
    path = tmp_path / "graph.mtx"
    head = f"%%MatrixMarket matrix coordinate real general\n{NODES} {NODES} {EDGES}\n"
    path.write_bytes((head + end.join(lines) + end).encode())
    whole = "\n".join(line.rpartition(" ")[0] for line in lines).encode()
    parts = "\n".join(line.rpartition(" ")[2] for line in lines).encode()
    assert times_as_long(lambda: read_mtx(path, []), lambda: (integers(whole), reals(parts))) < most
    found = read_mtx(path, [])
    assert np.array_equal(found.indices.numpy(), places[:, 1])
    assert torch.equal(found.values, torch.from_numpy(reals(parts)).float())


def test_counting_takes_few_times_what_sorting_takes(places: np.ndarray) -> None:
    indptr = np.append(0, np.cumsum(np.bincount(places[:, 0], minlength=NODES)))
    matrix = CSR(
        (NODES, NODES),
        torch.ones(EDGES),
        torch.from_numpy(places[:, 1]).int(),
        torch.from_numpy(indptr).int(),
    )
    keys = np.random.default_rng(2).integers(0, NODES**2, EDGES)
    counted = times_as_long(
        lambda: analyse(matrix, validate=False), lambda: np.argsort(keys, kind="stable")
    )
    assert counted < 5
