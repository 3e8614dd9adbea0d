"""From cells to units: which parts of which tiles each holder set holds, for a million tiles at once.

Second step of the ownership plan. The arithmetic is ``tiles.AxisCut`` over columns. Must not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megasync.schema import Schema
from megasync.trainer.plan_holdings import Holdings


@dataclass(frozen=True, slots=True)
class GridTable:
    """The grids of all tensors as columns, padded with leading axes of one tile.

    Attributes:
        kind: int64 ``[tensors]``, row of each tensor in the other columns; equal grids share one.
        band: int64 ``[kinds, D]``, words of a band along each axis.
        size: int64 ``[kinds, D]``, words of a piece.
        pieces: int64 ``[kinds, D]``, pieces of a band.
        num: int64 ``[kinds, D]``, tiles along the axis.
    """

    kind: np.ndarray
    band: np.ndarray
    size: np.ndarray
    pieces: np.ndarray
    num: np.ndarray

    @classmethod
    def of(cls, schema: Schema, num_axes: int) -> GridTable:
        """The table of a schema, padded to ``num_axes``; empty tensors get a row that nothing may look at."""
        # By identity: make_grid gives equal tensors one object, and hashing a grid costs more than all else here.
        rows: dict[int, int] = {}
        kind = np.array([rows.setdefault(id(grid), len(rows)) for grid in schema.grids], dtype=np.int64)
        columns = np.ones((4, len(rows), num_axes), dtype=np.int64)
        by_id = {id(grid): grid for grid in schema.grids}
        for key, row in rows.items():
            grid = by_id[key]
            for axis, cut in enumerate(grid.axes, start=num_axes - len(grid.axes)):
                if cut.extent:
                    columns[:, row, axis] = cut.band, cut.size, cut.pieces, cut.num
        return cls(kind, *columns)

    def cell_of(self, kinds: np.ndarray, axis: int, x: np.ndarray) -> np.ndarray:
        """Number of the cell along an axis that holds coordinate ``x`` (int64)."""
        band, rest = np.divmod(x, self.band[kinds, axis])
        return band * self.pieces[kinds, axis] + rest // self.size[kinds, axis]

    def span_of(self, kinds: np.ndarray, axis: int, cell: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """First word of cells along an axis and the word after the last (int64)."""
        band, piece = np.divmod(cell, self.pieces[kinds, axis])
        width, size = self.band[kinds, axis], self.size[kinds, axis]
        start = band * width + piece * size
        return start, start + np.minimum(size, width - piece * size)


@dataclass(frozen=True, slots=True)
class Parts:
    """Every meeting of a cell with a tile, in (tensor id, tile, holder set) order.

    Attributes:
        cells: uint32 ``[P]``, row of the cell.
        tiles: uint32 ``[P]``, tile number.
        words: int64 ``[P]``, words of the part.
        first: int64 ``[U]``, first part of each unit: the parts of one holder set in one tile follow each other.
    """

    cells: np.ndarray
    tiles: np.ndarray
    words: np.ndarray
    first: np.ndarray


def parts_of(grids: GridTable, cells: Holdings) -> Parts:
    """Cut every cell at the tile grid and put the parts of one holder set in one tile together.

    Args:
        grids: Of the cells' schema.
        cells: Disjoint, none empty, in tensor id order.

    Returns:
        The parts.
    """
    num_axes = cells.starts.shape[1]
    kinds = grids.kind[cells.tensor_ids]
    low = np.empty_like(cells.starts)
    count = np.empty_like(cells.starts)
    for axis in range(num_axes):
        low[:, axis] = grids.cell_of(kinds, axis, cells.starts[:, axis])
        count[:, axis] = grids.cell_of(kinds, axis, cells.starts[:, axis] + cells.extents[:, axis] - 1)
    count -= low - 1
    total = count.prod(axis=1)
    rows = np.repeat(np.arange(len(cells)), total)
    rest = np.arange(len(rows)) - np.repeat(np.cumsum(total) - total, total)
    tiles = np.zeros(len(rows), dtype=np.int64)
    words = np.ones(len(rows), dtype=np.int64)
    stride = np.ones(len(cells), dtype=np.int64)
    for axis in range(num_axes - 1, -1, -1):
        if (grids.num[kinds, axis] == 1).all():
            words *= cells.extents[rows, axis]
            continue
        if (count[:, axis] == 1).all():
            cell = low[rows, axis]
        else:
            rest, cell = np.divmod(rest, count[rows, axis])
            cell += low[rows, axis]
        tiles += cell * stride[rows]
        start, stop = grids.span_of(kinds[rows], axis, cell)
        begin = cells.starts[rows, axis]
        words *= np.minimum(stop, begin + cells.extents[rows, axis]) - np.maximum(start, begin)
        stride *= grids.num[kinds, axis]
    sets = cells.set_ids[rows].astype(np.int64)
    tensors = cells.tensor_ids[rows].astype(np.int64)
    keys = [sets, tiles, tensors]
    same_tile = (tensors[1:] == tensors[:-1]) & (tiles[1:] == tiles[:-1])
    if (same_tile & (sets[1:] < sets[:-1])).any() or ((tensors[1:] == tensors[:-1]) & (tiles[1:] < tiles[:-1])).any():
        order = np.lexsort(keys)
        rows, tiles, words, sets, tensors = rows[order], tiles[order], words[order], sets[order], tensors[order]
        same_tile = (tensors[1:] == tensors[:-1]) & (tiles[1:] == tiles[:-1])
    new = np.ones(len(rows), dtype=bool)
    new[1:] = ~(same_tile & (sets[1:] == sets[:-1]))
    return Parts(rows.astype(np.uint32), tiles.astype(np.uint32), words, np.flatnonzero(new))


def part_boxes(
    grids: GridTable, cells: Holdings, rows: np.ndarray, tiles: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Where parts lie.

    Args:
        grids: Of the cells' schema.
        cells: The cells.
        rows: Cell of each part, any integer dtype, ``[P]``.
        tiles: Tile of each part, ``[P]``.

    Returns:
        Starts and extents of the parts and starts of their tiles, in the tensor (int64 ``[P, D]``, padded), and whether
        the part is its whole tile (bool ``[P]``).
    """
    kinds = grids.kind[cells.tensor_ids[rows]]
    starts, extents, origins = np.empty((3, len(rows), cells.starts.shape[1]), dtype=np.int64)
    whole = np.ones(len(rows), dtype=bool)
    rest = tiles.astype(np.int64)
    for axis in range(starts.shape[1] - 1, -1, -1):
        rest, cell = np.divmod(rest, grids.num[kinds, axis])
        origins[:, axis], stop = grids.span_of(kinds, axis, cell)
        begin = cells.starts[rows, axis]
        starts[:, axis] = np.maximum(origins[:, axis], begin)
        extents[:, axis] = np.minimum(stop, begin + cells.extents[rows, axis]) - starts[:, axis]
        whole &= extents[:, axis] == stop - origins[:, axis]
    return starts, extents, origins, whole
