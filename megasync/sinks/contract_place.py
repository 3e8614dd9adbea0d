"""What the checks of the sink contract share: the place under test, and ways to state what must hold.

Used by ``contract.py`` and the files beside it. Must not import trainer, receiver or a test library.
"""

from __future__ import annotations

import contextlib
import threading
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from megasync.sinks.base import Sink


@dataclass(frozen=True, slots=True)
class Place:
    """A fresh, empty place for objects.

    Attributes:
        open: Makes one more sink object at this place.
        url: How another process opens it with ``open_sink``; empty where only this process can.
        options: Options for that.
        large_mib: Size of the large object of ``check_large_object`` in MiB; at least 20 to be cut everywhere.
        measured: Whether memory is measured; not where the place itself is in this process beside the sink.
    """

    open: Callable[[], Sink]
    url: str = ""
    options: Mapping[str, str] = field(default_factory=dict)
    large_mib: int = 64
    measured: bool = True


def expect(holds: bool, what: str) -> None:
    """Raise AssertionError with ``what`` unless it holds; works with ``python -O`` too."""
    if not holds:
        raise AssertionError(what)


@contextlib.contextmanager
def raises(*kinds: type[BaseException], what: str) -> Iterator[None]:
    """The block must raise one of the exceptions, with a message."""
    try:
        yield
    except kinds as error:
        expect(bool(str(error)), f"{what}: {type(error).__name__} without a message")
        return
    raise AssertionError(f"{what}: none of {[k.__name__ for k in kinds]} was raised")


def in_threads(num_threads: int, work: Callable[[int], None]) -> None:
    """Run ``work(0)`` to ``work(num_threads - 1)`` at once; the first error is raised."""
    errors: list[BaseException] = []
    start = threading.Barrier(num_threads)

    def run(index: int) -> None:
        try:
            start.wait(30)
            work(index)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    expect(not any(t.is_alive() for t in threads), "a thread hangs in the sink")
    if errors:
        raise errors[0]


@contextlib.contextmanager
def peak(place: Place, limit_nbytes: int, what: str) -> Iterator[None]:
    """The block may have so many bytes more in Python's memory than before, at any moment."""
    if not place.measured:
        yield
        return
    mine = not tracemalloc.is_tracing()
    if mine:
        tracemalloc.start()
    try:
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        yield
        grown = tracemalloc.get_traced_memory()[1] - before
        expect(grown <= limit_nbytes, f"{what} took {grown} bytes of memory, {limit_nbytes} at most")
    finally:
        if mine:
            tracemalloc.stop()
