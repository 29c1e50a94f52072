"""What is left beside the largest values, in 8, 4, 3.5, 3 or 1 bits each and a scale a block.

But with 1 bit nothing is lost: a scale has 8 bits, a code 7 at most, so that their product is
exact in float32; a value is at most twice and at least half of what it is rounded to, so that the
difference is exact too (Sterbenz, 1974). What was sent and what is kept add up bit by bit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

Remainder = Literal["int8", "int4", "int3.5", "int3", "sign"]
_SCALE = torch.bfloat16
# So that the largest code times a scale that was rounded up is still finite.
_TOP = torch.finfo(torch.float32).max * (1 - torch.finfo(_SCALE).eps / 2)


class Coder(ABC):
    """One way to round rows of float32, a scale a row.

    Attributes:
        block: Columns of a row.
        most: The largest code.
        code_bytes: Bytes of a coded row, without its scale.
    """

    block: int
    most: int
    code_bytes: int

    def encode(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Round.

        Args:
            rows: float32 [n, block], finite.

        Returns:
            Codes uint8 [n, code_bytes] and scales bfloat16 [n].
        """
        scales = self._scales(rows).clamp(max=_TOP / self.most).to(_SCALE)
        # Where the scale is zero every code is zero, not 0 / 0.
        divisor = torch.where(scales == 0, torch.inf, scales.float())
        return self._codes(rows, divisor[:, None]), scales

    def decode(self, codes: Tensor, scales: Tensor) -> Tensor:
        """The rounded rows, float32 [n, block]."""
        return self._numbers(codes).mul_(scales.float()[:, None])

    def _scales(self, rows: Tensor) -> Tensor:
        return rows.abs().amax(1) / self.most

    def _integers(self, rows: Tensor, divisor: Tensor) -> Tensor:
        return (rows / divisor).round_().clamp_(-self.most, self.most)

    @abstractmethod
    def _codes(self, rows: Tensor, divisor: Tensor) -> Tensor: ...

    @abstractmethod
    def _numbers(self, codes: Tensor) -> Tensor: ...


class Int8(Coder):
    """Round to the nearest of -127 to 127 parts of the largest magnitude of 512 values."""

    block, most, code_bytes = 512, 127, 512

    def _codes(self, rows: Tensor, divisor: Tensor) -> Tensor:
        return self._integers(rows, divisor).to(torch.int8).view(torch.uint8)

    def _numbers(self, codes: Tensor) -> Tensor:
        return codes.view(torch.int8).float()


class Int4(Coder):
    """Round to the nearest of -7 to 7 parts of the largest magnitude of 128 values.

    Low halves of the bytes are the first 64 values, high halves the others.
    """

    block, most, code_bytes = 128, 7, 64

    def _codes(self, rows: Tensor, divisor: Tensor) -> Tensor:
        codes = self._integers(rows, divisor).add_(8).to(torch.uint8)
        return codes[:, :64] | codes[:, 64:] << 4

    def _numbers(self, codes: Tensor) -> Tensor:
        return torch.cat([codes & 15, codes >> 4], dim=1).float().sub_(8)


class Int3Half(Coder):
    """Round to the nearest of -5 to 5 parts of the largest magnitude of 128 values, two in 7 bits.

    Values v and v + 64 are pair v: 11 times the first code and the second, of 0 to 10 both. The low
    7 bits of byte v are pair v, to 55; the high bit of byte 8 b + v is bit b of pair 56 + v.
    """

    block, most, code_bytes = 128, 5, 56

    def _codes(self, rows: Tensor, divisor: Tensor) -> Tensor:
        codes = self._integers(rows, divisor).add_(5).to(torch.uint8)
        pairs = codes[:, :64] * 11 + codes[:, 64:]
        last = pairs[:, None, 56:] >> _seven(rows) & 1
        return pairs[:, :56] | last.flatten(1) << 7

    def _numbers(self, codes: Tensor) -> Tensor:
        last = codes[:, :8] >> 7
        for bit in range(1, 7):
            last |= codes[:, 8 * bit : 8 * bit + 8] >> 7 << bit
        # In float32: torch divides bytes slowly. No half is near a multiple of 11.
        pairs = torch.cat([codes & 127, last], dim=1).float()
        first = pairs.add(0.5).div_(11).floor_()
        return torch.cat([first, pairs.sub_(first, alpha=11)], dim=1).sub_(5)


class Int3(Coder):
    """Round to the nearest of -3 to 3 parts of the largest magnitude of 128 values.

    First the low two bits of each, as they are in bytes 0 to 31: values v, v + 32, v + 64 and
    v + 96 in byte v, the first lowest. Then the high bits, of values v, v + 16 and on in byte v.
    """

    block, most, code_bytes = 128, 3, 48

    def _codes(self, rows: Tensor, divisor: Tensor) -> Tensor:
        codes = self._integers(rows, divisor).add_(4).to(torch.uint8)
        return torch.cat([_packed(codes & 3, 2), _packed(codes >> 2, 1)], dim=1)

    def _numbers(self, codes: Tensor) -> Tensor:
        low, high = _unpacked(codes[:, :32], 2), _unpacked(codes[:, 32:], 1)
        return (low | high << 2).float().sub_(4)


class Sign(Coder):
    """The sign of each, times the mean magnitude of 512 values: what 1-bit Adam sends.

    There is no zero: beside others that are not zero, a value that is moves by the scale. Bit b of
    the bytes has values 64 b to 64 b + 63.
    """

    block, most, code_bytes = 512, 1, 64

    def _scales(self, rows: Tensor) -> Tensor:
        parts = rows.abs().mul_(1 / self.block)  # first: a sum may overflow
        # Halves are added up, so that the order is one that a kernel can keep too.
        while (half := parts.shape[1] // 2) > 0:
            parts = parts[:, :half] + parts[:, half:]
        return parts[:, 0]

    def _codes(self, rows: Tensor, divisor: Tensor) -> Tensor:
        return _packed((rows >= 0).view(torch.uint8), 1)

    def _numbers(self, codes: Tensor) -> Tensor:
        return _unpacked(codes, 1).float().mul_(2).sub_(1)


def _packed(numbers: Tensor, bits: int) -> Tensor:
    """uint8 [n, block] below 2^bits -> [n, block * bits / 8]: a byte has values far apart."""
    each = 8 // bits
    parts = numbers.view(len(numbers), each, numbers.shape[1] // each)
    packed = parts[:, 0]
    for place in range(1, each):
        packed = packed | parts[:, place] << bits * place
    return packed


def _unpacked(packed: Tensor, bits: int) -> Tensor:
    """What `_packed` was given."""
    mask, shifts = (1 << bits) - 1, range(0, 8, bits)
    return torch.stack([packed >> shift & mask for shift in shifts], dim=1).flatten(1)


def _seven(beside: Tensor) -> Tensor:
    """0 to 6 in a column; made there, as nobody should wait for a copy."""
    return torch.arange(7, dtype=torch.uint8, device=beside.device)[:, None]


CODERS: Mapping[str, Coder] = {
    "int8": Int8(),
    "int4": Int4(),
    "int3.5": Int3Half(),
    "int3": Int3(),
    "sign": Sign(),
}
