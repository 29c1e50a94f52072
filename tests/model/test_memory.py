"""Loading a sparse model takes the memory of its packed weights and one layer, not of a dense one.

What is counted is anonymous memory (RssAnon), sampled while the model loads. Pages of the mapped
shards are left out: the kernel drops them as soon as anyone else needs the room.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from hopsparse.formats import NM
from hopsparse.models.checkpoint import CheckpointWriter, ModuleEntry, SparseConfig

LAYERS, ROWS, COLS = 6, 4096, 8192
DENSE_LAYER = ROWS * COLS * 2
# Of the allocator and of what torch sets up on first use.
SLACK = 24 << 20

PROGRAM = """
    import sys, threading, time
    import torch
    from torch import nn
    import hopsparse
    from hopsparse.models.checkpoint import CheckpointReader

    def anonymous():
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) << 10 for line in status if "RssAnon" in line)

    def dense(path):  # What must not happen: every layer as a dense one.
        with CheckpointReader(path) as reader:
            return [reader.matrix(name).to_dense() for name in reader.sparse.modules]

    def twice(path):  # Nor a second copy of the packed weights.
        with CheckpointReader(path) as reader:
            first = [reader.matrix(name).map_parts(torch.clone) for name in reader.sparse.modules]
            return first, [matrix.map_parts(torch.clone) for matrix in first]

    def sparse(path):
        with torch.device("meta"):
            model = nn.Sequential(*(nn.Linear({cols}, {rows}, bias=False) for _ in range({layers})))
        return hopsparse.load(path, into=model.bfloat16())

    peak, done, before = 0, False, anonymous()

    def watch():
        global peak
        while not done:
            peak = max(peak, anonymous())
            time.sleep(0.002)

    watcher = threading.Thread(target=watch)
    watcher.start()
    result = globals()[sys.argv[1]](sys.argv[2])
    done = True
    watcher.join()
    print(max(peak, anonymous()) - before)
"""

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="needs the memory counters of Linux"
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random 2:4 layers in bfloat16, some 226 MB packed, a shard each."""
    out = tmp_path_factory.mktemp("memory") / "out"
    torch.manual_seed(0)
    # One random layer, rolled for each: every value is there, and making them is quick.
    groups = torch.randn(ROWS, COLS // 4, 4).to(torch.bfloat16)
    order = torch.randint(0, 6, (ROWS, COLS // 4))
    keep = torch.tensor([[1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 0, 1], [0, 1, 1, 0], [0, 1, 0, 1]])
    keep = torch.cat((keep, torch.tensor([[0, 0, 1, 1]])))
    matrix = NM.from_dense((groups * keep[order]).view(ROWS, COLS))
    modules = {f"{index}": ModuleEntry.of(matrix) for index in range(LAYERS)}
    with CheckpointWriter(out) as writer:
        for name in modules:
            tensors = {f"{name}.{part}": tensor for part, tensor in matrix.parts().items()}
            writer.write_shard(f"model-{name}.safetensors", tensors)
        config = SparseConfig("2:4", "imported", modules, {}).to_json()
        writer.commit({"model_type": "none", "quantization_config": config})
    return out


def grown(how: str, checkpoint: Path) -> int:
    """Bytes by which a fresh process grows at most."""
    program = textwrap.dedent(PROGRAM.format(rows=ROWS, cols=COLS, layers=LAYERS))
    command = [sys.executable, "-c", program, how, str(checkpoint)]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def packed_bytes(checkpoint: Path) -> int:
    return sum(path.stat().st_size for path in checkpoint.glob("*.safetensors"))


def test_loading_takes_the_packed_size_and_one_layer(checkpoint: Path) -> None:
    packed = packed_bytes(checkpoint)
    assert 200e6 < packed < 0.6 * LAYERS * DENSE_LAYER
    # Not less than the weights: a process that holds them all cannot grow by less.
    assert packed * 0.95 < grown("sparse", checkpoint) < packed + DENSE_LAYER + SLACK


@pytest.mark.parametrize("how", ["dense", "twice"])
def test_the_bound_can_be_broken(checkpoint: Path, how: str) -> None:
    assert grown(how, checkpoint) > packed_bytes(checkpoint) + DENSE_LAYER + SLACK
