"""Tables of the scatter: which segment of which tile goes through which records. Host work, done while staging.

Comes after the frames' counts are decoded and the records packed, before ``scatter``. Must import nothing of megasync
but ``types``, ``kernels.planes`` and ``kernels.records``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from megasync.kernels.planes import is_dense, segments_of
from megasync.kernels.records import PackedRecords, RecordGroup
from megasync.types import SEGMENT_WORDS

TILE_HEAD = 4
"""Columns of a tile's row before its axes: first record, end of records, tensor, words. Then start and extent per
axis."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """Where touched tiles lie in their tensors; rows of one tensor need not be together.

    Attributes:
        tensors: int64 ``[T]``, index into the tensors of the records.
        starts: int64 ``[T, A]``, first coordinate; A is ``PackedRecords.num_axes``, leading axes of shorter shapes
            are 0.
        extents: int64 ``[T, A]``, at least 1.
    """

    tensors: np.ndarray
    starts: np.ndarray
    extents: np.ndarray

    @property
    def words(self) -> np.ndarray:
        """Words of each tile, int64 ``[T]``."""
        return self.extents.prod(axis=1)


@dataclass(frozen=True, slots=True)
class ScatterLaunch:
    """What one launch needs.

    Attributes:
        group: The records.
        segments: int32 ``[S, 4]`` on the device, segments with changes only: first entry (dense: first dense word),
            changed words (dense: minus the words of the segment), tile row, position of the segment in its tile.
        tiles: int32 ``[T, TILE_HEAD + 2 A]`` on the device.
        first_entry: int64 ``[S + 1]`` on the host: entries before each segment; the last is the end.
        first_dense: The same of dense words.
    """

    group: RecordGroup
    segments: torch.Tensor
    tiles: torch.Tensor
    first_entry: np.ndarray
    first_dense: np.ndarray


@dataclass(frozen=True, slots=True)
class ScatterPlan:
    """One apply of changed words of one word size.

    Attributes:
        records: The layout.
        tiles: The touched tiles.
        counts: int32 ``[S]`` on the host, changed words of every segment of every tile.
        launches: One for each record group that the tiles meet.
        num_entries: Entries of the sparse segments.
        num_dense: Words of the dense segments.
    """

    records: PackedRecords
    tiles: Tiles
    counts: np.ndarray
    launches: tuple[ScatterLaunch, ...]
    num_entries: int
    num_dense: int

    @property
    def nbytes(self) -> int:
        """Bytes of the plan's tables on the device."""
        return sum(x.numel() * x.element_size() for la in self.launches for x in (la.segments, la.tiles))


def plan_scatter(tiles: Tiles, counts: np.ndarray, records: PackedRecords, *, pin: bool = False) -> ScatterPlan:
    """Makes the tables of one apply.

    Args:
        tiles: The touched tiles, in the order of the planes.
        counts: Changed words of each segment of each tile, any integer dtype ``[S]``.
        records: The layout; tiles of tensors without records are skipped.
        pin: Copy the tables through pinned memory without waiting for the copy.

    Returns:
        The plan, its tables on the records' device.

    Raises:
        ValueError: When tiles leave their tensors, or counts do not fit the tiles.
    """
    counts = np.ascontiguousarray(counts, dtype=np.int32)
    words = _check(tiles, counts, records)
    tile, number, segment_words = segments_of(words)
    if len(counts) != len(tile) or bool((counts < 0).any()) or bool((counts > segment_words).any()):
        raise ValueError(f"{len(counts)} counts do not fit {len(tile)} segments of {len(words)} tiles")
    dense = is_dense(counts, segment_words, records.word_nbytes)
    entries = np.cumsum(np.where(dense, 0, counts), dtype=np.int64)
    dense_words = np.cumsum(np.where(dense, segment_words, 0), dtype=np.int64)
    num_entries, num_dense = (int(x[-1]) if len(x) else 0 for x in (entries, dense_words))
    if max(num_entries, num_dense) >= 1 << 31:
        raise ValueError(f"{num_entries} entries and {num_dense} dense words: at most 2^31 - 1 in one plan; split it")
    first_entry, first_dense = entries - np.where(dense, 0, counts), dense_words - np.where(dense, segment_words, 0)
    rows = np.empty((len(tile), 4), dtype=np.int32)
    rows[:, 0] = np.where(dense, first_dense, first_entry)
    rows[:, 1] = np.where(dense, -segment_words, counts)
    rows[:, 2] = tile
    rows[:, 3] = number * SEGMENT_WORDS
    launches = []
    for group in records.groups:
        table = np.empty((len(words), TILE_HEAD + 2 * records.num_axes), dtype=np.int32)
        table[:, 0] = np.searchsorted(group.owners, tiles.tensors, side="left")
        table[:, 1] = np.searchsorted(group.owners, tiles.tensors, side="right")
        table[:, 2], table[:, 3] = tiles.tensors, words
        table[:, TILE_HEAD::2], table[:, TILE_HEAD + 1 :: 2] = tiles.starts, tiles.extents
        mine = np.nonzero((counts > 0) & (table[:, 0] < table[:, 1])[tile])[0]
        if len(mine):
            launches.append(
                ScatterLaunch(
                    group,
                    _upload(rows[mine], records.device, pin),
                    _upload(table, records.device, pin),
                    np.append(first_entry[mine], num_entries),
                    np.append(first_dense[mine], num_dense),
                )
            )
    return ScatterPlan(records, tiles, counts, tuple(launches), num_entries, num_dense)


def _check(tiles: Tiles, counts: np.ndarray, records: PackedRecords) -> np.ndarray:
    """Words of each tile, after the tiles were tested against their tensors.

    Raises:
        ValueError: When a tile leaves its tensor.
    """
    if not len(tiles.tensors):
        return np.zeros(0, dtype=np.int64)
    shape = (len(tiles.tensors), records.num_axes)
    if tiles.starts.shape != shape or tiles.extents.shape != shape or counts.ndim != 1:
        raise ValueError(f"starts {tiles.starts.shape} and extents {tiles.extents.shape} must be {shape}")
    if int(tiles.tensors.min()) < 0 or int(tiles.tensors.max()) >= records.num_tensors:
        raise ValueError(f"tile of tensor {int(tiles.tensors.max())}: the records are of {records.num_tensors} tensors")
    past = (tiles.starts < 0) | (tiles.extents < 1) | (tiles.starts + tiles.extents > records.shapes[tiles.tensors])
    if past.any():
        i = int(np.nonzero(past.any(axis=1))[0][0])
        raise ValueError(
            f"tile {i} of tensor {int(tiles.tensors[i])} spans {tiles.starts[i]} + {tiles.extents[i]}, "
            f"outside its shape {records.shapes[tiles.tensors[i]]}"
        )
    words = tiles.words
    if int(words.max()) >= 1 << 31:
        raise ValueError(f"a tile of {int(words.max())} words: at most 2^31 - 1")
    return words


def _upload(table: np.ndarray, device: torch.device, pin: bool) -> torch.Tensor:
    """A table on the device."""
    host = torch.from_numpy(table)
    if device.type == "cpu":
        return host
    return host.pin_memory().to(device, non_blocking=True) if pin else host.to(device)
