"""Formats and modules on a GPU give what they give on the CPU."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

import hopsparse
from hopsparse.errors import UnsupportedError
from hopsparse.formats import FORMATS, convert
from hopsparse.measure.error import product_bound
from hopsparse.models.options import SparsifyOptions
from hopsparse.nn import SparseLinear
from hopsparse.ops import COMPUTE_DTYPES, Case
from hopsparse.prune import Recipe, magnitude
from tests.helpers.products import SMALL, SMALL_IDS, dense_weight, run, store
from tests.helpers.tiny_models import save_model, tiny_llama, write_text
from tests.helpers.waiting import nothing_waits

OPTIONS = {"nm": {"pattern": "2:4"}, "bsr": {"block": (16, 16)}}


@pytest.mark.parametrize("fmt", sorted(FORMATS))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int8, torch.float8_e4m3fn])
def test_packing_is_the_same_on_both(fmt: str, dtype: torch.dtype, device: torch.device) -> None:
    dense = magnitude(torch.randint(-8, 9, (200, 328)).float(), hopsparse.formats.NMPattern(2, 4))
    dense = dense.to(dtype)
    here = convert(FORMATS["bitmask"].from_dense(dense), fmt, **OPTIONS.get(fmt, {}))
    source = FORMATS["bitmask"].from_dense(dense.to(device))
    there = convert(source, fmt, **OPTIONS.get(fmt, {}))
    assert there.device == device
    there.validate()
    for name, part in here.parts().items():
        assert torch.equal(part.view(torch.uint8), there.parts()[name].cpu().view(torch.uint8)), (
            name
        )
    bits = there.to_dense().cpu().view(torch.uint8)
    assert torch.equal(bits, here.to_dense().view(torch.uint8))


def test_packing_is_deterministic_where_torch_demands_it(device: torch.device) -> None:
    dense = magnitude(torch.randn(256, 512), hopsparse.formats.NMPattern(2, 4)).to(device)
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.equal(FORMATS["nm"].from_dense(dense).to_dense(), dense)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dtype", COMPUTE_DTYPES, ids=str)
@pytest.mark.parametrize(("op", "case"), SMALL, ids=SMALL_IDS)
def test_small_integers_are_exact(
    op: str, case: Case, dtype: torch.dtype, device: torch.device
) -> None:
    dense = dense_weight(case, dtype, exact=True).clamp(-1, 1)
    keep = torch.rand(case.k) < 100 / case.k
    x = (torch.randint(-1, 2, (case.tokens, case.k)) * keep).to(dtype)
    result = run(op, store(op, case, dense).to(device), x.to(device))
    assert torch.equal(result.cpu().double(), x.double() @ dense.double().T)


@pytest.mark.parametrize("dtype", COMPUTE_DTYPES, ids=str)
@pytest.mark.parametrize(("op", "case"), SMALL, ids=SMALL_IDS)
def test_random_numbers_stay_in_bound(
    op: str, case: Case, dtype: torch.dtype, device: torch.device
) -> None:
    dense = dense_weight(case, dtype, exact=False)
    x = torch.randn(case.tokens, case.k).to(dtype)
    result = run(op, store(op, case, dense).to(device), x.to(device)).cpu()
    bound = product_bound(x, dense, torch.float32, dtype)
    assert ((result.double() - x.double() @ dense.double().T).abs() <= bound).all()


def test_module_moves_copies_and_names_its_plan(device: torch.device) -> None:
    linear = nn.Linear(256, 128).to(torch.bfloat16).requires_grad_(False)
    linear.weight.copy_(magnitude(linear.weight, hopsparse.formats.NMPattern(2, 4)))
    layer = SparseLinear.from_linear(linear)
    x = torch.randint(-1, 2, (5, 256)).to(torch.bfloat16)
    moved = copy.deepcopy(layer).to(device)
    assert moved.plan(x.to(device)).name == "kernel"
    assert layer.plan(x).name == "reference"
    assert moved.values.device == device
    bound = product_bound(x, linear.weight, torch.float32, torch.bfloat16, linear.bias)
    error = (moved(x.to(device)).cpu().double() - layer(x).double()).abs()
    assert (error <= 2 * bound).all()


def layer_on(device: torch.device, fmt: str) -> SparseLinear:
    linear = nn.Linear(256, 128).to(torch.bfloat16).requires_grad_(False)
    linear.weight.copy_(magnitude(linear.weight, hopsparse.formats.NMPattern(2, 4)))
    return SparseLinear.from_linear(linear, fmt).to(device)


# The formats that have no kernel, so that layers decode them; nm has tests of its own.
DECODED = sorted({*FORMATS} - {"nm"})


@pytest.mark.parametrize("fmt", DECODED)
def test_the_decoded_weight_is_kept_and_later_calls_wait_for_nothing(
    fmt: str, device: torch.device
) -> None:
    layer = layer_on(device, fmt)
    x = torch.randn(5, 256, dtype=torch.bfloat16, device=device)
    said = layer.plan(x).describe()
    first = layer(x)
    kept = layer._decoded[1]
    assert kept.dtype == torch.bfloat16
    assert kept.device == device
    assert f"decoded once and kept, {kept.nbytes} bytes" in said
    with nothing_waits():
        second = layer(x)
    assert layer._decoded[1] is kept
    assert torch.equal(first, second)
    assert torch.equal(second, nn.functional.linear(x, layer.to_dense(), layer.bias))
    layer.keep_decoded = False
    if fmt != "csr":  # its operator gathers, in an order of its own
        assert torch.equal(layer(x), first)


@pytest.mark.parametrize("fmt", sorted(FORMATS))
def test_replayed_graph_equals_eager(fmt: str, device: torch.device) -> None:
    layer = layer_on(device, fmt)
    x = torch.randn(5, 256, dtype=torch.bfloat16, device=device)
    expected = layer(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = layer(x)
    captured.fill_(float("nan"))
    graph.replay()
    assert torch.equal(captured, expected)


@pytest.mark.parametrize("fmt", DECODED)
def test_a_cold_capture_is_refused_and_goes_on(fmt: str, device: torch.device) -> None:
    layer = layer_on(device, fmt)
    x = torch.randn(5, 256, dtype=torch.bfloat16, device=device)
    doubled = x * 2  # loads what the capture runs
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(UnsupportedError, match="one call of the layer before the capture"):
            layer(x)
        after = x * 2
    after.fill_(0)
    graph.replay()
    assert torch.equal(after, doubled)
    layer(x)


def test_an_operator_that_would_wait_refuses_a_capture(device: torch.device) -> None:
    w = FORMATS["csr"].from_dense(torch.ones(8, 16, device=device))
    x = torch.ones(2, 16, device=device)
    doubled = x * 2
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(UnsupportedError, match="a CSR matrix that is new, while a CUDA graph"):
            run("spmm_csr", w, x)
        after = x * 2
    graph.replay()
    assert torch.equal(after, doubled)


def test_a_model_is_pruned_and_loaded_on_the_device(tmp_path: Path, device: torch.device) -> None:
    folder = save_model(tiny_llama(), tmp_path / "dense")
    text = write_text(tmp_path / "text.txt")
    options = SparsifyOptions(
        calibration=text,
        evaluate=text,
        windows=4,
        window_tokens=32,
        eval_windows=2,
        samples=False,
        device=str(device),
    )
    report = hopsparse.sparsify_checkpoint(
        str(folder), tmp_path / "out", Recipe("2:4"), options=options
    )
    assert {row["method"] for row in report["layers"]} == {"sparsegpt"}
    model = hopsparse.load(tmp_path / "out", device=device)
    ids = torch.arange(10, device=device)[None]
    with torch.no_grad():
        logits = model(ids).logits
    assert logits.device == device
    assert torch.isfinite(logits).all()
