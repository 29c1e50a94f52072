"""pack_nm on the CPU, where it is `NM.from_dense`; and what its kernels are asked to do."""

from __future__ import annotations

import pytest
import torch

from hopsparse.errors import ArgumentError, FormatError, UnsupportedError
from hopsparse.formats import NM, VALUE_DTYPES, NMPattern
from hopsparse.ops import pack_nm
from hopsparse.ops.pack_nm import cases, plan
from hopsparse.ops.pack_nm.op import empty_packed, reads_vectors
from hopsparse.ops.pack_nm.plan import PackConfig, grid_for, spec_for
from hopsparse.prune import magnitude
from tests.helpers.two_four import MASKS, assert_same_bits, two_four

SMALL = [case for case in cases.SMOKE + cases.EDGE if case.rows * case.cols < 50_000]


@pytest.mark.parametrize("dtype", VALUE_DTYPES, ids=str)
@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_packs_what_from_dense_packs(case: cases.Case, dtype: torch.dtype) -> None:
    dense = two_four(case.rows, case.cols, dtype)
    assert_same_bits(pack_nm(dense), NM.from_dense(dense))


def test_the_matrices_of_the_tests_hold_every_kind_of_group() -> None:
    assert len(MASKS) == 11
    dense = two_four(64, 256, torch.bfloat16).float()
    kinds = (dense.view(-1, 4) != 0).unique(dim=0)
    assert len(kinds) == 11
    assert dense.isnan().any()
    assert (dense.signbit() & (dense == 0)).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("pattern", ["2:4", NMPattern(1, 4), "6:8"], ids=str)
def test_selects_as_magnitude_does(pattern: str | NMPattern, dtype: torch.dtype) -> None:
    dense = torch.randint(-2, 3, (70, 51)).to(dtype)  # most groups hold ties
    chosen = NMPattern(*map(int, str(pattern).split(":")))
    packed = pack_nm(dense, pattern, select="magnitude")
    assert_same_bits(packed, NM.from_dense(magnitude(dense, chosen), chosen))


def test_other_patterns_pack_too() -> None:
    dense = magnitude(torch.randn(20, 48), NMPattern(4, 6))
    assert_same_bits(pack_nm(dense, "4:6"), NM.from_dense(dense, "4:6"))


def test_a_full_group_is_named_as_from_dense_names_it() -> None:
    dense = two_four(70, 40, torch.float32)
    dense[67, 9:12] = 1
    with pytest.raises(FormatError, match=r"row 67, group 2 \(columns 8 to 11\) holds [34]") as got:
        pack_nm(dense)
    with pytest.raises(FormatError) as want:
        NM.from_dense(dense)
    assert str(got.value) == str(want.value)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"select": "largest"}, ArgumentError, "select='largest'"),
        ({"pattern": "block:32x32"}, ArgumentError, "Required: N:M"),
        ({"pattern": "3:5"}, FormatError, "pattern 3:5"),
        ({"dense": torch.ones(4)}, FormatError, "shape"),
        ({"dense": torch.ones(0, 4)}, FormatError, "at least one row"),
        ({"dense": torch.ones(2, 4, dtype=torch.int64)}, FormatError, "int64"),
        (
            {"dense": torch.tensor([[1.0, float("nan")]]), "select": "magnitude"},
            ArgumentError,
            "nan",
        ),
    ],
)
def test_refuses(arguments: dict[str, object], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        pack_nm(**{"dense": torch.zeros(2, 4), **arguments})  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_eight_bits_are_selected_before_they_are_rounded(dtype: torch.dtype) -> None:
    with pytest.raises(UnsupportedError, match="select before the values are rounded"):
        pack_nm(torch.ones(4, 8).to(dtype), select="magnitude")


def test_rows_that_start_on_16_bytes_are_read_in_vectors() -> None:
    wide = torch.zeros(64, 80, dtype=torch.bfloat16)
    assert reads_vectors(wide)
    assert reads_vectors(wide[:, :50])
    assert reads_vectors(wide[1:, 8:])
    assert reads_vectors(wide[:1].expand(9, 80))
    assert reads_vectors(wide[:, :1])
    assert not reads_vectors(wide[:, 1:])
    assert not reads_vectors(wide.T)
    assert not reads_vectors(wide[:, ::2])
    assert not reads_vectors(torch.zeros(4, 50, dtype=torch.bfloat16))
    assert reads_vectors(torch.zeros(1, 50, dtype=torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8], ids=str)
def test_what_is_allocated_is_what_is_packed(dtype: torch.dtype) -> None:
    dense = two_four(70, 130, dtype)
    empty, packed = empty_packed(dense), NM.from_dense(dense)
    assert empty.pattern == packed.pattern
    for name, part in packed.parts().items():
        other = empty.parts()[name]
        assert (other.shape, other.dtype) == (part.shape, part.dtype)


@pytest.mark.parametrize("units", [1, 2, 4])
@pytest.mark.parametrize(
    ("rows", "cols"),
    [(1, 1), (64, 64), (65, 129), (4_194_240, 3), (4_194_241, 3), (9_000_000, 700)],
)
def test_the_grid_covers_the_matrix_and_fits_the_gpu(units: int, rows: int, cols: int) -> None:
    x, y, z = grid_for(PackConfig(units=units), rows, cols)
    assert 64 * units * (x - 1) < cols <= 64 * units * x
    assert rows <= 64 * y * z < rows + 64 * z
    assert y <= 65_535
    assert z <= 65_535


def test_specs_are_named_and_shared() -> None:
    specs = plan.every_spec()
    assert len({spec.name for spec in specs}) == len(specs) == len(set(specs))
    for select in ("check", "magnitude"):
        for vector in (True, False):
            assert spec_for(plan.default_config(select, vector=vector), "bfloat16") in specs
    config = PackConfig()
    assert spec_for(config, "float8_e4m3fn") == spec_for(config, "float8_e5m2")
    assert spec_for(config, "int8") != spec_for(config, "float8_e5m2")
    selecting = PackConfig("magnitude")
    assert spec_for(selecting, "bfloat16") != spec_for(selecting, "float16")


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        (PackConfig(), "float32"),
        (PackConfig("magnitude"), "int8"),
        (PackConfig(units=0), "bfloat16"),
    ],
)
def test_there_is_no_kernel_for(config: PackConfig, dtype: str) -> None:
    with pytest.raises(ArgumentError, match="pack_nm kernel"):
        spec_for(config, dtype)
