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
from megasync.codecs.sparse_batch import RawFrames, unpack_frames
from megasync.errors import FormatError
from megasync.manifest import Manifest
from megasync.receiver.backend import FetchedFrame
from megasync.receiver.scatter_arena import Arena, ArenaPool
from megasync.receiver.scatter_keep import choose, fill
from megasync.receiver.scatter_layout import DeviceLayout
from megasync.receiver.scatter_rows import Piece

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


@dataclass(frozen=True, slots=True)
class _Reserved:
    """Room for the planes of one piece.

    Attributes:
        entries: uint8 ``[2 + w, n]``, in an arena.
        masks: uint8 ``[w, m]``, in an arena.
        first_entry: Where they begin.
        first_dense: Where masks begin.
        key: Word size and number of the arena.
        number: Place in the order of the arena's pieces.
    """

    entries: np.ndarray
    masks: np.ndarray
    first_entry: int
    first_dense: int
    key: tuple[int, int]
    number: int


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
        choice = choose(self.layout.view, raw)
        if choice is None:
            return
        room = self._reserve(raw.word_nbytes, choice.num_entries, choice.num_dense)
        piece, changed = fill(self.layout.view, raw, choice, room.entries, room.masks)
        self._put(room, piece, changed)

    def put(self, word_nbytes: int, entries: np.ndarray, masks: np.ndarray, piece: Piece, changed: int) -> None:
        """Take planes and rows that another process made. Thread-safe.

        Args:
            word_nbytes: Word size.
            entries: uint8 ``[2 + w, n]``, copied.
            masks: uint8 ``[w, m]``, copied.
            piece: Its rows, the planes at the start of an arena.
            changed: Changed words that this rank holds.
        """
        room = self._reserve(word_nbytes, entries.shape[1], masks.shape[1])
        room.entries[:] = entries
        room.masks[:] = masks
        self._put(room, piece, changed)

    def _put(self, room: _Reserved, piece: Piece, changed: int) -> None:
        moved = piece.moved(room.first_entry, room.first_dense)
        with self._lock:
            self._pieces.setdefault(room.key, []).append((room.number, moved))
            self._num_changed += changed

    def _reserve(self, w: int, num_entries: int, num_dense: int) -> _Reserved:
        """Room in the newest arena of a word size, or in a new one."""
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
            arena, number = room.arenas[-1], room.num_pieces
        return _Reserved(
            arena.entries.numpy()[:, first[0] : entries],
            arena.dense.numpy()[:, first[1] : dense],
            *first,
            (w, len(room.arenas) - 1),
            number,
        )


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
