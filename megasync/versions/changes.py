"""Changed words: comparing two runs of words, and cutting changed tiles into frames. No torch.

The rule of where a frame ends is part of what makes publications byte-reproducible. Used by the trainer's mask stage and
by the tools, which compare checkpoints on machines without a trainer. Must not import trainer or receiver.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

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


def compare(old: np.ndarray, new: np.ndarray) -> Differences:
    """Where two runs of words differ, and what they are there.

    Args:
        old: ``<u{w}`` ``[n]``, contiguous.
        new: ``<u{w}``, n words in any shape and strides.
    """
    new = contiguous(new)
    per_unit = 8 // old.itemsize
    whole = len(old) // per_unit * per_unit
    a, b = old[:whole].view("<u8"), new[:whole].view("<u8")
    found: list[Differences] = []
    for at in range(0, len(a), _CHUNK_UNITS):
        part = slice(at, at + _CHUNK_UNITS)
        differences = _compare_units(a[part], b[part], old.dtype, at * per_unit)
        if differences is not None:
            found.append(differences)
    if whole < len(old):
        index = np.flatnonzero(old[whole:] != new[whole:]) + whole
        found.append(Differences(index, old[index], new[index]))
    if len(found) == 1:
        return found[0]
    if not found:
        return Differences(np.empty(0, np.int64), old[:0], old[:0])
    return Differences(
        np.concatenate([d.index for d in found]),
        np.concatenate([d.old for d in found]),
        np.concatenate([d.new for d in found]),
    )


def contiguous(words: np.ndarray) -> np.ndarray:
    """Words one after the other, ``[n]``: a view where they lie so, else a copy.

    Rows of contiguous words, as of a box of a matrix, are copied row by row: twice as fast as numpy copies words.
    """
    if words.flags.c_contiguous or words.strides[-1] != words.itemsize:
        return np.ascontiguousarray(words).reshape(-1)
    row = np.dtype((np.void, words.shape[-1] * words.itemsize))
    return words.view(row)[..., 0].copy().reshape(-1).view(words.dtype)


def _compare_units(a: np.ndarray, b: np.ndarray, word: np.dtype, first: int) -> Differences | None:
    """Changed words of two runs of 8-byte units; None where there are none."""
    flags = np.not_equal(a, b, out=_flags()[: len(a)])
    unit = flags.nonzero()[0]
    if not len(unit):
        return None
    if 2 * len(unit) > len(a):  # most units changed: word by word is cheaper than picking them
        old, new = a.view(word), b.view(word)
        index = (old != new).nonzero()[0]
        return Differences(index + first, old[index], new[index])
    old, new = a[unit].view(word), b[unit].view(word)
    lane = (old != new).nonzero()[0]
    shift = 4 - word.itemsize.bit_length()  # log2 of the words of a unit
    index = (unit[lane >> shift] << shift) + (lane & ((1 << shift) - 1)) + first
    return Differences(index, old[lane], new[lane])


def _flags() -> np.ndarray:
    """This thread's flags of a chunk."""
    found: np.ndarray | None = getattr(_local, "flags", None)
    if found is None:
        found = _local.flags = np.empty(_CHUNK_UNITS, dtype=bool)
    return found


def compact(old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """Where two runs of words differ: int64, ascending; as ``compare``."""
    return compare(old, new).index


def cut_frames(schema: Schema, tiles: Iterable[TileChange]) -> Iterator[list[TileChange]]:
    """Cut changed tiles into frames.

    A frame takes tiles of one layer and one word size. It closes after the tile that brings it to ``CLOSE_ENTRIES``
    entries, or before one that would pass 64 MiB of weights.

    Args:
        schema: The run's schema.
        tiles: In (tensor id, tile) order.

    Yields:
        Tiles of one frame.
    """
    pending: list[TileChange] = []
    entries = nbytes = 0
    for tile in tiles:
        spec = schema.tensors[tile.tensor_id]
        tile_nbytes = schema.num_tile_words(tile.tensor_id, tile.tile) * spec.word_nbytes
        if pending:
            first = schema.tensors[pending[0].tensor_id]
            other = (first.layer, first.word_nbytes) != (spec.layer, spec.word_nbytes)
            if other or entries >= CLOSE_ENTRIES or nbytes + tile_nbytes > MAX_FRAME_NBYTES:
                yield pending
                pending, entries, nbytes = [], 0, 0
        pending.append(tile)
        entries += len(tile.positions)
        nbytes += tile_nbytes
    if pending:
        yield pending


def mask_frame(schema: Schema, tiles: list[TileChange]) -> MaskedFrame:
    """Entries and digest sums of the tiles of one frame."""
    first = schema.tensors[tiles[0].tensor_id]
    ids = np.array([t.tensor_id for t in tiles], dtype=np.uint32)
    numbers = np.array([t.tile for t in tiles], dtype=np.uint32)
    old, new = np.concatenate([t.old for t in tiles]), np.concatenate([t.new for t in tiles])
    entries = Entries(
        first.word_nbytes,
        ids,
        numbers,
        schema.tile_words(ids, numbers),
        np.array([len(t.positions) for t in tiles], dtype=np.uint32),
        np.concatenate([t.positions for t in tiles], dtype=np.uint32, casting="unsafe"),
        old ^ new,
    )
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
