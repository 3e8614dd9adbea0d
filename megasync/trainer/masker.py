"""The mask stage as the callback sees it: one pass a publication, on the CPU at once or on a device behind the next step.

Fourth stop of the flow (plan -> snapshot -> mask -> encode -> gather -> publish). ``HostMasker`` is ``mask.py``;
``DeviceMasker`` (device_masker.py) runs the kernels, ``CopiedMasker`` (copied_masker.py) brings weights to the CPU path. All give
the same frames, bytes and digest sums. Must not import receiver or an adapter.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator

from megasync.schema import Schema
from megasync.trainer.device_stream import Worker
from megasync.trainer.mask import anchor_frames, mask_regions
from megasync.trainer.snapshot import Snapshot
from megasync.types import Entries
from megasync.versions.changes import MaskedFrame
from megasync.versions.encode import EncodedDelta, encode, entries_of


class Masked(ABC):
    """What one pass found. Kept until its version is durable or withdrawn.

    Attributes:
        undo_begun: Words of it were XORed back out of the snapshot.
        undone: All of them were.
    """

    undo_begun = False
    undone = False

    @abstractmethod
    def changed_nbytes(self) -> int:
        """Bytes of the changed words; waits for the pass.

        Raises:
            Exception: What ended the pass.
        """

    @abstractmethod
    def encode(self, codec: str, algorithm: int) -> EncodedDelta:
        """The encoded frames. Called once, on the publisher's thread; waits for the pass.

        Args:
            codec: Codec name or ``auto``.
            algorithm: Digest algorithm of the format.

        Raises:
            Exception: What ended the pass, or the codec.
        """

    @abstractmethod
    def entries(self) -> Iterator[Entries]:
        """The changed words that the pass wrote into the snapshot, encoded or not: XOR them in again to undo it.

        Raises:
            RuntimeError: They are not known: the snapshot cannot be put back.
        """


class Masker(ABC):
    """Finds what changed in the owned tiles since the last pass, and advances the snapshot.

    An interrupt (``KeyboardInterrupt``) may end ``begin``, or its caller, at any instruction: what a pass writes into the
    snapshot it writes on another thread than the caller's, and it can be undone exactly whatever became of the caller.

    Attributes:
        can_defer: Whether a pass may read live weights after ``begin`` has returned. Only then do late chunks and the
            fence mean anything.
        newest: The pass of the last ``begin``, also where that was interrupted. Whoever calls ``begin`` sets it to None
            before, so that after an interrupt there is no doubt whose pass it is.
    """

    can_defer: bool = False
    newest: Masked | None = None

    @abstractmethod
    def begin(self, late: Collection[int] = ()) -> Masked:
        """Begin a pass over the live weights as they are now on the current stream.

        Args:
            late: Model chunks that are not current yet: each begins with ``start_chunk`` or ``start_rest``.

        Returns:
            The pass. An error in it is raised by the pass's own methods, never here: the other ranks go on.
        """

    def start_chunk(self, chunk: int) -> None:  # noqa: B027
        """A late chunk is current: read it from here on the current stream."""

    def start_rest(self) -> None:  # noqa: B027
        """Every chunk is current."""

    def fence(self) -> None:  # noqa: B027
        """Hold the current stream until nothing queued on it later can reach what a pass still reads."""

    @abstractmethod
    def undo(self, passes: Iterable[Masked]) -> None:
        """XOR passes back out of the snapshot, in the order given (newest first); done when it returns.

        A pass whose chunks have not all begun ends here. After an interrupt it may be called again with the same passes: each
        is taken back once.

        Raises:
            RuntimeError: The words of a pass are not known: the snapshot is of no use any more.
        """

    def close(self) -> None:  # noqa: B027
        """End; a pass that still runs fails. Idempotent."""


class HostMasked(Masked):
    """A finished pass of the CPU path.

    Args:
        schema: The run's schema.
        frames: What it found, filled by its masker.
    """

    def __init__(self, schema: Schema, frames: list[MaskedFrame]) -> None:
        self._schema = schema
        self._error: Exception | None = None
        self._frames: list[MaskedFrame] | None = frames
        self._delta: EncodedDelta | None = None

    def fail(self, error: Exception) -> None:
        """What ended it early."""
        self._error = error

    def changed_nbytes(self) -> int:
        """See ``Masked.changed_nbytes``."""
        if self._error is not None:
            raise self._error
        return sum(f.entries.num_changed * f.entries.word_nbytes for f in self._frames or [])

    def encode(self, codec: str, algorithm: int) -> EncodedDelta:
        """See ``Masked.encode``."""
        if self._error is not None:
            raise self._error
        assert self._frames is not None, "a pass is encoded once"
        self._delta = encode(self._frames, codec, algorithm)
        self._frames = None
        return self._delta

    def entries(self) -> Iterator[Entries]:
        """See ``Masked.entries``."""
        if self._delta is not None:
            yield from entries_of(self._schema, self._delta)
        for frame in self._frames or []:
            yield frame.entries


class AnchorMasked(Masked):
    """Full bytes of a snapshot that is not written meanwhile; nothing of it is held but what is encoded.

    Args:
        schema: The run's schema.
        snapshot: Only read.
    """

    def __init__(self, schema: Schema, snapshot: Snapshot) -> None:
        self._schema, self._snapshot = schema, snapshot

    def changed_nbytes(self) -> int:
        """See ``Masked.changed_nbytes``."""
        return self._snapshot.nbytes

    def encode(self, codec: str, algorithm: int) -> EncodedDelta:
        """See ``Masked.encode``."""
        return encode(anchor_frames(self._schema, self._snapshot), codec, algorithm)

    def entries(self) -> Iterator[Entries]:
        """Nothing: an anchor is no part of the snapshot's advance."""
        return iter(())


class FailedMasked(Masked):
    """A pass that could not begin.

    Args:
        error: Why.
    """

    def __init__(self, error: Exception) -> None:
        self._error = error

    def changed_nbytes(self) -> int:
        """See ``Masked.changed_nbytes``."""
        raise self._error

    def encode(self, codec: str, algorithm: int) -> EncodedDelta:
        """See ``Masked.encode``."""
        raise self._error

    def entries(self) -> Iterator[Entries]:
        """Nothing was written."""
        return iter(())


class HostMasker(Masker):
    """The CPU path: the pass is over when ``begin`` returns.

    Args:
        schema: The run's schema.
        snapshot: Its regions name the live memory.
    """

    def __init__(self, schema: Schema, snapshot: Snapshot) -> None:
        self._schema, self._snapshot = schema, snapshot
        # An interrupt of the caller cannot break off here between a write to the snapshot and the note of it.
        self._thread = Worker("megasync-mask")

    def begin(self, late: Collection[int] = ()) -> Masked:
        """See ``Masker.begin``; ``late`` must be empty."""
        frames: list[MaskedFrame] = []
        self.newest = masked = HostMasked(self._schema, frames)
        self._thread.run(lambda: self._mask(masked, frames))
        return masked

    def _mask(self, masked: HostMasked, frames: list[MaskedFrame]) -> None:
        try:
            for frame in mask_regions(self._schema, self._snapshot):
                frames.append(frame)  # one by one: what was found before an error is in the snapshot
        except Exception as e:
            masked.fail(e)

    def undo(self, passes: Iterable[Masked]) -> None:
        """See ``Masker.undo``."""
        passes = list(passes)
        self._thread.run(lambda: take_back(self._snapshot, passes))

    def close(self) -> None:
        """See ``Masker.close``."""
        self._thread.close()


def take_back(snapshot: Snapshot, passes: Iterable[Masked]) -> None:
    """XOR the words of passes back out of the snapshot, each pass once; on a thread that no interrupt breaks off.

    Args:
        snapshot: Written.
        passes: Over; newest first.

    Raises:
        RuntimeError: The words of a pass are not known, or taking them back broke off before.
    """
    for one in passes:
        if one.undone:
            continue
        if one.undo_begun:
            raise RuntimeError("an earlier withdrawal of the same pass broke off: the snapshot is no version any more")
        for entries in one.entries():
            one.undo_begun = True
            snapshot.xor_(entries)
        one.undone = True
