"""What the mask stages of a device share: a side stream behind the next forward and backward, its thread, and the fence.

A pass reads live weights from a mark on the compute stream on (step end, or the end of a late chunk's first forward), chunk by
chunk on a thread. ``fence`` lets the compute stream wait for the last read before the optimizer writes. ``device_masker`` and
``copied_masker`` say how a chunk is read. With tensors on the CPU all of it runs in the same order. Must not import receiver or
an adapter.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Generic, TypeVar, cast

import torch

from megasync.schema import Schema
from megasync.telemetry import Telemetry
from megasync.trainer.device_plan import VolatileCopy
from megasync.trainer.device_stream import Done, Mark, SideStream, Worker
from megasync.trainer.masker import Masked, Masker, take_back
from megasync.trainer.snapshot import Snapshot
from megasync.types import Entries
from megasync.versions.encode import EncodedDelta, entries_of

log = logging.getLogger(__name__)

_CLOSE_S = 60.0
_NO_CHUNK = -1


class SidePass(Masked):
    """One pass: what has begun, what has been read, and the encoded frames. Filled by its masker's threads.

    Args:
        schema: The run's schema.
        chunks: Chunks that are read.
        late: Chunks that begin later, with or without weights of this rank.
    """

    def __init__(self, schema: Schema, chunks: Collection[int], late: Collection[int]) -> None:
        self._schema = schema
        self.num_left = len(chunks)
        self.finished = False  # on the mask's thread
        self.waiting = set(late)
        self.error: BaseException | None = None
        self.unknown: BaseException | None = None  # why the snapshot may have words of it that it cannot name
        self.begun: Mark | None = None
        self.read: Mark | None = None  # after the last read of live weights that is queued so far
        self._issued = Done()
        self.ended = Done()  # encoded, or failed
        self._delta: EncodedDelta | None = None
        self._failure: BaseException | None = None

    def issue(self) -> None:
        """Every read of live weights is queued; ``read`` is when the last is done."""
        self._issued.say()

    def wait_issued(self) -> Mark | None:
        """Wait until the last read is queued, and give its mark."""
        self._issued.wait()
        return self.read

    def changed_nbytes(self) -> int:
        """See ``Masked.changed_nbytes``."""
        return sum(r.num_changed * r.word_nbytes for r in self._encoded().records)

    def encode(self, codec: str, algorithm: int) -> EncodedDelta:
        """See ``Masked.encode``: it was begun when the words came down, with the codec and algorithm of the run."""
        return self._encoded()

    def _encoded(self) -> EncodedDelta:
        self.ended.wait()
        if self._failure is not None:
            if isinstance(self._failure, Exception):
                raise self._failure
            # Of the trainer's thread in another call: who asks now was not interrupted; the version fails and is withdrawn.
            raise RuntimeError(f"the mask pass was interrupted ({type(self._failure).__name__})") from self._failure
        assert self._delta is not None
        return self._delta

    def entries(self) -> Iterator[Entries]:
        """See ``Masked.entries``; waits for the pass."""
        self.ended.wait()
        if self.unknown is not None:
            raise RuntimeError(
                "the snapshot cannot be put back, since words that a pass wrote into it were lost "
                f"({type(self.unknown).__name__}: {self.unknown}): start anew, which reads it from the head"
            ) from self.unknown
        yield from self._unencoded() if self._delta is None else entries_of(self._schema, self._delta)

    @abstractmethod
    def _unencoded(self) -> Iterator[Entries]:
        """The words of a pass that failed."""


P = TypeVar("P", bound=SidePass)


class SideMasker(Masker, Generic[P]):
    """See the module docstring.

    Args:
        schema: The run's schema.
        snapshot: Seeded.
        chunks: Model chunks with weights that this rank owns, ascending.
        copies: Buffers that take the place of volatile weights, filled at every step end on the compute stream.
        device: Where the live weights are.
        telemetry: Where times go: ``held`` (compute stream blocked, device time), ``pass`` (device time of passes).
    """

    can_defer = True

    def __init__(
        self,
        schema: Schema,
        snapshot: Snapshot,
        chunks: Sequence[int],
        copies: Sequence[VolatileCopy],
        device: torch.device,
        telemetry: Telemetry,
    ) -> None:
        self._schema, self._snapshot, self._chunks, self._copies = schema, snapshot, list(chunks), copies
        self._device, self._telemetry = device, telemetry
        self._side = SideStream(device)
        self._running: P | None = None
        self._times: deque[tuple[str, Mark, Mark]] = deque()
        self._reader, self._encoder = Worker("megasync-mask"), Worker("megasync-encode")
        self._closed = False

    @abstractmethod
    def _new_pass(self, late: Collection[int]) -> P:
        """A pass that has not begun."""

    @abstractmethod
    def _read_chunk(self, masked: P, chunk: int, start: Mark) -> None:
        """Queue all reads of a chunk's weights behind ``start``; on the mask's thread, with its stream current."""

    @abstractmethod
    def _finish(self, masked: P) -> None:
        """Every chunk was read, or the pass failed: let the fence pass, and see to the encoding; once, on the mask's thread."""

    def begin(self, late: Collection[int] = ()) -> Masked:
        """See ``Masker.begin``. *Stream*: the current one is the compute stream; volatile weights are copied on it."""
        self.fence()  # of a pass that no optimizer step has followed: its volatile copies are about to be overwritten
        self.collect_times()
        masked = self._new_pass(late)
        chunks = [c for c in self._chunks if c not in masked.waiting] if self._chunks else [_NO_CHUNK]
        self._start(masked, chunks, self._copies)
        return masked

    def _start(self, masked: P, chunks: Sequence[int], copies: Sequence[VolatileCopy] = ()) -> None:
        """Begin chunks of a pass. What goes wrong or is interrupted here ends the pass; only interrupts go through."""
        try:
            self._running = self.newest = masked
            masked.waiting.difference_update(chunks)
            start = Mark(self._device)
            if copies:
                for copy in copies:
                    copy.buffer.copy_(copy.live, non_blocking=True)
                before, start = start, Mark(self._device)
                self._times.append(("held", before, start))
            for chunk in chunks:
                if chunk in self._chunks or chunk == _NO_CHUNK:
                    self._begin_chunk(masked, chunk, start)
        except BaseException as e:
            self._give_up(masked, e)
            if not isinstance(e, Exception):
                raise
            log.exception("megasync: a mask pass could not begin")

    def _give_up(self, masked: P, error: BaseException) -> None:
        """The pass ends behind the chunks that have begun: neither the fence nor closing waits for the others."""
        masked.error = masked.error or error
        self._reader.submit(lambda: self._step(masked, _NO_CHUNK, None))
        masked.waiting.clear()  # last: while any are left the fence ends the pass itself

    def _begin_chunk(self, masked: P, chunk: int, start: Mark) -> None:
        """A chunk's weights are current from ``start`` on; on the trainer's thread."""
        self._reader.submit(lambda: self._step(masked, chunk, start))

    def start_chunk(self, chunk: int) -> None:
        """See ``Masker.start_chunk``."""
        masked = self._running
        if masked is None or chunk not in masked.waiting:
            return
        self._start(masked, [chunk])

    def start_rest(self) -> None:
        """See ``Masker.start_rest``."""
        for chunk in sorted(self._running.waiting if self._running is not None else ()):
            self.start_chunk(chunk)

    def fence(self) -> None:
        """See ``Masker.fence``. The host waits until the last read is queued, the compute stream until it is done.

        A pass of which late chunks have not begun fails here: what they hold is about to change.
        """
        masked = self._running
        if masked is None:
            return
        if masked.waiting:
            chunks = sorted(masked.waiting)
            self._give_up(masked, RuntimeError(f"chunks {chunks} have not begun: start_rest comes before the fence"))
        before = Mark(self._device)
        read = masked.wait_issued()
        if read is not None:
            read.hold()
        self._times.append(("held", before, Mark(self._device)))
        self._running = None  # last: a fence that was interrupted holds when it is called again

    def undo(self, passes: Iterable[Masked]) -> None:
        """See ``Masker.undo``. *Stream*: the mask's."""
        passes = list(passes)
        for one in passes:
            if isinstance(one, SidePass):
                if one.waiting:
                    self._give_up(cast("P", one), RuntimeError("it was withdrawn before every model chunk was read"))
                one.ended.wait()
        # On the thread that reads: a later pass may be comparing right now.
        self._reader.run(lambda: self._take_back(passes))

    def _take_back(self, passes: list[Masked]) -> None:
        with self._side.current():
            self._side.synchronize()
            take_back(self._snapshot, passes)
            self._side.synchronize()

    def close(self) -> None:
        """See ``Masker.close``. Waits until the device has left the snapshot alone."""
        if self._closed:
            return
        self._let_go()
        if self._running is not None and self._running.waiting:
            self._give_up(self._running, RuntimeError("the publisher was closed before every model chunk was read"))
        self._reader.close(_CLOSE_S)
        self._encoder.close()
        self._side.synchronize()
        self.collect_times()
        self._closed = True  # last: after an interrupt it goes on

    def _let_go(self) -> None:
        """Closing begins: nothing of this masker may wait for a later pass any more."""

    def collect_times(self) -> None:
        """Add up what the device has finished timing; nothing is waited for."""
        while self._times and self._times[0][2].passed:
            name, before, after = self._times.popleft()
            self._telemetry.add(name, after.seconds_since(before))

    def _step(self, masked: P, chunk: int, start: Mark | None) -> None:
        """A chunk whose weights are current from a mark on; no mark: the pass is given up. On the mask's thread."""
        with self._side.current():
            if start is None:
                masked.num_left = 0
            else:
                self._read(masked, chunk, start)
            if masked.num_left <= 0 and not masked.finished:
                masked.finished = True
                self._finish(masked)

    def _read(self, masked: P, chunk: int, start: Mark) -> None:
        try:
            self._read_chunk(masked, chunk, start)
        except BaseException as e:
            masked.error = masked.error or e
            log.exception("megasync: masking model chunk %d failed", chunk)
        masked.num_left -= 1

    def _mark_read(self, masked: P) -> None:
        """Let the fence pass; where an error came, behind whatever was queued before it."""
        if masked.error is not None:
            try:
                masked.read = Mark(self._device)
            except BaseException:
                masked.read = None
        masked.issue()
        if masked.read is not None and masked.begun is not None:
            self._times.append(("pass", masked.begun, masked.read))
