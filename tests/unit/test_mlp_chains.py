"""The checks of benchmarks/mlp.py hold for right chains, and notice each stage that is wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hopsparse.measure.codes import CodedInput

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
HIDDEN, INTERMEDIATE, TOKENS = 256, 192, 70
DTYPES = {"exact": torch.int8, "fast": torch.float8_e4m3fn, "promoted": torch.float8_e4m3fn}


@pytest.fixture
def chains() -> Iterator[Any]:
    """The module, which is found beside the script that imports it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        yield import_module("mlp_chains")


@pytest.fixture
def static_step() -> Callable[..., Tensor]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        step: Callable[..., Tensor] = import_module("mlp").static_step
    return step


def block(chains: Any, sums: str) -> tuple[Any, Tensor]:
    generator = torch.Generator().manual_seed(0)
    weights = chains.Weights.random(HIDDEN, INTERMEDIATE, DTYPES[sums], generator)
    return weights, torch.randn(TOKENS, HIDDEN, generator=generator).bfloat16()


def half_dropped(y: Tensor) -> Tensor:
    """The last column of results is that of another one."""
    wrong = y.clone()
    wrong[:, -1] = wrong[:, 0]
    return wrong


def code_off(coded: CodedInput) -> CodedInput:
    """The largest code of each row is one too small."""
    codes = coded.codes.view(torch.int8).clone()
    largest = coded.codes.float().abs().argmax(1, keepdim=True)
    codes.scatter_(1, largest, codes.gather(1, largest) - 1)
    return CodedInput(codes.view(coded.codes.dtype), coded.scale)


def scale_off(coded: CodedInput) -> CodedInput:
    """Scales that leave a bit of the range unused."""
    assert coded.scale is not None
    larger = coded.scale * 1.01
    return CodedInput(coded.codes, larger)


@pytest.mark.parametrize("sums", DTYPES)
def test_right_chains_pass_and_every_wrong_stage_is_noticed(
    sums: str, chains: Any, static_step: Callable[..., Tensor]
) -> None:
    weights, x = block(chains, sums)
    check, step = chains.Check(x, weights), static_step(x, weights, sums)
    found = chains.our_chains(weights, sums, step)
    if sums != "promoted":  # as peers do not take sums
        found += chains.peer_chains(weights, compiled=False)
    for chain in found:
        assert check.excess(chain) <= 1, chain.name
        assert 0 < check.rms_error(chain) < 0.1, chain.name
        wrongs = [
            replace(chain, rounds=lambda x, by=chain.rounds: code_off(by(x))),
            replace(chain, rounds=lambda x, by=chain.rounds: scale_off(by(x))),
            replace(chain, first=lambda x, by=chain.first: half_dropped(by(x))),
            replace(chain, last=lambda x, by=chain.last: half_dropped(by(x))),
        ]
        if chain.between is not None:
            wrongs += [
                replace(chain, between=lambda h, by=chain.between: code_off(by(h))),
                replace(chain, between=lambda h, by=chain.between: scale_off(by(h))),
            ]
        for number, wrong in enumerate(wrongs):
            assert check.excess(wrong) > 1, (chain.name, number)


def test_gate_and_up_are_not_taken_for_each_other(chains: Any) -> None:
    weights, x = block(chains, "exact")
    other = replace(weights, gate=weights.up, up=weights.gate)
    for chain in chains.our_chains(other, "exact", torch.ones(1))[::2]:
        assert chains.Check(x, weights).excess(chain) > 1
