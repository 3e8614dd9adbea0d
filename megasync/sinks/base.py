"""The sink contract: where publications are written and read.

A sink stores immutable objects under keys, and one small mutable head per run that only moves by compare-and-swap.
Payloads are durable before the manifest, the manifest before the head: a reader sees a complete publication or none.
Every wait has a timeout. Comes after gather on the trainer and before fetch on the receiver. ``contract.py`` is the
suite that every sink passes. Must not import trainer or receiver.
"""

from __future__ import annotations

import math
import re
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Self

from megasync.errors import RefetchError, RetryError, SinkConflictError

Buffer = bytes | bytearray | memoryview

DEFAULT_TIMEOUT_S = 60.0
MAX_HEAD_NBYTES = 64 * 1024
_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._=-]{0,199}\Z")


def check_key(key: str) -> str:
    """Refuse keys that could leave the sink or confuse a store.

    Args:
        key: Parts of letters, digits, ``. _ - =`` joined by ``/``; a part does not start with a dot; 1,000 characters
            at most.

    Returns:
        The key.

    Raises:
        ValueError: With the key and the rule.
    """
    if not key or len(key) > 1000 or not all(_PART.match(part) for part in key.split("/")):
        raise ValueError(
            f"sink key {key!r} refused: parts of letters, digits and ._-= joined by '/', none empty, absolute or "
            f"starting with a dot, 1000 characters at most"
        )
    return key


def check_prefix(prefix: str) -> str:
    """Refuse what is neither empty (everything) nor a key without trailing ``/``; raises like ``check_key``."""
    return check_key(prefix) if prefix else prefix


def check_run(run: str) -> str:
    """Refuse run names that are not one part of a key.

    Raises:
        ValueError: With the name and the rule.
    """
    if "/" in run:
        raise ValueError(f"run name {run!r} refused: it must be one part of a sink key, without '/'")
    return check_key(run)


def check_head(document: bytes) -> bytes:
    """Refuse a head document above ``MAX_HEAD_NBYTES``: heads are polled by every receiver.

    Raises:
        ValueError: With both sizes.
    """
    if len(document) > MAX_HEAD_NBYTES:
        raise ValueError(f"head document of {len(document)} bytes refused: {MAX_HEAD_NBYTES} at most")
    return document


def describe_head(document: bytes | None) -> str:
    """A head document in a message, by which two can be told apart; a sink never looks inside."""
    return "no head" if document is None else f"{len(document)} bytes, crc32 {zlib.crc32(document):08x}"


def head_conflict(what: str, expected: bytes | None, found: bytes | None) -> SinkConflictError:
    """The error of a swap that met another head than it expected; the caller raises it.

    Args:
        what: The operation, its run and its place.
        expected: The document that ought to be there.
        found: The document that is there.
    """
    met = f"{what}: expected {describe_head(expected)}, found {describe_head(found)}, nothing was changed"
    if found is None:
        return SinkConflictError(
            f"{met}; the head is gone: the sink was deleted or unmounted. Bring it back, or start this run anew"
        )
    return SinkConflictError(f"{met}; another publisher moved it: read it again and stop the older publisher")


def check_range(key: str, offset: int, nbytes: int | None, object_nbytes: int) -> int:
    """The length of a range of an object.

    Args:
        key: The object, for the message.
        offset: First byte.
        nbytes: Bytes wanted; None for all from ``offset`` on.
        object_nbytes: Bytes of the object.

    Returns:
        Bytes of the range.

    Raises:
        ValueError: Negative numbers.
        RefetchError: The range passes the object's end.
    """
    if offset < 0 or (nbytes is not None and nbytes < 0):
        raise ValueError(f"range of {key!r} refused: offset {offset}, {nbytes} bytes; both must be 0 or more")
    wanted = max(object_nbytes - offset, 0) if nbytes is None else nbytes
    if offset + wanted > object_nbytes:
        raise RefetchError(
            f"range of {key!r} passes its end: bytes {offset} to {offset + wanted} wanted, {object_nbytes} there; "
            f"drop what was cached of this publication and read its manifest again"
        )
    return wanted


def byte_views(parts: Iterable[Buffer]) -> Iterator[memoryview]:
    """The parts of an object as flat views of bytes, empty ones left out; nothing is copied.

    Raises:
        TypeError: A part is not a buffer, or not contiguous in memory.
    """
    for part in parts:
        view = memoryview(part)
        if not view.c_contiguous:
            raise TypeError(f"part of shape {view.shape}, strides {view.strides} is not contiguous: copy it first")
        if view.nbytes:
            # A view that is flat bytes already must not be cast: casting needs a non-empty C-contiguous shape.
            yield view if view.format == "B" and view.ndim == 1 else view.cast("B")


def writable_view(out: memoryview) -> memoryview:
    """``out`` as flat bytes that may be written.

    Raises:
        TypeError: It is read-only or not contiguous.
    """
    if out.readonly or not out.c_contiguous:
        raise TypeError("out must be a writable memoryview of contiguous bytes")
    if not out.nbytes:
        return memoryview(bytearray())
    return out if out.format == "B" and out.ndim == 1 else out.cast("B")


class Deadline:
    """The end of a call's patience: one for all the waits inside the call.

    Attributes:
        timeout_s: Seconds given to the call.
    """

    __slots__ = ("_end", "timeout_s")

    def __init__(self, timeout_s: float) -> None:
        """Start now.

        Raises:
            ValueError: ``timeout_s`` is negative or not finite: no wait is for ever.
        """
        if not (math.isfinite(timeout_s) and timeout_s >= 0):
            raise ValueError(f"timeout_s must be a finite number of seconds, 0 or more, not {timeout_s}")
        self.timeout_s = timeout_s
        self._end = time.monotonic() + timeout_s

    def left_s(self) -> float:
        """Seconds left, never negative."""
        return max(0.0, self._end - time.monotonic())

    def check(self, what: str) -> None:
        """Raise RetryError naming ``what`` where no time is left."""
        if time.monotonic() >= self._end:
            raise self.passed(what)

    def passed(self, what: str) -> RetryError:
        """The error for ``what`` having taken too long."""
        return RetryError(
            f"{what}: not done within {self.timeout_s:g} s; whether it took effect is unknown: read again, then retry"
        )


class Sink(ABC):
    """A place for publications. Thread-safe; usable from several processes where the place itself is shared.

    A key below another object's key (``a`` and ``a/b``) may be refused with ValueError: file systems cannot hold both.

    Attributes:
        keeps_parts: Whether ``create`` holds all parts of an object until it is written: memory plans count them.
    """

    keeps_parts: bool = False

    @abstractmethod
    def create(self, key: str, parts: Iterable[Buffer], *, timeout_s: float = DEFAULT_TIMEOUT_S) -> int:
        """Create an object, all or nothing; durable when this returns.

        Args:
            key: See ``check_key``.
            parts: The object's bytes in order; read once, never joined in memory. A part stays unchanged until this
                returns.
            timeout_s: Longest wait.

        Returns:
            Bytes written.

        Raises:
            SinkConflictError: The key exists with other bytes. Equal bytes are success.
            RetryError: The place did not answer in time; whether the object exists is unknown.
        """

    @abstractmethod
    def read(
        self, key: str, offset: int = 0, nbytes: int | None = None, *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> bytes:
        """Read a range of an object (all of it by default).

        Raises:
            KeyError: No such object.
            RefetchError: The range passes the object's end. A range from beyond the end with ``nbytes`` None does too.
            RetryError: The place did not answer in time.
        """

    @abstractmethod
    def read_into(self, key: str, offset: int, out: memoryview, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Read ``len(out)`` bytes at ``offset`` into ``out`` (writable, contiguous bytes); raises like ``read``.

        *Memory*: the sink writes into ``out`` until this returns or raises, never later; after an error its bytes are
        undefined.
        """

    def open_file(self, key: str, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> int | None:
        """An object as an open file, so that another process can read it without this one's help.

        Returns:
            A descriptor for reading, which the caller closes; None where objects are not files, or reads must come through
            this sink.

        Raises:
            KeyError: No such object.
        """
        del key, timeout_s
        return None

    @abstractmethod
    def size(self, key: str, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> int:
        """Bytes of an object. KeyError where it does not exist."""

    @abstractmethod
    def keys(self, prefix: str, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> Iterator[str]:
        """Keys below ``prefix`` (whole parts), ascending; only complete objects."""

    @abstractmethod
    def delete(self, key: str, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Delete an object; no error where it does not exist."""

    @abstractmethod
    def read_head(self, run: str, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> bytes | None:
        """The head document of a run as it was written, or None where no publisher ever claimed the run.

        A sink never looks inside: a document that does not parse comes back raw, and the caller decides.
        """

    @abstractmethod
    def swap_head(self, run: str, expected: bytes | None, new: bytes, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Replace the head if it still is ``expected`` (None: does not exist); durable when this returns.

        Args:
            run: One part of a key.
            expected: The document that must be there now, byte for byte.
            new: The document to put there, ``MAX_HEAD_NBYTES`` at most. It should hold something that no other
                publisher writes: else, after RetryError, a head that equals ``new`` may be another publisher's.
            timeout_s: Longest wait.

        Raises:
            SinkConflictError: The head is something else; nothing was changed.
            RetryError: No answer in time; whether the head moved is unknown.
        """

    def heads(self, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> list[str]:
        """Runs that have a head, ascending, for who looks at what is there; empty where a sink cannot list them."""
        return []

    def check_room(self, nbytes: int) -> None:  # noqa: B027
        """Refuse, before anything is written, what surely does not fit; does nothing where that cannot be known.

        Args:
            nbytes: Bytes that are about to be written in all.

        Raises:
            MemoryPlanError: With the bytes needed and the bytes free.
            ValueError: The place cannot be written to at all.
        """

    def sweep(self, *, min_age_s: float = 3600.0) -> int:
        """Remove what writers that died left behind and no reader can see.

        Args:
            min_age_s: Only what was last written to at least this many seconds ago.

        Returns:
            Bytes removed.
        """
        return 0

    def leftovers(self, prefix: str, *, min_age_s: float = 3600.0) -> list[str]:
        """What ``sweep`` would remove, by name.

        Args:
            prefix: Only below this (whole parts of a key); empty for everything.
            min_age_s: As in ``sweep``.

        Returns:
            Names as keys are written; no reader can see them, and they are no keys.
        """
        return []

    def describe(self) -> str:
        """What and where, for messages and reports."""
        return type(self).__name__

    def close(self) -> None:  # noqa: B027
        """Release what the sink holds. Idempotent."""

    def __enter__(self) -> Self:
        """The sink itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()
