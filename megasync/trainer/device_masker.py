"""The mask stage on a device: kernels on the side stream find, emit and bring down what changed.

The kernels read live weights and snapshot span by span, and the planes of changed words come down to pinned memory. Frames are
encoded on further threads, so that a slow sink never keeps a pass from landing. With tensors on the CPU the kernels' reference
runs, in the same order. Must not import receiver or an adapter.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor

import torch

from megasync.kernels.compact import compact_jobs_
from megasync.kernels.compact_launch import CompactPart
from megasync.schema import Schema
from megasync.telemetry import Telemetry
from megasync.trainer.copied_masker import CopiedMasker
from megasync.trainer.device_arena import Landing, Landings
from megasync.trainer.device_masked import DeviceMasked, Landed
from megasync.trainer.device_plan import (
    HELD_NBYTES,
    NUM_LANDINGS,
    NUM_STAGING_SLOTS,
    landing_nbytes,
    plan_compactions,
)
from megasync.trainer.device_snapshot import one_queue
from megasync.trainer.device_stream import Mark
from megasync.trainer.masker import HostMasker, Masker
from megasync.trainer.side_masker import SideMasker
from megasync.trainer.snapshot import Snapshot

_MAX_THREADS = 8


class DeviceMasker(SideMasker[DeviceMasked]):
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
    a snapshot in HBM is launched at once. One over a snapshot in host memory is launched as its slots arrive, behind all
    that the trainer has launched meanwhile, and would hold the optimizer's step: ``copied_masker`` takes its place there.
    *Memory*: two landing arenas and the tables, made here; passes reuse them.
    """

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
        self._codec, self._algorithm = codec, algorithm
        self._compactions, copies = plan_compactions(schema, snapshot, device)
        size = landing_nbytes(snapshot.nbytes) if landing is None else landing
        self._landings = Landings(NUM_LANDINGS, size, device)
        self._held: deque[tuple[Landed, CompactPart]] = deque()
        self._held_nbytes = 0
        self._num_threads = num_threads
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="megasync-codec")
        super().__init__(schema, snapshot, sorted({c.chunk for c in self._compactions}), copies, device, telemetry)

    def _new_pass(self, late: Collection[int]) -> DeviceMasked:
        return DeviceMasked(self._schema, self._chunks, late)

    def close(self) -> None:
        """See ``SideMasker.close``."""
        super().close()
        self._pool.shutdown(wait=True)

    def _let_go(self) -> None:
        self._landings.close()

    def _read_chunk(self, masked: DeviceMasked, chunk: int, start: Mark) -> None:
        if masked.error is not None:
            return
        if masked.landing is None:
            masked.landing = self._landings.take()
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
                self._bring_down(masked, masked.landing)

    def _bring_down(self, masked: DeviceMasked, landing: Landing) -> None:
        """Queue copies of the planes held so far; the stream they were made on keeps them until then."""
        try:
            while self._held:
                landed, part = self._held.popleft()
                landed.bring_down(part.span.segments, part.planes, landing)
        except BaseException as e:
            masked.unknown = masked.unknown or e  # the snapshot has them
            raise
        self._held_nbytes = 0

    def _finish(self, masked: DeviceMasked) -> None:
        """Every read is queued: let the fence pass, bring the planes down, hand them to the encoder."""
        self._mark_read(masked)
        with self._telemetry.span("landing"):
            try:
                if masked.landing is not None:
                    self._bring_down(masked, masked.landing)
                for landed in masked.landed:
                    landed.lanes.copy_(landed.compaction.lanes, non_blocking=True)
                Mark(self._device).wait()
            except BaseException as e:
                masked.error, masked.unknown = masked.error or e, masked.unknown or e
        self._held.clear()
        self._held_nbytes = 0
        self._encoder.submit(lambda: self._encode(masked))

    def _encode(self, masked: DeviceMasked) -> None:
        with self._telemetry.span("codec"):
            masked.encode_with(self._codec, self._algorithm, self._num_threads, self._pool)
        masked.ended.say()
        if masked.landing is not None:
            self._telemetry.count("landing_overflow_nbytes", masked.landing.overflow_nbytes)
            self._landings.give(masked.landing)
            masked.landing = None


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
    kind = CopiedMasker if not snapshot.arena.is_cuda and one_queue() else DeviceMasker
    return kind(schema, snapshot, device, codec=codec, algorithm=algorithm, telemetry=telemetry, num_threads=threads)
