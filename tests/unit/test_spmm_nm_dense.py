"""Where the dense product was measured to be faster, layers run it; the store is filled by hand."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from hopsparse.formats import NM, NMPattern
from hopsparse.nn import SparseLinear
from hopsparse.ops.spmm_nm import dense
from hopsparse.ops.spmm_nm import op as spmm_nm_op
from hopsparse.ops.spmm_nm.dense import MARGIN, DenseCounts, counts_of, dense_win, forget_counts
from hopsparse.ops.spmm_nm.plan import DENSE, Problem, choose, key_of, versions
from hopsparse.prune import magnitude
from hopsparse.tune import Machine, Measured, Store

HERE = Machine("NVIDIA H200", 132, "580.65.06")
OUT, K = 48, 64
LAYER = Problem(300, OUT, K)


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A store of its own, as if this machine had the GPU."""
    monkeypatch.setenv("HOPSPARSE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(dense, "machine_of", lambda device: HERE)
    forget_counts()
    yield
    forget_counts()


def store(
    dense_us: float, tile_us: float = 6.6, *, problem: Problem = LAYER, name: str = DENSE
) -> None:
    """As if the dense product and two tiles had been measured for the class of a problem."""
    first, second = list(versions("bfloat16"))[:2]
    times = {name: dense_us, first: tile_us, second: 2 * tile_us}
    measured = {name: Measured(us, us, us) for name, us in times.items()}
    Store.default().put(key_of(problem, "bfloat16", HERE), measured)


def packed() -> NM:
    return NM.from_dense(magnitude(torch.randn(OUT, K), NMPattern(2, 4)).bfloat16())


@pytest.fixture
def layer() -> SparseLinear:
    return SparseLinear(packed())


def weight_for(layer: SparseLinear, tokens: int = 300) -> Tensor | None:
    """The decoded weight that a call with so many tokens multiplies by; None runs the kernel."""
    x = torch.randn(tokens, K).bfloat16()
    return layer._faster_weight(layer._packed(), x)


class TestWhatWasMeasured:
    def test_is_told_with_both_times(self) -> None:
        store(5.5)
        won = dense_win(LAYER, "bfloat16", HERE)
        assert won is not None
        assert won.describe() == "tuned: 5.5 us against 6.6 of the fastest tile"

    def test_counts_for_its_class_dtype_and_machine_alone(self) -> None:
        store(5.5)
        for tokens in (257, 512):
            assert dense_win(replace(LAYER, tokens=tokens), "bfloat16", HERE) is not None
        for other in (replace(LAYER, tokens=256), replace(LAYER, tokens=513)):
            assert dense_win(other, "bfloat16", HERE) is None
        assert dense_win(LAYER, "float16", HERE) is None
        assert dense_win(LAYER, "bfloat16", replace(HERE, driver="590")) is None

    @pytest.mark.parametrize(("tile_us", "wins"), [(0.9, 0), (1.0, 0), (MARGIN, 0), (1.03, 1)])
    def test_must_win_by_more_than_the_margin(self, tile_us: float, wins: bool) -> None:
        store(1.0, tile_us)
        assert (dense_win(LAYER, "bfloat16", HERE) is not None) == wins

    def test_of_another_torch_does_not_count(self) -> None:
        store(5.5, name="dense, torch 1.0")
        assert dense_win(LAYER, "bfloat16", HERE) is None

    def test_needs_a_tile_and_a_right_dense_product(self) -> None:
        key = key_of(LAYER, "bfloat16", HERE)
        Store.default().put(key, {DENSE: Measured(5.5, 5.5, 5.5)})
        assert dense_win(LAYER, "bfloat16", HERE) is None
        other = replace(LAYER, tokens=100)
        store(float("inf"), problem=other)
        assert dense_win(other, "bfloat16", HERE) is None

    def test_changes_no_tile(self) -> None:
        store(5.5)
        assert choose(LAYER, 132, machine=HERE) == next(iter(versions("bfloat16").values()))


class TestCounts:
    def test_are_those_of_all_classes_that_dense_won(self) -> None:
        for tokens in (20, 300, 5000):
            store(5.5, problem=replace(LAYER, tokens=tokens))
        counts = counts_of(packed())
        ends = (0, 1, 16, 17, 32, 33, 256, 257, 512, 513, 4096, 4097, 1 << 40)
        assert [tokens for tokens in ends if tokens in counts] == [17, 32, 257, 512, 4097, 1 << 40]
        assert [counts.reach(most) for most in (16, 17, 9000)] == [False, True, True]
        assert not counts.never

    def test_know_when_there_are_none(self) -> None:
        counts = counts_of(packed())
        assert not counts.never  # not looked up
        assert 300 not in counts
        assert counts.never

    def test_are_shared_by_layers_of_a_shape_and_follow_new_results(
        self, layer: SparseLinear
    ) -> None:
        assert weight_for(layer) is None
        assert layer._dense_counts.never
        store(5.5)
        forget_counts()
        assert not layer._dense_counts.never
        assert weight_for(layer) is not None
        other = SparseLinear(packed())
        other._packed()
        assert other._dense_counts is layer._dense_counts

    def test_are_those_of_the_values_after_a_cast(self, layer: SparseLinear) -> None:
        store(5.5)
        assert weight_for(layer) is not None
        layer.half()
        layer._packed()
        assert 300 not in layer._dense_counts


class TestLayer:
    def test_decodes_once_for_the_counts_that_dense_won(self, layer: SparseLinear) -> None:
        store(5.5)
        assert weight_for(layer, 256) is None
        assert layer._decoded is None
        weight = weight_for(layer)
        assert weight is not None
        assert torch.equal(weight, layer.to_dense())
        assert weight_for(layer, 512) is weight
        assert weight_for(layer, 513) is None
        assert weight_for(layer, 0) is None

    def test_counts_tokens_over_all_leading_dimensions(self, layer: SparseLinear) -> None:
        store(5.5)
        x = torch.randn(3, 100, K).bfloat16()
        assert layer._faster_weight(layer._packed(), x) is not None
        assert layer._faster_weight(layer._packed(), x[:2]) is None

    @pytest.mark.parametrize("everywhere", [False, True])
    def test_that_must_not_keep_runs_the_kernel(
        self, everywhere: bool, layer: SparseLinear, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store(5.5)
        if everywhere:
            monkeypatch.setattr(SparseLinear, "keep_decoded", False)
        else:
            layer.keep_decoded = False
        assert weight_for(layer) is None
        assert layer._decoded is None

    def test_that_is_trained_runs_the_kernel(self, layer: SparseLinear) -> None:
        store(5.5)
        layer.values = nn.Parameter(layer.values)
        assert weight_for(layer) is None
        layer.values.requires_grad_(False)
        assert weight_for(layer) is None  # No buffer: it would be decoded at every call.

    def test_of_inference_mode_runs_the_kernel(self) -> None:
        store(5.5)
        with torch.inference_mode():
            assert weight_for(SparseLinear(packed())) is None

    def test_notices_changed_parts(self, layer: SparseLinear) -> None:
        store(5.5)
        first = weight_for(layer)
        layer.values.mul_(2)
        second = weight_for(layer)
        assert first is not None
        assert second is not None
        assert torch.equal(second, 2 * first)
        layer.load_state_dict(SparseLinear(packed()).state_dict())
        assert torch.equal(weight_for(layer), layer.to_dense())

    def test_gradients_go_through_the_kept_weight(self, layer: SparseLinear) -> None:
        store(5.5)
        with torch.inference_mode():
            weight_for(layer)
        weight = weight_for(layer)
        x = torch.randn(300, K).bfloat16().requires_grad_()
        nn.functional.linear(x, weight)[0, 7].backward()
        assert torch.equal(x.grad[0], layer.to_dense()[7])

    def test_runs_its_operator_where_calls_are_recorded(self, layer: SparseLinear) -> None:
        store(5.5)

        class Recording(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
                return func(*args, **(kwargs or {}))

        with Recording():
            assert weight_for(layer) is None
        x = torch.randn(300, K).bfloat16().as_subclass(type("Other", (Tensor,), {}))
        assert layer._faster_weight(layer._packed(), x) is None
        assert weight_for(layer) is not None

    def test_copies_start_without_what_was_made(self, layer: SparseLinear) -> None:
        store(5.5)
        weight = weight_for(layer)
        for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
            assert (twin._decoded, twin._dense_counts) == (None, None)
            assert torch.equal(weight_for(twin), weight)
        assert sorted(layer.state_dict()) == ["meta", "values"]

    def test_a_capture_takes_the_kernel(
        self, layer: SparseLinear, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store(5.5)
        assert weight_for(layer) is not None
        monkeypatch.setattr(spmm_nm_op, "is_captured", lambda x: True)
        assert weight_for(layer) is None


def test_counts_are_of_one_shape_dtype_and_device() -> None:
    w = packed()
    assert counts_of(w) is counts_of(packed())
    found = counts_of(w)
    assert (found.shape, found.dtype, found.device) == ((OUT, K), torch.bfloat16, -1)
    half = NM.from_dense(w.to_dense().half())
    assert counts_of(half) is not counts_of(w)
    assert counts_of(half) == DenseCounts((OUT, K), torch.float16, -1)
