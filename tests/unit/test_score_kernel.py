"""The texts of the score_blocks and append_keys kernels, run by threads of the CPU.

What this cannot see is the compiler's code for the GPU, its memory and its clocks.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from hopsparse.errors import ArgumentError
from hopsparse.ops import KeyBlocks, append_keys
from hopsparse.ops.score_blocks import explain_scores, plan
from hopsparse.ops.score_blocks.choose import Choice
from hopsparse.ops.score_blocks.device import Wanted, shape_of
from hopsparse.ops.score_blocks.layout import (
    by_tensor_cores,
    refused_choice,
    refused_keys,
    refused_scores,
)
from hopsparse.ops.score_blocks.reference import slack_factor
from hopsparse.ops.score_blocks.starts import Asks
from hopsparse.ops.select import reference as select_reference
from hopsparse.ops.select_blocks.dispatch import row_lengths
from hopsparse.plan import TARGETS
from tests.helpers.block_scores import (
    INF,
    NAN,
    Problem,
    assert_per_head,
    assert_shared,
    exact_scores,
    problem,
)
from tests.helpers.score_on_cpu import BF16, F32, VARIANTS, Compiled, Variant

TENSOR = [each for each in VARIANTS if each.tensor]


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    return Compiled(tmp_path_factory.mktemp("scores"))


def group_of(tested: Variant) -> int:
    """One that does not fill the last round of heads, where there are rounds."""
    return {4: 6, 8: 5, 16: 11}.get(tested.heads, tested.heads)


@pytest.mark.parametrize("cluster", [1, 3])
@pytest.mark.parametrize("tested", VARIANTS, ids=str)
def test_scores_are_those_of_the_reference(kernel: Compiled, tested: Variant, cluster: int) -> None:
    shape = (2, group_of(tested), tested.dim)
    p = problem(shape, [0, 1, 700, 333], dtype=tested.dtype, count=46)
    per_head = kernel.scores(tested, p, cluster, per_head=True)
    assert_per_head(per_head, p, tested.kind, fused=not tested.tensor)
    assert_shared(kernel.scores(tested, p, cluster, per_head=False), per_head, 2)


@pytest.mark.parametrize("tested", [VARIANTS[2], VARIANTS[7], VARIANTS[9], TENSOR[2]], ids=str)
def test_what_is_asked_for_ahead_changes_no_bit(kernel: Compiled, tested: Variant) -> None:
    """Tests else ask for all; one launch asks for nothing, one for the first pieces alone."""
    p = problem((2, group_of(tested), tested.dim), [0, 700, 333], dtype=tested.dtype, count=46)
    choice = Choice(None, [7, 7, 1, 2])
    want = [kernel.scores(tested, p, 3, per_head=False), *kernel.chosen(tested, p, 3, choice)]
    for asks in (Asks(first=False, later=False), Asks(first=True, later=False)):
        scores = kernel.scores(tested, p, 3, per_head=False, asks=asks)
        got = [scores, *kernel.chosen(tested, p, 3, choice, asks)]
        assert all(torch.equal(mine, other) for mine, other in zip(got, want, strict=True))


@pytest.mark.parametrize("tested", [VARIANTS[1], VARIANTS[7], VARIANTS[9], *TENSOR[:4]], ids=str)
def test_more_blocks_of_threads_change_only_the_order_of_sums(
    kernel: Compiled, tested: Variant
) -> None:
    p = problem((1, 4, tested.dim), [500], dtype=tested.dtype)
    one, three = (kernel.scores(tested, p, cluster, per_head=True) for cluster in (1, 3))
    assert torch.equal(one, three)
    again = [kernel.scores(tested, p, 3, per_head=False) for _ in range(2)]
    assert torch.equal(*again)


@pytest.mark.parametrize("tested", TENSOR, ids=str)
def test_bounds_hold_though_tensor_cores_cut(kernel: Compiled, tested: Variant) -> None:
    """Blocks of one key have the least slack: their bound is the score. Sums are cut here as a GPU
    cuts them, of terms of one sign, which lose most, of both, and of sizes far apart.
    """
    group, blocks = group_of(tested), 200
    p = problem((2, group, tested.dim), [blocks, blocks], block=1, dtype=tested.dtype)
    spread = 2.0 ** torch.randint(-12, 1, p.keys.shape)
    keys = (p.keys.float() * spread).to(tested.dtype)
    keys[:, :, :40] = keys[:, :, :40].abs()
    keys[:, :, 40:80] = -keys[:, :, 40:80].abs()
    append_keys(p.blocks, keys.transpose(1, 2), torch.zeros(2).int(), p.lengths)
    q = p.q.clone()
    q[:, ::2] = q[:, ::2].abs()
    p = replace(p, q=q, keys=keys)
    got = kernel.scores(tested, p, 2, per_head=True)
    assert_per_head(got, p, "bound")
    # Without its slack a bound would not hold: sums are below what they stand for.
    scores = exact_scores(p).amax(-1)
    scaled = (p.q.double().abs() * p.scale).view(2, 2, group, tested.dim)
    size = scaled @ p.blocks.low.double().abs().transpose(-1, -2)
    slack = slack_factor(tested.dim, 1) * size.reshape(scores.shape)
    assert (got.double() - slack < scores).any()


def test_where_tensor_cores_multiply() -> None:
    p = problem((1, 7, 128), [64])
    assert [by_tensor_cores(p.q, p.kept, kind) for kind in plan.KINDS] == [True, False, False]
    assert not by_tensor_cores(p.q.half(), p.kept, "bound")
    wide = problem((1, 7, 128), [64], dtype=F32)
    assert not by_tensor_cores(wide.q, wide.kept, "bound")
    shapes = [plan.shape_for("bound", "float16", 64, group, tensor=True) for group in (1, 8, 9, 16)]
    assert [each.heads for each in shapes if each is not None] == [8, 8, 16, 16]
    asked = Wanted("bound", 1.0, False)
    assert shape_of(p.q, p.kept, asked)[0].tensor
    assert not shape_of(p.q, p.kept, asked._replace(fused=True))[0].tensor


@pytest.mark.parametrize("q_dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("tested", [VARIANTS[1], VARIANTS[5]], ids=str)
def test_queries_may_have_another_dtype(
    kernel: Compiled, tested: Variant, q_dtype: torch.dtype
) -> None:
    p = problem((2, 4, tested.dim), [100, 37], dtype=tested.dtype, q_dtype=q_dtype)
    assert_per_head(kernel.scores(tested, p, 2, per_head=True), p, tested.kind, fused=True)


@pytest.mark.parametrize("odd", [NAN, INF, -INF])
@pytest.mark.parametrize("tested", [VARIANTS[1], VARIANTS[7], VARIANTS[9], *TENSOR[2:5]], ids=str)
def test_what_is_not_finite_shows_in_its_block_alone(
    kernel: Compiled, tested: Variant, odd: float
) -> None:
    p = problem((2, 4, tested.dim), [300, 300], dtype=tested.dtype)
    keys = p.keys[:, :, :300].transpose(1, 2).contiguous()
    keys[1, 100, 0, 5] = odd
    append_keys(p.blocks, keys, torch.zeros(2).int())
    for per_head in (True, False):
        scores = kernel.scores(tested, p, 2, per_head=per_head)
        heads = 4 if per_head else 1
        wrong = ~scores.isfinite()
        assert wrong[1, :heads, 100 // 16].all()
        assert int(wrong.sum()) == heads
        if tested.kind != "mean":
            assert (scores[wrong] != -INF).all()


@pytest.mark.parametrize("tested", [VARIANTS[3], VARIANTS[8], TENSOR[0], TENSOR[5]], ids=str)
def test_blocks_of_any_strides(kernel: Compiled, tested: Variant) -> None:
    p = problem((2, 1, tested.dim), [200, 90], dtype=tested.dtype)
    laid = []
    for each in p.kept:
        frame = torch.full((2, each.shape[2] + 1, 3, 2 * tested.dim), NAN, dtype=each.dtype)
        room = frame[:, 1:, :2, : tested.dim].transpose(1, 2)
        laid.append(room.copy_(each))
    other = replace(p, blocks=KeyBlocks(laid[0], laid[1], laid[2], p.blocks.block))
    assert refused_scores(p.q, other.kept, 16, tested.kind) is None
    mine = kernel.scores(tested, other, 2, per_head=False)
    assert torch.equal(mine, kernel.scores(tested, p, 2, per_head=False))


def test_lengths_out_of_range_are_taken_as_the_nearest(kernel: Compiled) -> None:
    p = problem((1, 1, 64), [160, 160, 160])
    broken = replace(p, lengths=torch.tensor([-5, 2**31 - 1, 160]).int())
    scores = kernel.scores(VARIANTS[0], broken, 2, per_head=False)
    assert (scores[0] == -INF).all()
    right = kernel.scores(VARIANTS[0], p, 2, per_head=False)
    assert torch.equal(scores[1:], right[1:])


# ---- scores, and the best of them ----------------------------------------------------------


def assert_chosen(
    kernel: Compiled, tested: Variant, p: Problem, choice: Choice, *clusters: int
) -> None:
    """The lists that `select` gives of the scores of the other kernel, bit for bit."""
    kv_heads, count = p.blocks.low.shape[1:3]
    k = None if choice.k is None else choice.k.flatten()
    there = row_lengths(p.lengths, p.blocks.block, kv_heads).flatten()
    sizes = select_reference.Sizes(*choice.sizes)
    for cluster in clusters:
        scores = kernel.scores(tested, p, cluster, per_head=False).view(-1, count)
        want = select_reference.select(scores, k, there, "rank", None, 0.0, sizes)
        for mine, other in zip(kernel.chosen(tested, p, cluster, choice), want, strict=True):
            assert torch.equal(mine.flatten(), other.flatten())


# Those whose pieces are whole fours of rows, with as few warps as tests have.
CHOOSING = [tested for tested in VARIANTS if tested.dim < 256]


@pytest.mark.parametrize("tested", CHOOSING, ids=str)
def test_the_chosen_are_those_of_select(kernel: Compiled, tested: Variant) -> None:
    shape = (2, group_of(tested), tested.dim)
    p = problem(shape, [0, 1, 700, 333], dtype=tested.dtype, count=46)
    assert_chosen(kernel, tested, p, Choice(None, [7, 7, 1, 2]), 1, 3)


def test_a_long_sequence(kernel: Compiled) -> None:
    p = problem((1, 1, 64), [16 * 600 - 3])
    assert_chosen(kernel, VARIANTS[0], p, Choice(None, [32, 32, 1, 1]), 1, 2)


@pytest.mark.parametrize("sizes", [(1, 0, 0), (9, 0, 0), (9, 3, 4), (40, 2, 60), (70, 70, 1)])
@pytest.mark.parametrize("kind", ["equal", "few", "near", "odd"])
def test_blocks_that_are_hard_to_tell_apart(
    kernel: Compiled, kind: str, sizes: tuple[int, int, int]
) -> None:
    tested, blocks = VARIANTS[0], 67
    p = problem((1, 1, 64), [16 * blocks - 5, 16 * 20], count=blocks)
    if kind == "near":
        step = torch.randint(0, 3, p.keys.shape) * 2.0**-8
        keys = torch.ones_like(p.keys) + step.to(p.keys.dtype)
    else:
        few = torch.randn(1 if kind == "equal" else 3, 1, 64).to(p.keys.dtype)
        which = torch.randint(0, len(few), (2, 1, blocks))
        keys = few[which].expand(-1, -1, -1, 16, -1).reshape(p.keys.shape).clone()
    if kind == "odd":
        places = torch.randint(0, keys.shape[2], (3, 12))
        for row, odd in zip(places, (NAN, INF, -INF), strict=True):
            keys[:, :, row, 3] = odd
    append_keys(p.blocks, keys.transpose(1, 2), torch.zeros(2).int(), p.lengths)
    k, sink, recent = sizes
    assert_chosen(kernel, tested, p, Choice(None, [k, min(k, blocks), sink, recent]), 2)


@pytest.mark.parametrize("tested", [VARIANTS[2], VARIANTS[7], VARIANTS[10], TENSOR[1]], ids=str)
def test_rows_have_numbers_of_their_own(kernel: Compiled, tested: Variant) -> None:
    lengths = [0, 500, 160, 2**31 - 1, -7]
    p = problem((2, tested.heads, tested.dim), [640] * 5, dtype=tested.dtype, count=40)
    p = replace(p, lengths=torch.tensor(lengths).int())
    k = torch.tensor([5, 0, 3, 60, 1, 1000, -2, 31, 32, 4]).int().view(5, 2)
    assert_chosen(kernel, tested, p, Choice(k, [0, 40, 0, 0]), 2)
    assert_chosen(kernel, tested, p, Choice(k, [0, 12, 2, 3]), 3)


def test_scores_that_are_minus_infinity_are_not_there(kernel: Compiled) -> None:
    """By mean an infinite key makes them so; what is forced is chosen all the same."""
    tested = VARIANTS[8]
    p = problem((1, 1, 128), [320], dtype=F32)
    keys = p.keys.transpose(1, 2).clone()
    keys[0, :250, 0, 7] = -INF * p.q[0, 0, 7].sign()
    append_keys(p.blocks, keys, torch.zeros(1).int())
    assert_chosen(kernel, tested, p, Choice(None, [10, 10, 2, 1]), 1, 3)
    indices, counts = kernel.chosen(tested, p, 2, Choice(None, [10, 10, 2, 1]))
    assert counts.item() == 6
    assert indices.flatten().tolist() == [0, 1, 16, 17, 18, 19, -1, -1, -1, -1]


def test_what_no_kernel_chooses_of_is_told() -> None:
    p = problem((2, 4, 64), [64])
    assert refused_choice(p.q, p.kept, 16, "bound") is None
    long = problem((1, 1, 64), [8193], block=1)
    assert "8193 blocks" in str(refused_choice(long.q, long.kept, 1, "bound"))
    assert refused_scores(long.q, long.kept, 1, "bound") is None


# ---- append_keys ---------------------------------------------------------------------------


def cleared(p: Problem) -> Problem:
    """Room for the same, where an earlier sequence left NaN."""
    kept = [torch.full_like(each, NAN) for each in p.kept]
    return replace(p, blocks=KeyBlocks(kept[0], kept[1], kept[2], p.blocks.block))


def assert_same(mine: Problem, other: Problem) -> None:
    """The same bits, and what was not touched is not."""
    for ours, theirs in zip(mine.kept, other.kept, strict=True):
        assert torch.equal(ours.isnan(), theirs.isnan())
        assert torch.equal(ours.nan_to_num(7.0), theirs.nan_to_num(7.0))


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("dim", plan.DIMS)
def test_keys_in_portions_are_kept_as_the_reference_does(
    kernel: Compiled, dim: int, dtype: torch.dtype
) -> None:
    p = problem((3, 1, dim), [150, 150], dtype=dtype)
    ours, theirs = cleared(p), cleared(p)
    done = torch.tensor([0, 7]).int()
    for new, counts in ((1, None), (40, [40, 3]), (1, None), (1, [0, 1]), (70, [65, 70])):
        keys = torch.randn(2, new, 3, dim).to(dtype)
        given = None if counts is None else torch.tensor(counts).int()
        kernel.append(ours, keys, done, given)
        append_keys(theirs.blocks, keys, done, given)
        assert_same(ours, theirs)
        done = done + (new if given is None else given)


def test_keys_of_any_strides_and_places_that_no_block_has(kernel: Compiled) -> None:
    p = problem((2, 1, 64), [64, 64])
    frame = torch.full((2, 2, 20, 128), NAN, dtype=BF16)
    keys = frame[..., 64:].transpose(1, 2)
    keys.copy_(torch.randn(2, 20, 2, 64))
    ours, theirs = cleared(p), cleared(p)
    assert refused_keys(ours.kept, keys, 16) is None
    # The first begins before there are tokens, the second goes on where there is no room.
    starts = torch.tensor([-3, 50]).int()
    kernel.append(ours, keys, starts)
    append_keys(
        theirs.blocks, keys[:, :14], torch.tensor([0, 50]).int(), torch.tensor([0, 14]).int()
    )
    append_keys(theirs.blocks, keys[:, 3:], torch.tensor([0, 0]).int(), torch.tensor([17, 0]).int())
    assert_same(ours, theirs)


def test_a_key_that_is_nan_or_infinite_is_kept(kernel: Compiled) -> None:
    p = problem((1, 1, 64), [64], dtype=F32)
    keys = torch.randn(1, 40, 1, 64)
    keys[0, 5, 0, 0], keys[0, 6, 0, 1], keys[0, 20, 0, 2] = NAN, INF, -INF
    ours, theirs = cleared(p), cleared(p)
    kernel.append(ours, keys, torch.tensor([0]).int())
    append_keys(theirs.blocks, keys, torch.tensor([0]).int())
    assert_same(ours, theirs)
    assert ours.blocks.low[0, 0, 0, 0].isnan()
    assert ours.blocks.high[0, 0, 0, 1] == INF


# ---- plans ---------------------------------------------------------------------------------


def test_every_kernel_has_room() -> None:
    specs = plan.every_spec()
    assert len({spec.name for spec in specs}) == len(specs)
    # Two blocks of threads share an SM.
    assert all(2 * (spec.smem_bytes + 1024) <= TARGETS["h200"].smem_per_block for spec in specs)
    with pytest.raises(ArgumentError, match="heads=3"):
        plan.spec_for(plan.Shape("bound", "bfloat16", 128, 3), 8)
    with pytest.raises(ArgumentError, match="cluster 3"):
        plan.spec_for(plan.Shape("bound", "bfloat16", 128, 4), 3)
    with pytest.raises(ArgumentError, match="dim 96"):
        plan.append_spec_for("bfloat16", 96)


def test_a_warp_for_every_block_that_tokens_may_touch() -> None:
    for block in (1, 16, 64):
        for new in (1, 2, 15, 16, 17, 64, 65, 300):
            most = max((start + new - 1) // block - start // block + 1 for start in range(block))
            warps = plan.append_grid(10_000, block, 8, new) * plan.APPEND_WARPS
            assert most * 8 <= warps < most * 8 + plan.APPEND_WARPS


def unaligned(each: Tensor) -> Tensor:
    flat = torch.zeros(each.numel() + 1, dtype=each.dtype)
    return flat[1:].view(each.shape)


def test_what_no_kernel_takes_is_told() -> None:
    p = problem((2, 4, 64), [64])
    low, high, total = p.kept
    assert refused_scores(p.q, p.kept, 16, "bound") is None
    assert "16 bytes" in str(refused_scores(p.q, (unaligned(low), high, total), 16, "mass"))
    assert refused_scores(p.q, (unaligned(low), high, total), 16, "mean") is None
    assert "16 bytes" in str(refused_keys(p.kept, unaligned(p.keys.transpose(1, 2)), 16))
    assert "share" in str(refused_keys((low[:1].expand(3, -1, -1, -1), high, total), p.keys, 16))
    wide = problem((1, 17, 64), [64])
    assert "17 query heads" in str(refused_scores(wide.q, wide.kept, 16, "bound"))
    odd = problem((1, 1, 96), [64])
    assert "heads of 96" in str(refused_scores(odd.q, odd.kept, 16, "bound"))
    assert explain_scores(p.q, p.blocks).name == "reference"
    with pytest.raises(ArgumentError, match="kind"):
        explain_scores(p.q, p.blocks, "max")
