"""FSDP2 over several processes: shards alone, and replicas of shards."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hopsparse.errors import ArgumentError, UnsupportedError
from hopsparse.measure.error import gamma
from tests.dist.test_comm import equal
from tests.helpers import comm_fsdp
from tests.helpers.comm_fsdp import Uneven, loss_of
from tests.helpers.ranks import on_ranks

# Replicas and shards; 0 replicas: gradients are exchanged between the shards.
MESHES = [(0, 2), (0, 3), (2, 1), (2, 2)]


def gradients_of(rank: int, step: int) -> dict[str, Tensor]:
    """What one process has without any FSDP."""
    model = Uneven()
    loss_of(model, rank, step).backward()
    return {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


def joined(found: list[dict[str, Tensor]], name: str) -> Tensor:
    """A parameter of the shards, in order."""
    return torch.cat([torch.as_tensor(each[name]).flatten() for each in found])


@pytest.mark.parametrize(("replicas", "shards"), MESHES)
def test_what_is_sent_whole_is_the_mean(replicas: int, shards: int) -> None:
    """Nothing is coded: FSDP's scaling and ours together must be one mean, within rounding."""
    ranks = max(replicas, 1) * shards
    found = on_ranks(
        comm_fsdp.stepped, ranks, replicas, shards, {"dense_below": 10**9}, 2
    )
    for step in range(2):
        own = [gradients_of(rank, step) for rank in range(ranks)]
        for name in own[0]:
            got = joined([each[step]["gradients"] for each in found[:shards]], name)
            stack = torch.stack([each[name].flatten().double() for each in own])
            bound = gamma(ranks + 2, torch.float32) * stack.abs().sum(0) / ranks
            assert bool(((got.double() - stack.mean(0)).abs() <= bound).all())
            if ranks == 2:  # one sum, and a division by two
                assert equal(got, (own[0][name] + own[1][name]).flatten() / 2)


@pytest.mark.parametrize(("replicas", "shards"), [(0, 3), (2, 2)])
@pytest.mark.parametrize("remainder", ["int4", None])
def test_nothing_is_lost(replicas: int, shards: int, remainder: str | None) -> None:
    ranks = max(replicas, 1) * shards
    options = {"k": 0.05, "remainder": remainder, "every": 2, "dense_below": 50}
    found = on_ranks(comm_fsdp.stepped, ranks, replicas, shards, options, 4)
    replica = [found[first : first + shards] for first in range(0, ranks, shards)]
    for name, parameter in Uneven().named_parameters():
        given, out, size = (torch.zeros(parameter.numel(), dtype=torch.float64) for _ in range(3))
        for step in range(4):
            for rank in range(ranks):
                gradient = gradients_of(rank, step)[name].flatten().double()
                given += gradient
                size += 2 * gradient.abs()
            for each in replica[1:]:
                one, other = (
                    joined([rank[step]["gradients"] for rank in part], name)
                    for part in (replica[0], each)
                )
                assert equal(one, other)
            mean = joined([rank[step]["gradients"] for rank in replica[0]], name).double()
            out += ranks * mean
            kept = _kept(replica, step, name, replicas)
            size += ranks * mean.abs() + 2 * kept.abs().sum(0)
        # As in test_comm; FSDP adds shards once more, and divides.
        bound = gamma(3 * ranks + 8, torch.float32) * size
        assert bool(((given - out - kept.sum(0)).abs() <= bound).all())
    assert found[0][-1]["sent"] < found[0][-1]["dense"]


def _kept(replica: list[Any], step: int, name: str, replicas: int) -> Tensor:
    """What all ranks kept of a parameter, one row each; whole parameters, or joined shards."""
    if replicas:
        # FSDP divides by the shards after the mean over the replicas: what is kept is a sum of
        # shards' ranks.
        rows = [joined([rank[step]["kept"] for rank in part], name) for part in replica]
    else:
        rows = [torch.as_tensor(rank[step]["kept"][name]).flatten() for rank in replica[0]]
    return torch.stack(rows).double()


@pytest.mark.parametrize(("replicas", "shards"), [(0, 2), (2, 1)])
def test_momentum_of_what_was_sent_is_gone(replicas: int, shards: int) -> None:
    """41 x 37 values and none of them zero: a quarter of a part, and of each part, is sent."""
    for found in on_ranks(comm_fsdp.masked, 2, replicas, shards):
        part = 21 * 37 if shards == 2 else 41 * 37
        assert found["inner.1.weight"] == shards * math.ceil(part / 4)


@pytest.mark.parametrize(("replicas", "shards"), [(0, 2), (2, 1)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision(replicas: int, shards: int, dtype: torch.dtype) -> None:
    assert on_ranks(comm_fsdp.low_precision, 2, replicas, shards, dtype) == [True, True]


@pytest.mark.parametrize(("replicas", "shards"), [(0, 2), (2, 1)])
def test_nan_is_passed_on_and_not_kept(replicas: int, shards: int) -> None:
    for found in on_ranks(comm_fsdp.with_nan, 2, replicas, shards):
        assert found == {"finite0": True, "finite1": False, "finite2": True}


@pytest.mark.parametrize(
    ("before", "after"), [((0, 2), (0, 3)), ((2, 2), (2, 1)), ((2, 1), (2, 2)), ((2, 2), (2, 2))]
)
def test_other_meshes_take_it_over(
    before: tuple[int, int], after: tuple[int, int], tmp_path: Path
) -> None:
    """Shards are put together, replicas averaged, and cut anew."""
    old, new = (max(mesh[0], 1) * mesh[1] for mesh in (before, after))
    kept = on_ranks(comm_fsdp.saved, old, *before, tmp_path)
    found = on_ranks(comm_fsdp.loaded, new, *after, tmp_path)
    if before == after:
        assert all(equal(one[key], two[key]) for one, two in zip(kept, found, strict=True) for key in one)
        return
    for name in ("residual.first.weight", "velocity.scale", "residual.inner.1.weight"):
        wholes = [torch.as_tensor(each[name]) for each in kept]
        if before[0]:
            size = before[1]
            wholes = [joined(kept[i : i + size], name) for i in range(0, old, size)]
        total = wholes[0].clone()
        for each in wholes[1:]:
            total += each
        expected = total / len(wholes)
        assert bool(expected.any())
        for first in range(0, new, after[1]):
            got = joined(found[first : first + after[1]], name) if after[0] else found[first][name]
            assert equal(got, expected)


@pytest.mark.parametrize(
    ("work", "kind", "told"),
    [
        (comm_fsdp.native, UnsupportedError, "1 meshes of \\[2\\] dimensions"),
        (comm_fsdp.by_columns, UnsupportedError, "weight: \\(Shard\\(dim=1\\),\\)"),
        (comm_fsdp.not_sharded, ArgumentError, "a Uneven without sharded modules"),
    ],
)
def test_other_shardings_are_refused(work: Any, kind: type[Exception], told: str) -> None:
    for error in on_ranks(work, 2):
        with pytest.raises(kind, match=told):
            raise error


def test_a_parameter_without_gradient_is_told() -> None:
    for error in on_ranks(comm_fsdp.unused, 2, False):
        assert isinstance(error, UnsupportedError)
        assert error.got == "FSDP reduces 72 values of weight, bias, extra"
    assert on_ranks(comm_fsdp.unused, 2, True) == [[0.0] * 3, [0.0] * 3]
