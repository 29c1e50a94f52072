"""Captured functions on an H100 or H200: a replay is the eager call, bit for bit."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hopsparse
from hopsparse.errors import UnsupportedError
from hopsparse.formats import BSR, NM, NMPattern
from hopsparse.graphs import Captured, accelerate, capture, fuse_activations
from hopsparse.nn import SparseLinear
from hopsparse.ops import quantize_rows, spmm_nm
from hopsparse.prune import magnitude
from hopsparse.quant import quantize_matrix
from tests.helpers.waiting import nothing_waits


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda").bfloat16()


def dense_layer(out: int, k: int) -> nn.Linear:
    linear = nn.Linear(k, out, device="cuda", dtype=torch.bfloat16).requires_grad_(False)
    linear.weight.copy_(magnitude(numbers(out, k) * (4 / k) ** 0.5, NMPattern(2, 4)))
    return linear


def chain(count: int, side: int = 256) -> Any:
    """Layers with ReLU between them, which keep the size of their inputs about the same."""
    layers: list[nn.Module] = []
    for _ in range(count):
        layers += [SparseLinear.from_linear(dense_layer(side, side)), nn.ReLU()]
    return nn.Sequential(*layers).eval()


def quantized(scheme: str, side: int = 256) -> Any:
    dense = magnitude(numbers(side, side) * (4 / side) ** 0.5, NMPattern(2, 4))
    return SparseLinear(quantize_matrix(dense, f"2:4+{scheme}"))


@pytest.mark.parametrize("tokens", [1, 16, 65])
def test_a_replay_is_the_eager_chain_bit_for_bit(tokens: int, device: torch.device) -> None:
    model = chain(24)
    run = accelerate(model, numbers(tokens, 256))
    assert run.recordings[0].early == 24
    for _ in range(20):
        x = numbers(tokens, 256)
        assert torch.equal(run(x), model(x))


@pytest.mark.parametrize("scheme", ["int8", "fp8", "fp8/int4", "int4:64", "int4:128/fp8"])
def test_quantized_chains_too(scheme: str, device: torch.device) -> None:
    model = nn.Sequential(*(quantized(scheme) for _ in range(6))).eval()
    run = capture(model, numbers(16, 256))
    assert run.recordings[0].early >= 6
    for _ in range(10):
        x = numbers(16, 256)
        assert torch.equal(run(x), model(x))


def test_a_kernel_that_starts_early_waits_for_a_slow_one(device: torch.device) -> None:
    """The first product runs some hundred microseconds, the others a few: without a wait those
    would read what the replay before it left there."""
    slow, quick = chain(1, 8192), chain(4, 256)
    first, last = slow[0], nn.Sequential(*quick)

    def fn(x: Tensor) -> Any:
        return last(first(x)[:64, :256])  # A view: rows that are apart, read in place.

    x = numbers(2048, 8192)
    run = capture(fn, x)
    assert run.recordings[0].early == 5
    for _ in range(20):
        x = numbers(2048, 8192)
        assert torch.equal(run(x), fn(x))


def test_memory_that_one_kernel_reads_is_not_written_by_the_next_too_soon(
    device: torch.device,
) -> None:
    """The quick product writes where the slow one reads, since that memory is free by then."""
    slow = chain(1, 4096)[0]
    quick = SparseLinear.from_linear(dense_layer(4096, 64))

    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        wide = slow(x * 1)
        return wide, quick(y)

    run = capture(fn, (numbers(1024, 4096), numbers(1024, 64)))
    for _ in range(10):
        x, y = numbers(1024, 4096), numbers(1024, 64)
        for found, right in zip(run(x, y), fn(x, y), strict=True):
            assert torch.equal(found, right)


@pytest.mark.parametrize("tokens", [1, 5, 16, 17, 60, 64])
def test_fewer_tokens_than_a_bucket(tokens: int, device: torch.device) -> None:
    model = chain(3)
    fuse_activations(model)
    run = capture(model, numbers(64, 256), buckets=(16, 32, 64))
    assert run.buckets == (16, 32, 64)
    x = numbers(tokens, 256)
    bucket = next(each for each in run.buckets if each >= tokens)
    padded = torch.zeros(bucket, 256, device=device, dtype=torch.bfloat16)
    padded[:tokens] = x
    assert torch.equal(run(x), model(padded)[:tokens])


def test_more_tokens_run_eagerly_and_say_so(device: torch.device) -> None:
    model = chain(2)
    run = capture(model, numbers(16, 256), buckets=(16,))
    x = numbers(40, 256)
    with pytest.warns(UserWarning, match="40 tokens, and at most 16 were captured"):
        assert torch.equal(run(x), model(x))
    assert run(x[:0]).shape == (0, 256)


def test_weights_changed_in_place_are_seen_and_replaced_ones_after_recapture(
    device: torch.device,
) -> None:
    model, other, x = chain(2), chain(2), numbers(16, 256)
    run = capture(model, x)
    before = run(x)
    model.load_state_dict(other.state_dict())
    assert torch.equal(run(x), other(x))
    assert not torch.equal(before, other(x))
    model.load_state_dict(copy.deepcopy(chain(2)).state_dict(), assign=True)
    run.recapture()
    assert torch.equal(run(x), model(x))


def test_blocks_that_change_are_seen_by_their_graph(device: torch.device) -> None:
    """Their layout is a copy too; it is written again in place by the next call outside."""
    keep = torch.rand(32, 32, device=device) < 0.1
    dense = torch.randint(1, 3, (2048, 2048), device=device).bfloat16()
    dense *= keep.repeat_interleave(64, 0).repeat_interleave(64, 1)
    layer = SparseLinear(BSR.from_dense(dense, (64, 64)))
    x = torch.randint(-2, 3, (1024, 2048), device=device).bfloat16()
    assert layer.plan(x).name == "kernel"
    run = capture(layer, x)
    assert torch.equal(run(x), layer(x))
    layer.values.mul_(2)
    with pytest.warns(UserWarning, match="has changed"):
        twice = run(x)
    assert torch.equal(twice, layer(x))
    assert run.plan(x).name == "graph"
    assert torch.equal(run(x), twice)


@pytest.mark.parametrize("fmt", ["csr", "nm"])
def test_a_decoded_copy_lives_and_its_change_is_seen(fmt: str, device: torch.device) -> None:
    """Layers without a kernel multiply by a copy, which a change of the weight would free."""
    dtype = torch.float32 if fmt == "nm" else torch.bfloat16
    layers = [SparseLinear.from_linear(dense_layer(256, 256).to(dtype), fmt) for _ in range(2)]
    model, x = layers[0], numbers(16, 256).to(dtype)
    if model.plan(x).name == "kernel":
        pytest.skip("this layer has a kernel by now")
    run = capture(model, x)
    assert len(run.recordings[0].held) == 1
    assert torch.equal(run(x), model(x))
    model.load_state_dict(layers[1].state_dict())
    junk = [torch.full((256, 256), 7.0, device=device, dtype=dtype) for _ in range(20)]
    with pytest.warns(UserWarning, match="has changed"):
        assert torch.equal(run(x), layers[1](x))
    run.recapture()
    assert torch.equal(run(x), layers[1](x))
    assert len(junk) == 20


def test_autocast_is_that_of_the_capture(device: torch.device) -> None:
    linear = nn.Linear(256, 256, device=device)
    x = torch.randn(16, 256, device=device)
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        run = capture(linear, x)
        inside = linear(x)
    junk = [torch.full((256, 256), 7.0, device=device).bfloat16() for _ in range(20)]
    with torch.autocast("cuda", torch.bfloat16):
        assert torch.equal(run(x), inside)
    with pytest.warns(UserWarning, match="autocast"):
        assert run(x).dtype == torch.float32
    assert len(junk) == 20


def test_threads_capture_one_after_the_other(device: torch.device) -> None:
    models = [chain(4) for _ in range(4)]
    inputs = [numbers(16, 256) for _ in models]
    with ThreadPoolExecutor(4) as pool:
        runs = list(pool.map(capture, models, inputs))
    for run, model, x in zip(runs, models, inputs, strict=True):
        assert run.recordings[0].early == 4
        assert torch.equal(run(x), model(x))


def test_a_weight_that_the_function_writes_is_not_read_early(device: torch.device) -> None:
    model = chain(2)
    first, second = model[0], model[2]
    spare = second.values.clone()

    def fn(x: Tensor) -> Any:
        y = first(x)
        second.values.copy_(spare)
        return second(y)

    run = capture(fn, numbers(16, 256))
    assert run.recordings[0].early == 1
    for _ in range(10):
        spare.copy_(spare.roll(1))
        x = numbers(16, 256)
        assert torch.equal(run(x), fn(x))


def test_nothing_waits_for_the_gpu(device: torch.device) -> None:
    model, x = chain(3), numbers(16, 256)
    run = accelerate(model, x, buckets=(16, 64))
    want = run(x)
    with nothing_waits():
        found = run(x)
    assert torch.equal(found, want)


def test_a_hundred_captures_leave_no_memory_behind(device: torch.device) -> None:
    model, dense = chain(2), nn.Linear(256, 256, device=device, dtype=torch.bfloat16)
    both = nn.Sequential(model, dense).eval()

    def once() -> int:
        capture(both, numbers(16, 256)).release()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()

    once()
    before = once()
    assert max(once() for _ in range(100)) <= before


def test_a_capture_inside_a_capture_is_refused_and_the_outer_one_goes_on(
    device: torch.device,
) -> None:
    model, x = chain(1), numbers(16, 256)
    want = model(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(UnsupportedError, match="inside the capture of another"):
            capture(model, x)
        y = model(x)
    y.zero_()
    graph.replay()
    assert torch.equal(y, want)


def test_a_captured_function_may_be_called_on_another_stream(device: torch.device) -> None:
    model, x = chain(3), numbers(16, 256)
    run, want = capture(model, x), model(x)
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        found = run(x)
    torch.cuda.current_stream().wait_stream(stream)
    assert torch.equal(found, want)


def test_a_graph_made_in_inference_mode_serves_outside(device: torch.device) -> None:
    model, x = chain(2), numbers(16, 256)
    with torch.inference_mode():
        run = capture(model, x)
        inside, want = run(x), model(x)
    assert torch.equal(inside, want)
    assert torch.equal(run(x), want)


def test_the_operators_alone(device: torch.device) -> None:
    """Rows to codes, then a product with an activation and a residual; no layer around them."""
    w = NM.from_dense(dense_layer(256, 256).weight.data)

    def fn(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        codes, scales = quantize_rows(x, torch.int8)
        return codes, scales, spmm_nm(w, x, act="silu", residual=x)

    run = capture(fn, numbers(16, 256))
    assert run.recordings[0].early == 2
    x = numbers(16, 256)
    for found, right in zip(run(x), fn(x), strict=True):
        assert torch.equal(found, right)


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("scheme", [None, "int8", "fp8"])
def test_a_whole_decode_step_of_transformers(
    scheme: str | None, fuse: bool, device: torch.device
) -> None:
    """The tokens of a captured step, a static cache included, are those of the step as it is."""
    from hopsparse.models.generate import Generator
    from hopsparse.models.opened import OpenedModel
    from tests.helpers.tiny_models import SIZES, byte_tokenizer

    transformers = pytest.importorskip("transformers")
    sizes = SIZES | {"hidden_size": 128, "head_dim": 32, "intermediate_size": 256}
    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes)).to(torch.bfloat16)
    hopsparse.sparsify(model, hopsparse.Recipe("2:4", "magnitude", scheme=scheme))
    model = model.to(device).eval().requires_grad_(False)
    source = OpenedModel("tiny", model, byte_tokenizer(), "sparse", 0, {})
    writer, prompt = Generator(source, 64, fuse), [5, 6, 7, 8]
    found = list(writer.tokens(prompt, max_new_tokens=50))
    assert len(set(found)) > 5  # Position, cache and token all count.
    step = writer._step
    assert isinstance(step, Captured)
    # Of each block: q, k, v and o; gate, up and down.
    assert step.recordings[0].early >= 3 * (4 if fuse else 7)
    writer._step = writer._forward
    assert list(writer.tokens(prompt, max_new_tokens=50)) == found
