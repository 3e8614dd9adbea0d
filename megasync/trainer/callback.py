"""The callback: plan -> snapshot -> mask -> encode -> gather -> publish, shown in order.

``MegasyncCallback`` is a Megatron-Bridge callback by duck typing and has ``step_end`` for plain loops. At a step end it
agrees with the other ranks on what became of earlier versions, masks what changed since the last publication, and hands
the rest to a thread of its own. Weights on a GPU are masked behind the next forward and backward, up to the fence before
``optimizer.step``. Must not import receiver or an adapter: the exporter is given to it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any

import torch

from megasync.codecs.choice import check_codec
from megasync.config import OnError, PublishConfig, WhenFull, config_of
from megasync.manifest import check_run
from megasync.sinks.base import Sink
from megasync.telemetry import Telemetry
from megasync.trainer.device_masker import make_masker
from megasync.trainer.exporter import Exporter
from megasync.trainer.facts import facts_of
from megasync.trainer.groups import Groups, make_groups
from megasync.trainer.guards import check_drift, check_first, check_settings
from megasync.trainer.hooks import StepHooks
from megasync.trainer.inflight import Flight, InFlight, error_of
from megasync.trainer.masker import AnchorMasked, FailedMasked, Masked, Masker
from megasync.trainer.publishing import Outcome, Publishing
from megasync.trainer.start import Started, start, together

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

log = logging.getLogger(__name__)


@dataclass
class MegasyncCallback:
    """Publishes a trainer's weights after every ``config.every`` steps.

    Ten lines in a plain loop::

        callback = MegasyncCallback(MegatronExporter(chunks, ...), open_sink("/shared/run"), PublishConfig(run="r"))
        callback.optimizer = optimizer  # or call before_optimizer_step() before every optimizer.step()
        callback.on_train_start()
        for step in range(steps):
            ...                       # forward, backward, optimizer.step()
            callback.step_end()       # every rank, also after a skipped iteration
        callback.on_train_end()       # the last step is always published

    *Collective*: every method must be called by every rank at the same point of the program.
    *Stream*: the stream that is current in these calls is taken for the compute stream. With weights on a GPU, a pass reads
    them until ``before_optimizer_step``; whatever else writes them before that must be ``volatile`` in the exporter. Passes
    run on a thread of their own, so a CUDA graph is captured before the start, or with
    ``capture_error_mode="thread_local"``; replays are free at any time, since nothing here ever moves a weight.

    Attributes:
        exporter: The trainer's weights, or a function of the model chunks that makes it (Megatron-Bridge gives them in
            its context).
        sink: Where to publish.
        config: Trainer-side configuration.
        base: Checkpoint that is version 0; None makes an anchor of the starting weights version 0.
        ranks: Global ranks that take part; None for all. The others make the same calls, which do nothing there; where a start
            failed and is tried again, they try again too.
        optimizer: What writes the weights, or a sequence of such: its ``step`` is announced to the mask stage. By default
            the context's. Only weights on a GPU need it.
        on_outcome: Called on a worker thread with every verdict; must be quick.
        facts: Called at each publication for facts that go into the manifest's ``info`` (step number, say).
    """

    exporter: Exporter | Callable[[list[Any]], Exporter]
    sink: Sink
    config: PublishConfig = field(default_factory=PublishConfig)
    base: Path | None = None
    ranks: list[int] | None = None
    optimizer: Any = None
    on_outcome: Callable[[Outcome], None] = lambda outcome: None
    facts: Callable[[], dict[str, str | int | float]] = dict
    telemetry: Telemetry = field(default_factory=Telemetry)
    outcomes: list[Outcome] = field(default_factory=list)
    _state: _State | None = field(default=None, repr=False)
    _last_version: int = field(default=-1, repr=False)
    _outside: bool = field(default=False, repr=False)

    def __post_init__(self) -> None:
        if isinstance(self.exporter, torch.nn.Module) or not (
            isinstance(self.exporter, Exporter) or callable(self.exporter)
        ):
            raise TypeError(
                f"MegasyncCallback got {type(self.exporter).__name__} for its exporter: wrap the weights in one, "
                "TensorExporter.of_module(module) or MegatronExporter(chunks, names)"
            )
        if not hasattr(self.sink, "create"):
            raise TypeError(f"MegasyncCallback got {type(self.sink).__name__} for its sink: use open_sink(url)")
        self.config = config_of(PublishConfig, self.config)
        self.base = None if self.base is None else Path(self.base)
        check_run(self.config.run)
        check_codec(self.config.codec)

    # Megatron-Bridge and Megatron-LM call these by name with a context; plain loops call them without.

    def on_train_start(self, context: Any = None) -> None:
        """Plan, claim the run, seed the snapshot, publish version 0 where the run is fresh."""
        self.close()  # threads, hooks and process groups of a start before this one
        make = self._exporter_of(context)
        groups = make_groups(self.config, self.ranks)
        self._outside = groups is None
        if groups is None:
            return
        optimizer = self.optimizer if self.optimizer is not None else getattr(context, "optimizer", None)
        try:
            check_settings(self.config, self.base is not None, groups.control)
            # A rank whose exporter cannot be made must not leave the others waiting.
            exporter = (
                make()
                if groups.control is None
                else together(groups.control, "making the exporter", self.config.timeout_s, make)
            )
            with self.telemetry.span("start"):
                started = start(exporter, self.sink, self.config, groups.control, self.base)
            self._enter(exporter, started, groups, optimizer)
        except BaseException:
            # Nothing of a start that failed stays behind; it may be tried again.
            if self._state is not None:
                self.close()
            else:
                groups.close()
            raise

    def _exporter_of(self, context: Any) -> Callable[[], Exporter]:
        exporter = self.exporter
        if isinstance(exporter, Exporter):
            return lambda: exporter
        model = getattr(context, "model", None)
        if model is None:
            raise ValueError("MegasyncCallback got a function for its exporter but no context.model to call it with")
        return lambda: exporter(list(model) if isinstance(model, list | tuple) else [model])

    def _enter(self, exporter: Exporter, started: Started, groups: Groups, optimizer: Any) -> None:
        """Start the threads and hooks; publish version 0 where it is an anchor."""
        publishing = Publishing(started.schema, self.sink, self.config, groups.rounds, groups.carrier, Event())
        masker = self._make_masker(started, publishing.algorithm)
        optimizers = (
            [] if optimizer is None else list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]
        )
        flights = InFlight(
            publishing, groups.control, started.lineage, self.config.in_flight_limit, self.telemetry, self._settled
        )
        head, hooks = started.head.version, None
        try:
            hooks = StepHooks(exporter, masker, self.telemetry, optimizers)
            flights.start()
            self._state = _State(exporter, groups, started, masker, hooks, flights, head + 1, head)
        except BaseException:
            if hooks is not None:
                hooks.close()
            masker.close()
            flights.close()
            raise
        if started.needs_anchor:
            self._state.next_version = 1
            flights.add(Flight(0, AnchorMasked(started.schema, started.snapshot), facts_of(self.facts), anchor=True))
            self._look(drain=True)

    def _make_masker(self, started: Started, algorithm: int) -> Masker:
        return make_masker(
            started.schema, started.snapshot, started.device, self.config.codec, algorithm, self.telemetry
        )

    def before_optimizer_step(self) -> None:
        """Announce an ``optimizer.step()``: the compute stream waits until the last publication has read the weights.

        Called by itself where the callback knows the optimizer. Nothing to do before the start and for weights on the CPU.
        *Stream*: the compute stream is current.
        """
        if self._state is not None:
            self._state.hooks.before_step()

    def on_eval_start(self, context: Any = None) -> None:
        """Weights of which a part is still to be gathered are made current and read now, not after the evaluation."""
        if self._state is not None:
            self._state.hooks.force()

    on_test_start = on_eval_start
    on_checkpoint_save = on_eval_start

    def on_train_step_end(self, context: Any = None) -> None:
        """``step_end`` for Megatron-Bridge: reads ``context.skipped_iter`` and nothing else."""
        self.step_end(skipped=bool(getattr(context, "skipped_iter", False)))

    def on_train_end(self, context: Any = None) -> None:
        """Publish the last step and wait until everything is durable; then stop the thread."""
        try:
            self.flush()
        finally:
            self.close()

    def step_end(self, *, skipped: bool = False) -> int | None:
        """Count a step and publish when its turn has come.

        Args:
            skipped: The optimizer did not step (inf or nan gradients): what it writes is unchanged, the step still counts.

        Returns:
            The version that is on its way, or None where nothing was published at this step.

        Raises:
            RankFailedError: On every rank, when a publication failed and ``on_error`` is ``raise``, or when failures
                exceed ``max_failures``.
            SinkConflictError: On every rank, when another publisher took over the run.
            SchemaMismatchError: On every rank, when the first delta is another model rather than a step.
            ReplicaDriftError: On every rank, when replicas differ (``check_replicas_every``).

        After the last three nothing is published any more, and each call raises again: start anew once it is mended.

        An interrupt (``KeyboardInterrupt``) goes through, and loses no word: what a pass wrote into the snapshot without being
        sent on its way is taken back at the next call, here or in ``flush``.
        """
        if self._outside:
            return None
        state = self._running()
        self._mend(state)
        state.steps += 1
        state.skipped += skipped
        state.unpublished |= not skipped or state.started.volatile
        state.hooks.step_ended()
        if state.steps % self.config.every:
            return None
        return self._publish()

    def flush(self) -> None:
        """Publish what changed since the last publication, if anything, and wait until all of it is durable."""
        if self._outside:
            return
        state = self._running()
        self._mend(state)
        state.hooks.force()
        self._look(drain=True)
        if state.unpublished:
            self._publish(defer=False)
            self._look(drain=True)
            if state.unpublished:  # withdrawn and retried once more: flush may not end with unpublished weights
                self._publish(defer=False)
                self._look(drain=True, final=True)

    def close(self) -> None:
        """Stop the worker thread; versions still in flight are given up. Idempotent, local."""
        state, self._outside = self._state, False
        if state is None:
            return
        self._last_version = self.version
        # Each whatever became of the one before, an interrupt included: a thread or a group that is left holds up the next start.
        try:
            state.hooks.close()
        finally:
            try:
                state.masker.close()
            finally:
                try:
                    state.flights.close(state.groups.close)
                finally:
                    state.groups.close(worker_ended=False)
                    self._state = None

    @property
    def version(self) -> int:
        """Newest version on its way or durable, after the end too; -1 before the start.

        A version that was withdrawn is neither, though its number is not used again: after a ``SinkConflictError`` this is the
        newest that this publisher made durable. The head's may be higher then, another publisher's.
        """
        if self._state is None:
            return self._last_version
        flights = self._state.flights.flights
        return flights[-1].version if flights else self._state.durable

    def _publish(self, *, defer: bool = True) -> int | None:
        state, config = self._running(), self.config
        state.hooks.force()
        if not self._look(room=config.when_full is WhenFull.WAIT):
            return None
        version = state.next_version
        state.masker.newest = None
        state.begun = version  # until it is in flight
        state.next_version += 1
        compare = bool(config.check_replicas_every) and version % config.check_replicas_every == 0
        # The same on every rank: all of them settle here, or none.
        now = compare or not defer or not state.checked_first or state.exporter.settle_always
        late = () if now else state.hooks.deferrable()
        if not late:
            with self.telemetry.span("settle"):
                state.exporter.settle()
        if compare:
            try:
                check_drift(config, state.started, state.exporter, state.control)
            except Exception as e:
                raise self._refused(e) from e
        masked = self._mask(late)
        state.hooks.begun(late)
        if not state.checked_first:
            self._check_first(masked)
        state.flights.add(Flight(version, masked, facts_of(self.facts)))
        state.unpublished = False
        state.begun = None
        return version

    def _mask(self, late: tuple[int, ...]) -> Masked:
        state = self._running()
        with self.telemetry.span("mask"):
            try:
                state.exporter.check_alive()
            except Exception as e:
                return FailedMasked(e)
            return state.masker.begin(late)

    def _check_first(self, masked: Masked) -> None:
        """Refuse a first delta that is another model rather than a step; the snapshot is put back first."""
        state = self._running()
        try:
            error = check_first(self.config, state.started, masked, state.control)
        except LookupError:
            return  # the version fails on its way, and the next one is the first
        if error is not None:
            with self._or_refused(state):
                state.masker.undo([masked])
            raise self._refused(error)
        state.checked_first = True

    def _refused(self, error: Exception) -> Exception:
        """Publish nothing any more: what is refused once would go out with the next step, or from a ``finally``."""
        state = self._running()
        state.refused = error
        return error

    def _mend(self, state: _State) -> None:
        """Take back what an interrupt left in the snapshot and in no version; raise again what was refused."""
        if state.refused is not None:
            raise state.refused
        state.flights.mend(state.begun)
        here = {id(f) for f in state.flights.flights}
        gone = [f for f in state.looked_at if id(f) not in here]
        lost = [f.masked for f in gone if f.masked is not None]
        state.durable = max([state.durable, *(f.version for f in gone if f.outcome is not None and f.outcome.durable)])
        if state.begun is not None and all(f.version != state.begun for f in state.flights.flights):
            state.next_version = state.begun  # it did not come to be
            if state.masker.newest is not None:
                lost.append(state.masker.newest)
        if lost:
            state.unpublished = True
            with self._or_refused(state):
                state.masker.undo(lost[::-1])
        state.looked_at, state.begun = [], None

    @contextmanager
    def _or_refused(self, state: _State) -> Iterator[None]:
        """Around an undo: where that fails the snapshot is no version any more, and nothing can be published."""
        try:
            yield
        except Exception as e:
            state.refused = e
            raise

    def _look(self, *, room: bool = False, drain: bool = False, final: bool = False) -> bool:
        """Settle what is settled, withdraw what failed; False where the in-flight limit says to skip this step."""
        state = self._running()
        state.looked_at = list(state.flights.flights)  # until those that are lost are undone
        with self.telemetry.span("wait"):
            outcomes, lost = state.flights.settle(room, drain, (state.steps, state.skipped))
        self.outcomes += outcomes
        if durable := [o.version for o in outcomes if o.durable]:
            state.failures, state.durable = 0, durable[-1]
        if lost:
            state.unpublished = True
            with self._or_refused(state):
                together(
                    state.control,
                    "withdrawing versions",
                    self.config.timeout_s,
                    lambda: state.masker.undo([f.masked for f in lost if f.masked is not None]),
                )
            state.failures += 1
            failed = next(o for o in outcomes if not o.durable)
            log.warning("megasync: %s withdrawn: %s", [f.version for f in lost], failed.error)
            if failed.fenced:
                state.refused = error_of(failed, self.config.run)
                raise state.refused
            if (
                any(f.anchor for f in lost)
                or final
                or self.config.on_error is OnError.RAISE
                or state.failures > self.config.max_failures
            ):
                raise error_of(failed, self.config.run)
        state.looked_at = []
        return len(state.flights.flights) < self.config.in_flight_limit

    def _settled(self, outcome: Outcome) -> None:
        self.telemetry.count("published" if outcome.durable else "failed")
        try:
            self.on_outcome(outcome)
        except Exception:  # its error would end this thread, and with it the run on every rank
            log.exception(
                "megasync: on_outcome failed for version %d; the publication is not concerned", outcome.version
            )

    def _running(self) -> _State:
        if self._state is None:
            raise ValueError("MegasyncCallback is not running: call on_train_start first, on every rank")
        return self._state


@dataclass
class _State:
    """A run between start and end.

    ``begun`` is a version whose pass may have begun and that is not in flight yet, ``looked_at`` versions that may have left
    the queue and not be withdrawn yet: what an interrupt leaves behind is found by them.
    """

    exporter: Exporter
    groups: Groups
    started: Started
    masker: Masker
    hooks: StepHooks
    flights: InFlight
    next_version: int
    durable: int
    steps: int = 0
    skipped: int = 0
    failures: int = 0
    unpublished: bool = False
    checked_first: bool = False
    refused: Exception | None = None
    begun: int | None = None
    looked_at: list[Flight] = field(default_factory=list)

    @property
    def control(self) -> ProcessGroup | None:
        return self.groups.control
