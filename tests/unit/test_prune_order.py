"""Groups are found by running the block once."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hopsparse.prune import trace_groups


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down, self.idle = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, hidden: Tensor) -> Tensor:
        inner = self.gate(hidden) * self.up(hidden)
        return self.down(inner) + self.down(hidden)


def test_layers_with_one_input_are_one_group_in_run_order() -> None:
    block = Gated()
    names = ["idle", "down", "up", "gate"]
    groups = trace_groups(block, names, lambda: block(torch.ones(2, 4)))
    assert groups == [["gate", "up"], ["down"], ["idle"]]
    assert not any(module._forward_pre_hooks for module in block.modules())


def test_an_input_written_in_between_is_another_input() -> None:
    layers = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    x = torch.ones(1, 2)
    groups = trace_groups(layers, ["a", "b"], lambda: [layers["a"](x), layers["b"](x.add_(1))])
    assert groups == [["a"], ["b"]]
