"""The fixed canonical tile grid of a tensor: a pure function of shape, word size, block and cut axis.

The grid is part of the wire format (format 1): both ends compute it from the schema, nothing of it is sent. It never
depends on the trainer's topology. Must import nothing but types.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod

import numpy as np

from megasync.types import Box, CutAxis, TensorSpec

MIN_TILE_WORDS = 64 * 1024
MAX_TILE_WORDS = 1024 * 1024
MIN_BAND_NBYTES = 32
_BANDS = (8, 4, 2)


@dataclass(frozen=True, slots=True)
class AxisCut:
    """How one axis is cut: ``bands`` equal parts, each in pieces of ``size`` words, the last piece shorter."""

    extent: int
    bands: int
    size: int

    @property
    def band(self) -> int:
        """Words of one band along the axis."""
        return self.extent // self.bands

    @property
    def pieces(self) -> int:
        """Pieces of one band."""
        return -(-self.band // self.size)

    @property
    def num(self) -> int:
        """Tiles along the axis."""
        return self.bands * self.pieces

    def starts(self, index: np.ndarray) -> np.ndarray:
        """Start of the cells numbered ``index`` along the axis (int64)."""
        band, piece = np.divmod(index, self.pieces)
        return band * self.band + piece * self.size

    def extents(self, index: np.ndarray) -> np.ndarray:
        """Extent of the cells numbered ``index`` along the axis (int64)."""
        return np.minimum(self.size, self.band - (index % self.pieces) * self.size)

    def cell_of(self, x: int) -> int:
        """Number of the cell that holds coordinate ``x``."""
        band, rest = divmod(x, self.band)
        return band * self.pieces + rest // self.size


@dataclass(frozen=True, slots=True)
class TileGrid:
    """The grid of one tensor. Tiles are numbered row-major over the axes' cells.

    Attributes:
        shape: Extents in words; a scalar counts as ``(1,)``.
        axes: One cut per axis. Empty tensors have no tiles.
    """

    shape: tuple[int, ...]
    axes: tuple[AxisCut, ...]

    @property
    def num_tiles(self) -> int:
        """Tiles of the tensor; 0 for an empty one."""
        return prod(a.num for a in self.axes) if prod(self.shape) else 0

    def boxes(self, tiles: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Starts and extents of many tiles.

        Args:
            tiles: Tile numbers, any integer dtype, ``[T]``.

        Returns:
            Two int64 arrays ``[T, ndim]``: starts and extents, in words.

        Raises:
            IndexError: When a tile number is past the grid.
        """
        rest = np.asarray(tiles, dtype=np.int64)
        if rest.size and (int(rest.max()) >= self.num_tiles or int(rest.min()) < 0):
            raise IndexError(f"tile {int(rest.max())} of a grid of {self.num_tiles} tiles, shape {self.shape}")
        starts = np.empty((rest.size, len(self.axes)), dtype=np.int64)
        extents = np.empty_like(starts)
        for i in range(len(self.axes) - 1, -1, -1):
            rest, index = np.divmod(rest, self.axes[i].num)
            starts[:, i] = self.axes[i].starts(index)
            extents[:, i] = self.axes[i].extents(index)
        return starts, extents

    def box(self, tile: int) -> Box:
        """Where one tile lies."""
        starts, extents = self.boxes(np.array([tile]))
        return Box(tuple(int(x) for x in starts[0]), tuple(int(x) for x in extents[0]))

    def tile_words(self, tiles: np.ndarray) -> np.ndarray:
        """Words of each tile, u32 ``[T]``."""
        return self.boxes(tiles)[1].prod(axis=1).astype(np.uint32)

    def tiles_of(self, box: Box) -> np.ndarray:
        """Numbers of the tiles that a box meets, ascending, int64."""
        if not box.num_words or not self.num_tiles:
            return np.empty(0, dtype=np.int64)
        out = np.zeros(1, dtype=np.int64)
        for axis, start, extent in zip(self.axes, box.start, box.extent, strict=True):
            cells = np.arange(axis.cell_of(start), axis.cell_of(start + extent - 1) + 1, dtype=np.int64)
            out = (out[:, None] * axis.num + cells).ravel()
        return out

    def coordinates(self, tiles: np.ndarray, positions: np.ndarray) -> list[np.ndarray]:
        """Canonical coordinates of words given by tile and position in the tile.

        Args:
            tiles: Tile number of each word, ``[n]``, or one number for all.
            positions: Row-major word index inside the tile, ``[n]``.

        Returns:
            One int64 array ``[n]`` per axis.
        """
        tiles = np.atleast_1d(np.asarray(tiles, dtype=np.int64))
        starts, extents = self.boxes(tiles)
        return spread(starts, extents, positions)

    def flat_index(self, tiles: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Canonical row-major word index (int64 ``[n]``) of words given by tile and position in the tile."""
        coords = self.coordinates(tiles, positions)
        flat = coords[0]
        for extent, x in zip(self.shape[1:], coords[1:], strict=True):
            flat = flat * extent + x
        return flat

    def flat_words(self, tiles: np.ndarray, counts: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """``flat_index`` of the changed words of some tiles, several times faster.

        Args:
            tiles: Tile numbers, any integer dtype, ``[T]``.
            counts: Words of each of them, ``[T]``.
            positions: u32 ``[n]``, row-major word index inside the tile; ``n = counts.sum()``.

        Returns:
            int64 ``[n]``.
        """
        return _lines(self).at(tiles, counts, positions)


@dataclass(frozen=True, slots=True)
class Lines:
    """What takes a position in a tile to an index: ``start + sum((p // divisor) * factor)``.

    For the canonical row-major index, the coordinate of axis i is ``p // d[i] - (p // d[i - 1]) * e[i]`` with ``d[i]`` the
    words below it in the tile and ``e[i]`` its extent there, so neighbouring axes share their divisions; an axis that the
    tile does not cut adds none. Layouts that do not cut digits apart inside a tile have the same form.

    Attributes:
        start: int64 ``[num_tiles]``, index of the tile's first word.
        divisors: u32 ``[num_tiles]`` for each term.
        factors: int64 ``[num_tiles]`` for each term.
        same: For each term whether all tiles have the same one.
    """

    start: np.ndarray
    divisors: tuple[np.ndarray, ...]
    factors: tuple[np.ndarray, ...]
    same: tuple[bool, ...] = field(init=False)

    def __post_init__(self) -> None:
        terms = zip(self.divisors, self.factors, strict=True)
        same = tuple(not f.any() or bool((d == d[0]).all() and (f == f[0]).all()) for d, f in terms)
        object.__setattr__(self, "same", same)

    def at(
        self, tiles: np.ndarray, counts: np.ndarray, positions: np.ndarray, base: np.ndarray | int = 0
    ) -> np.ndarray:
        """Indices of words of some tiles.

        Args:
            tiles: Tile numbers, any integer dtype, ``[T]``.
            counts: Words of each of them, ``[T]``.
            positions: u32 ``[n]``, row-major word index inside the tile; ``n = counts.sum()``.
            base: Added to the indices of each tile: int64 ``[T]``, or one number.

        Returns:
            int64 ``[n]``.
        """
        start = self.start[tiles] + base
        out = np.repeat(start, counts) if len(tiles) > 1 else np.full(len(positions), start)
        for divisor, factor, same in zip(self.divisors, self.factors, self.same, strict=True):
            by, times = (divisor[:1], factor[:1]) if same else (divisor[tiles], factor[tiles])
            if not times.any():
                continue
            if same or bool((by == by[0]).all() and (times == times[0]).all()):
                # A division of 32-bit numbers by one number is what numpy vectorises best.
                term = positions if by[0] == 1 else positions // by[0]
                if times[0] != 1:
                    term = term.astype(np.int64)
                    term *= times[0]
            else:
                term = (positions // np.repeat(by, counts)).astype(np.int64)
                term *= np.repeat(times, counts)
            out += term
        return out


@lru_cache(maxsize=4_096)
def _lines(grid: TileGrid) -> Lines:
    starts, extents = grid.boxes(np.arange(grid.num_tiles))
    strides = [prod(grid.shape[i + 1 :]) for i in range(len(grid.shape))]
    start = starts @ np.array(strides, dtype=np.int64)
    divisors: list[np.ndarray] = []
    factors: list[np.ndarray] = []
    for i in range(len(strides) - 1):
        divisors.append(extents[:, i + 1 :].prod(axis=1).astype(np.uint32))
        factors.append(strides[i] - extents[:, i + 1] * strides[i + 1])
    ones = np.ones(grid.num_tiles, dtype=np.int64)
    return Lines(start, (*divisors, ones.astype(np.uint32)), (*factors, ones))


def spread(starts: np.ndarray, extents: np.ndarray, positions: np.ndarray) -> list[np.ndarray]:
    """Coordinates of row-major positions inside boxes.

    Args:
        starts: int64 ``[n, ndim]`` or ``[1, ndim]`` (one box for all).
        extents: Like ``starts``.
        positions: ``[n]`` integers, row-major inside their box.

    Returns:
        One int64 array ``[n]`` per axis.
    """
    rest = np.asarray(positions, dtype=np.int64)
    # One divisor for all is several times faster in numpy than a divisor per element, and it is the common case.
    same = len(extents) > 0 and bool((extents == extents[0]).all())
    out: list[np.ndarray] = [rest] * extents.shape[1]
    for i in range(extents.shape[1] - 1, 0, -1):
        quotient = rest // (int(extents[0, i]) if same else extents[:, i])
        out[i] = rest - quotient * (int(extents[0, i]) if same else extents[:, i]) + starts[:, i]
        rest = quotient
    out[0] = rest + starts[:, 0]
    return out


def tile_grid(spec: TensorSpec) -> TileGrid:
    """The grid of a tensor of the schema."""
    return make_grid(spec.shape, spec.word_nbytes, spec.cut, spec.block)


@lru_cache(maxsize=65_536)
def make_grid(shape: Sequence[int], word_nbytes: int, cut: CutAxis = "row", block: Sequence[int] = ()) -> TileGrid:
    """The grid of format 1.

    Args:
        shape: Extents in words.
        word_nbytes: Bytes of a word.
        cut: The axis that is cut in bands first: the first uncut axis (``row``) or the ``last``.
        block: Words per axis that a tile never splits; empty means 1 on every axis.

    Returns:
        The grid. Rules in ``docs`` of the format: (1) leading axes to 1 while what follows holds 64 Ki words,
        (2) bands of the cut axis, (3) halving in block multiples until a tile holds at most 1 Mi words.

    Raises:
        ValueError: When the block does not fit the shape.
    """
    extents = list(shape) or [1]
    blocks = list(block) or [1] * len(extents)
    if len(blocks) != len(extents) or min(blocks) < 1:
        raise ValueError(f"block {tuple(block)} does not fit shape {tuple(shape)}: one extent of at least 1 per axis")
    if prod(extents) == 0:
        return TileGrid(tuple(extents), tuple(AxisCut(e, 1, max(e, 1)) for e in extents))
    size = list(extents)
    row = 0
    while row < len(extents) - 2 and blocks[row] == 1 and prod(extents[row + 1 :]) >= MIN_TILE_WORDS:
        size[row] = 1
        row += 1
    axis = row if cut == "row" else len(extents) - 1
    bands = [1] * len(extents)
    for b in _BANDS:
        whole = extents[axis] % (b * blocks[axis]) == 0
        wide = cut == "row" or extents[axis] // b * word_nbytes >= MIN_BAND_NBYTES
        if whole and wide and prod(size) // b >= MIN_TILE_WORDS:
            bands[axis] = b
            size[axis] = extents[axis] // b
            break
    while prod(size) > MAX_TILE_WORDS:
        for i in range(row, len(extents)):
            if size[i] > blocks[i]:
                size[i] = blocks[i] * -(-size[i] // (2 * blocks[i]))
                break
        else:
            break  # one block is larger than a tile may be: it stays whole
    return TileGrid(tuple(extents), tuple(AxisCut(e, b, s) for e, b, s in zip(extents, bands, size, strict=True)))


def bounds_of(sizes: np.ndarray) -> np.ndarray:
    """Where stretches of so many elements begin, and the end of the last: int64 ``[n + 1]``.

    Cast first: numpy keeps the interpreter for as long as it adds what it casts by itself, and gives it up where it need not.
    """
    out = np.zeros(len(sizes) + 1, dtype=np.int64)
    np.cumsum(sizes.astype(np.int64), out=out[1:])
    return out


def stretch_of(bounds: np.ndarray) -> np.ndarray:
    """Number of the stretch that each element lies in, int64.

    Args:
        bounds: As for ``strides``, from 0.
    """
    out = np.empty(int(bounds[-1]), dtype=np.int64)
    for first, last in strides(bounds):
        out[bounds[first] : bounds[last]] = np.repeat(np.arange(first, last), np.diff(bounds[first : last + 1]))
    return out


def strides(bounds: np.ndarray, most: int = 1 << 15) -> Iterator[tuple[int, int]]:
    """Cut what lies in stretches in runs of whole ones.

    A manifest is read in the process of an engine that decodes. Steps over all of its tiles at once would keep the interpreter
    for longer than a token may wait, and leave the processor's cache.

    Args:
        bounds: Ascending, ``[n + 1]``: where each stretch begins, and the end.
        most: About so many elements to a run.

    Yields:
        First stretch and end of each run.
    """
    first, num = 0, len(bounds) - 1
    while first < num:
        last = int(np.searchsorted(bounds, bounds[first] + most, side="right")) - 1
        last = min(max(last, first + 1), num)
        yield first, last
        first = last
