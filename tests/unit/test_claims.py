"""docs/claims.md says what the committed rows give, and what has no rows yet says so."""

from __future__ import annotations

import re
from statistics import geometric_mean

import pytest

from hopsparse.plan import TARGETS
from tests.helpers.claim_figures import (
    attention,
    energy,
    fastest,
    figures,
    judged,
    model_gains,
    on_two,
    sent,
    step_ms,
    whole_step,
    worse,
)
from tests.helpers.claim_rows import AWAITED, MANY, RESULTS, ROOT, line, of, percent, ratios, us

PAGE = ROOT / "docs" / "claims.md"
H200 = TARGETS["h200"]


def aim(tag: str, asked: str, found: str, is_reached: bool) -> str:
    """A line of the table of aims."""
    return line(tag, asked, found, "reached" if is_reached else "missed")


def bandwidth_of_few() -> list[float]:
    """Part of the read bandwidth, up to 16 tokens, weights of 60 MB compressed or more."""
    found = []
    for (tokens, out, k), each in us(
        "h200/spmm_nm_few", "tokens", "out", "k", dtype="bfloat16"
    ).items():
        weight = out * k * 9 / 8
        if tokens <= 16 and weight >= 60e6:
            moved = weight + 2 * tokens * (out + k)
            found.append(moved / each["hopsparse"] * 1e6 / H200.read_bandwidth)
    return found


def product_aims() -> list[str]:
    """C5 to C8."""
    over, coded = "cusparselt", "h200/spmm_nm_scaled_anchors"
    facts = {"dtype": "float8_e4m3fn", "scaling": "none"}
    half = ratios("h200/spmm_nm_anchors", over, "hopsparse", MANY, dtype="bfloat16")
    e4m3 = ratios(coded, over, "hopsparse_fast", MANY, **facts)
    int8 = ratios(coded, over, "hopsparse", MANY, dtype="int8", scaling="none")
    few = bandwidth_of_few()
    dense = ratios("h200/spmm_nm_few", "cublas", "hopsparse", dtype="bfloat16")
    dense += ratios("h200/spmm_nm_anchors", "cublas", "hopsparse", dtype="bfloat16")
    dense += ratios("h200/spmm_nm_scaled_few", "cublas", "hopsparse_fast", **facts)
    dense += ratios(coded, "cublas", "hopsparse_fast", **facts)
    longer = ratios("h200/four_bits", "e4m3 2:4 x int4", "e4m3 2:4 x e4m3")
    part = f"{percent(min(few))} to {percent(max(few))}"
    mean = f"{geometric_mean(longer):.2f} x as long in the mean"
    return [
        aim("C5", "1.10 x cuSPARSELt, bfloat16", *met(half, 1.1)),
        aim("C5", "faster than cuSPARSELt, E4M3", *met(e4m3, 1)),
        aim("C5", "faster than cuSPARSELt, int8", *met(int8, 1)),
        line("C5", "faster than CUTLASS", "never timed in one run", "not measured"),
        aim("C6", "90 % of the bandwidth", part, min(few) >= 0.9),
        aim("C6", "never slower than dense", f"{min(dense):.2f} x at least", min(dense) >= 1),
        aim("C8", "int4 inputs take no longer", mean, max(longer) <= 1),
    ]


def met(found: list[float], asked: float) -> tuple[str, bool]:
    """Mean and range, and whether all of the range is as asked."""
    return judged(found, asked)[0], min(found) >= asked


def sparse_aims() -> list[str]:
    """C9, C10 and C12."""
    wide = us("h200/spmm_bsr", "sparsity", block=128)
    faster = fastest(wide[0.5,]) / fastest(wide[0.9,])
    rows = {row["sparsity"]: row for row in of("h200/spmm_bsr", block=128, contender="cublas")}
    fewer = rows[0.5]["multiplied"] / rows[0.9]["multiplied"]
    blocks = us("h200/spmm_bsr", "block", "sparsity").values()
    over = [each["torch_bsr"] / fastest(each) for each in blocks]
    csr = us("h200/spmm_csr", "case", "features", "dtype", "job")
    rival = [each["cusparse"] / each["hopsparse"] for each in csr.values() if "cusparse" in each]
    dense = {
        key[:2]: each["dense"] / each["hopsparse"]
        for key, each in csr.items()
        if key[3] == "weight" and key[1] <= 16
    }
    first = {
        cache: [row["ms"] for row in of("h200/spmm_nm_host", cache=cache)]
        for cache in ("empty", "full")
    }
    cold, warm = (f"{min(each):.0f} to {max(each):.0f} ms" for each in first.values())
    wins = f"{min(dense.values()):.2f} to {max(dense.values()):.2f} x, 1 and 16 tokens"
    less = f"{faster:.1f} x for {fewer:.1f} x fewer blocks"
    return [
        aim("C9", "time as density, blocks of 128", less, faster >= 0.98 * fewer),
        aim("C9", "faster than blocks of torch", *met(over, 1)),
        aim("C10", "faster than cuSPARSE everywhere", *met(rival, 1)),
        aim("C10", "faster than dense from 80 %", wins, min(dense.values()) >= 1),
        aim("C12", "first result in 150 ms, compiled", cold, max(first["empty"]) <= 150),
        aim("C12", "and in 5 ms, cached", warm, max(first["full"]) <= 5),
    ]


def model_aims() -> list[str]:
    """C16."""
    both = ("decode", "prefill")
    over_fp8 = [met(model_gains("2:4+fp8", "dense fp8, compiled", kind), 1.25) for kind in both]
    half = [
        met(model_gains("2:4", "dense, compiled", kind), asked)
        for kind, asked in zip(both, (1.5, 1.4), strict=True)
    ]
    return [
        aim("C16", "1.25 x dense E4M3, decode", *over_fp8[0]),
        aim("C16", "1.25 x dense E4M3, prefill 8 x 2048", *over_fp8[1]),
        aim("C16", "1.5 x dense in bfloat16, decode", *half[0]),
        aim("C16", "1.4 x dense in bfloat16, prefill 8 x 2048", *half[1]),
    ]


def other_aims() -> list[str]:
    """C13, C14, C18 and C19."""
    step = whole_step(attention()[1, 131072])
    tiles = of("h200/attention_prefill", contender="attend_prefill")
    rate = min(row["tflops"] for row in tiles if row["part"] < 1)
    layers = of("cpu/attention_smollm2", kind="layer")
    broken, queries = (sum(row[name] for row in layers) for name in ("bound_broken", "queries"))
    hybrid = {each: step_ms(each, 100)[0] for each in ("int4", "int3.5", "int3", "sign")}
    best, power = min(hybrid.values()), step_ms("powersgd-2", 100)[0]
    pairs = list(zip(step_ms("planned", 0, 40), step_ms("bf16", 0, 40), strict=True))
    slower = [ours / other for ours, other in pairs]
    losses = f"{worse('int4'):+.2%} `int4`, {worse('int3.5'):+.2%} `int3.5`"
    equal, five = (of("cpu/gate", kind=kind)[-1] for kind in ("A/A", "slower"))
    layers_of_two = ("mlp", "attention", "down", "o")
    nccl = [each for shape in layers_of_two for each in on_two(shape, "nccl")]
    alarms, seen = (f"{row['alarms']} in {row['runs']}, on a CPU" for row in (equal, five))
    held = f"{broken} broken of {queries:,}"
    plain = f"{min(slower):.2f} to {max(slower):.2f} times as long"
    fewer = sent("dense") / sent("int3.5")
    return [
        aim("C13", "128K at batch 1 in 15 us", f"{step:.1f} us", step <= 15),
        aim("C13", "480 TFLOP/s on kept tiles", f"{rate:.0f} at least", rate >= 480),
        aim("C13", "a certified bound", held, broken == 0),
        aim("C14", "8.5 x fewer bytes", f"{fewer:.1f} x, `int3.5`", fewer >= 8.5),
        aim("C14", "loss within 1 %", losses, max(map(worse, ("int4", "int3.5"))) < 0.01),
        aim("C14", "PowerSGD at 100 Mbit/s", f"{best:.0f} ms, it {power:.0f}", best < power),
        aim("C14", "never slower than bfloat16", plain, max(slower) <= 1),
        aim("C18", "false alarms of the gate", alarms, equal["alarms"] * 100 <= equal["runs"]),
        aim("C18", "95 of 100 see 5 % more", seen, five["alarms"] * 100 >= five["runs"] * 95),
        aim("C19", "1.7 x one GPU on two, an MLP", *met(on_two("mlp", "2:4"), 1.7)),
        aim("C19", "the same, q, k, v and o", *met(on_two("attention", "2:4"), 1.7)),
        aim("C19", "faster than NCCL", *met(nccl, 1)),
    ]


def said() -> list[str]:
    """What the reasons say in words, with the numbers of the rows."""
    block = us("h200/mlp", "tokens", model="llama-3-8b", dtype="float8_e4m3fn")
    gains = [min(e["cublas"], e["cublas_compile"]) / e["hopsparse_fast"] for e in block.values()]
    over_e4m3 = (
        energy("int8", "2:4")
        / of("h200/energy", dtype="float8_e4m3fn", contender="cublas")[0]["tflop_per_joule"]
    )
    (dense,) = of("h200/energy", dtype="int8", contender="cublas")
    used = dense["tflops"] * 1e12 / H200.dense_peak["int8"].sustained
    caps = [
        H200.sparse_peak[name].sustained / H200.dense_peak[name].sustained
        for name in ("bfloat16", "float8_e4m3fn", "int8")
    ]
    proofs = [row for row in of("h200/wgmma_sp_layout", surprise=False) if "exact" in row]
    right = sum(row["exact"] for row in proofs)
    (sums,) = of("cpu/fp8_sums", k=28672, signs=False)
    peers = of("h200/peers_anchors", dtype="bfloat16")
    beside = [
        row["cutlass_us"] / row["cusparselt_us"]
        for row in peers
        if row["cutlass_us"] and row["cusparselt_us"] and row["tokens"] >= MANY
    ]
    tensor = max(
        row["tensor_active_percent"]
        for row in of("h200/spmm_nm_tries", variant="y by ordinary stores (kept)")
    )
    first = [H200.sparse_peak[name].first / peak.first for name, peak in H200.dense_peak.items()]
    return [
        f"at most {max(first):.2f} x in the first milliseconds",
        f"{min(gains):.2f} to {max(gains):.2f} x dense E4M3",
        f"{over_e4m3:.2f} x dense E4M3 a joule",
        f"{percent(used)} of what the card sustains in int8",
        f"{caps[0]:.2f} x in bfloat16, {caps[1]:.2f} x in E4M3 and {caps[2]:.2f} x in int8",
        f"{right} arrangements are exact, and {len(proofs) - right} with something exchanged",
        f"{percent(sums['fast'])} with fast sums and {100 * sums['promoted_128']:.3f} % promoted",
        f"{min(beside):.2f} to {max(beside):.2f} times as long as cuSPARSELt",
        f"tensor pipes are active for up to {tensor:.0f} % of the time",
        f"{100 * worse('powersgd 2'):.1f} % above dense",
    ]


def text() -> str:
    """The page, without its line breaks."""
    return " ".join(PAGE.read_text(encoding="utf-8").split())


@pytest.mark.parametrize("table", [figures, product_aims, sparse_aims, other_aims, model_aims])
def test_tables_are_what_the_rows_give(table: object) -> None:
    assert callable(table)
    lines = table()
    print("\n".join(lines))
    assert "\n".join(lines) in PAGE.read_text(encoding="utf-8")


def test_reasons_say_the_numbers_of_the_rows() -> None:
    page = text()
    assert [words for words in said() if words not in page] == []


def test_floors_of_bytes_are_those_of_the_format() -> None:
    floors = [4 * bits / (2 * bits + 4) for bits in (16, 8, 4)]
    assert "{:.2f} x in 16 bits, {:.1f} x in 8 and {:.2f} x in 4".format(*floors) in text()


def test_every_claim_has_its_lines_and_its_reason() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for number in range(1, 22):
        assert f"\n| C{number} | " in page, number
        assert f"\n- **C{number}" in page, number


@pytest.mark.parametrize("name", AWAITED)
def test_what_is_awaited_is_not_there(name: str) -> None:
    assert f"`{name}.jsonl`" in text()
    path = RESULTS / "h200" / f"{name}.jsonl"
    assert not path.exists(), (
        f"{path.name} has come: write what it shows, and take it out of AWAITED"
    )


def test_what_the_page_names_is_there() -> None:
    page = PAGE.read_text(encoding="utf-8")
    names = set(re.findall(r"`((?:benchmarks|docs|src|tests)/[^`*]+?)(?:::[^`]*)?`", page))
    links = set(re.findall(r"\]\(([^)#:]+)[^)]*\)", page))
    rows = set(re.findall(r"`((?:h200|cpu)/\w+\.jsonl)`", page))
    assert len(names) > 10
    assert rows
    gone = [name for name in names if not (ROOT / name).exists()]
    gone += [name for name in links if not (PAGE.parent / name).exists()]
    gone += [name for name in rows if not (RESULTS / name).exists()]
    assert gone == []
