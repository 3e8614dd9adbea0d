"""Straight tiles: those inside which a layout is a few divisions of the position, without coordinates and bounds.

Nearly every tile of every layout is: it lies inside the record's box, and the digits of the layout divide it. Made once
for a kind, used by ``place``. Must import nothing above tiles and layout.
"""

from __future__ import annotations

import numpy as np

from megasync.layout.modes import Remap
from megasync.tiles import Lines

_MAX_DIVISOR = (1 << 32) - 1


def lines_of(record: Remap, starts: np.ndarray, extents: np.ndarray) -> tuple[Lines, np.ndarray]:
    """A record as lines over positions in tiles.

    In a tile that begins at local coordinate ``c`` of an axis and is ``e`` long there, the axis' coordinate is ``c + q``
    with ``q = p // below - (p // (below * e)) * e``. A term ``(c + q) // d`` of the layout (``Remap.terms``) is ``c // d``
    where all of the tile is in one block of ``d``, and ``c // d + q // d`` where ``d`` divides ``c``; and ``q // d`` is
    ``p // (below * d) - (p // (below * e)) * (e // d)`` where ``d`` divides ``e``, or the axis is the first.

    Args:
        record: The record.
        starts: int64 ``[num_tiles, ndim]``, where the tiles begin, in words.
        extents: int64 ``[num_tiles, ndim]``, how large they are.

    Returns:
        The lines, whose indices are the record's offsets in words, and bool ``[num_tiles]``: in which tiles they hold.
    """
    below = np.ones_like(extents)
    below[:, :-1] = np.cumprod(extents[:, :0:-1], axis=1)[:, ::-1]
    straight = ((starts >= record.start) & (starts + extents <= record.stop)).all(axis=1) & (record.unit == "word")
    start = np.full(len(starts), record.base, dtype=np.int64)
    factors: dict[tuple[int, int], np.ndarray | int] = {}
    for group, d, factor in record.terms():
        axes = list(record.merge[group])
        first, last = axes[0], axes[-1]
        # Joined axes are one axis where the tile has all of them but the first whole.
        straight &= (extents[:, axes[1:]] == [record.local_shape[a] for a in axes[1:]]).all(axis=1)
        c = (starts[:, axes] - [record.origin[a] for a in axes]) @ np.array(record.group_strides(group))
        e = extents[:, axes].prod(axis=1)
        one = c // d == (c + e - 1) // d
        straight &= one | ((c % d == 0) & ((e % d == 0) | (first == 0)))
        start += c // d * factor
        factors[last, d] = factors.get((last, d), 0) + np.where(one, 0, factor)
        if first:
            factors[first - 1, 1] = factors.get((first - 1, 1), 0) - np.where(one, 0, e // d * factor)
    divisors = [np.clip(below[:, axis] * d, 1, _MAX_DIVISOR).astype(np.uint32) for axis, d in factors]
    return Lines(start, tuple(divisors), tuple(np.asarray(f) for f in factors.values())), straight
