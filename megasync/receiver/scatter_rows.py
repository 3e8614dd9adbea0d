"""Table rows of the scatter for one range of frames: which segment of which tile goes through which records.

The same tables as ``kernels.scatter_plan.plan_scatter`` makes in one go on one core. A range's rows are made on their own and
then written where the arena has room for them. Comes between ``scatter_keep`` and ``scatter_tables``. Must not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megasync.codecs.sparse_batch import RawFrames
from megasync.receiver.scatter_store import DENSE, ENTRIES, GROUPS, SEGMENTS, TILES, GroupStore, Need, Store
from megasync.receiver.scatter_view import StageView


@dataclass(frozen=True, slots=True)
class Rows:
    """What one record group needs of a range.

    Attributes:
        tiles: int32 ``[T, head + 2 A]``, rows of the tile table.
        segments: int32 ``[S, 4]``, rows of the segment table; planes and tile rows count from this range.
        first_entry: int64 ``[S]``.
        first_dense: int64 ``[S]``.
    """

    tiles: np.ndarray
    segments: np.ndarray
    first_entry: np.ndarray
    first_dense: np.ndarray

    def write(self, to: GroupStore, tile: int, segment: int, entries: int, dense: int) -> None:
        """Write the rows from a tile and a segment on, with planes that begin further on in the arena."""
        stop = segment + len(self.segments)
        to.tiles[tile : tile + len(self.tiles)] = self.tiles
        table = to.segments[segment:stop]
        table[:] = self.segments
        table[:, 0] += np.where(table[:, 1] < 0, np.int32(dense), np.int32(entries))
        table[:, 2] += np.int32(tile)
        np.add(self.first_entry, entries, out=to.first_entry[segment:stop])
        np.add(self.first_dense, dense, out=to.first_dense[segment:stop])


_NO_ROWS = (0, 0)


@dataclass(frozen=True, slots=True)
class Part:
    """What is kept of one range of frames of one word size.

    Attributes:
        entries: uint8 ``[2 + w, n]``.
        masks: uint8 ``[w, m]``.
        rows: int64 ``[T]``, tensor of each kept tile, as a row of the packs.
        starts: int32 ``[T, A]``.
        extents: int32 ``[T, A]``.
        counts: int32 ``[S]``, changed words of all segments of the kept tiles.
        groups: By pack and record group; None where no tile meets it.
        num_changed: Changed words that this rank holds.
    """

    entries: np.ndarray
    masks: np.ndarray
    rows: np.ndarray
    starts: np.ndarray
    extents: np.ndarray
    counts: np.ndarray
    groups: tuple[tuple[Rows | None, ...], ...]
    num_changed: int

    @property
    def word_nbytes(self) -> int:
        """Word size."""
        return len(self.masks)

    @property
    def need(self) -> Need:
        """Room that it takes in an arena."""
        flat = [_NO_ROWS if r is None else (len(r.tiles), len(r.segments)) for pack in self.groups for r in pack]
        sizes = self.entries.shape[1], self.masks.shape[1], len(self.rows), len(self.counts)
        return (*sizes, *(n for pair in flat for n in pair))

    def write(self, store: Store, at: Need) -> None:
        """Write it into an arena.

        Args:
            store: The arena's arrays.
            at: Where its room begins in each.
        """
        need = self.need
        for to, what, k in (
            (store.rows, self.rows, TILES),
            (store.starts, self.starts, TILES),
            (store.extents, self.extents, TILES),
            (store.counts, self.counts, SEGMENTS),
        ):
            to[at[k] : at[k] + need[k]] = what
        store.entries[:, at[ENTRIES] : at[ENTRIES] + need[ENTRIES]] = self.entries
        store.dense[:, at[DENSE] : at[DENSE] + need[DENSE]] = self.masks
        g = GROUPS
        for groups, pack in zip(store.groups, self.groups, strict=True):
            for to_group, rows in zip(groups, pack, strict=True):
                if rows is not None:
                    rows.write(to_group, at[g], at[g + 1], at[ENTRIES], at[DENSE])
                g += 2


@dataclass(frozen=True, slots=True)
class Piece:
    """What lies in one arena.

    Attributes:
        store: The arena's arrays.
        end: How far each is filled.
    """

    store: Store
    end: Need

    @property
    def rows(self) -> np.ndarray:
        """Tensor of each tile, as a row of the packs, int64 ``[T]``."""
        return self.store.rows[: self.end[TILES]]

    @property
    def end_entry(self) -> int:
        """Entries."""
        return self.end[ENTRIES]

    @property
    def end_dense(self) -> int:
        """Mask words."""
        return self.end[DENSE]


def make_part(
    view: StageView,
    raw: RawFrames,
    keep: np.ndarray,
    at: np.ndarray,
    segments: np.ndarray,
    planes: tuple[np.ndarray, np.ndarray],
    num_changed: int,
) -> Part:
    """Rows of the kept tiles of some frames.

    Args:
        view: The rank.
        raw: The frames.
        keep: bool ``[T]``, tiles that are kept.
        at: int64 ``[T]``, number of each tile among all tiles of all tensors.
        segments: int64 ``[S]``, numbers of the kept tiles' segments.
        planes: Their entries and masks.
        num_changed: Changed words that the rank holds.
    """
    words = view.words[raw.word_nbytes]
    kept = np.flatnonzero(keep)
    rows = view.row[raw.tensor_ids[kept]].astype(np.int64)
    starts, extents = (x[at[kept]][:, -words.num_axes :] for x in (view.starts, view.extents))
    tile = (np.cumsum(keep) - 1)[raw.segment_tile[segments]]
    counts, dense, size = raw.counts[segments], raw.dense[segments], raw.segments.words[segments]
    masked = bool(dense.any())
    entries = np.where(dense, 0, counts) if masked else counts
    entry_at = np.cumsum(entries) - entries
    masks = np.where(dense, size, 0) if masked else np.zeros_like(counts)
    dense_at = np.cumsum(masks) - masks if masked else masks
    table = np.empty((len(segments), 4), dtype=np.int32)
    table[:, 0] = np.where(dense, dense_at, entry_at) if masked else entry_at
    table[:, 1] = np.where(dense, -size, counts) if masked else counts
    table[:, 2] = tile
    table[:, 3] = raw.segments.base[segments]
    used = counts > 0
    if not used.all():
        table, entry_at, dense_at = table[used], entry_at[used], dense_at[used]
    head = np.empty((len(kept), view.tile_head + 2 * words.num_axes), dtype=np.int32)
    head[:, 2], head[:, 3] = rows, raw.tile_words[kept]
    head[:, view.tile_head :: 2], head[:, view.tile_head + 1 :: 2] = starts, extents
    groups = tuple(
        tuple(_rows(bounds, rows, head, table, (entry_at, dense_at), view.whole) for bounds in pack)
        for pack in words.groups
    )
    return Part(*planes, rows, starts, extents, counts.astype(np.int32), groups, num_changed)


def _rows(
    bounds: np.ndarray,
    rows: np.ndarray,
    head: np.ndarray,
    table: np.ndarray,
    first: tuple[np.ndarray, np.ndarray],
    whole: bool,
) -> Rows | None:
    """Rows of the tiles that meet a record group; None where none does and tiles may be left out."""
    low, high = bounds[0, rows], bounds[1, rows]
    has = low < high
    if not whole and not has.any():
        return None
    tiles = head.copy()
    tiles[:, 0], tiles[:, 1] = low, high
    if has.all():
        return Rows(tiles, table, *first)
    mine = has[table[:, 2]]
    chosen = table[mine]
    if not whole:
        chosen[:, 2] = (np.cumsum(has) - 1)[chosen[:, 2]]
        tiles = tiles[has]
    return Rows(tiles, chosen, first[0][mine], first[1][mine])
