"""Memory that every rank of a group maps, and which part of it a call may write."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from ..comm.collective import Group, gather
from ..launch import capture_id
from ..ops._product import is_hopper
from ..ops.peer_sum.plan import HEADER_BYTES, MOST_RANKS, Place

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
    """

    memory: Tensor
    bases: tuple[int, ...]
    rank: int
    slot_bytes: int
    patience_ms: int
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
    found: SymmetricMemory | str | None = why_no_peer_reads(group, device)
    if found is None:
        try:
            found = _mapped(group, device, slot_bytes, patience_s)
        except Exception as error:  # of torch, which has no class for it
            found = f"symmetric memory: {(str(error).splitlines() or [repr(error)])[0][:200]}"
    failed = torch.tensor([isinstance(found, str)], dtype=torch.int64, device=device)
    # Also says that every rank has zeroed its flags.
    failures = gather(failed, group).flatten().tolist()
    if isinstance(found, str) or not any(failures):
        return found
    others = [rank for rank, fails in enumerate(failures) if fails]
    return f"ranks {others} cannot"


def _mapped(
    group: Group, device: torch.device, slot_bytes: int, patience_s: float
) -> SymmetricMemory | str:
    # Multicast, which takes hosts out of service where it is not set up, is never used here.
    from torch.distributed import _symmetric_memory as symmetric

    slot_bytes = -(-slot_bytes // _ALIGNMENT) * _ALIGNMENT
    # Made in inference mode it could not be written outside of it.
    with torch.inference_mode(False):
        size = HEADER_BYTES + _SLOTS * slot_bytes
        memory = symmetric.empty(size, dtype=torch.uint8, device=device)
        memory[:HEADER_BYTES].zero_()
    handle = symmetric.rendezvous(memory, group)
    bases = tuple(int(each) for each in handle.buffer_ptrs)
    rank = dist.get_rank(group)
    if len(bases) != group.size() or bases[rank] != memory.data_ptr():
        return "symmetric memory that does not start where its tensor does"
    patience_ms = min(int(1e3 * patience_s), 2**32 - 1)
    found = SymmetricMemory(memory, bases, rank, slot_bytes, patience_ms)
    found.__dict__["handle"] = handle  # it owns what is mapped
    return found
