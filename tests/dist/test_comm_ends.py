"""A job ends on every rank, however late one comes; and if one is killed, everywhere."""

from __future__ import annotations

import time

import torch.distributed as dist

from hopsparse.comm import leave
from tests.helpers import comm_ends
from tests.helpers.ranks import KILLED, on_ranks


def test_the_last_rank_ends_as_the_first_does() -> None:
    started = time.monotonic()
    found = on_ranks(comm_ends.left, 3)
    assert found == [False] * 3
    assert time.monotonic() - started > comm_ends.LATE_S


def test_leaving_nothing_is_nothing() -> None:
    assert not dist.is_initialized()
    leave()


def test_a_store_that_outlives_a_group_serves_the_next_one_too() -> None:
    started = time.monotonic()
    found = on_ranks(comm_ends.left_twice, 2)
    assert found == [False] * 2
    assert time.monotonic() - started > 2 * comm_ends.LATE_S


def test_a_rank_that_dies_in_a_backward_pass_is_noticed() -> None:
    """Its exchange is finished by a callback, which must tell the backward pass of the other."""
    first, second = on_ranks(comm_ends.dying_in_backward, 2)
    assert second == KILLED
    assert isinstance(first, RuntimeError)
    # It is gloo that says so, and not who read what never came.
    assert "gloo" in str(first)
    assert "VerificationError" not in str(first)
