"""The mask stage on a device: a side stream behind the next forward and backward, a thread that drives it, and the fence.

A pass reads live weights from a mark on the compute stream on (step end, or the end of a late chunk's first forward), finds
and emits changed words span by span, and brings their planes down to pinned memory. ``fence`` lets the compute stream wait
for the last read before the optimizer writes. Frames are encoded on further threads, so that a slow sink never keeps a pass
from landing. With tensors on the CPU the kernels' reference runs, in the same order. Must not import receiver or an adapter.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections import deque
from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor

import torch

from megasync.kernels.compact import compact_jobs_
from megasync.kernels.compact_launch import CompactPart
from megasync.schema import Schema
from megasync.telemetry import Telemetry
from megasync.trainer.device_arena import Landing, Landings
from megasync.trainer.device_masked import DeviceMasked, Landed
from megasync.trainer.device_plan import (
    HELD_NBYTES,
    NUM_LANDINGS,
    NUM_STAGING_SLOTS,
    landing_nbytes,
    plan_compactions,
)
from megasync.trainer.device_stream import Mark, SideStream
from megasync.trainer.masker import HostMasker, Masked, Masker
from megasync.trainer.snapshot import Snapshot

log = logging.getLogger(__name__)

_Job = tuple[DeviceMasked, int, Mark]
_MAX_THREADS = 8
_CLOSE_S = 60.0


class DeviceMasker(Masker):
    """See the module docstring.

    Args:
        schema: The run's schema.
        snapshot: Seeded; its regions name the live memory.
        device: Where the live weights are.
        codec: Codec name or ``auto``.
        algorithm: Digest algorithm of the format.
        telemetry: Where times go: ``held`` (compute stream blocked, device time), ``pass`` (device time of passes),
            ``landing`` (host, waiting for planes), ``codec`` (host, encoder's thread).
        num_threads: Threads of the outer codec.
        landing: Bytes of a landing arena; by default ``landing_nbytes`` of the snapshot.

    *Stream*: with ``CUDA_DEVICE_MAX_CONNECTIONS=1`` kernels of all streams start in the order they were launched in. A pass over
    a snapshot in HBM is launched at once; one over a snapshot in host memory is launched as its slots arrive, behind all
    that the trainer has launched meanwhile, and may then hold the optimizer's step: keep the snapshot in HBM there.
    *Memory*: two landing arenas and the tables, made here; passes reuse them.
    """

    can_defer = True

    def __init__(
        self,
        schema: Schema,
        snapshot: Snapshot,
        device: torch.device,
        *,
        codec: str,
        algorithm: int,
        telemetry: Telemetry,
        num_threads: int = 4,
        landing: int | None = None,
    ) -> None:
        self._schema, self._snapshot, self._device, self._telemetry = schema, snapshot, device, telemetry
        self._codec, self._algorithm = codec, algorithm
        self._compactions, self._copies = plan_compactions(schema, snapshot, device)
        self._chunks = sorted({c.chunk for c in self._compactions})
        size = landing_nbytes(snapshot.nbytes) if landing is None else landing
        self._landings = Landings(NUM_LANDINGS, size, device)
        self._side = SideStream(device)
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._running: DeviceMasked | None = None
        self._held: deque[tuple[Landed, CompactPart]] = deque()
        self._held_nbytes = 0
        self._times: deque[tuple[str, Mark, Mark]] = deque()
        self._encoder = ThreadPoolExecutor(1, thread_name_prefix="megasync-encode")
        self._num_threads = num_threads
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="megasync-codec")
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="megasync-mask", daemon=True)
        self._thread.start()

    def begin(self, late: Collection[int] = ()) -> Masked:
        """See ``Masker.begin``. *Stream*: the current one is the compute stream; volatile weights are copied on it."""
        self.fence()  # of a pass that no optimizer step has followed: its volatile copies are about to be overwritten
        self.collect_times()
        masked = DeviceMasked(self._schema, self._chunks, late)
        if self._copies:
            before = Mark(self._device)
            for copy in self._copies:
                copy.buffer.copy_(copy.live, non_blocking=True)
            self._times.append(("held", before, Mark(self._device)))
        self._running = masked
        start = Mark(self._device)
        if not self._chunks:
            self._jobs.put((masked, -1, start))
        for chunk in self._chunks:
            if chunk not in masked.waiting:
                self._jobs.put((masked, chunk, start))
        return masked

    def start_chunk(self, chunk: int) -> None:
        """See ``Masker.start_chunk``."""
        masked = self._running
        if masked is None or chunk not in masked.waiting:
            return
        masked.waiting.remove(chunk)
        if chunk in self._chunks:
            self._jobs.put((masked, chunk, Mark(self._device)))

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

    def undo(self, passes: Iterable[Masked]) -> None:
        """See ``Masker.undo``. *Stream*: the mask's; done when it returns."""
        with self._side.current():
            self._side.synchronize()
            for one in passes:
                for entries in one.entries():
                    self._snapshot.xor_(entries)
            self._side.synchronize()

    def close(self) -> None:
        """See ``Masker.close``. Waits until the device has left the snapshot alone."""
        if self._closed:
            return
        self._closed = True
        self._landings.close()
        if self._running is not None and self._running.waiting:
            self._running.fail(RuntimeError("the publisher was closed before every model chunk was read"))
        self._jobs.put(None)
        self._thread.join(_CLOSE_S)
        self._encoder.shutdown(wait=True)
        self._pool.shutdown(wait=True)
        self._side.synchronize()
        self.collect_times()

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

    def _read_chunk(self, masked: DeviceMasked, chunk: int, start: Mark) -> None:
        if masked.landing is None:
            masked.landing = self._landings.take()
        if masked.error is not None:
            return
        mine = [c for c in self._compactions if c.chunk == chunk]
        landed = []
        for compaction in mine:
            counts = masked.landing.take((len(compaction.plan.segment_words),), torch.int32)
            counts.zero_()  # of segments that an error keeps from being read
            landed.append(Landed(compaction, counts, masked.landing.take(tuple(compaction.lanes.shape), torch.int64)))
            compaction.lanes.zero_()
        masked.landed += landed

        def queued() -> None:
            masked.read = Mark(self._device)

        jobs = [(c.plan, c.lanes) for c in mine]
        parts = compact_jobs_(jobs, self._snapshot.arena, num_slots=NUM_STAGING_SLOTS, queued=queued)
        start.hold()  # only now: what was prepared above did not touch live weights
        if masked.begun is None:
            masked.begun = Mark(self._device)
        for part in parts:
            self._held.append((landed[part.job], part))
            self._held_nbytes += part.planes.entries.numel() + part.planes.dense.numel()
            if self._held_nbytes > HELD_NBYTES:
                self._bring_down(masked.landing)

    def _bring_down(self, landing: Landing) -> None:
        """Queue copies of the planes held so far; the stream they were made on keeps them until then."""
        while self._held:
            landed, part = self._held.popleft()
            landed.bring_down(part.span.segments, part.planes, landing)
        self._held_nbytes = 0

    def _finish(self, masked: DeviceMasked) -> None:
        """Every read is queued: let the fence pass, bring the planes down, hand them to the encoder."""
        if masked.error is not None:
            try:
                masked.read = Mark(self._device)  # whatever was queued before the error
            except BaseException:
                masked.read = None
        masked.issue()
        if masked.read is not None and masked.begun is not None:
            self._times.append(("pass", masked.begun, masked.read))
        with self._telemetry.span("landing"):
            try:
                if masked.landing is not None:
                    self._bring_down(masked.landing)
                for landed in masked.landed:
                    landed.lanes.copy_(landed.compaction.lanes, non_blocking=True)
                Mark(self._device).wait()
            except BaseException as e:
                masked.error = masked.error or e
        self._held.clear()
        self._encoder.submit(self._encode, masked)

    def _encode(self, masked: DeviceMasked) -> None:
        with self._telemetry.span("codec"):
            masked.encode_with(self._codec, self._algorithm, self._num_threads, self._pool)
        if masked.landing is not None:
            self._telemetry.count("landing_overflow_nbytes", masked.landing.overflow_nbytes)
            self._landings.give(masked.landing)
            masked.landing = None

    def collect_times(self) -> None:
        """Add up what the device has finished timing; nothing is waited for."""
        while self._times and self._times[0][2].passed:
            name, before, after = self._times.popleft()
            self._telemetry.add(name, after.seconds_since(before))


def make_masker(
    schema: Schema, snapshot: Snapshot, device: torch.device, codec: str, algorithm: int, telemetry: Telemetry
) -> Masker:
    """The mask stage for weights on a device.

    Args:
        schema: The run's schema.
        snapshot: Seeded, from ``make_snapshot`` for the same device.
        device: Where the live weights are.
        codec: Codec name or ``auto``.
        algorithm: Digest algorithm of the format.
        telemetry: Where times go.
    """
    if device.type == "cpu":
        return HostMasker(schema, snapshot)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = max(1, min(_MAX_THREADS, cores // 2))
    return DeviceMasker(
        schema, snapshot, device, codec=codec, algorithm=algorithm, telemetry=telemetry, num_threads=threads
    )
