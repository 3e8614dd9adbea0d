"""Worker processes of staging, as the engine's process sees them.

An engine decodes tokens in the same interpreter: threads that stage there take turns with it, and with one another. A worker
process does all that a range of frames needs; this side only reads stored bytes into shared memory, sends a request, and
copies planes into an arena. Whatever a worker cannot do (another codec, a frame that is bad, a range that does not fit) is
done here instead, which also finds the right words for what is wrong. Linux only. Used by ``scatter``.
"""

from __future__ import annotations

import logging
import mmap
import os
import pickle
import socket
import subprocess
import sys
import weakref
from dataclasses import dataclass
from multiprocessing.connection import Connection
from queue import SimpleQueue

import numpy as np

from megasync.codecs.sparse import SparseCodec
from megasync.manifest import Manifest
from megasync.receiver.fetch import Range
from megasync.receiver.scatter_range import IN_NBYTES, OUT_NBYTES, Made, Request
from megasync.receiver.scatter_stage import Loader
from megasync.receiver.scatter_view import StageView
from megasync.versions.publication import PublicationReader

_ALIGN = 64  # of the arrays that workers map
_END_S = 5.0
_log = logging.getLogger(__name__)


@dataclass
class _Worker:
    """One process, its socket and its memory."""

    process: subprocess.Popen[bytes]
    connection: Connection
    shared: mmap.mmap
    memory: np.ndarray


class WorkerPool:
    """A few worker processes of one engine rank. Thread-safe; ``close`` ends them, and so does the end of this process.

    Args:
        view: The rank.
        num_workers: Processes, at least 1.

    Raises:
        ValueError: No worker, or a system without ``memfd_create``.
    """

    def __init__(self, view: StageView, num_workers: int) -> None:
        if num_workers < 1 or not hasattr(os, "memfd_create"):
            raise ValueError(f"{num_workers} worker processes: at least 1, and Linux")
        self._free: SimpleQueue[_Worker | None] = SimpleQueue()
        buffers: list[pickle.PickleBuffer] = []
        head = pickle.dumps(view, protocol=5, buffer_callback=buffers.append)
        parts = [memoryview(head), *(b.raw() for b in buffers)]
        view_memory = os.memfd_create("megasync view")
        stops = np.cumsum([-(-len(p) // _ALIGN) * _ALIGN for p in parts]).tolist()
        places = [(a, len(p)) for a, p in zip([0, *stops[:-1]], parts, strict=True)]
        os.ftruncate(view_memory, stops[-1])
        for (begin, _), part in zip(places, parts, strict=True):
            _write_all(view_memory, part, begin)
        self._workers = [_start(view_memory, places) for _ in range(num_workers)]
        os.close(view_memory)
        for worker in self._workers:
            self._free.put(worker)
        self._finalizer = weakref.finalize(self, _close, self._workers)

    @property
    def host_nbytes(self) -> int:
        """Shared memory of all workers, at most: pages that were never used take none."""
        return len(self._workers) * (IN_NBYTES + OUT_NBYTES)

    def stage(self, reader: PublicationReader, manifest: Manifest, span: Range, loader: Loader) -> bool:
        """Have a range of frames staged by a worker. Waits for a free one.

        Args:
            reader: Of the run.
            manifest: The publication.
            span: The range.
            loader: Gets what the worker makes.

        Returns:
            False where the range must be staged here instead; nothing was kept of it then.
        """
        request = _request(manifest, span)
        if request is None:
            return False
        worker = self._free.get()
        if worker is None:
            self._free.put(None)  # all have ended: let the next one see it too
            return False
        try:
            answer = _ask(worker, reader, manifest, span, request)
            if isinstance(answer, str):
                _log.warning("a range of version %d is staged in the engine's process: %s", manifest.version, answer)
                return False
            out = worker.memory[IN_NBYTES:]
            for made in answer:
                middle = made.begin + (2 + made.word_nbytes) * made.num_entries
                loader.put(
                    made.word_nbytes,
                    out[made.begin : middle].reshape(2 + made.word_nbytes, -1),
                    out[middle : middle + made.word_nbytes * made.num_dense].reshape(made.word_nbytes, -1),
                    made.piece,
                    made.changed,
                )
        except KeyError:
            return False  # the payload is gone; fetch has the words for it
        except (EOFError, BrokenPipeError, ConnectionResetError):
            _log.warning("a staging process ended by itself (status %s); the others go on", worker.process.poll())
            self._workers.remove(worker)
            if not self._workers:
                self._free.put(None)
            worker = None
            return False
        finally:
            if worker is not None:
                self._free.put(worker)
        return True

    def close(self) -> None:
        """End the processes. Idempotent."""
        self._finalizer()


def _ask(
    worker: _Worker, reader: PublicationReader, manifest: Manifest, span: Range, request: Request
) -> list[Made] | str:
    key = manifest.payload_key(span.payload)
    target = memoryview(worker.shared)[: span.nbytes]
    reader.sink.read_into(key, span.offset, target, timeout_s=reader.timeout_s)
    worker.connection.send(request)
    answer: list[Made] | str = worker.connection.recv()
    return answer


def _request(manifest: Manifest, span: Range) -> Request | None:
    """What a worker needs to know of a range; None where it is not for a worker."""
    table, frames = manifest.frames, np.array(span.frames)
    columns = table.columns
    if span.nbytes > IN_NBYTES or (columns["codec"][frames] != SparseCodec.id).any():
        return None
    tile_at, num_tiles = _stretches(table.tile_bounds, frames)
    plane_at, _ = _stretches(table.plane_bounds, frames)
    _, ids, tiles = table.touched
    return Request(
        columns["offset"][frames].astype(np.int64) - span.offset,
        table.nbytes[frames],
        table.digests[frames],
        manifest.digest_algorithm,
        columns["word_nbytes"][frames],
        columns["num_changed"][frames].astype(np.int64),
        table.plane_nbytes[plane_at].astype(np.int64),
        num_tiles,
        ids[tile_at],
        tiles[tile_at],
    )


def _stretches(bounds: np.ndarray, frames: np.ndarray) -> tuple[np.ndarray | slice, np.ndarray]:
    """Rows of some frames in a column that has one stretch a frame, and the length of each stretch."""
    num = (bounds[frames + 1] - bounds[frames]).astype(np.int64)
    if len(frames) == int(frames[-1] - frames[0]) + 1:
        return slice(int(bounds[frames[0]]), int(bounds[frames[-1] + 1])), num
    return np.repeat(bounds[frames] - (np.cumsum(num) - num), num) + np.arange(int(num.sum())), num


def _write_all(file: int, data: memoryview, begin: int) -> None:
    while len(data):
        written = os.pwrite(file, data, begin)
        data, begin = data[written:], begin + written


def _start(view_memory: int, places: list[tuple[int, int]]) -> _Worker:
    ours, theirs = socket.socketpair()
    memory = os.memfd_create("megasync planes")
    os.ftruncate(memory, IN_NBYTES + OUT_NBYTES)
    descriptors = [theirs.fileno(), memory, view_memory]
    process = subprocess.Popen(
        [sys.executable, "-m", "megasync.receiver.scatter_worker", *map(str, descriptors)],
        pass_fds=descriptors,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "OPENBLAS_NUM_THREADS": "1"},
    )
    theirs.close()
    shared = mmap.mmap(memory, IN_NBYTES + OUT_NBYTES)
    os.close(memory)
    connection = Connection(ours.detach())
    connection.send(places)
    return _Worker(process, connection, shared, np.frombuffer(shared, np.uint8))


def _close(workers: list[_Worker]) -> None:
    for worker in workers:
        worker.connection.close()
    for worker in workers:
        try:
            worker.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            worker.process.kill()
            worker.process.wait()
    workers.clear()
