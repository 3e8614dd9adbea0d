"""Mask: find the changed words of every owned tile, cut them in frames, and advance the snapshot.

Fourth stop of the flow (plan -> snapshot -> mask -> encode -> gather -> publish). One pass reads old and new, gives
entries and digest sums, and writes the new words into the snapshot. This is the CPU path, in numpy; tensors on a GPU
take the fused kernel of megasync.kernels and give the same entries. Must not import receiver or an adapter.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from megasync.digest import WordWeights
from megasync.frames import MAX_FRAME_NBYTES
from megasync.schema import Schema, runs_of_equal
from megasync.trainer.snapshot import Snapshot, to_tile
from megasync.types import WORD_DTYPES, Entries, Lanes

CLOSE_ENTRIES = 16_384
"""A frame closes after the tile that brings it to so many entries: planes are then long enough to reach the bound."""

_CHUNK_UNITS = 1 << 17  # 8-byte units compared at a time: the bool tile stays in the cache
_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


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


@dataclass(slots=True)
class _Tile:
    tensor_id: int
    tile: int
    positions: np.ndarray
    old: np.ndarray
    new: np.ndarray
    writes: list[tuple[int, np.ndarray, np.ndarray]]  # region, index and new words, written when the frame closes


def words_of(data: torch.Tensor) -> np.ndarray:
    """Words of a CPU tensor as ``<u{w}``: a view with the tensor's shape and strides."""
    same = _SAME_SIZE[data.element_size()]
    return data.detach().view(same).numpy().view(WORD_DTYPES[data.element_size()])


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
        chunk = np.not_equal(a[at:stop], b[at:stop], out=differs[: stop - at])
        unit = np.flatnonzero(chunk)
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


def mask_regions(schema: Schema, snapshot: Snapshot) -> Iterator[MaskedFrame]:
    """Mask every owned region and advance the snapshot to the live weights.

    Frames take tiles of one layer and one word size in (tensor id, tile) order. A frame closes after the tile that
    brings it to ``CLOSE_ENTRIES`` entries, or before one that would pass 64 MiB of weights.

    *Memory*: the snapshot is written frame by frame, before each is handed on: XOR the frames taken back into it to
    undo a pass that broke off.

    Args:
        schema: The run's schema.
        snapshot: Its regions name the live memory.

    Yields:
        Frames with at least one changed word.
    """
    pending: list[_Tile] = []
    entries = nbytes = 0
    for tile in _masked_tiles(schema, snapshot):
        spec = schema.tensors[tile.tensor_id]
        tile_nbytes = int(schema.grids[tile.tensor_id].tile_words(np.array([tile.tile]))[0]) * spec.word_nbytes
        if pending:
            first = schema.tensors[pending[0].tensor_id]
            other = (first.layer, first.word_nbytes) != (spec.layer, spec.word_nbytes)
            if other or entries >= CLOSE_ENTRIES or nbytes + tile_nbytes > MAX_FRAME_NBYTES:
                yield _close(schema, snapshot, pending)
                pending, entries, nbytes = [], 0, 0
        pending.append(tile)
        entries += len(tile.positions)
        nbytes += tile_nbytes
    if pending:
        yield _close(schema, snapshot, pending)


def _masked_tiles(schema: Schema, snapshot: Snapshot) -> Iterator[_Tile]:
    """Changed tiles in order; the regions of one tile are joined."""
    pending: list[_Tile] = []
    for i, region in enumerate(snapshot.regions):
        old = snapshot.words(i)
        new = np.ascontiguousarray(words_of(region.data)).reshape(-1)
        index = compact(old, new)
        if pending and (pending[0].tensor_id, pending[0].tile) != (region.tensor_id, region.tile):
            yield _joined(pending)
            pending = []
        if not len(index):
            continue
        now = new[index]
        position = to_tile(schema, region, index)
        pending.append(_Tile(region.tensor_id, region.tile, position, old[index], now, [(i, index, now)]))
    if pending:
        yield _joined(pending)


def _joined(parts: list[_Tile]) -> _Tile:
    if len(parts) == 1:
        return parts[0]
    positions = np.concatenate([p.positions for p in parts])
    order = np.argsort(positions, kind="stable")
    old, new = np.concatenate([p.old for p in parts]), np.concatenate([p.new for p in parts])
    writes = [write for p in parts for write in p.writes]
    return _Tile(parts[0].tensor_id, parts[0].tile, positions[order], old[order], new[order], writes)


def _close(schema: Schema, snapshot: Snapshot, tiles: list[_Tile]) -> MaskedFrame:
    """The frame of some tiles; the snapshot advances here, so that frames handed on and snapshot never disagree."""
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
    for i, index, words in (write for t in tiles for write in t.writes):
        snapshot.words(i)[index] = words
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


def anchor_frames(schema: Schema, snapshot: Snapshot) -> Iterator[MaskedFrame]:
    """Full bytes of every owned tile as frames against an all-zero base; the snapshot is only read.

    A tile that a cut crosses is zero outside the part owned here: the parts XOR together.
    """
    pending: list[tuple[int, int, np.ndarray]] = []
    nbytes = 0
    for tensor_id, tile, words in _whole_tiles(schema, snapshot):
        if pending:
            first, spec = schema.tensors[pending[0][0]], schema.tensors[tensor_id]
            other = (first.layer, first.word_nbytes) != (spec.layer, spec.word_nbytes)
            if other or nbytes + words.nbytes > MAX_FRAME_NBYTES:
                yield _anchor_frame(schema, pending)
                pending, nbytes = [], 0
        pending.append((tensor_id, tile, words))
        nbytes += words.nbytes
    if pending:
        yield _anchor_frame(schema, pending)


def _whole_tiles(schema: Schema, snapshot: Snapshot) -> Iterator[tuple[int, int, np.ndarray]]:
    current: tuple[int, int, np.ndarray] | None = None
    for i, region in enumerate(snapshot.regions):
        words = snapshot.words(i)
        if region.whole:
            if current is not None:
                yield current
                current = None
            yield region.tensor_id, region.tile, words
            continue
        if current is None or current[:2] != (region.tensor_id, region.tile):
            if current is not None:
                yield current
            num = int(schema.grids[region.tensor_id].tile_words(np.array([region.tile]))[0])
            current = region.tensor_id, region.tile, np.zeros(num, dtype=words.dtype)
        current[2][to_tile(schema, region, np.arange(len(words)))] = words
    if current is not None:
        yield current


def _anchor_frame(schema: Schema, tiles: list[tuple[int, int, np.ndarray]]) -> MaskedFrame:
    found = [np.flatnonzero(words) for _, _, words in tiles]
    ids = np.array([t[0] for t in tiles], dtype=np.uint32)
    numbers = np.array([t[1] for t in tiles], dtype=np.uint32)
    change: dict[int, Lanes] = {}
    for (tensor_id, tile, words), at in zip(tiles, found, strict=True):
        flat = schema.grids[tensor_id].flat_index(np.array([tile]), at)
        weights = WordWeights.of(flat, words.dtype.itemsize)
        change[tensor_id] = change.get(tensor_id, Lanes()) + weights.lanes(words[at])
    first = schema.tensors[tiles[0][0]]
    entries = Entries(
        first.word_nbytes,
        ids,
        numbers,
        schema.tile_words(ids, numbers),
        np.array([len(at) for at in found], dtype=np.uint32),
        np.concatenate(found).astype(np.uint32),
        np.concatenate([words[at] for (_, _, words), at in zip(tiles, found, strict=True)]),
    )
    return MaskedFrame(first.layer, entries, change, dict.fromkeys(change, Lanes()))
