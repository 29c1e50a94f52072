from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hopsparse.prune import is_chain, trace_groups


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.o, self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(4))
        self.unused = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.o(self.q(x) + self.k(x) + self.v(x))


def test_groups_are_in_run_order_and_share_inputs() -> None:
    block = Attention()
    names = ["o", "q", "k", "v", "unused"]
    groups = trace_groups(block, names, lambda: block(torch.ones(2, 8)))
    assert groups == [["q", "k", "v"], ["o"], ["unused"]]


def test_an_input_changed_in_place_is_another_input() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            first = self.a(x)
            return first + self.b(x.add_(1))

    block = Block()
    assert trace_groups(block, ["a", "b"], lambda: block(torch.ones(1, 4))) == [["a"], ["b"]]


def test_a_layer_called_twice_counts_where_it_was_first() -> None:
    a, b = nn.Linear(4, 4), nn.Linear(4, 4)
    block = nn.ModuleList([a, b])
    assert trace_groups(block, ["1", "0"], lambda: a(b(a(torch.ones(1, 4))))) == [["0"], ["1"]]


def test_hooks_go_even_when_the_call_fails() -> None:
    block = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(RuntimeError):
        trace_groups(block, ["0"], lambda: block(torch.ones(1, 3)))
    assert not block[0]._forward_pre_hooks


X = torch.ones(1, 4)


@pytest.mark.parametrize(
    ("run", "chain"),
    [
        (lambda b: b[1](b[0](X)), True),
        (lambda b: b[0](b[1](X)), False),
        (lambda b: b[0](X) + b[1](X), False),
        (lambda b: b[1](b[0](X) * 1), False),
        (lambda b: b[1](b[0](b[0](X))), False),
        (lambda b: b[0](X), False),
        (lambda b: b[1](b[0](b[1](X))), False),
    ],
)
def test_chains(run: object, chain: bool) -> None:
    blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    assert is_chain(blocks, lambda: run(blocks)) is chain  # type: ignore[operator]


def test_blocks_that_change_the_shape_are_no_chain() -> None:
    blocks = nn.ModuleList([nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 8)])
    assert not is_chain(blocks, lambda: blocks[2](blocks[1](blocks[0](X))))
    # What the last block returns enters no other block.
    head = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 2)])
    assert is_chain(head, lambda: head[1](head[0](X)))


def test_blocks_that_return_tuples_and_take_keywords() -> None:
    class Block(nn.Module):
        def forward(self, hidden_states: Tensor) -> tuple[Tensor, None]:
            return hidden_states + 1, None

    blocks = [Block(), Block()]
    assert is_chain(blocks, lambda: blocks[1](hidden_states=blocks[0](hidden_states=X)[0]))
