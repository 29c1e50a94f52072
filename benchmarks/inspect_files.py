"""How long `hopsparse inspect` takes on a graph, by kind of file, in what memory.

    PYTHONPATH=src python benchmarks/inspect_files.py --folder FOLDER --out rows.jsonl

A graph of 1 million nodes whose rows follow a power law is drawn and written as .npz, .smtx and
.mtx (with and without values) into a folder, unless the file is there; then the command is run on
each as users run it. Appends one JSON row a file: wall and processor seconds, the most memory, and
the load of the machine before, which says how much of it others held.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from hopsparse.measure import record

NODES = 1_000_000
KINDS = ("npz", "smtx", "pattern.mtx", "real.mtx")


def main() -> None:
    """Write, run, append."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--edges", type=int, default=20_000_000)
    options = parser.parse_args()
    paths = {kind: options.folder / f"graph_{options.edges}.{kind}" for kind in KINDS}
    # In a process of its own: a child's peak counts what its parent held when it was started.
    with ProcessPoolExecutor(1) as pool:
        pool.submit(write_missing, options.edges, list(paths.values())).result()
    for kind, path in paths.items():
        row = timed(path) | {"kind": kind, "nodes": NODES, "edges": options.edges}
        record.append(options.out, row | record.environment())
        print(json.dumps(row), flush=True)


def write_missing(edges: int, paths: list[Path]) -> None:
    """Write the files that are not there."""
    missing = [path for path in paths if not path.exists()]
    graph = drawn(edges) if missing else None
    for path in missing:
        assert graph is not None
        write(*graph, path)


def drawn(edges: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Row pointers and sorted columns of a graph with exactly so many edges, none twice."""
    generator = np.random.default_rng(0)
    more = edges + edges // 5
    rows = (NODES * generator.random(more) ** 2).astype(np.int64)
    keys = np.unique(rows * NODES + generator.integers(0, NODES, more))
    keys = np.sort(generator.permutation(keys)[:edges])
    counts = np.bincount(keys // NODES, minlength=NODES)
    return np.append(0, np.cumsum(counts)), keys % NODES


def write(indptr: np.ndarray[Any, Any], indices: np.ndarray[Any, Any], path: Path) -> None:
    """One file, by what its name ends in; values are normal."""
    values = np.random.default_rng(1).standard_normal(len(indices)).astype(np.float32)
    if path.suffix == ".npz":
        parts = {"indices": indices.astype(np.int32), "indptr": indptr.astype(np.int32)}
        np.savez(path, format=np.array(b"csr"), shape=np.array([NODES] * 2), data=values, **parts)
        return
    with path.open("w") as file:
        if path.suffix == ".smtx":
            file.write(f"{NODES}, {NODES}, {len(indices)}\n")
            for part in (indptr, indices):
                file.write(" ".join(map(str, part.tolist())) + "\n")
            return
        field = path.name.split(".")[1]
        file.write(f"%%MatrixMarket matrix coordinate {field} general\n")
        file.write(f"{NODES} {NODES} {len(indices)}\n")
        file.writelines(lines(indptr, indices, values if field == "real" else None))


def lines(
    indptr: np.ndarray[Any, Any], indices: np.ndarray[Any, Any], values: np.ndarray[Any, Any] | None
) -> Iterator[str]:
    """Entries as Matrix Market has them, some at a time."""
    rows = np.repeat(np.arange(1, NODES + 1), np.diff(indptr))
    for start in range(0, len(indices), 1 << 18):
        piece = slice(start, start + (1 << 18))
        row, col = rows[piece].tolist(), (indices[piece] + 1).tolist()
        if values is None:
            yield "".join(f"{r} {c}\n" for r, c in zip(row, col, strict=True))
        else:
            each = zip(row, col, values[piece].tolist(), strict=True)
            yield "".join(f"{r} {c} {v:.6g}\n" for r, c, v in each)


def timed(path: Path) -> dict[str, Any]:
    """Run the command once."""
    load, started = os.getloadavg()[0], time.perf_counter()
    command = [sys.executable, "-m", "hopsparse", "inspect", str(path), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        found = json.loads(process.stdout.read())
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    seconds = time.perf_counter() - started
    if process.returncode:
        raise SystemExit(process.returncode)
    structure = found["analyses"][0]["structure"]
    return {
        "bytes": path.stat().st_size,
        "nnz": structure["nnz"],
        "looks": structure["looks"],
        "wall_s": round(seconds, 2),
        "cpu_s": round(usage.ru_utime + usage.ru_stime, 2),
        "peak_bytes": usage.ru_maxrss * 1024,
        "cores": len(os.sched_getaffinity(0)),
        "load_before": round(load, 2),
    }


if __name__ == "__main__":
    main()
