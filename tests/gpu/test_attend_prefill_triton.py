"""attend_prefill in Triton: its forward where the other kernel does not fit, and all gradients."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from hopsparse.ops import PagedKV, attend_prefill
from hopsparse.ops.attend_prefill import device as hopper_kernel
from hopsparse.ops.attend_prefill import op
from hopsparse.ops.attend_prefill.op import has_triton
from tests.helpers.attention import Shape, paged
from tests.helpers.prefill import Problem, assert_prefill, one_key_each, problem
from tests.helpers.prefill_gradients import Found, Given, assert_gradients, gradients, random_given
from tests.helpers.waiting import nothing_waits

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Whole prompts, chunks behind earlier tokens, one query, none, and lengths on no edge.
SIZES = [(130, 130), (0, 40), (1, 77), (64, 200), (150, 500)]
# Tokens of a block and of a page, query heads for each of keys, a list for each query head.
WAYS = (
    (16, 16, 3, False),
    (48, 48, 1, False),
    (64, 16, 2, True),
    (128, 128, 4, False),
    (192, 64, 2, True),
)


@pytest.fixture(autouse=True)
def _calls_take_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which they do by themselves once these tests have passed on a GPU."""
    monkeypatch.setattr(op, "TRITON", True)


_AMD = 224  # in an ELF header, where 190 is CUDA


def moved(p: Problem, device: torch.device) -> Problem:
    names = ("keys", "values", "table", "lengths")
    there = replace(p.cache, **{name: getattr(p.cache, name).to(device) for name in names})
    lists = [None if each is None else each.to(device) for each in p.lists]
    return replace(
        p,
        q=p.q.to(device),
        starts=p.starts.to(device),
        cache=there,
        indices=lists[0],
        counts=lists[1],
    )


def attend(p: Problem) -> tuple[Tensor, Tensor]:
    """Of a problem on the GPU, by Triton, whether or not the other kernel would fit."""
    from hopsparse.ops.attend_prefill import triton

    assert triton.fits(p.q, p.cache, p.indices, p.block, True)
    scale = p.q.shape[2] ** -0.5
    triton.run(p.q, p.starts, p.cache, p.lists, p.block, scale)  # it compiles
    with nothing_waits():
        found: tuple[Tensor, Tensor] = triton.run(p.q, p.starts, p.cache, p.lists, p.block, scale)
    return found


def cpu(found: Found) -> Found:
    return found[0].cpu(), found[1].cpu(), found[2].cpu()


def same(first: tuple[Tensor, ...], second: tuple[Tensor, ...]) -> None:
    for mine, other in zip(first, second, strict=True):
        assert torch.equal(mine, other)


def check_gradients(p: Problem, device: torch.device) -> None:
    given = random_given(p)
    there = moved(p, device)
    assert_gradients(p, given, cpu(gradients(there, given)[1]))


@pytest.mark.parametrize("dim", [64, 128, 80])
@pytest.mark.parametrize(("block", "page", "group", "each"), WAYS)
def test_one_key_each_is_exact(
    block: int, page: int, group: int, each: bool, dim: int, device: torch.device
) -> None:
    """Every query finds the values of one key, bit for bit: no address and no mask is wrong."""
    shape = Shape(heads=2 * group, kv_heads=2, dim=dim, page=page)
    for lists in (shape.heads if each else 2, None):
        p, want = one_key_each(problem(shape, SIZES, block=block, lists=lists))
        assert torch.equal(attend(moved(p, device))[0].cpu(), want)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [16, 64, 96, 128, 256])
@pytest.mark.parametrize(("block", "page", "group", "each"), WAYS)
def test_outputs_are_within_their_bounds(
    block: int,
    page: int,
    group: int,
    each: bool,
    dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    shape = Shape(heads=2 * group, kv_heads=2, dim=dim, page=page)
    lists = shape.heads if each else 2
    p = problem(shape, SIZES, block=block, lists=lists, dtype=dtype)
    out, lse = attend(moved(p, device))
    assert_prefill(p, out.cpu(), lse.cpu())


def test_large_scores(device: torch.device) -> None:
    """Scores of some hundreds, whose maxima rise from tile to tile."""
    shape = Shape(heads=2, kv_heads=1, dim=128, page=64)
    p = problem(shape, [(700, 700)], block=64, lists=None)
    rising = torch.linspace(1, 30, 700)[:, None]
    sequences = [((k.float() * rising).bfloat16(), v) for k, v in p.sequences]
    p = replace(p, sequences=sequences, cache=paged(shape, sequences))
    out, lse = attend(moved(p, device))
    assert_prefill(p, out.cpu(), lse.cpu())


def test_both_kernels_see_the_same_keys(device: torch.device) -> None:
    """Where both fit, one key each: both have the same bits."""
    shape = Shape(heads=8, kv_heads=2, dim=128, page=64)
    p = moved(one_key_each(problem(shape, SIZES, block=128, lists=2))[0], device)
    assert hopper_kernel.fits(p.q, p.cache, p.lists, p.block, 128**-0.5)
    out, lse = attend_prefill(p.q, p.starts, p.cache, *p.lists, block=128)
    own = attend(p)
    assert torch.equal(out, own[0])
    assert torch.equal(lse == -torch.inf, own[1] == -torch.inf)


@pytest.mark.parametrize(
    ("dim", "dtype", "block"),
    [(256, torch.bfloat16, 64), (64, torch.float32, 64), (64, torch.half, 32)],
)
def test_it_runs_where_the_other_kernel_does_not_fit(
    dim: int, dtype: torch.dtype, block: int, device: torch.device
) -> None:
    shape = Shape(heads=4, kv_heads=2, dim=dim, page=32)
    p = moved(problem(shape, SIZES, block=block, lists=2, dtype=dtype), device)
    assert has_triton()
    assert not hopper_kernel.fits(p.q, p.cache, p.lists, block, dim**-0.5)
    want = attend(p)
    with nothing_waits():
        same(attend_prefill(p.q, p.starts, p.cache, *p.lists, block=block), want)


def test_keys_of_eight_bits_have_their_scales(device: torch.device) -> None:
    """What 8 bits hold, 16 hold exactly; scales of powers of two change no bit either."""
    shape = Shape(heads=4, kv_heads=2, dim=64, page=64)
    p = moved(problem(shape, SIZES, block=64, lists=2), device)
    pools = [pool.to(torch.float8_e4m3fn) for pool in (p.cache.keys, p.cache.values)]
    wide = [pool.bfloat16() for pool in pools]
    table, lengths = p.cache.table, p.cache.lengths
    eight = replace(p, cache=PagedKV(pools[0], pools[1], table, lengths, 0.5, 4.0))
    sixteen = replace(p, cache=PagedKV(wide[0] * 0.5, wide[1] * 4.0, table, lengths))
    same(attend(eight), attend(sixteen))
    same(attend_prefill(p.q, p.starts, eight.cache, *p.lists, block=64), attend(eight))


def test_pages_and_blocks_out_of_range_are_none(device: torch.device) -> None:
    p = moved(problem(Shape(heads=4, kv_heads=2, dim=64), [(64, 320)], block=64, lists=2), device)
    table = p.cache.table.clone()
    table[0, 4:8] = torch.tensor([-1, 2**31 - 1, -5, 2**30])  # block 1
    indices = torch.tensor([4, 1, 0, 2**26, -9]).int().expand(1, 2, 1, 5).contiguous().to(device)
    kept = torch.tensor([4, -1, 0, -1, -1]).int().expand(1, 2, 1, 5).contiguous().to(device)
    broken = replace(p, cache=replace(p.cache, table=table), indices=indices, counts=None)
    same(attend(broken), attend(replace(p, indices=kept, counts=None)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [64, 128, 80])
@pytest.mark.parametrize(("block", "page", "group", "each"), WAYS)
def test_gradients_are_within_their_bounds(
    block: int,
    page: int,
    group: int,
    each: bool,
    dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Behind whichever forward ran."""
    shape = Shape(heads=2 * group, kv_heads=2, dim=dim, page=page)
    lists = shape.heads if each else 2
    check_gradients(problem(shape, SIZES, block=block, lists=lists, dtype=dtype), device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [16, 128, 256])
def test_gradients_of_all_tokens(dim: int, dtype: torch.dtype, device: torch.device) -> None:
    shape = Shape(heads=6, kv_heads=2, dim=dim, page=64)
    check_gradients(problem(shape, SIZES, block=64, lists=None, dtype=dtype), device)


def shared_prefix(dtype: torch.dtype) -> Problem:
    """Two sequences whose first 128 tokens are the same pages."""
    shape = Shape(heads=4, kv_heads=2, dim=64, page=64)
    p = problem(shape, [(100, 300), (140, 200)], block=64, lists=2, dtype=dtype)
    table = p.cache.table.clone()
    table[1, :2] = table[0, :2]
    pairs = zip(p.sequences[0], p.sequences[1], strict=True)
    keys, values = (torch.cat([a[:, :128], b[:, 128:]], 1) for a, b in pairs)
    sequences = [p.sequences[0], (keys, values)]
    return replace(p, cache=replace(p.cache, table=table), sequences=sequences)


def test_pages_that_sequences_share_get_the_sum(device: torch.device) -> None:
    check_gradients(shared_prefix(torch.bfloat16), device)
    check_gradients(shared_prefix(torch.float32), device)


def step(p: Problem, given: Given, leaves: list[Tensor]) -> Found:
    cache = replace(p.cache, keys=leaves[1], values=leaves[2])
    results = attend_prefill(leaves[0], p.starts, cache, *p.lists, block=p.block)
    found = torch.autograd.grad(results, leaves, given)
    return found[0], found[1], found[2]


def test_a_step_does_not_wait_and_does_not_differ(device: torch.device) -> None:
    shape = Shape(heads=8, kv_heads=2, dim=128, page=128)
    p = problem(shape, [(700, 2000), (77, 77)], block=128, lists=2)
    given = random_given(p)
    p = moved(p, device)
    there = (given[0].to(device), given[1].to(device))
    leaves = [each.clone().requires_grad_() for each in (p.q, p.cache.keys, p.cache.values)]
    first = step(p, there, leaves)
    for _ in range(10):
        with nothing_waits():
            again = step(p, there, leaves)
        same(again, first)


def test_strides_do_not_matter(device: torch.device) -> None:
    p = problem(Shape(heads=4, kv_heads=2, dim=64), [(70, 100)], block=64, lists=2)
    given = random_given(p)
    p = moved(p, device)
    there = (given[0].to(device), given[1].to(device))
    pools = [
        pool.transpose(1, 2).contiguous().transpose(1, 2) for pool in (p.cache.keys, p.cache.values)
    ]
    spread = torch.randn(70, 4, 128, device=device).bfloat16()[..., ::2].copy_(p.q)
    plain, other = (
        [each.detach().requires_grad_() for each in each_of]
        for each_of in ((p.q, p.cache.keys, p.cache.values), (spread, *pools))
    )
    same(step(p, there, other), step(p, there, plain))


def test_torch_compile_has_the_same_gradient(device: torch.device) -> None:
    torch.compiler.reset()
    p = problem(Shape(heads=4, kv_heads=2, dim=64), SIZES, block=64, lists=2)
    given = random_given(p)
    p = moved(p, device)
    there = (given[0].to(device), given[1].to(device))
    leaves = [each.clone().requires_grad_() for each in (p.q, p.cache.keys, p.cache.values)]

    def attend_compiled(q: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        cache = replace(p.cache, keys=keys, values=values)
        return attend_prefill(q, p.starts, cache, *p.lists, block=64)

    results = torch.compile(attend_compiled, fullgraph=True)(*leaves)
    same(torch.autograd.grad(results, leaves, there), step(p, there, leaves))


@pytest.mark.parametrize("kernel", ["attend", "of_queries", "of_keys"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_compiles_for_gfx942(kernel: str, dtype: torch.dtype, device: torch.device) -> None:
    from hopsparse.ops.attend_prefill.triton_code import compiled_for

    code = compiled_for(kernel, ("hip", "gfx942", 64), dtype, 128)
    assert code[:4] == b"\x7fELF"
    assert int.from_bytes(code[18:20], "little") == _AMD
