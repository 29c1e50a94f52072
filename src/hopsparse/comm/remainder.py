"""What is left beside the largest values, in 8, 4 or 1 bits each and a scale for each block.

With 8 and 4 bits nothing is lost: a scale has 8 bits, a code 4 or 7, so that their product is
exact in float32; a value is at most twice and at least half of what it is rounded to, so that the
difference is exact too (Sterbenz, 1974). What was sent and what is kept add up bit by bit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

Remainder = Literal["int4", "int8", "sign"]
_SCALE = torch.bfloat16


class Coder(ABC):
    """One way to round rows of float32, a scale a row.

    Attributes:
        block: Columns of a row.
        code_bytes: Bytes of a coded row, without its scale.
    """

    block: int
    code_bytes: int

    def encode(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Round.

        Args:
            rows: float32 [n, block], finite.

        Returns:
            Codes uint8 [n, code_bytes] and scales bfloat16 [n].
        """
        scales = self._scales(rows).clamp(max=torch.finfo(_SCALE).max).to(_SCALE)
        # Where the scale is zero every code is zero, not 0 / 0.
        divisor = torch.where(scales == 0, torch.inf, scales.float())
        return self._codes(rows, divisor[:, None]), scales

    def decode(self, codes: Tensor, scales: Tensor) -> Tensor:
        """The rounded rows, float32 [n, block]."""
        return self._numbers(codes).mul_(scales.float()[:, None])

    @abstractmethod
    def _scales(self, rows: Tensor) -> Tensor: ...

    @abstractmethod
    def _codes(self, rows: Tensor, divisor: Tensor) -> Tensor: ...

    @abstractmethod
    def _numbers(self, codes: Tensor) -> Tensor: ...


class Int8(Coder):
    """Round to the nearest of -127 to 127 parts of the largest magnitude of 512 values."""

    block, code_bytes = 512, 512

    def _scales(self, rows: Tensor) -> Tensor:
        return rows.abs().amax(1) / 127

    def _codes(self, rows: Tensor, divisor: Tensor) -> Tensor:
        return (rows / divisor).round_().clamp_(-127, 127).to(torch.int8).view(torch.uint8)

    def _numbers(self, codes: Tensor) -> Tensor:
        return codes.view(torch.int8).float()


class Int4(Coder):
    """Round to the nearest of -7 to 7 parts of the largest magnitude of 128 values.

    Low halves of the bytes are the first 64 values, high halves the others.
    """

    block, code_bytes = 128, 64

    def _scales(self, rows: Tensor) -> Tensor:
        return rows.abs().amax(1) / 7

    def _codes(self, rows: Tensor, divisor: Tensor) -> Tensor:
        codes = (rows / divisor).round_().clamp_(-7, 7).add_(8).to(torch.uint8)
        return codes[:, :64] | codes[:, 64:] << 4

    def _numbers(self, codes: Tensor) -> Tensor:
        return torch.cat([codes & 15, codes >> 4], dim=1).float().sub_(8)


class Sign(Coder):
    """The sign of each, times the mean magnitude of 512 values: what 1-bit Adam sends.

    There is no zero: beside others that are not zero, a value that is moves by the scale. Bit b of
    the bytes has values 64 b to 64 b + 63.
    """

    block, code_bytes = 512, 64

    def _scales(self, rows: Tensor) -> Tensor:
        return (rows.abs() / self.block).sum(1)  # divided first: a sum may overflow

    def _codes(self, rows: Tensor, divisor: Tensor) -> Tensor:
        bits = (rows >= 0).view(-1, 8, 64).to(torch.uint8)
        codes = bits[:, 0]
        for bit in range(1, 8):
            codes = codes | bits[:, bit] << bit
        return codes

    def _numbers(self, codes: Tensor) -> Tensor:
        bits = torch.stack([codes >> bit & 1 for bit in range(8)], dim=1)
        return bits.flatten(1).float().mul_(2).sub_(1)


CODERS: Mapping[str, Coder] = {"int4": Int4(), "int8": Int8(), "sign": Sign()}
