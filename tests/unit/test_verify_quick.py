"""The quick sets of `hopsparse verify`: what is in them, and that kernels are compiled ahead."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hopsparse.nn.checks import checks as layer_checks
from hopsparse.ops.checks import all_checks
from hopsparse.ops.plans import every_spec
from hopsparse.ops.spmm_nm.chooser import Chooser
from hopsparse.ops.spmm_nm.cost import Problem
from hopsparse.ops.spmm_nm.experts import checks as experts
from hopsparse.ops.spmm_nm.int4 import checks as int4
from hopsparse.ops.spmm_nm.int4.plan import INT4
from hopsparse.ops.spmm_nm.kernel import Numbers, spec_of_numbers, stores_directly
from hopsparse.ops.spmm_nm.scaled import checks as scaled
from hopsparse.ops.spmm_nm.scaled.plan import SCALED, as_widened, widens_once
from hopsparse.ops.spmm_nm.verified import CODES, HALVES
from hopsparse.verify import Check

_SMS = 132
_CODED = frozenset(every_spec("spmm_nm"))


def kind_of(check: Check) -> tuple[str, str, str]:
    """Operator, dtype and format; blocks of all sizes are one."""
    form = "bsr" if check.format.startswith("bsr") else check.format
    return check.op, check.dtype, form


def test_the_quick_set_of_a_gpu_is_short_and_has_every_operator_dtype_and_format() -> None:
    checks = [*all_checks(), *layer_checks()]
    quick = [check for check in checks if check.is_quick("cuda")]
    assert {kind_of(check) for check in quick} == {kind_of(check) for check in checks}
    # Each kernel has to be loaded, and some compiled: 8 seconds are asked for.
    assert len(quick) <= 220
    # A tile of each family, and both kernels of blocks.
    tiles = {check.op for check in quick if check.only_gpu}
    assert tiles == {check.op for check in checks if check.only_gpu}
    blocks = [check.case for check in quick if check.op == "spmm_bsr" and check.only_gpu]
    assert {case.startswith("tile-mma") for case in blocks} == {False, True}


def test_the_quick_set_of_the_cpu_has_no_tiles() -> None:
    quick = [check for check in all_checks() if check.is_quick("cpu")]
    assert len(quick) > 400
    assert not [check for check in quick if check.only_gpu]


@pytest.mark.parametrize("op", ["spmm_nm", "spmm_bsr"])
def test_tiles_of_the_quick_set_are_compiled_ahead(op: str) -> None:
    """Compiling takes longer than all else of a check: `compile --all` does it before."""
    names = [spec.name for spec in every_spec(op)]
    assert len(set(names)) == len(names)
    tiles = {
        check.case.removeprefix("tile-").removesuffix("-swiglu")
        for check in all_checks()
        if check.op.startswith(op)
        and check.is_quick("cuda")
        and check.only_gpu
        # Their rows are whole lines in these checks.
        and check.op != "spmm_nm_experts"
    }
    assert len(tiles) >= 4
    for tile in tiles:
        own = [name.split() for name in names if f" {tile} " in f" {name} "]
        assert any("direct" not in words for words in own), tile
        assert any("direct" in words for words in own), tile


def test_tiles_of_experts_in_the_quick_set_are_compiled_ahead() -> None:
    names = {spec.name for spec in _CODED}
    tiles = [check.case for check in experts.checks() if check.first and check.only_gpu]
    assert len(tiles) == 2
    for tile in tiles:
        assert f"bf16 {tile.removeprefix('tile-')} experts" in names


def is_compiled(chooser: Chooser, shape: tuple[int, ...], numbers: Numbers, act: str) -> bool:
    """Whether the kernel that is chosen on an H200 is one of `every_spec`."""
    problem = Problem(*shape)
    if widens_once(problem, numbers, _SMS, activation=act):
        numbers = as_widened(numbers)
    config = chooser.choose(problem, numbers, _SMS, activation=act)
    direct = stores_directly(problem.out, numbers.out)
    return spec_of_numbers(config, numbers, act, act != "none", direct) in _CODED


@pytest.mark.parametrize("kind", scaled._KINDS)
def test_8_bit_products_of_the_quick_set_are_compiled_ahead(kind: str) -> None:
    numbers = scaled._KINDS[kind][2]
    first = {check.case for check in scaled.checks() if check.first and check.dtype == kind}
    shapes = [shape for shape in scaled._SHAPES if "x".join(map(str, shape)) in first]
    assert shapes
    calls = [(shape, out, "none") for shape in shapes for out in ("float32", "bfloat16")]
    if "act-gelu" in first:
        calls += [((77, 136, 640), out, "gelu") for out in ("float32", "bfloat16", "float16")]
    if "codes-out" in first:
        calls.append(((65, 200, 256), numbers.x, "none"))
    if "ends-of-int8" in first:
        calls.append(((3, 64, 65536), "int32", "none"))
    for shape, out, act in calls:
        assert is_compiled(SCALED, shape, replace(numbers, out=out), act), (shape, out, act)


@pytest.mark.parametrize(
    ("kind", "numbers"),
    [
        ("int4:32/bfloat16", replace(HALVES, fine=True)),
        ("int4:64/bfloat16", HALVES),
        ("int4:128/float16", Numbers("int4", "float16", "float16")),
        ("int4:128/int8", CODES),
        ("int4:128/e4m3", replace(CODES, x="float8_e4m3fn")),
    ],
)
def test_4_bit_products_of_the_quick_set_are_compiled_ahead(kind: str, numbers: Numbers) -> None:
    first = {check.case for check in int4.checks() if check.first and check.dtype == kind}
    shapes = [shape for shape in int4._SHAPES if "x".join(map(str, shape)) in first]
    assert shapes
    calls = [(shape, "none") for shape in shapes]
    if "act-relu" in first:
        calls.append(((45, 136, 256), "relu"))
    for shape, act in calls:
        for out in (numbers.out, "float32"):
            assert is_compiled(INT4, shape, replace(numbers, out=out), act), (shape, out, act)
