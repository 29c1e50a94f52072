"""N:M and its packed layout, against decoders that share no code with the packer."""

from __future__ import annotations

import ast
import re
import time
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hopsparse.errors import ArgumentError, FormatError
from hopsparse.formats import (
    NM,
    NMPattern,
    packed_k,
    parse_pattern,
    stack_rows,
    window_columns,
)
from hopsparse.formats._windows import window_table
from tests.helpers import matrices as mk

DOC = Path(__file__).parents[2] / "docs" / "formats.md"
PATTERNS = ("1:4", "2:4", "3:6", "4:6", "4:8", "6:8", "8:10")
PAIRS = list(combinations(range(4), 2))


def documented_decoder():
    """The decoder of docs/formats.md, run as it stands there."""
    source = re.search(r"```python\n(def decode\(.*?)```", DOC.read_text(), re.DOTALL)[1]
    statements = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.stmt)]
    assert len(statements) == 11  # the def and ten, however they are wrapped
    namespace = {"np": np}
    exec(source, namespace)
    return namespace["decode"]


def decode(matrix: NM) -> torch.Tensor:
    values, meta = mk.bits(matrix.values).numpy(), matrix.meta.numpy()
    dense = documented_decoder()(values, meta, *matrix.shape, matrix.pattern.m)
    return torch.from_numpy(dense.copy()).view(matrix.dtype)


@given(
    st.sampled_from(PATTERNS),
    mk.dtypes,
    st.sampled_from([(1, 1), (3, 37), (65, 70), (130, 12), (8, 144)]),
    mk.seeds,
)
@settings(deadline=None, max_examples=60)
def test_the_documented_decoder_reads_what_is_packed(text, dtype, shape, seed):
    pattern = parse_pattern(text)
    dense = mk.random_nm(shape, pattern, dtype, seed, n=1 + seed % pattern.n)
    matrix = NM.from_dense(dense, pattern)
    mk.assert_same(decode(matrix), dense)
    mk.assert_same(matrix.to_dense(), dense)


def wgmma_sp(step_bytes: np.ndarray, words: np.ndarray, x: np.ndarray, dtype, selector: int):
    """One wgmma.mma_async.sp, K-major A without swizzle, from the PTX ISA; returns D [64, n].

    `step_bytes` is A in shared memory, `words` the metadata register of each of 128 threads. A is
    read through its descriptor (128 bytes to the next 16-byte column, 256 to the next 8 rows).
    """
    size = np.dtype(dtype).itemsize
    k = 64 if size == 1 else 32
    assert x.shape[0] == k
    rows, stored = np.arange(64)[:, None], np.arange(k // 2)[None] * size
    address = rows // 8 * 256 + stored // 16 * 128 + rows % 8 * 16 + stored % 16
    a = step_bytes.view(dtype)[address // size].astype(np.int64)
    index = np.full((64, k // 2), -1)
    for thread in range(128):
        warp, lane = divmod(thread, 32)
        word = int(words[thread]) & 0xFFFFFFFF
        if size == 1:
            fields = [(lane // 4 + 8 * (lane % 2), 32 * (lane // 2 % 2), word, 8)]
        elif lane % 4 // 2 != selector:
            continue
        else:
            column = 16 * (lane % 2)
            fields = [(lane // 4, column, word, 4), (lane // 4 + 8, column, word >> 16, 4)]
        for row, column, field, groups in fields:
            for group in range(groups):
                nibble = field >> 4 * group & 15
                first, second = nibble & 3, nibble >> 2
                assert first < second, "undefined in PTX"
                at = column // 2 + 2 * group
                index[16 * warp + row, at : at + 2] = first, second
    assert (index >= 0).all()
    columns = np.arange(k // 2)[None] // 2 * 4 + index
    return np.einsum("rs,rsn->rn", a, x[columns])


@pytest.mark.parametrize("text", ["2:4", "4:6", "6:8"])
@pytest.mark.parametrize("dtype", [torch.int8, torch.float16], ids=str)
def test_wgmma_reads_the_packed_layout(text, dtype):
    """Small integers through a simulated tensor core: exact, ragged in rows and k."""
    pattern, (rows, cols, tokens) = parse_pattern(text), (70, 150, 3)
    keep = mk.random_nm((rows, cols), pattern, torch.int8, 3) != 0
    w = torch.where(keep, torch.randint(-4, 5, (rows, cols)), 0)
    x = torch.randint(-4, 5, (tokens, cols))
    matrix = NM.from_dense(w.to(dtype), pattern)
    scalar = np.int8 if dtype == torch.int8 else np.float16

    panels, units, _ = matrix.meta.shape
    gathered = np.zeros((units * 64, tokens), np.int64)
    source = window_columns(cols, pattern)
    inside = source < cols
    gathered[: len(source)][inside.numpy()] = x.T[source[inside]].numpy()
    k = 64 if matrix.values.element_size() == 1 else 32
    got = np.zeros((panels * 64, tokens), np.int64)
    for panel in range(panels):
        for step in range(units * 64 // k):
            step_bytes = mk.bits(matrix.values[panel, step]).numpy().reshape(-1).view(np.uint8)
            unit, selector = divmod(step * k, 64)
            words = matrix.meta[panel, unit].numpy()
            part = gathered[step * k : step * k + k]
            got[panel * 64 : panel * 64 + 64] += wgmma_sp(
                step_bytes, words, part, scalar, selector // 32
            )
    assert np.array_equal(got[:rows], (w @ x.T).numpy())
    assert not got[rows:].any()


def test_a_lane_finds_its_register_fragment_in_its_word():
    """RS form, 16-bit: lane l holds columns 2 (l % 4) and the next, rows l / 4 and + 8."""
    dense = torch.arange(64 * 32, dtype=torch.int16).view(torch.float16).view(64, 32)
    kept = torch.stack((dense[:, ::2], dense[:, 1::2]), -1)  # every window holds columns 0 and 1
    wide = torch.zeros(64, 16, 4, dtype=torch.float16)
    wide[..., :2] = kept
    matrix = NM.from_dense(wide.flatten(1))
    words = mk.bits(matrix.values).view(torch.int32)  # [1, 2 steps, 8, 2, 8, 4]
    for step, warp, lane in ((0, 0, 0), (0, 2, 13), (1, 3, 31)):
        for register in range(4):
            high, half = register % 2, register // 2
            core = words[0, step, 2 * warp + high, half].flatten()
            row = 16 * warp + 8 * high + lane // 4
            column = 16 * step + 8 * half + lane % 4 * 2
            pair = mk.bits(kept.flatten(1)[row, column : column + 2].contiguous())
            assert int(core[lane]) == int(pair[0]) | int(pair[1]) << 16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8], ids=str)
def test_all_six_index_pairs(dtype):
    dense = torch.zeros(6, 24, dtype=dtype)
    for row in range(6):
        for group in range(6):
            a, b = PAIRS[(row + group) % 6]
            dense[row, 4 * group + a], dense[row, 4 * group + b] = group + 1, -(row + 1)
    matrix = NM.from_dense(dense)
    matrix.validate()
    assert torch.equal(mk.bits(matrix.to_dense()), mk.bits(dense))
    assert torch.equal(mk.bits(decode(matrix)), mk.bits(dense))
    nibbles = {int(matrix.meta[0, 0, 0]) >> shift & 15 for shift in range(0, 16, 4)}
    assert nibbles == {a | b << 2 for a, b in PAIRS[:4]}


def test_empty_windows_have_the_canonical_nibble():
    matrix = NM.from_dense(torch.zeros(1, 1, dtype=torch.float16))
    assert (matrix.meta == 0x44444444).all()


@pytest.mark.parametrize("text", ["4:6", "6:8", "4:8", "8:10", "10:12"])
def test_greedy_windows_never_fail(text):
    """All masks of a group with at most N bits, not a sample: a row for each."""
    pattern = parse_pattern(text)
    masks = torch.arange(1 << pattern.m)
    bits = masks[:, None] >> torch.arange(pattern.m) & 1
    dense = (bits * (torch.arange(pattern.m) + 1)).to(torch.int8)
    dense = dense[bits.sum(1) <= pattern.n]
    matrix = NM.from_dense(dense, pattern)
    matrix.validate()
    assert torch.equal(matrix.to_dense(), dense)
    assert matrix.nnz == int((dense != 0).sum())


@given(st.sampled_from(["4:6", "6:8", "4:8", "8:10"]), mk.dtypes, mk.shapes, mk.seeds)
@settings(deadline=None, max_examples=60)
def test_overlapping_windows_store_each_entry_once(text, dtype, shape, seed):
    pattern = parse_pattern(text)
    dense = mk.random_nm(shape, pattern, dtype, seed)
    matrix = NM.from_dense(dense, pattern)
    matrix.validate()
    assert matrix.nnz == int((dense.double() != 0).sum())
    mk.assert_same(matrix.to_dense(), dense)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("shape", [(37, 4160), (64, 2064), (100, 37), (1, 4160), (129, 66)])
def test_ragged(shape, dtype):
    dense = mk.random_nm(shape, NMPattern(2, 4), dtype, 7)
    matrix = NM.from_dense(dense)
    matrix.validate()
    mk.assert_same(matrix.to_dense(), dense)


@pytest.mark.parametrize(
    ("text", "dtype", "share"),
    [
        ("2:4", torch.bfloat16, 0.5625),
        ("2:4", torch.int8, 0.625),
        ("4:6", torch.bfloat16, 0.75),
        ("4:6", torch.int8, 0.8333),
        ("6:8", torch.bfloat16, 0.8438),
        ("6:8", torch.int8, 0.9375),
        ("8:10", torch.bfloat16, 0.9),
        ("8:10", torch.int8, 1),
    ],
)
def test_bytes_are_those_of_the_table(text, dtype, share):
    dense = torch.zeros(64, 3840, dtype=dtype)
    matrix = NM.from_dense(dense, parse_pattern(text))
    assert round(matrix.nbytes / dense.nbytes, 4) == share
    assert f"| {share} |" in DOC.read_text()
    assert packed_k(3840, parse_pattern(text)) % 3840 in (0, 1280, 1920, 2304)


@pytest.mark.parametrize("dtype", [torch.float16, torch.int8], ids=str)
@pytest.mark.parametrize("side", [16, 64])
def test_a_matrix_that_is_not_2_4_is_refused(side, dtype):
    dense = mk.random_nm((side, side), NMPattern(2, 4), dtype, 1)
    dense[5, 12:16] = torch.tensor([1, 2, 3, 0]).to(dtype)
    dense[9, 0:4] = torch.ones(4).to(dtype)
    with pytest.raises(FormatError) as caught:
        NM.from_dense(dense)
    assert str(caught.value) == (
        "row 5, group 3 (columns 12 to 15) holds 3 non-zeros. "
        "Required: at most 2 in every 4 columns (2:4). "
        "Try: hopsparse.prune.magnitude(weight, NMPattern(2, 4)) first."
    )


@pytest.mark.parametrize("text", ["2:5", "3:4", "1:2", "2:18", "7:8"])
def test_patterns_without_windows_are_refused(text):
    with pytest.raises(FormatError, match="M even, 4 <= M <= 16 and N <= M - 2"):
        NM.from_dense(torch.zeros(2, 90), parse_pattern(text))


def _meta(matrix: NM) -> NM:
    matrix.meta[0, 0, 5] = 0x44444440
    return matrix


def _padding(matrix: NM) -> NM:
    matrix.values[0, -1, -1, -1, -1, -1] = 1
    return matrix


def _overlap(matrix: NM) -> NM:
    # Columns 2 and 3 in the first window, 0 and 1 (the same columns) in the second.
    matrix.values[0, 0, 0, 0, 0, :4] = 1
    matrix.meta[0, 0, 0] = 0x4444444E
    return matrix


def _too_many(matrix: NM) -> NM:
    # 5 non-zeros in a group of 4:8: three windows have room for them.
    matrix.values[0, 0, 0, 0, 0, :5] = 1
    matrix.meta[0, 0, 0] = 0x44444EE4
    return matrix


def _narrow(matrix: NM) -> NM:
    return NM(matrix.shape, matrix.values, matrix.meta[..., :0], matrix.pattern)


@pytest.mark.parametrize(
    ("text", "damage", "words"),
    [
        ("2:4", _meta, ["row 1, window 4 has index pair [0, 0]", "two rising columns"]),
        ("2:4", _padding, ["have a place of their own", "zero padding"]),
        ("6:8", _overlap, ["have a place of their own", "no column stored by two windows"]),
        ("4:8", _too_many, ["row 0, group 0 (columns 0 to 7) holds 5", "at most 4 in every 8"]),
        ("2:4", _narrow, ["'meta' is torch.int32 [1, 1, 0]", "[1, 1, 128]"]),
    ],
)
def test_damaged_parts_are_refused(text, damage, words):
    matrix = NM.from_dense(torch.zeros(32, 32, dtype=torch.float16), parse_pattern(text))
    matrix.validate()
    with pytest.raises(FormatError) as caught:
        damage(matrix).validate()
    for word in words:
        assert word in str(caught.value), str(caught.value)


def test_speed_of_8192_by_8192():
    """Under a second each way, in processor time of one core: a busy machine changes nothing."""
    dense = mk.random_nm((1024, 8192), NMPattern(2, 4), torch.bfloat16, 0).repeat(8, 1)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert best_seconds(lambda: NM.from_dense(dense)) < 1
        matrix = NM.from_dense(dense)
        assert best_seconds(matrix.to_dense) < 1
    finally:
        torch.set_num_threads(threads)


def best_seconds(action) -> float:
    """Processor time of the best of three."""

    def once() -> float:
        start = time.process_time()
        action()
        return time.process_time() - start

    return min(once() for _ in range(3))


def test_packing_does_not_follow_the_default_device() -> None:
    window_table.cache_clear()
    dense = torch.tensor([[1.0, 0.0, 0.0, 2.0, 0.0, 3.0]])
    with torch.device("meta"):
        packed = NM.from_dense(dense, NMPattern(4, 6))
        assert torch.equal(packed.to_dense(), dense)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8, torch.float32], ids=str)
@pytest.mark.parametrize("text", ["2:4", "6:8"])
@pytest.mark.parametrize("rows", [(64,), (64, 192, 64), (128, 70)], ids=str)
def test_stacked_weights_are_those_of_their_dense_stack(
    rows: tuple[int, ...], text: str, dtype: torch.dtype
) -> None:
    pattern = parse_pattern(text)
    assert isinstance(pattern, NMPattern)
    dense = [mk.random_nm((each, 72), pattern, dtype, seed=each) for each in rows]
    found = stack_rows([NM.from_dense(each, pattern) for each in dense])
    right = NM.from_dense(torch.cat(dense), pattern)
    assert (found.shape, found.pattern) == (right.shape, pattern)
    assert torch.equal(mk.bits(found.values), mk.bits(right.values))
    assert torch.equal(found.meta, right.meta)
    found.validate()


def test_weights_that_do_not_go_together_are_not_stacked() -> None:
    w = NM.from_dense(torch.zeros(64, 8))
    others = {
        "64 columns|8 columns": NM.from_dense(torch.zeros(64, 64)),
        "bfloat16": NM.from_dense(torch.zeros(64, 8).bfloat16()),
        "1:4": NM.from_dense(torch.zeros(64, 8), "1:4"),
    }
    for words, other in others.items():
        with pytest.raises(ArgumentError, match=f"weight 1 of .*({words})"):
            stack_rows([w, other])
    with pytest.raises(ArgumentError, match="weight 0 with 65 rows"):
        stack_rows([NM.from_dense(torch.zeros(65, 8)), w])
    with pytest.raises(ArgumentError, match="no weights"):
        stack_rows([])
