"""Phases, counters and what ncu writes; no GPU and no ncu is needed."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hopsparse.errors import ArgumentError, CheckpointError, DriverError, UnsupportedError
from hopsparse.formats import CSR, NM, convert
from hopsparse.measure.profile import files, ncu
from hopsparse.measure.profile.catalogue import Catalogue
from hopsparse.measure.profile.counters import (
    CHIP,
    DRAM_READ,
    METRICS,
    OPS_OFF,
    OPS_ON,
    TENSOR,
    TIME,
    Kernel,
    counted,
)
from hopsparse.measure.profile.files import parse_csv, read_profile, subjects_of
from hopsparse.measure.profile.install import library_path
from hopsparse.measure.profile.phases import Recorder
from hopsparse.measure.profile.subject import Subject, Work
from hopsparse.measure.profile.trace import trace
from hopsparse.measure.timing import Timing
from hopsparse.ops import select, spmm_nm
from hopsparse.plan import TARGETS
from hopsparse.ranges import listening
from tests.helpers.profiles import four_formats, launch, raw_csv, stand_in_for_ncu

# Counters of GH100 in the catalogue of ncu_report 2025.3.1, those of these units.
KNOWN = Path(__file__).parents[1] / "data" / "gh100_counters.txt"


class Log(list[str]):
    def enter(self, phase: str, what: str) -> None:
        self.append(f"{phase} {what}")

    def leave(self) -> None:
        self.append("end")


def test_every_counter_is_one_of_gh100() -> None:
    known = set(KNOWN.read_text(encoding="utf-8").split())
    assert [metric for metric in METRICS if metric.partition(".")[0] not in known] == []
    rolls = {metric.partition(".")[2] for metric in METRICS}
    assert rolls == {"sum", "avg.pct_of_peak_sustained_elapsed", "avg.per_second"}
    assert len(set(METRICS)) == len(METRICS)


def test_the_catalogue_itself_knows_every_counter() -> None:
    if library_path() is None:
        pytest.skip("needs ncu_report or Nsight Compute")
    catalogue = Catalogue(CHIP)
    invented = "sm__ops_path_tensor_src_bf16_dst_fp32_sparsity_on.sum"
    assert catalogue.unknown([*METRICS, invented]) == [invented]
    with pytest.raises(UnsupportedError, match="GX999"):
        Catalogue("GX999")


def test_without_a_library_the_catalogue_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hopsparse.measure.profile.catalogue.library_path", lambda: None)
    with pytest.raises(UnsupportedError, match=r"hopsparse\[profile\]"):
        Catalogue(CHIP)


def test_operators_name_their_phases() -> None:
    dense = torch.eye(8)
    with listening(log := Log()):
        packed = convert(CSR.from_dense(dense), "nm", pattern="2:4")
        assert isinstance(packed, NM)
        spmm_nm(packed, torch.ones(2, 8), act="relu")
        select(torch.ones(1, 8), 2)
    begun = [word for word in log if word != "end"]
    assert begun[0] == "format convert"
    assert begun[-4:-1] == ["format decode nm", "sparse reference", "epilogue reference"]
    assert begun[-1].startswith("select")
    assert log.count("end") == len(begun)


def test_nobody_is_told_afterwards_and_two_cannot_listen() -> None:
    with (
        listening(log := Log()),
        pytest.raises(ArgumentError, match="two listeners"),
        listening(Log()),
    ):
        pass
    select(torch.ones(1, 8), 2)
    assert log == []


def test_a_phase_that_raises_ends() -> None:
    with listening(log := Log()), pytest.raises(Exception, match="no format"):
        convert(CSR.from_dense(torch.eye(4)), "no format")
    assert log == ["format convert", "end"]


def test_spans_nest_and_last_as_long_as_their_parts() -> None:
    recorder = Recorder(torch.device("cpu"))
    packed, x = NM.from_dense(torch.eye(64)), torch.ones(4, 64)
    with recorder.recording("first"):
        spmm_nm(packed, x, act="relu")
    with recorder.recording("second"):
        pass
    whole, *parts, last = recorder.spans()
    assert [part.phase for part in parts] == ["format", "sparse", "epilogue"]
    assert {part.depth for part in parts} == {1}
    assert whole.depth == last.depth == 0
    assert sum(part.us for part in parts) <= whole.us
    assert all(part.us > 0 and part.start_us >= whole.start_us for part in parts)
    assert (whole.subject, last.subject, whole.start_us) == ("first", "second", 0)


def test_a_table_of_ncu_is_read_in_base_units() -> None:
    kernels = parse_csv(four_formats())
    by_subject = subjects_of(kernels)
    assert list(by_subject) == ["dense", "csr_matmul", "spmm_bsr", "spmm_nm"]
    first = kernels[0]
    assert (first.value(TIME), first.value(DRAM_READ)) == (420_000, 150e6)
    assert [kernel.phase for kernel in by_subject["csr_matmul"]] == ["sparse.csr_matmul"] * 2
    dense, csr = counted(by_subject["dense"]), counted(by_subject["csr_matmul"])
    sparse = counted(by_subject["spmm_nm"])
    assert (dense.us, csr.us, csr.kernels) == (420, 8040, 2)
    assert (dense.sparse_share, sparse.sparse_share, csr.sparse_share) == (0, 1, None)
    assert sparse.ops_sparse == dense.ops_dense == 2.7e11


def test_cells_without_a_value_are_none() -> None:
    text = four_formats().replace('"90.00"', '"n/a"').replace('"80.00"', '"nan"')
    by_subject = subjects_of(parse_csv(text))
    assert counted(by_subject["dense"]).tensor is None
    assert counted(by_subject["spmm_nm"]).tensor is None
    assert counted(by_subject["spmm_bsr"]).tensor == 70


def test_percentages_are_weighed_by_time() -> None:
    short = launch("a", "x", {TIME: 10.0, TENSOR: 100.0})
    long = launch("b", "x", {TIME: 30.0, TENSOR: 0.0})
    assert counted(parse_csv(raw_csv([short, long]))).tensor == 25


def test_a_foreign_profile_is_grouped_by_kernel() -> None:
    rows = [launch(name, "", {TIME: 1.0}) for name in ("one", "two", "one")]
    assert {k: len(v) for k, v in subjects_of(parse_csv(raw_csv(rows))).items()} == {
        "one": 2,
        "two": 1,
    }


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no table"),
        ("==WARNING== No kernels were profiled.\n", "no table"),
        (raw_csv([]), "no kernel in the table"),
        (four_formats()[:-40], "cut off"),
        (four_formats().rpartition(',"')[0] + "\n", "columns"),
        ('"ID","Process ID"\n"0","1"\n', "no column 'Kernel Name'"),
    ],
)
def test_a_broken_table_is_refused(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "profile.csv"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(CheckpointError, match=words):
        read_profile(path)


def test_a_file_that_is_no_profile_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CheckpointError, match="missing"):
        read_profile(tmp_path / "missing")
    (tmp_path / "binary.csv").write_bytes(bytes([0xFF, 0xFE, 0x80]))
    with pytest.raises(CheckpointError, match="not readable as text"):
        read_profile(tmp_path / "binary.csv")
    report = tmp_path / "profile.ncu-rep"
    report.write_bytes(b"something else")
    monkeypatch.setattr(files, "report_module", lambda: None)
    with pytest.raises(UnsupportedError, match=r"hopsparse\[profile\]"):
        read_profile(report)
    monkeypatch.setattr(files, "report_module", lambda: FakeReports([]))
    with pytest.raises(CheckpointError, match="not a report"):
        read_profile(report)
    # ncu_report reads a file that is cut off anywhere as one without ranges.
    report.write_bytes(b"NVR\0" + bytes(100))
    with pytest.raises(CheckpointError, match="cut off"):
        read_profile(report)


class FakeReports:
    """`ncu_report` as far as it is used; checked by hand against its releases 2025.3.1 and 2026.3.1
    on a report of another GPU."""

    def __init__(self, actions: list[Any]) -> None:
        self._actions = actions

    def load_report(self, path: str) -> Any:
        assert Path(path).is_file()
        found = SimpleNamespace(
            num_actions=lambda: len(self._actions), action_by_idx=self._actions.__getitem__
        )
        ranges = [found] if self._actions else []
        return SimpleNamespace(num_ranges=lambda: len(ranges), range_by_idx=ranges.__getitem__)


def test_a_report_is_read_through_ncu_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {TIME: 1500.0, OPS_ON[0]: 64.0, OPS_OFF[0]: 0.0, TENSOR: float("nan")}

    def metric(name: str) -> Any:
        if name not in values:
            return None
        return SimpleNamespace(has_value=lambda: True, as_double=lambda: values[name])

    domain = SimpleNamespace(
        push_pop_ranges=lambda: ("hopsparse.subject.spmm_nm", "hopsparse.phase.sparse.spmm_nm")
    )
    state = SimpleNamespace(domains=lambda: (0,), domain_by_id=lambda number: domain)
    action = SimpleNamespace(name=lambda: "kernel", metric_by_name=metric, nvtx_state=lambda: state)
    bare = SimpleNamespace(name=lambda: "other", metric_by_name=metric, nvtx_state=lambda: None)
    monkeypatch.setattr(files, "report_module", lambda: FakeReports([action, bare]))
    report = tmp_path / "profile.ncu-rep"
    report.write_bytes(b"NVR\0" + bytes(100))
    kernel, other = read_profile(report)
    assert (kernel.subject, kernel.phase, other.subject) == ("spmm_nm", "sparse.spmm_nm", "other")
    assert (counted([kernel]).us, counted([kernel]).sparse_share) == (1.5, 1)
    assert kernel.value(TENSOR) is None


def test_ncu_is_run_without_touching_clocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ncu, "report_module", lambda: None)
    program = stand_in_for_ncu(tmp_path, four_formats())
    found = ncu.profile(program, ["app", "word"], tmp_path / "p.ncu-rep", most=7)
    assert (found.release, found.reader, len(found.kernels)) == ("2025.3.1.0", "ncu --import", 5)
    first, second, _ = (tmp_path / "ncu.log").read_text(encoding="utf-8").splitlines()
    words = first.split("\t")
    assert words[words.index("--clock-control") + 1] == "none"
    assert words[words.index("--launch-count") + 1] == "7"
    assert words[words.index("--metrics") + 1].split(",") == list(METRICS)
    assert words[-2:] == ["app", "word"]
    assert second.split("\t")[2:] == ["--csv", "--page", "raw", "--print-units", "base"]


_REFUSED = (
    "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU "
    "Performance Counters on the target device 0."
)


@pytest.mark.parametrize(
    ("said", "code", "kind", "words"),
    [
        (_REFUSED, 0, UnsupportedError, "NVreg_RestrictProfilingToAdminUsers=0"),
        (
            "==ERROR== Failed to initialize the profiler: LibraryNotLoaded",
            1,
            UnsupportedError,
            "Lib",
        ),
        ("==WARNING== No kernels were profiled.", 0, DriverError, "No kernels were profiled"),
        (
            "ValueError: of the program\n==ERROR== The application returned an error code (1).",
            1,
            DriverError,
            "returned 1",
        ),
    ],
)
def test_what_ncu_complains_of_is_an_error(
    said: str, code: int, kind: type[Exception], words: str, tmp_path: Path
) -> None:
    program = stand_in_for_ncu(tmp_path, "", said=said, code=code, writes=False)
    with pytest.raises(kind, match=words):
        ncu.profile(program, ["app"], tmp_path / "p.ncu-rep")


def test_a_row_compares_with_the_ceiling_of_the_card() -> None:
    h200 = TARGETS["h200"]
    flops = 2 * 16384 * 4096 * 2048
    work = Work(flops, flops // 2, 100 << 20, "bfloat16", sparse=True)
    timing = Timing("spmm_nm", (250.0, 260.0, 255.0))
    kernels = tuple(subjects_of(parse_csv(four_formats()))["spmm_nm"])
    subject = Subject("spmm_nm", "kernel", work, timing, "gpu events", (), kernels)
    row = subject.row(h200)
    assert row["tflops"] == pytest.approx(flops / 255e-6 / 1e12)
    assert row["kept_tflops"] == row["tflops"] / 2
    # Dense-equivalent operations over the sparse ceiling: the same as kept ones over its half.
    assert row["floor_us"] == pytest.approx(1e6 * flops / h200.sparse_peak["bfloat16"].sustained)
    assert row["of_ceiling"] == row["floor_us"] / 255
    assert (row["tensor"], row["sparse_share"], row["kernels"]) == (80, 1, 1)
    assert subject.row(None)["of_ceiling"] is None
    json.dumps(row, allow_nan=False)


def test_a_subject_that_failed_has_no_numbers() -> None:
    row = Subject("x", "", Work(8, 8, 8, "int8"), Timing("x", error="why"), "host").row(None)
    assert row["error"] == "why"
    assert row["us"] is row["tflops"] is row["sm_active"] is None


def test_a_trace_has_every_span_and_every_kernel() -> None:
    recorder = Recorder(torch.device("cpu"))
    with recorder.recording("spmm_nm"):
        spmm_nm(NM.from_dense(torch.eye(8)), torch.ones(1, 8))
    kernels = tuple(parse_csv(four_formats()))
    subject = Subject(
        "spmm_nm",
        "",
        Work(0, 0, 0, ""),
        Timing("spmm_nm"),
        "host",
        tuple(recorder.spans()),
        kernels,
    )
    found = json.loads(json.dumps(trace([subject]), allow_nan=False))
    events = [event for event in found["traceEvents"] if event["ph"] == "X"]
    spans = [event for event in events if event["pid"] == 1]
    seen = [event for event in events if event["pid"] == 2]
    assert [event["name"] for event in spans][1:] == ["format decode nm", "sparse reference"]
    assert [event["name"] for event in seen] == [kernel.name for kernel in kernels]
    assert seen[1]["ts"] == seen[0]["dur"] == 420
    assert seen[0]["args"]["ops_dense"] == 2.7e11


def test_a_kernel_without_ranges_is_its_own_subject() -> None:
    assert Kernel("k", {}).subject == "k"
    assert Kernel("k", {}, ("another range",)).phase == ""
