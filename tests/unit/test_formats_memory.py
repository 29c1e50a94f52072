"""A layer of 11008 x 4096 converts with at most one extra copy of it alive, counted by torch."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hopsparse.formats import FORMATS, SparseMatrix, convert
from hopsparse.formats._base import CHUNK_ELEMENTS

# A quarter of the layer of the promise: a piece takes as much memory, so the bound is stricter.
ROWS, COLS = 2752, 4096
LAYER_BYTES = ROWS * COLS * 2
# Rows, columns, places and their copies in another order: a dozen 8-byte numbers an entry.
PIECE_BYTES = 12 * 8 * CHUNK_ELEMENTS


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages made inside the mode and still alive, and their peak."""

    def __init__(self, *inputs: torch.Tensor) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._inputs = {tensor.untyped_storage()._cdata for tensor in inputs}
        self._seen: dict[int, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._watch(leaf.untyped_storage())
        return result

    def _watch(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._inputs or key in self._seen or not size:
            return
        self._seen[key] = size
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._drop, key)

    def _drop(self, key: int) -> None:
        self.live -= self._seen.pop(key)


def extra_bytes(source: torch.Tensor | SparseMatrix, action) -> tuple[object, int]:
    """What `action(source)` returns, and the most bytes alive beyond `source` and that."""
    inputs = [source] if isinstance(source, torch.Tensor) else source.parts().values()
    with LiveBytes(*inputs) as counter:
        result = action(source)
    if result is None:
        return None, counter.peak
    made = [result] if isinstance(result, torch.Tensor) else result.parts().values()
    known = {tensor.untyped_storage()._cdata for tensor in inputs}
    new = [part.nbytes for part in made if part.untyped_storage()._cdata not in known]
    return result, counter.peak - sum(new)


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    """Bytes do not depend on threads, and threads wait for each other where tests share cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def layer(_one_thread):
    keep = torch.rand(ROWS, COLS // 4, 4).argsort(-1) < 2
    return torch.where(keep.flatten(1), torch.randn(ROWS, COLS), 0).to(torch.bfloat16)


def test_the_measure_can_fail():
    def wasteful(source):
        copies = [source + i for i in range(3)]
        return copies[0]

    source = torch.ones(1 << 20)
    assert extra_bytes(source, wasteful)[1] == 2 * source.nbytes
    assert extra_bytes(source, torch.clone)[1] == 0


@pytest.mark.parametrize("fmt", FORMATS)
def test_pack_and_unpack_keep_no_copy(layer, fmt):
    matrix, extra = extra_bytes(layer, FORMATS[fmt].from_dense)
    assert extra <= PIECE_BYTES
    dense, extra = extra_bytes(matrix, FORMATS[fmt].to_dense)
    assert extra <= PIECE_BYTES
    assert torch.equal(dense, layer)
    _, extra = extra_bytes(matrix, FORMATS[fmt].validate)
    assert extra <= PIECE_BYTES


@pytest.mark.parametrize(
    ("source", "target"),
    [("csr", "csc"), ("csc", "hyb"), ("nm", "bsr"), ("bsr", "bitmask"), ("bitmask", "nm")],
)
def test_convert_keeps_one_dense_copy(layer, source, target):
    matrix = FORMATS[source].from_dense(layer)
    _, extra = extra_bytes(matrix, lambda matrix: convert(matrix, target))
    assert extra <= LAYER_BYTES + PIECE_BYTES


@pytest.mark.parametrize(("source", "target"), [("csr", "hyb"), ("hyb", "csr"), ("csr", "bitmask")])
def test_convert_without_a_dense_copy(layer, source, target):
    matrix = FORMATS[source].from_dense(layer)
    _, extra = extra_bytes(matrix, lambda matrix: convert(matrix, target))
    assert extra <= PIECE_BYTES
