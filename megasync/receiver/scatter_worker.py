"""A worker process of staging: decodes ranges of frames for the scatter, beside the engine's process and its interpreter.

Started by ``scatter_workers`` as ``python -m megasync.receiver.scatter_worker``. A range's bytes are read from the payload's
file, or are in memory that both processes map; what is kept is written straight into the engine's arenas. It ends when the
socket closes, which the end of the engine's process does too. Must not import torch, and nothing that does.
"""

from __future__ import annotations

import mmap
import os
import socket
import sys
from collections.abc import Iterable
from typing import cast

import numpy as np

from megasync.receiver.scatter_range import IN_NBYTES, Job, Kept, Place, Request, keep_range
from megasync.receiver.scatter_rows import Part
from megasync.receiver.scatter_shared import receive, send, unshare
from megasync.receiver.scatter_store import Store
from megasync.receiver.scatter_view import StageView


class Worker:
    """Answers requests of one engine rank.

    Args:
        engine: Socket to the engine's process; the rank comes first.
        memory: File of ``IN_NBYTES`` that both map.
    """

    def __init__(self, engine: socket.socket, memory: int) -> None:
        self.engine = engine
        self.stored = np.frombuffer(mmap.mmap(memory, IN_NBYTES), np.uint8)
        places, files = receive(engine)
        self.view = cast(StageView, _take(files[0], places))
        self._job: tuple[int, Job] | None = None
        self._stores: dict[int, Store] = {}

    def serve(self) -> None:
        """Answer until the other side closes."""
        while True:
            try:
                request, files = receive(self.engine)
                self._answer(cast(Request, request), files)
            except (EOFError, BrokenPipeError, ConnectionResetError):
                return

    def _answer(self, request: Request, files: list[int]) -> None:
        """Decode a range, ask for room, and write it there."""
        try:
            parts = self._decode(request, files)
        except Exception as error:
            send(self.engine, f"{type(error).__name__}: {error}")
            return
        finally:
            _close(files)
        send(self.engine, [Kept(p.word_nbytes, p.need, p.num_changed) for p in parts])
        if not parts:
            return
        places, memories = receive(self.engine)
        if places is None:
            return  # no room: the engine's process gives the version up
        try:
            self._write(parts, cast("list[Place]", places), memories)
        except Exception as error:
            send(self.engine, f"{type(error).__name__}: {error}")
            return
        finally:
            _close(memories)
        send(self.engine, None)

    def _decode(self, request: Request, files: list[int]) -> list[Part]:
        for number in self._stores.keys() - request.arenas:
            del self._stores[number]
        if request.places is not None:
            self._job = request.number, cast(Job, unshare(files[0], request.places))
        assert self._job is not None
        assert self._job[0] == request.number  # a job comes with its first request
        stored = self.stored[: request.nbytes]
        if request.has_file:
            _read(files[-1], request.offset, stored.data)
        return keep_range(self.view, self._job[1], request, stored)

    def _write(self, parts: list[Part], places: list[Place], memories: list[int]) -> None:
        new = iter(memories)
        for part, place in zip(parts, places, strict=True):
            if place.shape is not None:
                # All pages at once, not one by one at each first write, version after version.
                whole = mmap.mmap(next(new), 0, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))
                memory = np.frombuffer(whole, np.uint8)
                self._stores[place.arena] = Store.over(memory, place.shape)
            part.write(self._stores[place.arena], place.at)


def _take(file: int, places: object) -> object:
    try:
        return unshare(file, cast("tuple[tuple[int, int], ...]", places))
    finally:
        os.close(file)


def _read(file: int, offset: int, out: memoryview) -> None:
    while len(out):
        got = os.preadv(file, [out], offset)
        if not got:
            raise EOFError("the payload ends inside the range")
        out, offset = out[got:], offset + got


def _close(files: Iterable[int]) -> None:
    for file in files:
        os.close(file)


def yield_cores() -> None:
    """Run only on cores that nobody else wants: a decoding engine's threads take a core back as soon as they wake."""
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


if __name__ == "__main__":
    if sys.argv[3] == "quiet":
        yield_cores()
    Worker(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])).serve()
