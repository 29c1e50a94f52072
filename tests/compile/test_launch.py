"""What launch hands to the driver, read back by NVIDIA's own bindings of its headers."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import pytest

from hopsparse.launch import Element, pdl_is_safe
from hopsparse.launch.config import launch_config
from hopsparse.launch.tensormap import L2_PROMOTIONS, SWIZZLES
from hopsparse.plan import KernelSpec
from tests.helpers.compiled import compiled

SPEC = KernelSpec(
    op="test",
    name="test",
    kernel="",
    text="",
    entry="entry",
    threads=384,
    cluster=(1, 1, 1),
    smem_bytes=200_000,
    args_bytes=64,
)


def test_element_kinds_are_those_of_the_driver() -> None:
    from cuda.bindings import driver

    words = {"U": "UINT", "I": "INT", "F": "FLOAT", "BF": "BFLOAT"}
    for element in Element:
        name = words[element.name.rstrip("0123456789")] + str(element.bytes * 8)
        assert element == getattr(driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{name}")


def test_swizzles_and_promotions_are_those_of_the_driver() -> None:
    from cuda.bindings import driver

    swizzle, promotion = driver.CUtensorMapSwizzle, driver.CUtensorMapL2promotion
    assert SWIZZLES == {
        0: swizzle.CU_TENSOR_MAP_SWIZZLE_NONE,
        32: swizzle.CU_TENSOR_MAP_SWIZZLE_32B,
        64: swizzle.CU_TENSOR_MAP_SWIZZLE_64B,
        128: swizzle.CU_TENSOR_MAP_SWIZZLE_128B,
    }
    assert L2_PROMOTIONS == {
        0: promotion.CU_TENSOR_MAP_L2_PROMOTION_NONE,
        64: promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_64B,
        128: promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
        256: promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
    }


@pytest.mark.parametrize("cluster", [(1, 1, 1), (2, 1, 1), (4, 2, 1)], ids=str)
@pytest.mark.parametrize("pdl", [False, True])
def test_launch_config_is_read_back(cluster: tuple[int, int, int], pdl: bool) -> None:
    from dataclasses import replace

    from cuda.bindings import driver

    ours = launch_config(replace(SPEC, cluster=cluster))
    ours.grid_x, ours.grid_y, ours.grid_z = 12, 8, 3
    ours.stream = 0x7F00_1234_5678
    ours.attribute_count += pdl
    read = driver.CUlaunchConfig(_ptr=ctypes.addressof(ours))
    assert (read.gridDimX, read.gridDimY, read.gridDimZ) == (12, 8, 3)
    assert (read.blockDimX, read.blockDimY, read.blockDimZ) == (384, 1, 1)
    assert (read.sharedMemBytes, int(read.hStream)) == (200_000, 0x7F00_1234_5678)

    ids = driver.CUlaunchAttributeID
    attributes = {
        attribute.id: attribute.value
        for attribute in (
            driver.CUlaunchAttribute(_ptr=ctypes.addressof(ours.attributes[i]))
            for i in range(read.numAttrs)
        )
    }
    assert len(attributes) == (cluster != (1, 1, 1)) + pdl
    if cluster != (1, 1, 1):
        shape = attributes[ids.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION].clusterDim
        assert (shape.x, shape.y, shape.z) == cluster
    if pdl:
        early = attributes[ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION]
        assert early.programmaticStreamSerializationAllowed == 1


@pytest.mark.parametrize("waits", [False, True])
def test_the_wait_is_found_in_what_the_compiler_writes(waits: bool, tmp_path: Path) -> None:
    from cuda.pathfinder import find_nvidia_binary_utility

    ptx = "griddepcontrol.launch_dependents;" + "griddepcontrol.wait;" * waits
    source = f'extern "C" __global__ void chain(int* x) {{ asm volatile("{ptx}"); ++*x; }}'
    assert pdl_is_safe(compiled(source, "PTX").decode()) is waits
    cubin = tmp_path / "chain.cubin"
    cubin.write_bytes(compiled(source, "CUBIN"))
    nvdisasm = find_nvidia_binary_utility("nvdisasm")
    sass = subprocess.run([nvdisasm, "-c", cubin], capture_output=True, text=True, check=True)
    assert pdl_is_safe(sass.stdout) is waits
