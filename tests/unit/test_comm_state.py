"""What a state knows and refuses, in one process."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hopsparse.comm import HybridState, aggregate
from hopsparse.comm.agreement import checksum
from hopsparse.comm.memory import Kept, Memory
from hopsparse.comm.state import Place
from hopsparse.errors import ArgumentError, CheckpointError, UnsupportedError


def test_names_are_those_of_the_model() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2, bias=False))
    model[0].bias.requires_grad_(False)
    state = HybridState().bind(model)
    assert sorted(state.memory.kept) == ["0.weight", "1.weight"]
    assert state.names([model[1].weight, model[0].weight]) == ["1.weight", "0.weight"]
    with pytest.raises(ArgumentError, match="a parameter without a name; 2 are known"):
        state.names([nn.Parameter(torch.ones(2))])


def test_one_name_has_one_size() -> None:
    state = HybridState().bind(nn.Linear(3, 4))
    with pytest.raises(ArgumentError, match="weight with 15 values, after 12 before"):
        state.bind(nn.Linear(3, 5))


def test_what_is_saved_depends_on_model_and_options_alone() -> None:
    """So that a new state can ask a checkpoint for it, before the first step."""
    state = HybridState(dense_below=10, momentum=0.5).bind(nn.Linear(3, 4))
    before = {key: (each.shape, each.dtype) for key, each in state.state_dict().items()}
    state.memory.kept["weight"] = Kept(12, 0, 7, torch.ones(12), torch.ones(12))
    after = {key: (each.shape, each.dtype) for key, each in state.state_dict().items()}
    assert before == after
    kinds = {key.removeprefix("0of1.0of1.") for key in before}
    assert kinds == {
        "loss_scale",
        "steps.weight",
        "steps.bias",
        "residual.weight",
        "velocity.weight",
        "velocity.bias",
    }


def test_what_was_saved_comes_back() -> None:
    state = HybridState(dense_below=0).bind(nn.Linear(3, 4))
    state.memory.kept["weight"] = Kept(12, 0, 7, torch.arange(12.0))
    state.follow_scale(64.0)
    other = HybridState(dense_below=0).bind(nn.Linear(3, 4))
    other.load_state_dict(state.state_dict())
    kept = other.memory.kept["weight"]
    assert (kept.steps, other.loss_scale) == (7, 64.0)
    assert torch.equal(kept.residual, 64 * torch.arange(12.0))  # type: ignore[arg-type]
    assert kept.residual is not state.memory.kept["weight"].residual


def test_a_state_of_another_rank_is_refused() -> None:
    state = HybridState().bind(nn.Linear(3, 4))
    state.place = Place(1, 2)
    other = HybridState()
    other.place = Place(0, 2)
    with pytest.raises(CheckpointError, match="a state without 0of2.0of1"):
        other.load_state_dict(state.state_dict())


def test_what_is_kept_follows_the_loss_scale() -> None:
    state = HybridState()
    state.memory.kept["a"] = Kept(2, 0, 1, torch.tensor([1.0, 3.0]), torch.tensor([5.0, 7.0]))
    state.follow_scale(8.0)
    state.follow_scale(8.0)
    state.follow_scale(2.0)
    assert state.memory.kept["a"].residual.tolist() == [2.0, 6.0]  # type: ignore[union-attr]
    assert state.memory.kept["a"].velocity.tolist() == [10.0, 14.0]  # type: ignore[union-attr]
    for wrong in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ArgumentError, match="loss_scale"):
            state.follow_scale(wrong)


def test_memory_is_counted() -> None:
    memory = Memory({"a": Kept(3, 0, 1, torch.ones(3)), "b": Kept(2)})
    assert memory.nbytes() == 12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8])
def test_any_bit_changes_the_checksum(dtype: torch.dtype) -> None:
    values = torch.arange(5000).remainder(251).to(dtype)
    seen = {int(checksum([values]))}
    for place in (0, 1, 2500, 4999):
        changed = values.clone()
        changed.view(torch.uint8).view(-1)[place * dtype.itemsize] ^= 1
        seen.add(int(checksum([changed])))
    seen.add(int(checksum([values.flip(0)])))
    seen.add(int(checksum([values[:10], values[10:].flip(0)])))
    assert len(seen) == 7


def test_there_must_be_a_group() -> None:
    with pytest.raises(UnsupportedError, match="no process group"):
        aggregate(torch.ones(3))
