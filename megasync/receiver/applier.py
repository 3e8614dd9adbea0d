"""The applier: one engine rank that follows a run. ``join`` once, then ``update``: fetch -> stage -> prove -> apply.

Every rank of an engine runs its own applier and makes the same calls in the same order; they vote between the stages.
The version held moves only by proofs. One step is in ``session``. Must not import a trainer, an adapter or an engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Event, RLock
from time import perf_counter

import msgspec

from megasync.config import ApplyConfig, Staging, config_of
from megasync.errors import (
    BaseMismatchError,
    MegasyncError,
    NeedsAnchorError,
    RankFailedError,
    ReplicaDriftError,
    RetryError,
    TaintedError,
    is_live_mismatch,
)
from megasync.manifest import Manifest, check_run
from megasync.receiver.audit import audit
from megasync.receiver.backends import BackendChoice, make_backend
from megasync.receiver.bind import bind
from megasync.receiver.engine import Engine
from megasync.receiver.follow import follow
from megasync.receiver.joining import enter, is_torn
from megasync.receiver.ledger import Ledger
from megasync.receiver.results import AuditResult, StageResult, UpdateResult
from megasync.receiver.route import Route, steps
from megasync.receiver.session import Session, advance, make_ready, retreat
from megasync.receiver.sharing import short_turns
from megasync.receiver.stage import find
from megasync.receiver.status import State, Status, StatusFile
from megasync.receiver.votes import together, vote
from megasync.schema import names_of
from megasync.sinks.base import Sink
from megasync.telemetry import Telemetry
from megasync.versions.publication import PublicationReader


class Applier:
    """Follows a run with one engine rank.

    Calls may come from several threads (one follows, another audits): they take turns. On an engine of several ranks all
    ranks must make them in the same order.

    Args:
        engine: The rank.
        sink: Where the run is published.
        config: Run, limits, workers; defaults are those of `ApplyConfig`.
        status_path: Status file of this rank, its own; None keeps the status in memory only, so that a restart after a
            crash does not know that weights may be torn.
        backend: ``auto``, a name, or a callable that makes one for a binding.
        route: Which publications lead to a version; the chain of deltas by default.
        telemetry: Spans and counters.
        clock: Seconds, for the times in results.

    Raises:
        ValueError: A run name that cannot be part of a key, or a status file of another run or in no directory.
        TypeError: Something else than an engine, a sink and an `ApplyConfig`.
        FormatError: An unreadable status file.
    """

    def __init__(
        self,
        engine: Engine,
        sink: Sink,
        config: ApplyConfig | None = None,
        *,
        status_path: Path | str | None = None,
        backend: BackendChoice = "auto",
        route: Route = steps,
        telemetry: Telemetry | None = None,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        _check_arguments(engine, sink)
        self.config = config_of(ApplyConfig, config)
        check_run(self.config.run)
        self.engine = engine
        self.telemetry = telemetry or Telemetry()
        self._reader = PublicationReader(sink, self.config.run, self.config.sign_key or None, self.config.timeout_s)
        self._status = StatusFile(self.config.run, status_path)
        self._backend = backend
        self._route = route
        self._clock = clock
        self._pool = ThreadPoolExecutor(self.config.workers, "megasync") if self.config.workers > 1 else None
        self._quiet = self.config.staging is Staging.QUIET
        self._session: Session | None = None
        self._lock, self._closed = RLock(), False

    @property
    def status(self) -> Status:
        """What is held, and whether the engine may serve."""
        return self._status.now

    @property
    def version(self) -> int:
        """The version held, -1 before it was proven."""
        found = self._session.ledger if self._session is not None else None
        return -1 if found is None else found.version

    @property
    def ready(self) -> bool:
        """Whether the engine may take traffic: joined, caught up once, and whole."""
        return self.version >= 0 and self.status.state == "serving"

    def join(self, *, reloaded: bool = False) -> UpdateResult:
        """Bind the engine to the run and find out, by content, which version its weights are. *Collective*.

        Weights that are no version of the run are overwritten by the newest chain's anchor, where it starts with one.
        The engine is ``serving`` if it is at the newest version, else ``behind``: ``update`` catches up.

        Args:
            reloaded: The engine's weights were loaded anew since the status file was written: a status that says they
                may be torn does not hold for them.

        Returns:
            What was found and, where an anchor was loaded, what that took.

        Raises:
            RetryError: Nothing was published yet.
            PlanError, SchemaMismatchError, MemoryPlanError: The engine does not fit the run, or live words are the anchor's
                in another order (a wrong layout); nothing was touched.
            NeedsAnchorError: Weights may be torn (status ``updating`` or ``tainted``) or are no version of the run, and
                the chain does not start with an anchor.
            BaseMismatchError: Weights are no version of the run and the chain starts with a checkpoint.
        """
        with self._turn():
            return self._join(reloaded)

    def _join(self, reloaded: bool) -> UpdateResult:
        started = self._clock()
        torn = is_torn(self.engine, self._status, reloaded)
        newest = self._wanted(None)
        schema = together(self.engine, "schema", lambda: self._reader.schema(newest.schema_digest))
        with self.telemetry.span("bind"):
            binding = bind(self.engine, schema, shadow_limit_nbytes=self.config.shadow_limit_nbytes)
            backend = together(self.engine, "backend", lambda: make_backend(binding, self._backend, quiet=self._quiet))
            together(self.engine, "seeding shadows", lambda: binding.shadows.seed(self.engine))
        self._session = Session(
            self.config, self._reader, binding, backend, self._status, self._pool, self.telemetry, self._clock
        )
        result = UpdateResult(self.config.run, -1, -1, backend=backend.name, excluded=_excluded(self._session))
        result = enter(self._session, newest, torn, result)
        self._session.wake()
        return replace(result, total_s=self._clock() - started)

    def update(self, version: int | None = None) -> UpdateResult:
        """Apply what leads to a version, one publication after the other, each proved. *Collective*.

        Args:
            version: Where to go; the head's by default.

        Returns:
            What was done; ``versions`` is empty where the version is held already.

        Raises:
            RetryError: The sink did not answer, lacks a payload that the head leads to, or forward passes did not end in
                time: nothing was touched.
            FormatError, RefetchError: Head, manifest or frames were refused: the version held is kept.
            BaseMismatchError: Another version than the base: nothing of that step was touched.
            LiveMismatchError: Other live bytes than the base, or tensors that were replaced: the same, and the engine holds no
                version until it joins again.
            ReplicaDriftError: A replica's live bytes are not its primary's: as LiveMismatchError.
            NeedsAnchorError: No way leads there.
            UndoneError: A step failed and was undone; the steps before it hold, unless something else wrote the weights (its
                cause is a LiveMismatchError or a ReplicaDriftError): the engine holds no version then.
            TaintedError: An undo failed, now or before.
            TypeError: ``version`` is no integer.
            Exception: What the engine's ``resume`` raised: the new version is live and proven, the status is ``behind`` and
                says why. The next update resumes first.
        """
        _check_version(version)
        with self._turn(), short_turns(self._quiet):
            return self._update(version)

    def _update(self, version: int | None) -> UpdateResult:
        session, ledger = self._held()
        started = self._clock()
        session.wake()
        wanted = self._wanted(version)
        route = together(
            self.engine,
            f"route from version {ledger.version} to {wanted.version}",
            lambda: self._route(self._reader, ledger, wanted),
        )
        result = UpdateResult(
            self.config.run, ledger.version, ledger.version, backend=session.backend.name, excluded=_excluded(session)
        )
        was = self._status.now.state
        for manifest in route:
            state: State = "serving" if manifest is route[-1] else was
            result = advance(session, manifest, state, result)
        if not route and was == "behind":
            with vote(self.engine, "live tensors"):
                self.engine.check_ready()  # first: a sleeping engine's memory may be elsewhere
                session.binding.check_alive()
            session.hold(ledger, "serving")
        return replace(result, total_s=self._clock() - started)

    def stage(self, version: int | None = None) -> StageResult | None:
        """Make the next publication ready while the engine serves; ``update`` then takes it from memory. *Collective*.

        Where the step leads on from the version held, the base is proven here too: all that is left is to write.

        Args:
            version: Stage the step that leads to this version; the first one not staged yet by default.

        Returns:
            What was staged; None where everything up to the head is held or staged, or the next step is an anchor,
            which is always staged by its own update.

        Raises:
            LiveMismatchError, ReplicaDriftError: Live words are not the base of the step: nothing was touched, and the engine
                holds no version until it joins again.
            RetryError, FormatError, RefetchError, NeedsAnchorError, TypeError: As ``update``.
        """
        _check_version(version)
        with self._turn(), short_turns(self._quiet):
            return self._stage(version)

    def _stage(self, version: int | None) -> StageResult | None:
        session, ledger = self._held()
        wanted = self._wanted(version)
        route = together(self.engine, "route", lambda: self._route(self._reader, ledger, wanted))
        left = [m for m in route if m.digest not in session.staged]
        if version is not None:
            left = [m for m in left if m.version == version]
        if not left or left[0].what != "delta":
            return None
        ahead = left[0].base_version != ledger.version
        staged = together(self.engine, "staging", lambda: make_ready(session, left[0], ahead=ahead))
        if not ahead:
            try:
                staged.found = find(session.binding, ledger, staged, session.proof_pool)
            except BaseException:
                session.staged.pop(left[0].digest, None)
                raise
        changed = sum(p.num_changed for p in staged.placed)
        return StageResult(left[0].version, ahead, staged.stage_s, staged.fetched.nbytes, staged.nbytes, changed)

    def rollback(self) -> UpdateResult:
        """Go back to the version held before the last update, with its proofs. *Collective*. Bounded: one version only.

        The next ``update`` goes forward again: stop following first, or update to a version.

        Raises:
            NeedsAnchorError: Nothing is kept to go back with.
            LiveMismatchError, ReplicaDriftError, UndoneError, TaintedError: As ``update``.
        """
        with self._turn():
            return self._rollback()

    def _rollback(self) -> UpdateResult:
        session, ledger = self._held()
        started = self._clock()
        result = UpdateResult(self.config.run, ledger.version, ledger.version, excluded=_excluded(session))
        done = retreat(session, self._status.now.state, result)
        if done is None:
            raise NeedsAnchorError(
                f"version {ledger.version}: nothing is kept to roll back with (staged_limit_nbytes "
                f"{self.config.staged_limit_nbytes}, one version back at most); load an anchor instead"
            )
        return replace(done, total_s=self._clock() - started)

    def audit(self) -> AuditResult:
        """Compare every live tensor with the version held. *Collective*. Streaming: no copy of the weights is made.

        Raises:
            BaseMismatchError: Naming the tensors that differ, or that are no longer where they were bound.
            ReplicaDriftError: A replica differs from its primary.

        After either the engine is no longer ready, and is told that it holds no version (``holds(-1)``).
        """
        with self._turn():
            return self._audit()

    def _audit(self) -> AuditResult:
        session, ledger = self._held()
        started = self._clock()
        ids = session.binding.group_ids
        try:
            with self.telemetry.span("audit"):
                found = audit(session.binding, self._pool)
        except (BaseMismatchError, ReplicaDriftError, RankFailedError) as e:
            self._disown(session, f"audit: {e}")
            raise
        wrong = ids[(found != ledger.table[ids]).any(axis=1)]
        if len(wrong):
            reason = f"audit: {names_of(session.binding.schema, wrong)} are not version {ledger.version}'s"
            self._disown(session, reason)
            raise BaseMismatchError(f"{self.engine.name}: {reason}. Take it out of routing; load an anchor or reload")
        return AuditResult(
            ledger.version, len(ids), session.binding.slice_nbytes(), self._clock() - started, _excluded(session)
        )

    def follow(
        self,
        stop: Event,
        *,
        poll_s: float | None = None,
        wait: Callable[[float], object] | None = None,
        on_update: Callable[[UpdateResult], None] | None = None,
        on_problem: Callable[[MegasyncError], None] | None = None,
    ) -> None:
        """Follow the head until ``stop`` is set, on any rank; see ``follow.follow``. *Collective*."""

        def stopped() -> bool:
            if self.engine.num_ranks == 1:
                return stop.is_set()
            with vote(self.engine, "following") as ballot:
                ballot.data = bytes([stop.is_set()])
            return any(map(any, ballot.result))

        follow(
            self,
            stop,
            stopped=stopped,
            poll_s=poll_s if poll_s is not None else self.config.poll_s,
            wait=wait,
            on_update=on_update,
            on_problem=on_problem,
        )

    def close(self) -> None:
        """Let go of threads and staged memory, once a call that is under way has ended. Idempotent; the sink is the caller's."""
        with self._lock:
            self._closed = True
            if self._pool is not None:
                self._pool.shutdown(cancel_futures=True)
            self._session = None

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """One call at a time. Weights that it finds to be no version are no version's from then on: neither may the engine
        take traffic with them, nor may an update that looks at other words take them for its base."""
        with self._lock:
            if self._closed:
                raise ValueError("the applier is closed: make another one, and join")
            try:
                yield
            except BaseException as e:
                session = self._session
                if session is not None and session.ledger is not None:
                    if is_live_mismatch(e):
                        self._disown(session, str(e))
                    elif self._status.now.state == "updating":
                        self._interrupted(session, session.ledger, e)
                raise

    def _disown(self, session: Session, reason: str, state: State = "behind", target: int = -1) -> None:
        """Nothing may build on these weights, or be told that they are a version, before a join has looked at them again."""
        session.ledger = session.last = None
        session.staged.clear()
        self.engine.holds(-1)
        self._status.set(durable=False, state=state, target=target, reason=reason)

    def _interrupted(self, session: Session, ledger: Ledger, error: BaseException) -> None:
        """A call ended between two statuses. Where the weights are whole the next update lets the engine go on; where they may
        not be, or other ranks may have gone on, the status stays ``updating``: a join overwrites them."""
        why = f"interrupted ({type(error).__name__}: {error})"
        if session.writing or self.engine.num_ranks > 1:
            self._disown(session, why, "updating", self._status.now.target)
            return
        self._status.asleep = ledger.version
        self._status.set(
            durable=False,
            state="behind",
            version=ledger.version,
            manifest=ledger.manifest.digest.hex(),
            reason=f"{why} at version {ledger.version}, which is whole: the engine may stand still until the next update",
        )

    def _held(self) -> tuple[Session, Ledger]:
        if self._status.now.state == "tainted":
            raise TaintedError(f"{self.engine.name} is tainted ({self._status.now.reason}): replace the replica")
        session = self._session
        if session is None:
            raise ValueError("the applier holds no version yet: call join() first")
        if session.ledger is None:
            why = self._status.now.reason or "the last join did not find or load one"
            raise BaseMismatchError(f"{self.engine.name} holds no version ({why}): join again")
        return session, session.ledger

    def _wanted(self, version: int | None) -> Manifest:
        """The manifest to go to; rank 0's look at the head decides for all ranks."""
        with vote(self.engine, f"head of run {self.config.run!r}") as ballot:
            newest = self._reader.newest()
            if newest is None:
                raise RetryError(
                    f"run {self.config.run!r} has no publication yet in {self._reader.sink.describe()}: try again later"
                )
            if version is not None and version != newest.version:
                chain = self._reader.chain(newest, version - 1)
                newest = next((m for m in chain if m.version == version), newest)
                if newest.version != version:
                    raise NeedsAnchorError(
                        f"version {version} is not on the way to the head's version {newest.version} of run "
                        f"{self.config.run!r}: withdrawn, pruned or not published"
                    )
            ballot.data = msgspec.msgpack.encode((newest.version, newest.epoch, newest.digest))
        chosen = msgspec.msgpack.decode(ballot.result[0], type=tuple[int, int, bytes])
        if chosen[2] == newest.digest and self.engine.num_ranks == 1:
            return newest
        return together(self.engine, "manifest", lambda: self._reader.manifest(*chosen))


def _check_arguments(engine: object, sink: object) -> None:
    if not isinstance(engine, Engine):
        raise TypeError(
            f"Applier got {type(engine).__name__} for its engine: wrap it in one, TorchModuleEngine(module) for a torch module"
        )
    if not hasattr(sink, "read_head"):
        raise TypeError(f"Applier got {type(sink).__name__} for its sink: use open_sink(url)")


def _check_version(version: object) -> None:
    if version is not None and (isinstance(version, bool) or not isinstance(version, int)):
        raise TypeError(
            f"version {version!r} is of type {type(version).__name__}, expected an integer, or None for the head's"
        )


def _excluded(session: Session) -> tuple[str, ...]:
    return tuple(session.binding.schema.tensors[i].name for i in sorted(session.binding.excluded))
