"""Loading and launching on a GPU; every result is exact."""

from __future__ import annotations

import itertools
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hopsparse.errors import DriverError, UnsupportedError
from hopsparse.launch import (
    Element,
    Kernel,
    capture,
    current_stream,
    device_facts,
    encode,
    is_capturing,
    kernel_for,
    max_active_blocks,
    max_active_clusters,
)
from hopsparse.plan import KernelSpec
from tests.helpers.compiled import compiled

BOX_ROWS, SWIZZLES = 8, (0, 32, 64, 128)
SOURCE = Path(__file__).with_name("launch.cuh").read_text() + "".join(
    f'extern "C" __global__ void move_{width}(const __grid_constant__ MoveArgs a) '
    f"{{ move<{BOX_ROWS}, {width}>(a); }}\n"
    for width in (32, 64, 128)
)
SPEC = KernelSpec(
    op="test",
    name="add",
    kernel="",
    text="",
    entry="add",
    threads=128,
    cluster=(1, 1, 1),
    smem_bytes=0,
    args_bytes=16,
)
RELAY = replace(SPEC, name="relay", entry="relay", args_bytes=16, pdl=True)


@pytest.fixture(scope="module")
def cubin(device: torch.device) -> bytes:
    return compiled(SOURCE, "CUBIN")


@pytest.fixture
def load(cubin: bytes) -> Callable[[KernelSpec], Kernel]:
    return lambda spec: kernel_for(spec, 0, lambda _: cubin)


Load = Callable[[KernelSpec], Kernel]


def put_add(kernel: Kernel, data: Tensor, number: int, stream: int) -> None:
    args = struct.pack("Pii", data.data_ptr(), data.numel(), number)
    kernel.launch(-(-data.numel() // 128), args, stream)


def zeros(count: int) -> Tensor:
    return torch.zeros(count, dtype=torch.int32, device="cuda:0")


def test_runs_on_the_stream_of_torch_and_on_another(load: Load) -> None:
    data, kernel = zeros(1000), load(SPEC)
    put_add(kernel, data, 5, current_stream(0))
    other = torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        assert current_stream(0) == other.cuda_stream
        put_add(kernel, data, 7, current_stream(0))
        data *= 2
    torch.cuda.current_stream().wait_stream(other)
    assert (data == 24).all()


def test_a_kernel_is_loaded_once(load: Load) -> None:
    assert load(SPEC) is load(replace(SPEC))


def test_all_the_shared_memory_of_a_block_can_be_had(load: Load) -> None:
    size = 227 * 1024
    kernel = load(replace(SPEC, name="reverse", entry="reverse", smem_bytes=size))
    count = size // 4
    out = zeros(count)
    kernel.launch(1, struct.pack("PI4x", out.data_ptr(), count), current_stream(0))
    assert torch.equal(out.cpu(), torch.arange(count - 1, -1, -1, dtype=torch.int32) * 3 + 1)
    assert max_active_blocks(kernel) == device_facts(0).sm_count


def test_more_shared_memory_than_there_is_is_refused_at_load(cubin: bytes) -> None:
    spec = replace(SPEC, entry="reverse", smem_bytes=228 * 1024)
    with pytest.raises(DriverError, match=r"cuFuncSetAttribute returned CUDA_ERROR_INVALID_VALUE"):
        Kernel(cubin, spec, 0)


@pytest.mark.parametrize("cluster", [(1, 1, 1), (2, 1, 1), (2, 2, 1), (16, 1, 1)], ids=str)
def test_blocks_are_in_clusters(cluster: tuple[int, int, int], load: Load) -> None:
    spec = replace(SPEC, name=f"rank {cluster}", entry="rank", cluster=cluster, args_bytes=8)
    kernel, (width, height) = load(spec), (32, 6)
    out = zeros(width * height)
    kernel.launch((width, height, 1), struct.pack("P", out.data_ptr()), current_stream(0))
    y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    size = cluster[0] * cluster[1]
    want = size * 256 + x % cluster[0] + y % cluster[1] * cluster[0]
    assert torch.equal(out.cpu().view(height, width), want.int())
    assert max_active_blocks(kernel) == max_active_clusters(kernel) * size > 0


@pytest.mark.parametrize("swizzle", SWIZZLES)
@pytest.mark.parametrize(
    ("element", "dtype"),
    [
        (Element.U8, torch.uint8),
        (Element.BF16, torch.bfloat16),
        (Element.F16, torch.float16),
        (Element.F32, torch.float32),
        (Element.I32, torch.int32),
        (Element.I64, torch.int64),
    ],
    ids=str,
)
def test_boxes_move_exactly_with_ragged_edges(
    element: Element, dtype: torch.dtype, swizzle: int, load: Load
) -> None:
    width = swizzle or 64
    spec = replace(SPEC, name=f"move_{width}", entry=f"move_{width}", args_bytes=320)
    box, chunk = (width // element.bytes, BOX_ROWS), max(1, 16 // element.bytes)
    rows, columns, pitch = 37, 3 * box[0] - 1, 3 * box[0] + chunk
    source = torch.randint(1, 100, (rows, pitch), device="cuda:0").to(dtype)
    moved = torch.full_like(source, 111)
    grid = (3, -(-rows // BOX_ROWS), 1)
    seen = torch.zeros(grid[1], grid[0], BOX_ROWS * width, dtype=torch.uint8, device="cuda:0")
    maps = [
        encode(
            matrix.data_ptr(),
            element,
            (columns, rows),
            (pitch * element.bytes,),
            box,
            swizzle=swizzle,
        )
        for matrix in (source, moved)
    ]
    args = b"".join(maps) + struct.pack("Pi52x", seen.data_ptr(), box[0])
    load(spec).launch(grid, args, current_stream(0))

    assert torch.equal(moved[:, :columns], source[:, :columns])
    # A store writes whole chunks of 16 bytes: here the zeros that the load brought.
    assert (moved[:, columns : 3 * box[0]] == 0).all()
    assert (moved[:, 3 * box[0] :] == 111).all()
    padded = torch.zeros(grid[1] * BOX_ROWS, 3 * box[0], dtype=dtype)
    padded[:rows, :columns] = source[:, :columns].cpu()
    tiles = padded.view(torch.uint8).view(grid[1], BOX_ROWS, grid[0], width).transpose(1, 2)
    place = torch.arange(BOX_ROWS * width)
    if swizzle:  # the chunk of 16 bytes is XORed with the line of 128 bytes, as far as it spans
        place ^= (place >> 7 & (swizzle // 16 - 1)) << 4
    assert torch.equal(seen.cpu()[..., place], tiles.reshape(seen.shape))


def test_a_repeated_map_is_the_kept_one(device: torch.device) -> None:
    data = zeros(1024)
    maps = [encode(data.data_ptr(), Element.I32, (64, 16), (256,), (32, 8)) for _ in range(2)]
    assert maps[0] is maps[1]
    assert len(maps[0]) == 128
    assert maps[0] != encode(data.data_ptr(), Element.I32, (64, 15), (256,), (32, 8))


@pytest.mark.parametrize("pdl", [False, True])
def test_a_chain_with_early_starts_sees_what_was_written_before(pdl: bool, load: Load) -> None:
    kernel, buffers = load(RELAY), (zeros(128), zeros(128))
    packed = [
        struct.pack("PP", a.data_ptr(), b.data_ptr()) for a, b in itertools.permutations(buffers)
    ]

    def chain() -> None:
        for step in range(50):
            kernel.launch(1, packed[step % 2], current_stream(0), pdl=pdl)

    chain()
    assert (buffers[0] == 50).all()
    graph = capture(chain, warmup=0)
    graph.replay()
    assert (buffers[0] == 100).all()


def test_a_graph_runs_what_was_captured(load: Load) -> None:
    data, kernel = zeros(300), load(SPEC)

    def step() -> Tensor:
        put_add(kernel, data, 1, current_stream(0))
        return data * 10

    graph = capture(step, warmup=2)
    assert (data == 2).all()
    for _ in range(3):
        graph.replay()
    assert (data == 5).all()
    assert (graph.outputs == 50).all()


def test_loading_is_refused_inside_a_capture_which_goes_on(cubin: bytes) -> None:
    data, asked = zeros(1), []
    spec = replace(SPEC, name="never loaded")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        data += 1
        assert is_capturing(0)
        with pytest.raises(UnsupportedError, match=r"never loaded, a kernel to load while a CUDA"):
            Kernel(cubin, spec, 0)
        with pytest.raises(UnsupportedError, match=r"make the same call once before the capture"):
            kernel_for(spec, 0, lambda spec: asked.append(spec) or cubin)
        data += 1
    assert not is_capturing(0)
    assert asked == []
    graph.replay()
    assert (data == 2).all()


def run_in_threads(*jobs: Callable[[], None]) -> None:
    """Run all at once; what one raises is raised here."""
    errors: list[BaseException] = []

    def guarded(job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def test_another_thread_may_load_while_this_one_captures(load: Load) -> None:
    data, late = zeros(200), replace(SPEC, name="loaded late")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        data += 1
        run_in_threads(lambda: assert_loads(load, late))
        put_add(load(late), data, 1, current_stream(0))
    graph.replay()
    assert (data == 2).all()


def assert_loads(load: Load, spec: KernelSpec) -> None:
    assert load(spec).spec == spec


def test_threads_share_a_kernel(load: Load) -> None:
    """Each has its own stream, size and number; none of them ever made a context current."""
    kernel, launches = load(SPEC), 2000
    work = [(zeros(1000 + 500 * i), i + 1, torch.cuda.Stream()) for i in range(3)]
    torch.cuda.synchronize()

    def job(data: Tensor, number: int, stream: torch.cuda.Stream) -> None:
        for _ in range(launches):
            put_add(kernel, data, number, stream.cuda_stream)

    run_in_threads(*(lambda item=item: job(*item) for item in work))
    torch.cuda.synchronize()
    for data, number, _ in work:
        assert (data == launches * number).all()


def test_threads_load_a_kernel_once(load: Load) -> None:
    spec, found = replace(SPEC, name="loaded by many"), []
    run_in_threads(*[lambda: found.append(load(spec))] * 4)
    assert len(found) == 4
    assert len({id(kernel) for kernel in found}) == 1


def test_driver_errors_name_the_call(cubin: bytes) -> None:
    with pytest.raises(DriverError, match=r"cuModuleGetFunction returned CUDA_ERROR_NOT_FOUND"):
        Kernel(cubin, replace(SPEC, entry="absent"), 0)
    with pytest.raises(DriverError, match=r"cuModuleLoadData returned CUDA_ERROR_"):
        Kernel(bytes(4096), SPEC, 0)
    with pytest.raises(DriverError, match=r"cuDeviceGet returned CUDA_ERROR_INVALID_DEVICE"):
        Kernel(cubin, SPEC, 99)
    kernel = Kernel(cubin, replace(SPEC, threads=2048), 0)
    with pytest.raises(DriverError, match=r"cuLaunchKernelEx returned CUDA_ERROR_INVALID_VALUE"):
        kernel.launch(1, bytes(16), 0)


def test_code_of_another_gpu_is_refused(cubin: bytes) -> None:
    with pytest.raises(UnsupportedError, match=r"sm_90, for a kernel of sm_100a"):
        Kernel(cubin, replace(SPEC, arch="sm_100a"), 0)


def host_us(call: Callable[[], object]) -> float:
    """Median over ten batches, small enough that the queue of the GPU never fills."""
    batch, times = 200, []
    for _ in range(10):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(batch):
            call()
        times.append((time.perf_counter() - start) / batch * 1e6)
    return sorted(times)[len(times) // 2]


def test_a_bound_launch_costs_less_host_time_than_a_linear_layer(
    load: Load, record_property: Callable[[str, object], None]
) -> None:
    kernel, data = load(SPEC), zeros(128)
    args = struct.pack("Pii", data.data_ptr(), 128, 1)
    x = torch.randn(16, 64, device="cuda:0", dtype=torch.bfloat16)
    launch = host_us(kernel.bind(1, args, current_stream(0)))
    linear = host_us(lambda: torch.nn.functional.linear(x, x))
    record_property("launch_us", round(launch, 2))
    record_property("linear_us", round(linear, 2))
    print(f"host time: a launch {launch:.2f} us, F.linear {linear:.2f} us")
    assert launch < linear
