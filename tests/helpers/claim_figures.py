"""What is claimed of a technique and what the committed rows give, line by line."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from statistics import mean
from typing import Any

from hopsparse.formats import FORMATS
from hopsparse.plan import TARGETS
from tests.helpers.claim_rows import MANY, judged, line, of, percent, ratios, us, waits, word

H200 = TARGETS["h200"]
MISSING = "not measured"
# A step whose key is taken in by the launch that scores; no row may have it yet.
IN_ONE = ("append in select_blocks, attend",)


def energy(dtype: str, sparsity: str) -> float:
    """TFLOP of the dense product a joule."""
    (row,) = of("h200/energy", dtype=dtype, sparsity=sparsity)
    return float(row["tflop_per_joule"])


def first_figures() -> list[str]:
    """C1 to C4."""
    (tests,) = of("h200/gpu_tests", commit="206253e")
    passed, ran = tests["passed"], tests["passed"] + tests["failed"]
    (ours,) = of("cpu/quality_smollm2", name="residual, refit")
    peer = of("cpu/quality_peers", agree_a=54)[0]
    perplexity = f"{ours['ppl_a']:.1f}; llm-compressor {peer['ppl_a']:.1f}"
    over_int8 = energy("int8", "2:4") / energy("int8", "dense")
    over_16 = energy("int8", "2:4") / energy("float16", "dense")
    done = f"{passed:,} of {ran:,} tests of kernels and layers pass"
    forms = f"{len(FORMATS)}: {', '.join(FORMATS)}"
    better = word(peer["ppl_a"], ours["ppl_a"])
    return [
        line("C1", "kernels built for sm_90a", "yes", done, "reproduced"),
        line("C1", "a MIG slice is seen at run time", "yes", "no GPU was cut", MISSING),
        line("C2", "formats", "5", forms, "reproduced"),
        line("C3", "2:4 layer by layer, perplexity of a book", "", perplexity, better),
        line("C4", "int8 2:4, work a joule over int8", "1.43 x", *judged([over_int8], 1.43)),
        line("C4", "int8 2:4, work a joule over FP16", "2.85 x", *judged([over_16], 2.85)),
    ]


def over_csr() -> list[float]:
    """2:4 against CSR of half zeros, 4096 x 4096; two runs."""
    csr = of("h200/unstructured_anchors", sparsity=0.5, out=4096, k=4096)
    us_csr = {row["tokens"]: row["csr_us"] for row in csr}
    found = []
    for name, tokens in (("h200/spmm_nm_few", 16), ("h200/spmm_nm_anchors", 256)):
        ours = us(name, "tokens", "out", "k", dtype="bfloat16")[tokens, 4096, 4096]
        found.append(us_csr[tokens] / ours["hopsparse"])
    return found


def product_figures() -> list[str]:
    """C5 to C12."""
    many = ratios("h200/spmm_nm_anchors", "cublas", "hopsparse", MANY, dtype="bfloat16")
    few = ratios("h200/spmm_nm_few", "cublas", "hopsparse", dtype="bfloat16")
    coded = "h200/spmm_nm_scaled_anchors"
    e4m3 = ratios(coded, "cublas", "hopsparse_fast", MANY, dtype="float8_e4m3fn", scaling="none")
    int8 = ratios(coded, "cublas", "hopsparse", MANY, dtype="int8", scaling="none")
    for refuted in (many, few, e4m3):
        assert max(refuted) < 2.1
    csr = over_csr()
    apart = f"{csr[0]:.0f} x at 16 tokens, {csr[1]:.0f} x at 256"
    slower = ratios("h200/four_bits", "e4m3 2:4 x int4, in the tile", "e4m3 2:4 x e4m3")
    as_long = f"one kernel; {min(slower):.2f} to {max(slower):.2f} times as long as E4M3"
    rate = max(rates_of_csr())
    layer = us("h200/spmm_bsr", "sparsity", block=16)
    at = [f"{each['cublas'] / fastest(each):.2f}" for _, each in sorted(layer.items())]
    blocks = f"a layer: {', '.join(at)} x at 50, 80, 90 % zeros"
    return [
        line("C5", "2:4 over a CSR product, 16 bits", "4 x", apart, word(min(csr), 4)),
        line(
            "C5",
            "2:4 over dense, bfloat16, 1,024 tokens on",
            "2.1 x",
            judged(many, 2.1)[0],
            "refuted",
        ),
        line("C5", "the same, 1 to 64 tokens", "2.1 x", judged(few, 2.1)[0], "refuted"),
        line(
            "C5", "2:4 over dense, E4M3, 1,024 tokens on", "2.1 x", judged(e4m3, 2.1)[0], "refuted"
        ),
        line("C5", "2:4 over dense, int8, 1,024 tokens on", "2.1 x", *judged(int8, 2.1)),
        line("C6", "1 to 256 tokens", "none", "see the aims", ""),
        line("C7", "product and ReLU in one launch", "yes", "every activation", "reproduced"),
        line("C8", "int4 widened without a copy", "yes", as_long, "reproduced"),
        line("C9", "blocks of 16 x 16, ViT-L", "3.4 x", blocks, MISSING),
        line(
            "C10",
            "rate of CSR kernels",
            "12 TFLOP/s",
            f"{rate:.1f} on kept entries",
            word(rate, 12),
        ),
        line("C10", "their use of tensor cores", "22 %", waits("profile"), MISSING),
        line("C11", "bandwidth, blocks off lines", "52 %", waits("alignment_counters"), MISSING),
        line("C11", "bandwidth, blocks on lines", "98 %", waits("alignment_counters"), MISSING),
        line("C12", "tile 32x8x16, a GNN layer", "1.82 x", waits("tile_search"), MISSING),
        line("C12", "tile 8x64x32, an FFN", "2.15 x", waits("tile_search"), MISSING),
    ]


def fastest(each: dict[str, float]) -> float:
    """The fastest of our tiles in a row of blocks."""
    return min(time for name, time in each.items() if name.startswith(("mma_", "64x", "128x")))


def rates_of_csr() -> list[float]:
    """TFLOP/s on kept entries of weights in CSR."""
    found = of("h200/spmm_csr", job="weight", contender="hopsparse")
    return [2e-6 * row["entries"] * row["features"] / row["us"] for row in found]


def attention() -> dict[tuple[Any, ...], dict[str, float]]:
    """Times of decode by batch and context."""
    return us("h200/attention_decode", "batch", "context")


def whole_step(each: dict[str, float]) -> float:
    """The step that takes in a key, as it is quickest."""
    step = least_of(each, "append, ", *IN_ONE)
    assert step is not None
    return step


def least_of(each: dict[str, float], *starts: str) -> float | None:
    """The least time of what is called so, if anything is."""
    return min((time for name, time in each.items() if name.startswith(starts)), default=None)


def of_a_copy(case: tuple[Any, ...], each: dict[str, float], name: str, attended: int) -> float:
    """Bytes of attended keys and values over time, as a part of what a copy reaches."""
    return case[0] * attended * 4 * 8 * 128 / each[name] * 1e6 / H200.read_bandwidth


def attention_figures() -> list[str]:
    """C13."""
    steps = attention()
    gains = {case: each["dense, cuDNN"] / whole_step(each) for case, each in steps.items()}
    first, *others = gains.values()
    parts = {case: of_a_copy(case, each, "attend_decode", 2048) for case, each in steps.items()}
    small = [part for (batch, _), part in parts.items() if batch <= 8]
    dense = [of_a_copy(case, each, "dense, cuDNN", case[1]) for case, each in steps.items()]
    few = f"{percent(min(small))} to {percent(max(small))}"
    wide = f"{min(others):.1f} to {max(others):.1f} x"
    least = f"{percent(min(dense))} at least"
    assert min(dense) > 0.32
    large = parts[32, 32768]
    step = least_of(steps[1, 131072], "append, select_blocks, attend", *IN_ONE)
    told = ("no row", MISSING) if step is None else (f"{step:.1f} us, 1 x 128K", word(31, step))
    return [
        line("C13", "dynamic over dense, 1 x 32K", "2.9 x", f"{first:.1f} x", word(first, 89 / 31)),
        line("C13", "the same, 128K or batch 8 and 32", "2.9 x", wide, word(min(others), 89 / 31)),
        line("C13", "dynamic by `select_blocks`, whole step", "31 us", *told),
        line("C13", "static, half of the blocks", "54 us", "no row", MISSING),
        line("C13", "bandwidth, dynamic, batch 1 and 8", "78 %", few, word(max(small), 0.78)),
        line("C13", "the same, batch 32", "78 %", percent(large), word(large, 0.78)),
        line("C13", "bandwidth, static", "51 %", "no row", MISSING),
        line("C13", "bandwidth, dense", "32 %", least, "refuted"),
    ]


def sent(method: str) -> float:
    """Bytes that a step of 109 M parameters sends."""
    found = of("cpu/bench_comm", model="bert", method=method)
    return mean(row["interface_bytes_a_step"] for row in found)


def step_ms(method: str, mbit: int, steps: int = 12) -> list[float]:
    """Milliseconds of a step of two ranks on a quiet machine."""
    facts = {"model": "mlp", "ranks": 2, "mbit": mbit, "method": method, "steps": steps}
    return [row["step_ms"] for row in of("cpu/bench_comm_quiet", **facts)]


def loss(method: str, last: int) -> float:
    """Of five looks up to a step, mean of three seeds."""
    found = [of("cpu/comm_convergence", method=method, seed=seed) for seed in range(3)]
    curves = [row["curve"] for (row,) in found]
    return mean(mean(each for step, each in c if last - 100 <= step <= last) for c in curves)


def worse(method: str) -> float:
    """Loss at the end over that of dense, less 1."""
    return loss(method, 1000) / loss("dense", 1000) - 1


def more_steps(method: str) -> float:
    """How many more steps, as a part of all, by what dense gains in the last hundred."""
    gain = loss("dense", 900) - loss("dense", 1000)
    return (loss(method, 1000) - loss("dense", 1000)) / gain * 100 / 1000


def longer_over_nccl(link: str) -> float:
    """A step with `int4` over one with dense gradients."""
    found = {row["method"]: row["step_ms"] for row in of("h200/comm_nccl", link=link)}
    return float(found["int4"] / found["dense"])


def gradient_figures() -> list[str]:
    """C14."""
    fewer = sent("dense") / sent("int3.5")
    faster = {mbit: step_ms("dense", mbit)[0] / step_ms("int3.5", mbit)[0] for mbit in (100, 1000)}
    steps = more_steps("int4")
    assert more_steps("int3.5") < 0
    losses = f"{percent(steps)} (`int4`), none (`int3.5`)"
    links = {link: longer_over_nccl(link) for link in ("nvlink", "sockets")}
    nccl = f"4.2 M values: `int4` {links['nvlink']:.1f} x dense's time, "
    nccl += f"sockets {links['sockets']:.1f} x"
    told = {mbit: f"{ratio:.1f} x" for mbit, ratio in faster.items()}
    return [
        line(
            "C14",
            "fewer bytes, 1.2 GB to 142 MB",
            "8.5 x",
            f"{fewer:.1f} x",
            word(fewer, 1200 / 142),
        ),
        line("C14", "faster, 100 Mbit/s", "6.0 x", told[100], word(faster[100], 187 / 31)),
        line("C14", "faster, 1 Gbit/s", "6.0 x", told[1000], word(faster[1000], 187 / 31)),
        line("C14", "more steps", "1.2 %", losses, "missed" if steps > 0.012 else "reproduced"),
        line("C14", "BERT-Large, NCCL", "", nccl, MISSING),
    ]


def graph_figures() -> list[str]:
    """C15."""
    launches = {row["way"]: row["us"] for row in of("h200/launches", blocks=1, chain=64)}
    eager, ours = launches["torch"], launches["graph, early"]
    chain = of("h200/chain", side=1024)
    fused = max(row["us"] for row in chain if row["way"] == "hopsparse, graph, early")
    apart = min(row["us"] for row in chain if row["way"] == "hopsparse, not fused, eager")
    launch = f"{eager:.1f} to {ours:.2f} us, {eager / ours:.0f} x"
    relu = f"{apart:.0f} to {fused:.1f} us, {apart / fused:.0f} x"
    beaten = word(3.1, fused)
    return [
        line("C15", "a launch, 9.7 to 1.8 us", "4.2 x", launch, word(eager / ours, 4.2)),
        line("C15", "product and ReLU, 23 to 3.1 us", "7.4 x", relu, beaten),
    ]


def on_two(shape: str, rival: str) -> list[float]:
    """How many times as long as two GPUs that read each other's memory something takes."""
    times: dict[int, dict[str, float]] = {}
    for row in of("h200/tensor_parallel", shape=shape):
        times.setdefault(row["tokens"], {})[row["way"]] = row["us"]
    return [each[rival] / each["peers"] for each in times.values()]


def read_by_peers() -> tuple[str, str]:
    """Whether sums came from symmetric memory, and were the same on both GPUs."""
    found = of("h200/tensor_parallel", way="peers", gpus=2)
    right = [row["peers"] == "symmetric memory" and row["same_on_ranks"] for row in found]
    return f"{sum(right)} of {len(found)} on two GPUs", "reproduced" if all(right) else "missed"


def model_gains(way: str, rival: str, kind: str) -> list[float]:
    """How many times as many tokens a second as a rival a way handles, in each phase of a kind."""
    found: dict[str, dict[str, float]] = {}
    for row in of("h200/models", model="llama-3-8b", error=""):
        found.setdefault(row["phase"], {})[row["way"]] = row["ms"]
    return [
        each[rival] / each[way]
        for phase, each in found.items()
        if phase.startswith(kind) and {rival, way} <= each.keys()
    ]


def model_figures() -> list[str]:
    """C16, of language models."""
    decode = model_gains("2:4+fp8", "dense, compiled", "decode")
    prefill = model_gains("2:4+fp8", "dense, compiled", "prefill")
    return [
        line("C16", "Llama-3-8B, decode, E4M3", "2.3 x", *judged(decode, 2.3)),
        line("C16", "Llama-3-8B, prefill 8 x 2048, E4M3", "2.3 x", *judged(prefill, 2.3)),
    ]


def last_figures() -> list[str]:
    """The rest of C16, to C21, most of them without rows."""
    return [
        line("C16", "ViT-L", "", waits("vision"), MISSING),
        line("C16", "ResNet-50 at 37 % density", "", waits("vision"), MISSING),
        line("C17", "SM active, dense / CSR / BSR", "89 / 42 / 69 %", waits("profile"), MISSING),
        line("C17", "tensor pipe, dense / CSR / BSR", "93 / 22 / 76 %", waits("profile"), MISSING),
        line("C18", "validator", "8 s", waits("verify"), MISSING),
        line("C18", "tolerance", "1e-4", "bounds derived for each result", "refuted"),
        line("C18", "micro-benchmark", "120 s", waits("gate"), MISSING),
        line("C19", "peers' memory without copies", "yes", *read_by_peers()),
        line("C20", "weights fetched ahead", "yes", "not built", MISSING),
        line("C21", "Triton for MI300X", "yes", "gfx942 compiles, not run", "reproduced"),
        line("C21", "Hexagon, IPU, MLU", "yes", "not built", MISSING),
    ]


def figures() -> list[str]:
    """The table of figures."""
    parts: Iterable[Callable[[], list[str]]] = (
        *(first_figures, product_figures, attention_figures, gradient_figures),
        *(graph_figures, model_figures, last_figures),
    )
    return [each for part in parts for each in part()]
