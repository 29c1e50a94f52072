"""A language model of a few lines, pruned, with its teacher and windows that it can learn from."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from hopsparse.formats import parse_pattern
from hopsparse.nn import SparseLinear
from hopsparse.prune import magnitude
from hopsparse.recover import (
    Corpus,
    Layout,
    Recovered,
    RecoverOptions,
    StateFile,
    Task,
    open_machine,
    recover,
)

VOCABULARY, WIDTH, TOKENS = 23, 16, 12
LAYOUT = Layout(("blocks.0", "blocks.1"), "head")
OPTIONS = RecoverOptions(
    steps=6, lr=3e-3, warmup=0.0, batch_windows=2, window_tokens=TOKENS, evaluate_every=3
)


class Block(nn.Module):
    """A norm and an MLP with a residual; every token also sees the mean of those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        seen = torch.arange(1, hidden.shape[1] + 1, device=hidden.device)[:, None]
        mixed = self.norm(hidden + hidden.cumsum(1) / seen)
        return hidden + self.down(torch.relu(self.up(mixed)))


class TinyModel(nn.Module):
    """Embedding, two blocks, a norm and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embedding(ids)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))  # type: ignore[no-any-return]


def teacher_and_student(
    fmt: str = "nm", pattern: str = "2:4", seed: int = 0
) -> tuple[TinyModel, TinyModel]:
    """A dense model, and a copy whose block layers are pruned by magnitude."""
    torch.manual_seed(seed)
    teacher = TinyModel().requires_grad_(False)
    with torch.no_grad():
        for parameter in teacher.blocks.parameters():
            # Larger than the initialisation: pruning must hurt.
            parameter.mul_(2.0)
    student = copy.deepcopy(teacher)
    for path in LAYOUT.blocks:
        block = student.get_submodule(path)
        for name in ("up", "down"):
            linear = getattr(block, name)
            linear.weight.copy_(magnitude(linear.weight, parse_pattern(pattern)))
            options: dict[str, Any] = {"pattern": pattern} if fmt == "nm" else {}
            setattr(block, name, SparseLinear.from_linear(linear, fmt, **options))
    return teacher, student


def corpus(train: int = 5, held_out: int = 2, seed: int = 1) -> Corpus:
    """Windows of random tokens."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(VOCABULARY, (train + held_out, 1, TOKENS), generator=generator)
    return Corpus(list(drawn[:train]), list(drawn[train:]))


def run(
    student: nn.Module,
    teacher: nn.Module | Callable[[], nn.Module],
    *,
    windows: Corpus | None = None,
    file: StateFile | None = None,
    resume: bool = False,
    make_optimizer: Any = None,
    tell: Any = lambda *_: None,
    **changes: Any,
) -> Recovered:
    """Recover with `OPTIONS` and some changes."""
    options = replace(OPTIONS, **changes)
    with open_machine(options) as machine:
        task = Task(
            LAYOUT, windows or corpus(), options, machine, file, resume, make_optimizer, tell
        )
        return recover(student, teacher, task)


def dense_weights(model: nn.Module) -> dict[str, Tensor]:
    """The weight of every sparse layer."""
    return {
        name: module.to_dense()
        for name, module in model.named_modules()
        if isinstance(module, SparseLinear)
    }
