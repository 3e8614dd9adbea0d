"""Queues the kernels of a compaction: every span with room for the words expected of it, so that no span waits for a host.

What a span found before is expected of it again, with a margin. A span with more than its room is left alone by the
device and done again here, with the exact size. Between ``compact``, which checks arguments, and the kernels. Must import
nothing of megasync but kernels.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from megasync.kernels.compact_feed import DirectFeed, OldBytes, StagedFeed
from megasync.kernels.compact_plan import CompactPlan, Span
from megasync.kernels.compact_queue import Found, queue_emit, queue_find
from megasync.kernels.planes import Planes

PENDING_NBYTES = 1 << 27
"""Room for planes of spans whose sizes the host has not read yet; beyond it the host reads the oldest first."""

FIRST_RATIO = 1 / 256
"""Changed words / all words that a span has room for at least."""

MAX_ROOM_RATIO = 1 / 4
"""Room over live bytes up to which a span is queued without a wait: for denser ones a wait is small."""

_EXACT = -1  # in place of a room: wait for the sizes
_MARGIN = 1.25


@dataclass(frozen=True, slots=True)
class CompactPart:
    """The changed words of one span.

    Attributes:
        span: The segments.
        planes: On the live words' device; the counts are of the span's segments.
        job: Number of the plan, where several are worked on together.
    """

    span: Span
    planes: Planes
    job: int = 0


@dataclass(slots=True)
class _Pending:
    """A queued span whose sizes the host does not know yet; ``done`` is a mark behind it, None before somebody waits for it.

    Spans share marks: where all streams share one queue, recording one lets what others queue next wait for all before it.
    """

    number: int
    room: int
    counts: torch.Tensor
    entries: torch.Tensor
    done: torch.cuda.Event | None = None


class Launches:
    """One compaction on its way.

    Args:
        jobs: Plans with their lanes, checked.
        snapshot: Checked.
        spans: Job and span, in order; at least one.
        num_slots: Staging slots; 0 for a snapshot on the device.
        queued: See ``compact.compact_jobs_``.

    *Stream*: made and used on one stream. *Memory*: a scratch for the widest span, here.
    """

    def __init__(
        self,
        jobs: Sequence[tuple[CompactPlan, torch.Tensor]],
        snapshot: torch.Tensor,
        spans: Sequence[tuple[int, Span]],
        num_slots: int,
        queued: Callable[[], None] | None,
    ) -> None:
        self._jobs, self._snapshot, self._spans, self._staged = jobs, snapshot, spans, num_slots > 0
        self._queued = queued if queued is not None else _nothing
        self._device = device = jobs[0][0].device
        widest = max(s.vectors[1] - s.vectors[0] for _, s in spans)
        self._scratch = torch.empty(widest, dtype=torch.int16, device=device)
        self._finished = torch.zeros(len(spans), dtype=torch.int32, device=device)
        self._totals = torch.empty((len(spans), 2), dtype=torch.int64, device=device)
        # Kernels write the sizes straight into it: a copy between two kernels would cost more than they do.
        self._sizes = torch.empty((len(spans), 2), dtype=torch.int64, pin_memory=device.type == "cuda")
        with_plans = [(jobs[i][0], s) for i, s in spans]
        self._feed: DirectFeed | StagedFeed = (
            StagedFeed(snapshot, with_plans, num_slots) if num_slots else DirectFeed(snapshot, with_plans)
        )

    def parts(self) -> Iterator[CompactPart]:
        """Queue all spans and give their parts in order."""
        try:
            yield from self._parts()
        finally:
            self._feed.finish()  # slots go back to the allocator: nothing may be copied any more

    def _parts(self) -> Iterator[CompactPart]:
        pending: deque[_Pending] = deque()
        error: BaseException | None = None
        for number in range(len(self._spans)):
            room = self._room(number)
            need = room * self._row_nbytes(number)
            while pending and (room == _EXACT or need + sum(p.entries.numel() for p in pending) > PENDING_NBYTES):
                yield self._settle(pending)
            try:
                if room == _EXACT:
                    part = self._exact(number, self._feed.open(number))
                    self._feed.close(number)
                    yield part
                else:
                    pending.append(self._launch(number, room))
            except Exception as e:
                error = e
                break
        self._feed.finish()
        self._queued()
        # What was queued before an error is in the snapshot, and has to be given too.
        while pending:
            try:
                yield self._settle(pending)
            except Exception as e:
                error = error or e
        if error is not None:
            raise error

    def _room(self, number: int) -> int:
        """Entries that a span has room for, or ``_EXACT``."""
        job, span = self._spans[number]
        plan = self._jobs[job][0]
        return plan.rooms.get(span, _room_for(plan, span, 0))

    def _row_nbytes(self, number: int) -> int:
        return 2 + self._jobs[self._spans[number][0]][0].word_nbytes

    def _launch(self, number: int, room: int) -> _Pending:
        """Queue a span."""
        job, span = self._spans[number]
        plan, lanes = self._jobs[job]
        entries = torch.empty(room * (2 + plan.word_nbytes), dtype=torch.uint8, device=self._device)
        old = self._feed.open(number)
        found = self._find(number, old)
        queue_emit(plan, span, old, self._scratch, found, entries, room, entries[:0], 0, lanes)
        self._feed.close(number)
        return _Pending(number, room, found.counts, entries)

    def _settle(self, pending: deque[_Pending]) -> CompactPart:
        """Read the sizes of the oldest queued span and give its part; do it again where its room was too small."""
        one = pending.popleft()  # first: what fails below fails for this span alone, and the next one comes after it
        if one.done is None:
            one.done = self._mark()
            for queued in pending:
                queued.done = one.done
        job, span = self._spans[one.number]
        plan = self._jobs[job][0]
        w = plan.word_nbytes
        num_entries, num_dense = self._wait(one.number, one.done)
        if num_dense or num_entries > one.room:
            return self._again(one.number)
        plan.rooms[span] = _next_room(plan, span, one.room, num_entries, 0)
        rows = one.entries[: (2 + w) * num_entries].view(2 + w, num_entries)
        none = torch.empty((w, 0), dtype=torch.uint8, device=self._device)
        return CompactPart(span, Planes(w, one.counts, rows, none), job)

    def _again(self, number: int) -> CompactPart:
        """A span that did not fit."""
        job, span = self._spans[number]
        feed: DirectFeed | StagedFeed = self._feed
        at = number
        if self._staged:
            self._feed.finish()  # or its slot, with the old bytes, might come down after the new ones
            feed, at = StagedFeed(self._snapshot, [(self._jobs[job][0], span)], 1), 0
        part = self._exact(number, feed.open(at))
        feed.close(at)
        if self._staged:
            feed.finish()
        self._queued()
        return part

    def _mark(self) -> torch.cuda.Event | None:
        if self._device.type != "cuda":
            return None
        mark = torch.cuda.Event()
        mark.record()
        return mark

    def _wait(self, number: int, done: torch.cuda.Event | None) -> tuple[int, int]:
        """Entries and dense words of a span that has been closed."""
        if done is not None:
            done.synchronize()
        num_entries, num_dense = self._sizes[number].tolist()
        return num_entries, num_dense

    def _find(self, number: int, old: OldBytes) -> Found:
        job, span = self._spans[number]
        sizes = self._finished[number:], self._totals[number], self._sizes[number]
        return queue_find(self._jobs[job][0], span, old, self._scratch, *sizes)

    def _exact(self, number: int, old: OldBytes) -> CompactPart:
        """A span with planes of the exact size: the host waits for it in the middle."""
        job, span = self._spans[number]
        plan, lanes = self._jobs[job]
        w = plan.word_nbytes
        self._finished[number].zero_()
        found = self._find(number, old)
        num_entries, num_dense = self._wait(number, self._mark())
        entries = torch.empty((2 + w, num_entries), dtype=torch.uint8, device=self._device)
        dense = torch.zeros((w, num_dense), dtype=torch.uint8, device=self._device)
        queue_emit(plan, span, old, self._scratch, found, entries, num_entries, dense, num_dense, lanes)
        plan.rooms[span] = _next_room(plan, span, _EXACT, num_entries, num_dense)
        return CompactPart(span, Planes(w, found.counts, entries, dense), job)


def _nothing() -> None:
    """Nobody wants to know."""


def _live_nbytes(span: Span) -> int:
    return (span.vectors[1] - span.vectors[0]) * 8


def _room_for(plan: CompactPlan, span: Span, num_entries: int) -> int:
    """Room for about as many entries, or ``_EXACT`` where that is much memory."""
    least = int(_live_nbytes(span) // plan.word_nbytes * FIRST_RATIO) + 4096
    room = max(least, int(num_entries * _MARGIN))
    too_much = room > least and room * (2 + plan.word_nbytes) > _live_nbytes(span) * MAX_ROOM_RATIO
    return _EXACT if too_much else room


def _next_room(plan: CompactPlan, span: Span, room: int, num_entries: int, num_dense: int) -> int:
    """What a span gets next time: steady while it fits, so that the allocator sees equal sizes."""
    if num_dense:
        return _EXACT
    if num_entries <= room * 0.9 and room <= num_entries * 4:
        return room
    return _room_for(plan, span, num_entries)
