"""Which graph a call takes, what it copies and returns, and what is refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hopsparse
from hopsparse.errors import ArgumentError
from hopsparse.graphs import Captured, accelerate, capture, fuse_activations
from hopsparse.graphs.captured import Recording, with_tokens
from hopsparse.launch import EarlyStarts, Held, hold, holding, starts_early
from hopsparse.nn import SparseLinear

K = 4


def double(x: Tensor, scale: Tensor) -> dict[str, Tensor]:
    return {"y": x * scale * 2}


def recorded(
    buckets: tuple[int, ...], calls: list[int], example: tuple[Tensor, ...]
) -> Mapping[int, Recording]:
    """Graphs of `double` that run in Python: a replay reads and writes memory that stays."""
    found = {}
    for bucket in buckets:
        x = torch.full((bucket or len(example[0]), K), 7.0)
        scale, y = torch.empty(1), torch.empty_like(x)

        def replay(x: Tensor = x, scale: Tensor = scale, y: Tensor = y, n: int = bucket) -> None:
            calls.append(n)
            torch.mul(x * scale, 2, out=y)

        found[bucket] = Recording((x, scale), {"y": y}, replay, early=3)
    return found


def captured(
    *buckets: int, reuse: bool = False, on_release: Callable[[], None] | None = None
) -> tuple[Captured, list[int]]:
    calls: list[int] = []
    example = torch.ones(8, K), torch.ones(1)
    record = partial(recorded, buckets or (0,), calls, example)
    made = Captured(double, example, record, reuse_outputs=reuse, on_release=on_release)
    return made, calls


def numbers(tokens: int) -> Tensor:
    return torch.arange(tokens * K, dtype=torch.float32).view(tokens, K)


@pytest.mark.parametrize(("tokens", "taken"), [(1, 2), (2, 2), (3, 8), (8, 8)])
def test_a_call_takes_the_next_larger_graph(tokens: int, taken: int) -> None:
    run, calls = captured(8, 2)
    x, scale = numbers(tokens), torch.tensor([3.0])
    y = run(x, scale)["y"]
    assert (calls, run.buckets) == ([taken], (2, 8))
    assert torch.equal(y, x * 6)
    assert run.plan(x, scale).name == "graph"
    assert f"of {taken} tokens, 3 launches" in run.plan(x, scale).why


@pytest.mark.parametrize(
    ("x", "why"),
    [
        (numbers(9), "9 tokens, and at most 8 were captured"),
        (numbers(2).double(), "input 0 is torch.float64"),
        (numbers(2)[:, :3], r"input 0 is \[2, 3\]"),
    ],
)
def test_what_fits_no_graph_runs_eagerly_and_says_so_once(x: Tensor, why: str) -> None:
    run, calls = captured(2, 8)
    scale = torch.ones(1)
    with pytest.warns(UserWarning, match=why):
        assert torch.equal(run(x, scale)["y"], x * 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(run(x, scale)["y"], x * 2)
    assert calls == []
    assert run.plan(x, scale).name == "eager"


def test_inputs_that_are_none_are_refused_or_left_to_the_function() -> None:
    run, _ = captured(2)
    with pytest.raises(ArgumentError, match="inputs of a tensor on cpu, int"):
        run(numbers(2), 3)  # type: ignore[arg-type]
    with pytest.warns(UserWarning, match="0 inputs"), pytest.raises(TypeError):
        run()


def test_no_tokens_are_nothing_to_warn_of() -> None:
    run, calls = captured(2, 8)
    assert run(numbers(0), torch.ones(1))["y"].shape == (0, K)
    assert calls == []
    assert run.plan(numbers(0), torch.ones(1)).why == "no tokens"


def test_without_buckets_only_the_shapes_of_the_example_fit() -> None:
    run, calls = captured()
    x = numbers(8)
    assert torch.equal(run(x, torch.ones(1))["y"], x * 2)
    assert (calls, run.buckets) == ([0], ())
    assert run.plan(numbers(7), torch.ones(1)).name == "eager"
    assert run.plan(x).why == "1 inputs, and 2 were captured"


def test_results_are_copies_unless_memory_is_to_be_reused() -> None:
    for reuse in (False, True):
        run, _ = captured(2, reuse=reuse)
        first = run(numbers(2), torch.ones(1))["y"]
        before = first.clone()
        run(numbers(2) + 1, torch.ones(1))
        assert torch.equal(first, before) is not reuse


def test_inputs_in_the_memory_of_the_graph_are_not_copied() -> None:
    run, _ = captured(2, 8)
    x, scale = run.inputs_for(3)
    assert x.shape == (3, K)
    x.copy_(numbers(3))
    scale.fill_(5)
    assert torch.equal(run(x, scale)["y"], numbers(3) * 10)
    # The same place and shape, but not the same numbers: that is copied.
    square, _ = run.inputs_for(4)
    square.copy_(numbers(4))
    assert torch.equal(run(square.mT, scale)["y"], numbers(4).mT * 10)
    with pytest.raises(ArgumentError, match=r"inputs of 9 tokens.*\(2, 8\)"):
        run.inputs_for(9)


def test_inputs_in_each_others_memory_are_read_before_they_are_written() -> None:
    def subtract(a: Tensor, b: Tensor) -> Tensor:
        return a - b

    a, b, y = torch.empty(4), torch.empty(4), torch.empty(4)

    def replay() -> None:
        y.copy_(a - b)

    example = torch.ones(4), torch.ones(4)
    run = Captured(subtract, example, lambda: {0: Recording((a, b), y, replay)})
    a.fill_(5)
    b.fill_(2)
    assert torch.equal(run(b, a), torch.full((4,), -3.0))


def test_what_a_graph_copied_is_asked_for_at_every_call() -> None:
    current = [True]
    run, calls = captured(8)
    held = Held(torch.ones(1), lambda: current[0])
    run.recordings = {8: replace(run.recordings[8], held=(held,))}
    x, scale = numbers(3), torch.ones(1)
    assert torch.equal(run(x, scale)["y"], x * 2)
    current[0] = False
    with pytest.warns(UserWarning, match=r"decoded copy of has changed; recapture\(\)"):
        assert torch.equal(run(x, scale)["y"], x * 2)
    assert calls == [8]


def test_another_autocast_is_another_function() -> None:
    run, calls = captured(8)
    x, scale = numbers(3), torch.ones(1)
    before = torch.is_autocast_enabled("cuda")
    torch.set_autocast_enabled("cuda", not before)
    try:
        with pytest.warns(UserWarning, match="autocast"):
            run(x, scale)
    finally:
        torch.set_autocast_enabled("cuda", before)
    run(x, scale)
    assert calls == [8]


def test_a_failed_capture_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    run, _ = captured(8)
    monkeypatch.setattr(run, "_record", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run.recapture()
    assert run.plan(numbers(3), torch.ones(1)).why == "the last capture failed"


def test_layers_tell_a_capture_of_the_copies_they_read() -> None:
    copy = torch.ones(1)
    hold(copy, lambda: True)
    with holding() as found:
        hold(copy, lambda: False)
    assert [(each.copy is copy, each.is_current()) for each in found] == [(True, False)]


def test_a_release_frees_and_runs_eagerly() -> None:
    told: list[str] = []
    run, calls = captured(2, on_release=lambda: told.append("released"))
    run.release()
    assert torch.equal(run(numbers(2), torch.ones(1))["y"], numbers(2) * 2)
    assert (calls, told) == ([], ["released"])
    assert run.plan(numbers(2), torch.ones(1)).why == "the graphs were released"
    run.recapture()
    assert run.plan(numbers(2), torch.ones(1)).name == "graph"


def test_gradients_are_refused_and_none_are_made() -> None:
    run, _ = captured(2)
    x = numbers(2).requires_grad_()
    with pytest.raises(ArgumentError, match=r"requires a gradient.*x.detach"):
        run(x, torch.ones(1))
    with torch.no_grad():
        assert not run(x, torch.ones(1))["y"].requires_grad
    with pytest.raises(ArgumentError, match="requires a gradient"):
        capture(double, (x, torch.ones(1)))


@pytest.mark.parametrize(
    ("example", "buckets", "told"),
    [
        ((), None, "inputs of nothing"),
        ((torch.ones(1), 3), None, "inputs of a tensor on cpu, int"),
        ((torch.ones(1), torch.ones(1, device="meta")), None, "a tensor on meta"),
        (torch.ones(2, 2), (), r"buckets=\(\)"),
        (torch.ones(2, 2), (0, 2), r"buckets=\(0, 2\)"),
        (torch.ones(2, 2), (True,), r"buckets=\(True,\)"),
        (torch.ones(2, 2), 5, "buckets=5"),
        (torch.ones(2, 2), [1, "a"], r"buckets=\(1, 'a'\)"),
        (torch.ones(2, 2), [None, 4], r"buckets=\(None, 4\)"),
        (None, None, "inputs of NoneType"),
        (5, None, "inputs of int"),
        (torch.tensor(1.0), (1,), r"an example of shape \[\]"),
        (torch.ones(0, 2), (1,), r"an example of shape \[0, 2\]"),
    ],
)
def test_what_cannot_be_captured_is_refused(example: Any, buckets: Any, told: str) -> None:
    with pytest.raises(ArgumentError, match=told):
        capture(double, example, buckets=buckets)


def test_what_cannot_be_called_is_refused() -> None:
    with pytest.raises(ArgumentError, match="fn=None"):
        capture(None, torch.ones(1))  # type: ignore[arg-type]


def test_inputs_with_a_row_for_each_token() -> None:
    assert with_tokens([numbers(3), torch.ones(3), torch.ones(1), torch.tensor(3.0)]) == [
        *(True, True),
        *(False, False),
    ]


def layers() -> Any:
    torch.manual_seed(0)
    sparse = [SparseLinear.from_linear(nn.Linear(K, K), "csr") for _ in range(4)]
    shared = nn.ReLU()
    head = nn.Sequential(sparse[2], nn.SiLU(), nn.Linear(K, K), nn.ReLU())
    return nn.Sequential(
        *(sparse[0], nn.ReLU()),
        *(sparse[1], nn.GELU(approximate="tanh"), nn.ReLU()),
        head,
        *(sparse[3], shared, shared),
    ).eval()


def test_activations_behind_sparse_layers_are_fused_and_come_back() -> None:
    model, x = layers(), numbers(5)
    want, names = model(x), [type(each) for each in model.modules()]
    keys = list(model.state_dict())
    fused = fuse_activations(model)
    assert fused.count == 3
    assert [model[0].act, model[2].act, model[5][0].act, model[6].act] == [
        *("relu", "gelu_tanh", "silu"),
        None,
    ]
    assert "act=relu" in repr(model[0])
    assert torch.equal(model(x), want)
    assert list(model.state_dict()) == keys
    assert fuse_activations(model).count == 0
    fused.undo()
    fused.undo()
    assert [type(each) for each in model.modules()] == names
    assert torch.equal(model(x), want)


def test_a_sequential_with_a_forward_of_its_own_is_left_alone() -> None:
    class Residual(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            h: Tensor = self[0](x)
            relu: Tensor = self[1](h)
            return h + relu

    model = Residual(SparseLinear.from_linear(nn.Linear(K, K), "csr"), nn.ReLU())
    assert fuse_activations(model).count == 0


def test_an_activation_that_is_none_is_refused() -> None:
    layer = SparseLinear.from_linear(nn.Linear(K, 24), "csr")
    wrong: Any
    for wrong in ("Relu", "tanh", "none", "", "swiglu", nn.ReLU(), torch.relu):
        with pytest.raises(ArgumentError, match="act="):
            layer.act = wrong
    assert layer.act is None


def test_a_layer_with_a_hook_is_left_alone() -> None:
    model = layers()
    model[0].register_forward_hook(lambda *_: None)
    model[3].register_forward_pre_hook(lambda *_: None)
    assert fuse_activations(model).count == 1


def test_accelerate_captures_and_gives_back() -> None:
    model, x = layers(), numbers(5)
    want = model(x)
    run = hopsparse.accelerate(model, x, buckets=(8,))
    assert torch.equal(run(x), want)
    assert run.plan(x).why == "tensors are on cpu"
    assert model[0].act == "relu"
    run.release()
    assert model[0].act is None
    with pytest.raises(ArgumentError, match="in training mode"):
        accelerate(model.train(), x)
    with pytest.raises(ArgumentError, match="buckets="):
        accelerate(model.eval(), x, buckets=(0,))
    assert model[0].act is None


def test_only_weights_that_every_run_found_unchanged_start_early() -> None:
    kept, changed, gone = torch.ones(3), torch.ones(3), torch.ones(3)
    starts = EarlyStarts()
    assert not starts_early(kept)
    for run in range(2):
        with starts.watch():
            assert not starts_early(kept)
            changed.add_(1)
            assert not starts_early(changed)
            if run == 0:
                assert not starts_early(gone)
    with starts.use():
        assert starts_early(kept)
        assert starts_early()
        assert not starts_early(changed)
        assert not starts_early(kept, changed)
        assert not starts_early(gone)
        assert not starts_early(torch.ones(3))
    assert starts.allowed == 2
    assert not starts_early(kept)


def test_tensors_whose_changes_are_not_counted_never_start_early() -> None:
    with torch.inference_mode():
        weight = torch.ones(3)
    starts = EarlyStarts()
    for _ in range(2):
        with starts.watch():
            starts_early(weight)
    with starts.use():
        assert not starts_early(weight)


def test_a_run_without_launches_counts_as_a_run() -> None:
    weight, starts = torch.ones(3), EarlyStarts()
    with starts.watch():
        pass
    with starts.watch():
        starts_early(weight)
    with starts.use():
        assert not starts_early(weight)
