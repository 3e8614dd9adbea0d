"""From the planes of a device pass to frames: the same tiles, planes and bytes as the CPU path, without unpacking them.

Between the device's mask stage and gather; runs on the encoder's threads. The compaction gives planes in wire form for all
owned tiles of one word size; a frame is a slice of them. Only a codec other than ``sparse`` takes the words out. Must not
import torch, receiver or an adapter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

import numpy as np

from megasync.codecs.base import EncodedFrame, FrameShape
from megasync.codecs.choice import AUTO, DENSE_DENSITY, encode_frame
from megasync.codecs.planes import pack
from megasync.codecs.sparse import SparseCodec, counts_plane
from megasync.digest import MASK64, content_digest
from megasync.frames import MAX_FRAME_NBYTES, FrameRecord
from megasync.kernels.planes import is_dense
from megasync.schema import Schema, runs_of_equal
from megasync.types import SEGMENT_WORDS, Entries, Lanes
from megasync.versions.changes import CLOSE_ENTRIES
from megasync.versions.encode import EncodedDelta

_SPARSE = SparseCodec()


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

    @property
    def first_segment(self) -> np.ndarray:
        """Segments before each tile, int64 ``[T + 1]``."""
        return np.append(0, np.cumsum(-(-self.tile_words // SEGMENT_WORDS)))

    @property
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
        self._ends = np.cumsum([p.shape[1] for p in self._parts], dtype=np.int64)

    def row(self, k: int, start: int, stop: int) -> list[np.ndarray]:
        """Bytes ``start`` to ``stop`` of plane ``k``: views, one for each part that they touch."""
        out: list[np.ndarray] = []
        i = int(np.searchsorted(self._ends, start, side="right"))
        while start < stop:
            before = int(self._ends[i]) - self._parts[i].shape[1]
            end = min(stop, int(self._ends[i]))
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
        lane_ids: Schema id of each row of ``lanes``.
    """

    table: TileTable
    counts: np.ndarray
    entries: Strip
    dense: Strip
    lanes: np.ndarray
    lane_ids: np.ndarray


class _Changed:
    """The changed tiles of one compaction, and where each lies in its planes."""

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
        self.entry = np.append(entries[first[at]], entries[-1])
        self.mask = np.append(words[first[at]], words[-1])
        num_segments = np.diff(first)[at]
        self.segment = np.append(0, np.cumsum(num_segments))
        self.counts = counts[np.repeat(per_tile > 0, np.diff(first))]

    def planes(self, a: int, b: int) -> list[list[np.ndarray]]:
        """Gap, value and dense planes of changed tiles ``a`` to ``b``, each in parts."""
        w, raw = self.raw.table.word_nbytes, self.raw
        e, m = (int(self.entry[a]), int(self.entry[b])), (int(self.mask[a]), int(self.mask[b]))
        return [raw.entries.row(k, *e) for k in range(2 + w)] + [raw.dense.row(k, *m) for k in range(w)]


@dataclass(frozen=True)
class RawFrame:
    """One frame before its outer codec.

    Attributes:
        layer: Layer of all its tiles.
        word_nbytes: Bytes of a word.
        tensor_ids: u32 ``[T]``.
        tiles: u32 ``[T]``.
        tile_words: u32 ``[T]``.
        num_changed: Changed words.
        runs: Where its planes are: changed tiles ``a`` to ``b`` of a compaction, in order.
    """

    layer: int
    word_nbytes: int
    tensor_ids: np.ndarray
    tiles: np.ndarray
    tile_words: np.ndarray
    num_changed: int
    runs: tuple[tuple[_Changed, int, int], ...]

    def planes(self) -> list[np.ndarray]:
        """Raw planes in the order of the ``sparse`` codec, each contiguous."""
        counts = [c.counts[c.segment[a] : c.segment[b]] for c, a, b in self.runs]
        out = [counts_plane(_joined(counts))]
        parts = [c.planes(a, b) for c, a, b in self.runs]
        return out + [_joined([x for p in parts for x in p[k]]) for k in range(len(parts[0]))]

    def entries(self) -> Entries:
        """The changed words themselves."""
        planes = self.planes()
        shape = FrameShape(self.word_nbytes, self.tensor_ids, self.tiles, self.tile_words, self.num_changed)
        return _SPARSE.decode(shape, memoryview(b"".join(p.data for p in planes)), [p.nbytes for p in planes])


def _joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else np.empty(0, np.uint8)


def cut_bounds(group: np.ndarray, num_changed: np.ndarray, nbytes: np.ndarray) -> list[int]:
    """Where frames end: the rule of ``versions.changes.cut_frames``, over arrays.

    Args:
        group: int ``[T]``, what must be equal inside a frame (layer and word size).
        num_changed: int64 ``[T]``, changed words of each changed tile, in (tensor id, tile) order.
        nbytes: int64 ``[T]``, weights of each.

    Returns:
        First tile of each frame, then the number of tiles.
    """
    entries = np.append(0, np.cumsum(num_changed))
    weights = np.append(0, np.cumsum(nbytes))
    ends = np.array([b for _, b in runs_of_equal(group)], dtype=np.int64)
    bounds, a = [0], 0
    while a < len(group):
        full = int(np.searchsorted(entries, entries[a] + CLOSE_ENTRIES, side="left"))
        heavy = int(np.searchsorted(weights, weights[a] + MAX_FRAME_NBYTES, side="right")) - 1
        a = min(full, max(heavy, a + 1), int(ends[np.searchsorted(ends, a, side="right")]))
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
    out = []
    for a, b in zip(bounds[:-1], bounds[1:], strict=True):
        runs = tuple(
            (found[which[a + i]], int(index[a + i]), int(index[a + j - 1]) + 1) for i, j in runs_of_equal(which[a:b])
        )
        sizes = words[a:b].astype(np.uint32)
        layer = int(schema.layers[ids[a]])
        out.append(RawFrame(layer, int(w[a]), ids[a:b], tiles[a:b], sizes, int(changed[a:b].sum()), runs))
    return out


def encode_raw(
    schema: Schema, raws: Sequence[RawPlanes], codec: str, algorithm: int, pool: Executor | None = None
) -> EncodedDelta:
    """Frames and digest sums of a pass: what ``versions.encode.encode`` gives for its changed words.

    Args:
        schema: The run's schema.
        raws: One for each compaction.
        codec: Codec name or ``auto``.
        algorithm: Digest algorithm of the format.
        pool: Threads to share the frames; None does them one by one here.
    """
    frames = cut(schema, raws)

    def one(frame: RawFrame) -> tuple[EncodedFrame, bytes]:
        encoded = _encode(frame, codec)
        return encoded, content_digest(encoded.planes, algorithm)

    apply: Callable[..., Iterator[tuple[EncodedFrame, bytes]]] = map if pool is None else pool.map
    records: list[FrameRecord] = []
    parts: list[bytes] = []
    offset = 0
    for frame, (encoded, digest) in zip(frames, apply(one, frames), strict=True):
        records.append(
            FrameRecord(
                0,
                offset,
                encoded.codec,
                frame.word_nbytes,
                frame.layer,
                frame.num_changed,
                encoded.plane_nbytes,
                digest,
                frame.tensor_ids,
                frame.tiles,
            )
        )
        parts += encoded.planes
        offset += encoded.nbytes
    return EncodedDelta(tuple(records), tuple(parts), _touched(raws, frames))


def _encode(frame: RawFrame, codec: str) -> EncodedFrame:
    few = frame.num_changed < DENSE_DENSITY * int(frame.tile_words.sum(dtype=np.int64))
    if codec == _SPARSE.name or (codec == AUTO and few):
        return EncodedFrame(_SPARSE.id, tuple(pack(p) for p in frame.planes()))
    return encode_frame(codec, frame.entries())


def _touched(raws: Sequence[RawPlanes], frames: Sequence[RawFrame]) -> dict[int, tuple[Lanes, Lanes]]:
    """Digest sums by touched tensor: of new minus old, and of old at the changed words."""
    changed = {int(i) for f in frames for i in np.unique(f.tensor_ids)}
    out: dict[int, tuple[Lanes, Lanes]] = {}
    for raw in raws:
        for tensor_id, row in zip(raw.lane_ids.tolist(), raw.lanes.tolist(), strict=True):
            if tensor_id in changed:
                old_a, old_b, new_a, new_b = (x & MASK64 for x in row)
                change, old = out.get(tensor_id, (Lanes(), Lanes()))
                out[tensor_id] = change + Lanes(new_a, new_b), old + Lanes(old_a, old_b)
    return out
