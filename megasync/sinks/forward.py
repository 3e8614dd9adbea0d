"""A sink that passes every call on to another one; a base for sinks that watch, choose or disturb.

``faulty.py`` and ``process_group.py`` build on it. Must not import trainer or receiver.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from megasync.sinks.base import DEFAULT_TIMEOUT_S, Buffer, Sink

T = TypeVar("T")


class ForwardingSink(Sink):
    """Another sink under a new name; a subclass overrides ``_run`` to act around each call.

    Attributes:
        inner: The sink that does the work.
    """

    def __init__(self, inner: Sink) -> None:
        """Wrap a sink, which this one closes."""
        self.inner = inner
        self.keeps_parts = inner.keeps_parts

    def _run(self, operation: str, key: str, timeout_s: float, effect: Callable[[], T]) -> T:
        """Do a call; ``effect`` does it at the inner sink."""
        return effect()

    def create(self, key: str, parts: Iterable[Buffer], *, timeout_s: float = DEFAULT_TIMEOUT_S) -> int:
        """See ``Sink.create``."""
        return self._run("create", key, timeout_s, lambda: self.inner.create(key, parts, timeout_s=timeout_s))

    def read(
        self, key: str, offset: int = 0, nbytes: int | None = None, *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> bytes:
        """See ``Sink.read``."""
        return self._run("read", key, timeout_s, lambda: self.inner.read(key, offset, nbytes, timeout_s=timeout_s))

    def read_into(self, key: str, offset: int, out: memoryview, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """See ``Sink.read_into``."""
        self._run("read_into", key, timeout_s, lambda: self.inner.read_into(key, offset, out, timeout_s=timeout_s))

    def size(self, key: str, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> int:
        """See ``Sink.size``."""
        return self._run("size", key, timeout_s, lambda: self.inner.size(key, timeout_s=timeout_s))

    def keys(self, prefix: str, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> Iterator[str]:
        """See ``Sink.keys``."""
        return self._run("keys", prefix, timeout_s, lambda: self.inner.keys(prefix, timeout_s=timeout_s))

    def delete(self, key: str, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """See ``Sink.delete``."""
        self._run("delete", key, timeout_s, lambda: self.inner.delete(key, timeout_s=timeout_s))

    def read_head(self, run: str, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> bytes | None:
        """See ``Sink.read_head``."""
        return self._run("read_head", run, timeout_s, lambda: self.inner.read_head(run, timeout_s=timeout_s))

    def swap_head(self, run: str, expected: bytes | None, new: bytes, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """See ``Sink.swap_head``."""
        self._run("swap_head", run, timeout_s, lambda: self.inner.swap_head(run, expected, new, timeout_s=timeout_s))

    def heads(self, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> list[str]:
        """See ``Sink.heads``."""
        return self.inner.heads(timeout_s=timeout_s)

    def check_room(self, nbytes: int) -> None:
        """See ``Sink.check_room``."""
        self.inner.check_room(nbytes)

    def sweep(self, *, min_age_s: float = 3600.0) -> int:
        """See ``Sink.sweep``."""
        return self.inner.sweep(min_age_s=min_age_s)

    def leftovers(self, prefix: str, *, min_age_s: float = 3600.0) -> list[str]:
        """See ``Sink.leftovers``."""
        return self.inner.leftovers(prefix, min_age_s=min_age_s)

    def describe(self) -> str:
        """What and where."""
        return self.inner.describe()

    def close(self) -> None:
        """Close the inner sink."""
        self.inner.close()
