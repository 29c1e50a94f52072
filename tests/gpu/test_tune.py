"""A small layer tuned end to end, and a layer that is ready before its first call."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from hopsparse.compiler import cache as compiler_cache
from hopsparse.errors import UnsupportedError
from hopsparse.formats import NM, NMPattern
from hopsparse.nn import SparseLinear
from hopsparse.ops import spmm_nm
from hopsparse.ops.spmm_nm import device as spmm_nm_device
from hopsparse.ops.spmm_nm import op as spmm_nm_op
from hopsparse.ops.spmm_nm import plan, prepare
from hopsparse.ops.spmm_nm.kernel import Config
from hopsparse.ops.spmm_nm.plan import (
    CANDIDATES,
    DENSE,
    Problem,
    candidates,
    choices,
    key_of,
    versions,
)
from hopsparse.ops.spmm_nm.tuning import (
    Calls,
    Layer,
    measured_problem,
    named_candidates,
    tune_problem,
)
from hopsparse.prune import magnitude
from hopsparse.tune import Machine, Measured, Store, tune

OUT, K, TOKENS = 512, 512, 100
PROBLEM = Problem(TOKENS, OUT, K)


@pytest.fixture
def layer(device: torch.device) -> SparseLinear:
    weight = torch.randint(-3, 4, (OUT, K), device=device).float()
    dense = magnitude(weight, NMPattern(2, 4)).bfloat16()
    return SparseLinear(NM.from_dense(dense))


def inputs(tokens: int, device: torch.device) -> Tensor:
    """Small integers: every tile gives the same bits."""
    return torch.randint(-2, 3, (tokens, K), device=device).bfloat16()


def test_the_winner_is_what_runs_and_nothing_is_measured_twice(
    here: Machine, layer: SparseLinear, device: torch.device
) -> None:
    ranking = tune_problem(PROBLEM, "bfloat16", device=device)
    assert ranking.failed == {}
    assert ranking.unmeasured == ()
    suited = candidates(measured_problem(PROBLEM), here.sm_count)
    assert set(ranking.timed) == {*versions("bfloat16", suited), DENSE}
    assert all(0 < each.us < 1000 for each in ranking.measured.values())

    fastest = next(name for name in ranking.order if name != DENSE)
    tile = versions("bfloat16")[fastest]
    for tokens in (65, TOKENS, 128):
        told = plan(layer.matrix, inputs(tokens, device)).describe()
        assert f"tile {tile.name}, tuned" in told
    assert "predicted" in layer.plan(inputs(129, device)).describe()
    launch = spmm_nm_device.launch_for(
        PROBLEM, torch.bfloat16, spmm_nm_device.Epilogue(torch.bfloat16), device.index
    )
    assert launch.config == tile

    again = tune_problem(replace(PROBLEM, tokens=70), "bfloat16", device=device)
    assert again.timed == ()
    assert again.measured == ranking.measured


def test_a_launch_that_was_planned_before_goes_by_the_new_result(
    here: Machine, layer: SparseLinear, device: torch.device
) -> None:
    x = inputs(TOKENS, device)
    y = layer(x)
    tune_problem(PROBLEM, "bfloat16", device=device)
    assert torch.equal(layer(x), y)
    launch = spmm_nm_device.launch_for(
        PROBLEM, torch.bfloat16, spmm_nm_device.Epilogue(torch.bfloat16), device.index
    )
    assert f"tile {launch.config.name}, tuned" in plan(layer.matrix, x).describe()


def test_a_wrong_tile_is_dropped_and_never_timed(here: Machine, device: torch.device) -> None:
    stands = measured_problem(PROBLEM)
    tiles = candidates(stands, here.sm_count)[:4]
    victim = tiles[1]
    steps = Layer(stands, "bfloat16", device).steps()

    def prepared(config: Config | None) -> Calls:
        """One tile forgets the last out-feature."""
        calls = steps.prepare(config)
        if config != victim:
            return calls

        def forget() -> Tensor:
            y = calls[0]()
            y[:, -1] = 0
            return y

        return [forget, *calls[1:]]

    key = key_of(PROBLEM, "bfloat16", here)
    named = named_candidates(PROBLEM, "bfloat16", here.sm_count, tiles)
    ranking = tune(Store.default(), key, named, replace(steps, prepare=prepared))
    name = next(name for name, config in versions("bfloat16").items() if config == victim)
    assert name not in ranking.timed
    assert name not in ranking.order
    assert "times the bound, so it was not timed" in ranking.measured[name].error
    assert len(ranking.timed) == len(tiles)  # the other three, and dense
    assert Store.default().best(key, [name]) is None


def test_a_new_tile_is_measured_beside_the_fastest_alone(
    here: Machine, device: torch.device
) -> None:
    tiles = [config for config in CANDIDATES if config.cluster == 1]
    first = tune_problem(PROBLEM, "bfloat16", device=device, configs=tiles[-4:])
    assert len(first.timed) == 5
    more = tune_problem(PROBLEM, "bfloat16", device=device, configs=tiles[-5:])
    assert more.timed == (next(iter(versions("bfloat16", tiles[-5:-4]))),)
    assert all(more.measured[name] == first.measured[name] for name in first.measured)


@pytest.mark.parametrize("is_tuned", [False, True])
def test_nothing_is_compiled_or_loaded_after_it_was_prepared(
    is_tuned: bool,
    here: Machine,
    layer: SparseLinear,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    most = 600
    if is_tuned:  # a tile that the model chooses nowhere here
        chosen = choices(Problem(most, OUT, K), here.sm_count)
        name = next(name for name, each in versions("bfloat16").items() if each not in chosen)
        key = key_of(Problem(40, OUT, K), "bfloat16", here)
        Store.default().put(key, {name: Measured(1.0, 1.0, 1.0)})
    layer.prepare(max_tokens=most)

    def refuse(*arguments: object) -> None:
        raise AssertionError("compiled after it was prepared")

    monkeypatch.setattr(compiler_cache, "compile_unit", refuse)
    # Nor read from the cache: a kernel is looked up there only where it is not loaded.
    monkeypatch.setattr(compiler_cache.KernelCache, "get", refuse)
    for tokens in range(1, most + 1):
        layer(inputs(tokens, device))
    torch.cuda.synchronize()


def test_epilogues_are_prepared_on_their_own(
    here: Machine, layer: SparseLinear, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    w = layer.matrix
    assert isinstance(w, NM)
    found = prepare(w, 64, act="silu", residual=True, out_dtype=torch.float32)
    assert set(found) == set(choices(Problem(64, OUT, K), here.sm_count))

    def refuse(*arguments: object) -> None:
        raise AssertionError("compiled after it was prepared")

    monkeypatch.setattr(compiler_cache.KernelCache, "get", refuse)
    for tokens in (1, 16, 17, 64):
        residual = torch.zeros(tokens, OUT, device=device)
        x = inputs(tokens, device)
        spmm_nm(w, x, act="silu", residual=residual, out_dtype=torch.float32)
    assert plan(w, inputs(64, device)).name == "kernel"


def exact(x: Tensor, weight: Tensor) -> Tensor:
    """The product of small integers, rounded once."""
    return (x.double() @ weight.double().T).bfloat16()


@pytest.fixture
def dense_won(here: Machine) -> None:
    """As if dense had been measured to be faster for 65 to 128 tokens."""
    tile = next(iter(versions("bfloat16", candidates(measured_problem(PROBLEM), here.sm_count))))
    times = {tile: Measured(6.6, 6.6, 6.6), DENSE: Measured(5.5, 5.5, 5.5)}
    Store.default().put(key_of(PROBLEM, "bfloat16", here), times)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Token counts of the calls that ran the kernel."""
    seen: list[int] = []
    run = spmm_nm_device.run

    def noted(w: NM, x: Tensor, *rest: object) -> Tensor:
        seen.append(x.numel() // K)
        return run(w, x, *rest)

    monkeypatch.setattr(spmm_nm_op, "_run", lambda: noted)
    monkeypatch.setattr(spmm_nm_device, "run", noted)
    return seen


@pytest.mark.usefixtures("dense_won")
def test_a_layer_runs_dense_where_that_was_measured_to_win(
    layer: SparseLinear, launched: list[int], device: torch.device
) -> None:
    for tokens in (64, 65, TOKENS, 128, 129):
        x = inputs(tokens, device)
        told, runs_dense = layer.plan(x).describe(), 64 < tokens < 129
        assert ("dense: tuned: 5.5 us against 6.6 of the fastest tile" in told) == runs_dense
        assert (f"decoded once and kept, {2 * OUT * K} bytes" in told) == runs_dense
        assert plan(layer.matrix, x).name == "kernel"
        y = layer(x)
        assert torch.equal(y, exact(x, layer.to_dense()))
        assert torch.equal(y, spmm_nm(layer.matrix, x))
    assert layer._decoded is not None
    # The layer twice, the function every time.
    assert launched == [64, 64, 65, TOKENS, 128, 129, 129]
    launched.clear()
    layer.keep_decoded = False
    x = inputs(TOKENS, device)
    assert layer.plan(x).name == "kernel"
    assert torch.equal(layer(x), exact(x, layer.to_dense()))
    assert launched == [TOKENS]


@pytest.mark.usefixtures("dense_won")
def test_gradients_and_autocast_where_dense_won(
    layer: SparseLinear, launched: list[int], device: torch.device
) -> None:
    x = inputs(TOKENS, device).requires_grad_()
    layer(x).sum().backward()
    assert x.grad is not None
    ones = torch.ones(TOKENS, OUT, device=device)
    assert torch.equal(x.grad, exact(ones, layer.to_dense().T))
    with torch.autocast("cuda", torch.float16):
        y = layer(x.detach().float())
    assert torch.equal(y, layer(x.detach()).half())
    assert launched == []
    layer.values = torch.nn.Parameter(layer.values)
    layer(x.detach()).sum().backward()
    assert layer.values.grad is not None
    assert launched == [TOKENS]


@pytest.mark.usefixtures("dense_won")
def test_a_compiled_layer_is_one_graph_of_the_operator_where_dense_won(
    layer: SparseLinear, device: torch.device
) -> None:
    nodes: list[list[object]] = []

    def note(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> torch.fx.GraphModule:
        nodes.append([node.target for node in graph.graph.nodes if node.op == "call_function"])
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend=note)
    x = inputs(TOKENS, device)
    first = compiled(x)
    assert torch.equal(layer(x), first)
    assert torch.equal(compiled(x), first)  # What the eager call kept traces nothing anew.
    assert len(nodes) == 1
    assert torch.ops.hopsparse.spmm_nm.default in nodes[0]


@pytest.mark.usefixtures("dense_won")
def test_graphs_capture_the_kernel_and_follow_the_weight(
    layer: SparseLinear, launched: list[int], device: torch.device
) -> None:
    x = inputs(TOKENS, device)
    assert torch.equal(layer(x), exact(x, layer.to_dense()))
    assert launched == []
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer(x)
    assert launched == [TOKENS]
    layer.values.mul_(2)
    graph.replay()
    assert torch.equal(y, exact(x, layer.to_dense()))


def test_tuning_is_refused_inside_a_capture_which_goes_on(
    layer: SparseLinear, here: Machine, device: torch.device
) -> None:
    x = inputs(TOKENS, device)
    want = layer(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(UnsupportedError, match="while a CUDA graph is captured"):
            tune_problem(PROBLEM, "bfloat16", device=device)
        y = layer(x)
    y.zero_()
    graph.replay()
    assert torch.equal(y, want)
    assert not Store.default().get(key_of(PROBLEM, "bfloat16", here)).measured
