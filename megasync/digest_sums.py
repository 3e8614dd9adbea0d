"""Digest sums of many changed words at once: weights in reused memory, sums by segment.

The same sums as ``digest.WordWeights``, several times faster: temporaries live in one workspace a thread, small enough for
a core's second-level cache, and every step writes in place. Used by mask, by the receiver and by the tools; formula and
constants are digest.py's. Must import nothing above digest.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np

from megasync.digest import C, S
from megasync.types import Lanes

_U = np.uint64
_MASK64 = (1 << 64) - 1
_SEED = tuple(_U((s + 0x9E3779B97F4A7C15) & _MASK64) for s in S)  # splitmix64 adds its constant first
_MIX = (_U(0xBF58476D1CE4E5B9), _U(0x94D049BB133111EB))

# C of the word's 4-byte unit, already shifted to the word's place in it, by word number in a group of four units: products
# and shifts modulo 2^64 commute.
_PLACED: dict[int, tuple[np.ndarray, ...]] = {
    w: tuple(
        np.array([(lane[i * w // 4] << (8 * (i * w % 4))) & _MASK64 for i in range(16 // w)], dtype=np.uint64)
        for lane in C
    )
    for w in (1, 2, 4)
}

CHUNK = 1 << 15
"""Words handled at a time, a frame's worth and more: six temporaries of 256 KiB, in or near the second-level cache."""

_local = threading.local()


class _Workspace:
    """Temporaries of one thread."""

    def __init__(self) -> None:
        self.group, self.a, self.b, self.x, self.value = (np.empty(CHUNK, np.uint64) for _ in range(5))
        self.place = np.empty(CHUNK, np.intp)


def _workspace() -> _Workspace:
    found: _Workspace | None = getattr(_local, "workspace", None)
    if found is None:
        found = _local.workspace = _Workspace()
    return found


def sums_by_segment(
    flat: np.ndarray, word_nbytes: int, bounds: Sequence[int] | np.ndarray, columns: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """Digest sums of words at given canonical positions, by segment, for several sets of values at once.

    Args:
        flat: int64 ``[n]``, word numbers in the canonical tensor.
        word_nbytes: 1, 2, 4 or 8.
        bounds: ``[G + 1]`` ascending from 0 to n: segment ``g`` is ``bounds[g]:bounds[g + 1]``; the sum of an empty one is 0.
        columns: Values, each ``<u{word_nbytes}`` ``[n]``.

    Returns:
        For each column uint64 ``[G, 2]``.
    """
    edges = np.asarray(bounds, dtype=np.int64)
    if word_nbytes == 8:
        # Two 4-byte units a word, one after the other.
        flat = (2 * flat[:, None] + np.arange(2)).reshape(-1)
        columns = [np.ascontiguousarray(c).view("<u4") for c in columns]
        edges, word_nbytes = 2 * edges, 4
    # ``np.add.reduceat`` gives the next segment's first word for an empty one (a tensor of an anchor that is all zero).
    filled = np.flatnonzero(edges[1:] > edges[:-1])
    if len(filled) < len(edges) - 1:
        out = [np.zeros((len(edges) - 1, 2), dtype=np.uint64) for _ in columns]
        for total, sums in zip(
            out, _sums(flat, word_nbytes, np.append(edges[filled], len(flat)), columns), strict=True
        ):
            total[filled] = sums
        return out
    return _sums(flat, word_nbytes, edges, columns)


def _sums(flat: np.ndarray, word_nbytes: int, edges: np.ndarray, columns: Sequence[np.ndarray]) -> list[np.ndarray]:
    """As ``sums_by_segment``, of words of 4 bytes at most, no segment empty."""
    out = [np.zeros((len(edges) - 1, 2), dtype=np.uint64) for _ in columns]
    ws = _workspace()
    for lo in range(0, len(flat), CHUNK):
        hi = min(lo + CHUNK, len(flat))
        first = int(np.searchsorted(edges, lo, side="right")) - 1
        last = int(np.searchsorted(edges, hi, side="left"))
        starts = np.maximum(edges[first:last] - lo, 0)
        weights = _weights(ws, flat[lo:hi], word_nbytes)
        value, x = ws.value[: hi - lo], ws.x[: hi - lo]
        for total, column in zip(out, columns, strict=True):
            np.copyto(value, column[lo:hi])
            for lane, weight in enumerate(weights):
                np.multiply(value, weight, out=x)
                total[first:last, lane] += np.add.reduceat(x, starts) if len(starts) > 1 else x.sum()
    return out


def lanes_of(sums: np.ndarray) -> list[Lanes]:
    """Rows of sums (uint64 ``[G, 2]``) as lanes."""
    return [Lanes(a, b) for a, b in sums.tolist()]


def _weights(ws: _Workspace, flat: np.ndarray, w: int) -> tuple[np.ndarray, np.ndarray]:
    """Weights of both lanes, valid until the next call."""
    n = len(flat)
    in_group = 16 // w
    group, place, x = ws.group[:n], ws.place[:n], ws.x[:n]
    np.right_shift(flat.view(np.uint64), _U(in_group.bit_length() - 1), out=group)
    np.bitwise_and(flat, in_group - 1, out=place)
    for lane, out in ((0, ws.a[:n]), (1, ws.b[:n])):
        np.add(group, _SEED[lane], out=out)
        np.right_shift(out, _U(30), out=x)
        np.bitwise_xor(out, x, out=out)
        np.multiply(out, _MIX[0], out=out)
        np.right_shift(out, _U(27), out=x)
        np.bitwise_xor(out, x, out=out)
        np.multiply(out, _MIX[1], out=out)
        np.right_shift(out, _U(31), out=x)
        np.bitwise_xor(out, x, out=out)
        np.bitwise_or(out, _U(1), out=out)
        np.take(_PLACED[w][lane], place, out=x, mode="clip")  # in range by the mask above; "clip" writes in place
        np.multiply(out, x, out=out)
    return ws.a[:n], ws.b[:n]
