"""Changed words: comparing two runs of words, and cutting changed tiles into frames. No torch.

The rule of where a frame ends is part of what makes publications byte-reproducible. Used by the trainer's mask stage and
by the tools, which compare checkpoints on machines without a trainer. Must not import trainer or receiver.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

import numpy as np

from megasync.digest_sums import lanes_of, sums_by_segment
from megasync.frames import MAX_FRAME_NBYTES
from megasync.schema import Schema, runs_of_equal
from megasync.types import Entries, Lanes

CLOSE_ENTRIES = 16_384
"""A frame closes after the tile that brings it to so many entries: planes are then long enough to reach the bound."""

_CHUNK_UNITS = 1 << 17  # 8-byte units compared at a time: their flags stay in the cache
_local = threading.local()


@dataclass(frozen=True, slots=True)
class TileChange:
    """The changed words of one tile.

    Attributes:
        tensor_id: Schema id.
        tile: Tile number.
        positions: Word index in the tile, ascending, any integer dtype, ``[n]``, at least one.
        old: ``<u{w}`` ``[n]``.
        new: ``<u{w}`` ``[n]``.
    """

    tensor_id: int
    tile: int
    positions: np.ndarray
    old: np.ndarray
    new: np.ndarray

    @property
    def num_changed(self) -> int:
        """Changed words."""
        return len(self.positions)


@dataclass(frozen=True, slots=True)
class MaskedFrame:
    """The changed words of one frame and what they do to the state digests.

    Attributes:
        layer: Layer of all its tiles.
        entries: The changed words.
        change: Per tensor id, digest sum of new minus old.
        touched_old: Per tensor id, digest sum of the old values at the changed words.
    """

    layer: int
    entries: Entries
    change: dict[int, Lanes]
    touched_old: dict[int, Lanes]


@dataclass(frozen=True, slots=True)
class Differences:
    """Where two runs of words differ.

    Attributes:
        index: int64 ``[n]``, ascending.
        old: ``<u{w}`` ``[n]``.
        new: ``<u{w}`` ``[n]``.
    """

    index: np.ndarray
    old: np.ndarray
    new: np.ndarray


class ChangedUnits(NamedTuple):
    """The 8-byte units of a run of words in which some word changed: what a comparison finds without looking at words.

    Attributes:
        at: int64 ``[k]``, number of each unit in the run, ascending.
        old: ``<u8`` ``[k]``.
        new: ``<u8`` ``[k]``.
    """

    at: np.ndarray
    old: np.ndarray
    new: np.ndarray

    def num_changed(self, word: np.dtype) -> int:
        """Changed words of a dtype in these units."""
        return int(np.count_nonzero((self.old ^ self.new).view(word)))


def compare(old: np.ndarray, new: np.ndarray) -> Differences:
    """Where two runs of words differ, and what they are there.

    Args:
        old: ``<u{w}`` ``[n]``, contiguous.
        new: ``<u{w}``, n words in any shape and strides.
    """
    return differences(list(changed_units(units_of(old), units_of(new))), old.dtype)


def changed_units(old: np.ndarray, new: np.ndarray) -> Iterator[ChangedUnits]:
    """Where two runs of 8-byte units differ: picked while they are in the cache, once.

    Args:
        old: ``<u8`` ``[n]``.
        new: ``<u8`` ``[n]``.

    Yields:
        Changed units of a stretch of the run, at least one; stretches ascend.
    """
    flags = _flags()
    for at in range(0, len(old), _CHUNK_UNITS):
        a, b = old[at : at + _CHUNK_UNITS], new[at : at + _CHUNK_UNITS]
        unit = np.not_equal(a, b, out=flags[: len(a)]).nonzero()[0]
        if len(unit):
            yield ChangedUnits(unit + at if at else unit, a.take(unit), b.take(unit))


def differences(units: Sequence[ChangedUnits], word: np.dtype) -> Differences:
    """The changed words of changed units, those of several runs one after the other.

    Args:
        units: Of one run or more.
        word: Dtype of the words, ``<u{w}``.
    """
    if not units:
        return Differences(np.empty(0, np.int64), np.empty(0, word), np.empty(0, word))
    index, a, b = (np.concatenate(parts) for parts in zip(*((u.at, u.old, u.new) for u in units), strict=True))
    old, new = a.view(word), b.view(word)
    at = (old != new).nonzero()[0]
    shift = 4 - word.itemsize.bit_length()  # log2 of the words of a unit
    found = index.take(at >> shift)
    found <<= shift
    found |= at & ((1 << shift) - 1)
    return Differences(found, old.take(at), new.take(at))


def units_of(words: np.ndarray) -> np.ndarray:
    """Words in any shape and strides as ``<u8`` ``[k]``: a view where they lie together and fill whole units.

    Else a copy, the last unit filled up with zeros.
    """
    flat = contiguous(words)
    if flat.nbytes % 8:
        flat = np.concatenate((flat, np.zeros(-flat.nbytes % 8 // flat.itemsize, flat.dtype)))
    return flat.view("<u8")


def contiguous(words: np.ndarray) -> np.ndarray:
    """Words one after the other, ``[n]``: a view where they lie so, else a copy.

    Rows of contiguous words, as of a box of a matrix, are copied row by row: twice as fast as numpy copies words.
    """
    if words.flags.c_contiguous or words.strides[-1] != words.itemsize:
        return np.ascontiguousarray(words).reshape(-1)
    row = np.dtype((np.void, words.shape[-1] * words.itemsize))
    return words.view(row)[..., 0].copy().reshape(-1).view(words.dtype)


def _flags() -> np.ndarray:
    """This thread's flags of a chunk."""
    found: np.ndarray | None = getattr(_local, "flags", None)
    if found is None:
        found = _local.flags = np.empty(_CHUNK_UNITS, dtype=bool)
    return found


def compact(old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """Where two runs of words differ: int64, ascending; as ``compare``."""
    return compare(old, new).index


class ChangedTile(Protocol):
    """What decides where frames end."""

    @property
    def tensor_id(self) -> int:
        """Schema id."""

    @property
    def tile(self) -> int:
        """Tile number."""

    @property
    def num_changed(self) -> int:
        """Changed words."""


_Tile = TypeVar("_Tile", bound=ChangedTile)


def cut_frames(schema: Schema, tiles: Iterable[_Tile]) -> Iterator[list[_Tile]]:
    """Cut changed tiles into frames.

    A frame takes tiles of one layer and one word size. It closes after the tile that brings it to ``CLOSE_ENTRIES``
    entries, or before one that would pass 64 MiB of weights.

    Args:
        schema: The run's schema.
        tiles: In (tensor id, tile) order.

    Yields:
        Tiles of one frame.
    """
    pending: list[_Tile] = []
    entries = nbytes = 0
    kind = (-1, 0)
    for tile in tiles:
        spec = schema.tensors[tile.tensor_id]
        tile_kind = spec.layer, spec.word_nbytes
        tile_nbytes = schema.num_tile_words(tile.tensor_id, tile.tile) * spec.word_nbytes
        full = entries >= CLOSE_ENTRIES or nbytes + tile_nbytes > MAX_FRAME_NBYTES
        if pending and (full or tile_kind != kind):
            yield pending
            pending, entries, nbytes = [], 0, 0
        kind = tile_kind
        pending.append(tile)
        entries += tile.num_changed
        nbytes += tile_nbytes
    if pending:
        yield pending


def mask_frame(schema: Schema, tiles: Sequence[TileChange]) -> MaskedFrame:
    """Entries and digest sums of the tiles of one frame."""
    old, new = np.concatenate([t.old for t in tiles]), np.concatenate([t.new for t in tiles])
    positions = np.concatenate([t.positions for t in tiles], dtype=np.uint32, casting="unsafe")
    return frame_of(schema, tiles, positions, old, new)


def frame_of(
    schema: Schema, tiles: Sequence[ChangedTile], positions: np.ndarray, old: np.ndarray, new: np.ndarray
) -> MaskedFrame:
    """As ``mask_frame``, given the changed words of all tiles one after the other.

    Args:
        schema: The run's schema.
        tiles: Of one frame.
        positions: u32 ``[n]``, word index in its tile, ascending inside each.
        old: ``<u{w}`` ``[n]``.
        new: ``<u{w}`` ``[n]``.
    """
    first = schema.tensors[tiles[0].tensor_id]
    ids = np.array([t.tensor_id for t in tiles], dtype=np.uint32)
    numbers = np.array([t.tile for t in tiles], dtype=np.uint32)
    counts = np.array([t.num_changed for t in tiles], dtype=np.uint32)
    words = schema.tile_words(ids, numbers)
    entries = Entries(first.word_nbytes, ids, numbers, words, counts, positions, old ^ new)
    touched, (before, after) = sums_of(schema, entries, old, new)
    change = dict(zip(touched, lanes_of(after - before), strict=True))
    return MaskedFrame(first.layer, entries, change, dict(zip(touched, lanes_of(before), strict=True)))


def sums_of(schema: Schema, entries: Entries, *columns: np.ndarray) -> tuple[list[int], list[np.ndarray]]:
    """Digest sums, by tensor, of any values at the words of some entries.

    Args:
        schema: The run's schema.
        entries: Which words.
        columns: Sets of values, each ``<u{w}`` ``[n]``, in the order of the entries.

    Returns:
        The tensor ids, and for each column uint64 ``[len(ids), 2]``.
    """
    stops = np.cumsum(entries.counts, dtype=np.int64)
    runs = runs_of_equal(entries.tensor_ids)
    bounds = [0, *(int(stops[b - 1]) for _, b in runs)]
    ids = [int(entries.tensor_ids[a]) for a, _ in runs]
    flat = [
        schema.grids[i].flat_words(entries.tiles[a:b], entries.counts[a:b], entries.positions[lo:hi])
        for i, (a, b), lo, hi in zip(ids, runs, bounds[:-1], bounds[1:], strict=True)
    ]
    words = flat[0] if len(flat) == 1 else np.concatenate(flat) if flat else np.empty(0, np.int64)
    return ids, sums_by_segment(words, entries.word_nbytes, bounds, columns)


def word_sums(schema: Schema, entries: Entries, values: np.ndarray) -> dict[int, Lanes]:
    """As ``sums_of``, of one set of values, by tensor id."""
    ids, (sums,) = sums_of(schema, entries, values)
    return dict(zip(ids, lanes_of(sums), strict=True))
