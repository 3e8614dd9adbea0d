"""From the planes of a device pass to frames: the same tiles, planes and bytes as the CPU path, without unpacking them.

Between the device's mask stage and gather; runs on the encoder's threads. The compaction gives planes in wire form for all
owned tiles of one word size; a frame is a slice of them. Only a codec other than ``sparse`` takes the words out. Must not
import torch, receiver or an adapter.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np

from megasync.codecs.base import EncodedFrame, FrameShape
from megasync.codecs.choice import AUTO, DENSE_DENSITY, encode_frame
from megasync.codecs.plane_batch import pack_all
from megasync.codecs.sparse import SparseCodec, counts_plane
from megasync.digest import MASK64, content_digest
from megasync.frames import MAX_FRAME_NBYTES, FrameRecord
from megasync.kernels.planes import is_dense
from megasync.schema import Schema, runs_of_equal
from megasync.types import SEGMENT_WORDS, Entries, Lanes
from megasync.versions.changes import CLOSE_ENTRIES
from megasync.versions.encode import EncodedDelta

_SPARSE = SparseCodec()
_NOTHING = np.empty(0, np.uint8)


@dataclass(frozen=True)
class TileTable:
    """Tiles of one compaction, in (tensor id, tile) order.

    Attributes:
        word_nbytes: Bytes of a word.
        tensor_ids: u32 ``[T]``, schema ids.
        tiles: u32 ``[T]``, tile numbers.
        tile_words: int64 ``[T]``, words of each whole tile.
    """

    word_nbytes: int
    tensor_ids: np.ndarray
    tiles: np.ndarray
    tile_words: np.ndarray

    @cached_property
    def first_segment(self) -> np.ndarray:
        """Segments before each tile, int64 ``[T + 1]``."""
        return np.append(0, np.cumsum(-(-self.tile_words // SEGMENT_WORDS)))

    @cached_property
    def segment_words(self) -> np.ndarray:
        """Words of each segment, int64 ``[S]``."""
        first = self.first_segment
        before = np.arange(first[-1]) - np.repeat(first[:-1], np.diff(first))
        return np.minimum(np.repeat(self.tile_words, np.diff(first)) - before * SEGMENT_WORDS, SEGMENT_WORDS)


class Strip:
    """Byte planes that came in parts, one after the other.

    Args:
        parts: uint8 ``[rows, n]`` each, rows contiguous, in order.
    """

    def __init__(self, parts: Iterable[np.ndarray]) -> None:
        self._parts = [p for p in parts if p.shape[1]]
        self._ends = list(accumulate(p.shape[1] for p in self._parts))

    def row(self, k: int, start: int, stop: int) -> list[np.ndarray]:
        """Bytes ``start`` to ``stop`` of plane ``k``: views, one for each part that they touch."""
        if len(self._parts) == 1:
            return [self._parts[0][k, start:stop]] if start < stop else []
        out: list[np.ndarray] = []
        i = bisect_right(self._ends, start)
        while start < stop:
            before = self._ends[i] - self._parts[i].shape[1]
            end = min(stop, self._ends[i])
            out.append(self._parts[i][k, start - before : end - before])
            start, i = end, i + 1
        return out


@dataclass(frozen=True)
class RawPlanes:
    """What one compaction of a pass brought to the host.

    Attributes:
        table: Its tiles.
        counts: int ``[S]``, changed words of every segment.
        entries: Rows gap low, gap high, value planes.
        dense: Rows of the mask planes of dense segments.
        lanes: int64 ``[num_tensors, 4]``: touched-old lanes a and b, then new minus old lanes a and b.
        lane_ids: Schema id of each row of ``lanes``, ascending.
    """

    table: TileTable
    counts: np.ndarray
    entries: Strip
    dense: Strip
    lanes: np.ndarray
    lane_ids: np.ndarray


class _Changed:
    """The changed tiles of one compaction, and where each lies in its planes.

    What frames ask for one by one is a list of plain numbers: picked out of arrays, they would take longer than compressing
    does, with the interpreter that the trainer launches its kernels from.
    """

    def __init__(self, raw: RawPlanes) -> None:
        self.raw = raw
        table, first = raw.table, raw.table.first_segment
        counts = raw.counts.astype(np.int64)
        dense = is_dense(counts, table.segment_words, table.word_nbytes)
        entries = np.append(0, np.cumsum(np.where(dense, 0, counts)))
        words = np.append(0, np.cumsum(np.where(dense, table.segment_words, 0)))
        total = np.append(0, np.cumsum(counts))
        per_tile = total[first[1:]] - total[first[:-1]]
        at = np.flatnonzero(per_tile)
        self.ids, self.tiles, self.words = table.tensor_ids[at], table.tiles[at], table.tile_words[at]
        self.num_changed = per_tile[at]
        # Tiles without changes have no entries: what a changed tile ends with, the next changed one begins with.
        self.entry: list[int] = np.append(entries[first[at]], entries[-1]).tolist()
        self.mask: list[int] = np.append(words[first[at]], words[-1]).tolist()
        num_segments = np.diff(first)[at]
        self.segment: list[int] = np.append(0, np.cumsum(num_segments)).tolist()
        counts = counts[np.repeat(per_tile > 0, np.diff(first))]
        self._counts = counts_plane(counts).reshape(4, -1)

    def counts(self, a: int, b: int) -> np.ndarray:
        """Bytes of the counts of changed tiles ``a`` to ``b``, uint8 ``[4, S]``."""
        return self._counts[:, self.segment[a] : self.segment[b]]

    def planes(self, a: int, b: int) -> list[list[np.ndarray]]:
        """Gap, value and dense planes of changed tiles ``a`` to ``b``, each in parts."""
        w, raw = self.raw.table.word_nbytes, self.raw
        e, m = (self.entry[a], self.entry[b]), (self.mask[a], self.mask[b])
        dense = [raw.dense.row(k, *m) for k in range(w)] if m[0] < m[1] else [[]] * w
        return [raw.entries.row(k, *e) for k in range(2 + w)] + dense


@dataclass(frozen=True)
class RawFrame:
    """One frame before its outer codec.

    Attributes:
        layer: Layer of all its tiles.
        word_nbytes: Bytes of a word.
        tensor_ids: u32 ``[T]``.
        tiles: u32 ``[T]``.
        tile_words: u32 ``[T]``.
        num_words: Words of all its tiles.
        num_changed: Changed words.
        runs: Where its planes are: changed tiles ``a`` to ``b`` of a compaction, in order.
    """

    layer: int
    word_nbytes: int
    tensor_ids: np.ndarray
    tiles: np.ndarray
    tile_words: np.ndarray
    num_words: int
    num_changed: int
    runs: tuple[tuple[_Changed, int, int], ...]

    def planes(self) -> list[np.ndarray]:
        """Raw planes in the order of the ``sparse`` codec, each contiguous."""
        counts = [c.counts(a, b) for c, a, b in self.runs]
        out = [(counts[0] if len(counts) == 1 else np.concatenate(counts, axis=1)).flatten()]
        parts = [c.planes(a, b) for c, a, b in self.runs]
        if len(parts) == 1:
            return out + [_joined(p) for p in parts[0]]
        return out + [_joined([x for p in parts for x in p[k]]) for k in range(len(parts[0]))]

    @property
    def is_sparse(self) -> bool:
        """Whether ``auto`` takes the ``sparse`` codec for it."""
        return self.num_changed < DENSE_DENSITY * self.num_words

    def entries(self) -> Entries:
        """The changed words themselves."""
        planes = self.planes()
        shape = FrameShape(self.word_nbytes, self.tensor_ids, self.tiles, self.tile_words, self.num_changed)
        return _SPARSE.decode(shape, memoryview(b"".join(p.data for p in planes)), [p.nbytes for p in planes])


def _joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else _NOTHING


def cut_bounds(group: np.ndarray, num_changed: np.ndarray, nbytes: np.ndarray) -> list[int]:
    """Where frames end: the rule of ``versions.changes.cut_frames``, over arrays.

    Args:
        group: int ``[T]``, what must be equal inside a frame (layer and word size).
        num_changed: int64 ``[T]``, changed words of each changed tile, in (tensor id, tile) order.
        nbytes: int64 ``[T]``, weights of each.

    Returns:
        First tile of each frame, then the number of tiles.
    """
    entries: list[int] = np.append(0, np.cumsum(num_changed)).tolist()
    weights: list[int] = np.append(0, np.cumsum(nbytes)).tolist()
    bounds, a = [0], 0
    for _, end in runs_of_equal(group):
        while a < end:
            full = bisect_left(entries, entries[a] + CLOSE_ENTRIES, a)
            heavy = bisect_right(weights, weights[a] + MAX_FRAME_NBYTES, a) - 1
            a = min(full, max(heavy, a + 1), end)
            bounds.append(a)
    return bounds


def cut(schema: Schema, raws: Sequence[RawPlanes]) -> list[RawFrame]:
    """Cut a pass into frames.

    Args:
        schema: The run's schema.
        raws: One for each compaction; no tile is in two of them.

    Returns:
        Frames in the order of the CPU path.
    """
    found = [_Changed(r) for r in raws]
    if not any(len(c.ids) for c in found):
        return []
    key = np.concatenate([(c.ids.astype(np.int64) << 32) | c.tiles for c in found])
    order = np.argsort(key, kind="stable")
    which = np.repeat(np.arange(len(found)), [len(c.ids) for c in found])[order]
    index = np.concatenate([np.arange(len(c.ids)) for c in found])[order]
    ids = np.concatenate([c.ids for c in found])[order]
    tiles = np.concatenate([c.tiles for c in found])[order]
    words = np.concatenate([c.words for c in found])[order]
    changed = np.concatenate([c.num_changed for c in found])[order]
    w = schema.word_nbytes[ids].astype(np.int64)
    group = (schema.layers[ids].astype(np.int64) << 8) | w
    bounds = cut_bounds(group, changed, words * w)
    first, sizes = bounds[:-1], words.astype(np.uint32)
    layers, widths = schema.layers[ids[first]].tolist(), w[first].tolist()
    num_words, num_changed = np.add.reduceat(words, first).tolist(), np.add.reduceat(changed, first).tolist()
    switches = np.append(0, np.cumsum(which[1:] != which[:-1])).tolist()
    owner, place = which.tolist(), index.tolist()
    out = []
    for i, (a, b) in enumerate(zip(first, bounds[1:], strict=True)):
        spans = [(0, b - a)] if switches[a] == switches[b - 1] else runs_of_equal(which[a:b])
        runs = tuple((found[owner[a + j]], place[a + j], place[a + k - 1] + 1) for j, k in spans)
        tables = ids[a:b], tiles[a:b], sizes[a:b]
        out.append(RawFrame(layers[i], widths[i], *tables, num_words[i], num_changed[i], runs))
    return out


def encode_raw(
    schema: Schema,
    raws: Sequence[RawPlanes],
    codec: str,
    algorithm: int,
    *,
    num_threads: int = 1,
    pool: Executor | None = None,
) -> EncodedDelta:
    """Frames and digest sums of a pass: what ``versions.encode.encode`` gives for its changed words.

    Args:
        schema: The run's schema.
        raws: One for each compaction.
        codec: Codec name or ``auto``.
        algorithm: Digest algorithm of the format.
        num_threads: Threads that pack planes of the ``sparse`` codec.
        pool: Shares frames of other codecs; None does them one by one here.
    """
    frames = cut(schema, raws)
    records: list[FrameRecord] = []
    parts: list[bytes] = []
    offset = 0
    for frame, encoded in zip(frames, _encoded(frames, codec, num_threads, pool), strict=True):
        sizes = encoded.plane_nbytes
        records.append(
            FrameRecord(
                0,
                offset,
                encoded.codec,
                frame.word_nbytes,
                frame.layer,
                frame.num_changed,
                sizes,
                content_digest(encoded.planes, algorithm),
                frame.tensor_ids,
                frame.tiles,
            )
        )
        parts += encoded.planes
        offset += sum(sizes)
    return EncodedDelta(tuple(records), tuple(parts), _touched(raws))


def _encoded(frames: Sequence[RawFrame], codec: str, num_threads: int, pool: Executor | None) -> list[EncodedFrame]:
    """Every frame through its outer codec."""
    sparse = [codec == _SPARSE.name or (codec == AUTO and f.is_sparse) for f in frames]
    planes = [f.planes() for f, direct in zip(frames, sparse, strict=True) if direct]
    packed = iter(pack_all([p for f in planes for p in f], num_threads))
    direct = iter([EncodedFrame(_SPARSE.id, tuple(next(packed) for _ in f)) for f in planes])
    others = [f for f, direct_ in zip(frames, sparse, strict=True) if not direct_]
    apply = map if pool is None else pool.map
    rest = iter(list(apply(lambda f: encode_frame(codec, f.entries()), others)))
    return [next(direct) if is_direct else next(rest) for is_direct in sparse]


def _touched(raws: Sequence[RawPlanes]) -> dict[int, tuple[Lanes, Lanes]]:
    """Digest sums by touched tensor: of new minus old, and of old at the changed words."""
    out: dict[int, tuple[Lanes, Lanes]] = {}
    for raw in raws:
        total = np.append(0, np.cumsum(raw.counts, dtype=np.int64))
        first = raw.table.first_segment
        changed = np.unique(raw.table.tensor_ids[total[first[1:]] > total[first[:-1]]])
        at = np.searchsorted(raw.lane_ids, changed)
        for tensor_id, (old_a, old_b, new_a, new_b) in zip(changed.tolist(), raw.lanes[at].tolist(), strict=True):
            change, old = Lanes(new_a & MASK64, new_b & MASK64), Lanes(old_a & MASK64, old_b & MASK64)
            if tensor_id in out:
                change, old = out[tensor_id][0] + change, out[tensor_id][1] + old
            out[tensor_id] = change, old
    return out
