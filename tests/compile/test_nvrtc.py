from __future__ import annotations

import _ctypes
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from hopsparse.compiler import Nvrtc, compile_unit, default_nvrtc, find_nvrtc, nvrtc_version
from hopsparse.compiler import nvrtc as module
from hopsparse.compiler.build_id import build_id
from hopsparse.compiler.cubin import usage_of
from hopsparse.errors import CompileError, UnsupportedError
from tests.helpers.tiny_kernels import start_child, told_by

STORE = 'extern "C" __global__ void entry(float* out) { out[threadIdx.x] = 1; }'
# Needs 40 floats that are indexed by a number only known at run time: they lie on the stack.
STACK = """
extern "C" __global__ void entry(float* out, int n) {
  float a[40];
  for (int i = 0; i < 40; i++) a[i] = out[i];
  for (int i = 0; i < n; i++) a[(i * n) % 40] += a[i % 7];
  out[0] = a[n];
}
extern "C" __global__ void other(float* out) {
  __shared__ float s[32];
  s[threadIdx.x] = out[threadIdx.x];
  __syncthreads();
  out[threadIdx.x] = s[31 - threadIdx.x];
}
"""
# The accumulator is touched between two products that are in flight.
SERIALISED = """
extern "C" __global__ void __launch_bounds__(128) entry(float* out, unsigned long long b) {
  float d[4] = {};
  for (int i = 0; i < 3; i++) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0, %1, %2, %3}, %4, %4, "
        "1, 1, 1, 0, 0;" : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "l"(b));
    d[0] += 1;
  }
  asm volatile("wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;");
  out[threadIdx.x] = d[0] + d[1] + d[2] + d[3];
}
"""


def test_a_kernel_becomes_an_elf_file(nvrtc: Nvrtc) -> None:
    cubin = compile_unit(STORE, "entry", nvrtc=nvrtc)
    assert cubin.image.startswith(b"\x7fELF")
    assert b"entry" in cubin.image
    assert cubin.nvrtc == nvrtc.version
    assert 0 < cubin.registers <= 32
    assert (cubin.stack_bytes, cubin.spill_bytes, cubin.static_smem_bytes) == (0, 0, 0)
    assert (cubin.advice, cubin.warnings, cubin.args_bytes) == ((), (), 8)
    assert cubin.compile_ms > 0


def test_the_same_text_gives_the_same_bytes(nvrtc: Nvrtc) -> None:
    assert compile_unit(STORE, "entry", nvrtc=nvrtc) == compile_unit(STORE, "entry", nvrtc=nvrtc)


def test_each_kernel_of_a_text_has_its_own_facts(nvrtc: Nvrtc) -> None:
    entry, other = (compile_unit(STACK, name, nvrtc=nvrtc) for name in ("entry", "other"))
    assert (entry.stack_bytes, entry.static_smem_bytes, entry.args_bytes) == (160, 0, 12)
    assert (other.stack_bytes, other.static_smem_bytes, other.args_bytes) == (0, 128, 8)
    assert entry.registers != other.registers


def test_spills_are_counted(nvrtc: Nvrtc) -> None:
    loads = "".join(f"float v{i} = in[{i} * n];" for i in range(64))
    sums = "".join(f"out[{i}] = v{i} * v{(i * 7 + 3) % 64};" for i in range(64))
    text = f"""extern "C" __global__ void __launch_bounds__(1024, 2)
    entry(const volatile float* in, volatile float* out, int n) {{ {loads} {sums} }}"""
    cubin = compile_unit(text, "entry", nvrtc=nvrtc)
    assert cubin.registers == 32
    assert cubin.spill_bytes > 0
    assert cubin.stack_bytes > 0


def test_advice_about_wgmma_is_kept(nvrtc: Nvrtc) -> None:
    cubin = compile_unit(SERIALISED, "entry", nvrtc=nvrtc)
    assert any("C7511" in line and "serialized" in line for line in cubin.advice)


def test_warnings_are_kept(nvrtc: Nvrtc) -> None:
    cubin = compile_unit(STORE.replace("{", "{ int unused;"), "entry", nvrtc=nvrtc)
    assert len(cubin.warnings) == 1
    assert '"unused" was declared but never referenced' in cubin.warnings[0]


def test_waiting_for_the_grid_ahead_is_seen(nvrtc: Nvrtc) -> None:
    text = STORE.replace("{", '{ asm volatile("griddepcontrol.wait;" ::: "memory");')
    assert compile_unit(text, "entry", nvrtc=nvrtc).has_grid_wait
    assert not compile_unit(STORE, "entry", nvrtc=nvrtc).has_grid_wait


@pytest.mark.parametrize(
    ("text", "arch", "told"),
    [
        (STORE.replace("1;", "one;"), "sm_90a", r'identifier "one" is undefined in `extern "C"'),
        (STORE + "\n#include <cuda_fp16.h>", "sm_90a", "cuda_fp16.h"),
        (SERIALISED, "sm_90", "not supported on .target 'sm_90'"),
        (STORE, "sm_1", "invalid value for --gpu-architecture"),
        (STORE.replace("{", "{ __shared__ int s[99999]; s[out[0]] = 1; out[1] = s[out[2]];"),
         "sm_90a", "error"),
    ],
)  # fmt: skip
def test_an_error_says_what_the_compiler_says(
    nvrtc: Nvrtc, text: str, arch: str, told: str
) -> None:
    with pytest.raises(CompileError) as caught:
        compile_unit(text, "entry", arch, nvrtc=nvrtc)
    assert told in caught.value.got
    assert caught.value.got.startswith("NVRTC_ERROR_")


def test_a_text_without_the_kernel_is_refused() -> None:
    with pytest.raises(CompileError, match="without the kernel 'product'"):
        compile_unit(STORE, "product")


def test_usage_is_that_of_the_kernel_named() -> None:
    log = "Compiling entry function 'entry2' for 'sm_90a'\nUsed 7 registers, used 0 barriers"
    assert usage_of(log, "entry") is None
    found = usage_of(log, "entry2")
    assert found is not None
    assert found.registers == 7


def test_the_version_names_the_build_and_not_the_place(tmp_path: Path, newer_nvrtc: Nvrtc) -> None:
    original = find_nvrtc()
    link = tmp_path / "toolkit"
    link.symlink_to(original.parent)
    assert Nvrtc(link / original.name).version == nvrtc_version()
    assert newer_nvrtc.version != nvrtc_version()
    release, _, build = nvrtc_version().partition("+")
    assert release.startswith("13.")
    assert len(build) == 16


def test_a_build_id_is_read_as_binutils_read_it(nvrtc: Nvrtc) -> None:
    notes = subprocess.run(["readelf", "-n", nvrtc.path], capture_output=True, text=True)
    assert f"Build ID: {build_id(nvrtc.path)}" in notes.stdout


def test_a_library_without_a_build_id_is_told_by_its_size(tmp_path: Path) -> None:
    plain = tmp_path / "libnvrtc.so.13"
    plain.write_bytes(b"\x7fELF" + bytes(96))
    assert build_id(plain) == "100-bytes"


@pytest.mark.parametrize("content", [None, b"", b"\x7fELF", b"\x7fELF" * 100])
def test_a_library_that_is_none_is_an_error_at_once(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "libnvrtc.so.13"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UnsupportedError, match="nvidia-cuda-nvrtc|ELF"):
        compile_unit(STORE, "entry", nvrtc=Nvrtc(path))


def test_another_library_under_its_name_is_an_error(tmp_path: Path) -> None:
    """What loads and has not the functions: NVRTC of another time, or none at all."""
    path = tmp_path / "libnvrtc.so.13"
    path.symlink_to(_ctypes.__file__)
    with pytest.raises(UnsupportedError, match="does not load .*nvrtcCreateProgram") as caught:
        compile_unit(STORE, "entry", nvrtc=Nvrtc(path))
    assert "nvidia-cuda-nvrtc>=13.0,<14" in caught.value.hint


@pytest.mark.parametrize("name", ["libnvrtc.so.13", "libnvrtc-builtins.so.13.0"])
def test_a_library_that_was_cut_short_is_an_error(tmp_path: Path, name: str) -> None:
    """A full disk leaves such a file. Loading it would end the process with SIGBUS."""
    for path in default_nvrtc().path.parent.glob("libnvrtc*"):
        (tmp_path / path.name).symlink_to(path)
    original = (tmp_path / name).resolve()
    (tmp_path / name).unlink()
    with original.open("rb") as file:
        (tmp_path / name).write_bytes(file.read(1 << 20))
    with pytest.raises(UnsupportedError, match=f"{name} cannot be read .cut short."):
        compile_unit(STORE, "entry", nvrtc=Nvrtc(tmp_path / "libnvrtc.so.13"))


def test_a_folder_that_cannot_be_looked_into_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    (tmp_path / "file").touch()
    bad = [loop, tmp_path / "file", "x" * 5000, "no-such-folder"]
    monkeypatch.setattr(sys, "path", [*map(str, bad), *sys.path])
    monkeypatch.setenv("CUDA_HOME", "y" * 5000)
    monkeypatch.setenv("LD_LIBRARY_PATH", ":".join(map(str, bad)))
    assert find_nvrtc() == default_nvrtc().path
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.delenv("CONDA_PREFIX", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    assert [path for path in module._folders() if os.path.isfile(path / "libnvrtc.so.13")] in (
        [],
        [Path("/usr/local/cuda/lib64")],
    )


def test_no_nvrtc_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_folders", lambda: iter([tmp_path]))
    with pytest.raises(UnsupportedError) as caught:
        find_nvrtc()
    assert caught.value.hint == "pip install 'nvidia-cuda-nvrtc>=13.0,<14'"


@pytest.mark.parametrize(("variable", "below"), [("CUDA_HOME", "lib64"), ("CONDA_PREFIX", "lib")])
def test_nvrtc_of_a_toolkit_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, below: str
) -> None:
    installed = default_nvrtc().path
    (tmp_path / below).mkdir()
    for path in installed.parent.glob("libnvrtc*"):
        (tmp_path / below / path.name).symlink_to(path)
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setenv(variable, str(tmp_path))
    found = find_nvrtc()
    assert found.parent == tmp_path / below
    assert compile_unit(STORE, "entry", nvrtc=Nvrtc(found)).image.startswith(b"\x7fELF")


def test_other_threads_run_while_one_compiles() -> None:
    text = STORE + "".join(STORE.replace("entry", f"entry{i}") for i in range(40))
    compiling = threading.Thread(target=compile_unit, args=(text, "entry"))
    compiling.start()
    steps = 0
    while compiling.is_alive():
        time.sleep(0.002)
        steps += 1
    assert steps >= 10


def test_compiling_loads_neither_torch_nor_the_driver(package: Path) -> None:
    program = f"""
import sys
compile_unit({STORE!r}, "entry")
print(sorted(name for name in sys.modules if name.split(".")[0] in ("torch", "cuda", "numpy")))
print("libcuda" in open("/proc/self/maps").read())
"""
    assert told_by(start_child(package, program)).split("\n")[:2] == ["[]", "False"]
