"""A range of sparse frames as a worker process takes it: checked, decoded, packed, with its table rows.

What all ranges of a publication need to know of it is in a `Job`, which is shared once; a request only names frames. Used by
``scatter_worker`` and ``scatter_workers``. Must not import torch, and nothing that does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megasync.codecs.base import FrameShape
from megasync.codecs.sparse import SparseCodec
from megasync.codecs.sparse_batch import RawFrames, unpack_frames
from megasync.digest import content_digest
from megasync.errors import FormatError, RefetchError
from megasync.manifest import Manifest
from megasync.receiver.scatter_keep import keep_part
from megasync.receiver.scatter_rows import Part
from megasync.receiver.scatter_store import Need, StoreShape
from megasync.receiver.scatter_view import StageView

IN_NBYTES = 96 << 20
"""Stored bytes of a range: a frame may be as large as 64 MiB of weights."""


@dataclass(frozen=True, slots=True)
class Job:
    """A publication as workers see it. Columns of the frame table, F frames long unless it says otherwise.

    Attributes:
        algorithm: Digest algorithm.
        offset: u64, where each frame begins in its payload.
        nbytes: int64, its stored bytes.
        digests: uint8 ``[F, 16 or 32]``.
        codec: uint8.
        word_nbytes: uint8.
        num_changed: u32.
        plane_bounds: int64 ``[F + 1]``, rows of ``planes``.
        planes: u32, stored lengths of the planes of all frames.
        tile_bounds: int64 ``[F + 1]``, rows of ``tensor_ids`` and ``tiles``.
        tensor_ids: u32, touched tiles of all frames.
        tiles: u32.
    """

    algorithm: int
    offset: np.ndarray
    nbytes: np.ndarray
    digests: np.ndarray
    codec: np.ndarray
    word_nbytes: np.ndarray
    num_changed: np.ndarray
    plane_bounds: np.ndarray
    planes: np.ndarray
    tile_bounds: np.ndarray
    tensor_ids: np.ndarray
    tiles: np.ndarray

    @classmethod
    def of(cls, manifest: Manifest) -> Job:
        """The job of a publication."""
        table = manifest.frames
        columns, (ids, tiles) = table.columns, table.tiles
        return cls(
            manifest.digest_algorithm,
            columns["offset"],
            table.nbytes,
            table.digests,
            columns["codec"],
            columns["word_nbytes"],
            columns["num_changed"],
            table.plane_bounds,
            table.plane_nbytes,
            table.tile_bounds,
            ids,
            tiles,
        )


class Request(NamedTuple):
    """A range of sparse frames.

    Attributes:
        number: Of the job.
        places: Where the job's parts are in the file that comes first with the request, None where the worker has it.
        frames: Frame numbers, by offset.
        offset: First byte in the payload.
        nbytes: Bytes.
        has_file: Whether the payload comes with the request, as an open file; else the bytes are in the shared memory.
        arenas: Numbers of all arenas that are still there.
    """

    number: int
    places: tuple[tuple[int, int], ...] | None
    frames: tuple[int, ...]
    offset: int
    nbytes: int
    has_file: bool
    arenas: frozenset[int]


class Kept(NamedTuple):
    """What a range comes to for one word size, before it is written.

    Attributes:
        word_nbytes: Word size.
        need: Room that it takes in an arena.
        num_changed: Changed words that the rank holds.
    """

    word_nbytes: int
    need: Need
    num_changed: int


class Place(NamedTuple):
    """Where one word size of a range is written.

    Attributes:
        arena: Number of the arena.
        at: Where its room begins in each array.
        shape: The arena's arrays, where its memory comes with the message; None where the worker maps it already.
    """

    arena: int
    at: Need
    shape: StoreShape | None


def keep_range(view: StageView, job: Job, request: Request, stored: np.ndarray) -> list[Part]:
    """Check and decode a range.

    Args:
        view: The rank.
        job: The publication.
        request: The range.
        stored: uint8, its bytes.

    Raises:
        RefetchError: A frame has another digest.
        FormatError: A frame breaks the format.
    """
    frames = np.array(request.frames)
    begin = (job.offset[frames].astype(np.int64) - request.offset).tolist()
    data: list[np.ndarray] = [stored[a : a + n] for a, n in zip(begin, job.nbytes[frames].tolist(), strict=True)]
    if (job.codec[frames] != SparseCodec.id).any():
        raise FormatError("a frame of another codec")
    for frame, digest in zip(data, job.digests[frames], strict=True):
        if content_digest(frame.data, job.algorithm) != digest.tobytes():
            raise RefetchError("a frame has another digest")
    sizes = job.word_nbytes[frames]
    found = []
    for w in sorted(set(sizes.tolist())):
        mine = sizes == w
        raw = _unpack(view, job, frames[mine], [d for d, ok in zip(data, mine.tolist(), strict=True) if ok], w)
        found.append(keep_part(view, raw))
    return [part for part in found if part is not None]


def _unpack(view: StageView, job: Job, frames: np.ndarray, data: list[np.ndarray], w: int) -> RawFrames:
    """Frames of one word size."""
    tile_at, num_tiles = _stretches(job.tile_bounds, frames)
    plane_at, num_planes = _stretches(job.plane_bounds, frames)
    if (num_planes != 3 + 2 * w).any():
        raise FormatError(f"sparse frames with {sorted(set(num_planes.tolist()))} planes, expected {3 + 2 * w}")
    ids, tiles = job.tensor_ids[tile_at], job.tiles[tile_at]
    words = view.tile_words[view.first_tile[ids] + tiles]
    return unpack_frames(
        FrameShape(w, ids, tiles, words, 0),
        num_tiles,
        job.num_changed[frames].astype(np.int64),
        data,
        job.planes[plane_at].astype(np.int64).reshape(-1, 3 + 2 * w),
    )


def _stretches(bounds: np.ndarray, frames: np.ndarray) -> tuple[np.ndarray | slice, np.ndarray]:
    """Rows of some frames in a column that has one stretch a frame, and the length of each stretch."""
    num = (bounds[frames + 1] - bounds[frames]).astype(np.int64)
    if len(frames) == int(frames[-1] - frames[0]) + 1:
        return slice(int(bounds[frames[0]]), int(bounds[frames[-1] + 1])), num
    return np.repeat(bounds[frames] - (np.cumsum(num) - num), num) + np.arange(int(num.sum())), num
