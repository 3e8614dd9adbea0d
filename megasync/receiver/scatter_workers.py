"""Worker processes of staging, as the engine's process sees them.

An engine decodes tokens in the same interpreter: threads that stage there take turns with it, and with one another. A worker
process does all that a range of frames needs, from reading the payload's file to writing the arena; this side sends a request,
reserves room, and waits. Whatever a worker cannot do (another codec, a frame that is bad, a range that does not fit) is done here
instead, which also finds the right words for what is wrong. Linux only. Used by ``scatter``.
"""

from __future__ import annotations

import logging
import mmap
import os
import socket
import subprocess
import sys
import weakref
from dataclasses import dataclass, field
from itertools import count
from queue import SimpleQueue
from typing import cast

import numpy as np

from megasync.codecs.sparse import SparseCodec
from megasync.errors import MemoryPlanError
from megasync.manifest import Manifest
from megasync.receiver.fetch import Range
from megasync.receiver.scatter_range import IN_NBYTES, Job, Kept, Place, Request
from megasync.receiver.scatter_shared import SharedObject, receive, send, share
from megasync.receiver.scatter_stage import Loader
from megasync.receiver.scatter_view import StageView
from megasync.versions.publication import PublicationReader

_END_S = 5.0
_log = logging.getLogger(__name__)
_numbers = count(1)

# Pages that a worker gave back would be zeroed and mapped again at its next range: it keeps them.
_KEEP_PAGES = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}


class SharedJob:
    """A publication on its way through the workers.

    Attributes:
        number: Tells it from every other.
        shared: Its columns.

    Args:
        reader: Of the run.
        manifest: The publication.
    """

    def __init__(self, reader: PublicationReader, manifest: Manifest) -> None:
        self.reader, self.manifest, self.number = reader, manifest, next(_numbers)
        self.shared = share(Job.of(manifest))
        self._files: dict[int, int | None] = {}
        self._finalizer = weakref.finalize(self, _close_files, self.shared, self._files)

    def file_of(self, payload: int) -> int | None:
        """An open file of a payload, None where the sink has no files."""
        if payload not in self._files:
            key = self.manifest.payload_key(payload)
            found = self.reader.sink.open_file(key, timeout_s=self.reader.timeout_s)
            mine = self._files.setdefault(payload, found)
            if mine is not found and found is not None:
                os.close(found)  # another thread was faster
        return self._files[payload]

    def close(self) -> None:
        """Let go of the files. Idempotent; nothing may be staged any more."""
        self._finalizer()


@dataclass
class _Worker:
    """One process, its socket, its memory, and what it has mapped."""

    process: subprocess.Popen[bytes]
    socket: socket.socket
    shared: mmap.mmap
    job: int = 0
    arenas: set[int] = field(default_factory=set)


class WorkerPool:
    """A few worker processes of one engine rank. Thread-safe; ``close`` ends them, and so does the end of this process.

    Args:
        view: The rank.
        num_workers: Processes, at least 1.
        quiet: Let them run on idle cores only.

    Raises:
        ValueError: No worker, or a system without ``memfd_create``.
    """

    def __init__(self, view: StageView, num_workers: int, *, quiet: bool = False) -> None:
        if num_workers < 1 or not hasattr(os, "memfd_create"):
            raise ValueError(f"{num_workers} worker processes: at least 1, and Linux")
        self._free: SimpleQueue[_Worker | None] = SimpleQueue()
        rank = share(view)
        try:
            self._workers = [_start(rank, quiet) for _ in range(num_workers)]
        finally:
            os.close(rank.file)
        for worker in self._workers:
            self._free.put(worker)
        self._finalizer = weakref.finalize(self, _close, self._workers)

    @property
    def host_nbytes(self) -> int:
        """Shared memory of all workers, at most: pages that were never used take none, nor do payloads that are files."""
        return len(self._workers) * IN_NBYTES

    def stage(self, job: SharedJob, span: Range, loader: Loader) -> bool:
        """Have a range of frames staged by a worker. Waits for a free one.

        Args:
            job: The publication.
            span: The range.
            loader: Has what the worker writes.

        Returns:
            False where the range must be staged here instead; nothing was kept of it then.
        """
        codecs = job.manifest.frames.columns["codec"][np.array(span.frames)]
        if span.nbytes > IN_NBYTES or (codecs != SparseCodec.id).any():
            return False
        worker = self._free.get()
        if worker is None:
            self._free.put(None)  # all have ended: let the next one see it too
            return False
        try:
            refused = _stage(worker, job, span, loader)
            if refused is not None:
                version = job.manifest.version
                _log.warning("a range of version %d is staged in the engine's process: %s", version, refused)
            return refused is None
        except KeyError:
            return False  # the payload is gone; fetch has the words for it
        except (EOFError, BrokenPipeError, ConnectionResetError):
            _log.warning("a staging process ended by itself (status %s); the others go on", worker.process.poll())
            worker.socket.close()
            self._workers.remove(worker)
            if not self._workers:
                self._free.put(None)
            worker = None
            return False
        finally:
            if worker is not None:
                self._free.put(worker)

    def close(self) -> None:
        """End the processes. Idempotent."""
        self._finalizer()


def _stage(worker: _Worker, job: SharedJob, span: Range, loader: Loader) -> str | None:
    """Take a worker through one range; what it says where it cannot."""
    payload = job.file_of(span.payload)
    if payload is None:
        target = memoryview(worker.shared)[: span.nbytes]
        key = job.manifest.payload_key(span.payload)
        job.reader.sink.read_into(key, span.offset, target, timeout_s=job.reader.timeout_s)
    known = worker.job == job.number
    files = [*(() if known else (job.shared.file,)), *(() if payload is None else (payload,))]
    numbers = loader.arena_numbers
    places = None if known else job.shared.places
    request = Request(job.number, places, span.frames, span.offset, span.nbytes, payload is not None, numbers)
    send(worker.socket, request, files)
    worker.job = job.number
    worker.arenas &= numbers
    answer = cast("list[Kept] | str", receive(worker.socket)[0])
    if isinstance(answer, str):
        return answer
    if not answer:
        return None
    room, memories = [], []
    try:
        for kept in answer:
            found = loader.reserve(kept.word_nbytes, kept.need)
            new = found.arena.number not in worker.arenas
            if new:
                worker.arenas.add(found.arena.number)
                memories.append(found.arena.memory.file)
            room.append(Place(found.arena.number, found.at, found.arena.shape if new else None))
    except MemoryPlanError:
        worker.arenas.clear()  # the worker has not heard of the new ones, and waits
        send(worker.socket, None)
        raise
    send(worker.socket, room, memories)
    refused = cast("str | None", receive(worker.socket)[0])
    if refused is None:
        for kept in answer:
            loader.wrote(kept.num_changed)
    return refused


def _start(rank: SharedObject, quiet: bool) -> _Worker:
    ours, theirs = socket.socketpair()
    memory = os.memfd_create("megasync payload")
    try:
        os.ftruncate(memory, IN_NBYTES)
        descriptors = [theirs.fileno(), memory]
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "megasync.receiver.scatter_worker",
                *map(str, descriptors),
                "quiet" if quiet else "fast",
            ],
            pass_fds=descriptors,
            stdin=subprocess.DEVNULL,
            env={
                **os.environ,
                **_KEEP_PAGES,
                "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
                "OPENBLAS_NUM_THREADS": "1",
            },
        )
        theirs.close()
        shared = mmap.mmap(memory, IN_NBYTES)
    finally:
        os.close(memory)
    send(ours, rank.places, [rank.file])
    return _Worker(process, ours, shared)


def _close(workers: list[_Worker]) -> None:
    for worker in workers:
        worker.socket.close()
    for worker in workers:
        try:
            worker.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            worker.process.kill()
            worker.process.wait()
    workers.clear()


def _close_files(job: SharedObject, files: dict[int, int | None]) -> None:
    for file in (job.file, *files.values()):
        if file is not None:
            os.close(file)
    files.clear()
