"""The backend seam: how staged frames become writes to live memory, whatever the device.

``place`` does all that can fail without touching live memory; a `Placed` then proves its base, writes, is read back and
can be undone. The CPU backend is in ``cpu``; backends of other devices implement the same two classes. Comes between
fetch and apply. Must not import a kernel or an engine.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from megasync.errors import TaintedError
from megasync.frames import FrameRecord
from megasync.manifest import Manifest
from megasync.receiver.sums import Sums
from megasync.schema import Schema
from megasync.types import Entries
from megasync.versions.publication import PublicationReader, decode_frame

if TYPE_CHECKING:
    from megasync.receiver.fetch import Range

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class FetchedFrame:
    """One frame whose stored bytes have the digest that the manifest gives.

    Attributes:
        schema: The run's schema.
        manifest: The publication.
        record: The frame's record.
        stored: Its stored bytes, planes one after the other.
    """

    schema: Schema
    manifest: Manifest
    record: FrameRecord
    stored: memoryview

    def entries(self) -> Entries:
        """Decode on the host.

        Raises:
            FormatError: The bytes break a rule of the format.
        """
        return decode_frame(self.schema, self.manifest, self.record, self.stored)


class Placed(ABC):
    """Changed words bound to live addresses; live memory is only touched by the methods below.

    Attributes:
        num_changed: Canonical words that this rank changes, replicas included.
        nbytes: Memory that this takes.
        shared: Whether a write may touch bytes that another `Placed` writes too (nibbles): then never in parallel.
        blind: Which words are touched is only known while they are written (a mask that is decoded layer by layer): there
            is nothing to prove before. The tracked state digest and the identity of the storage are then the proof of the
            base, and what is read back is the proof of both.
    """

    num_changed: int
    nbytes: int
    shared: bool = False
    blind: bool = False

    @abstractmethod
    def prove(self) -> tuple[Sums, Sums]:
        """Read the live words at the touched positions, through the layout.

        Returns:
            Digest sums over primary words by tensor: as they are, and as they will be after ``xor_``.

        Raises:
            BaseMismatchError: A copy differs from its primary.
        """

    def arm(self) -> None:  # noqa: B027
        """Everything of ``write_`` that touches no live memory and takes time, done before the pause; may be left out."""

    @abstractmethod
    def xor_(self) -> None:
        """Write. ``prove`` must have been called on the state that is now live."""

    @abstractmethod
    def read_back(self) -> Sums:
        """Digest sums over the primary words at the touched positions, read from live memory now."""

    def write_(self) -> Sums:
        """``xor_``, then ``read_back``; backends that can do both while the words are near do.

        Returns:
            What was read back. Where that was already found to be what ``prove`` said, the very object that it returned.
        """
        self.xor_()
        return self.read_back()

    @abstractmethod
    def undo_(self) -> None:
        """Restore what ``prove`` read, wherever ``xor_`` stopped. Calling it again, or before ``xor_``, does no
        harm."""


class Placing:
    """The frames of one publication, on their way to live addresses.

    Backends that place a publication as a whole override it; by default every range of frames is placed by itself.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend = backend

    def place(self, frames: Sequence[FetchedFrame]) -> list[Placed]:
        """See ``Backend.place``; thread-safe."""
        return self.backend.place(frames)

    def place_range(self, reader: PublicationReader, span: Range) -> list[Placed] | None:
        """Read and place a whole range of frames, elsewhere than on this thread; thread-safe.

        Returns:
            What is placed; None where the range is to be read here and given to ``place``, also where something is wrong
            with it.
        """
        return None

    def finish(self) -> list[Placed]:
        """What is placed once all frames were given; called once, after the last ``place`` has returned."""
        return []


class Backend(ABC):
    """Places frames for one bound engine rank.

    Attributes:
        name: What ran, for results: ``cpu``, ``scatter``, ``de``, ``sm``.
        threads: Whether ``place`` and ``prove`` gain from several threads. Not where they are many short numpy calls,
            which wait for one another's interpreter lock (measured: slower from two threads on); reads, digests of
            stored bytes and writes run on the pool all the same.
        entry_nbytes: About what a staged changed word takes, to see before staging whether it fits.
        range_scale: How many times larger than usual the ranges of frames should be that are placed at once.
    """

    name: str
    threads: bool = False
    entry_nbytes: int = 32
    range_scale: int = 1

    def begin(self, manifest: Manifest, frames: np.ndarray) -> Placing:
        """Start to place a publication.

        Args:
            manifest: The publication.
            frames: Numbers of the frames that will be given.
        """
        return Placing(self)

    @abstractmethod
    def place(self, frames: Sequence[FetchedFrame]) -> list[Placed]:
        """Decode frames and bind their changed words to live addresses. Thread-safe; reads no live memory.

        Raises:
            FormatError: A frame breaks a rule of the format: nothing was touched.
        """

    def write_(self, placed: Sequence[Placed], pool: ThreadPoolExecutor | None) -> list[Sums]:
        """Write everything and read it back. All writes have ended when this returns or raises.

        Args:
            placed: From ``place``, proven.
            pool: Threads; None for the caller's.

        Returns:
            What ``Placed.read_back`` gives, for each.
        """
        alone = [p for p in placed if p.shared]
        sums = run_all(pool, [p.write_ for p in placed if not p.shared])
        return sums + [p.write_() for p in alone]

    def judge(self, error: BaseException) -> None:
        """Tell a fault of the device from an exception of the host, after the first write failed.

        Args:
            error: What ended the write.

        Raises:
            TaintedError: The device failed or work on it does not end: what was written is unknown. Returns where an undo
                can put everything back.
        """
        if isinstance(error, TaintedError):
            raise error

    def undo_(self, placed: Sequence[Placed]) -> list[Sums]:
        """Undo everything, newest first, and read it back."""
        for p in reversed(placed):
            p.undo_()
        return [p.read_back() for p in placed]


def run_all(pool: ThreadPoolExecutor | None, calls: Sequence[Callable[[], T]]) -> list[T]:
    """Run calls on a pool and wait for all of them, also where one raises; then raise the first error."""
    if pool is None:
        return [call() for call in calls]
    futures = [pool.submit(call) for call in calls]
    wait(futures)
    return [f.result() for f in futures]
