from __future__ import annotations

from dataclasses import replace

import pytest

from hopsparse.errors import ArgumentError, UnsupportedError
from hopsparse.plan import TARGETS, KernelSpec, parse_target
from hopsparse.plan.budget import check, launch_registers, smem_left, warpgroup_registers

H200 = TARGETS["h200"]
SLICE = parse_target("h200:1/7")
SPEC = KernelSpec(
    op="op",
    name="one",
    kernel="ops/op/kernel.cuh",
    text="",
    entry="one",
    threads=384,
    cluster=(2, 1, 1),
    smem_bytes=227 * 1024,
    args_bytes=16,
)


@pytest.mark.parametrize(
    ("consumers", "expected"), [(1, (40, 240)), (2, (24, 240)), (3, (32, 160)), (4, (32, 112))]
)
def test_registers_are_those_that_the_kernels_were_written_for(
    consumers: int, expected: tuple[int, int]
) -> None:
    assert warpgroup_registers(consumers) == expected


@pytest.mark.parametrize("consumers", [1, 2, 3, 4])
def test_registers_are_legal_and_no_consumer_could_have_more(consumers: int) -> None:
    producer, consumer = warpgroup_registers(consumers)
    spec = replace(SPEC, threads=128 * (consumers + 1))
    registers = (producer, *[consumer] * consumers)
    check(spec, H200, registers)
    assert 128 * sum(registers) <= 64 * 1024
    more = (24, *[consumer + 8] * consumers)
    with pytest.raises(UnsupportedError, match="registers a"):
        check(spec, H200, more)


@pytest.mark.parametrize("consumers", [0, 5])
def test_a_number_of_warpgroups_that_no_block_has_is_refused(consumers: int) -> None:
    with pytest.raises(ArgumentError, match="1 to 4"):
        warpgroup_registers(consumers)


def test_a_launch_gives_registers_in_steps_of_eight() -> None:
    assert [launch_registers(128 * count) for count in (2, 3, 4, 5)] == [256, 168, 128, 96]


def test_the_last_byte_fits_and_one_more_does_not() -> None:
    check(SPEC, H200)
    assert smem_left(SPEC, H200) == 0
    too_much = replace(SPEC, smem_bytes=SPEC.smem_bytes + 1)
    assert smem_left(too_much, H200) == -1
    with pytest.raises(UnsupportedError) as caught:
        check(too_much, H200)
    assert caught.value.got == "op/one with 232449 bytes of shared memory a block"
    assert caught.value.need == "at most 232448 on h200"
    assert caught.value.hint == "fewer stages, or a smaller tile"


def test_a_slice_has_the_same_block_and_fewer_sms() -> None:
    check(SPEC, SLICE)
    assert smem_left(SPEC, SLICE) == smem_left(SPEC, H200)
    assert (SLICE.sm_count, H200.sm_count) == (16, 132)
    tiny = replace(SLICE, sm_count=1)
    with pytest.raises(UnsupportedError, match="clusters of 2 blocks"):
        check(SPEC, tiny)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"arch": "sm_100a"}, "for sm_100a"),
        ({"threads": 1056}, "1056 threads"),
        ({"threads": 100}, "100 threads"),
        ({"cluster": (17, 1, 1)}, "clusters of 17 blocks"),
    ],
)
def test_what_does_not_fit_is_named(change: dict[str, object], told: str) -> None:
    with pytest.raises(UnsupportedError, match=told):
        check(replace(SPEC, **change), H200)


@pytest.mark.parametrize(
    ("registers", "told"),
    [
        ((24, 240), "2 warpgroups for 384 threads"),
        ((20, 240, 240), "20 registers"),
        ((24, 236, 240), "236 registers"),
        ((24, 248, 232), "248 registers"),
        ((32, 240, 240), "65536 registers a block. Required: at most 64512"),
    ],
)
def test_registers_that_setmaxnreg_refuses_are_refused(
    registers: tuple[int, ...], told: str
) -> None:
    with pytest.raises(UnsupportedError, match=told):
        check(SPEC, H200, registers)


@pytest.mark.parametrize("text", ["h200:1/8", "h200:", "h300", "h200:7"])
def test_a_target_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ArgumentError, match="target"):
        parse_target(text)
