"""A job ends on every rank, however late one comes."""

from __future__ import annotations

import time

import torch.distributed as dist

from hopsparse.comm import leave
from tests.helpers import comm_ranks
from tests.helpers.ranks import on_ranks


def test_the_last_rank_ends_as_the_first_does() -> None:
    started = time.monotonic()
    found = on_ranks(comm_ranks.left, 3)
    assert found == [False] * 3
    assert time.monotonic() - started > comm_ranks.LATE_S


def test_leaving_nothing_is_nothing() -> None:
    assert not dist.is_initialized()
    leave()
