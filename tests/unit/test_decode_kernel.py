"""The text of the attend_decode kernel, run by threads of the CPU, against float64.

What this cannot see is the compiler's code for the GPU, its copies and its clocks.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hopsparse.errors import ArgumentError
from hopsparse.ops.attend_decode import plan
from hopsparse.plan import TARGETS
from tests.helpers.attention import Shape, assert_attention, listed, paged, tokens_of
from tests.helpers.decode_on_cpu import Run, compiled


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return compiled(tmp_path_factory.mktemp("decode"))


@pytest.mark.parametrize(("group", "block"), [(1, 64), (3, 16), (4, None)])
def test_lists_and_lengths(kernel: Run, block: int | None, group: int) -> None:
    shape = Shape(heads=2 * group, kv_heads=2, dim=64)
    sequences = tokens_of(shape, [0, 1, 200], torch.bfloat16)
    q = torch.randn(3, shape.heads, 64).bfloat16()
    lists = torch.rand(3, 2, 6).argsort(-1)
    lists = lists.where(torch.rand(lists.shape) < 0.8, -1).int()
    lists[2, 1] = -1
    counts = torch.randint(0, 7, (3, 2)).int()
    order = (lists, counts) if block else (None, None)
    out, lse = kernel(q, paged(shape, sequences), *order, block or 16)
    for b, (keys, values) in enumerate(sequences):
        for head in range(shape.heads):
            kv = head // group
            own = list(range(keys.shape[1]))
            if block:
                own = listed(lists[b, kv, : int(counts[b, kv])].tolist(), block, keys.shape[1])
            pair = (keys[kv, own], values[kv, own])
            assert_attention((out[b, head], lse[b, head]), q[b, head], *pair, shape.scale)


def one_sequence() -> tuple[Shape, list[tuple[Tensor, Tensor]], Tensor]:
    shape = Shape(dim=64)
    return shape, tokens_of(shape, [150], torch.bfloat16), torch.randn(1, 4, 64).bfloat16()


def test_a_key_that_is_nan_shows(kernel: Run) -> None:
    shape, sequences, q = one_sequence()
    sequences[0][0][0, 70, 5] = float("nan")
    out, lse = kernel(q, paged(shape, sequences), None, None, 16)
    assert out[0, :2].isnan().all()
    assert lse[0, :2].isnan().all()
    assert out[0, 2:].isfinite().all()


def test_a_sequence_of_nan_is_not_an_empty_one(kernel: Run) -> None:
    shape, sequences, q = one_sequence()
    sequences[0][0].fill_(float("nan"))
    out, _ = kernel(q, paged(shape, sequences), None, None, 16)
    assert out.isnan().all()


def test_physical_pages_may_be_anywhere(kernel: Run) -> None:
    shape, sequences, q = one_sequence()
    first, second = (
        kernel(q, paged(shape, sequences, order=order), None, None, 16)
        for order in (torch.arange(13), torch.arange(13).flip(0))
    )
    for mine, other in zip(first, second, strict=True):
        assert torch.equal(mine, other)


def test_every_kernel_has_room() -> None:
    for spec in plan.every_spec():
        assert spec.smem_bytes <= TARGETS["h200"].smem_per_block
    with pytest.raises(ArgumentError, match="float32"):
        plan.spec_for("float32", 128, 4)
