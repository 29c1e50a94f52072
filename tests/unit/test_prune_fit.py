"""Searches, orders, damping and grids of one weight."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from hopsparse.errors import ArgumentError
from hopsparse.formats import NMPattern, parse_form, parse_pattern, parse_scheme
from hopsparse.prune import Recipe, Statistics, admm, keep_mask, prune_layer, refit, sparsegpt
from hopsparse.prune.rounding import descend_on_grid
from hopsparse.quant import expand_scales, round_weight, to_codes, weight_scales

K, OUT = 64, 24


def correlated(tokens: int = 600, k: int = K) -> Tensor:
    draw = torch.Generator().manual_seed(5)
    mix = torch.randn(k, k, generator=draw) / k**0.5
    x = torch.randn(tokens, k, generator=draw) @ (mix @ mix.T)
    x[:, ::7] *= 5
    return x


def weight(k: int = K) -> Tensor:
    return torch.randn(OUT, k, generator=torch.Generator().manual_seed(6))


def lost(old: Tensor, new: Tensor, hessian: Tensor) -> float:
    gap = (old - new).double()
    return float(((gap @ hessian.double()) * gap).sum())


@pytest.mark.parametrize("text", ["2:4", "6:8", "4:6", "unstructured:0.5"])
def test_admm_obeys_the_pattern_and_loses_less_than_greedy(text: str) -> None:
    pattern = parse_pattern(text)
    k = 48 if text == "4:6" else K
    x, w = correlated(k=k), weight(k)
    hessian = x.T @ x / len(x)
    greedy = refit(w, sparsegpt(w, pattern, hessian), hessian)
    found = refit(w, admm(w, pattern, hessian), hessian)
    kept = found != 0
    assert torch.equal(keep_mask(found.abs(), pattern) & kept, kept)
    assert abs(float(kept.float().mean()) - (1 - pattern.sparsity)) < 0.01
    assert lost(w, found, hessian) < lost(w, greedy, hessian)


def test_admm_finds_the_best_mask_of_a_small_problem() -> None:
    """Two groups of 1:2 have four masks a row: all are tried."""
    x = correlated(k=4)
    hessian = (x.T @ x / len(x)).double()
    hessian += 1e-3 * hessian.diagonal().mean() * torch.eye(4)
    w = torch.randn(50, 4, generator=torch.Generator().manual_seed(1)).double()
    best = torch.full((50,), torch.inf, dtype=torch.float64)
    for mask in ([0, 2], [0, 3], [1, 2], [1, 3]):
        inside = hessian[mask][:, mask]
        new = torch.zeros_like(w)
        new[:, mask] = torch.linalg.solve(inside, (w @ hessian)[:, mask].T).T
        gap = w - new
        best = torch.minimum(best, ((gap @ hessian) * gap).sum(1))
    solved = {}
    for search in (admm, sparsegpt):
        found = refit(w, search(w, NMPattern(1, 2), hessian, damping=1e-9), hessian, damping=1e-9)
        gap = w - found
        rows = ((gap @ hessian) * gap).sum(1)
        assert (rows > best - 1e-9).all()
        solved[search] = int((rows < best * (1 + 1e-6) + 1e-9).sum())
    assert solved[admm] > 33
    assert solved[admm] >= solved[sparsegpt]


def test_admm_refuses_what_it_cannot_use() -> None:
    with pytest.raises(ArgumentError):
        admm(weight(), NMPattern(2, 4), torch.eye(8))
    with pytest.raises(ArgumentError):
        admm(weight(), NMPattern(2, 4), torch.full((K, K), torch.nan))


@pytest.mark.parametrize("text", ["int8", "fp8", "int4:32", "int4:64"])
def test_descent_on_a_grid_never_loses_more_and_stays_on_it(text: str) -> None:
    scheme = parse_scheme(text)
    x, w = correlated(), weight()
    hessian = x.T @ x / len(x)
    pruned = refit(w, sparsegpt(w, NMPattern(2, 4), hessian), hessian)
    scales = weight_scales(pruned, scheme, hessian.diagonal())
    nearest = round_weight(pruned, scheme, scales)
    errors = [lost(w, nearest, hessian)]
    for sweeps in (1, 2, 3):
        found = descend_on_grid(
            w, nearest, hessian, scales, scheme, keep=pruned != 0, damping=1e-9, sweeps=sweeps
        )
        errors.append(lost(w, found, hessian))
        steps = expand_scales(scales, K, scheme)
        assert torch.equal(to_codes(found, steps, scheme.weights) * steps, found)
        assert not found[pruned == 0].any()
    # Equal where the first sweep is already done; float32 sums in another order may differ.
    assert all(b <= a * (1 + 1e-5) for a, b in pairwise(errors))
    assert errors[1] < errors[0]


def test_the_damping_that_is_searched_is_the_best_on_tokens_kept_out() -> None:
    """Few tokens and many features: the Hessian is singular, and much damping pays."""
    x = correlated(tokens=40)
    losses, chosen = {}, None
    for damping in (0.001, 0.01, 0.1, "search"):
        statistics = Statistics(K, holdout=8)
        statistics.add(x)
        kept_out = statistics.held_out
        assert kept_out is not None
        layer = nn.Linear(K, OUT, bias=False)
        layer.weight.data.copy_(weight())
        report = prune_layer("x", layer, statistics, Recipe("2:4", damping=damping))
        losses[damping] = lost(weight(), layer.weight.detach(), kept_out.hessian())
        chosen = report.damping
    assert losses["search"] == min(losses.values())
    assert losses[chosen] == losses["search"]


@pytest.mark.parametrize(("asked", "told"), [("search", 0.001), (0.001, 0.001), (0.01, None)])
def test_a_damping_that_was_not_enough_is_told(asked: float | str, told: float | None) -> None:
    """Two inputs that are nearly one, and a rounding error that makes their Hessian indefinite."""
    statistics = Statistics(2, holdout=2)
    statistics.add(torch.ones(8, 2))
    # Its smallest eigenvalue is -0.005 times the mean of its diagonal.
    statistics._inputs.gram[1, 0] *= 1.005
    layer = nn.Linear(2, 4, bias=False)
    report = prune_layer("x", layer, statistics, Recipe("1:2", damping=asked))
    assert report.damping == 0.01
    assert report.note == (f"the Hessian needed damping 0.01 instead of {told}" if told else "")


def test_order_of_activation_changes_the_result_and_keeps_the_pattern() -> None:
    x = correlated()
    results = {}
    for order in ("natural", "activation"):
        statistics = Statistics(K)
        statistics.add(x)
        layer = nn.Linear(K, OUT, bias=False)
        layer.weight.data.copy_(weight())
        assert prune_layer("x", layer, statistics, Recipe("2:4", order=order)).density == 0.5
        results[order] = layer.weight.detach()
        assert (results[order].view(OUT, -1, 4) != 0).sum(-1).max() == 2
    assert not torch.equal(*results.values())


@pytest.mark.parametrize("text", ["2:4+int8", "2:4+fp8", "6:8+int4:32", "dense+int4:64"])
@pytest.mark.parametrize("search", ["greedy", "admm"])
def test_forms_with_a_scheme_hand_out_scales_that_reproduce_the_weight(
    text: str, search: str
) -> None:
    form = parse_form(text)
    assert form.scheme is not None
    statistics = Statistics(K)
    statistics.add(correlated())
    layer = nn.Linear(K, OUT, bias=False)
    scales: dict[str, Tensor] = {}
    recipe = Recipe(forms={"*": form}, search=search)
    prune_layer("x", layer, statistics, recipe, scales_out=scales)
    found = layer.weight.detach()
    assert torch.equal(round_weight(found, form.scheme, scales["x"]), found)


def test_the_damping_that_is_searched_aims_at_the_target_of_the_tokens_kept_out() -> None:
    """Little damping fits the noise of a target that the inputs do not explain."""
    draw = torch.Generator().manual_seed(8)
    x = correlated(tokens=90)
    target = x @ weight().T + 3 * torch.randn(90, OUT, generator=draw)
    errors, chosen = {}, None
    for damping in (0.001, 0.01, 0.1, "search"):
        statistics = Statistics(K, holdout=8)
        statistics.add(x)
        statistics.add_stream("x", target, x)
        layer = nn.Linear(K, OUT, bias=False)
        layer.weight.data.copy_(weight())
        chosen = prune_layer("x", layer, statistics, Recipe("2:4", damping=damping)).damping
        gap = target[::8] - x[::8] @ layer.weight.detach().T
        errors[damping] = float(gap.norm() / target[::8].norm())
    assert errors["search"] == errors[chosen]
    assert errors["search"] <= min(errors.values()) * (1 + 1e-4)
    assert errors["search"] < errors[0.001]
