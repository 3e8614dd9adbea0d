"""The ``sparse`` codec: (gap, value) pairs in byte planes; the default and the reason the pause is short.

A tile is walked row-major and cut in segments of 65,536 words. A frame's planes are: counts (u32 a segment, as four byte
planes in one: all lowest bytes, then all second ones, ...), gap low bytes, gap high bytes, value planes 0..w-1, dense
planes 0..w-1. A segment is dense exactly when ``count * (2 + w) >= words * w``: then it has no gaps and values but its
mask. See FORMAT.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megasync.codecs.base import Codec, EncodedFrame, FrameShape
from megasync.codecs.planes import pack, split_planes, unpack
from megasync.errors import FormatError
from megasync.types import SEGMENT_WORDS, WORD_DTYPES, Entries

_SHIFT = SEGMENT_WORDS.bit_length() - 1
_NAMES = ("low gap plane", "high gap plane", *(f"value plane {k}" for k in range(8)))


@dataclass(frozen=True, slots=True)
class Segments:
    """The segments of some tiles, in order.

    Attributes:
        first: int64 ``[T]``, number of each tile's first segment.
        words: int64 ``[S]``, words of each segment.
        base: int64 ``[S]``, first word of each segment in its tile.
    """

    first: np.ndarray
    words: np.ndarray
    base: np.ndarray

    @classmethod
    def of(cls, tile_words: np.ndarray) -> Segments:
        """Cut tiles of the given words (u32 ``[T]``)."""
        words = tile_words.astype(np.int64)
        num = (words + SEGMENT_WORDS - 1) >> _SHIFT
        first = np.cumsum(num) - num
        base = (np.arange(int(num.sum())) - np.repeat(first, num)) << _SHIFT
        return cls(first, np.minimum(np.repeat(words, num) - base, SEGMENT_WORDS), base)

    def dense(self, counts: np.ndarray, word_nbytes: int) -> np.ndarray:
        """Which segments are dense, bool ``[S]``, given their counts."""
        return counts * (2 + word_nbytes) >= self.words * word_nbytes


def counts_plane(counts: np.ndarray) -> np.ndarray:
    """The counts plane: u32 counts as byte planes, since three of four bytes are nearly always 0.

    Measured at a density of 0.001 %: half the bytes of u32 one after the other, and those were a quarter of a payload.

    Args:
        counts: Changed words of each segment, any integer dtype ``[S]``.

    Returns:
        uint8 ``[4 S]``.
    """
    return np.ascontiguousarray(counts.astype("<u4").view(np.uint8).reshape(-1, 4).T).reshape(-1)


def counts_of(plane: memoryview) -> np.ndarray:
    """Counts (int64 ``[S]``) of a raw counts plane of ``4 S`` bytes."""
    rows = np.frombuffer(plane, np.uint8).reshape(4, -1)
    return np.ascontiguousarray(rows.T).view("<u4").reshape(-1).astype(np.int64)


def raw_planes(entries: Entries) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Entries as raw byte planes, segment by segment.

    Args:
        entries: At least one changed word in each tile.

    Returns:
        Counts (int64 ``[S]``), entries (uint8 ``[2 + w, n]``: gap low, gap high, value planes) and the mask of the dense
        segments (uint8 ``[w, m]``).
    """
    w = entries.word_nbytes
    segments = Segments.of(entries.tile_words)
    # The low half of a position is its index in the segment, the high half the segment's number in the tile.
    inside, number = entries.positions.astype(np.uint16), (entries.positions >> _SHIFT).astype(np.uint16)
    stops = np.cumsum(entries.counts, dtype=np.int64)
    first = np.empty(len(inside), dtype=bool)  # of its segment
    np.not_equal(number[1:], number[:-1], out=first[1:])
    first[(stops - entries.counts)[entries.counts > 0]] = True
    start = first.nonzero()[0]
    segment = segments.first[np.searchsorted(stops, start, side="right")] + number[start]
    edges = np.append(start, len(inside))
    num = edges[1:] - edges[:-1]
    counts = np.zeros(len(segments.words), dtype=np.int64)
    counts[segment] = num
    dense = segments.dense(counts, w)
    values, dense_planes = entries.values, np.empty((w, 0), dtype=np.uint8)
    if dense.any():
        words = np.where(dense, segments.words, 0)
        chosen = np.repeat(dense[segment], num)
        mask = np.zeros(int(words.sum()), dtype=WORD_DTYPES[w])
        mask[np.repeat((np.cumsum(words) - words)[segment], num)[chosen] + inside[chosen]] = values[chosen]
        dense_planes = mask.view(np.uint8).reshape(-1, w).T
        inside, values, num = inside[~chosen], values[~chosen], num[~dense[segment]]
        start = np.cumsum(num) - num
    gap = inside.copy()
    gap[1:] -= inside[:-1]  # modulo 2^16: exact inside a segment
    gap -= 1
    gap[start] = inside[start]
    rows = np.empty((2 + w, len(gap)), dtype=np.uint8)
    np.copyto(rows[0], gap, casting="unsafe")  # a cast is several times faster than every second byte
    np.copyto(rows[1], gap >> 8, casting="unsafe")
    rows[2:] = np.ascontiguousarray(values, dtype=WORD_DTYPES[w]).view(np.uint8).reshape(-1, w).T
    return counts, rows, dense_planes


class SparseCodec(Codec):
    """See the module docstring."""

    id = 1
    name = "sparse"

    def encode(self, entries: Entries) -> EncodedFrame:
        """See ``Codec.encode``; one vectorised pass over the entries."""
        counts, rows, mask = raw_planes(entries)
        return EncodedFrame(self.id, tuple(pack(np.ascontiguousarray(p)) for p in (counts_plane(counts), *rows, *mask)))

    def decode(self, shape: FrameShape, stored: memoryview, plane_nbytes: Sequence[int]) -> Entries:
        """See ``Codec.decode``."""
        w = shape.word_nbytes
        planes = split_planes(stored, tuple(plane_nbytes), 3 + 2 * w)
        segments = Segments.of(shape.tile_words)
        counts = counts_of(unpack(planes[0], 4 * len(segments.words), "counts plane"))
        tile_counts = _check_counts(shape, segments, counts)
        dense = segments.dense(counts, w)
        n = int(counts[~dense].sum())
        low, high, *values = (unpack(p, n, _NAMES[k]) for k, p in enumerate(planes[1 : 3 + w]))
        masks: list[memoryview] = []
        if dense.any():
            total = int(segments.words[dense].sum())
            masks = [unpack(p, total, f"dense plane {k}") for k, p in enumerate(planes[3 + w :])]
        elif any(plane_nbytes[3 + w :]):
            raise FormatError("sparse frame: bytes in dense planes, but no segment is dense")
        rows = [np.frombuffer(p, np.uint8) for p in (low, high, *values)]
        position, value = positions_and_values(
            segments, counts, dense, rows, [np.frombuffer(p, np.uint8) for p in masks]
        )
        return Entries(w, shape.tensor_ids, shape.tiles, shape.tile_words, tile_counts, position, value)


def positions_and_values(
    segments: Segments, counts: np.ndarray, dense: np.ndarray, rows: Sequence[np.ndarray], masks: Sequence[np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """Changed words of some segments from their raw planes.

    Args:
        segments: The segments.
        counts: int64 ``[S]``, changed words of each.
        dense: bool ``[S]``, which of them are a mask.
        rows: ``[2 + w]``, uint8 ``[n]`` each: gap low, gap high and value planes of the segments that are not dense.
        masks: ``[w]``, uint8 ``[m]`` each: mask planes of those that are; not looked at where none is.

    Returns:
        Positions in the tile (u32) and values (``<u{w}``), in order.

    Raises:
        FormatError: A position past its segment, a value of 0, or a mask with another count.
    """
    position = _positions(rows[0], rows[1], np.where(dense, 0, counts), segments)
    values = _join(rows[2:])
    if not values.all():
        raise FormatError(f"sparse frame: {len(values) - np.count_nonzero(values)} values are 0; a value is never 0")
    if dense.any():
        position, values = _merge_dense(segments, counts, dense, position, values, _join(masks))
    return position.astype(np.uint32, copy=False), values


def _check_counts(shape: FrameShape, segments: Segments, counts: np.ndarray) -> np.ndarray:
    """Counts per tile (u32) after every check that counts alone allow."""
    if (counts > segments.words).any():
        at = int(np.argmax(counts > segments.words))
        raise FormatError(f"sparse frame: segment {at} counts {counts[at]} changed words of {segments.words[at]}")
    tile_counts = np.add.reduceat(counts, segments.first) if len(counts) else counts
    if int(counts.sum()) != shape.num_changed:
        raise FormatError(f"sparse frame: counts add up to {int(counts.sum())}, the record says {shape.num_changed}")
    if (tile_counts == 0).any():
        raise FormatError(f"sparse frame: tile {int(shape.tiles[int(np.argmin(tile_counts))])} is listed but unchanged")
    return tile_counts.astype(np.uint32)


def _positions(low: np.ndarray, high: np.ndarray, num: np.ndarray, segments: Segments) -> np.ndarray:
    """Word index in the tile of each entry (u32), from the gap planes; ``num`` entries a segment.

    All modulo 2^32: the steps of one sparse segment add up to less, whatever the gaps are, so its last index is exact.
    """
    reached = high.astype(np.uint32)
    reached <<= np.uint32(8)
    reached |= low
    reached += np.uint32(1)
    np.cumsum(reached, dtype=np.uint32, out=reached)
    used = np.flatnonzero(num)
    count = num[used]
    end = reached[np.cumsum(count) - 1]  # reached at the end of each segment that has entries
    before = np.concatenate((np.zeros(1, np.uint32), end[:-1]))
    past = end - before > segments.words[used].astype(np.uint32)
    if past.any():
        at = int(used[int(np.argmax(past))])
        raise FormatError(f"sparse frame: a position of segment {at} is past its {segments.words[at]} words")
    reached += np.repeat(segments.base[used].astype(np.uint32) - before - np.uint32(1), count)
    return reached


def _join(planes: Sequence[np.ndarray]) -> np.ndarray:
    """Words from their byte planes."""
    if len(planes) == 1:
        return planes[0]
    out = np.empty((len(planes[0]), len(planes)), dtype=np.uint8)
    for k, plane in enumerate(planes):
        out[:, k] = plane
    return out.reshape(-1).view(WORD_DTYPES[len(planes)])


def _merge_dense(
    segments: Segments,
    counts: np.ndarray,
    dense: np.ndarray,
    position: np.ndarray,
    values: np.ndarray,
    mask: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Entries of sparse and dense segments in one order."""
    words = np.where(dense, segments.words, 0)
    at = np.flatnonzero(mask)
    owner = np.searchsorted(np.cumsum(words), at, side="right")
    found = np.bincount(owner, minlength=len(counts))
    if (found[dense] != counts[dense]).any():
        bad = int(np.flatnonzero(dense & (found != counts))[0])
        raise FormatError(
            f"sparse frame: dense segment {bad} has {found[bad]} changed words, its count is {counts[bad]}"
        )
    is_dense = np.repeat(dense, counts)
    all_positions = np.empty(len(is_dense), dtype=np.int64)
    all_values = np.empty(len(is_dense), dtype=values.dtype)
    all_positions[is_dense] = at - (np.cumsum(words) - words)[owner] + segments.base[owner]
    all_values[is_dense] = mask[at]
    all_positions[~is_dense], all_values[~is_dense] = position, values
    return all_positions, all_values
