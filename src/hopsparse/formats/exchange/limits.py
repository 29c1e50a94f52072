"""How large a matrix may be that is read from a foreign file, or counted."""

from __future__ import annotations

from ...errors import UnsupportedError

#: 134 million entries: 1.1 GB as CSR of float32. Reading takes 30 bytes an entry of .npz, and 90 of
#: .mtx with values (docs/inspect.md).
MOST_ENTRIES = 1 << 27
#: 67 million rows or columns: what is counted a row and a column takes 1 GB.
MOST_SIDE = 1 << 26

#: Entries of a dense copy, on the way to nm and bsr: 17 GB of float32.
MOST_DENSE = 1 << 32


def check_size(shape: tuple[int, int], entries: int, what: str = "a matrix") -> None:
    """Refuse what an ordinary machine has no memory for.

    Raises:
        UnsupportedError: Longer sides, or more entries.

    Example:
        >>> check_size((1 << 20, 1 << 20), 20_000_000)
    """
    if max(shape) > MOST_SIDE or entries > MOST_ENTRIES:
        raise UnsupportedError(
            f"{what} of {shape[0]} x {shape[1]} with {entries} entries",
            need=f"sides up to {MOST_SIDE} and up to {MOST_ENTRIES} entries",
            hint="cut it into row ranges",
        )
