"""rope_append: the reference against transformers, the kernel on the CPU, what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hopsparse.errors import ArgumentError, UnsupportedError
from hopsparse.ops.rope_append import device, plan, rope_append
from tests.helpers.rope import SENTINEL, Problem, assert_right, problem
from tests.helpers.rope_on_cpu import Compiled

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    return Compiled(tmp_path_factory.mktemp("rope"))


def sequences(p: Problem) -> Problem:
    """The same, with a cache whose tokens come before its heads."""
    keys, values = (each.transpose(1, 2).contiguous().transpose(1, 2) for each in p.cache)
    return replace(p, cache=(keys, values))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("norm", [False, True], ids=["plain", "norms"])
def test_the_reference_is_transformers(norm: bool, dtype: torch.dtype) -> None:
    p = problem((4, 2), 16, [9, 3, 40, 34], 3, norm=norm, dtype=dtype)
    before = p.copied().cache
    assert_right(p, before, p.run())


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "norms"])
@pytest.mark.parametrize("dim", plan.DIMS)
@pytest.mark.parametrize(
    ("heads", "ends", "tokens", "shares"),
    [((3, 1), [5], 1, 1), ((3, 1), [5], 1, 2), ((2, 2), [9, 3, 34], 3, 1), ((9, 1), [1, 0], 1, 3)],
    ids=str,
)
def test_the_kernel_is_the_reference(
    heads: tuple[int, int],
    ends: list[int],
    tokens: int,
    shares: int,
    dim: int,
    norm: bool,
    kernel: Compiled,
) -> None:
    p = sequences(problem(heads, dim, ends, tokens, norm=norm))
    assert device._readable(p.cache[0])
    before, ours = p.cache[0].clone(), p.copied()
    count = torch.tensor(11)
    q = kernel.run(ours, shares, count)
    right = p.run()
    close = {"atol": 0.02, "rtol": 0.02} if norm else {"atol": 0.0, "rtol": 0.0}
    torch.testing.assert_close(q, right, **close)
    torch.testing.assert_close(ours.cache[0], p.cache[0], **close)
    assert torch.equal(ours.cache[1], p.cache[1])
    assert not torch.equal(before, p.cache[0]) or max(ends) == 0
    assert count.item() == 11 + tokens


def test_one_row_of_turns_serves_all_sequences(kernel: Compiled) -> None:
    p = problem((2, 1), 64, [6, 6, 6], 2)
    one = replace(p, turns=(p.turns[0][:1], p.turns[1][:1])).copied()
    ours = one.copied()
    right = p.run()
    assert torch.equal(one.run(), right)
    assert torch.equal(kernel.run(ours, 1), right)
    assert torch.equal(ours.cache[0], p.cache[0])


def test_no_place_no_write() -> None:
    p = problem((2, 1), 8, [-1, 2, 33], 4)
    before = p.copied().cache
    assert_right(p, before, p.run())
    assert (p.cache[0][0] == SENTINEL).all()
    assert (p.cache[0][1, :, 2:] == SENTINEL).all()
    assert not (p.cache[0][2, :, 29:] == SENTINEL).any()


def test_a_compiler_sees_one_operator() -> None:
    p = problem((2, 1), 8, [5], 1)
    ours = p.copied()
    found = torch.compile(Problem.run, fullgraph=True, backend="aot_eager")(ours)
    assert torch.equal(found, p.run())
    assert torch.equal(ours.cache[0], p.cache[0])


def test_what_has_no_kernel_is_known() -> None:
    p = problem((2, 1), 64, [5], 1, norm=True)
    assert device.fits(p.qkv, p.turns, p.cache, p.norms)
    odd = problem((2, 1), 32, [5], 1)
    assert not device.fits(odd.qkv, odd.turns, odd.cache, None)
    wide = problem((2, 1), 64, [5], 1, dtype=torch.float32)
    assert not device.fits(wide.qkv, wide.turns, wide.cache, None)
    shifted = torch.zeros(4 * 64 + 1, dtype=torch.bfloat16)[1:].view(1, 1, -1)
    assert not device.fits(shifted, p.turns, p.cache, None)
    strided = (p.cache[0].transpose(2, 3), p.cache[1])
    assert not device.fits(p.qkv, p.turns, strided, None)
    with pytest.raises(ArgumentError, match="dim 96"):
        plan.spec_for("bfloat16", 96, norm=False)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"qkv": torch.zeros(1, 1, 30)}, "rows of"),
        ({"qkv": torch.zeros(1, 32)}, "all heads"),
        ({"qkv": torch.zeros(1, 1, 16)}, "rows of"),
        ({"turns": (torch.zeros(1, 2, 8), torch.zeros(1, 1, 8))}, "cosines"),
        ({"turns": (torch.zeros(1, 1, 8), torch.zeros(1, 1, 8).half())}, "sines"),
        ({"cache": (torch.zeros(1, 1, 4, 8), torch.zeros(1, 1, 5, 8))}, "values"),
        ({"cache": (torch.zeros(2, 1, 4, 8), torch.zeros(2, 1, 4, 8))}, "keys"),
        ({"ends": torch.zeros(1)}, "int32"),
        ({"ends": torch.zeros(2, dtype=torch.int32)}, "ends"),
        ({"norms": (torch.zeros(8), torch.zeros(4))}, "norm"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused(change: dict[str, object], told: str) -> None:
    p = problem((2, 1), 8, [1], 1, dtype=torch.float32, room=4)
    with pytest.raises(ArgumentError, match=told):
        replace(p, **change).run()  # type: ignore[arg-type]


def test_a_count_of_another_kind_is_refused() -> None:
    p = problem((2, 1), 8, [1], 1)
    with pytest.raises(ArgumentError, match="count"):
        rope_append(p.qkv, p.turns, p.cache, p.ends, count=torch.zeros(1))


def test_a_gradient_is_refused() -> None:
    p = problem((2, 1), 8, [1], 1)
    p.qkv.requires_grad_()
    with pytest.raises(UnsupportedError, match="gradient"):
        p.run()
    with torch.no_grad():
        p.run()
