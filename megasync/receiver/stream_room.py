"""Rooms: host memory for encoded blocks that a device reads by itself, used again from version to version.

Comes before ``stream_decode``, whose decoders make them. Must import nothing of megasync.
"""

from __future__ import annotations

from dataclasses import dataclass
from threading import RLock
from typing import Protocol

import numpy as np

_GRAIN = 16 << 20


@dataclass(frozen=True, slots=True)
class Room:
    """Host memory for encoded blocks that the device reads by itself.

    Attributes:
        view: uint8 ``[nbytes]``, writable.
        owner: What keeps it alive.
    """

    view: np.ndarray
    owner: object


class RoomMaker(Protocol):
    """What makes rooms: a decoder."""

    def make_room(self, nbytes: int) -> Room:
        """Host memory for encoded blocks."""

    def close_room(self, room: Room) -> None:
        """Let go of a room, where dropping it is not enough."""


class RoomPool:
    """Rooms of one maker, used again from version to version. Thread-safe."""

    def __init__(self, maker: RoomMaker) -> None:
        self._maker = maker
        self._free: list[Room] = []
        self._lock = RLock()
        self.nbytes = 0

    def take(self, nbytes: int) -> Room:
        """A free room that is large enough, else a new one in the place of a free one that is too small."""
        with self._lock:
            self._free.sort(key=lambda r: len(r.view))
            found = next((r for r in self._free if len(r.view) >= nbytes), None)
            if found is not None:
                self._free.remove(found)
                return found
            if self._free:
                gone = self._free.pop()
                self.nbytes -= len(gone.view)
                self._maker.close_room(gone)
                del gone
            made = self._maker.make_room(-(-max(nbytes, 1) // _GRAIN) * _GRAIN)
            self.nbytes += len(made.view)
            return made

    def give(self, room: Room) -> None:
        """Take a room back; nothing queued may read it any more."""
        with self._lock:
            self._free.append(room)
