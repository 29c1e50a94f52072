"""Whole models against each other: every way runs the same model, and failures are told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from hopsparse.errors import ArgumentError
from hopsparse.models.contenders import (
    CONFIGS,
    WAYS,
    ModelWay,
    leave,
    ours_16,
    ours_in,
    projections,
    random_model,
    ways_named,
)
from hopsparse.models.fused import GatedMLP
from hopsparse.models.throughput import Phase, prepared, race
from hopsparse.nn import SparseLinear

CPU = torch.device("cpu")
TINY = CONFIGS["llama-3-8b"] | {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
}
PHASES = Phase("prefill", 2, 8), Phase("decode", 3, 8)


def make() -> Any:
    torch.manual_seed(0)
    return random_model(TINY, device=CPU, dtype=torch.float32)


def refuses(model: nn.Module) -> None:
    raise RuntimeError("no such\n  kernel")


def test_every_way_is_timed_in_every_phase_and_failures_are_told() -> None:
    ways = (
        ModelWay("dense", leave),
        ModelWay("fails", refuses),
        ModelWay("2:4", ours_16, captured=True),
    )
    found = list(race(make, ways, PHASES, rounds=2))
    assert [(each.way, each.phase) for each in found] == [
        (way.name, phase.name) for way in ways for phase in PHASES
    ]
    for each in found:
        if each.way == "fails":
            assert each.error == "RuntimeError: no such kernel"
        else:
            assert each.error == ""
            tokens = 16 if each.phase == "prefill 2 x 8" else 3
            assert each.tokens_per_s == pytest.approx(tokens / each.ms * 1e3, rel=1e-3)


@pytest.mark.parametrize("prepare", [ours_16, ours_in("int8"), ours_in("fp8")])
def test_ours_are_two_four_and_fused(prepare: Callable[[nn.Module], None]) -> None:
    model = make()
    assert len(projections(model)) == 2 * 7
    prepare(model)
    assert projections(model) == {}
    assert sum(isinstance(each, GatedMLP) for each in model.modules()) == 2
    sparse = [each for each in model.modules() if isinstance(each, SparseLinear)]
    assert len(sparse) == 2 * 4
    assert all(0.4 < (each.to_dense() == 0).float().mean() < 0.6 for each in sparse)


def test_steps_of_decoding_have_one_context() -> None:
    model = make()
    run, early = prepared(ModelWay("dense", leave), Phase("decode", 2, 8), model, CPU)
    first = run()
    assert isinstance(first, torch.Tensor)
    assert torch.equal(first, run())  # type: ignore[arg-type]
    assert (tuple(first.shape), early) == ((2, 1, 64), 0)
    # The step sees the prompt: its logits are those of the prompt with its last token again.
    torch.manual_seed(1)
    run, _ = prepared(ModelWay("dense", leave), Phase("decode", 2, 8), model, CPU)
    torch.manual_seed(1)
    texts = torch.randint(64, (2, 8))
    whole = torch.cat([texts, texts[:, -1:]], 1)
    torch.testing.assert_close(run(), model(whole).logits[:, -1:])


def test_names_that_mean_nothing_are_refused() -> None:
    assert ways_named(None) == WAYS
    assert [way.name for way in ways_named("2:4+fp8; dense, compiled")] == [
        *("2:4+fp8", "dense, compiled"),
    ]
    with pytest.raises(ArgumentError, match="the way '2:5'"):
        ways_named("2:5")
    with pytest.raises(ArgumentError, match="config 'llama-4'"):
        random_model("llama-4", device=CPU)
    for wrong in (("train", 1, 1), ("decode", 0, 1), ("prefill", 1, 0)):
        with pytest.raises(ArgumentError, match="prefill or decode"):
            Phase(*wrong)


@pytest.mark.parametrize("captured", [False, True])
def test_prompts_have_the_logits_of_the_model(captured: bool) -> None:
    """Captured ways attend without a mask, over a cache that every run finds empty."""
    model = make()
    torch.manual_seed(1)
    run, _ = prepared(ModelWay("dense", leave, captured=captured), PHASES[0], model, CPU)
    torch.manual_seed(1)
    texts = torch.randint(64, (2, 8))
    model.set_attn_implementation("sdpa")
    right = model(texts).logits[:, -1:]
    model.set_attn_implementation("hopsparse_race_causal" if captured else "sdpa")
    for _ in range(2):
        torch.testing.assert_close(run(), right)


def test_what_begins_too_late_is_left_out() -> None:
    ways = (ModelWay("dense", leave), ModelWay("2:4", ours_16))
    found = list(race(make, ways, PHASES, rounds=1, seconds=1e-9))
    assert [each.error for each in found] == ["left out: no time"] * 4
