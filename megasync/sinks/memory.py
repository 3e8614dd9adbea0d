"""A sink in the memory of one process: for tests, for trainer and engine in one process, and behind a sink server.

Objects are kept as the chunks they came in. With ``num_versions`` it forgets old publications by itself, since nobody
else can free its memory. Comes after gather, before fetch. Must not import trainer or receiver.
"""

from __future__ import annotations

import bisect
import itertools
import re
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import ClassVar

from megasync.errors import MemoryPlanError, SinkConflictError
from megasync.sinks.base import (
    DEFAULT_TIMEOUT_S,
    Buffer,
    Deadline,
    Sink,
    byte_views,
    check_head,
    check_key,
    check_prefix,
    check_range,
    check_run,
    head_conflict,
    writable_view,
)

_VERSION_KEY = re.compile(r"(?P<run>[^/]+)/v(?P<version>\d+)/")
_PIECE_NBYTES = 1 << 20


class Chunks:
    """The bytes of one immutable object as chunks, read by ranges without joining them."""

    __slots__ = ("_chunks", "_ends")

    def __init__(self, chunks: Iterable[bytes]) -> None:
        """Keep non-empty chunks."""
        self._chunks = tuple(chunks)
        self._ends = list(itertools.accumulate(len(c) for c in self._chunks))

    @property
    def nbytes(self) -> int:
        """Bytes of the object."""
        return self._ends[-1] if self._ends else 0

    def views(self, offset: int, nbytes: int) -> Iterator[memoryview]:
        """A range that lies inside the object, as views of the chunks."""
        index = bisect.bisect_right(self._ends, offset)
        while nbytes:
            chunk = self._chunks[index]
            start = offset - (self._ends[index] - len(chunk))
            view = memoryview(chunk)[start : start + nbytes]
            yield view
            offset, nbytes, index = offset + view.nbytes, nbytes - view.nbytes, index + 1

    def read(self, offset: int, nbytes: int) -> bytes:
        """A range that lies inside the object, joined; a chunk asked for whole is not copied."""
        views = list(self.views(offset, nbytes))
        if len(views) == 1:
            whole = views[0].obj
            return whole if isinstance(whole, bytes) and len(whole) == nbytes else views[0].tobytes()
        return b"".join(views)

    def equals(self, parts: Iterable[Buffer]) -> bool:
        """Compare with an object's parts, a piece at a time."""
        at = 0
        for view in byte_views(parts):
            if at + view.nbytes > self.nbytes:
                return False
            for start in range(0, view.nbytes, _PIECE_NBYTES):
                # As bytes: that is a memcmp, while comparing memoryviews goes element by element.
                piece = bytes(view[start : start + _PIECE_NBYTES])
                if self.read(at, len(piece)) != piece:
                    return False
                at += len(piece)
        return at == self.nbytes


def _folders_of(key: str) -> list[str]:
    """The keys above a key."""
    return [key[:at] for at, character in enumerate(key) if character == "/"]


class MemorySink(Sink):
    """Objects in this process's memory; "durable" means for as long as the process lives."""

    _named: ClassVar[dict[str, MemorySink]] = {}
    _named_lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, name: str = "", *, max_nbytes: int | None = None, num_versions: int | None = None) -> None:
        """Make an empty sink.

        Args:
            name: For messages.
            max_nbytes: Bytes of all objects that it may hold; None for no limit.
            num_versions: Publications of a run that are kept: each time its head moves, the objects of older versions
                (keys ``run/v<number>/...``) are forgotten, those of newer ones and all other keys stay. None keeps
                everything. A receiver that is further behind than this needs an anchor.

        Raises:
            ValueError: A limit below 1.
        """
        for what, limit in (("max_nbytes", max_nbytes), ("num_versions", num_versions)):
            if limit is not None and limit < 1:
                raise ValueError(f"{what} of a memory sink must be 1 or more, not {limit}")
        self.name = name
        self.max_nbytes = max_nbytes
        self.num_versions = num_versions
        self._lock = threading.Lock()
        self._objects: dict[str, Chunks] = {}
        self._folders: Counter[str] = Counter()
        self._heads: dict[str, bytes] = {}
        self._held_nbytes = 0

    @classmethod
    def named(cls, name: str, *, max_nbytes: int | None = None, num_versions: int | None = None) -> MemorySink:
        """The sink of this name in this process, made at the first call; it stays until ``forget``.

        Raises:
            ValueError: It exists with other limits.
        """
        with cls._named_lock:
            found = cls._named.get(name)
            if found is None:
                found = cls._named[name] = cls(name, max_nbytes=max_nbytes, num_versions=num_versions)
        if (found.max_nbytes, found.num_versions) != (max_nbytes, num_versions):
            raise ValueError(
                f"{found.describe()} exists with max_nbytes {found.max_nbytes} and num_versions {found.num_versions}, "
                f"not {max_nbytes} and {num_versions}"
            )
        return found

    @classmethod
    def forget(cls, name: str) -> None:
        """Let go of a named sink; those who hold it keep it."""
        with cls._named_lock:
            cls._named.pop(name, None)

    @property
    def held_nbytes(self) -> int:
        """Bytes of all objects, those now being written included."""
        with self._lock:
            return self._held_nbytes

    def create(self, key: str, parts: Iterable[Buffer], *, timeout_s: float = DEFAULT_TIMEOUT_S) -> int:
        """See ``Sink.create``. MemoryPlanError where it would pass ``max_nbytes``."""
        check_key(key)
        what = f"create {key!r} in {self.describe()}"
        deadline = Deadline(timeout_s)
        with self._lock:
            found = self._objects.get(key)
        if found is not None:
            return self._require_equal(found, parts, what)
        held = 0
        stored = False
        chunks: list[bytes] = []
        try:
            for view in byte_views(parts):
                self._reserve(view.nbytes, what)
                held += view.nbytes
                # The bytes object itself where that is what came: it cannot change, so it need not be copied.
                whole = view.obj
                chunks.append(whole if type(whole) is bytes and len(whole) == view.nbytes else view.tobytes())
                deadline.check(what)
            mine = Chunks(chunks)
            with self._lock:
                self._refuse_folder_clash(key)
                found = self._objects.setdefault(key, mine)
                stored = found is mine
                if stored:
                    self._folders.update(_folders_of(key))
        finally:
            if not stored:
                self._reserve(-held, what)
        return held if stored else self._require_equal(found, chunks, what)

    def _reserve(self, nbytes: int, what: str) -> None:
        with self._lock:
            if nbytes > 0 and self.max_nbytes is not None and self._held_nbytes + nbytes > self.max_nbytes:
                raise MemoryPlanError(
                    f"{what}: {self._held_nbytes} bytes held, {nbytes} more do not fit into max_nbytes "
                    f"{self.max_nbytes}; raise it, or keep fewer versions"
                )
            self._held_nbytes += nbytes

    def _refuse_folder_clash(self, key: str) -> None:
        """What a file system could not hold is refused here as well, so that tests in memory find it."""
        if key in self._folders or any(folder in self._objects for folder in _folders_of(key)):
            raise ValueError(f"key {key!r} is below or above the key of an object in {self.describe()}; refused")

    @staticmethod
    def _require_equal(found: Chunks, parts: Iterable[Buffer], what: str) -> int:
        if not found.equals(parts):
            raise SinkConflictError(
                f"{what}: it exists with {found.nbytes} other bytes; another publisher uses this run: stop this one"
            )
        return found.nbytes

    def _find(self, key: str, timeout_s: float) -> Chunks:
        check_key(key)
        Deadline(timeout_s)
        with self._lock:
            found = self._objects.get(key)
        if found is None:
            raise KeyError(f"no object {key!r} in {self.describe()}")
        return found

    def read(
        self, key: str, offset: int = 0, nbytes: int | None = None, *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> bytes:
        """See ``Sink.read``."""
        found = self._find(key, timeout_s)
        return found.read(offset, check_range(key, offset, nbytes, found.nbytes))

    def read_into(self, key: str, offset: int, out: memoryview, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """See ``Sink.read_into``."""
        target = writable_view(out)
        found = self._find(key, timeout_s)
        at = 0
        for view in found.views(offset, check_range(key, offset, target.nbytes, found.nbytes)):
            target[at : at + view.nbytes] = view
            at += view.nbytes

    def size(self, key: str, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> int:
        """See ``Sink.size``."""
        return self._find(key, timeout_s).nbytes

    def keys(self, prefix: str, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> Iterator[str]:
        """See ``Sink.keys``. A snapshot of the moment of the call."""
        start = check_prefix(prefix) and prefix + "/"
        Deadline(timeout_s)
        with self._lock:
            return iter(sorted(k for k in self._objects if k.startswith(start)))

    def delete(self, key: str, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """See ``Sink.delete``. Who is reading the object reads it to its end."""
        check_key(key)
        Deadline(timeout_s)
        with self._lock:
            self._drop(key)

    def _drop(self, key: str) -> None:
        found = self._objects.pop(key, None)
        if found is not None:
            self._held_nbytes -= found.nbytes
            self._folders.subtract(_folders_of(key))
            for folder in _folders_of(key):
                if not self._folders[folder]:
                    del self._folders[folder]

    def read_head(self, run: str, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> bytes | None:
        """See ``Sink.read_head``."""
        check_run(run)
        Deadline(timeout_s)
        with self._lock:
            return self._heads.get(run)

    def heads(self, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> list[str]:
        """See ``Sink.heads``."""
        Deadline(timeout_s)
        with self._lock:
            return sorted(self._heads)

    def swap_head(self, run: str, expected: bytes | None, new: bytes, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """See ``Sink.swap_head``. Forgets the run's publications beyond ``num_versions``."""
        check_run(run)
        Deadline(timeout_s)
        with self._lock:
            found = self._heads.get(run)
            if found != expected:
                raise head_conflict(f"move the head of {run!r} in {self.describe()}", expected, found)
            self._heads[run] = bytes(check_head(new))
            if self.num_versions is not None:
                self._forget_old(run, self.num_versions)

    def _forget_old(self, run: str, num_versions: int) -> None:
        """Versions above the head's are in flight, so at most that many fewer published ones stay."""
        versions = {
            key: int(match["version"])
            for key in self._objects
            if (match := _VERSION_KEY.match(key)) and match["run"] == run
        }
        kept = sorted(set(versions.values()))[-num_versions:]
        for key, version in versions.items():
            if version < kept[0]:
                self._drop(key)

    def check_room(self, nbytes: int) -> None:
        """See ``Sink.check_room``: against ``max_nbytes``."""
        held = self.held_nbytes
        if self.max_nbytes is not None and held + nbytes > self.max_nbytes:
            raise MemoryPlanError(
                f"{self.describe()} needs {nbytes} bytes, {max(self.max_nbytes - held, 0)} of max_nbytes "
                f"{self.max_nbytes} are free; raise it, or keep fewer versions"
            )

    def describe(self) -> str:
        """What and where."""
        return f"memory sink {self.name!r}"
