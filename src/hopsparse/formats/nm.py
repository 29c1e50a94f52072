"""N:M sparsity in the packed 2:4 layout that every Hopper kernel reads (docs/formats.md)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from ..errors import ArgumentError, FormatError
from . import _panels
from ._base import (
    Attribute,
    PartSpec,
    SparseMatrix,
    bit_view,
    check_dense,
    nonzero_mask,
    row_slices,
)
from ._windows import group_masks, window_table, windows_of
from .pattern import NMPattern, as_nm_pattern, parse_pattern

#: Columns of int8 whose sums may leave int32: 2:4 keeps half of them, and -128 * -128 is 2^14.
LONGEST_INT8 = 2 * 2**31 // 128**2


@dataclass(frozen=True, eq=False, repr=False)
class NM(SparseMatrix):
    """An N:M matrix as overlapping 2:4 windows, packed for wgmma.sp.

    The layout depends on the element size alone, on no tile: one packed weight serves every
    kernel. 2:4 is one window per group; 4:6 and 6:8 are 2 and 3 windows that overlap by two
    columns, so that their k grows by 4/3 and 3/2 (`packed_k`).

    Attributes:
        values: Kept entries [panels, steps, 8, 2, 8, chunk].
        meta: Index words int32 [panels, units, 128].
        pattern: Which N:M.
    """

    values: Tensor
    meta: Tensor
    pattern: NMPattern

    name: ClassVar[str] = "nm"
    PARTS: ClassVar[tuple[str, ...]] = ("values", "meta")

    @classmethod
    def from_dense(
        cls,
        dense: Tensor,
        pattern: NMPattern | str = NMPattern(2, 4),  # noqa: B008
    ) -> Self:
        """Pack a matrix that already obeys `pattern`; nothing is pruned.

        Args:
            dense: [rows, cols], any strides, any shape.
            pattern: N:M with M even and N <= M - 2, as a value or as text.

        Raises:
            ArgumentError: `pattern` is no N:M.
            FormatError: The matrix is empty or breaks the pattern (first bad row and group named).

        Example:
            >>> w = torch.tensor([[1.0, 0.0, 0.0, 2.0]])
            >>> NM.from_dense(w).to_dense()
            tensor([[1., 0., 0., 2.]])
        """
        dense = check_dense(dense)
        nm = as_nm_pattern(pattern)
        windows_of(nm)
        shape = (dense.shape[0], dense.shape[1])
        specs = cls.part_specs(shape, dense.dtype, {"pattern": str(nm)})
        parts = {
            part: torch.empty(size, dtype=dtype, device=dense.device)
            for part, (size, dtype) in specs.items()
        }
        packed = cls(shape, parts["values"], parts["meta"], nm)
        for panel, rows in packed._row_chunks():
            packed._pack_rows(dense[rows], panel, rows.start)
        return packed

    def to_dense(self) -> Tensor:
        """Return [rows, cols] in the dtype and on the device of the values."""
        dense = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        bits = bit_view(dense)
        for panel, rows in self._row_chunks():
            bits[rows] = self._unpack_panels(panel)[: rows.stop - rows.start, : self.shape[1]]
        return dense

    def validate(self) -> None:
        """Check shapes, dtypes, index nibbles, padding, and that windows do not overlap.

        Raises:
            FormatError: The first fact that does not hold.
        """
        self._check_parts()
        for panel, _ in self._row_chunks():
            self._validate_panels(panel)

    @classmethod
    def part_specs(
        cls, shape: tuple[int, int], dtype: torch.dtype, attributes: Mapping[str, Attribute]
    ) -> dict[str, PartSpec]:
        """See `SparseMatrix.part_specs`; needs the attribute `pattern`."""
        panels = -(-shape[0] // _panels.PANEL_ROWS)
        units = -(-packed_k(shape[1], _nm_pattern(attributes)) // _panels.UNIT_COLS)
        return {
            "values": (_panels.value_shape(panels, units, dtype.itemsize), dtype),
            "meta": ((panels, units, 128), torch.int32),
        }

    @classmethod
    def from_parts(
        cls,
        shape: tuple[int, int],
        parts: Mapping[str, Tensor],
        attributes: Mapping[str, Attribute],
    ) -> Self:
        """See `SparseMatrix.from_parts`."""
        return cls(shape, parts["values"], parts["meta"], _nm_pattern(attributes))

    def attributes(self) -> dict[str, Attribute]:
        """The pattern, as text."""
        return {"pattern": str(self.pattern)}

    def _row_chunks(self) -> Iterator[tuple[slice, slice]]:
        """Panels and the rows they hold, a piece at a time."""
        for rows in row_slices(*self.shape, _panels.PANEL_ROWS, self.device):
            yield slice(rows.start // _panels.PANEL_ROWS, -(-rows.stop // _panels.PANEL_ROWS)), rows

    def _pack_rows(self, dense: Tensor, panel: slice, first_row: int) -> None:
        """Pack `dense`, the rows of the panels in `panel`, into this matrix."""
        m, windows = self.pattern.m, windows_of(self.pattern)
        table = window_table(m, dense.device)
        rows, cols = dense.shape
        groups = -(-cols // m)
        dense = dense.contiguous()
        bits = F.pad(bit_view(dense), (0, groups * m - cols)).view(rows, groups, m)
        mask = group_masks(F.pad(nonzero_mask(dense), (0, groups * m - cols)), m)
        if int(table.count[torch.bincount(mask, minlength=1 << m) > 0].max()) > self.pattern.n:
            self._refuse_full_groups(table.count[mask].view(rows, groups), first_row)

        # index_select copies small rows several times faster than indexing does.
        kept = bits.gather(2, table.column.index_select(0, mask).view(rows, groups, -1))
        kept.mul_(table.live.index_select(0, mask).view(rows, groups, -1))
        pad_rows = (panel.stop - panel.start) * _panels.PANEL_ROWS - rows
        pad_kept = self.meta.shape[1] * _panels.UNIT_COLS // 2 - groups * windows * 2
        kept = F.pad(kept.view(rows, -1), (0, pad_kept, 0, pad_rows))
        nibbles = table.nibble.index_select(0, mask).view(rows, -1)
        # 0b0100, columns 0 and 1: the nibble of an empty group (0b0000 is undefined in PTX).
        nibbles = F.pad(nibbles, (0, pad_kept // 2, 0, pad_rows), value=0b0100)
        self.values[panel] = _panels.tile_values(kept.view(dense.dtype))
        self.meta[panel] = _panels.tile_nibbles(nibbles, dense.element_size())

    def _refuse_full_groups(self, count: Tensor, first_row: int) -> None:
        if int(count.max()) <= self.pattern.n:
            return
        row, group = (count > self.pattern.n).nonzero()[0].tolist()
        raise full_group_error(self.pattern, first_row + row, group, int(count[row, group]))

    def _slots(self, panel: slice) -> tuple[Tensor, Tensor]:
        """Stored bits and window columns (0 to 3) of some panels, both [rows, packed k / 2]."""
        kept = _panels.untile_values(self.values[panel])
        nibbles = _panels.untile_nibbles(self.meta[panel], kept.element_size())
        columns = torch.stack((nibbles & 3, nibbles >> 2), dim=-1).flatten(1)
        return bit_view(kept), columns

    def _unpack_panels(self, panel: slice) -> Tensor:
        """Decode some panels to the bits of [rows, groups * m]."""
        m, windows = self.pattern.m, windows_of(self.pattern)
        groups = -(-self.shape[1] // m)
        kept, columns = (
            part[:, : groups * windows * 2].reshape(-1, groups, windows, 2)
            for part in self._slots(panel)
        )
        starts = torch.arange(0, 2 * windows, 2, device=kept.device)
        where = (columns + starts[:, None]).flatten(2)
        dense = torch.zeros(kept.shape[0], groups, m, dtype=kept.dtype, device=kept.device)
        # Added, not written: the zero of a free slot must not hide what the next window stores.
        return dense.scatter_add_(2, where, kept.flatten(2)).flatten(1)

    def _validate_panels(self, panel: slice) -> None:
        kept, columns = self._slots(panel)
        pairs = columns.view(columns.shape[0], -1, 2)
        rising = pairs[..., 0] < pairs[..., 1]
        if not rising.all():
            row, group = (~rising).nonzero()[0].tolist()
            raise FormatError(
                f"row {panel.start * _panels.PANEL_ROWS + row}, window {group} has index pair "
                f"{pairs[row, group].tolist()}",
                need="two rising columns in every nibble",
                hint="the file is damaged: restore it, or repack the dense weight",
            )
        live = kept != 0
        stored = int(live.sum())
        dense = self._unpack_panels(panel)
        rows = min(self.shape[0] - panel.start * _panels.PANEL_ROWS, dense.shape[0])
        inside = dense[:rows, : self.shape[1]] != 0
        if int(inside.sum()) != stored:
            raise FormatError(
                f"panels {panel.start} to {panel.stop - 1} store {stored} values, of which "
                f"{int(inside.sum())} have a place of their own",
                need="zero padding, and no column stored by two windows",
                hint="the file is damaged: restore it, or repack the dense weight",
            )
        groups = -(-self.shape[1] // self.pattern.m)
        width = groups * self.pattern.m - self.shape[1]
        count = F.pad(inside, (0, width)).view(rows, groups, -1).sum(-1)
        self._refuse_full_groups(count, panel.start * _panels.PANEL_ROWS)


def full_group_error(pattern: NMPattern, row: int, group: int, count: int) -> FormatError:
    """What a matrix is refused with that has `count` non-zeros in a group, more than N."""
    start = group * pattern.m
    return FormatError(
        f"row {row}, group {group} (columns {start} to {start + pattern.m - 1}) "
        f"holds {count} non-zeros",
        need=f"at most {pattern.n} in every {pattern.m} columns ({pattern})",
        hint=f"hopsparse.prune.magnitude(weight, NMPattern({pattern.n}, {pattern.m})) first",
    )


def stack_rows(weights: Sequence[NM]) -> NM:
    """Packed matrices one below the other, as one: nothing is decoded.

    Products that share their inputs become one: q, k and v; gate and up. The rows of the result are
    split where the weights were.

    Args:
        weights: [rows, cols] each, of as many columns, one pattern, dtype and device. All but the
            last have a multiple of 64 rows.

    Returns:
        [sum of rows, cols].

    Raises:
        ArgumentError: There are none, they do not go together, or rows of one end inside a panel.

    Example:
        >>> a, b = torch.eye(64, 4), 2 * torch.eye(8, 4)
        >>> stack_rows([NM.from_dense(a), NM.from_dense(b)]).to_dense()[[0, 64], 0].tolist()
        [1.0, 2.0]
    """
    if not weights:
        raise ArgumentError("no weights to stack", need="one or more", hint="[w]")
    first, whole = weights[0], _panels.PANEL_ROWS
    for place, each in enumerate(weights):
        facts = [(w.shape[1], w.pattern, w.dtype, w.device) for w in (first, each)]
        if facts[0] != facts[1]:
            told = ["{} columns, {}, {}, {}".format(*each) for each in facts]
            raise ArgumentError(
                f"weight {place} of {told[1]}", need=told[0], hint="weights that share their inputs"
            )
        if place + 1 < len(weights) and each.shape[0] % whole:
            raise ArgumentError(
                f"weight {place} with {each.shape[0]} rows",
                need=f"a multiple of {whole}, or the last place",
                hint=f"the weight padded with zeros to a multiple of {whole} rows",
            )
    rows = sum(each.shape[0] for each in weights)
    values, meta = (torch.cat([getattr(each, part) for each in weights]) for part in NM.PARTS)
    return NM((rows, first.shape[1]), values, meta, first.pattern)


def packed_k(cols: int, pattern: NMPattern) -> int:
    """Columns of the 2:4 product that runs an N:M product over `cols` columns.

    Each group of M becomes M/2 - 1 windows of 4: k grows by 1 for 2:4, 4/3 for 4:6, 3/2 for 6:8.

    Example:
        >>> packed_k(4096, NMPattern(6, 8))
        6144
    """
    return -(-cols // pattern.m) * windows_of(pattern) * 4


def window_columns(cols: int, pattern: NMPattern) -> Tensor:
    """Source column of each of the `packed_k` columns: what an activation is gathered by.

    Columns at or past `cols` are padding and stand for zero.

    Example:
        >>> window_columns(8, NMPattern(6, 8)).tolist()
        [0, 1, 2, 3, 2, 3, 4, 5, 4, 5, 6, 7]
    """
    groups = torch.arange(0, -(-cols // pattern.m) * pattern.m, pattern.m)
    starts = torch.arange(0, 2 * windows_of(pattern), 2)
    return (groups[:, None, None] + starts[:, None] + torch.arange(4)).flatten()


def _nm_pattern(attributes: Mapping[str, Attribute]) -> NMPattern:
    pattern = parse_pattern(str(attributes.get("pattern", "")))
    if not isinstance(pattern, NMPattern):
        raise FormatError(f"pattern {pattern} in an nm matrix", need="N:M", hint="2:4")
    return pattern
