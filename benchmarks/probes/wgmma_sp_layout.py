"""Does the packed 2:4 layout feed wgmma.sp, and how fast is each way to feed it?

    PYTHONPATH=src python benchmarks/probes/wgmma_sp_layout.py --compile-only       # no GPU needed
    PYTHONPATH=src python benchmarks/probes/wgmma_sp_layout.py --out rows.jsonl     # on an H200

Proof: exact products of small integers. Rate: the main loop of a GEMM without its epilogue; `busy`
is tensor time over measured SM clocks; TFLOP/s count the zeros (dense-equivalent). fill=0: no
traffic; 1, 2, 4: a producer fills the stages from L2, that many CTAs sharing B by multicast.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import itertools
import json
import os
import re
import struct
import subprocess
import tempfile
import time
import zlib
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

SOURCE = Path(__file__).with_suffix(".cuh").read_text()
STAGES, PERIOD, B_STREAMS, PANELS = 4, 32, 12, 24  # as in the .cuh; two panels for each m tile
MAIN = ("ss_swizzle128", "ss_noswizzle", "rs_ldg")
SOME = (*MAIN, "rs_const", "rs_ldmatrix")
FORMS = (*SOME, "rs_lds32", "rs_ldg128")
SAME_DATA = ("ss_noswizzle", "rs_ldg", "rs_ldmatrix", "rs_lds32")
METAS = ("constant", "lds", "ldg")
Row = dict[str, Any]


class Kind(NamedTuple):
    """Operands: dtype, logical k of an instruction, PTX names, text after scale-d (SS, RS)."""

    dtype: torch.dtype
    k: int
    ptx: str
    tails: tuple[str, str]
    acc: str = "float"


KINDS = {
    "bf16": Kind(torch.bfloat16, 32, "f32.bf16.bf16", (", 1, 1, 0, 0", ", 1, 1, 0")),
    "fp16": Kind(torch.float16, 32, "f32.f16.f16", (", 1, 1, 0, 0", ", 1, 1, 0")),
    "e4m3": Kind(torch.float8_e4m3fn, 64, "f32.e4m3.e4m3", (", 1, 1", ", 1, 1")),
    "s8": Kind(torch.int8, 64, "s32.s8.s8", ("", ""), "int"),
}


class Variant(NamedTuple):
    """One kernel: operand type, n of the instruction, and where A and its indices come from."""

    dtype: str
    n: int
    form: str
    meta: str = "lds"
    traffic: int = 0
    ahead: int = 3
    proof: bool = False
    swap: bool = False

    @property
    def name(self) -> str:
        """Unique and readable."""
        if self.proof:
            return f"proof {self.dtype} {self.form}" + " selectors swapped" * self.swap
        late = f" ahead{self.ahead}" * (self.ahead != 3)
        return f"{self.dtype} n{self.n} {self.form} meta={self.meta} fill={self.traffic}{late}"

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of a launch."""
        stage = self.n * 128 + 8192
        return stage + 64 if self.proof else STAGES * (stage + 32 * KINDS[self.dtype].k + 16)


Built = dict[Variant, tuple[bytes, str]]


def variants(quick: bool) -> list[Variant]:
    """What to prove, then what to time; the traffic that could fail most goes last."""
    forms = (*MAIN, "rs_ldmatrix", "rs_lds32")
    proofs = [Variant(kind, 256, form, proof=True) for kind in KINDS for form in forms]
    proofs += [Variant(kind, 256, "rs_ldg", proof=True, swap=True) for kind in ("bf16", "fp16")]
    if quick:
        short = [Variant("bf16", 256, f, m, c) for c in (0, 1, 2) for m in METAS for f in SOME]
        return proofs + short
    found = [Variant("bf16", 256, f, m, c) for c in (0, 1) for m in METAS for f in FORMS]
    found += [Variant("bf16", 256, f, m, 2) for m in ("lds", "ldg") for f in FORMS]
    for c in (0, 1, 2):
        found += [Variant("bf16", n, f, "lds", c) for n in (192, 128) for f in SOME]
        found += [Variant(d, 256, f, m, c) for d in ("e4m3", "s8") for m in METAS for f in MAIN]
        found.append(Variant("bf16", 256, "rs_ldg", "ldg", c, ahead=1))
    found += [Variant("bf16", 256, f, m, 4) for m in ("lds", "ldg") for f in SOME]
    return proofs + sorted(found, key=lambda v: v.traffic)


def wgmma_wrapper(variant: Variant, form: str) -> str:
    """The member template `ss<Sel>` or `rs<Sel>` of Config."""
    kind, regs = KINDS[variant.dtype], variant.n // 2
    words = [f"%{i}" for i in range(regs + 7)]
    letter = "f" if kind.acc == "float" else "r"
    outs = ", ".join(f'"+{letter}"(d[{i}])' for i in range(regs))
    a, a_arg, a_in, at = words[regs], "u64 a", '"l"(a)', regs + 1
    if form == "rs":
        a, a_arg, at = "{" + ", ".join(words[regs : regs + 4]) + "}", "const u32 (&a)[4]", regs + 4
        a_in = ", ".join(f'"r"(a[{i}])' for i in range(4))
    return f"""  template <int Sel>
  static __device__ __forceinline__ void {form}(Acc (&d)[{regs}], {a_arg}, u64 b, u32 e) {{
    asm volatile("{{.reg .pred p;\\nsetp.ne.b32 p, 1, 0;\\n"
      "wgmma.mma_async.sp.sync.aligned.m64n{variant.n}k{kind.k}.{kind.ptx} "
      "{{{", ".join(words[:regs])}}}, {a}, {", ".join(words[at : at + 3])}, p"
      "{kind.tails[form == "rs"]};}}" : {outs} : {a_in}, "l"(b), "r"(e), "n"(Sel));
  }}
"""


def source(variant: Variant) -> str:
    """The .cuh, its Config and an entry."""
    kind, v = KINDS[variant.dtype], variant
    text = f"""{SOURCE}
struct Config {{
  using Acc = {kind.acc};
  static constexpr int kN = {v.n}, kMetaWords = {kind.k // 32}, kAhead = {v.ahead};
  static constexpr int kCluster = {max(1, v.traffic)};
  static constexpr bool kFill = {int(v.traffic > 0)}, kSwapSelectors = {int(v.swap)};
  static constexpr Form kA = Form::{v.form};
  static constexpr Meta kMeta = Meta::{v.meta};
{wgmma_wrapper(v, "ss")}{wgmma_wrapper(v, "rs")}}};
extern __shared__ __align__(1024) u8 smem[];
extern "C" __global__ void """
    if v.proof:
        return text + "__launch_bounds__(128, 1) entry(ProofArgs a) { prove<Config>(a, smem); }"
    cluster = f"__cluster_dims__({v.traffic}, 1, 1) " if v.traffic > 1 else ""
    return text + cluster + "__launch_bounds__(384, 1) entry(RateArgs a) { rate<Config>(a, smem); }"


def check(result: tuple[Any, ...]) -> Any:
    """Unpack a cuda.bindings result; any code but success raises."""
    code, *values = result
    if int(code) != 0:
        raise RuntimeError(f"{code!r}")
    return values[0] if len(values) == 1 else values


def compile_cubin(variant: Variant) -> tuple[bytes, str]:
    """Compile with NVRTC: the cubin and the log of ptxas."""
    from cuda.bindings import nvrtc

    program = check(nvrtc.nvrtcCreateProgram(source(variant).encode(), b"probe.cu", 0, [], []))
    options = [b"--gpu-architecture=sm_90a", b"--std=c++17", b"--ptxas-options=-v"]
    (code,) = nvrtc.nvrtcCompileProgram(program, 3, options)
    log = b" " * check(nvrtc.nvrtcGetProgramLogSize(program))
    check(nvrtc.nvrtcGetProgramLog(program, log))
    if int(code):
        raise RuntimeError(f"{variant.name}: {code!r}\n{log.decode()}")
    cubin = b" " * check(nvrtc.nvrtcGetCUBINSize(program))
    check(nvrtc.nvrtcGetCUBIN(program, cubin))
    check(nvrtc.nvrtcDestroyProgram(program))
    return cubin, log.decode()


def report_compiled(built: Built) -> bool:
    """Print registers, spills, C75xx advice and instruction counts; True if all is well."""
    from cuda.pathfinder import find_nvidia_binary_utility

    nvdisasm = find_nvidia_binary_utility("nvdisasm") or "nvdisasm"
    fine = True
    for variant, (cubin, log) in built.items():
        (registers,) = re.findall(r"Used (\d+) registers", log)
        spills = sum(map(int, re.findall(r"(\d+) bytes (?:stack frame|spill)", log)))
        advice = " ".join(sorted(set(re.findall(r"C75\d\d", log))))
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            Path(file.name).write_bytes(cubin)
            sass = subprocess.check_output([nvdisasm, "-c", file.name], text=True)
        found = Counter(re.findall(r"[HQI]GMMA\.SP|LDL|STL|LDSM|LDS|LDG|UBLKCP", sass))
        good = not spills and not advice and any(op.endswith(".SP") for op in found)
        fine &= good
        line = f"{variant.name:43} regs {registers} spills {spills} {advice} {dict(found)}"
        print("ok " if good else "BAD", line)
    print(f"{len(built)} kernels: {'all good' if fine else 'SOME ARE BAD'}")
    return fine


class Kernel:
    """The entry of a loaded cubin."""

    def __init__(self, variant: Variant, cubin: bytes) -> None:
        from cuda.bindings import driver

        self.driver, self.variant = driver, variant
        self.module = check(driver.cuModuleLoadData(cubin))
        self.function = check(driver.cuModuleGetFunction(self.module, b"entry"))
        limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        check(driver.cuFuncSetAttribute(self.function, limit, variant.smem_bytes))

    def grid(self) -> int:
        """CTAs that run at once, one an SM, in whole clusters."""
        sms: int = torch.cuda.get_device_properties(0).multi_processor_count
        if (cluster := self.variant.traffic) <= 1:
            return sms
        config = self.driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = sms // cluster * cluster, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = 384, 1, 1
        config.sharedMemBytes = self.variant.smem_bytes
        return cluster * int(check(self.driver.cuOccupancyMaxActiveClusters(self.function, config)))

    def launch(self, grid: int, *args: Tensor | int) -> None:
        """Launch on torch's stream; the arguments are the fields of the entry's one struct."""
        letters = "".join("P" if isinstance(a, Tensor) else "i" for a in args) + "0P"
        values = (a.data_ptr() if isinstance(a, Tensor) else a for a in args)
        packed = ctypes.create_string_buffer(struct.pack(letters, *values))
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(packed))
        shape = (grid, 1, 1, 128 if self.variant.proof else 384, 1, 1, self.variant.smem_bytes)
        tail = (torch.cuda.current_stream().cuda_stream, ctypes.addressof(pointers), 0)
        check(self.driver.cuLaunchKernel(self.function, *shape, *tail))


def two_four_weight(rows: int, cols: int, seed: int) -> Tensor:
    """Integers from -4 to 4: all six pairs, four single entries and the empty group occur."""
    make = torch.Generator().manual_seed(seed)
    masks = torch.tensor([[m >> i & 1 for i in range(4)] for m in range(16)])
    masks = masks[masks.sum(1) <= 2]
    pick = torch.randint(len(masks), (rows, cols // 4), generator=make)
    assert len(pick.unique()) == len(masks) == 11
    sign = torch.randint(2, (rows, cols), generator=make) * 2 - 1
    return masks[pick].view(rows, cols) * sign * torch.randint(1, 5, (rows, cols), generator=make)


def describe_errors(got: Tensor, want: Tensor) -> str:
    """How many elements are wrong, and where."""
    bad = got != want
    row, col = bad.nonzero()[0].tolist()
    rows = sorted(set((bad.any(1).nonzero().flatten() % 64 // 8).tolist()))
    cols = sorted(set((bad.any(0).nonzero().flatten() // 16).tolist()))
    where = f"{int(bad.sum())} of {bad.numel()} wrong, row blocks of 8 {rows}, columns // 16 {cols}"
    return f"{where}, first [{row}, {col}] is {got[row, col]:g}, not {want[row, col]:g}"


def prove(variant: Variant, kernel: Kernel, lbo: int, sbo: int) -> str:
    """Empty if the product is exact for x = identity and for random integers."""
    from hopsparse.formats import _panels
    from hopsparse.formats.nm import NM

    kind, errors = KINDS[variant.dtype], []
    for seed, k in enumerate((variant.n, 384, 128)):
        w = two_four_weight(192, k, seed)
        x = torch.randint(-3, 4, (variant.n, k), generator=torch.Generator().manual_seed(seed))
        if seed == 0:
            x = torch.eye(k, dtype=torch.int64)  # D = W: a wrong column block is a wrong k
        packed = NM.from_dense(w.to(kind.dtype))
        # The poison is a NaN as float32 and out of reach as an integer.
        out = torch.full((192, variant.n), 0x7FC0ABCD, dtype=torch.int32, device="cuda")
        kept = _panels.untile_values(packed.values)
        parts = (packed.values, kept, packed.meta, x.to(kind.dtype))
        on_device = [part.cuda().contiguous() for part in parts]
        kernel.launch(3, *on_device, out, k * kind.dtype.itemsize // 128, lbo, sbo)
        torch.cuda.synchronize()
        got = (out if kind.acc == "int" else out.view(torch.float32)).cpu().double()
        want = w.double() @ x.double().T
        if not torch.equal(got, want):
            errors.append(f"k={k}{' identity' if seed == 0 else ''}: {describe_errors(got, want)}")
    return "; ".join(errors)


def run_proofs(built: Built) -> list[Row]:
    """Prove every variant, print as it goes."""
    rows = []
    for variant in [v for v in built if v.proof]:
        kernel = Kernel(variant, built[variant][0])
        plain = variant.form == "ss_noswizzle"
        for lbo, sbo in ((128, 256), (256, 128)) if plain else ((128, 256),):
            name = variant.name + f" lbo={lbo} sbo={sbo}" * plain
            error = prove(variant, kernel, lbo, sbo)
            surprise = (lbo == 128 and not variant.swap) == bool(error)
            print("WRONG" if error else "exact", name, "  <-- UNEXPECTED" * surprise, flush=True)
            print(f"      {error}\n" if error else "", end="")
            rows.append({"name": name, "exact": not error, "surprise": surprise, "error": error})
    return rows


def operands(kind: Kind, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Random B, A and index words on the device, as the rate kernel reads them."""
    torch.manual_seed(n)

    def values(count: int) -> Tensor:
        if kind.dtype == torch.int8:
            return torch.randint(-127, 128, (count,), dtype=torch.int8, device="cuda")
        return torch.randn(count // kind.dtype.itemsize, device="cuda").to(kind.dtype)

    nibbles = torch.tensor([0x4, 0x8, 0xC, 0x9, 0xD, 0xE], device="cuda")
    picked = nibbles[torch.randint(6, (PANELS * PERIOD * kind.k * 4, 8), device="cuda")]
    meta = (picked << torch.arange(0, 32, 4, device="cuda")).sum(1).to(torch.int32)
    return values(B_STREAMS * PERIOD * n * 128), values(PANELS * PERIOD * 4096), meta


def measure(variant: Variant, kernel: Kernel, data: tuple[Tensor, ...], sustain_s: float) -> Row:
    """Median of five single milliseconds after a pause; second half of a long run."""
    grid = kernel.grid()
    hashes = torch.zeros(grid, 256, dtype=torch.int32, device="cuda")
    cycles = torch.zeros(grid, dtype=torch.int64, device="cuda")
    kernel.launch(grid, *data, hashes, cycles, 256)
    digest = zlib.crc32(hashes.cpu().numpy().tobytes())
    clocks = 2 * variant.n  # a group (2 warpgroups x 2 instructions) at full rate
    short = int(1.5e6 / clocks) // STAGES * STAGES  # groups in about a millisecond
    tflop = grid * short * 4 * 2e-12 * 64 * variant.n * KINDS[variant.dtype].k
    *marks, middle, end = (torch.cuda.Event(enable_timing=True) for _ in range(8))
    time.sleep(0.1)
    for mark in marks:
        mark.record()
        kernel.launch(grid, *data, hashes, cycles, short)
    torch.cuda.synchronize()
    first_ms = sorted(a.elapsed_time(b) for a, b in itertools.pairwise(marks))[2]
    launches = max(4, int(sustain_s * 1e3 / (4 * first_ms)))
    for i in range(launches):
        if i == launches // 2:
            middle.record()
        kernel.launch(grid, *data, hashes, cycles, 4 * short)
    end.record()
    time.sleep(0.75 * sustain_s)
    clock = watts = None
    with contextlib.suppress(Exception):  # NVML may be missing
        clock, watts = torch.cuda.clock_rate(), torch.cuda.power_draw() / 1e3
    end.synchronize()
    late_ms = middle.elapsed_time(end) / (launches - launches // 2)
    used = float(cycles.double().mean()) / (4 * short)
    row = variant._asdict() | {"name": variant.name, "ctas": grid, "digest": digest}
    row |= {"tflops_first": tflop / first_ms * 1e3, "tflops_sustained": 4e3 * tflop / late_ms}
    row |= {"clk_per_wgmma": used / 4, "busy": clocks / used, "watts": watts and round(watts)}
    return row | {"sm_clock_mhz": clock, "mhz_counted": float(cycles.max()) / late_ms / 1e3}


def run_rates(built: Built, out: Path, sustain_s: float) -> list[Row]:
    """Measure every variant; each row is written and printed as soon as it is known."""
    smi = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    facts = {"device": torch.cuda.get_device_name(0), "torch": torch.__version__}
    facts["driver"] = subprocess.run(smi, capture_output=True, text=True).stdout.strip()
    data: dict[Any, tuple[Tensor, ...]] = {}
    agreed: dict[Any, int] = {}
    rows = []
    print(f"{'variant':43} first sust. clk/mma  busy  MHz watts")
    for variant in [v for v in built if not v.proof]:
        key = variant[:2]
        try:
            if key not in data:
                data[key] = operands(KINDS[variant.dtype], variant.n)
            row = measure(variant, Kernel(variant, built[variant][0]), data[key], sustain_s)
            if variant.traffic and variant.form in SAME_DATA and variant.meta != "constant":
                first = agreed.setdefault((*key, variant.traffic), row["digest"])
                row["agrees"] = first == row["digest"]
            text = "{tflops_first:5.0f} {tflops_sustained:5.0f} {clk_per_wgmma:7.1f} {busy:5.3f}"
            text = (text + " {mhz_counted:4.0f} {watts}").format(**row)
            text += "" if row.get("agrees", True) else "  DIFFERS"
        except RuntimeError as error:
            row = {"name": variant.name, "error": (text := str(error)[:200])}
        rows.append(row)
        print(f"{variant.name:43} {text}", flush=True)
        with out.open("a") as file:
            file.write(json.dumps(row | facts) + "\n")
    return rows


def main() -> None:
    """Compile, prove, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--compile-only", action="store_true")
    parser.add_argument("--quick", action="store_true", help="about a minute")
    parser.add_argument("--only", default="", help="regular expression on variant names")
    parser.add_argument("--out", type=Path, default=Path("wgmma_sp_layout.jsonl"))
    args = parser.parse_args()
    began = time.perf_counter()
    chosen = [v for v in variants(args.quick) if re.search(args.only, v.name)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # NVRTC releases the interpreter lock
        built = dict(zip(chosen, pool.map(compile_cubin, chosen), strict=True))
    print(f"compiled {len(built)} kernels in {time.perf_counter() - began:.1f} s", flush=True)
    if args.compile_only:
        raise SystemExit(not report_compiled(built))
    ctypes.CDLL("libcuda.so.1")  # fails here, not in a driver call that could hang
    torch.zeros(1, device="cuda")  # torch's context is now current: the driver calls use it
    proofs = run_proofs(built)
    args.out.write_text("".join(json.dumps(row) + "\n" for row in proofs))
    rows = run_rates(built, args.out, 0.15 if args.quick else 0.5)
    odd = [row["name"] for row in proofs if row["surprise"]]
    bad = [row["name"] for row in rows if "error" in row or not row.get("agrees", True)]
    print(f"{len(proofs)} proofs, surprises {odd}; {len(rows)} rates, failed or differing {bad}")


if __name__ == "__main__":
    main()
