"""Mask: find the changed words of every owned tile, cut them in frames, and advance the snapshot.

Fourth stop of the flow (plan -> snapshot -> mask -> encode -> gather -> publish). One pass reads old and new, gives
entries and digest sums, and writes the new words into the snapshot. This is the CPU path, in numpy; tensors on a GPU
take the kernels of megasync.kernels, which give the same entries, or come down to here first (``copied_masker``). Must not
import receiver or an adapter.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from megasync.digest import box_lanes
from megasync.frames import MAX_FRAME_NBYTES
from megasync.schema import Schema
from megasync.trainer.snapshot import Snapshot, to_tile, words_of
from megasync.types import WORD_DTYPES, Lanes, WholeEntries
from megasync.versions.changes import (
    CLOSE_ENTRIES,
    ChangedUnits,
    MaskedFrame,
    changed_units,
    cut_frames,
    differences,
    frame_of,
    units_of,
)

__all__ = ["anchor_frames", "mask_regions", "words_of"]

_BATCH_ENTRIES = 4 * CLOSE_ENTRIES
_GROUP_NBYTES = 8 << 20
_AHEAD = 16  # groups: a few for each thread


@dataclass(slots=True)
class _Tile:
    """A changed tile: what was found in each of its regions.

    Attributes:
        tensor_id: Schema id.
        tile: Tile number.
        found: Region and changed units, in region order.
        num_changed: Changed words.
    """

    tensor_id: int
    tile: int
    found: list[tuple[int, ChangedUnits]]
    num_changed: int


def mask_regions(schema: Schema, snapshot: Snapshot, pool: ThreadPoolExecutor | None = None) -> Iterator[MaskedFrame]:
    """Mask every owned region and advance the snapshot to the live weights.

    *Memory*: the snapshot is written frame by frame, before each is handed on: XOR the frames taken back into it to
    undo a pass that broke off.

    Args:
        schema: The run's schema.
        snapshot: Its regions name the live memory.
        pool: Compares some regions ahead; None compares each when its turn comes. Frames are made by the caller's thread either
            way: they need the interpreter, for which more threads would only wait.

    Yields:
        Frames with at least one changed word (see ``versions.changes.cut_frames`` for where they end).
    """
    for batch in _batches(cut_frames(schema, _changed_tiles(snapshot, pool))):
        for tiles in batch:
            frame = _frame(schema, snapshot, tiles)
            # Only here: frames handed on and the snapshot never disagree, whatever ends the pass.
            for tile in tiles:
                for region, units in tile.found:
                    snapshot.host_units[region][0][units.at] = units.new
            yield frame


def _batches(frames: Iterator[list[_Tile]]) -> Iterator[list[list[_Tile]]]:
    """Frames in batches: comparing drives code out of the cache, so what follows runs on several frames in a row."""
    batch: list[list[_Tile]] = []
    num = 0
    for tiles in frames:
        batch.append(tiles)
        num += sum(tile.num_changed for tile in tiles)
        if num >= _BATCH_ENTRIES:
            yield batch
            batch, num = [], 0
    if batch:
        yield batch


def _compared(snapshot: Snapshot, pool: ThreadPoolExecutor | None) -> Iterator[Iterable[ChangedUnits]]:
    """The changed units of each region, in order."""

    def compare(i: int) -> Iterator[ChangedUnits]:
        live, (kept, units) = snapshot.host_views[i][1], snapshot.host_units[i]
        return changed_units(kept, units_of(live) if units is None else units)

    regions = range(len(snapshot.regions))
    if pool is None:
        yield from map(compare, regions)
        return
    futures: deque[Future[list[list[ChangedUnits]]]] = deque()
    for group in _groups(snapshot, regions):
        futures.append(pool.submit(lambda numbers: [list(compare(i)) for i in numbers], group))
        if len(futures) > _AHEAD:
            yield from futures.popleft().result()
    for future in futures:
        yield from future.result()


def _groups(snapshot: Snapshot, regions: Iterable[int]) -> Iterator[list[int]]:
    """Regions that one thread compares in a row, so that handing over takes little of its time."""
    group: list[int] = []
    nbytes = 0
    for i in regions:
        group.append(i)
        nbytes += snapshot.regions[i].data.nbytes
        if nbytes >= _GROUP_NBYTES:
            yield group
            group, nbytes = [], 0
    if group:
        yield group


def _changed_tiles(snapshot: Snapshot, pool: ThreadPoolExecutor | None) -> Iterator[_Tile]:
    """Changed tiles in order, the regions of one tile joined."""
    pending: _Tile | None = None
    for i, (region, found_of) in enumerate(zip(snapshot.regions, _compared(snapshot, pool), strict=True)):
        dtype = snapshot.host_views[i][1].dtype
        for found in found_of:
            num = found.num_changed(dtype)
            if pending and pending.tile == region.tile and pending.tensor_id == region.tensor_id:
                pending.found.append((i, found))
                pending.num_changed += num
                continue
            if pending:
                yield pending
            pending = _Tile(region.tensor_id, region.tile, [(i, found)], num)
    if pending:
        yield pending


def _frame(schema: Schema, snapshot: Snapshot, tiles: list[_Tile]) -> MaskedFrame:
    """The frame of some tiles; words are looked at here, those of all its tiles at once."""
    word = np.dtype(WORD_DTYPES[schema.tensors[tiles[0].tensor_id].word_nbytes])
    found = differences([units for tile in tiles for _, units in tile.found], word)
    position, old, new = found.index, found.old, found.new
    start = 0
    for tile in tiles:
        stop = start + tile.num_changed
        if not snapshot.regions[tile.found[0][0]].whole:
            at = slice(start, stop)
            position[at] = _positions(schema, snapshot, tile, word, position[at])
            order = start + np.argsort(position[at], kind="stable")
            position[at], old[at], new[at] = position[order], old[order], new[order]
        start = stop
    return frame_of(schema, tiles, position.astype(np.uint32), old, new)


def _positions(schema: Schema, snapshot: Snapshot, tile: _Tile, word: np.dtype, index: np.ndarray) -> np.ndarray:
    """Word index in the tile of the changed words of a tile that a cut crosses, given their index in their regions."""
    edges = np.cumsum([units.num_changed(word) for _, units in tile.found])[:-1]
    parts = np.split(index, edges)
    return np.concatenate(
        [to_tile(schema, snapshot.regions[i], part) for (i, _), part in zip(tile.found, parts, strict=True)]
    )


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
            num = schema.num_tile_words(region.tensor_id, region.tile)
            current = region.tensor_id, region.tile, np.zeros(num, dtype=words.dtype)
        current[2][to_tile(schema, region, np.arange(len(words)))] = words
    if current is not None:
        yield current


def _anchor_frame(schema: Schema, tiles: list[tuple[int, int, np.ndarray]]) -> MaskedFrame:
    ids = np.array([t[0] for t in tiles], dtype=np.uint32)
    numbers = np.array([t[1] for t in tiles], dtype=np.uint32)
    change: dict[int, Lanes] = {}
    for tensor_id, tile, words in tiles:
        grid = schema.grids[tensor_id]
        # Words that are 0 add nothing: whole tiles take the digest's fast path.
        change[tensor_id] = change.get(tensor_id, Lanes()) + box_lanes(grid.shape, grid.box(tile), words)
    first = schema.tensors[tiles[0][0]]
    words = tiles[0][2] if len(tiles) == 1 else np.concatenate([words for _, _, words in tiles])
    entries = WholeEntries(first.word_nbytes, ids, numbers, schema.tile_words(ids, numbers), words)
    return MaskedFrame(first.layer, entries, change, dict.fromkeys(change, Lanes()))
