"""The ranks that share layers, and how they put together what each of them has a part of."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..comm.collective import Group, gather, group_or_world
from ..errors import ArgumentError
from ..ops.peer_sum import device as kernels
from ..ops.peer_sum import reference
from .symmetric import SymmetricMemory, share

_CAPACITY_BYTES = 8 << 20
_PATIENCE_S = 600.0

#: What writes this rank's part into memory that it is given.
Write = Callable[[Tensor], None]


class Peers:
    """Ranks of a process group that share layers; each of them must make one, at the same time.

    On Hopper GPUs that map each other's memory (NVLink, through torch's symmetric memory) products
    write their parts where peers can read them, and one kernel adds or gathers the parts of all: no
    copy, no collective. A sum is made in float32, in the order of the ranks, and is the same bit by
    bit on all of them. Elsewhere, and for parts larger than `capacity_bytes`, collectives of the
    group do it: NCCL adds in the dtype of the parts; on the CPU the bits are those of the kernel.

    Ranks must make the same calls in the same order, all of one object on one stream at a time,
    CUDA graphs too. Copies of a module share its `Peers`.

    Args:
        group: A process group, or a mesh of one dimension; None is all ranks.
        device: Where the layers are; None is the current GPU for a group over NCCL, else the CPU.
        capacity_bytes: Largest part that peers read; five times as much memory is taken.
        peer_reads: False: collectives alone.
        patience_s: How long a kernel waits for a peer before it fails.

    Attributes:
        group: The process group.
        rank: Which of its ranks this is.
        ranks: How many there are.
        device: As above.
        reason: Why no peer reads another's memory, as a clause; None where they do.

    Raises:
        UnsupportedError: There is no process group.
        ArgumentError: A mesh of several dimensions, a group without this rank, a capacity or a
            patience that cannot be, or ranks that were given others.

    Example:
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> Peers().describe()
        '1 rank; collectives of gloo: tensors are on cpu'
        >>> dist.destroy_process_group()
    """

    def __init__(
        self,
        group: Any = None,
        *,
        device: torch.device | str | None = None,
        capacity_bytes: int = _CAPACITY_BYTES,
        peer_reads: bool = True,
        patience_s: float = _PATIENCE_S,
    ) -> None:
        _check_limits(capacity_bytes, patience_s)
        self.group: Group = group_or_world(_group_of(group))
        self.rank, self.ranks = dist.get_rank(self.group), self.group.size()
        self.backend = str(dist.get_backend(self.group))
        if device is None:
            device = "cuda" if "nccl" in self.backend else "cpu"
        self.device = torch.empty(0, device=device).device
        self._check_alike((int(peer_reads), capacity_bytes))
        self._shared: SymmetricMemory | None = None
        self.reason: str | None = "they were not asked for"
        if peer_reads:
            found = share(self.group, self.device, capacity_bytes, patience_s)
            if isinstance(found, str):
                self.reason = found
            else:
                self._shared, self.reason = found, None

    def __deepcopy__(self, memo: dict[int, Any]) -> Peers:
        return self

    def _check_alike(self, given: tuple[int, int]) -> None:
        # Ranks of which one asks alone wait for ever, and slots of other sizes lie elsewhere.
        message = torch.tensor(given, dtype=torch.int64, device=self.device)
        told = [tuple(each) for each in gather(message, self.group).tolist()]
        other = next((rank for rank, each in enumerate(told) if each != told[0]), None)
        if other is None:
            return
        asked = [f"peer_reads={bool(reads)}, capacity_bytes={size}" for reads, size in told]
        raise ArgumentError(
            f"Peers({asked[0]}) on rank 0, Peers({asked[other]}) on rank {other}",
            need="the same on every rank",
            hint=f"Peers({asked[0]}) on all of them",
        )

    def _check_device(self, y: Tensor) -> None:
        if y.device != self.device:
            raise ArgumentError(
                f"tensors on {y.device} for ranks that share memory of {self.device}",
                need=f"tensors on {self.device}",
                hint=f"x.to({str(self.device)!r}), or Peers(device=...) of where the layers are",
            )

    def describe(self) -> str:
        """How parts come together, in one line."""
        counted = f"{self.ranks} rank" + ("s" if self.ranks > 1 else "")
        if self._shared is None:
            return f"{counted}; collectives of {self.backend}: {self.reason}"
        return f"{counted}; peers read parts of up to {self._shared.slot_bytes} bytes"

    def why_no_sum(
        self, shape: tuple[int, ...], dtype: torch.dtype, part: torch.dtype
    ) -> str | None:
        """Why a collective adds parts of this shape, as a clause; None where peers read them.

        Args:
            shape: [..., out].
            dtype: Of the sum.
            part: Of the parts.
        """
        tokens = _product(shape[:-1])
        too_large = self._why_too_large(tokens * shape[-1] * part.itemsize)
        return too_large or kernels.why_no_sum(shape[-1], part, dtype, tokens)

    def why_no_columns(
        self, lead: tuple[int, ...], bounds: Sequence[int], dtype: torch.dtype
    ) -> str | None:
        """Why a collective gathers columns, as a clause; None where peers read them.

        Args:
            lead: Leading sides.
            bounds: First column of each rank, and their end.
            dtype: Of them.
        """
        tokens, widest = _product(lead), _widest(bounds)
        too_large = self._why_too_large(tokens * widest * dtype.itemsize)
        return too_large or kernels.why_no_gather(bounds, dtype.itemsize, tokens)

    def sum_of(
        self,
        write: Write,
        y: Tensor,
        part: torch.dtype,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """Add what all ranks write; nothing is recorded for autograd.

        Args:
            write: Writes this rank's part [..., out].
            y: [..., out] on the device, contiguous; its memory may be used for the result.
            part: Dtype of the parts: that of y, or float32.
            bias: [out], as y, added once; or None.
            residual: As y, contiguous, or None.

        Returns:
            [..., out], as y.

        Raises:
            ArgumentError: y is elsewhere than the memory that peers read.
        """
        if y.numel() == 0:
            return y
        shape = tuple(y.shape)
        if self._shared is None or self.why_no_sum(shape, y.dtype, part) is not None:
            mine = torch.empty_like(y, dtype=part)
            write(mine)
            return self.add(mine, y.dtype, bias, residual)
        self._check_device(y)
        mine, place = self._shared.part(shape, part)
        write(mine)
        kernels.peer_sum(y, place, part, on_16_bytes(bias), on_16_bytes(residual))
        return y

    def columns_of(self, write: Write, y: Tensor, bounds: Sequence[int]) -> Tensor:
        """Put the columns that all ranks write side by side; nothing is recorded for autograd.

        Args:
            write: Writes this rank's columns [..., bounds[rank + 1] - bounds[rank]].
            y: [..., bounds[-1]] on the device, contiguous; its memory may be used for the result.
            bounds: First column of each rank, and their end.

        Returns:
            As y.

        Raises:
            ArgumentError: y is elsewhere than the memory that peers read.
        """
        if y.numel() == 0:
            return y
        lead = tuple(y.shape[:-1])
        shape = (*lead, bounds[self.rank + 1] - bounds[self.rank])
        if self._shared is None or self.why_no_columns(lead, bounds, y.dtype) is not None:
            mine = y.new_empty(shape)
            write(mine)
            return self.beside(mine, bounds)
        self._check_device(y)
        mine, place = self._shared.part(shape, y.dtype)
        write(mine)
        kernels.peer_gather(y, place, bounds)
        return y

    def add(
        self,
        part: Tensor,
        dtype: torch.dtype,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """Add the parts of all ranks by a collective.

        Args:
            part: [..., out] of this rank, contiguous; over NCCL it is overwritten.
            dtype: Of the result.
            bias: [out] or None.
            residual: [..., out] or None.
        """
        if not part.is_cuda:
            parts = gather(part.flatten(), self.group).view(self.ranks, *part.shape)
            return reference.peer_sum(list(parts), dtype, bias, residual)
        if self.ranks > 1:
            dist.all_reduce(part, group=self.group)
        total = part if bias is None else part + bias
        return (total if residual is None else total + residual).to(dtype)

    def beside(self, part: Tensor, bounds: Sequence[int]) -> Tensor:
        """Put the columns of all ranks side by side by a collective.

        Args:
            part: [..., bounds[rank + 1] - bounds[rank]] of this rank.
            bounds: First column of each rank, and their end.
        """
        lead, widest = part.shape[:-1], _widest(bounds)
        # Messages of a collective are as long on every rank.
        message = part.new_zeros((*lead, widest))
        message[..., : part.shape[-1]] = part
        found = gather(message.flatten(), self.group).view(self.ranks, *lead, widest)
        widths = [stop - start for start, stop in itertools.pairwise(bounds)]
        return torch.cat([each[..., :width] for each, width in zip(found, widths, strict=True)], -1)

    def prepare(self, dtype: torch.dtype, part: torch.dtype | None = None) -> None:
        """Compile and load the kernels, so that a first call may be captured.

        Args:
            dtype: Of results: bfloat16 or float16.
            part: Of parts that are added; None is the same.
        """
        if self._shared is not None:
            kernels.load(part or dtype, dtype, self.ranks, self.device.index)

    def _why_too_large(self, nbytes: int) -> str | None:
        if self._shared is None:
            return self.reason
        if nbytes <= self._shared.slot_bytes:
            return None
        return f"a part of {nbytes} bytes is above the capacity of {self._shared.slot_bytes}"


def on_16_bytes(tensor: Tensor | None) -> Tensor | None:
    """What a kernel reads 16 bytes at a time: contiguous, and copied where it starts elsewhere."""
    if tensor is None:
        return None
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % 16 else tensor


def _check_limits(capacity_bytes: int, patience_s: float) -> None:
    # What a kernel is told is counted in milliseconds, in 32 bits.
    if isinstance(capacity_bytes, int) and capacity_bytes >= 0 and 1e-3 <= patience_s < 2**32 / 1e3:
        return
    raise ArgumentError(
        f"capacity_bytes={capacity_bytes}, patience_s={patience_s}",
        need="a whole number of bytes from 0 on, and 0.001 to 4294967 seconds",
        hint="Peers(), or peer_reads=False where no peer is to read",
    )


def _group_of(given: Any) -> Group | None:
    if given is None or isinstance(given, dist.ProcessGroup):
        return given
    if given == dist.GroupMember.NON_GROUP_MEMBER:
        raise ArgumentError(
            "a group that this rank is not in",
            need="a group of which it is one",
            hint="Peers(group) on the ranks alone that new_group was given",
        )
    sides = getattr(given, "ndim", None)
    if sides != 1 or not hasattr(given, "get_group"):
        kind = (
            f"a mesh of {sides} dimensions"
            if sides
            else f"an object of class {type(given).__name__}"
        )
        raise ArgumentError(
            f"{kind} as the group",
            need="a process group, or a mesh of one dimension",
            hint='mesh["tp"]',
        )
    found: Group = given.get_group()
    return found


def _product(sides: Sequence[int]) -> int:
    count = 1
    for side in sides:
        count *= side
    return count


def _widest(bounds: Sequence[int]) -> int:
    return max(stop - start for start, stop in itertools.pairwise(bounds))
