"""Which operators of torch a program calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Operators(TorchDispatchMode):
    """Records the names of those that are called while it is entered, and lets them run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(
        self,
        operator: Any,
        types: Sequence[type],
        arguments: Sequence[Any] = (),
        named: Mapping[str, Any] | None = None,
    ) -> Any:
        self.names.append(str(operator))
        return operator(*arguments, **(named or {}))
