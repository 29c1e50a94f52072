"""Layers that ranks share, over gloo: the numbers of the whole layer, with 2 and 4 ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hopsparse.errors import ArgumentError
from hopsparse.measure.error import gamma
from tests.dist.test_comm import all_equal, equal
from tests.helpers import parallel_edges, parallel_ranks
from tests.helpers.ranks import on_ranks

SHARED = [
    (2, "dense", torch.float32),
    (2, "2:4", torch.bfloat16),
    (4, "2:4", torch.float32),
    (4, "4:6", torch.bfloat16),
    (2, "6:8", torch.float32),
    (4, "6:8", torch.bfloat16),
]


def check_pairs(found: list[Any], pairs: list[tuple[int, int]]) -> None:
    for each in found:
        assert not isinstance(each, BaseException), each
        for one, other in pairs:
            assert equal(each[one], each[other]), (one, other)


@pytest.mark.parametrize(("ranks", "kind", "dtype"), SHARED, ids=str)
def test_shared_layers_compute_what_whole_ones_do(
    ranks: int, kind: str, dtype: torch.dtype
) -> None:
    # Of 2:4, 7 pieces of 64 rows, the last one cut; 6 of the 128 columns that 6:8 leaves whole.
    sizes = (136, 440 if kind == "2:4" else 768, 40)
    found = on_ranks(parallel_ranks.chained, ranks, kind, sizes, dtype)
    check_pairs(found, [(0, 1), (2, 3), (2, 4), (2, 5), (6, 7)])
    assert all_equal(found)


@pytest.mark.parametrize("ranks", [2, 4])
def test_gradients_are_those_of_the_whole_layers(ranks: int) -> None:
    found = on_ranks(parallel_ranks.gradients, ranks, torch.float32)
    pairs = [(0, 2), (0, 4), (1, 3), (1, 5)]
    check_pairs(found, pairs + [(place, place + 1) for place in range(6, 22, 2)])
    check_pairs(on_ranks(parallel_ranks.sparse_gradient, 2), [(0, 2), (1, 3)])


@pytest.mark.parametrize(("kind", "dtype"), [("2:4", torch.float32), ("dense", torch.float64)])
def test_one_token_has_the_gradients_of_the_whole_layer(kind: str, dtype: torch.dtype) -> None:
    found = on_ranks(parallel_edges.of_one_token, 2, kind, dtype)
    check_pairs(found, [(place, place + 4) for place in range(4)])
    assert all_equal(found)


@pytest.mark.parametrize("kind", ["2:4", "dense"])
def test_autocast_chooses_the_dtype_as_it_does_for_whole_layers(kind: str) -> None:
    found = on_ranks(parallel_edges.under_autocast, 2, kind)
    check_pairs(found, [(place, place + 4) for place in range(4)])


def test_swiglu_follows_the_sum() -> None:
    check_pairs(on_ranks(parallel_edges.gated_row, 2), [(0, 1), (2, 3), (4, 5)])


def test_gradients_of_gradients_are_refused() -> None:
    for found in on_ranks(parallel_edges.gradient_of_gradient, 2):
        assert ["once_differentiable" in str(each) for each in found] == [True] * 3, found


def test_ranks_that_disagree_are_told_and_do_not_wait() -> None:
    first, second = on_ranks(parallel_edges.told_apart, 2)
    told = (
        "peer_reads=False, capacity_bytes=8388608) on rank 1",
        "capacity_bytes=8192) on rank 0, Peers(peer_reads=True, capacity_bytes=4096) on rank 1",
        "a group that this rank is not in",
        "tensors on cpu for ranks that share memory of cuda:0",
        "tensors on cpu for ranks that share memory of cuda:0",
    )
    for each, other, words in zip(first, second, told, strict=True):
        for error in (each, other):
            # Rank 1 is in the group that rank 0 is not in.
            if error is not None or words != told[2]:
                assert isinstance(error, ArgumentError), (words, error)
                assert words in str(error)
    assert first[2] is not None


@pytest.mark.parametrize(("ranks", "heads"), [(2, (2, 3)), (4, (4,))], ids=str)
def test_a_block_of_a_model_is_shared(ranks: int, heads: tuple[int, ...]) -> None:
    by_rank = on_ranks(parallel_ranks.models_of, ranks, heads)
    assert not any(isinstance(each, BaseException) for each in by_rank), by_rank
    for kv_heads, found in zip(heads, zip(*by_rank, strict=True), strict=True):
        for each in found:
            # All is float64 and may be added in another order: far below what float32 would lose.
            assert each["off"] <= gamma(1, torch.float32) * each["size"]
            assert len(each["names"]) == 7
        assert all_equal([each["shared"] for each in found])
        rows = [each["rows"] for each in found]
        assert sum(q for q, _ in rows) == 2 * kv_heads * 64
        assert all(q == 2 * k for q, k in rows)
        if kv_heads == 3:
            assert [k for _, k in rows] == [128, 64]


def test_parts_go_through_slots_in_turn() -> None:
    for found, used, told in on_ranks(parallel_ranks.standing_in, 2):
        for one, other in zip(found[::2], found[1::2], strict=True):
            assert equal(one, other)
        assert used == [[turn % 2, False] for turn in range(1, 11)]
        by_kernel, by_collective, columns, peers = told
        assert "parts by the kernel that reads peers' memory" in by_kernel
        assert "collectives of gloo: a part of 19200 bytes is above the capacity" in by_collective
        assert "columns by the kernel that reads peers' memory" in columns
        assert peers == "2 ranks; peers read parts of up to 4096 bytes"


@pytest.mark.parametrize("form", ["2:4+int8", "2:4+fp8/fp8", "2:4+int4:64"])
def test_codes_are_cut_with_their_scales(form: str) -> None:
    check_pairs(on_ranks(parallel_ranks.quantized, 2, form, "cpu"), [(0, 1), (2, 3)])


def test_a_shared_model_may_be_fused() -> None:
    found = on_ranks(parallel_ranks.fused, 2)
    for each in found:
        assert not isinstance(each, BaseException), each
        # q, k and v, gate and up of two blocks.
        assert len(each["fused"]) == 10
        # The sums of float32 are of at most 256 terms, in another order, in some 20 layers.
        assert each["off"] <= 20 * gamma(256, torch.float32) * each["size"]
    assert all_equal([each["logits"] for each in found])


def test_a_mesh_of_two_dimensions_gives_one_of_them() -> None:
    found = on_ranks(parallel_ranks.of_a_mesh, 4)
    check_pairs(found, [(0, 1)])
    assert [each[2].tolist() for each in found] == [[0, 2], [1, 2], [0, 2], [1, 2]]


def test_what_cannot_be_shared_is_refused_on_every_rank() -> None:
    told = (
        "csr matrix to cut",
        "class ReLU",
        "of 192. Required: a first one that is a multiple of 64",
        r"bounds [0, 192]",
        "a side of 64 for 2 ranks",
        "a shard with a bias",
        "a shard of 192",
        "x of shape [3, 128]",
        "a residual [3, 8]",
        "bias of torch.float32",
        "without layers to share",
        "an object of class object as the group",
        "a bias of shape [1]",
        "act='tanh'",
        "capacity_bytes=-1",
        "patience_s=nan",
        "attention with head_dim 0",
    )
    for found in on_ranks(parallel_ranks.refused, 2):
        assert len(found) == len(told)
        for error, words in zip(found, told, strict=True):
            assert isinstance(error, ArgumentError), (words, error)
            assert words in str(error)
