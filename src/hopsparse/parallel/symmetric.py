"""Memory that every rank of a group maps, and which part of it a call may write."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..comm.collective import Group, gather
from ..launch import capture_id
from ..ops._product import is_hopper
from ..ops.peer_sum.plan import CHUNK_BYTES, HEADER_BYTES, MOST_RANKS, Place

# Calls alternate between two slots, so that the peers have read one when it is written again; those
# of a CUDA graph between two others, because nobody knows when it is replayed. The first call of a
# graph has a slot of its own: who knows what ran before it? A graph of one call follows itself.
_OF_GRAPHS, _FIRST_OF_GRAPH, _SLOTS = 2, 4, 5
_ALIGNMENT = 1024


@dataclass
class Slots:
    """Which slot is next. Ranks count alike, because they make the same calls.

    Example:
        >>> slots = Slots()
        >>> [slots.next(capture) for capture in (None, None, 7, 7, 7, None, 8)]
        [(1, False), (0, False), (4, True), (3, False), (2, False), (1, False), (4, True)]
    """

    _eager: int = 0
    _captured: int = 0
    _capture: int | None = None

    def next(self, capture: int | None) -> tuple[int, bool]:
        """The slot of a call, and whether the call must wait until its peers have read.

        Args:
            capture: What tells the capture that is on from others; None where none is.
        """
        if capture is None:
            self._eager ^= 1
            return self._eager, False
        if capture != self._capture:
            self._capture, self._captured = capture, 0
            return _FIRST_OF_GRAPH, True
        self._captured ^= 1
        return _OF_GRAPHS + self._captured, False


@dataclass
class SymmetricMemory:
    """Slots for the parts of calls, in memory that the kernels of all ranks read.

    Attributes:
        memory: uint8, of this rank: flags, then the slots.
        bases: Addresses of that of each rank, as this process maps it.
        rank: Which of them this is.
        slot_bytes: Of a slot.
        patience_ms: How long a kernel waits for a peer.
        handle: Of torch; it keeps what is mapped.
    """

    memory: Tensor
    bases: tuple[int, ...]
    rank: int
    slot_bytes: int
    patience_ms: int
    handle: Any
    _slots: Slots = field(default_factory=Slots)

    def part(self, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Place]:
        """Memory of the next call, for this rank's part, and how its kernel finds all parts.

        Args:
            shape: Of the part; it must fit `slot_bytes`.
            dtype: Of the part.
        """
        slot, drain = self._slots.next(capture_id(self.memory.get_device()))
        start = HEADER_BYTES + slot * self.slot_bytes
        count = 1
        for side in shape:
            count *= side
        part = self.memory[start : start + count * dtype.itemsize].view(dtype).view(shape)
        return part, Place(self.bases, self.rank, start, drain, self.patience_ms)


def why_no_peer_reads(group: Group, device: torch.device) -> str | None:
    """What keeps kernels of these ranks from reading each other's memory, as a clause, or None.

    Args:
        group: Ranks.
        device: Of this one.
    """
    if device.type != "cuda":
        return f"tensors are on {device.type}"
    if group.size() == 1:
        return "there is no other rank"
    if group.size() > MOST_RANKS:
        return f"{group.size()} ranks are more than {MOST_RANKS}"
    if not is_hopper(torch.empty(0, device=device).get_device()):
        return "the GPU is no H100 or H200"
    return None


def share(
    group: Group, device: torch.device, slot_bytes: int, patience_s: float
) -> SymmetricMemory | str:
    """Allocate the memory and map that of all ranks; all of them must call it.

    Args:
        group: Ranks.
        device: GPU of this one.
        slot_bytes: Largest part of a call.
        patience_s: How long a kernel waits for a peer.

    Returns:
        The memory, or the same clause on every rank: why there is none.
    """
    found: _Mapped | str | None = why_no_peer_reads(group, device)
    if found is None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch warns of what is new in it
                found = _mapped(group, device, slot_bytes)
        except Exception as error:  # of torch, which has no class for it
            found = f"symmetric memory: {(str(error).splitlines() or [repr(error)])[0][:200]}"
    failed = isinstance(found, str)
    offset = 0 if isinstance(found, str) else found.offset
    message = torch.tensor([failed, offset], dtype=torch.int64, device=device)
    # Also says that every rank has zeroed its flags.
    told = gather(message, group).tolist()
    if isinstance(found, str):
        return found
    if others := [rank for rank, (fails, _) in enumerate(told) if fails]:
        return f"ranks {others} cannot"
    bases = tuple(base + its for base, (_, its) in zip(found.bases, told, strict=True))
    rank, patience_ms = dist.get_rank(group), int(1e3 * patience_s)
    return SymmetricMemory(found.memory, bases, rank, found.slot_bytes, patience_ms, found.handle)


@dataclass(frozen=True)
class _Mapped:
    """What torch gave: memory, `offset` bytes behind its allocation, and where all of those are."""

    memory: Tensor
    handle: Any
    bases: tuple[int, ...]
    offset: int
    slot_bytes: int


def _mapped(group: Group, device: torch.device, slot_bytes: int) -> _Mapped | str:
    # Nothing here uses multicast, and where it is not set up torch fails to ask for it.
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    from torch.distributed import _symmetric_memory as symmetric

    slot_bytes = -(-slot_bytes // _ALIGNMENT) * _ALIGNMENT
    # Made in inference mode it could not be written outside of it.
    with torch.inference_mode(False):
        size = HEADER_BYTES + _SLOTS * slot_bytes
        memory = symmetric.empty(size, dtype=torch.uint8, device=device)
        memory[:HEADER_BYTES].zero_()
    handle = symmetric.rendezvous(memory, group)
    bases = tuple(int(each) for each in handle.buffer_ptrs)
    if len(bases) != group.size():
        return f"symmetric memory of {len(bases)} ranks"
    # torch may have taken it from a pool: then it lies inside of what peers map.
    offset = memory.data_ptr() - bases[dist.get_rank(group)]
    if offset not in (0, int(getattr(handle, "offset", 0))) or memory.data_ptr() % CHUNK_BYTES:
        return "symmetric memory that does not lie where torch says"
    return _Mapped(memory, handle, bases, offset, slot_bytes)
