"""Keys and values in pages: what the operators of attention agree on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import ArgumentError
from ._product import is_dense, told

QUERY_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
KEY_DTYPES = (*QUERY_DTYPES, torch.float8_e4m3fn)


def wide(dtype: torch.dtype) -> torch.dtype:
    """What numbers are multiplied and added in: float32, and float64 only for itself.

    No public function takes float64; references do, for gradients to be checked by differences.

    Example:
        >>> wide(torch.bfloat16), wide(torch.float64)
        (torch.float32, torch.float64)
    """
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class PagedKV:
    """A pool of pages, and which of them hold the tokens of each sequence.

    Token t of sequence b is entry t % page of page `table[b, t // page]`. Pages may be shared, in
    any order, and hold anything behind the end of a sequence.

    Attributes:
        keys: [pages, kv_heads, page, dim] of any strides, so that [pages, page, kv_heads, dim] is
            a transposed view. float32, bfloat16, float16, or float8_e4m3fn with scales.
        values: As keys.
        table: int32 [batch, most pages of a sequence]; entries behind the end are not read.
        lengths: int32 [batch]: tokens of each sequence; 0 is legal.
        key_scale: Keys are multiplied by it: a number, for float8_e4m3fn.
        value_scale: Values are.

    Example:
        >>> pool = torch.zeros(4, 1, 16, 8)
        >>> table, lengths = torch.tensor([[2, 0]], dtype=torch.int32), torch.tensor([20]).int()
        >>> PagedKV(pool, pool, table, lengths).capacity
        32
    """

    keys: Tensor
    values: Tensor
    table: Tensor
    lengths: Tensor
    key_scale: float = 1.0
    value_scale: float = 1.0

    @property
    def page(self) -> int:
        """Tokens of a page."""
        return self.keys.shape[2]

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values."""
        return self.keys.shape[1]

    @property
    def capacity(self) -> int:
        """Tokens that the table has room for, of each sequence."""
        return self.table.shape[1] * self.page


def contiguous_pages(
    keys: Tensor, values: Tensor, lengths: Tensor, page: int, table: Tensor | None = None
) -> PagedKV:
    """Keys and values [batch, kv_heads, tokens, dim] as pages; copied where pages do not divide.

    A cache of a fixed size, whose tokens are a multiple of the page, is read where it lies.

    Args:
        keys: Any strides.
        values: As keys.
        lengths: int32 [batch].
        page: Tokens of a page.
        table: That of an earlier call with tensors of the same shapes and strides; None makes it.

    Example:
        >>> keys = torch.zeros(2, 1, 20, 8)
        >>> contiguous_pages(keys, keys, torch.tensor([20, 3]).int(), 16).table.tolist()
        [[0, 1], [2, 3]]
    """
    batch, heads, tokens, dim = keys.shape
    pages = -(-tokens // page)
    apart = _pages_apart(keys, page)
    if batch > 1 and torch.is_grad_enabled() and (keys.requires_grad or values.requires_grad):
        apart = None  # The gradient of a pool has room for all numbers that no table has.
    if apart is not None and apart == _pages_apart(values, page):
        # Pages of one sequence follow each other, and those of its other heads lie between them
        # and the next sequence: numbers that no table has.
        count = (batch - 1) * apart + pages
        pools = [
            each.as_strided((count, heads, page, dim), (page * each.stride(2), *each.stride()[1:]))
            for each in (keys, values)
        ]
        if table is None:
            first = apart * torch.arange(batch, dtype=torch.int32, device=keys.device)
            table = first[:, None] + torch.arange(pages, dtype=torch.int32, device=keys.device)
        return PagedKV(pools[0], pools[1], table, lengths)
    pools = []
    for each in (keys, values):
        padded = torch.nn.functional.pad(each, (0, 0, 0, pages * page - tokens))
        split = padded.reshape(batch, heads, pages, page, dim)
        pools.append(split.transpose(1, 2).reshape(batch * pages, heads, page, dim))
    if table is None:
        table = torch.arange(batch * pages, dtype=torch.int32, device=keys.device)
    return PagedKV(pools[0], pools[1], table.view(batch, pages), lengths)


def _pages_apart(each: Tensor, page: int) -> int | None:
    """How many pages on the next sequence starts; None if no number of pages leads there."""
    step = page * each.stride(2)
    if each.numel() == 0 or each.shape[2] % page or step == 0 or each.stride(0) % step:
        return None
    return int(each.stride(0) // step)


def gather_tokens(cache: PagedKV, positions: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Wide keys and values [batch, lists, n, dim] at token positions; zeros where not wanted.

    Args:
        cache: The pages.
        positions: int64 [batch, lists, n]; lists are those of heads of keys, or of query heads.
        wanted: bool, as positions; others are not read.
    """
    dtype = wide(cache.keys.dtype)
    if cache.table.shape[1] == 0 or cache.keys.shape[0] == 0:
        nothing = cache.keys.new_zeros((*positions.shape, cache.keys.shape[-1]), dtype=dtype)
        return nothing, nothing
    at = places_in_pool(cache, positions, wanted)
    found = []
    for pool, scale in ((cache.keys, cache.key_scale), (cache.values, cache.value_scale)):
        taken = _take(pool, at).to(dtype) * scale
        # Not a product: what lies behind the end may be NaN.
        found.append(taken.masked_fill(~wanted[..., None], 0.0))
    return found[0], found[1]


def places_in_pool(
    cache: PagedKV, positions: Tensor, wanted: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Page, head and token of a page, of token positions; entry 0 of page 0 where not wanted.

    Args:
        cache: The pages; neither its table nor its pool is empty.
        positions: int64 [batch, lists, n].
        wanted: bool, as positions.
    """
    batch, lists, _ = positions.shape
    safe = positions.where(wanted, 0)
    row = torch.arange(batch, device=safe.device)[:, None, None]
    pages = cache.table.long()[row, safe // cache.page].where(wanted, 0)
    head = torch.arange(lists, device=safe.device)[None, :, None] // (lists // cache.kv_heads)
    return pages, head, safe % cache.page


def _take(pool: Tensor, at: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    if pool.dtype != torch.float8_e4m3fn:
        return pool[at]
    return pool.view(torch.uint8)[at].view(pool.dtype)  # torch indexes no 8-bit floats on the CPU


def block_tokens(indices: Tensor, counts: Tensor | None, block: int, lengths: Tensor) -> Tensor:
    """Token positions of listed blocks [..., most * block]; -1 where there is none.

    Args:
        indices: int32 [batch, ..., most]; negative ones are no block.
        counts: int32 [batch, ...] or None: all.
        block: Tokens of a block.
        lengths: int32 [batch].
    """
    most = indices.shape[-1]
    listed = indices.long()
    there = listed >= 0
    if counts is not None:
        there = there & (torch.arange(most, device=listed.device) < counts.long()[..., None])
    positions = listed[..., None] * block + torch.arange(block, device=listed.device)
    ends = lengths.long().view(-1, *[1] * (positions.dim() - 1))
    return positions.where(there[..., None] & (positions < ends), -1).flatten(-2)


def check_cache(op: str, cache: object, q: Tensor) -> PagedKV:
    """Refuse pages that cannot be read, before any work.

    Raises:
        ArgumentError: It says what is wrong. Values are looked at on the CPU alone.
    """
    if not isinstance(cache, PagedKV):
        raise ArgumentError(
            f"{op}: cache {told(cache)}",
            need="a hopsparse.ops.PagedKV",
            hint="PagedKV(keys, values, table, lengths)",
        )
    keys, values = cache.keys, cache.values
    for name, each in (("keys", keys), ("values", values)):
        if not is_dense(each) or each.dim() != 4 or each.dtype not in KEY_DTYPES:
            raise ArgumentError(
                f"{op}: {name} {told(each)}",
                need="[pages, kv_heads, page, dim] in float32, bfloat16, float16 or float8_e4m3fn",
                hint="pool.transpose(1, 2), for [pages, page, kv_heads, dim]",
            )
    if keys.shape != values.shape or keys.dtype != values.dtype or 0 in keys.shape[1:]:
        raise ArgumentError(
            f"{op}: keys {told(keys)}, values {told(values)}",
            need="one shape, not empty, and one dtype",
            hint="a pool of each",
        )
    if keys.shape[2] % 16 or keys.shape[2] > 128:
        raise ArgumentError(
            f"{op}: pages of {keys.shape[2]} tokens", need="16, 32, ... 128", hint="64"
        )
    if keys.dtype != torch.float8_e4m3fn and keys.dtype != q.dtype:
        raise ArgumentError(
            f"{op}: keys of {keys.dtype} for queries of {q.dtype}",
            need="one dtype, or keys and values of float8_e4m3fn",
            hint=f"q.to({keys.dtype})",
        )
    if not is_dense(cache.table) or cache.table.dim() != 2:
        raise ArgumentError(
            f"{op}: table {told(cache.table)}", need="int32 [batch, pages]", hint="table.int()"
        )
    check_whole_numbers(op, "lengths", cache.lengths, q, cache.table.shape[:1])
    check_whole_numbers(op, "table", cache.table, q, cache.table.shape)
    if {each.device for each in (keys, values)} != {q.device}:
        raise ArgumentError(
            f"{op}: pages on {keys.device} for queries on {q.device}",
            need="one device",
            hint="q.to(keys.device)",
        )
    if looks_at_values(q):
        _check_values(op, cache)
    return cache


def check_whole_numbers(op: str, name: str, value: object, q: Tensor, shape: Sequence[int]) -> None:
    """Refuse what is not int32 of a shape on the device of the queries.

    Raises:
        ArgumentError: It is something else.
    """
    fits = is_dense(value) and value.dtype == torch.int32 and tuple(value.shape) == tuple(shape)
    if not is_dense(value) or not fits or value.device != q.device:
        raise ArgumentError(
            f"{op}: {name} {told(value)}",
            need=f"int32 {list(shape)} on {q.device}",
            hint=f"{name}.int().to(q.device)",
        )


def looks_at_values(q: Tensor) -> bool:
    """Whether values of arguments may be checked: on the CPU, where that waits for nothing."""
    return q.device.type == "cpu" and not torch.compiler.is_compiling()


def _check_values(op: str, cache: PagedKV) -> None:
    lengths, table, pages = cache.lengths, cache.table, cache.keys.shape[0]
    wrong = (lengths < 0) | (lengths > cache.capacity)
    if bool(wrong.any()):
        first = int(wrong.nonzero()[0, 0])
        raise ArgumentError(
            f"{op}: sequence {first} has {int(lengths[first])} tokens",
            need=f"0 to {cache.capacity}, which its row of the table has room for",
            hint="more pages in the table",
        )
    used = torch.arange(table.shape[1]) * cache.page < lengths[:, None]
    outside = used & ((table < 0) | (table >= pages))
    if bool(outside.any()):
        row, column = outside.nonzero()[0].tolist()
        raise ArgumentError(
            f"{op}: page {column} of sequence {row} is {int(table[row, column])}",
            need=f"0 to {pages - 1}, the pages of the pool",
            hint="the table that belongs to this pool",
        )


def check_heads(op: str, q: Tensor, cache: PagedKV) -> None:
    """Refuse queries [..., heads, dim] that do not go with the heads of keys.

    Raises:
        ArgumentError: It says what is wrong.
    """
    heads, dim = q.shape[-2:]
    if dim != cache.keys.shape[-1]:
        raise ArgumentError(
            f"{op}: queries of {dim} for keys of {cache.keys.shape[-1]}",
            need="one head dimension",
            hint="keys of the same model",
        )
    if heads == 0 or heads % cache.kv_heads:
        raise ArgumentError(
            f"{op}: {heads} query heads for {cache.kv_heads} of keys",
            need=f"a multiple of {cache.kv_heads}",
            hint=f"{max(1, heads // cache.kv_heads) * cache.kv_heads} query heads",
        )


def check_block(op: str, block: object, page: int) -> int:
    """Refuse a block that pages do not divide.

    Raises:
        ArgumentError: It is no multiple of the page.
    """
    if not isinstance(block, int) or isinstance(block, bool) or block < 1 or block % page:
        raise ArgumentError(
            f"{op}: block={block!r} with pages of {page}",
            need=f"a multiple of {page}",
            hint=str(max(64, page)),
        )
    return block


def check_listed(op: str, indices: Tensor, counts: Tensor | None, blocks: int) -> None:
    """Refuse blocks that no sequence has, and blocks that are listed twice; on the CPU.

    Raises:
        ArgumentError: There is such a block.
    """
    listed = indices
    if counts is not None:
        outside = (counts < 0) | (counts > indices.shape[-1])
        if bool(outside.any()):
            raise ArgumentError(
                f"{op}: a count of {int(counts[outside][0])}",
                need=f"0 to {indices.shape[-1]}",
                hint="the counts that came with the indices",
            )
        listed = indices.where(torch.arange(indices.shape[-1]) < counts[..., None], -1)
    if bool((listed >= blocks).any()):
        raise ArgumentError(
            f"{op}: block {int(listed.max())}",
            need=f"below {blocks}, the blocks that the table has room for",
            hint="indices of this cache",
        )
    ordered = listed.sort(dim=-1).values
    twice = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)
    if bool(twice.any()):
        raise ArgumentError(
            f"{op}: block {int(ordered[..., 1:][twice][0])} is listed twice in a row",
            need="each block once: a second time would count its tokens twice",
            hint="hopsparse.ops.select, whose indices differ",
        )


#: How a cache travels through an operator of torch: [keys, values, table, lengths], and the scale
#: of q.k, that of keys and that of values.
Parts = tuple[list[Tensor], list[float]]


def parts_of(cache: PagedKV, scale: float) -> Parts:
    """A cache as an operator takes it."""
    tensors = [cache.keys, cache.values, cache.table, cache.lengths]
    return tensors, [scale, cache.key_scale, cache.value_scale]


def cache_of(tensors: list[Tensor], scales: list[float]) -> PagedKV:
    """The way back."""
    keys, values, table, lengths = tensors
    return PagedKV(keys, values, table, lengths, scales[1], scales[2])
