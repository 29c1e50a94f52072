"""Energy per product: what must be found where the answer is known."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from hopsparse.cli.bench import Bench
from hopsparse.cli.energy import _measured, setting_of
from hopsparse.measure.clock import Contender, time_side_by_side
from hopsparse.measure.energy import check_energy, energy_side_by_side


@pytest.fixture
def counter(device: torch.device) -> torch.device:
    """A GPU that tells its energy; one that does not is told so."""
    check_energy(device)
    return device


def products(side: int, device: torch.device) -> list[torch.Tensor]:
    return [torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2)]


def test_one_thing_under_two_names_uses_one_energy(counter: torch.device) -> None:
    x, w = products(4096, counter)
    same = [Contender(name, [partial(torch.mm, x, w)]) for name in ("a", "b")]
    first, second = energy_side_by_side(same, rounds=2, device=counter)
    assert len(first.turns) == len(second.turns) == 2
    # What turns of one differ by is what two of one kind may differ by, and some of the counter.
    spread = max(turn.joules for turn in first.turns) / min(turn.joules for turn in first.turns)
    assert 1 / (spread * 1.1) <= first.joules / second.joules <= spread * 1.1


def test_energy_is_power_times_the_time_that_the_clock_finds(counter: torch.device) -> None:
    x, w = products(8192, counter)
    contender = Contender("mm", [partial(torch.mm, x, w)])
    (found,) = energy_side_by_side([contender], rounds=1, device=counter)
    (timing,) = time_side_by_side([contender], warm_s=2.0, device=counter)
    assert 0.8 < found.us / timing.us < 1.25
    # A product that fills the card uses most of what it may, and no more.
    assert 200 < found.watts < 1000
    assert found.joules == pytest.approx(found.us * 1e-6 * found.watts)


def test_twice_the_work_uses_about_twice_the_energy(counter: torch.device) -> None:
    x, w = products(4096, counter)

    def twice() -> torch.Tensor:
        torch.mm(x, w)
        return torch.mm(x, w)

    contenders = [Contender("one", [partial(torch.mm, x, w)]), Contender("two", [twice])]
    one, two = energy_side_by_side(contenders, rounds=2, device=counter)
    assert 1.6 < two.joules / one.joules < 2.4


def test_a_contender_that_fails_is_reported_and_the_others_go_on(counter: torch.device) -> None:
    x, w = products(2048, counter)

    def fails() -> object:
        raise ValueError("no such shape")

    contenders = [Contender("bad", [fails]), Contender("good", [partial(torch.mm, x, w)])]
    bad, good = energy_side_by_side(contenders, rounds=1, seconds=1.0, device=counter)
    assert "no such shape" in bad.error
    assert bad.turns == ()
    assert good.turns


def test_the_command_measures_every_dtype_dense_and_sparse(counter: torch.device) -> None:
    options = Bench(energy=True, shape=["1024x1024"], tokens="1024", rounds=1, seconds=1.0)
    rows = _measured(setting_of(options))
    assert [(row["dtype"], row["sparsity"]) for row in rows] == [
        ("float16", "dense"),
        ("bfloat16", "dense"),
        ("bfloat16", "2:4"),
        ("int8", "dense"),
        ("int8", "2:4"),
        ("float8_e4m3fn", "dense"),
        ("float8_e4m3fn", "2:4"),
        ("float8_e4m3fn", "2:4"),
    ]
    for row in rows:
        assert row["error"] == ""
        assert row["excess"] <= 1
        assert row["tflop_per_joule"] > 0
        assert row["to_float16"] > 0
