"""Tables of the scatter made by the threads that decode: rows of tiles and segments, range by range.

The same tables as ``kernels.scatter_plan.plan_scatter`` makes in one go on one core; joining the pieces is all that is left
for the end of staging. Comes between ``scatter_stage`` and ``scatter_placed``. Must not import them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megasync.codecs.sparse_batch import RawFrames
from megasync.kernels.records import PackedRecords, RecordGroup
from megasync.kernels.scatter_plan import TILE_HEAD, ScatterLaunch, ScatterPlan, Tiles
from megasync.receiver.scatter_layout import DeviceLayout, packs_of


@dataclass(frozen=True, slots=True)
class Rows:
    """What one record group needs of a piece.

    Attributes:
        tiles: int32 ``[T, TILE_HEAD + 2 A]``, rows of the tile table.
        segments: int32 ``[S, 4]``, rows of the segment table; tile rows count from this piece.
        first_entry: int64 ``[S]``.
        first_dense: int64 ``[S]``.
    """

    tiles: np.ndarray
    segments: np.ndarray
    first_entry: np.ndarray
    first_dense: np.ndarray


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
        groups: By pack (in the order of ``packs_of``) and record group; None where no tile meets it.
    """

    rows: np.ndarray
    starts: np.ndarray
    extents: np.ndarray
    counts: np.ndarray
    end_entry: int
    end_dense: int
    groups: tuple[tuple[Rows | None, ...], ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the rows of all groups."""
        found = [r for pack in self.groups for r in pack if r is not None]
        return sum(r.tiles.nbytes + r.segments.nbytes for r in found)


def make_piece(
    layout: DeviceLayout,
    raw: RawFrames,
    keep: np.ndarray,
    at: np.ndarray,
    segments: np.ndarray,
    first_entry: int,
    first_dense: int,
) -> Piece:
    """Rows of the kept tiles of some frames.

    Args:
        layout: The rank.
        raw: The frames.
        keep: bool ``[T]``, tiles that were kept.
        at: int64 ``[T]``, number of each tile among all tiles of all tensors.
        segments: int64 ``[S]``, numbers of the kept tiles' segments.
        first_entry: Where their entries begin in the arena.
        first_dense: Where their masks begin.
    """
    words = layout.words[raw.word_nbytes]
    axes = words.places.num_axes
    kept = np.flatnonzero(keep)
    rows = layout.row[raw.tensor_ids[kept]].astype(np.int64)
    starts, extents = (x[at[kept]][:, -axes:] for x in layout.boxes)
    tile = np.searchsorted(kept, raw.segment_tile[segments])
    counts, dense, size = raw.counts[segments], raw.dense[segments], raw.segments.words[segments]
    entries, masks = np.where(dense, 0, counts), np.where(dense, size, 0)
    entry_at, dense_at = first_entry + np.cumsum(entries) - entries, first_dense + np.cumsum(masks) - masks
    table = np.empty((len(segments), 4), dtype=np.int32)
    table[:, 0] = np.where(dense, dense_at, entry_at)
    table[:, 1] = np.where(dense, -size, counts)
    table[:, 2] = tile
    table[:, 3] = raw.segments.base[segments]
    used = counts > 0
    if not used.all():
        table, entry_at, dense_at = table[used], entry_at[used], dense_at[used]
    head = np.empty((len(kept), TILE_HEAD + 2 * axes), dtype=np.int32)
    head[:, 2], head[:, 3] = rows, raw.tile_words[kept]
    head[:, TILE_HEAD::2], head[:, TILE_HEAD + 1 :: 2] = starts, extents
    whole = layout.device.type == "cpu"  # the kernels' reference numbers tiles by the planes, not by its table
    groups = tuple(
        tuple(_rows(group, rows, head, table, (entry_at, dense_at), whole) for group in pack.groups)
        for pack in packs_of(words)
    )
    end = first_entry + int(entries.sum()), first_dense + int(masks.sum())
    return Piece(rows, starts, extents, counts.astype(np.int32), *end, groups)


def _rows(
    group: RecordGroup,
    rows: np.ndarray,
    head: np.ndarray,
    table: np.ndarray,
    first: tuple[np.ndarray, np.ndarray],
    whole: bool,
) -> Rows | None:
    """Rows of the tiles that meet a record group; None where none does and tiles may be left out."""
    low, high = np.searchsorted(group.owners, rows, side="left"), np.searchsorted(group.owners, rows, side="right")
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


def join_pieces(pieces: Sequence[Piece], pack: int, records: PackedRecords) -> ScatterPlan | None:
    """The plan of all pieces of one arena through one pack.

    Args:
        pieces: In the order of their planes.
        pack: Number of the pack in the order of ``packs_of``.
        records: That pack.

    Returns:
        The plan, its tables on the pack's device, copied on the current stream; None where no tile meets the pack.
    """
    last = pieces[-1]
    launches = []
    for g, group in enumerate(records.groups):
        mine = [r for p in pieces if (r := p.groups[pack][g]) is not None]
        if any(len(r.segments) for r in mine):
            base = np.cumsum([0, *(len(r.tiles) for r in mine)]).tolist()
            segments = _joined([r.segments for r in mine], records.device)
            host = segments.numpy()
            stop = np.cumsum([0, *(len(r.segments) for r in mine)]).tolist()
            for i, b in enumerate(base[:-1]):
                host[stop[i] : stop[i + 1], 2] += b
            launches.append(
                ScatterLaunch(
                    group,
                    segments.to(records.device, non_blocking=True),
                    _joined([r.tiles for r in mine], records.device).to(records.device, non_blocking=True),
                    np.concatenate([*(r.first_entry for r in mine), [last.end_entry]]),
                    np.concatenate([*(r.first_dense for r in mine), [last.end_dense]]),
                )
            )
    if not launches:
        return None
    tiles = Tiles(
        np.concatenate([p.rows for p in pieces]),
        np.concatenate([p.starts for p in pieces]).astype(np.int64),
        np.concatenate([p.extents for p in pieces]).astype(np.int64),
    )
    counts = np.concatenate([p.counts for p in pieces])
    return ScatterPlan(records, tiles, counts, tuple(launches), last.end_entry, last.end_dense)


def _joined(parts: Sequence[np.ndarray], device: torch.device) -> torch.Tensor:
    """int32 arrays one after the other, in pinned memory where they go to a GPU."""
    shape = (sum(len(p) for p in parts), parts[0].shape[1])
    out = torch.empty(shape, dtype=torch.int32, pin_memory=device.type == "cuda")
    np.concatenate(parts, out=out.numpy())
    return out
