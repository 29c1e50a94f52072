"""The walk of spmm_bsr's kernel of small blocks, lane by lane, on the CPU.

What fragments.cuh does with addresses and registers is done here with arrays: boxes arrive
swizzled, ldmatrix and mma.sync take their operands from the lanes that PTX says, and results go
through shared memory as the epilogue sends them. Shared memory has elements of two bytes.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from hopsparse.ops.spmm_bsr.fragments import SLAB, SLOTS, STRIPS, Fragments
from hopsparse.ops.spmm_bsr.fragments_cost import rows_of_x
from hopsparse.ops.spmm_bsr.fragments_kernel import FragmentConfig
from hopsparse.ops.spmm_bsr.schedule import blocks, items, raster_group, token_tiles

Array = np.ndarray
LANE = np.arange(32)
ROW = 128  # bytes of a token in a box


def swizzled(address: Array) -> Array:
    """Where a copy engine puts bytes of boxes whose rows are 128 bytes: bits 4 to 6 xor 7 to 9."""
    return address ^ (address >> 7 & 7) << 4


def arrive(smem: Array, at: int, x: Array, column: int, token: int, rows: int) -> None:
    """A box of 64 columns; zeros outside of x."""
    box = np.zeros((rows, 64))
    inside = x[token : token + rows, column : column + 64]
    box[: inside.shape[0], : inside.shape[1]] = inside
    byte = at + np.arange(rows)[:, None] * ROW + np.arange(64)[None] * 2
    smem[swizzled(byte) // 2] = box


def ldmatrix(smem: Array, address: Array) -> Array:
    """[4 matrices, 32 lanes, 2]: lane i has columns 2 (i % 4), + 1 of row i / 4 of each."""
    rows = smem[address[:, None] // 2 + np.arange(8)].reshape(4, 8, 8)
    return rows[:, LANE[:, None] // 4, 2 * (LANE[:, None] % 4) + np.arange(2)]


def stmatrix_transposed(smem: Array, address: Array, words: Array) -> None:
    """The way back, [4, 32 lanes, 2]: stored row j of a matrix is its column j."""
    matrices = np.zeros((4, 8, 8))
    matrices[:, LANE[:, None] // 4, 2 * (LANE[:, None] % 4) + np.arange(2)] = words
    columns = matrices.transpose(0, 2, 1).reshape(32, 8)
    smem[address[:, None] // 2 + np.arange(8)] = columns


def mma(sums: Array, a: Array, b: Array) -> None:
    """sums [32, 4] += a [32, 4, 2] @ b [32, 2, 2], m16n8k16."""
    left, right = np.zeros((16, 16)), np.zeros((16, 8))
    for j in range(4):
        for e in range(2):
            left[LANE // 4 + j % 2 * 8, 2 * (LANE % 4) + e + j // 2 * 8] = a[:, j, e]
    for j in range(2):
        for e in range(2):
            right[2 * (LANE % 4) + e + j * 8, LANE // 4] = b[:, j, e]
    product = left @ right
    for i in range(4):
        sums[:, i] += product[LANE // 4 + i // 2 * 8, 2 * (LANE % 4) + i % 2]


class Words:
    """`Words` of fragments.cuh: 32 in the lanes of a warp, and as many behind them."""

    def __init__(self, words: Array) -> None:
        self.words, self.now, self.next = words, self._lanes(words, 0), self._lanes(words, 32)

    @staticmethod
    def _lanes(words: Array, piece: int) -> Array:
        found = np.zeros(32, dtype=np.int64)
        left = words[piece : piece + 32]
        found[: len(left)] = left
        return found

    def at(self, piece: int) -> int:
        if piece > 0 and piece % 32 == 0:
            self.now, self.next = self.next, self._lanes(self.words, piece + 32)
        return int(self.now[piece % 32])


class Walker:
    """One product by one tile; `y` is NaN where nothing was stored."""

    def __init__(self, w: Fragments, packed: Tensor, x: Tensor, out: int, c: FragmentConfig):
        self.w, self.c, self.x, self.out = w, c, x.double().numpy(), out
        # A lane's 16 bytes are four registers of two numbers.
        self.packed = packed.double().numpy().reshape(-1, w.height, 32, 4, 2)
        self.words = w.words.numpy()
        self.y = np.full((len(self.x), out), np.nan)
        self.box = c.tokens * ROW
        lane_row = LANE // 16 * 8 + LANE % 8
        self.lane_in_box = lane_row * ROW + ((LANE // 8 % 2) ^ LANE % 8) * 16

    def run(self, sm_count: int) -> Tensor:
        """All items, in the order in which the clusters of a grid have them."""
        c, of_pair = self.c, STRIPS // self.c.cluster
        tiles = token_tiles(c, len(self.x))
        outs, tile = items(len(self.w.pairs) * of_pair, tiles, raster_group(c, len(self.x)))
        owner = blocks(outs.numel(), max(1, sm_count // c.cluster))
        for cluster in range(int(owner.max()) + 1):
            for item in (owner == cluster).nonzero()[:, 0].tolist():
                pair = self.w.pairs[int(outs[item]) // of_pair].tolist()
                token = min(int(tile[item]) * c.tokens, max(0, len(self.x) - c.tokens))
                for rank in range(c.cluster):
                    half = rank if c.cluster > 1 else int(outs[item]) % of_pair
                    self.item(pair, half, token)
        return torch.from_numpy(self.y)

    def item(self, pair: list[int], half: int, token: int) -> None:
        """A strip of a pair by the tokens of a tile."""
        number, first, count, _ = pair
        stages = [self.stage(slab, token) for slab in self.w.slabs[first : first + count].tolist()]
        for warp in range(SLOTS):
            row, begin, end, _ = self.w.slots[number, half, warp].tolist()
            sums = np.zeros((self.w.height, self.c.tokens // 8, 32, 4))
            words = Words(self.words[begin:end])
            for piece in range(begin, end):
                word = words.at(piece - begin)
                self.multiply(sums, word, self.packed[piece], stages[word // 8])
            self.store(sums, row, token)

    def stage(self, slab: int, token: int) -> Array:
        """A stage as the copies of all blocks of a cluster leave it, at its place behind others."""
        smem, rows = np.full(3 * self.box, np.nan), rows_of_x(self.c, len(self.x))
        for rank in range(self.c.cluster):
            for box in range(SLAB // 64):
                at = self.c.stage_bytes + rank * rows * ROW + box * self.box
                arrive(smem, at, self.x, slab * SLAB + box * 64, token + rank * rows, rows)
        return smem

    def multiply(self, sums: Array, word: int, a: Array, smem: Array) -> None:
        """`multiply_piece`."""
        base = self.lane_in_box + self.c.stage_bytes + word // 4 % 2 * self.box
        x = base ^ (word % 4 * 32)
        for i in range(self.c.tokens // 16):
            b = ldmatrix(smem, x + i * 16 * ROW).transpose(1, 0, 2)
            # Rows that no box filled are those of tokens that there are not.
            b = np.nan_to_num(b, nan=7.0) if len(self.x) < self.c.tokens else b
            for h in range(self.w.height):
                mma(sums[h, 2 * i], a[h], b[:, :2])
                mma(sums[h, 2 * i + 1], a[h], b[:, 2:])

    def chunk_address(self, token: Array, chunk: Array) -> Array:
        line = self.w.height * 32
        return token * line + (chunk ^ token // (128 // line) % (line // 16)) * 16

    def store(self, sums: Array, row: int, token: int) -> None:
        """`store_slot` by lines: transposed by way of shared memory."""
        height, of_line = self.w.height, self.w.height * 2
        for i in range(self.c.tokens // 16):
            smem = np.full(16 * height * 16, np.nan)
            for h in range(height):
                words = np.stack(
                    [sums[h, 2 * i + j // 2][:, j % 2 * 2 : j % 2 * 2 + 2] for j in range(4)]
                )
                lines = LANE // 16 * 8 + LANE % 8
                stmatrix_transposed(smem, self.chunk_address(lines, h * 2 + LANE // 8 % 2), words)
            for h in range(height):
                index = LANE + h * 32
                line, chunk = index // of_line, index % of_line
                found = smem[self.chunk_address(line, chunk)[:, None] // 2 + np.arange(8)]
                self.write(found, token + i * 16 + line, row + chunk * 8)

    def write(self, found: Array, tokens: Array, rows: Array) -> None:
        for values, token, row in zip(found, tokens.tolist(), rows.tolist(), strict=True):
            if token < len(self.x) and row < self.out:
                kept = values[: self.out - row]
                self.y[token, row : row + len(kept)] = kept
