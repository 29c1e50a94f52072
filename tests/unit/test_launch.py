"""What launch refuses before it needs a driver, and what it says where there is none."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from hopsparse.errors import ArgumentError, UnsupportedError
from hopsparse.launch import DeviceFacts, Element, capture, check_tiled, encode, pdl_is_safe
from hopsparse.launch.config import check_launch
from hopsparse.plan import KernelSpec

SPEC = KernelSpec(
    op="test",
    name="test m64",
    kernel="",
    text="",
    entry="entry",
    threads=384,
    cluster=(2, 4, 1),
    smem_bytes=0,
    args_bytes=256,
    pdl=True,
)

WITHOUT_DRIVER = """
from hopsparse.errors import UnsupportedError
from hopsparse.launch import Element, Kernel, device_facts, driver, encode, kernel_for
from hopsparse.plan import KernelSpec

driver._LIBRARY = "libcuda.so.of-no-machine"
spec = KernelSpec("op", "name", "", "", "entry", 128, (1, 1, 1), 0, 8)
asked = []
for call in (
    driver.require_driver,
    driver.require_driver,
    lambda: device_facts(0),
    lambda: Kernel(b"", spec, 0),
    lambda: kernel_for(spec, 0, lambda spec: asked.append(spec) or b""),
    lambda: encode(0, Element.U8, (64,), (), (64,)),
):
    try:
        call()
    except UnsupportedError as error:
        print(error)
print(asked)
"""


def test_without_a_driver_every_call_says_so_at_once() -> None:
    """In a process of its own: bindings have hung here, and a thread cannot be stopped."""
    result = subprocess.run(
        [sys.executable, "-c", WITHOUT_DRIVER],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    message = (
        "a machine without libcuda.so.of-no-machine. Required: the driver of an NVIDIA GPU. "
        "Try: the same call with tensors on the CPU."
    )
    assert result.stdout.splitlines() == [message] * 6 + ["[]"]


def test_code_runs_on_its_own_architecture_alone() -> None:
    hopper, ampere = DeviceFacts(0, (9, 0), 132), DeviceFacts(1, (8, 0), 108)
    for arch in ("sm_90", "sm_90a"):
        hopper.require(arch)
        with pytest.raises(UnsupportedError, match=f"a GPU of sm_80, for a kernel of {arch}\\. "):
            ampere.require(arch)
    with pytest.raises(UnsupportedError, match="sm_90, for a kernel of sm_100a"):
        hopper.require("sm_100a")


@pytest.mark.parametrize("grid", [(2, 4, 1), (132, 8, 3)])
@pytest.mark.parametrize("pdl", [False, True])
def test_a_launch_in_whole_clusters_is_taken(grid: tuple[int, int, int], pdl: bool) -> None:
    check_launch(SPEC, grid, 256, pdl)


@pytest.mark.parametrize(
    ("grid", "near"),
    [
        ((3, 4, 1), "4 x 4 x 1"),
        ((2, 6, 1), "2 x 8 x 1"),
        ((0, 4, 1), "2 x 4 x 1"),
        ((2, 4, 0), "2 x 4 x 1"),
        ((-2, 4, 1), "2 x 4 x 1"),
    ],
    ids=str,
)
def test_a_grid_that_cuts_a_cluster_or_is_empty_is_refused(
    grid: tuple[int, int, int], near: str
) -> None:
    with pytest.raises(ArgumentError, match=f"blocks for test m64.*2 x 4 x 1.*Try: {near}"):
        check_launch(SPEC, grid, 256, False)


@pytest.mark.parametrize("size", [0, 255, 257])
def test_arguments_of_another_size_are_refused(size: int) -> None:
    with pytest.raises(ArgumentError, match=f"{size} bytes for test m64. Required: 256 bytes"):
        check_launch(SPEC, (2, 4, 1), size, False)


def test_an_early_start_needs_a_kernel_that_waits() -> None:
    with pytest.raises(ArgumentError, match="griddepcontrol.wait"):
        check_launch(replace(SPEC, pdl=False), (2, 4, 1), 256, True)


GOOD = {
    "address": 0x7F00_0000_0010,
    "element": Element.BF16,
    "sizes": (1000, 2**32, 1),
    "strides_bytes": (2000, 2**40 - 16),
    "box": (64, 256, 1),
    "swizzle": 128,
    "l2_promotion": 128,
}


@pytest.mark.parametrize("element", Element)
@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
def test_a_box_as_wide_as_its_swizzle_is_taken(element: Element, swizzle: int) -> None:
    width = (swizzle or 2048) // element.bytes
    check_tiled(**GOOD | {"element": element, "swizzle": swizzle, "box": (min(width, 256), 256, 1)})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"address": 0x7F00_0000_0008}, "address 0x7f0000000008. Required: a multiple of 16"),
        ({"address": -16}, "address -0x10"),
        ({"sizes": (), "strides_bytes": (), "box": ()}, "0 dimensions. Required: 1 to 5"),
        ({"sizes": (8,) * 6, "strides_bytes": (16,) * 5, "box": (8,) * 6}, "6 dimensions"),
        ({"strides_bytes": (2000,)}, "1 strides for 3 dimensions"),
        ({"strides_bytes": (2, 2000, 2000)}, "3 strides for 3 dimensions"),
        ({"box": (64, 256)}, "a box of 2 extents for 3 dimensions"),
        ({"sizes": (1000, 0, 1)}, "size 0 in dimension 1"),
        ({"sizes": (1000, 1, 2**32 + 1)}, "size 4294967297 in dimension 2"),
        ({"strides_bytes": (2008, 16000)}, "stride 2008 bytes in dimension 1"),
        ({"strides_bytes": (2000, 2**40)}, "stride 1099511627776 bytes in dimension 2"),
        ({"strides_bytes": (-2000, 0)}, "stride -2000 bytes in dimension 1"),
        ({"box": (64, 0, 1)}, "box 0 in dimension 1"),
        ({"box": (64, 8, 257)}, "box 257 in dimension 2"),
        ({"box": (12, 8, 1)}, "box row of 24 bytes. Required: a multiple of 16"),
        ({"box": (72, 8, 1)}, "box row of 144 bytes. Required: at most its swizzle, 128 bytes"),
        ({"swizzle": 16}, "swizzle 16. Required: one of 0, 32, 64, 128"),
        ({"l2_promotion": 512}, "L2 promotion 512. Required: one of 0, 64, 128, 256"),
    ],
    ids=str,
)
def test_a_map_that_the_driver_would_refuse_is_refused_by_name(
    change: dict[str, object], message: str
) -> None:
    check_tiled(**GOOD)
    for refuse in (check_tiled, encode):  # encode says so even where there is no driver
        with pytest.raises(ArgumentError, match=f"a tensor map of {message}"):
            refuse(**GOOD | change)


@pytest.mark.parametrize(
    ("text", "safe"),
    [
        ("\tgriddepcontrol.wait;\n\tret;", True),
        ("{.reg .pred p; griddepcontrol.wait; }", True),
        ("\tgriddepcontrol.launch_dependents;", False),
        ("// griddepcontrol.wait;\n\tret;", False),
        ("\tret; // no griddepcontrol.wait", False),
        ("        /*0050*/                   ACQBULK ;", True),
        ("        /*0040*/                   PREEXIT ;", False),
        ("", False),
    ],
)
def test_a_kernel_is_safe_to_start_early_if_it_waits(text: str, safe: bool) -> None:
    assert pdl_is_safe(text) is safe


def test_a_capture_is_not_warmed_less_than_never() -> None:
    with pytest.raises(ArgumentError, match="warmup -1"):
        capture(lambda: None, warmup=-1)
