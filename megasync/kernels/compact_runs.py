"""From torch views of live weights to rows the compaction kernel walks.

A region is a box of a tile whose live words are one torch view. Regions become runs (rows of contiguous words at a constant
row stride), runs become pieces of at most 8,192 vectors that stay inside one segment of the tile. Comes before
``compact_plan``. Must import nothing of megasync but ``types`` and ``kernels.records``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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


RUN_COLUMNS = 10
"""Columns of a run: tile, live address of the first word, rows, words of a row, live step from row to row (words), row-major
position of the first word in the tile, its step, canonical number of the first word, its step, snapshot offset of the first word
(bytes; the words of all rows follow each other there)."""

_TILE, _ADDRESS, _ROWS, _WORDS, _LIVE_STEP, _POSITION, _POSITION_STEP, _FLAT, _FLAT_STEP, _SNAPSHOT = range(RUN_COLUMNS)


def _strides(extents: Sequence[int]) -> list[int]:
    """Row-major strides."""
    return [prod(extents[i + 1 :]) for i in range(len(extents))]


def runs_of(whole: Sequence[int], corner: Sequence[int], extent: Sequence[int], region: Region) -> np.ndarray:
    """A region as runs: axes are joined wherever live, tile and canonical strides allow.

    Args:
        whole: Canonical extents of the tensor, padded to the plan's axes.
        corner: First coordinate of the tile, padded.
        extent: Extents of the tile, padded.
        region: The region.

    Returns:
        int64 ``[R, RUN_COLUMNS]`` in row-major order of the region.
    """
    live, w = region.live, region.live.element_size()
    if not live.numel():
        return np.empty((0, RUN_COLUMNS), dtype=np.int64)
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
    num = prod(a[0] for a in outer)
    # A view with permuted axes may be a run for every few words: all of them at once.
    index = np.arange(num, dtype=np.int64)
    by_live, by_tile, by_flat = (np.zeros(num, dtype=np.int64) for _ in range(3))
    inner = _strides([a[0] for a in outer])
    for (n, live_step, tile_step, flat_step), below in zip(outer, inner, strict=True):
        at = index // below % n
        by_live += at * live_step
        by_tile += at * tile_step
        by_flat += at * flat_step
    out = np.empty((num, RUN_COLUMNS), dtype=np.int64)
    out[:, _TILE], out[:, _ADDRESS] = region.tile, live.data_ptr() + by_live * w
    out[:, _ROWS], out[:, _WORDS] = rows[0], words
    out[:, _LIVE_STEP], out[:, _POSITION_STEP], out[:, _FLAT_STEP] = rows[1:]
    out[:, _POSITION], out[:, _FLAT] = position + by_tile, flat + by_flat
    out[:, _SNAPSHOT] = region.snapshot_offset + index * (rows[0] * words * w)
    return out


def _meet(runs: np.ndarray) -> np.ndarray:
    """Numbers of runs (sorted by tile and position) that hold a position of the next one, or one between such."""
    end = runs[:, _POSITION] + (runs[:, _ROWS] - 1) * runs[:, _POSITION_STEP] + runs[:, _WORDS]
    return np.nonzero((runs[:-1, _TILE] == runs[1:, _TILE]) & (end[:-1] > runs[1:, _POSITION]))[0]


def _sorted(runs: np.ndarray) -> np.ndarray:
    return runs[np.lexsort((runs[:, _POSITION], runs[:, _TILE]))]


def in_order(runs: np.ndarray, word_nbytes: int) -> np.ndarray:
    """Runs by tile and position; those of a tile where two interleave (neighbouring columns) are cut into single rows first.

    Args:
        runs: int64 ``[R, RUN_COLUMNS]``.
        word_nbytes: Bytes of a word.

    Returns:
        int64 ``[R', RUN_COLUMNS]``: within a tile, positions ascend from one run to the next.

    Raises:
        ValueError: When two runs hold the same position.
    """
    runs = _sorted(runs)
    if not len(found := _meet(runs)):
        return runs
    split = np.isin(runs[:, _TILE], runs[found, _TILE])
    num = np.where(split, runs[:, _ROWS], 1)
    row = np.arange(num.sum()) - np.repeat(np.cumsum(num) - num, num)
    runs = np.repeat(runs, num, axis=0)
    runs[np.repeat(split, num), _ROWS] = 1
    runs[:, _ADDRESS] += row * runs[:, _LIVE_STEP] * word_nbytes
    runs[:, _POSITION] += row * runs[:, _POSITION_STEP]
    runs[:, _FLAT] += row * runs[:, _FLAT_STEP]
    runs[:, _SNAPSHOT] += row * runs[:, _WORDS] * word_nbytes
    runs = _sorted(runs)
    if len(found := _meet(runs)):
        position = int(runs[found[0] + 1, _POSITION])
        raise ValueError(f"two regions of a tile hold position {position}: each word has one live place")
    return runs


def _vector_nbytes(runs: np.ndarray, w: int) -> np.ndarray:
    """Bytes that can be compared at a time: the largest of 8, 4, 2 and 1 that divides every address and step."""
    words = runs[:, _WORDS] | runs[:, _POSITION] | runs[:, _FLAT]
    steps = runs[:, _LIVE_STEP] | runs[:, _POSITION_STEP] | runs[:, _FLAT_STEP]
    words |= np.where(runs[:, _ROWS] > 1, steps, 0)
    bits = runs[:, _ADDRESS] | runs[:, _SNAPSHOT] | (words * w) | 8
    return np.asarray(bits & -bits)  # the lowest bit that any of them has


def pieces_of(
    runs: np.ndarray, word_nbytes: int, tensors: np.ndarray, first_segments: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Cuts runs into pieces.

    Args:
        runs: int64 ``[R, RUN_COLUMNS]``, from `in_order`.
        word_nbytes: Bytes of a word.
        tensors: int64, the tensor of each tile, for the sums.
        first_segments: int64, the number of each tile's first segment.

    Returns:
        int64 ``[P, PIECE_COLUMNS]``, and int64 ``[P]``, the bytes of a vector of each.
    """
    vector = _vector_nbytes(runs, word_nbytes)
    first = runs[:, _POSITION] // SEGMENT_WORDS
    last = (runs[:, _POSITION] + (runs[:, _ROWS] - 1) * runs[:, _POSITION_STEP] + runs[:, _WORDS] - 1) // SEGMENT_WORDS
    num = last - first + 1
    of = np.repeat(np.arange(len(runs)), num)
    number = np.repeat(first, num) + np.arange(len(of)) - np.repeat(np.cumsum(num) - num, num)
    # Words of the run before each segment: whole rows, then what the row that crosses has before it.
    run = runs[of]
    whole = run[:, _ROWS] * run[:, _WORDS]
    rows, rest = np.divmod(np.maximum(number * SEGMENT_WORDS - run[:, _POSITION], 0), run[:, _POSITION_STEP])
    scale = vector[of]
    begin = np.minimum(rows * run[:, _WORDS] + np.minimum(rest, run[:, _WORDS]), whole) * word_nbytes // scale
    end = whole * word_nbytes // scale
    within = of[1:] == of[:-1]
    end[:-1][within] = begin[1:][within]
    parts = -(-(end - begin) // PIECE_VECTORS)
    part = np.arange(parts.sum()) - np.repeat(np.cumsum(parts) - parts, parts)
    at = np.repeat(np.arange(len(of)), parts)
    run, number, scale = run[at], number[at], scale[at]
    out = np.empty((len(at), PIECE_COLUMNS), dtype=np.int64)
    sizes, which = np.unique(run[:, _WORDS] * word_nbytes // scale, return_inverse=True)
    magics = np.array([(*magic(n), n) for n in sizes.tolist()], dtype=np.int64).reshape(-1, 3)
    out[:, 0], out[:, 1] = run[:, _ADDRESS], run[:, _LIVE_STEP] * word_nbytes
    out[:, 2:5] = magics[which]
    out[:, 5] = begin[at] + part * PIECE_VECTORS
    out[:, 6] = np.minimum(end[at] - out[:, 5], PIECE_VECTORS)
    out[:, 7] = run[:, _SNAPSHOT]
    out[:, 8] = run[:, _POSITION] - number * SEGMENT_WORDS
    out[:, 9] = run[:, _POSITION_STEP]
    out[:, 10], out[:, 11] = run[:, _FLAT], run[:, _FLAT_STEP]
    out[:, 12], out[:, 13], out[:, 14] = tensors[run[:, _TILE]], first_segments[run[:, _TILE]] + number, 0
    return out, scale
