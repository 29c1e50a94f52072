"""What is chosen and how it is coded, against definitions that are obviously right."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from hopsparse.comm import HybridOptions, HybridState
from hopsparse.comm.coding import Layout, add_exact, add_rounded
from hopsparse.comm.wire import message_bytes, pack, unpack
from hopsparse.errors import ArgumentError, VerificationError
from hopsparse.measure.error import block_rounding_bound
from hopsparse.ops import hybrid_gradient
from hopsparse.ops.hybrid_gradient.indices import chunk_count, decode_indices, encode_indices
from hopsparse.ops.hybrid_gradient.remainder import CODERS
from hopsparse.ops.hybrid_gradient.select import largest

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
KINDS = ("normal", "few values", "mostly zero", "equal", "zeros", "one block", "tiny")


def by_sorting(values: Tensor, k: int) -> list[int]:
    """A stable sort keeps equal values in their order."""
    order = torch.sort(values.abs(), descending=True, stable=True).indices
    return sorted(order[:k].tolist())


def vector(kind: str, n: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(n, generator=generator)
    if kind == "few values":
        return torch.randint(-3, 4, (n,), generator=generator).float()
    if kind == "mostly zero":
        return normal * (torch.rand(n, generator=generator) < 0.002)
    if kind == "equal":
        return torch.full((n,), -2.5)
    if kind == "zeros":
        return torch.zeros(n)
    if kind == "one block":
        normal[n // 3 : n // 3 + 64] *= 1000
        return normal
    return normal * (1e-42 if kind == "tiny" else 1.0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [1, 63, 4097, 70_001])
@pytest.mark.parametrize("part", [0.0, 0.001, 0.013, 0.2, 1.0])
def test_the_largest_are_those_of_a_stable_sort(kind: str, n: int, part: float) -> None:
    values, k = vector(kind, n, seed=n), math.ceil(part * n)
    assert largest(values, k).tolist() == by_sorting(values, k)


@given(st.lists(FLOATS, min_size=1, max_size=300), st.data())
def test_any_numbers_are_chosen_as_by_sorting(numbers: list[float], data: st.DataObject) -> None:
    values = torch.tensor(numbers * 4)
    k = data.draw(st.integers(0, len(values)))
    assert largest(values, k).tolist() == by_sorting(values, k)


def test_what_cannot_be_chosen_from_is_refused() -> None:
    with pytest.raises(ArgumentError, match="k = 4 of 3 values"):
        largest(torch.ones(3), 4)
    with pytest.raises(ArgumentError, match="shape"):
        largest(torch.ones(3, 3), 1)
    with pytest.raises(ArgumentError, match="int64"):
        largest(torch.ones(3, dtype=torch.int64), 1)


@given(st.integers(1, 1 << 34), st.data())
def test_positions_come_back(n: int, data: st.DataObject) -> None:
    """Vectors of more than 2^31 values too; they need not exist for that."""
    n = data.draw(st.sampled_from([n, n % 200_000 + 1]))
    chosen = data.draw(st.sets(st.integers(0, n - 1), max_size=60)) | {n - 1}
    positions = torch.tensor(sorted(chosen))
    counts, offsets = encode_indices(positions, n)
    assert counts.numel() == chunk_count(n) == math.ceil(n / 65536)
    assert offsets.nbytes == 2 * len(chosen)
    assert torch.equal(decode_indices(counts, offsets), positions)


def test_damaged_positions_are_told() -> None:
    counts, offsets = encode_indices(torch.arange(10), 70_000)
    with pytest.raises(VerificationError, match="counts of 10 positions with 9 offsets"):
        decode_indices(counts, offsets[:-1])
    counts[0], counts[1] = 11, -1
    with pytest.raises(VerificationError, match="what encode_indices made"):
        decode_indices(counts, offsets)


@pytest.mark.parametrize("name", ["int3", "int3.5", "int4", "int8"])
@given(st.lists(FLOATS, min_size=1, max_size=40), st.integers(-140, 100))
def test_rounding_loses_nothing(name: str, numbers: list[float], exponent: int) -> None:
    """What is sent and what is left add up to what was there, bit by bit."""
    coder = CODERS[name]
    rows = torch.zeros(2, coder.block)
    rows[0, : len(numbers)] = torch.tensor(numbers)
    rows[1, : len(numbers)] = torch.tensor(numbers) / (2.0 ** (128 - exponent))
    sent = coder.decode(*coder.encode(rows))
    left = rows - sent
    assert torch.equal(sent.double() + left.double(), rows.double())
    assert bool((left.double().abs() <= block_rounding_bound(rows, coder.most)).all())


@pytest.mark.parametrize(
    ("name", "most", "nbytes"), [("int3", 3, 48), ("int3.5", 5, 56), ("int4", 7, 64)]
)
@given(data=st.data())
def test_small_integers_are_exact(name: str, most: int, nbytes: int, data: st.DataObject) -> None:
    numbers = data.draw(st.lists(st.integers(-most, most), min_size=128, max_size=128))
    rows = torch.tensor(numbers).float()[None]
    rows[0, 0] = most  # the scale is 1
    codes, scales = CODERS[name].encode(rows)
    assert codes.nbytes == nbytes == CODERS[name].code_bytes
    assert scales.tolist() == [1.0]
    assert torch.equal(CODERS[name].decode(codes, scales), rows)


@given(st.lists(st.booleans(), min_size=512, max_size=512), st.sampled_from([0.5, 3.0]))
def test_signs_of_equal_numbers_are_exact(signs: list[bool], size: float) -> None:
    rows = torch.where(torch.tensor(signs), size, -size)[None]
    codes, scales = CODERS["sign"].encode(rows)
    assert codes.nbytes == 64
    assert torch.equal(CODERS["sign"].decode(codes, scales), rows)


@pytest.mark.parametrize("name", sorted(CODERS))
def test_zeros_stay_zeros_and_large_numbers_finite(name: str) -> None:
    coder = CODERS[name]
    zeros = torch.zeros(1, coder.block)
    assert torch.equal(coder.decode(*coder.encode(zeros)), zeros)
    # Some of these would be rounded up to a scale that overflows.
    tops = torch.finfo(torch.float32).max * torch.linspace(0.97, 1, 200, dtype=torch.float64)
    sent = coder.decode(*coder.encode(-tops.float()[:, None].expand(-1, coder.block)))
    assert bool(torch.isfinite(sent).all())
    assert bool((sent < 0).all())


@pytest.mark.parametrize("name", ["int3", "int3.5", "int4", "int8", None])
@given(
    st.lists(FLOATS, min_size=1, max_size=300),
    st.sampled_from([0.01, 0.3, 1.0]),
    st.integers(1, 3),
    st.integers(0, 4),
)
def test_sent_and_kept_are_what_was_there(
    name: str | None, numbers: list[float], part: float, every: int, step: int
) -> None:
    options = HybridOptions(k=part, remainder=name, every=every, dense_below=0)
    layout = Layout.of(len(numbers), options, step, ranks=2)
    assume(not layout.is_dense)
    before = torch.zeros(layout.padded)
    before[: len(numbers)] = torch.tensor(numbers)
    *exact, codes, scales, rest, finite = hybrid_gradient(
        torch.tensor(numbers), None, layout.k, name, every=every, phase=layout.phase
    )
    assert exact[0].numel() == layout.k == math.ceil(part * len(numbers))
    assert len(codes) == len(scales) == layout.rows
    assert finite.tolist() == [1]
    total = torch.zeros_like(rest)
    add_exact(total, exact, layout)
    add_rounded(total, [codes, scales] if layout.rows else [], layout)
    # Each value is sent exactly or rounded, so that a float32 sum has one addend that is not 0.
    assert torch.equal(total.double() + rest.double(), before.double())


@given(st.integers(1, 5000), st.integers(1, 7))
def test_every_block_has_its_turn(n: int, every: int) -> None:
    options = HybridOptions(remainder="int4", every=every, dense_below=0)
    turns = torch.zeros(-(-n // 128) * 128)
    for step in range(every):
        layout = Layout.of(n, options, step, ranks=2)
        assert layout.padded == len(turns)
        if not layout.is_dense:
            layout.active(turns).add_(1)
            assert layout.rows == len(layout.active(turns))
    assert bool((turns == (0 if n <= 1 else 1)).all())


def test_a_message_holds_any_dtypes() -> None:
    tensors = [
        torch.tensor([1, 2, 3], dtype=torch.uint8),
        torch.tensor([], dtype=torch.float32),
        torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
        torch.tensor([[1, 2], [3, 4]], dtype=torch.int32),
    ]
    fields = [(each.dtype, each.numel()) for each in tensors]
    message = pack(tensors, torch.device("cpu"))
    assert message.numel() == message_bytes(fields) == 8 + 0 + 8 + 16
    found = unpack(message, fields)
    assert all(torch.equal(one, two.flatten()) for one, two in zip(found, tensors, strict=True))


def test_warm_up_goes_down_by_one_factor() -> None:
    options = HybridOptions(k=0.001, warmup=4)
    parts = [options.k_at(step) for step in range(6)]
    assert parts[0] == 0.25
    assert parts[4:] == [0.001, 0.001]
    ratios = [one / two for one, two in pairwise(parts[:5])]
    assert ratios == pytest.approx([ratios[0]] * 4)
    assert HybridOptions(k=0.5, warmup=4).k_at(0) == 0.5


@pytest.mark.parametrize(
    "wrong",
    [
        {"k": -0.1},
        {"k": 1.5},
        {"k": math.nan},
        {"k": 0.0, "remainder": None},
        {"remainder": "int2"},
        {"every": 0},
        {"every": 1.5},
        {"warmup": -1},
        {"dense_below": True},
        {"momentum": 1.0},
        {"clip": 0.0},
        {"clip": math.inf},
        {"k": "0.1"},
        {"k": None},
        {"momentum": True},
        {"clip": "1"},
    ],
)
def test_options_that_mean_nothing_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ArgumentError, match=next(iter(wrong))):
        HybridOptions(**wrong)  # type: ignore[arg-type]


def test_options_that_do_not_exist_are_named() -> None:
    with pytest.raises(ArgumentError, match="options ks. Required: one of k, remainder, every"):
        HybridState(ks=0.1)
