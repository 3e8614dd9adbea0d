"""Staging for the scatter: planes of the tiles that this rank holds, packed into arenas, and tables that bind them.

Each range of frames is worked on by one thread: outer decode, choice of tiles, copy into room reserved in an arena, checks,
table rows. What is left for the end is to put the rows one after the other and to upload. Frames of dense codecs are decoded
on the host and compacted: by the format's own rule a segment stays a mask exactly where entries would not be smaller. Comes
after fetch, before ``scatter_placed``. Must not import it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from threading import Lock

import numpy as np

from megasync.codecs.base import FrameShape
from megasync.codecs.sparse import SparseCodec
from megasync.codecs.sparse_batch import RawFrames, check_planes, unpack_frames
from megasync.errors import FormatError
from megasync.manifest import Manifest
from megasync.receiver.backend import FetchedFrame
from megasync.receiver.scatter_arena import Arena, ArenaPool
from megasync.receiver.scatter_cover import num_covered
from megasync.receiver.scatter_layout import DeviceLayout
from megasync.receiver.scatter_tables import Piece, make_piece

MIN_ENTRIES = 1 << 18
"""Entries, and mask words, that an arena is asked to have room for beyond what is sure: a range more than expected."""

_SLACK = 1.15  # an estimate of this rank's share of the entries is rarely further off


@dataclass
class Room:
    """Arenas of one publication and word size, and how far the newest is filled."""

    arenas: list[Arena] = field(default_factory=list)
    num_entries: int = 0
    num_dense: int = 0
    num_pieces: int = 0


@dataclass
class Load:
    """What was staged of one publication.

    Attributes:
        pieces: By word size and arena, in the order of their planes.
        arenas: All arenas taken.
        num_changed: Canonical words that this rank changes.
    """

    pieces: dict[tuple[int, int], list[Piece]]
    arenas: dict[tuple[int, int], Arena]
    num_changed: int


class Loader:
    """Fills arenas with the frames of one publication. ``add`` is thread-safe.

    Args:
        layout: The rank.
        pool: Where arenas come from.
        manifest: The publication.
        frames: Numbers of the frames that will be added.
    """

    def __init__(self, layout: DeviceLayout, pool: ArenaPool, manifest: Manifest, frames: np.ndarray) -> None:
        self.layout, self.manifest = layout, manifest
        self.arenas: list[Arena] = []
        self._pool = pool
        self._lock = Lock()
        self._rooms: dict[int, Room] = {}
        self._pieces: dict[tuple[int, int], list[tuple[int, Piece]]] = {}
        self._num_changed = 0
        self._expected = _expected(layout, manifest, frames)

    def add(self, frames: Sequence[FetchedFrame]) -> None:
        """Decode frames and keep what this rank needs of them.

        Raises:
            FormatError: A frame breaks a rule of the format; nothing live was looked at.
            MemoryPlanError: No room for it.
        """
        sparse: dict[int, list[FetchedFrame]] = {}
        for frame in frames:
            if frame.record.codec == SparseCodec.id:
                sparse.setdefault(frame.record.word_nbytes, []).append(frame)
            else:
                self._keep(RawFrames.of(frame.entries()))
        for same in sparse.values():
            try:
                self._keep(_unpack(same))
            except FormatError:
                for frame in same:
                    frame.entries()  # names the frame that is at fault
                raise

    def finish(self) -> Load:
        """What was added, in the order of the planes."""
        pieces = {key: [p for _, p in sorted(found, key=lambda x: x[0])] for key, found in sorted(self._pieces.items())}
        arenas = {(w, i): a for w, room in self._rooms.items() for i, a in enumerate(room.arenas)}
        return Load(pieces, arenas, self._num_changed)

    def drop(self) -> None:
        """Give the arenas back. Idempotent."""
        self._pool.give(self.arenas)

    def _keep(self, raw: RawFrames) -> None:
        """Copy the kept tiles' planes into an arena and make their table rows."""
        schema = self.layout.binding.schema
        at = schema.first_tile[raw.tensor_ids] + raw.tiles
        keep = self.layout.binding.needs(raw.tensor_ids, raw.tiles) & (self.layout.row[raw.tensor_ids] >= 0)
        if not keep.any():
            return
        sparse = np.where(raw.dense, 0, raw.counts)
        masks = np.where(raw.dense, raw.segments.words, 0)
        spans = [_spans(raw, keep, n) for n in (sparse, masks)]
        num_entries, num_dense = (sum(b - a for _, a, b in s) for s in spans)
        arena, first_entry, first_dense, key, number = self._reserve(raw.word_nbytes, num_entries, num_dense)
        entries = arena.entries.numpy()[:, first_entry : first_entry + num_entries]
        dense = arena.dense.numpy()[:, first_dense : first_dense + num_dense]
        for rows, planes, chosen in ((entries, raw.entries, spans[0]), (dense, raw.masks, spans[1])):
            if chosen:
                for row, plane in zip(rows, planes, strict=True):
                    np.concatenate([plane[f][a:b] for f, a, b in chosen], out=row)
        mine = np.flatnonzero(keep[raw.segment_tile])
        check_planes(entries, dense, raw.counts[mine], raw.segments.words[mine], raw.dense[mine], raw.word_nbytes)
        piece = make_piece(self.layout, raw, keep, at, mine, first_entry, first_dense)
        changed = int(piece.counts.sum())
        if self.layout.partly[at[keep]].any():
            changed = num_covered(self.layout.binding, raw, keep & self.layout.partly[at], entries, dense, mine) + int(
                np.add.reduceat(raw.counts, raw.segments.first)[keep & ~self.layout.partly[at]].sum()
            )
        with self._lock:
            self._pieces.setdefault(key, []).append((number, piece))
            self._num_changed += changed

    def _reserve(self, w: int, num_entries: int, num_dense: int) -> tuple[Arena, int, int, tuple[int, int], int]:
        """Room in the newest arena of a word size, or in a new one; and the place of what is put there in the order."""
        with self._lock:
            room = self._rooms.setdefault(w, Room())
            entries, dense = room.num_entries + num_entries, room.num_dense + num_dense
            if not room.arenas or not room.arenas[-1].fits(entries, dense):
                expected = self._expected.get(w, 0) if not room.arenas else 0
                arena = self._pool.take(
                    w,
                    max(num_entries + MIN_ENTRIES, expected),
                    num_dense + MIN_ENTRIES if num_dense else 0,
                )
                self.arenas.append(arena)
                room.arenas.append(arena)
                room.num_entries = room.num_dense = room.num_pieces = 0
                entries, dense = num_entries, num_dense
            first = room.num_entries, room.num_dense
            room.num_entries, room.num_dense, room.num_pieces = entries, dense, room.num_pieces + 1
            return room.arenas[-1], *first, (w, len(room.arenas) - 1), room.num_pieces


def _expected(layout: DeviceLayout, manifest: Manifest, frames: np.ndarray) -> dict[int, int]:
    """About how many entries of each word size this rank will keep: its share of the weights, of the changed words."""
    columns = manifest.frames.columns
    sizes, changed = columns["word_nbytes"][frames], columns["num_changed"][frames].astype(np.int64)
    return {w: int(changed[sizes == w].sum() * min(1.0, s * _SLACK)) for w, s in layout.share.items()}


def _unpack(frames: Sequence[FetchedFrame]) -> RawFrames:
    records = [f.record for f in frames]
    ids = np.concatenate([r.tensor_ids for r in records])
    tiles = np.concatenate([r.tiles for r in records])
    num_planes = {len(r.plane_nbytes) for r in records}
    if num_planes != {3 + 2 * records[0].word_nbytes}:
        raise FormatError(f"sparse frames with {sorted(num_planes)} planes, expected {3 + 2 * records[0].word_nbytes}")
    changed = np.array([r.num_changed for r in records], dtype=np.int64)
    words = frames[0].schema.tile_words(ids, tiles)
    return unpack_frames(
        FrameShape(records[0].word_nbytes, ids, tiles, words, int(changed.sum())),
        np.array([len(r.tiles) for r in records], dtype=np.int64),
        changed,
        [f.stored for f in frames],
        np.array([r.plane_nbytes for r in records], dtype=np.int64),
    )


def _spans(raw: RawFrames, keep: np.ndarray, num: np.ndarray) -> list[tuple[int, int, int]]:
    """Frame, first and end in the frame's planes of each run of kept tiles, where ``num`` counts each segment's part."""
    tile = np.add.reduceat(num, raw.segments.first)
    end = np.cumsum(tile)
    starts_frame = np.ones(len(keep), dtype=bool)
    starts_frame[1:] = raw.frame_of[1:] != raw.frame_of[:-1]
    before = (end - tile)[np.flatnonzero(starts_frame)][raw.frame_of]
    first = keep.copy()
    first[1:] &= ~keep[:-1] | starts_frame[1:]
    last = keep.copy()
    last[:-1] &= ~keep[1:] | starts_frame[1:]
    a, b = (end - tile - before)[first], (end - before)[last]
    used = b > a
    return list(zip(raw.frame_of[first][used].tolist(), a[used].tolist(), b[used].tolist(), strict=True))
