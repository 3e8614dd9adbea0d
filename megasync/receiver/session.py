"""A session: one engine rank bound to a run, what it holds, and one step from a version to the next.

``advance`` is the flow of one publication: fetch -> stage -> prove -> apply. ``applier`` decides which publications,
and when. Must not import applier.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from megasync.config import ApplyConfig
from megasync.errors import SchemaMismatchError
from megasync.manifest import Manifest
from megasync.receiver.anchor import anchor_nbytes, prove_anchor, stage_anchor
from megasync.receiver.anchor_stream import keep_anchor, write_anchor
from megasync.receiver.apply import Applied, apply, reverse
from megasync.receiver.backend import Backend, run_all
from megasync.receiver.bind import Binding
from megasync.receiver.fetch import Fetched
from megasync.receiver.ledger import Ledger, check_live, check_own
from megasync.receiver.pausing import wake
from megasync.receiver.prior import Prior
from megasync.receiver.results import UpdateResult, density_of
from megasync.receiver.stage import Proven, Staged, prove, stage
from megasync.receiver.status import State, StatusFile
from megasync.receiver.sums import Sums
from megasync.receiver.tally import tally
from megasync.receiver.votes import together, vote
from megasync.telemetry import Telemetry
from megasync.versions.publication import PublicationReader

_DELTA_PROOFS = ("frame digests", "base manifest", "touched-old digests", "new state digests", "root", "read-back")
_BLIND_PROOFS = ("frame digests", "base manifest", "tracked state digests", "new state digests", "root", "read-back")
_ANCHOR_PROOFS = ("frame digests", "table of state digests", "root", "read-back")


@dataclass
class Session:
    """One engine rank bound to a run.

    Attributes:
        config: Of the receiving side.
        reader: Of the run.
        binding: This rank.
        backend: Places and writes.
        status: Status file.
        pool: Threads, None where there is one worker.
        telemetry: Spans and counters.
        clock: Seconds.
        ledger: What is held, None before the weights were found to be a version.
        writing: Live weights may be no version: an update is under way, or ended without having put them back.
        staged: Deltas made ready, by manifest digest.
        last: The last applied publication, for rollback; None where there is none or it took too much memory.
    """

    config: ApplyConfig
    reader: PublicationReader
    binding: Binding
    backend: Backend
    status: StatusFile
    pool: ThreadPoolExecutor | None
    telemetry: Telemetry
    clock: Callable[[], float]
    ledger: Ledger | None = None
    writing: bool = False
    staged: dict[bytes, Staged] = field(default_factory=dict)
    last: Proven | None = None

    @property
    def staged_nbytes(self) -> int:
        """Bytes of everything staged, and of what is kept for rollback."""
        kept = self.last.staged.nbytes if self.last is not None else 0
        return kept + sum(s.nbytes for s in self.staged.values())

    @property
    def proof_pool(self) -> ThreadPoolExecutor | None:
        """Threads for proofs, None where the backend does not gain from several."""
        return self.pool if self.backend.threads else None

    def count(self, fetched: Fetched) -> None:
        """Add to the counters of what was read."""
        self.telemetry.count("fetched_nbytes", fetched.nbytes)
        self.telemetry.count("refetched_frames", fetched.num_refetched)

    def hold(self, ledger: Ledger, state: State) -> None:
        """Record a version that was just proven. Where the disk refuses, the file still says ``updating``."""
        self.ledger = ledger
        self.status.set(durable=False, state=state, version=ledger.version, manifest=ledger.manifest.digest.hex())

    def held_awake(self, ledger: Ledger, state: State, applied: Applied) -> None:
        """Record a version that was just written and proven, and that the engine runs on it. *Collective*.

        Raises:
            BaseException: What ``resume`` raised; the version is held all the same, the status says why it does not serve.
        """
        self.hold(ledger, state if applied.error is None else "behind")
        if (error := wake(self.binding, self.status, ledger.version, lambda: applied.error)) is not None:
            raise error

    def wake(self) -> None:
        """Call ``resume`` again where it failed. *Collective*, and nothing where the engine runs."""
        if self.status.asleep is None:
            return
        if (error := wake(self.binding, self.status, self.status.asleep)) is not None:
            raise error

    def require_schema(self, manifest: Manifest) -> None:
        """Refuse publications of another model.

        Raises:
            SchemaMismatchError: With both schema digests.
        """
        mine = self.binding.schema
        if manifest.schema_digest != mine.digest:
            raise SchemaMismatchError(
                f"version {manifest.version} of run {manifest.run!r} speaks of schema {manifest.schema_digest.hex()}, this "
                f"engine is bound to {mine.digest.hex()}: another model; nothing was touched"
            )


def make_ready(session: Session, manifest: Manifest, *, ahead: bool) -> Staged:
    """Stage a delta, once. Local to the rank.

    Args:
        session: The session.
        manifest: The delta.
        ahead: Its base is not live yet.
    """
    found = session.staged.get(manifest.digest)
    if found is not None:
        return found
    session.require_schema(manifest)
    frames = session.binding.frames_of(manifest)
    changed = int(manifest.frames.columns["num_changed"][frames].sum(dtype="int64"))
    if session.staged_nbytes + changed * session.backend.entry_nbytes > session.config.staged_limit_nbytes:
        session.last = None  # the next version comes before the way back
    with session.telemetry.span("stage"):
        staged = stage(
            session.binding,
            session.backend,
            session.reader,
            manifest,
            session.pool,
            limit_nbytes=session.config.staged_limit_nbytes - session.staged_nbytes,
            read_live=not ahead,
            in_flight=2 * session.config.workers,
        )
    session.count(staged.fetched)
    session.staged[manifest.digest] = staged
    return staged


def advance(
    session: Session, manifest: Manifest, state: State, result: UpdateResult, prior: Prior | None = None
) -> UpdateResult:
    """Take one publication: stage, prove, apply. *Collective*.

    Args:
        session: The session; its ledger moves on success only.
        manifest: A delta from what is held, or an anchor.
        state: Status once it is held.
        result: Of the steps before.
        prior: Looks on while an anchor is read, and refuses a wrong layout before it is written.

    Returns:
        ``result`` with this step added.
    """
    session.require_schema(manifest)
    if manifest.what == "anchor" and anchor_nbytes(session.binding) > session.config.staged_limit_nbytes:
        return _advance_by_stream(session, manifest, state, result, prior)
    engine = session.binding.engine
    try:
        if manifest.what == "anchor":
            session.staged.clear()
            session.last = None
            staged = together(
                engine,
                f"staging of anchor {manifest.version}",
                lambda: stage_anchor(
                    session.binding, session.reader, manifest, session.pool, None if prior is None else prior.see
                ),
            )
            session.count(staged.fetched)
            if prior is not None:
                prior.require_order()
            with session.telemetry.span("prove"):
                proven = prove_anchor(session.binding, session.ledger, session.reader, staged, session.pool)
        else:
            staged = together(
                engine, f"staging of version {manifest.version}", lambda: make_ready(session, manifest, ahead=False)
            )
            assert session.ledger is not None  # deltas are routed from a ledger
            with session.telemetry.span("prove"):
                proven = prove(session.binding, session.ledger, staged, session.proof_pool)
    finally:
        session.staged.pop(manifest.digest, None)
    if manifest.what == "delta" and not manifest.num_changed:
        with vote(engine, f"holding version {manifest.version}"):
            engine.check_ready()  # first: a sleeping engine's memory may be elsewhere
            session.binding.check_alive()
            engine.holds(manifest.version)
        applied = Applied(0.0, ())
    else:
        applied = _apply(session, proven)
    session.last = proven if session.staged_nbytes + staged.nbytes <= session.config.staged_limit_nbytes else None
    session.held_awake(proven.ledger, state, applied)
    proofs = _DELTA_PROOFS if manifest.what == "delta" else _ANCHOR_PROOFS
    if any(p.blind for p in staged.placed):
        proofs = _BLIND_PROOFS
    result = _added(session, result, manifest, applied, proofs)
    return replace(
        result,
        stage_s=result.stage_s + staged.stage_s,
        fetched_nbytes=result.fetched_nbytes + staged.fetched.nbytes,
        num_refetched=result.num_refetched + staged.fetched.num_refetched,
        num_written=result.num_written + sum(p.num_changed for p in staged.placed),
    )


def retreat(session: Session, state: State, result: UpdateResult) -> UpdateResult | None:
    """Go back to the version before the last one, by XOR of what was kept. *Collective*.

    Returns:
        ``result`` with the step added, None where nothing is kept.

    Raises:
        LiveMismatchError: Live words are not the last version's: nothing was touched.
    """
    # An interrupt may have come between a proof and what is kept of it: then that leads back from another version.
    last = session.last if session.last is not None and session.last.ledger is session.ledger else None
    back = reverse(last) if last is not None else None
    if back is None:
        return None
    placed = back.staged.placed
    ids, binding = back.ids, session.binding
    assert back.base is not None  # what is held now
    undone = back.base.manifest
    own: list[Sums] = []

    def live() -> list[list[Sums]]:
        sums = run_all(session.proof_pool, [p.prove for p in placed])
        own.extend(Sums.join(x[k] for x in sums) for k in (0, 1))
        return [[own[0]]]

    (found,) = tally(binding, f"proof of version {back.base_version} before rolling back", ids, live)
    check_live(binding.schema, back.base_version, ids, back.before, found)
    if back.own is not None:
        with vote(binding.engine, f"way back from version {back.base_version}"):
            check_own(binding.schema, back.ledger.version, back.own[1], own[1])
        back = replace(back, own=(own[0], own[1]))
    session.staged.clear()
    applied = _apply(session, back)
    session.last = None
    session.held_awake(back.ledger, state, applied)
    # XOR undoes itself: what changed is what the undone publication changed, not what the one that is held again once did.
    result = _added(session, result, undone, applied, ("state digests of what was kept", "read-back"))
    held = back.ledger.version
    return replace(result, version=held, versions=(held,), num_written=sum(p.num_changed for p in placed))


def _apply(session: Session, proven: Proven) -> Applied:
    with session.telemetry.span("apply"):
        return apply(session.binding, session.backend, proven, session, session.status, session.pool, session.clock)


def _advance_by_stream(
    session: Session, manifest: Manifest, state: State, result: UpdateResult, prior: Prior | None
) -> UpdateResult:
    session.staged.clear()
    session.last = None
    binding, reader, pool, kept = session.binding, session.reader, session.pool, None
    if prior is not None:
        see, ids, limit_nbytes = prior.see, prior.ids, session.config.staged_limit_nbytes
        with session.telemetry.span("compare"):
            kept = together(
                binding.engine,
                f"comparing anchor {manifest.version}",
                lambda: keep_anchor(binding, reader, manifest, pool, see, ids, limit_nbytes),
            )
            prior.require_order()
    with session.telemetry.span("apply"):
        applied, ledger, fetched = write_anchor(
            binding, reader, manifest, session, session.status, pool, session.clock, kept
        )
    session.count(fetched)
    session.held_awake(ledger, state, applied)
    result = _added(session, result, manifest, applied, (*_ANCHOR_PROOFS[:-1], "audit"))
    return replace(
        result,
        fetched_nbytes=result.fetched_nbytes + fetched.nbytes,
        num_refetched=result.num_refetched + fetched.num_refetched,
    )


def _added(
    session: Session, result: UpdateResult, manifest: Manifest, applied: Applied, proofs: tuple[str, ...]
) -> UpdateResult:
    engine = session.binding.engine
    votes = (f"vote of {engine.num_ranks} ranks",) if engine.num_ranks > 1 else ()
    return replace(
        result,
        version=manifest.version,
        versions=(*result.versions, manifest.version),
        pause_s=result.pause_s + applied.pause_s,
        num_changed=result.num_changed + manifest.num_changed,
        density=density_of(session.binding.schema, manifest),
        backend=session.backend.name,
        proofs=tuple(dict.fromkeys((*result.proofs, *proofs, *votes))),
        derived=tuple(dict.fromkeys((*result.derived, *applied.derived))),
    )
