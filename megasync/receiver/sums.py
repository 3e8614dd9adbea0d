"""Digest sums of many changed words at once: weights in reused memory, sums by tensor.

The same sums as ``digest.WordWeights``, a few times faster: temporaries live in one workspace a thread, small enough
for a core's second-level cache, and every step writes in place. Used by the CPU backend; formula and constants are
digest.py's.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from megasync.digest import C, S, WordWeights
from megasync.types import Lanes

_U = np.uint64
_MASK64 = (1 << 64) - 1
_SEED = tuple(_U((s + 0x9E3779B97F4A7C15) & _MASK64) for s in S)  # splitmix64 adds its constant first
_MIX = (_U(0xBF58476D1CE4E5B9), _U(0x94D049BB133111EB))

# C of the word's 4-byte unit, already shifted to the word's place in it, by word number in a group of four units:
# products and shifts modulo 2^64 commute.
_PLACED: dict[int, tuple[np.ndarray, ...]] = {
    w: tuple(
        np.array([(lane[i * w // 4] << (8 * (i * w % 4))) & _MASK64 for i in range(16 // w)], dtype=np.uint64)
        for lane in C
    )
    for w in (1, 2, 4)
}

CHUNK = 1 << 15
"""Words handled at a time: six temporaries of 256 KiB, which stay in or near a core's second-level cache."""

_local = threading.local()


@dataclass(frozen=True, slots=True)
class Sums:
    """Digest sums of some tensors.

    Attributes:
        ids: int64 ``[K]``, tensor ids, in any order, one may come several times.
        lanes: uint64 ``[K, 2]``, both lanes modulo 2^64.
    """

    ids: np.ndarray
    lanes: np.ndarray

    @classmethod
    def join(cls, parts: Iterable[Sums]) -> Sums:
        """Several one after the other; ids may repeat."""
        found = list(parts)
        if not found:
            return cls(np.empty(0, np.int64), np.empty((0, 2), np.uint64))
        return cls(np.concatenate([p.ids for p in found]), np.concatenate([p.lanes for p in found]))

    def over(self, ids: np.ndarray) -> np.ndarray:
        """Totals of the tensors ``ids`` (ascending, uint64 ``[len(ids), 2]``); sums of other tensors are left out."""
        out = np.zeros((len(ids), 2), dtype=np.uint64)
        if len(ids) and len(self.ids):
            at = np.minimum(np.searchsorted(ids, self.ids), len(ids) - 1)
            mine = ids[at] == self.ids
            np.add.at(out, at[mine], self.lanes[mine])
        return out

    def of(self, tensor_id: int) -> Lanes:
        """Total of one tensor."""
        a, b = self.over(np.array([tensor_id]))[0]
        return Lanes(int(a), int(b))


class _Workspace:
    """Temporaries of one thread."""

    def __init__(self) -> None:
        self.group = np.empty(CHUNK, np.uint64)
        self.place = np.empty(CHUNK, np.intp)
        self.a = np.empty(CHUNK, np.uint64)
        self.b = np.empty(CHUNK, np.uint64)
        self.x = np.empty(CHUNK, np.uint64)
        self.value = np.empty(CHUNK, np.uint64)


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
        bounds: ``[G + 1]`` ascending from 0 to n: segment ``g`` is ``bounds[g]:bounds[g + 1]``, none empty.
        columns: Values, each ``<u{word_nbytes}`` ``[n]``.

    Returns:
        For each column uint64 ``[G, 2]``.
    """
    edges = np.asarray(bounds, dtype=np.int64)
    out = [np.zeros((len(edges) - 1, 2), dtype=np.uint64) for _ in columns]
    for lo in range(0, len(flat), CHUNK):
        hi = min(lo + CHUNK, len(flat))
        first = int(np.searchsorted(edges, lo, side="right")) - 1
        last = int(np.searchsorted(edges, hi, side="left"))
        inner = np.maximum(edges[first:last] - lo, 0)
        parts = [c[lo:hi] for c in columns]
        for total, sums in zip(out, _chunk_sums(flat[lo:hi], word_nbytes, inner, parts), strict=True):
            total[first:last] += sums
    return out


def _chunk_sums(flat: np.ndarray, w: int, starts: np.ndarray, columns: list[np.ndarray]) -> list[np.ndarray]:
    n = len(flat)
    if w == 8:
        weights = WordWeights.of(flat, 8)
        ends = [*starts[1:].tolist(), n]
        found = []
        for c in columns:
            pairs = [
                WordWeights(8, weights.a[i:j], weights.b[i:j]).lanes(c[i:j])
                for i, j in zip(starts.tolist(), ends, strict=True)
            ]
            found.append(np.array([(x.a, x.b) for x in pairs], dtype=np.uint64))
        return found
    ws = _workspace()
    a, b = _weights(ws, flat, w)
    value, x = ws.value[:n], ws.x[:n]
    out = []
    for c in columns:
        np.copyto(value, c)
        lanes = np.empty((len(starts), 2), dtype=np.uint64)
        for k, weight in enumerate((a, b)):
            np.multiply(value, weight, out=x)
            lanes[:, k] = np.add.reduceat(x, starts) if len(starts) > 1 else x.sum()
        out.append(lanes)
    return out


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
