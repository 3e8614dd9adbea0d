"""Changed words: comparing two runs of words, and cutting changed tiles into frames. No torch.

The rule of where a frame ends is part of what makes publications byte-reproducible. Used by the trainer's mask stage and
by the tools, which compare checkpoints on machines without a trainer. Must not import trainer or receiver.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from megasync.digest import WordWeights
from megasync.frames import MAX_FRAME_NBYTES
from megasync.schema import Schema, runs_of_equal
from megasync.types import Entries, Lanes

CLOSE_ENTRIES = 16_384
"""A frame closes after the tile that brings it to so many entries: planes are then long enough to reach the bound."""

_CHUNK_UNITS = 1 << 17  # 8-byte units compared at a time: the bool tile stays in the cache


@dataclass(frozen=True, slots=True)
class TileChange:
    """The changed words of one tile.

    Attributes:
        tensor_id: Schema id.
        tile: Tile number.
        positions: Word index in the tile, ascending, int64 ``[n]``, at least one.
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


def compact(old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """Where two runs of words differ.

    Args:
        old: ``<u{w}`` ``[n]``, contiguous.
        new: The same.

    Returns:
        int64, ascending.
    """
    width = 8 // old.dtype.itemsize
    whole = len(old) // width * width
    a, b = old[:whole].view("<u8"), new[:whole].view("<u8")
    differs = np.empty(min(len(a), _CHUNK_UNITS), dtype=bool)
    found: list[np.ndarray] = []
    for at in range(0, len(a), _CHUNK_UNITS):
        stop = min(at + _CHUNK_UNITS, len(a))
        unit = np.flatnonzero(np.not_equal(a[at:stop], b[at:stop], out=differs[: stop - at]))
        if not len(unit):
            continue
        unit += at
        if width > 1:
            lane = np.flatnonzero((a[unit] ^ b[unit]).view(old.dtype))
            unit = unit[lane // width] * width + lane % width
        found.append(unit)
    if whole < len(old):
        found.append(np.flatnonzero(old[whole:] != new[whole:]) + whole)
    return np.concatenate(found) if found else np.empty(0, dtype=np.int64)


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
        tile_nbytes = int(schema.grids[tile.tensor_id].tile_words(np.array([tile.tile]))[0]) * spec.word_nbytes
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
    ids = np.array([t.tensor_id for t in tiles], dtype=np.uint32)
    numbers = np.array([t.tile for t in tiles], dtype=np.uint32)
    counts = np.array([len(t.positions) for t in tiles], dtype=np.uint32)
    positions = np.concatenate([t.positions for t in tiles])
    old, new = np.concatenate([t.old for t in tiles]), np.concatenate([t.new for t in tiles])
    stops = np.cumsum(counts, dtype=np.int64)
    change: dict[int, Lanes] = {}
    touched_old: dict[int, Lanes] = {}
    for a, b in runs_of_equal(ids):
        tensor_id = int(ids[a])
        span = slice(int(stops[a]) - int(counts[a]), int(stops[b - 1]))
        flat = schema.grids[tensor_id].flat_index(np.repeat(numbers[a:b], counts[a:b]), positions[span])
        weights = WordWeights.of(flat, schema.tensors[tensor_id].word_nbytes)
        change[tensor_id] = weights.change(old[span], new[span])
        touched_old[tensor_id] = weights.lanes(old[span])
    first = schema.tensors[tiles[0].tensor_id]
    entries = Entries(
        first.word_nbytes,
        ids,
        numbers,
        schema.tile_words(ids, numbers),
        counts,
        positions.astype(np.uint32),
        old ^ new,
    )
    return MaskedFrame(first.layer, entries, change, touched_old)


def word_sums(schema: Schema, entries: Entries, values: np.ndarray) -> dict[int, Lanes]:
    """Digest sums, per tensor id, of any values at the words of some entries.

    Args:
        schema: The run's schema.
        entries: Which words.
        values: ``<u{w}`` ``[n]``, in the order of the entries.
    """
    stops = np.cumsum(entries.counts, dtype=np.int64)
    out: dict[int, Lanes] = {}
    for a, b in runs_of_equal(entries.tensor_ids):
        tensor_id = int(entries.tensor_ids[a])
        span = slice(int(stops[a]) - int(entries.counts[a]), int(stops[b - 1]))
        tiles = np.repeat(entries.tiles[a:b], entries.counts[a:b])
        flat = schema.grids[tensor_id].flat_index(tiles, entries.positions[span])
        out[tensor_id] = WordWeights.of(flat, entries.word_nbytes).lanes(values[span])
    return out
