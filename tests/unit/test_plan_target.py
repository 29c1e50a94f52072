from __future__ import annotations

import subprocess
import sys
from fractions import Fraction

import pytest

from hopsparse.errors import ArgumentError
from hopsparse.plan import TARGETS, mig_slice, target


def test_every_target_is_hopper_and_says_where_its_numbers_come_from() -> None:
    for name, gpu in TARGETS.items():
        assert gpu.name == name
        assert gpu.arch == "sm_90a"
        assert gpu.dense_peak.keys() == gpu.sparse_peak.keys()
        for dtype, peak in gpu.dense_peak.items():
            assert peak.sustained <= peak.first < gpu.sparse_peak[dtype].first
    assert TARGETS["h200"].source == "measured"
    assert TARGETS["h100"].source == "datasheet"


def test_h100_is_slower_in_memory_only() -> None:
    assert TARGETS["h100"].read_bandwidth < TARGETS["h200"].read_bandwidth
    assert TARGETS["h100"].dense_peak == TARGETS["h200"].dense_peak


def test_unknown_target_names_the_known_ones() -> None:
    with pytest.raises(ArgumentError, match="h200"):
        target("b200")


def test_slice_takes_its_share_of_everything() -> None:
    whole = TARGETS["h200"]
    part = mig_slice(whole, Fraction(1, 7), Fraction(1, 8), sm_count=16)
    assert part.sm_count == 16
    assert part.read_bandwidth == whole.read_bandwidth / 8
    assert part.memory_bytes == whole.memory_bytes // 8
    assert part.l2_bytes == whole.l2_bytes // 8
    ratio = part.dense_peak["bfloat16"].sustained / whole.dense_peak["bfloat16"].sustained
    assert ratio == pytest.approx(16 / 132)
    # What belongs to one SM stays.
    assert part.smem_per_block == whole.smem_per_block
    assert part.source == "slice"


def test_slice_without_sm_count_is_an_upper_bound() -> None:
    assert mig_slice(TARGETS["h200"], Fraction(1, 7), Fraction(1, 8)).sm_count == 18


@pytest.mark.parametrize(
    ("compute", "memory", "sms"),
    [
        (Fraction(0), Fraction(1, 8), None),
        (Fraction(1, 7), Fraction(9, 8), None),
        (Fraction(1, 7), Fraction(1, 8), 0),
        (Fraction(1, 7), Fraction(1, 8), 133),
    ],
)
def test_impossible_slice_is_refused(compute: Fraction, memory: Fraction, sms: int | None) -> None:
    with pytest.raises(ArgumentError):
        mig_slice(TARGETS["h200"], compute, memory, sm_count=sms)


def test_target_module_needs_the_standard_library_only() -> None:
    program = (
        "import sys, types\n"
        "package = types.ModuleType('hopsparse'); package.__path__ = ['src/hopsparse']\n"
        "sys.modules['hopsparse'] = package\n"
        "import hopsparse.plan\n"
        "print(sorted({'torch', 'numpy', 'rich'} & set(sys.modules)))\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.stdout.strip() == "[]", result.stderr
