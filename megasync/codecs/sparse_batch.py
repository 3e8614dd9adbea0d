"""Sparse frames decoded many at a time: without a Python step a plane, and with long steps where frames are short.

``SparseCodec.decode`` makes positions of one frame; here the planes of many frames are unpacked in two calls of the outer
decoder and stay planes, which is what ``kernels.scatter`` reads, or become the entries of all frames at once. Every rule of
the format is checked: lengths and counts here, positions and values by ``check_planes`` on the part that is kept, or by
``decoded``. Comes after fetch; must not import torch.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import zstandard

from megasync.codecs.base import FrameShape
from megasync.codecs.sparse import Segments, positions_and_values, raw_planes
from megasync.codecs.zstd_walk import check_zstd_frames
from megasync.errors import FormatError
from megasync.types import Entries

_local = threading.local()
_NOTHING = np.empty(0, np.uint8)


@dataclass(frozen=True, slots=True)
class RawFrames:
    """Raw planes of frames of one word size, in order.

    Attributes:
        word_nbytes: Bytes of a word.
        tensor_ids: u32 ``[T]``, touched tiles of all frames.
        tiles: u32 ``[T]``.
        tile_words: int64 ``[T]``.
        frame_of: int64 ``[T]``, frame of each tile.
        segments: Segments of all tiles.
        segment_tile: int64 ``[S]``, tile of each segment.
        counts: int64 ``[S]``, changed words of each segment.
        dense: bool ``[S]``, segments that are a mask.
        entries: ``[2 + w][F]``, uint8 views: gap low, gap high, value planes of each frame.
        masks: ``[w][F]``, uint8 views: mask planes of each frame.
    """

    word_nbytes: int
    tensor_ids: np.ndarray
    tiles: np.ndarray
    tile_words: np.ndarray
    frame_of: np.ndarray
    segments: Segments
    segment_tile: np.ndarray
    counts: np.ndarray
    dense: np.ndarray
    entries: Sequence[Sequence[np.ndarray]]
    masks: Sequence[Sequence[np.ndarray]]

    @classmethod
    def of(cls, entries: Entries) -> RawFrames:
        """Entries of one frame, whatever codec they came in, cut in planes by the format's rule for dense segments."""
        counts, rows, mask = raw_planes(entries)
        segments = Segments.of(entries.tile_words)
        return cls(
            entries.word_nbytes,
            entries.tensor_ids,
            entries.tiles,
            entries.tile_words.astype(np.int64),
            np.zeros(len(entries.tiles), dtype=np.int64),
            segments,
            _tile_of(segments),
            counts,
            segments.dense(counts, entries.word_nbytes),
            [[np.ascontiguousarray(r)] for r in rows],
            [[np.ascontiguousarray(r)] for r in mask],
        )

    def decoded(self) -> Entries:
        """The changed words of all frames together.

        Raises:
            FormatError: A position past its segment, a value of 0, or a mask with another count.
        """
        rows, masks = ([np.concatenate(p) for p in planes] for planes in (self.entries, self.masks))
        positions, values = positions_and_values(self.segments, self.counts, self.dense, rows, masks)
        counts = np.add.reduceat(self.counts, self.segments.first).astype(np.uint32)
        words = self.tile_words.astype(np.uint32)
        return Entries(self.word_nbytes, self.tensor_ids, self.tiles, words, counts, positions, values)


def unpack_frames(
    shapes: FrameShape,
    frame_tiles: np.ndarray,
    num_changed: np.ndarray,
    stored: Sequence[memoryview] | Sequence[np.ndarray],
    planes: np.ndarray,
) -> RawFrames:
    """Unpack many frames of one word size.

    Args:
        shapes: All touched tiles of all frames, one frame after the other; its ``num_changed`` is not looked at.
        frame_tiles: int64 ``[F]``, tiles of each frame, at least 1.
        num_changed: int64 ``[F]``, changed words that each record gives.
        stored: Stored bytes of each frame.
        planes: int64 ``[F, 3 + 2 w]``, stored length of each plane.

    Returns:
        The planes; views of ``stored`` where a plane was not compressed.

    Raises:
        FormatError: A frame breaks a rule of the format.
    """
    w, num = shapes.word_nbytes, len(stored)
    if planes.shape != (num, 3 + 2 * w):
        raise FormatError(f"sparse frames with planes {planes.shape}, expected ({num}, {3 + 2 * w})")
    if (planes.sum(axis=1) != [len(s) for s in stored]).any():
        raise FormatError("planes of a sparse frame do not add up to its stored bytes")
    frame_of = np.repeat(np.arange(num), frame_tiles)
    segments = Segments.of(shapes.tile_words)
    first_tile = np.cumsum(frame_tiles) - frame_tiles
    first = np.append(segments.first[first_tile], len(segments.words))
    begin = np.concatenate((np.zeros((num, 1), np.int64), np.cumsum(planes, axis=1)), axis=1)
    raw = np.empty_like(planes)
    raw[:, 0] = 4 * np.diff(first)
    data = [np.frombuffer(s, np.uint8) for s in stored]
    counts = _counts(_unpack(data, begin, raw, [0])[0], first)
    _check_counts(counts, segments, first, num_changed, shapes)
    dense = segments.dense(counts, w)
    raw[:, 1 : 3 + w] = np.add.reduceat(np.where(dense, 0, counts), first[:-1])[:, None]
    raw[:, 3 + w :] = np.add.reduceat(np.where(dense, segments.words, 0), first[:-1])[:, None]
    found = _unpack(data, begin, raw, range(1, 3 + 2 * w))
    return RawFrames(
        w,
        shapes.tensor_ids,
        shapes.tiles,
        shapes.tile_words.astype(np.int64),
        frame_of,
        segments,
        _tile_of(segments),
        counts,
        dense,
        found[: 2 + w],
        found[2 + w :],
    )


def _tile_of(segments: Segments) -> np.ndarray:
    num = np.diff(np.append(segments.first, len(segments.words)))
    return np.repeat(np.arange(len(num)), num)


def _unpack(
    stored: Sequence[np.ndarray], begin: np.ndarray, raw: np.ndarray, chosen: Sequence[int]
) -> list[list[np.ndarray]]:
    """Raw bytes of some planes of every frame: ``[len(chosen)][F]``."""
    size, want = np.diff(begin, axis=1), raw
    if (size > want)[:, chosen].any():
        f, plane = np.argwhere((size > want)[:, chosen])[0].tolist()
        plane = chosen[plane]
        raise FormatError(
            f"plane {plane} of a sparse frame: {size[f, plane]} stored bytes for {want[f, plane]} raw ones"
        )
    out: list[list[np.ndarray]] = []
    packed: list[np.ndarray] = []
    places: list[tuple[int, np.ndarray]] = []
    for k, plane in enumerate(chosen):
        if not want[:, plane].any():
            out.append([_NOTHING] * len(stored))
            continue
        bounds = zip(stored, begin[:, plane].tolist(), begin[:, plane + 1].tolist(), strict=True)
        row = [s[a:b] for s, a, b in bounds]
        small = np.flatnonzero(size[:, plane] < want[:, plane])
        packed += [row[f] for f in small.tolist()]
        places.append((k, small))
        out.append(row)
    if packed:
        sizes = np.concatenate([want[f, chosen[k]] for k, f in places])
        found = iter(_decompress(packed, sizes))
        for k, small in places:
            for f, data in zip(small.tolist(), found, strict=False):
                out[k][f] = data
    return out


def _decompress(packed: Sequence[np.ndarray], sizes: np.ndarray) -> list[np.ndarray]:
    """All Zstd frames in one call that holds no lock of the interpreter."""
    joined = b"".join(packed)  # type: ignore[arg-type]
    lengths = np.array([len(p) for p in packed], dtype=np.int64)
    starts = np.cumsum(lengths) - lengths
    check_zstd_frames(np.frombuffer(joined, np.uint8), starts, lengths, sizes)
    decompressor = getattr(_local, "decompressor", None)
    if decompressor is None:
        decompressor = _local.decompressor = zstandard.ZstdDecompressor()
    table = np.stack((starts, lengths), axis=1).astype("<u8").tobytes()
    try:
        found = decompressor.multi_decompress_to_buffer(
            zstandard.BufferWithSegments(joined, table), decompressed_sizes=sizes.astype("<u8").tobytes()
        )
    except zstandard.ZstdError as e:
        raise FormatError(f"sparse frame: a plane is not a Zstd frame of its length: {e}") from e
    out = [np.frombuffer(found[i], np.uint8) for i in range(len(sizes))]  # type: ignore[arg-type]
    if [len(x) for x in out] != sizes.tolist():
        raise FormatError("sparse frame: a plane decodes to another length")
    return out


def _counts(planes: Sequence[np.ndarray], first: np.ndarray) -> np.ndarray:
    """Counts of all segments (int64 ``[S]``) from the raw counts planes of the frames, each four byte planes."""
    num = np.diff(first).tolist()
    out = np.concatenate([p[:n] for p, n in zip(planes, num, strict=True)]).astype(np.int64)
    for k in range(1, 4):
        byte = np.concatenate([p[k * n : (k + 1) * n] for p, n in zip(planes, num, strict=True)])
        if byte.any():
            out |= byte.astype(np.int64) << (8 * k)
    return out


def _check_counts(
    counts: np.ndarray, segments: Segments, first: np.ndarray, num_changed: np.ndarray, shapes: FrameShape
) -> None:
    """Every check that counts alone allow."""
    if (counts > segments.words).any():
        at = int(np.argmax(counts > segments.words))
        raise FormatError(f"sparse frame: segment {at} counts {counts[at]} changed words of {segments.words[at]}")
    totals = np.add.reduceat(counts, first[:-1])
    if (totals != num_changed).any():
        f = int(np.argmax(totals != num_changed))
        raise FormatError(f"sparse frame: counts add up to {int(totals[f])}, the record says {int(num_changed[f])}")
    tile_counts = np.add.reduceat(counts, segments.first)
    if not tile_counts.all():
        at = int(np.argmin(tile_counts))
        raise FormatError(f"sparse frame: tile {int(shapes.tiles[at])} is listed but unchanged")


def check_planes(
    entries: np.ndarray, masks: np.ndarray, counts: np.ndarray, words: np.ndarray, dense: np.ndarray, word_nbytes: int
) -> None:
    """Check positions and values of segments whose planes lie one after the other.

    Args:
        entries: uint8 ``[2 + w, n]``, entries of the sparse segments.
        masks: uint8 ``[w, m]``, masks of the dense segments.
        counts: int64 ``[S]``, changed words of each segment.
        words: int64 ``[S]``, words of each segment.
        dense: bool ``[S]``.
        word_nbytes: Bytes of a word.

    Raises:
        FormatError: A position past its segment, a value of 0, or a mask with another count.
    """
    used = ~dense & (counts > 0)
    num = counts[used]
    if len(num):
        gap = entries[1].astype(np.uint16)
        gap <<= 8
        gap |= entries[0]
        last = np.add.reduceat(gap, np.cumsum(num) - num, dtype=np.int64) + num - 1
        if (last >= words[used]).any():
            at = int(np.argmax(last >= words[used]))
            raise FormatError(f"sparse frame: a position {last[at]} is past the {words[used][at]} words of its segment")
        value = entries[2] if word_nbytes == 1 else np.bitwise_or.reduce(entries[2:], axis=0)
        if not value.min():
            raise FormatError(f"sparse frame: {int((value == 0).sum())} values are 0; a value is never 0")
    if dense.any():
        touched = (masks[0] if word_nbytes == 1 else np.bitwise_or.reduce(masks, axis=0)) != 0
        size = words[dense]
        found = np.add.reduceat(touched, np.cumsum(size) - size, dtype=np.int64)
        if (found != counts[dense]).any():
            at = int(np.argmax(found != counts[dense]))
            raise FormatError(
                f"sparse frame: a dense segment has {found[at]} changed words, its count is {counts[dense][at]}"
            )
