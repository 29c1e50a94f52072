"""What ranks keep survives them: bit by bit with as many, as their mean with others."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from hopsparse.errors import CheckpointError
from tests.dist.test_comm import all_equal, equal
from tests.helpers import comm_ranks
from tests.helpers.ranks import KILLED, on_ranks


@pytest.mark.parametrize("ranks", [2, 3])
def test_killed_and_resumed_is_uninterrupted_bit_by_bit(ranks: int, tmp_path: Path) -> None:
    """Rank 1 is killed two steps after the checkpoint; buckets are those of a first step again."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    expected = on_ranks(comm_ranks.resumable, ranks, whole, 8, 3, -1, False)
    died = on_ranks(comm_ranks.resumable, ranks, killed, 8, 3, 5, False)
    assert died[1] == KILLED
    assert isinstance(died[0], RuntimeError)
    found = on_ranks(comm_ranks.resumable, ranks, killed, 8, 3, -1, True)
    assert all(all_equal(list(pair)) for pair in zip(found, expected, strict=True))
    # Ranks keep different things, or the comparison would say little.
    assert not equal(found[0]["kept first.weight"], found[1]["kept first.weight"])


@pytest.mark.parametrize(("before", "after"), [(2, 4), (3, 2), (2, 1), (1, 2), (2, 2)])
def test_another_number_of_ranks_gets_the_mean(before: int, after: int, tmp_path: Path) -> None:
    kept = on_ranks(comm_ranks.saving, before, tmp_path)
    found = on_ranks(comm_ranks.loading, after, tmp_path)
    for key in ("residual.tensor", "velocity.tensor", "velocity.small"):
        if before == after:
            expected = [torch.from_numpy(each[key]) for each in kept]
        else:
            total = torch.from_numpy(kept[0][key])
            for each in kept[1:]:
                total = total + torch.from_numpy(each[key])
            expected = [total / before] * after
        assert all(equal(*pair) for pair in zip((each[key] for each in found), expected, strict=True))
    assert {int(each["steps.tensor"]) for each in found} == {3}
    assert all_equal([each["mean"] for each in found])
    assert (before == 1) != bool(kept[0]["residual.tensor"].any())


def test_torch_finds_nothing_for_another_number_of_ranks(tmp_path: Path) -> None:
    """It must not take half of what four ranks kept for all of it."""
    on_ranks(comm_ranks.saving, 4, tmp_path)
    for error in on_ranks(comm_ranks.loading_as_torch_does, 2, tmp_path):
        assert re.search(r"Missing key in checkpoint state_dict: comm\.\dof2\.", str(error))


def test_what_is_no_checkpoint_of_it_is_refused(tmp_path: Path) -> None:
    on_ranks(comm_ranks.saving, 1, tmp_path / "one")
    cases = [
        ((tmp_path / "none",), "No such file"),
        ((tmp_path / "one", "other"), "has no other.*, but comm"),
        ((tmp_path / "one", "comm", 8999), "tensor with 9000 values"),
    ]
    for given, told in cases:
        (error,) = on_ranks(comm_ranks.loading, 1, *given)
        assert isinstance(error, CheckpointError), error
        assert told in error.got
