"""A range of sparse frames as a worker process takes it: checked, decoded, packed, with its table rows.

Stored bytes and planes are in memory that both processes map; what is here goes through a socket. Used by ``scatter_worker``
and ``scatter_workers``. Must not import torch, and nothing that does.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megasync.codecs.base import FrameShape
from megasync.codecs.sparse_batch import RawFrames, unpack_frames
from megasync.digest import content_digest
from megasync.errors import FormatError, RefetchError
from megasync.receiver.scatter_keep import Choice, choose, fill
from megasync.receiver.scatter_rows import Piece
from megasync.receiver.scatter_view import StageView

IN_NBYTES = 96 << 20
"""Stored bytes of a range: a frame may be as large as 64 MiB of weights."""

OUT_NBYTES = 96 << 20
"""Planes of a range."""


@dataclass(frozen=True, slots=True)
class Request:
    """A range of sparse frames whose stored bytes are in the shared memory. Arrays of length F, one a frame.

    Attributes:
        begin: int64, where each frame begins there.
        nbytes: int64, its stored bytes.
        digests: uint8 ``[F, 16 or 32]``.
        algorithm: Digest algorithm.
        word_nbytes: uint8.
        num_changed: int64.
        planes: int64, stored lengths of the planes of all frames, one frame after the other.
        num_tiles: int64.
        tensor_ids: u32, touched tiles of all frames.
        tiles: u32.
    """

    begin: np.ndarray
    nbytes: np.ndarray
    digests: np.ndarray
    algorithm: int
    word_nbytes: np.ndarray
    num_changed: np.ndarray
    planes: np.ndarray
    num_tiles: np.ndarray
    tensor_ids: np.ndarray
    tiles: np.ndarray


@dataclass(frozen=True, slots=True)
class Made:
    """What a range came to, for one word size; its planes are in the shared memory.

    Attributes:
        word_nbytes: Word size.
        begin: Where the planes begin there: entries, then masks.
        num_entries: Entries.
        num_dense: Mask words.
        piece: Table rows.
        changed: Changed words that the rank holds.
    """

    word_nbytes: int
    begin: int
    num_entries: int
    num_dense: int
    piece: Piece
    changed: int


def work(view: StageView, request: Request, stored: memoryview, room: np.ndarray) -> list[Made]:
    """Check, decode and pack a range.

    Args:
        view: The rank.
        request: The range.
        stored: Its bytes.
        room: uint8, where planes go.

    Raises:
        RefetchError: A frame has another digest.
        FormatError: A frame breaks the format.
        MemoryError: The planes do not fit the room.
    """
    frames = [stored[a : a + n] for a, n in zip(request.begin.tolist(), request.nbytes.tolist(), strict=True)]
    for frame, digest in zip(frames, request.digests, strict=True):
        if content_digest(frame, request.algorithm) != digest.tobytes():
            raise RefetchError("a frame has another digest")
    out: list[Made] = []
    used = 0
    for w in np.unique(request.word_nbytes).tolist():
        raw = _unpack(view, request, frames, w)
        choice = choose(view, raw)
        if choice is None:
            continue
        entries, masks, end = _rooms(room, used, choice, w)
        piece, changed = fill(view, raw, choice, entries, masks)
        out.append(Made(w, used, choice.num_entries, choice.num_dense, piece, changed))
        used = end
    return out


def _unpack(view: StageView, request: Request, frames: list[memoryview], w: int) -> RawFrames:
    """The frames of one word size."""
    mine = request.word_nbytes == w
    num_planes = 3 + 2 * w
    per_frame = 3 + 2 * request.word_nbytes.astype(np.int64)
    if per_frame.sum() != len(request.planes):
        raise FormatError(f"sparse frames with {len(request.planes)} planes, expected {int(per_frame.sum())}")
    tile = np.repeat(mine, request.num_tiles)
    ids, tiles = request.tensor_ids[tile], request.tiles[tile]
    words = view.tile_words[view.first_tile[ids] + tiles]
    return unpack_frames(
        FrameShape(w, ids, tiles, words, 0),
        request.num_tiles[mine],
        request.num_changed[mine],
        [f for f, ok in zip(frames, mine.tolist(), strict=True) if ok],
        request.planes[np.repeat(mine, per_frame)].reshape(-1, num_planes),
    )


def _rooms(room: np.ndarray, at: int, choice: Choice, w: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Rows for entries and masks from ``at`` on, and the end."""
    middle = at + (2 + w) * choice.num_entries
    end = middle + w * choice.num_dense
    if end > len(room):
        raise MemoryError(f"planes of {end} bytes in a room of {len(room)}")
    return room[at:middle].reshape(2 + w, -1), room[middle:end].reshape(w, -1), end
