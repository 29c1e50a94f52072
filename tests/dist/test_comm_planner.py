"""Plans over several processes: one for all ranks, and every method trains."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dist.test_comm import all_equal
from tests.helpers import comm_ranks
from tests.helpers.comm_ranks import LINKS
from tests.helpers.ranks import on_ranks


@pytest.mark.parametrize("method", sorted(LINKS))
def test_every_method_trains_and_forgets_nan(method: str) -> None:
    """In step 3, after DDP has made its buckets anew, one rank has NaN."""
    found = on_ranks(comm_ranks.planned, 2, method, 3)
    assert all_equal([each["weights"] for each in found])
    one = found[0]
    assert method in one["methods"]
    assert set(one["methods"]) <= {method, "dense"}  # small buckets gain nothing
    assert one["finite"] == [True, True, True, False, True, True]
    assert one["losses"][-1] < one["losses"][0]
    assert f": {method} (" in one["described"]
    counters = one["counters"]
    assert (counters["ratio"] > 1) == (method != "dense")
    assert counters["values"] == 6 * sum(each.numel() for each in comm_ranks.Small().parameters())


def test_the_link_is_the_same_on_all_ranks_and_after_a_resume(tmp_path: Path) -> None:
    found = on_ranks(comm_ranks.measured, 2, tmp_path)
    assert all_equal(found)
    assert all_equal([found[0]["before"], found[0]["after"]])
    assert bool((found[0]["before"] > 0).all())
