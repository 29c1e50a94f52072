"""What is sent of a gradient, and the checks of it; plain values, the same on every rank."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from ..errors import ArgumentError
from ..ops.hybrid_gradient.remainder import CODERS, Remainder

# Where warm-up starts, as in Deep Gradient Compression (Lin et al., 2018, section 3.2).
_FIRST_K = 0.25


@dataclass(frozen=True)
class HybridOptions:
    """How gradients are reduced; checked when it is made.

    Attributes:
        k: Part of the values of each parameter that is sent exactly, the largest; 0 to 1.
        remainder: How the others are rounded: `int8`, `int4`, `int3.5`, `int3` or `sign`;
            None: they are not sent.
        every: Each step rounds and sends one of so many blocks of the remainder, in turn.
        warmup: Steps in which the part goes down from a quarter to `k`, by the same factor a step.
        dense_below: Parameters with fewer values are sent as they are, in float32.
        momentum: Factor of momentum correction: what is sent is momentum and not gradient, for an
            optimizer without momentum. 0 for none.
        clip: Largest norm of a gradient of a parameter, of all ranks together; each rank clips its
            own to `clip / sqrt(ranks)` before it is added to what was kept. None for none.
        error_feedback: Keep what was not sent for the next step. Without it the sum is biased;
            it is there to show that.
        checksum: Compare sums of the results, and of the parameters, over the ranks in each step.

    Raises:
        ArgumentError: A value that means nothing.

    Example:
        >>> HybridOptions(k=0.01).k_at(7)
        0.01
    """

    k: float = 0.001
    remainder: Remainder | None = "int4"
    every: int = 1
    warmup: int = 0
    dense_below: int = 4096
    momentum: float = 0.0
    clip: float | None = None
    error_feedback: bool = True
    checksum: bool = False

    def __post_init__(self) -> None:
        """Refuse what means nothing."""
        if self.remainder is not None and self.remainder not in CODERS:
            raise _refused("remainder", self.remainder, ", ".join(CODERS) + " or None", "'int4'")
        for name, least in (("every", 1), ("warmup", 0), ("dense_below", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise _refused(name, value, f"an integer of {least} or more", str(least))
        if not _is_number(self.k) or not 0 <= self.k <= 1:
            raise _refused("k", self.k, "a part, 0 to 1", "0.001 for one value in a thousand")
        if not _is_number(self.momentum) or not 0 <= self.momentum < 1:
            raise _refused("momentum", self.momentum, "0 or more and less than 1", "0.9")
        if self.clip is not None and not (_is_number(self.clip) and 0 < self.clip < math.inf):
            raise _refused("clip", self.clip, "a positive norm or None", "1.0")
        if self.k == 0 and self.remainder is None:
            raise _refused("k", self.k, "more than 0 where no remainder is sent", "0.001")

    def k_at(self, step: int) -> float:
        """The part that is sent exactly in a step, from 0 on.

        Example:
            >>> HybridOptions(k=0.01, warmup=2).k_at(0), HybridOptions(k=0.01, warmup=2).k_at(1)
            (0.25, 0.05)
        """
        if step >= self.warmup or not 0 < self.k < _FIRST_K:
            return self.k
        return float(_FIRST_K * (self.k / _FIRST_K) ** (step / self.warmup))

    def parts_of(self, numel: int) -> tuple[str, ...]:
        """What is kept between steps of a parameter with so many values.

        Example:
            >>> HybridOptions(momentum=0.9).parts_of(100), HybridOptions().parts_of(1_000_000)
            (('velocity',), ('residual',))
        """
        keeps = self.error_feedback and numel >= self.dense_below
        return ("residual",) * keeps + ("velocity",) * (self.momentum > 0)

    def facts(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _refused(name: str, value: object, need: str, hint: str) -> ArgumentError:
    return ArgumentError(f"{name} = {value!r}", need=need, hint=hint)
