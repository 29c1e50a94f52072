"""Every kernel of every operator, with each compiler; and that the checks see what is wrong."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hopsparse.compiler import Built, KernelCache, Nvrtc
from hopsparse.plan import KernelSpec
from tests.helpers.kernels import all_specs, disassemble, problems, promised
from tests.helpers.tiny_kernels import tiny_spec

# The first test of a process waits for all kernels that it is asked for.
pytestmark = pytest.mark.timeout(900)

SPECS = all_specs()
Compiled = dict[KernelSpec, tuple[Built, str]]

MMA = (
    '"wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0, %1, %2, %3}, %4, %4, 1, 1, 1, 0, 0;"'
    ': "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "l"((long long)a.n)'
)
START = "float d[4] = {};"
FENCE = 'asm volatile("wgmma.fence.sync.aligned;");'
END = (
    'asm volatile("wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;");'
    "a.out[threadIdx.x + 32] = d[0] + d[1] + d[2] + d[3];"
)
WGMMA = f"{START} {FENCE} asm volatile({MMA}); {END}"
# The accumulator is touched between two products that are in flight.
SERIALISED = f"{START} for (int i = 0; i < 3; i++) {{ asm volatile({MMA}); d[0] += 1; }} {END}"
STACK = (
    "float b[40]; for (int i = 0; i < 40; i++) b[i] = a.out[i];"
    "for (int i = 0; i < a.n; i++) b[i * a.n % 40] += b[i % 7]; a.out[9] = b[a.n];"
)
SHARED = "__shared__ int s[64]; s[lane()] = a.n; a.out[0] = s[a.n];"


@pytest.fixture(scope="session")
def compiled(
    nvrtc: Nvrtc, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Compiled:
    """The kernels that are asked for, made side by side the first time that one is needed."""
    asked = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    specs = [each["spec"] for each in asked if "spec" in each]
    cache = KernelCache(tmp_path_factory.mktemp("kernels"), nvrtc=nvrtc)
    done = list(cache.compile_all(specs))
    sass = iter(disassemble([built.cubin.image for built in done if built.cubin]))
    return {built.spec: (built, next(sass) if built.cubin else "") for built in done}


@pytest.mark.parametrize("spec", SPECS, ids=[f"{spec.op}/{spec.name}" for spec in SPECS])
def test_a_kernel_is_as_its_operator_says(compiled: Compiled, spec: KernelSpec) -> None:
    built, sass = compiled[spec]
    # The cache has checked the size of the arguments, and that pdl goes with a wait.
    assert built.error is None
    assert built.cubin is not None
    assert list(problems(spec, built.cubin, sass, promised(spec))) == []


def test_names_are_unique() -> None:
    assert len({(spec.op, spec.name) for spec in SPECS}) == len(set(SPECS)) == len(SPECS)


def found_in(spec: KernelSpec, nvrtc: Nvrtc, root: Path, *instructions: str) -> list[str]:
    cubin = KernelCache(root / "cache", nvrtc=nvrtc, root=root).get(spec)
    (sass,) = disassemble([cubin.image])
    return list(problems(spec, cubin, sass, instructions))


def test_a_good_kernel_has_no_problem(nvrtc: Nvrtc, root: Path) -> None:
    spec = replace(tiny_spec(extra=WGMMA), threads=128)
    assert found_in(spec, nvrtc, root, "HGMMA.64x8x16.F32.BF16", "STG.E", "HGMMA") == []


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (tiny_spec(extra="int unused;"), '"unused" was declared'),
        (tiny_spec(extra=SERIALISED), "(C75"),
        (tiny_spec(extra=STACK), "bytes of stack"),
        (replace(tiny_spec(), smem_bytes=227 * 1024 + 16), "bytes shared"),
        (tiny_spec(extra=SHARED), ""),
        (replace(tiny_spec(extra=SHARED), smem_bytes=227 * 1024), "bytes shared"),
        (replace(tiny_spec(), threads=32768), "registers"),
    ],
)
def test_what_is_wrong_is_seen(nvrtc: Nvrtc, root: Path, wrong: KernelSpec, told: str) -> None:
    found = found_in(wrong, nvrtc, root)
    assert bool(found) == bool(told)
    assert all(told in line for line in found)


def test_the_code_of_each_kernel_is_told_apart(nvrtc: Nvrtc, root: Path) -> None:
    cache = KernelCache(root / "cache", nvrtc=nvrtc, root=root)
    images = [cache.get(tiny_spec(extra=extra)).image for extra in ("", WGMMA, "")]
    sass = disassemble(images)
    assert ["HGMMA" in each for each in sass] == [False, True, False]
    assert all("EXIT" in each for each in sass)


def test_a_missing_instruction_is_seen(nvrtc: Nvrtc, root: Path) -> None:
    assert found_in(tiny_spec(), nvrtc, root, "HGMMA.SP", "STG", "TG.E") == [
        "no HGMMA.SP",
        "no TG.E",
    ]
