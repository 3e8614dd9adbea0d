"""What the mask stages of a device share: a side stream behind the next forward and backward, its thread, and the fence.

A pass reads live weights from a mark on the compute stream on (step end, or the end of a late chunk's first forward), chunk by
chunk on a thread. ``fence`` lets the compute stream wait for the last read before the optimizer writes. ``device_masker`` and
``copied_masker`` say how a chunk is read. With tensors on the CPU all of it runs in the same order. Must not import receiver or
an adapter.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from abc import abstractmethod
from collections import deque
from collections.abc import Collection, Sequence
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from threading import Event
from typing import Generic, TypeVar

import torch

from megasync.schema import Schema
from megasync.telemetry import Telemetry
from megasync.trainer.device_plan import VolatileCopy
from megasync.trainer.device_stream import Mark, SideStream
from megasync.trainer.masker import Masked, Masker
from megasync.versions.encode import EncodedDelta

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
        self.waiting = set(late)
        self.error: BaseException | None = None
        self.begun: Mark | None = None
        self.read: Mark | None = None  # after the last read of live weights that is queued so far
        self._issued = Event()
        self._delta: Future[EncodedDelta] = Future()

    def issue(self) -> None:
        """Every read of live weights is queued; ``read`` is when the last is done."""
        self._issued.set()

    def wait_issued(self) -> Mark | None:
        """Wait until the last read is queued, and give its mark."""
        self._issued.wait()
        return self.read

    def fail(self, error: BaseException) -> None:
        """The pass never ran, or nobody encodes it."""
        self.error = self.error or error
        self._issued.set()
        with contextlib.suppress(InvalidStateError):  # the encoder was faster
            self._delta.set_exception(self.error)

    def changed_nbytes(self) -> int:
        """See ``Masked.changed_nbytes``."""
        return sum(r.num_changed * r.word_nbytes for r in self._delta.result().records)

    def encode(self, codec: str, algorithm: int) -> EncodedDelta:
        """See ``Masked.encode``: it was begun when the words came down, with the codec and algorithm of the run."""
        return self._delta.result()


P = TypeVar("P", bound=SidePass)


class SideMasker(Masker, Generic[P]):
    """See the module docstring.

    Args:
        schema: The run's schema.
        chunks: Model chunks with weights that this rank owns, ascending.
        copies: Buffers that take the place of volatile weights, filled at every step end on the compute stream.
        device: Where the live weights are.
        telemetry: Where times go: ``held`` (compute stream blocked, device time), ``pass`` (device time of passes).
    """

    can_defer = True

    def __init__(
        self,
        schema: Schema,
        chunks: Sequence[int],
        copies: Sequence[VolatileCopy],
        device: torch.device,
        telemetry: Telemetry,
    ) -> None:
        self._schema, self._chunks, self._copies = schema, list(chunks), copies
        self._device, self._telemetry = device, telemetry
        self._side = SideStream(device)
        self._jobs: queue.SimpleQueue[tuple[P, int, Mark] | None] = queue.SimpleQueue()
        self._running: P | None = None
        self._times: deque[tuple[str, Mark, Mark]] = deque()
        self._encoder = ThreadPoolExecutor(1, thread_name_prefix="megasync-encode")
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="megasync-mask", daemon=True)
        self._thread.start()

    @abstractmethod
    def _new_pass(self, late: Collection[int]) -> P:
        """A pass that has not begun."""

    @abstractmethod
    def _read_chunk(self, masked: P, chunk: int, start: Mark) -> None:
        """Queue all reads of a chunk's weights behind ``start``; on the mask's thread, with its stream current."""

    @abstractmethod
    def _finish(self, masked: P) -> None:
        """Every chunk was read, or failed: let the fence pass, and see to the encoding; on the mask's thread."""

    def begin(self, late: Collection[int] = ()) -> Masked:
        """See ``Masker.begin``. *Stream*: the current one is the compute stream; volatile weights are copied on it."""
        self.fence()  # of a pass that no optimizer step has followed: its volatile copies are about to be overwritten
        self.collect_times()
        masked = self._new_pass(late)
        if self._copies:
            before = Mark(self._device)
            for copy in self._copies:
                copy.buffer.copy_(copy.live, non_blocking=True)
            self._times.append(("held", before, Mark(self._device)))
        self._running = masked
        start = Mark(self._device)
        chunks = [c for c in self._chunks if c not in masked.waiting] if self._chunks else [_NO_CHUNK]
        for chunk in chunks:
            self._begin_now(masked, chunk, start)
        return masked

    def _begin_now(self, masked: P, chunk: int, start: Mark) -> None:
        """Begin a chunk; a pass that is interrupted there ends, so that neither the fence nor closing waits for it."""
        try:
            self._begin_chunk(masked, chunk, start)
        except BaseException as e:
            masked.waiting.clear()
            masked.fail(e)
            self._give_up(masked)
            raise

    def _give_up(self, masked: P) -> None:
        """A pass was interrupted before all of its chunks had begun: nobody finishes it."""

    def _begin_chunk(self, masked: P, chunk: int, start: Mark) -> None:
        """A chunk's weights are current from ``start`` on; on the trainer's thread."""
        self._jobs.put((masked, chunk, start))

    def start_chunk(self, chunk: int) -> None:
        """See ``Masker.start_chunk``."""
        masked = self._running
        if masked is None or chunk not in masked.waiting:
            return
        masked.waiting.remove(chunk)
        if chunk in self._chunks:
            self._begin_now(masked, chunk, Mark(self._device))

    def start_rest(self) -> None:
        """See ``Masker.start_rest``."""
        for chunk in sorted(self._running.waiting if self._running is not None else ()):
            self.start_chunk(chunk)

    def fence(self) -> None:
        """See ``Masker.fence``. The host waits until the last read is queued, the compute stream until it is done.

        Every late chunk must have begun.
        """
        masked = self._running
        if masked is None:
            return
        assert not masked.waiting, f"chunks {sorted(masked.waiting)} have not begun: start_rest comes before the fence"
        self._running = None
        before = Mark(self._device)
        read = masked.wait_issued()
        if read is not None:
            read.hold()
        self._times.append(("held", before, Mark(self._device)))

    def close(self) -> None:
        """See ``Masker.close``. Waits until the device has left the snapshot alone."""
        if self._closed:
            return
        self._closed = True
        self._let_go()
        if self._running is not None and self._running.waiting:
            self._running.fail(RuntimeError("the publisher was closed before every model chunk was read"))
        self._jobs.put(None)
        self._thread.join(_CLOSE_S)
        self._encoder.shutdown(wait=True)
        self._side.synchronize()
        self.collect_times()

    def _let_go(self) -> None:
        """Closing begins: nothing of this masker may wait for a later pass any more."""

    def collect_times(self) -> None:
        """Add up what the device has finished timing; nothing is waited for."""
        while self._times and self._times[0][2].passed:
            name, before, after = self._times.popleft()
            self._telemetry.add(name, after.seconds_since(before))

    def _work(self) -> None:
        """The mask thread: chunks of passes in the order they began."""
        with self._side.current():
            while (job := self._jobs.get()) is not None:
                masked, chunk, start = job
                try:
                    self._read_chunk(masked, chunk, start)
                except BaseException as e:
                    masked.error = masked.error or e
                    log.exception("megasync: masking model chunk %d failed", chunk)
                masked.num_left -= 1
                if masked.num_left <= 0:
                    self._finish(masked)

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
