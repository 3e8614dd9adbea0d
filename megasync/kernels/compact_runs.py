"""From torch views of live weights to rows the compaction kernel walks.

A region is a box of a tile whose live words are one torch view. Regions become runs of contiguous words at a constant
row stride, runs become pieces of at most 8,192 vectors that stay inside one segment of the tile. Comes before
``compact_plan``. Must import nothing of megasync but ``types`` and ``kernels.records``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np
import torch

from megasync.kernels.records import magic
from megasync.types import SEGMENT_WORDS

PIECE_VECTORS = 8192
"""Vectors of a piece at most: their numbers fit the scratch's u16, and a piece of 8-byte vectors is 64 KiB."""

PIECE_COLUMNS = 15
"""Columns of a piece's row: live address, live row step (bytes), multiplier, shift and vectors of a row, first vector,
vectors, snapshot offset of vector 0, segment position of word 0, its step a row, canonical word 0, its step a row,
tensor, segment, vectors of all pieces before (filled in by the plan)."""


@dataclass(frozen=True, slots=True)
class Region:
    """A box of a tile, its live words and its snapshot bytes.

    Attributes:
        tile: Index into the tiles of the plan.
        start: First canonical coordinate of the box, in words, one per axis of the tensor.
        live: The box's words, of any dtype of the word size, any strides (fast where the last axis is contiguous).
        snapshot_offset: Where the box's words lie in the snapshot, row-major and contiguous; a multiple of the word
            size, of 8 for speed.
    """

    tile: int
    start: tuple[int, ...]
    live: torch.Tensor
    snapshot_offset: int


@dataclass(frozen=True, slots=True)
class Run:
    """``rows`` runs of ``words`` contiguous live words each; steps are from row to row.

    Attributes:
        word_nbytes: Bytes of a word.
        address: Live address of the first word.
        rows: Number of rows.
        words: Words of a row.
        live_step: In words.
        position: Row-major position of the first word in its tile.
        position_step: In words.
        flat: Canonical word number of the first word.
        flat_step: In words.
        snapshot_offset: Of the first word, in bytes; the words of all rows follow each other there.
    """

    word_nbytes: int
    address: int
    rows: int
    words: int
    live_step: int
    position: int
    position_step: int
    flat: int
    flat_step: int
    snapshot_offset: int

    @property
    def end(self) -> int:
        """Position after the last word."""
        return self.position + (self.rows - 1) * self.position_step + self.words

    @property
    def vector_nbytes(self) -> int:
        """Bytes that can be compared at a time: the largest of 8, 4, 2 and 1 that divides every address and step."""
        steps = [self.live_step, self.position_step, self.flat_step] if self.rows > 1 else []
        words = [self.words, self.position, self.flat, *steps]
        numbers = [self.address, self.snapshot_offset, *(x * self.word_nbytes for x in words)]
        return next(v for v in (8, 4, 2, 1) if all(x % v == 0 for x in numbers))

    def single_rows(self) -> list[Run]:
        """Each row as a run of its own."""
        w = self.word_nbytes
        return [
            replace(
                self,
                address=self.address + i * self.live_step * w,
                rows=1,
                position=self.position + i * self.position_step,
                flat=self.flat + i * self.flat_step,
                snapshot_offset=self.snapshot_offset + i * self.words * w,
            )
            for i in range(self.rows)
        ]


def _strides(extents: Sequence[int]) -> list[int]:
    """Row-major strides."""
    return [prod(extents[i + 1 :]) for i in range(len(extents))]


def runs_of(whole: Sequence[int], corner: Sequence[int], extent: Sequence[int], region: Region) -> list[Run]:
    """A region as runs: axes are joined wherever live, tile and canonical strides allow.

    Args:
        whole: Canonical extents of the tensor, padded to the plan's axes.
        corner: First coordinate of the tile, padded.
        extent: Extents of the tile, padded.
        region: The region.

    Returns:
        Runs in row-major order of the region.
    """
    live, w = region.live, region.live.element_size()
    if not live.numel():
        return []
    pad = len(extent) - live.dim()
    tile_strides, flat_strides = _strides(extent)[pad:], _strides(whole)[pad:]
    position = sum((a - b) * s for a, b, s in zip(region.start, corner[pad:], tile_strides, strict=True))
    flat = sum(a * s for a, s in zip(region.start, flat_strides, strict=True))
    joined: list[tuple[int, int, int, int]] = []
    for axis in zip(live.shape, live.stride(), tile_strides, flat_strides, strict=True):
        if axis[0] == 1:
            continue
        if joined and all(joined[-1][i] == axis[i] * axis[0] for i in (1, 2, 3)):
            joined[-1] = (joined[-1][0] * axis[0], axis[1], axis[2], axis[3])
        else:
            joined.append(axis)
    if not joined or joined[-1][1:] != (1, 1, 1):
        joined.append((1, 1, 1, 1))  # the last axis is not contiguous: rows of one word
    words = joined[-1][0]
    rows = joined[-2] if len(joined) > 1 else (1, words, words, words)
    outer = joined[:-2]
    out = []
    for i, index in enumerate(np.ndindex(*(a[0] for a in outer))):
        by_live, by_tile, by_flat = (sum(k * a[j] for k, a in zip(index, outer, strict=True)) for j in (1, 2, 3))
        out.append(
            Run(
                word_nbytes=w,
                address=live.data_ptr() + by_live * w,
                rows=rows[0],
                words=words,
                live_step=rows[1],
                position=position + by_tile,
                position_step=rows[2],
                flat=flat + by_flat,
                flat_step=rows[3],
                snapshot_offset=region.snapshot_offset + i * rows[0] * words * w,
            )
        )
    return out


def in_order(runs: list[Run]) -> list[Run]:
    """Runs of one tile by position; where two interleave (neighbouring columns) they are cut into single rows first.

    Args:
        runs: Runs of one tile.

    Returns:
        Runs whose positions ascend from one to the next.

    Raises:
        ValueError: When two runs hold the same position.
    """
    runs = sorted(runs, key=lambda r: r.position)
    if any(a.end > b.position for a, b in zip(runs, runs[1:], strict=False)):
        runs = sorted((s for r in runs for s in r.single_rows()), key=lambda r: r.position)
    for a, b in zip(runs, runs[1:], strict=False):
        if a.end > b.position:
            raise ValueError(f"two regions of a tile hold position {b.position}: each word has one live place")
    return runs


def pieces_of(run: Run, tensor: int, first_segment: int) -> tuple[np.ndarray, int]:
    """Cuts a run into pieces.

    Args:
        run: The run.
        tensor: Its tensor, for the sums.
        first_segment: Number of the tile's first segment.

    Returns:
        int64 ``[P, PIECE_COLUMNS]`` and the bytes of a vector.
    """
    w, vector = run.word_nbytes, run.vector_nbytes
    numbers = np.arange(run.position // SEGMENT_WORDS, (run.end - 1) // SEGMENT_WORDS + 1, dtype=np.int64)
    # Words of the run before each segment: whole rows, then what the row that crosses has before it.
    rows, rest = np.divmod(np.maximum(numbers * SEGMENT_WORDS - run.position, 0), run.position_step)
    begin = np.minimum(rows * run.words + np.minimum(rest, run.words), run.rows * run.words) * w // vector
    end = np.append(begin[1:], run.rows * run.words * w // vector)
    parts = -(-(end - begin) // PIECE_VECTORS)
    segment = np.repeat(numbers, parts)
    part = np.arange(len(segment)) - np.repeat(np.cumsum(parts) - parts, parts)
    out = np.empty((len(segment), PIECE_COLUMNS), dtype=np.int64)
    per_row = run.words * w // vector
    out[:, 0], out[:, 1] = run.address, run.live_step * w
    out[:, 2], out[:, 3] = magic(per_row)
    out[:, 4] = per_row
    out[:, 5] = np.repeat(begin, parts) + part * PIECE_VECTORS
    out[:, 6] = np.minimum(np.repeat(end, parts) - out[:, 5], PIECE_VECTORS)
    out[:, 7] = run.snapshot_offset
    out[:, 8] = run.position - segment * SEGMENT_WORDS
    out[:, 9] = run.position_step
    out[:, 10], out[:, 11] = run.flat, run.flat_step
    out[:, 12], out[:, 13], out[:, 14] = tensor, first_segment + segment, 0
    return out, vector
