"""Versions in flight: encode, gather and publish behind the training loop, in version order; withdrawal when one fails.

The snapshot advance is tentative: each delta stays in host memory until its head is durable. A version's fate is
success, failure or unknown. When one fails, every later one in flight fails with it (its base is gone); at a step end
that all ranks agree on, they are XORed back out of the snapshot, newest first, and the next delta is relative to the
last durable version. Numbers are never reused. Must not import receiver or an adapter.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING

import msgspec

from megasync.errors import RankFailedError, RetryError, SinkConflictError
from megasync.telemetry import Telemetry
from megasync.trainer.agree import all_gather_bytes
from megasync.trainer.agree_wait import PATIENCE, global_ranks
from megasync.trainer.masker import Masked
from megasync.trainer.publish import publish
from megasync.trainer.publishing import Outcome, Publishing
from megasync.versions.encode import EncodedDelta
from megasync.versions.lineage import Lineage

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_LOOK_S = 0.02
_GRACE = PATIENCE + 2
"""Timeouts that a worker may take beyond ``give_up_s``: encoding, and the attempt that was running then."""


@dataclass
class Flight:
    """One version on its way.

    Attributes:
        version: Its number.
        masked: What the mask stage found, kept to withdraw by; None once durable.
        info: Facts for the manifest.
        anchor: Full bytes that need no base; not part of the snapshot's advance.
        outcome: What became of it.
    """

    version: int
    masked: Masked | None
    info: dict[str, str | int | float]
    anchor: bool = False
    outcome: Outcome | None = None


class _Settled(msgspec.Struct, array_like=True, frozen=True):
    settled: int
    broken: str
    stuck: str
    waited_s: float
    steps: tuple[int, int]
    newest: int


@dataclass
class InFlight:
    """The queue of versions in flight of one rank and the thread that works it off.

    Attributes:
        publishing: What publishing needs.
        control: Process group of the step-end decisions (not the gather's: another thread uses that one).
        lineage: On the head writer, the newest durable version.
        limit: Versions that may be unfinished at once.
        telemetry: Where times go.
        on_outcome: Called on the worker thread with every verdict.
    """

    publishing: Publishing
    control: ProcessGroup | None
    lineage: Lineage | None
    limit: int
    telemetry: Telemetry
    on_outcome: Callable[[Outcome], None] = lambda outcome: None
    flights: deque[Flight] = field(default_factory=deque)
    _newest: int = -1
    _work: queue.SimpleQueue[Flight | None] = field(default_factory=queue.SimpleQueue)
    # Not a Condition: an interrupt inside that could leave its lock taken.
    _wake: queue.SimpleQueue[None] = field(default_factory=queue.SimpleQueue)
    _broken: BaseException | None = None
    _failed: bool = False
    _thread: threading.Thread | None = None
    _over: bool = False
    _last: deque[Callable[[], None]] = field(default_factory=deque)

    def start(self) -> None:
        """Start the worker thread."""
        self._thread = threading.Thread(target=self._run, name="megasync-publish", daemon=True)
        self._thread.start()

    def add(self, flight: Flight) -> None:
        """Send a version on its way. Every rank adds the same versions in the same order."""
        self.flights.append(flight)
        self._newest = flight.version
        self._work.put(flight)

    def mend(self, begun: int | None) -> None:
        """After an interrupt: what ``add`` had only noted is sent (twice, perhaps: it is published once), and a failure that
        nobody took is forgotten."""
        if not self.flights:
            self._failed = False
        elif self.flights[-1].version == begun:
            self._newest = begun
            self._work.put(self.flights[-1])

    def settle(
        self, wait_for_room: bool = False, drain: bool = False, steps: tuple[int, int] = (0, 0)
    ) -> tuple[list[Outcome], list[Flight]]:
        """Agree on which versions are settled, the same set on every rank.

        *Collective*: over the control group; every rank must call it at the same step end.

        Args:
            wait_for_room: Wait until fewer than ``limit`` versions are unfinished.
            drain: Wait until none is.
            steps: Steps that this rank has counted, and how many of them were skipped: the same on every rank.

        Returns:
            Outcomes settled since the last call, in order; and the flights to withdraw, newest first (empty while
            nothing failed).

        Raises:
            RankFailedError: A worker thread broke on some rank, a rank did not answer, or ranks counted other steps.
            RetryError: The fate of a version stayed unknown for ``give_up_s``; with the sink's last answer.
        """
        start, before = monotonic(), -1
        while True:
            agreed = self._agree(monotonic() - start, steps)
            if agreed.settled != before:  # the wait is for each version by itself
                start, before = monotonic(), agreed.settled
            settled = list(self.flights)[: agreed.settled]
            lost = next((i for i, f in enumerate(settled) if f.outcome is not None and not f.outcome.durable), None)
            left = len(self.flights) - agreed.settled
            if lost is not None and left:
                # Later versions fail with it; their verdicts come at once, and withdrawal needs them all.
                pass
            elif lost is not None or (not (drain and left) and not (wait_for_room and left >= self.limit)):
                return self._take(settled, lost)
            config = self.publishing.config
            # The worker itself gives up what cannot have landed; the grace is for one that does not come back at all.
            if agreed.waited_s > config.give_up_s + (0 if agreed.stuck else _GRACE * config.timeout_s):
                raise RetryError(
                    f"versions {[f.version for f in self.flights]} of run {self.publishing.schema.run!r} are neither "
                    f"durable nor failed (give_up_s {config.give_up_s:g}): "
                    + (agreed.stuck or f"{self.publishing.sink.describe()} did not answer for {agreed.waited_s:.0f} s")
                )
            with suppress(queue.Empty):
                self._wake.get(timeout=_LOOK_S)

    def close(self, then: Callable[[], None] = lambda: None) -> None:
        """Stop the worker; versions still in flight are given up.

        Args:
            then: Called once the worker has ended and its process groups are free: before this returns, or by the worker as the
                last thing it does, where it is inside the sink for longer than ``timeout_s``.
        """
        self.publishing.closing.set()
        self._last.append(then)
        self._work.put(None)
        if self._thread is not None:
            self._thread.join(self.publishing.config.timeout_s)
        if self._thread is None or self._over or not self._thread.is_alive():
            self._end()  # else the worker, which looks after it is over

    def _end(self) -> None:
        """Do what is to be done last, each once, whoever comes first."""
        while True:
            try:
                then = self._last.popleft()
            except IndexError:
                return
            then()

    def _take(self, settled: list[Flight], lost: int | None) -> tuple[list[Outcome], list[Flight]]:
        for _ in settled:
            self.flights.popleft()
        outcomes = [f.outcome for f in settled if f.outcome is not None]
        if lost is None:
            return outcomes, []
        withdrawn = settled[lost:][::-1]
        self._failed = False
        return outcomes, withdrawn

    def _agree(self, waited_s: float, steps: tuple[int, int]) -> _Settled:
        settled = 0
        for flight in self.flights:
            if flight.outcome is None:
                break
            settled += 1
        broken = "" if self._broken is None else f"{type(self._broken).__name__}: {self._broken}"
        mine = msgspec.msgpack.encode(_Settled(settled, broken, self.publishing.stuck, waited_s, steps, self._newest))
        told = all_gather_bytes(self.control, mine, "versions in flight", self.publishing.config.timeout_s)
        rows = [msgspec.msgpack.decode(t, type=_Settled) for t in told]
        ranks = global_ranks(self.control)
        if causes := {ranks[i]: row.broken for i, row in enumerate(rows) if row.broken}:
            raise RankFailedError("publishing behind the training loop", causes) from self._broken
        first = rows[0]
        if apart := {
            ranks[i]: f"has {_counted(row)}, rank {ranks[0]} {_counted(first)}: every rank must call step_end() after "
            "every step, with the same arguments"
            for i, row in enumerate(rows)
            if (row.steps, row.newest) != (first.steps, first.newest)
        }:
            raise RankFailedError(f"step end of run {self.publishing.schema.run!r}", apart)
        stuck = next((row.stuck for row in rows if row.stuck), "")
        return _Settled(min(r.settled for r in rows), "", stuck, first.waited_s, first.steps, first.newest)

    def _run(self) -> None:
        try:
            self._work_off()
        finally:
            self._over = True
            self._end()

    def _work_off(self) -> None:
        while (flight := self._work.get()) is not None:
            try:
                if flight.outcome is None:
                    self._publish(flight)
            except BaseException as e:
                self._broken = e
                self._wake.put(None)
                return

    def _publish(self, flight: Flight) -> None:
        if self._failed:
            # The same on every rank: verdicts come in the same order everywhere.
            outcome = Outcome(
                flight.version, False, {0: "an earlier version in flight failed; this one starts from it"}
            )
        else:
            error: Exception | None = None
            delta: EncodedDelta | None = None
            try:
                with self.telemetry.span("encode"):
                    assert flight.masked is not None, "a flight is published once"
                    codec = "anchor" if flight.anchor else self.publishing.config.codec
                    delta = flight.masked.encode(codec, self.publishing.algorithm)
            except Exception as e:
                error = e
            with self.telemetry.span("publish"):
                outcome, self.lineage = publish(
                    self.publishing,
                    delta,
                    error,
                    flight.version,
                    self.lineage,
                    flight.info,
                    anchor=flight.anchor,
                )
        if outcome.durable:
            flight.masked = None
        else:
            self._failed = True
        self.on_outcome(outcome)
        flight.outcome = outcome
        self._wake.put(None)


def _counted(row: _Settled) -> str:
    return f"counted {row.steps[0]} steps ({row.steps[1]} of them skipped), newest version {row.newest}"


def error_of(outcome: Outcome, run: str) -> Exception:
    """What a failed publication raises, the same on every rank."""
    if outcome.fenced:
        return SinkConflictError(f"version {outcome.version} of run {run!r}: {outcome.error}: stop this publisher")
    return RankFailedError(f"publishing version {outcome.version} of run {run!r}", outcome.error)
