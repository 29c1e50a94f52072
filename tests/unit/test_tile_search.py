"""benchmarks/tile_search.py and counters.py: what is drawn, and what is read of ncu's page."""

from __future__ import annotations

import pytest
import torch

from benchmarks.counters import L2, MEMORY, TIME, counted, parsed
from benchmarks.tile_search import DEGREE, FIXED, cases, communities, edges, stored

PAGE = f"""==PROF== Connected to process 7
"ID","Process ID","Kernel Name","{MEMORY}","{TIME}","{L2[0]}","{L2[1]}"
"","","","byte","ns","sector","request"
"0","7","spmm_bsr_kernel","64,000","2000","2,000","500"
"1","7","spmm_bsr_kernel","96000","4000","3000","n/a"
==PROF== Disconnected
"""


def test_a_page_of_ncu_is_read_launch_by_launch() -> None:
    first, second = parsed(PAGE)
    assert first == {MEMORY: 64000.0, TIME: 2000.0, L2[0]: 2000.0, L2[1]: 500.0}
    told = {"needed_bytes": 32000}
    row = counted(told, first)
    assert (row["ncu_us"], row["l2_sectors_a_request"]) == (2.0, 4.0)
    assert (row["memory_over_needed"], row["l2_sectors_over_needed"]) == (2.0, 2.0)
    assert row["useful_tb_s"] == pytest.approx(32000 / 2e-6 / 1e12)
    assert row["l1_sectors_a_request"] is None
    assert counted(told, second)["l2_sectors_a_request"] is None
    assert parsed("==ERROR== no permission\n") == []


@pytest.mark.parametrize("name", ["batch", "community", "powerlaw"])
def test_graphs_have_both_directions_of_their_edges(name: str) -> None:
    nodes = 1024
    row, column = edges(name, nodes)
    assert len(row) == 2 * nodes * DEGREE
    assert 0 <= int(torch.stack([row, column]).min()) <= int(torch.stack([row, column]).max())
    assert int(torch.stack([row, column]).max()) < nodes
    adjacency = torch.zeros(nodes, nodes, dtype=torch.bool)
    adjacency[row, column] = True
    assert torch.equal(adjacency, adjacency.T)


def test_communities_fill_all_nodes() -> None:
    sizes = communities(4096, torch.Generator().manual_seed(0))
    assert int(sizes.sum()) == 4096
    assert int(sizes.max()) <= 512
    assert int(sizes[:-1].min()) >= 63  # rounded down


def test_a_weight_keeps_a_tenth_of_its_blocks() -> None:
    found = [case for case in cases() if case.layer.startswith("ffn")]
    assert len(found) == 12
    for case in found[:2]:
        kept = case.kept()
        w = stored(case, kept)
        w.check_indices()
        assert kept.float().mean().item() == pytest.approx(0.1, abs=0.01)
        assert len(w.indices) == int(kept.sum())
    assert FIXED.rows == 256
