"""Table rows of the scatter for one range of frames: which segment of which tile goes through which records.

The same tables as ``kernels.scatter_plan.plan_scatter`` makes in one go on one core; joining the pieces is all that is left
for the end of staging. Comes between ``scatter_keep`` and ``scatter_tables``. Must not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megasync.codecs.sparse_batch import RawFrames
from megasync.receiver.scatter_view import StageView


@dataclass(frozen=True, slots=True)
class Rows:
    """What one record group needs of a piece.

    Attributes:
        tiles: int32 ``[T, head + 2 A]``, rows of the tile table.
        segments: int32 ``[S, 4]``, rows of the segment table; tile rows count from this piece.
        first_entry: int64 ``[S]``.
        first_dense: int64 ``[S]``.
    """

    tiles: np.ndarray
    segments: np.ndarray
    first_entry: np.ndarray
    first_dense: np.ndarray

    def moved(self, entries: int, dense: int) -> Rows:
        """The same rows with their planes further on in the arena."""
        segments = self.segments.copy()
        segments[:, 0] += np.where(segments[:, 1] < 0, np.int32(dense), np.int32(entries))
        return Rows(self.tiles, segments, self.first_entry + entries, self.first_dense + dense)


@dataclass(frozen=True, slots=True)
class Piece:
    """Table rows of one range of frames.

    Attributes:
        rows: int64 ``[T]``, tensor of each kept tile, as a row of the packs.
        starts: int32 ``[T, A]``.
        extents: int32 ``[T, A]``.
        counts: int32 ``[S]``, changed words of all segments of the kept tiles.
        end_entry: Entries of the arena up to and with this piece.
        end_dense: The same of mask words.
        groups: By pack and record group; None where no tile meets it.
    """

    rows: np.ndarray
    starts: np.ndarray
    extents: np.ndarray
    counts: np.ndarray
    end_entry: int
    end_dense: int
    groups: tuple[tuple[Rows | None, ...], ...]

    def moved(self, entries: int, dense: int) -> Piece:
        """The same piece with its planes further on in the arena."""
        groups = tuple(tuple(None if r is None else r.moved(entries, dense) for r in pack) for pack in self.groups)
        return Piece(
            self.rows,
            self.starts,
            self.extents,
            self.counts,
            self.end_entry + entries,
            self.end_dense + dense,
            groups,
        )


def make_piece(view: StageView, raw: RawFrames, keep: np.ndarray, at: np.ndarray, segments: np.ndarray) -> Piece:
    """Rows of the kept tiles of some frames, their planes at the start of an arena.

    Args:
        view: The rank.
        raw: The frames.
        keep: bool ``[T]``, tiles that were kept.
        at: int64 ``[T]``, number of each tile among all tiles of all tensors.
        segments: int64 ``[S]``, numbers of the kept tiles' segments.
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
    return Piece(rows, starts, extents, counts.astype(np.int32), int(entries.sum()), int(masks.sum()), groups)


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
