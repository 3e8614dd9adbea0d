"""Mask: find the changed words of every owned tile, cut them in frames, and advance the snapshot.

Fourth stop of the flow (plan -> snapshot -> mask -> encode -> gather -> publish). One pass reads old and new, gives
entries and digest sums, and writes the new words into the snapshot. This is the CPU path, in numpy; tensors on a GPU
take the fused kernel of megasync.kernels and give the same entries. Must not import receiver or an adapter.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from megasync.digest import box_lanes
from megasync.frames import MAX_FRAME_NBYTES
from megasync.schema import Schema
from megasync.trainer.snapshot import Snapshot, to_tile, words_of
from megasync.types import Lanes, WholeEntries
from megasync.versions.changes import MaskedFrame, TileChange, compare, cut_frames, mask_frame

__all__ = ["anchor_frames", "mask_regions", "words_of"]

_Write = tuple[np.ndarray, np.ndarray, np.ndarray]


def mask_regions(schema: Schema, snapshot: Snapshot) -> Iterator[MaskedFrame]:
    """Mask every owned region and advance the snapshot to the live weights.

    *Memory*: the snapshot is written frame by frame, before each is handed on: XOR the frames taken back into it to
    undo a pass that broke off.

    Args:
        schema: The run's schema.
        snapshot: Its regions name the live memory.

    Yields:
        Frames with at least one changed word (see ``versions.changes.cut_frames`` for where they end).
    """
    writes: dict[tuple[int, int], list[_Write]] = {}
    for tiles in cut_frames(schema, _changed_tiles(schema, snapshot, writes)):
        frame = mask_frame(schema, tiles)
        # Only here: frames handed on and the snapshot never disagree, whatever ends the pass.
        for tile in tiles:
            for kept, index, words in writes.pop((tile.tensor_id, tile.tile)):
                kept[index] = words
        yield frame


def _changed_tiles(
    schema: Schema, snapshot: Snapshot, writes: dict[tuple[int, int], list[_Write]]
) -> Iterator[TileChange]:
    """Changed tiles in order, the regions of one tile joined; what is to be written goes to ``writes``."""
    pending: list[TileChange] = []
    for region, (kept, live) in zip(snapshot.regions, snapshot.host_views, strict=True):
        found = compare(kept, live)
        if pending and (pending[0].tensor_id, pending[0].tile) != (region.tensor_id, region.tile):
            yield _joined(pending)
            pending = []
        if not len(found.index):
            continue
        writes.setdefault((region.tensor_id, region.tile), []).append((kept, found.index, found.new))
        position = to_tile(schema, region, found.index)
        pending.append(TileChange(region.tensor_id, region.tile, position, found.old, found.new))
    if pending:
        yield _joined(pending)


def _joined(parts: list[TileChange]) -> TileChange:
    if len(parts) == 1:
        return parts[0]
    positions = np.concatenate([p.positions for p in parts])
    order = np.argsort(positions, kind="stable")
    old, new = np.concatenate([p.old for p in parts]), np.concatenate([p.new for p in parts])
    return TileChange(parts[0].tensor_id, parts[0].tile, positions[order], old[order], new[order])


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
