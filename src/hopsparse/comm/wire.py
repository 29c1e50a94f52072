"""Tensors in one message of bytes, and out again; both sides know what is in it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Field = tuple[torch.dtype, int]

# Every part begins where any dtype may begin.
_ALIGNMENT = 8


def message_bytes(fields: Sequence[Field]) -> int:
    """Bytes of a message.

    Args:
        fields: Dtype and number of elements of each tensor.

    Example:
        >>> message_bytes([(torch.uint8, 3), (torch.float32, 2)])
        16
    """
    return sum(_padded(dtype.itemsize * count) for dtype, count in fields)


def pack(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Put tensors one behind the other.

    Returns:
        uint8 [message_bytes of them].

    Example:
        >>> pack([torch.tensor([1], dtype=torch.int16)], torch.device("cpu")).tolist()
        [1, 0, 0, 0, 0, 0, 0, 0]
    """
    fields = [(tensor.dtype, tensor.numel()) for tensor in tensors]
    message = torch.zeros(message_bytes(fields), dtype=torch.uint8, device=device)
    for place, tensor in zip(unpack(message, fields), tensors, strict=True):
        place.copy_(tensor.flatten())
    return message


def unpack(message: Tensor, fields: Sequence[Field]) -> list[Tensor]:
    """Views into a message, 1-D, of the given dtypes.

    Example:
        >>> message = pack([torch.tensor([1.5])], torch.device("cpu"))
        >>> unpack(message, [(torch.float32, 1)])
        [tensor([1.5000])]
    """
    found, start = [], 0
    for dtype, count in fields:
        length = dtype.itemsize * count
        found.append(message[start : start + length].view(dtype))
        start += _padded(length)
    return found


def _padded(length: int) -> int:
    return -(-length // _ALIGNMENT) * _ALIGNMENT
