"""Staging for the scatter: what this rank holds of decoded frames, written into arenas together with the tables that bind it.

Each range of frames is worked on by one thread, or by a worker process: outer decode, choice of tiles, checks, table rows. Then
room is reserved in an arena and all is written there, at its place: the end of staging has nothing to put together. Frames of
dense codecs are decoded on the host and compacted: by the format's own rule a segment stays a mask exactly where entries would
not be smaller. Comes after fetch, before ``scatter_placed``. Must not import it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from threading import Lock

import numpy as np

from megasync.codecs.sparse import SparseCodec
from megasync.codecs.sparse_batch import RawFrames
from megasync.errors import FormatError, RetryError
from megasync.manifest import Manifest
from megasync.receiver.backend import FetchedFrame
from megasync.receiver.scatter_arena import Arena, ArenaPool
from megasync.receiver.scatter_keep import keep_part
from megasync.receiver.scatter_layout import DeviceLayout
from megasync.receiver.scatter_rows import Piece
from megasync.receiver.scatter_store import DENSE, ENTRIES, Need, StoreShape, full_room
from megasync.receiver.together import unpack_together

MIN_ENTRIES = 1 << 18
"""Entries, and mask words, that an arena is asked to have room for beyond what is sure: a range more than expected."""

_TABLE_SLACK = 8  # an eighth of a rank's tiles may be listed by two frames, before a second arena is needed

_SLACK = 1.15  # an estimate of this rank's share of the entries is rarely further off


@dataclass
class Room:
    """Arenas of one publication and word size, and how far the newest and those before it are filled."""

    arenas: list[Arena] = field(default_factory=list)
    ends: list[Need] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Reserved:
    """Room in an arena.

    Attributes:
        arena: The arena.
        at: Where the room begins in each of its arrays.
    """

    arena: Arena
    at: Need


@dataclass
class Load:
    """What was staged of one publication.

    Attributes:
        pieces: By word size and arena: one, with all that is in the arena.
        arenas: All arenas taken.
        num_changed: Canonical words that this rank changes.
    """

    pieces: dict[tuple[int, int], list[Piece]]
    arenas: dict[tuple[int, int], Arena]
    num_changed: int


class Loader:
    """Fills arenas with the frames of one publication. Thread-safe.

    Args:
        layout: The rank.
        pool: Where arenas come from.
        manifest: The publication.
        frames: Numbers of the frames that will be added.
    """

    def __init__(self, layout: DeviceLayout, pool: ArenaPool, manifest: Manifest, frames: np.ndarray) -> None:
        self.layout, self.manifest, self.frames = layout, manifest, frames
        self.arenas: list[Arena] = []
        self._pool = pool
        self._lock = Lock()
        self._rooms: dict[int, Room] = {}
        self._num_changed = 0
        self._num_open = 0
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
                self._keep(unpack_together(same))
            except FormatError:
                for frame in same:
                    frame.entries()  # names the frame that is at fault
                raise

    def reserve(self, word_nbytes: int, need: Need) -> Reserved:
        """Room in the newest arena of a word size, or in a new one. What is reserved must be written, then ``wrote``.

        Raises:
            MemoryPlanError: No room for it.
        """
        with self._lock:
            room = self._rooms.setdefault(word_nbytes, Room())
            if room.arenas:
                end = tuple(a + b for a, b in zip(room.ends[-1], need, strict=True))
                if room.arenas[-1].shape.fits(end):
                    at, room.ends[-1] = room.ends[-1], end
                    self._num_open += 1
                    return Reserved(room.arenas[-1], at)
            arena = self._pool.take(self._shape(word_nbytes, need, first=not room.arenas))
            self.arenas.append(arena)
            room.arenas.append(arena)
            room.ends.append(need)
            self._num_open += 1
            return Reserved(arena, (0,) * len(need))

    def wrote(self, num_changed: int) -> None:
        """What was reserved is there.

        Args:
            num_changed: Changed words of it that this rank holds.
        """
        with self._lock:
            self._num_open -= 1
            self._num_changed += num_changed

    @property
    def arena_numbers(self) -> frozenset[int]:
        """Numbers of all arenas that are still there, of this publication and of others."""
        return self._pool.numbers

    def finish(self) -> Load:
        """What was added.

        Raises:
            RetryError: A worker process ended while it wrote.
        """
        if self._num_open:
            raise RetryError(
                f"version {self.manifest.version}: a staging process ended while it wrote what it had decoded; nothing live "
                "was touched. Stage again: the processes that are left go on"
            )
        pieces, arenas = {}, {}
        for w, room in sorted(self._rooms.items()):
            for i, (arena, end) in enumerate(zip(room.arenas, room.ends, strict=True)):
                pieces[w, i], arenas[w, i] = [Piece(arena.store, end)], arena
        return Load(pieces, arenas, self._num_changed)

    def drop(self) -> None:
        """Give the arenas back. Idempotent."""
        self._pool.give(self.arenas)

    def _keep(self, raw: RawFrames) -> None:
        """Write the kept tiles' planes and table rows into an arena."""
        part = keep_part(self.layout.view, raw)
        if part is None:
            return
        room = self.reserve(part.word_nbytes, part.need)
        part.write(room.arena.store, room.at)
        self.wrote(part.num_changed)

    def _shape(self, w: int, need: Need, *, first: bool) -> StoreShape:
        """What an arena must have room for: ``need``, and what is expected to come after it.

        The same for every version of a run, whichever range of it comes first: to make an arena anew takes a large part of a
        second, in which the driver lets nothing be launched.
        """
        schema = self.layout.binding.schema
        full = self._pool.once(("room", w), lambda: full_room(self.layout.view, w, schema.word_nbytes))
        room = [max(a + a // _TABLE_SLACK, b) for a, b in zip(full, need, strict=True)]
        room[ENTRIES] = max(need[ENTRIES] + MIN_ENTRIES, self._expected.get(w, 0) if first else 0)
        room[DENSE] = need[DENSE] + MIN_ENTRIES
        return StoreShape.of(self.layout.view, w, tuple(room))


def _expected(layout: DeviceLayout, manifest: Manifest, frames: np.ndarray) -> dict[int, int]:
    """About how many entries of each word size this rank will keep: its share of the weights, of the changed words."""
    columns = manifest.frames.columns
    sizes, changed = columns["word_nbytes"][frames], columns["num_changed"][frames].astype(np.int64)
    return {w: int(changed[sizes == w].sum() * min(1.0, s * _SLACK)) for w, s in layout.share.items()}
