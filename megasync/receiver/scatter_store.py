"""The arrays of an arena: planes and table rows of one word size, side by side in one piece of memory.

Every array is filled from its start, by as many threads and processes as there are: whoever has something for them reserves a
stretch of each at once, so that nothing has to be put together at the end, and all arrays are in the same order. The memory
may be mapped by several processes; each carves the same arrays out of it. Comes before ``scatter_rows``. Must not import
torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np

from megasync.receiver.scatter_view import StageView
from megasync.types import SEGMENT_WORDS

ENTRIES, DENSE, TILES, SEGMENTS, GROUPS = range(5)
"""Places in a `Need`: entries, mask words, tiles, segments, then tiles and segments of each record group of each pack."""

Need = tuple[int, ...]
"""How much of each array something takes, or how far each is filled."""

_ALIGN = 4096  # a page, so that rows of planes are copied at full speed


@dataclass(frozen=True)
class StoreShape:
    """Sizes of the arrays of an arena.

    Attributes:
        word_nbytes: Word size.
        num_axes: Axes of the kernels' tables.
        tile_head: Columns of a tile's row before its axes.
        packs: Record groups of each pack.
        room: How much of each array there is.
    """

    word_nbytes: int
    num_axes: int
    tile_head: int
    packs: tuple[int, ...]
    room: Need

    @classmethod
    def of(cls, view: StageView, word_nbytes: int, room: Need) -> StoreShape:
        """The shape for a rank's tensors of a word size."""
        words = view.words[word_nbytes]
        return cls(word_nbytes, words.num_axes, view.tile_head, tuple(len(p) for p in words.groups), room)

    def with_room(self, room: Sequence[int]) -> StoreShape:
        """The same arrays with other sizes."""
        return StoreShape(self.word_nbytes, self.num_axes, self.tile_head, self.packs, tuple(room))

    def fits(self, need: Sequence[int]) -> bool:
        """Whether this much is there."""
        return len(need) == len(self.room) and all(a <= b for a, b in zip(need, self.room, strict=True))

    @cached_property
    def arrays(self) -> list[tuple[type[np.generic], tuple[int, ...]]]:
        """Type and shape of every array, in order."""
        w, axes, room = self.word_nbytes, self.num_axes, self.room
        out: list[tuple[type[np.generic], tuple[int, ...]]] = [
            (np.uint8, (2 + w, room[ENTRIES])),
            (np.uint8, (w, room[DENSE])),
            (np.int64, (room[TILES],)),
            (np.int64, (room[TILES], axes)),
            (np.int64, (room[TILES], axes)),
            (np.int32, (room[SEGMENTS],)),
        ]
        for g in range(sum(self.packs)):
            tiles, segments = room[GROUPS + 2 * g], room[GROUPS + 2 * g + 1]
            out += [
                (np.int32, (tiles, self.tile_head + 2 * axes)),
                (np.int32, (segments, 4)),
                (np.int64, (segments + 1,)),
                (np.int64, (segments + 1,)),
            ]
        return out

    @cached_property
    def places(self) -> list[int]:
        """Where every array begins, in bytes, and the end of the last."""
        sizes = [-(-prod(s) * np.dtype(t).itemsize // _ALIGN) * _ALIGN for t, s in self.arrays]
        return [0, *np.cumsum(sizes).tolist()]

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return self.places[-1]


@dataclass(frozen=True, slots=True)
class GroupStore:
    """Table rows of one record group.

    Attributes:
        tiles: int32 ``[T, head + 2 A]``, rows of the tile table.
        segments: int32 ``[S, 4]``, rows of the segment table.
        first_entry: int64 ``[S + 1]``, entries before each segment.
        first_dense: int64 ``[S + 1]``, the same of mask words.
    """

    tiles: np.ndarray
    segments: np.ndarray
    first_entry: np.ndarray
    first_dense: np.ndarray


@dataclass(frozen=True, slots=True)
class Store:
    """The arrays of an arena.

    Attributes:
        shape: Their sizes.
        entries: uint8 ``[2 + w, n]``, entries of the sparse segments.
        dense: uint8 ``[w, m]``, masks of the dense segments.
        rows: int64 ``[T]``, tensor of each tile, as a row of the packs.
        starts: int64 ``[T, A]``.
        extents: int64 ``[T, A]``.
        counts: int32 ``[S]``, changed words of all segments of all tiles.
        groups: By pack and record group.
    """

    shape: StoreShape
    entries: np.ndarray
    dense: np.ndarray
    rows: np.ndarray
    starts: np.ndarray
    extents: np.ndarray
    counts: np.ndarray
    groups: tuple[tuple[GroupStore, ...], ...]

    @classmethod
    def over(cls, memory: np.ndarray, shape: StoreShape) -> Store:
        """The arrays in some memory.

        Args:
            memory: uint8, at least ``shape.nbytes``.
            shape: Their sizes.
        """
        found: list[np.ndarray] = []
        for (kind, dims), begin in zip(shape.arrays, shape.places, strict=False):
            nbytes = prod(dims) * np.dtype(kind).itemsize
            found.append(memory[begin : begin + nbytes].view(kind).reshape(dims))
        flat = [GroupStore(*found[i : i + 4]) for i in range(6, len(found), 4)]
        stops = np.cumsum([0, *shape.packs]).tolist()
        groups = tuple(tuple(flat[a:b]) for a, b in zip(stops[:-1], stops[1:], strict=True))
        entries, dense, rows, starts, extents, counts = found[:6]
        return cls(shape, entries, dense, rows, starts, extents, counts, groups)


def full_room(view: StageView, word_nbytes: int, sizes: np.ndarray) -> Need:
    """Tiles and segments of everything that a rank holds of a word size, and no entries: what the tables of one version do
    not pass, but where several frames list the same tiles.

    Args:
        view: The rank.
        word_nbytes: The word size.
        sizes: Word size of every tensor.
    """
    words, num = view.words[word_nbytes], np.diff(view.first_tile)
    mine = view.keep & np.repeat(sizes == word_nbytes, num)
    row, tile_words = np.repeat(view.row, num)[mine], view.tile_words[mine].astype(np.int64)
    segments = (tile_words + SEGMENT_WORDS - 1) // SEGMENT_WORDS
    out = [0, 0, len(row), int(segments.sum())]
    for pack in words.groups:
        for bounds in pack:
            has = (bounds[0] < bounds[1])[row]
            out += [len(row) if view.whole else int(has.sum()), int(segments[has].sum())]
    return tuple(out)
