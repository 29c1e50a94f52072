from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from hopsparse.errors import (
    ArgumentError,
    CalibrationError,
    UnsupportedError,
    VerificationError,
)
from hopsparse.formats import NM
from hopsparse.nn import SparseLinear
from hopsparse.recover import Corpus, LowRank, RecoverOptions
from hopsparse.recover.layers import MaskedLinear
from tests.helpers.tiny_recover import (
    TOKENS,
    TinyModel,
    corpus,
    dense_weights,
    run,
    teacher_and_student,
)


def held_out_losses(made: Any) -> list[float]:
    return [row["held_out_loss"] for row in made.trajectory.curve]


def zeros_stayed(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> bool:
    """Bit by bit: -0.0 would not do."""
    return all(
        not bool((after[name].view(torch.int32)[weight == 0] != 0).any())
        for name, weight in before.items()
    )


def test_loss_falls_and_zeros_stay_under_weight_decay() -> None:
    teacher, student = teacher_and_student()
    before = dense_weights(student)
    made = run(student, teacher, steps=40, weight_decay=0.1, evaluate_every=10)
    losses = held_out_losses(made)
    assert losses[-1] < 0.5 * losses[0]
    after = dense_weights(student)
    assert zeros_stayed(before, after)
    assert all(not torch.equal(before[name], after[name]) for name in before)
    assert len(made.layers) == 4


@pytest.mark.parametrize("fmt", ["csr", "csc", "hyb", "bitmask"])
def test_every_format_keeps_its_zeros(fmt: str) -> None:
    teacher, student = teacher_and_student(fmt, "unstructured:0.5")
    before = dense_weights(student)
    run(student, teacher)
    after = dense_weights(student)
    assert zeros_stayed(before, after)
    assert {
        module.matrix.name for module in student.modules() if isinstance(module, SparseLinear)
    } == {fmt}


def test_only_what_the_options_name_is_trained() -> None:
    for train, changed in (("projections", False), ("all", True)):
        teacher, student = teacher_and_student()
        run(student, teacher, train=train)
        assert torch.equal(student.norm.weight, teacher.norm.weight) is not changed
        bias = student.get_submodule("blocks.0.up").bias
        assert torch.equal(bias, teacher.get_parameter("blocks.0.up.bias")) is not changed
        assert torch.equal(student.embedding.weight, teacher.embedding.weight)
        assert torch.equal(student.head.weight, teacher.head.weight)


def test_flags_and_modes_come_back() -> None:
    teacher, student = teacher_and_student()
    student.requires_grad_(True).train()
    run(student, teacher, steps=1)
    assert all(parameter.requires_grad for parameter in student.parameters())
    assert all(parameter.grad is None for parameter in student.parameters())
    assert student.training


def test_the_best_weights_are_kept_and_training_stops_early() -> None:
    teacher, student = teacher_and_student()
    before = dense_weights(student)
    # A rate that can only do harm: the best look is the first one.
    made = run(student, teacher, steps=30, lr=5.0, evaluate_every=2, patience=2)
    assert made.trajectory.stopped
    assert made.trajectory.step == 4
    assert made.trajectory.best_step == 0
    after = dense_weights(student)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_best_weights_are_those_of_the_best_look() -> None:
    teacher, student = teacher_and_student()
    made = run(student, teacher, steps=12, lr=0.05, evaluate_every=3)
    losses = held_out_losses(made)
    assert made.trajectory.best == min(losses)
    again = run(student, teacher, steps=1, lr=1e-12)
    assert held_out_losses(again)[0] == min(losses)


def test_mean_of_the_weights() -> None:
    """With two steps and no held-out text the result is the running mean itself."""
    decay, weights = 0.75, []
    for steps in (0, 1, 2):
        teacher, student = teacher_and_student()
        if steps:
            # A constant rate, so that the first step of both runs is the same.
            run(student, teacher, steps=steps, windows=corpus(held_out=0), make_optimizer=fixed_sgd)
        weights.append(dense_weights(student)["blocks.0.up"])
    teacher, student = teacher_and_student()
    run(student, teacher, steps=2, windows=corpus(held_out=0), make_optimizer=fixed_sgd, ema=decay)
    mean = weights[0].lerp(weights[1], 1 - decay).lerp(weights[2], 1 - decay)
    assert torch.equal(dense_weights(student)["blocks.0.up"], mean)


def fixed_sgd(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    class Fixed(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                group["lr"] = 0.5
            super().step()

    return Fixed(groups, lr=0.5)


def test_an_optimizer_that_writes_everywhere_leaves_the_zeros() -> None:
    class Noisy(torch.optim.Optimizer):
        def __init__(self, groups: list[dict[str, Any]]) -> None:
            super().__init__(groups, {"lr": 0.0})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                assert len(group["names"]) == len(group["params"])
                for parameter in group["params"]:
                    parameter.add_(torch.randn_like(parameter), alpha=0.01)

    teacher, student = teacher_and_student()
    before = dense_weights(student)
    run(student, teacher, windows=corpus(held_out=0), make_optimizer=Noisy)
    after = dense_weights(student)
    assert zeros_stayed(before, after)
    assert not torch.equal(before["blocks.0.up"], after["blocks.0.up"])


def test_sr_ste_ends_in_legal_masks_that_moved() -> None:
    teacher, student = teacher_and_student()
    before = dense_weights(student)
    made = run(
        student, teacher, steps=60, masks="sr-ste", lr=0.02, mask_freeze=0.3, evaluate_every=60
    )
    losses = held_out_losses(made)
    assert losses[-1] < losses[0]
    moved = 0
    for name, weight in dense_weights(student).items():
        assert int((weight.view(-1, 4) != 0).sum(-1).max()) <= 2
        layer = student.get_submodule(name)
        assert isinstance(layer.matrix, NM)
        layer.matrix.validate()
        moved += int(((weight != 0) & (before[name] == 0)).sum())
    assert moved > 0


@pytest.mark.parametrize("accumulation", [1, 2])
def test_sr_ste_pulls_pruned_weights_once_a_step(accumulation: int) -> None:
    """Plain descent of a loss without a gradient: pruned weights shrink by lr * decay of them."""
    _, student = teacher_and_student()
    layer = MaskedLinear(student.get_submodule("blocks.0.up"))
    layer.select(0.25)
    with torch.no_grad():
        layer.weight.masked_fill_(
            layer.pruned, 0.5 * float(layer.weight[layer.weight != 0].abs().min())
        )
    before = layer.weight.detach().clone()
    for _ in range(accumulation):
        (0 * layer(torch.ones(1, 16)).sum()).backward()
    layer.pull()
    assert layer.weight.grad is not None
    expected = torch.where(layer.pruned, 0.25 * before, torch.zeros(()))
    assert torch.equal(layer.weight.grad, expected)


def test_sr_ste_needs_n_of_m() -> None:
    teacher, student = teacher_and_student("csr", "unstructured:0.5")
    with pytest.raises(
        ArgumentError, match=r"blocks.0.up: masks='sr-ste' for a weight stored as csr"
    ):
        run(student, teacher, masks="sr-ste")
    assert len(dense_weights(student)) == 4


def test_low_rank_leaves_the_sparse_weights_alone() -> None:
    teacher, student = teacher_and_student()
    before = dense_weights(student)
    made = run(student, teacher, steps=40, lora_rank=2, lr=1e-2, evaluate_every=20)
    losses = held_out_losses(made)
    assert losses[-1] < losses[0]
    products = [module for module in student.modules() if isinstance(module, LowRank)]
    assert len(products) == 4
    after = dense_weights(student)
    assert all(torch.equal(weight, after[f"{name}.base"]) for name, weight in before.items())


def test_layer_wise_brings_each_block_closer() -> None:
    teacher, student = teacher_and_student()
    before = dense_weights(student)
    told: list[tuple[int, int]] = []
    made = run(
        student,
        teacher,
        level="layer-wise",
        steps=20,
        evaluate_every=20,
        tell=lambda done, steps, *_: told.append((done, steps)),
    )
    curve = made.trajectory.curve
    assert [row["stage"] for row in curve] == [0, 0, 1, 1]
    for first, last in (curve[:2], curve[2:]):
        assert last["held_out_loss"] < first["held_out_loss"]
    assert zeros_stayed(before, dense_weights(student))
    assert told == [(done, 40) for done in range(1, 41)]


def test_hidden_states_alone_can_be_trained_on() -> None:
    teacher, student = teacher_and_student()
    # Behind the first block alone: the second gets no gradient.
    before = dense_weights(student)
    made = run(
        student, teacher, steps=20, kl=0.0, hidden=1.0, hidden_blocks=(0,), evaluate_every=20
    )
    losses = held_out_losses(made)
    assert losses[-1] < losses[0]
    after = dense_weights(student)
    assert torch.equal(before["blocks.1.up"], after["blocks.1.up"])
    assert not torch.equal(before["blocks.0.up"], after["blocks.0.up"])


def test_bfloat16_and_a_part_of_the_positions() -> None:
    teacher, student = teacher_and_student()
    made = run(
        student,
        teacher,
        steps=40,
        precision="bf16",
        position_fraction=0.5,
        cross_entropy=0.1,
        evaluate_every=40,
    )
    losses = held_out_losses(made)
    assert losses[-1] < losses[0]


def test_fp16_needs_a_gpu() -> None:
    teacher, student = teacher_and_student()
    with pytest.raises(UnsupportedError, match="precision fp16 on cpu"):
        run(student, teacher, precision="fp16")
    run(student, teacher, steps=1)


def test_a_loss_that_is_not_finite_says_the_step_and_gives_the_best_weights() -> None:
    class Poison(torch.optim.SGD):
        steps = 0

        def step(self, closure: Any = None) -> None:
            super().step()
            self.steps += 1
            if self.steps == 4:
                with torch.no_grad():
                    self.param_groups[0]["params"][0].fill_(math.nan)

    teacher, student = teacher_and_student()
    with pytest.raises(VerificationError, match="the loss is nan at step 5") as caught:
        run(student, teacher, steps=8, make_optimizer=lambda groups: Poison(groups, lr=1e-3))
    assert "smaller lr" in caught.value.hint
    assert all(bool(weight.isfinite().all()) for weight in dense_weights(student).values())


def test_windows_of_another_length_are_refused() -> None:
    teacher, student = teacher_and_student()
    with pytest.raises(CalibrationError, match=f"windows of {TOKENS} tokens"):
        run(student, teacher, window_tokens=TOKENS + 1)
    with pytest.raises(CalibrationError, match="no window"):
        Corpus([])
    window = torch.zeros(1, 8, dtype=torch.int64)
    with pytest.raises(CalibrationError, match=r"a window of shape \[1, 7\]"):
        Corpus([window], [window[:, :7]])


def test_models_that_cannot_be_recovered() -> None:
    teacher, student = teacher_and_student()
    with pytest.raises(ArgumentError, match="a TinyModel without sparse layers"):
        run(TinyModel(), teacher)
    with pytest.raises(ArgumentError, match="a sparse weight in bfloat16"):
        run(student.bfloat16(), teacher)
    with pytest.raises(ArgumentError, match="itself a SparseLinear"):
        run(SparseLinear.from_linear(nn.Linear(8, 8), "csr"), teacher)
    with pytest.raises(ArgumentError, match="a str as the teacher"):
        run(student.float(), lambda: "smollm2")  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 0}, "steps=0"),
        ({"steps": True}, "steps=True"),
        ({"lr": 0}, "above 0"),
        ({"lr": math.nan}, "finite"),
        ({"warmup": 1.5}, "at most 1"),
        ({"ema": 1.0}, "below 1"),
        ({"betas": (0.9,)}, "two numbers"),
        ({"position_fraction": 0.0}, "position_fraction"),
        ({"train": "norms"}, "one of projections, all"),
        ({"masks": "grow"}, "one of fixed, sr-ste"),
        ({"level": "block"}, "one of end-to-end"),
        ({"precision": "fp8"}, "one of no, bf16"),
        ({"kl": 0.0}, "at least one loss"),
        ({"lora_rank": 4, "masks": "sr-ste"}, "low-rank"),
        ({"batch_windows": 4, "accumulation": 3}, "batch_windows=6"),
    ],
)
def test_options_that_cannot_mean_anything(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        RecoverOptions(**change)


def test_options_survive_json() -> None:
    options = RecoverOptions(steps=3, hidden_blocks=(0, -1), betas=(0.8, 0.9))
    assert RecoverOptions.from_json(options.to_json()) == options
    with pytest.raises(ArgumentError, match="'step'"):
        RecoverOptions.from_json({"step": 3})
