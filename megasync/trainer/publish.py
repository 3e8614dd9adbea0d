"""Publish: payloads durable, then the manifest, then the head; one verdict for all ranks.

Last stop of the flow (encode -> gather -> publish); runs behind the training loop, on its own thread and process group.
Every attempt is bounded in time and ends in an exchange of what happened, so that an error on one rank becomes the same
error on all, and an unreachable sink is retried by all together. Must not import receiver or an adapter.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from threading import Event
from time import monotonic, perf_counter
from typing import TYPE_CHECKING, Literal

import msgspec
import numpy as np

from megasync.codecs.planes import LEVEL, LIBRARY
from megasync.config import GatherKind, PublishConfig
from megasync.digest import SHA256, XXH3_128, content_digest
from megasync.errors import RankFailedError, RetryError, SinkConflictError
from megasync.frames import FrameTable, make_table, read_table
from megasync.manifest import DIGEST_NBYTES, Manifest, payload_key
from megasync.schema import Schema
from megasync.sinks.base import Sink
from megasync.trainer.agree import all_gather_bytes, broadcast_bytes, rank_of
from megasync.trainer.carrier import Carrier
from megasync.trainer.gather import Placement, place, receive, send
from megasync.versions.anchor import anchor_header
from megasync.versions.encode import Contribution, EncodedDelta, describe, merge_tables, read_contribution
from megasync.versions.head import move_head, settle_fate, write_manifest, write_schema, write_state_table
from megasync.versions.lineage import Lineage, sum_rows

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

HEAD_WRITER = 0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 5.0
_State = Literal["done", "again", "failed", "fenced"]
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a version; the same on every rank.

    Attributes:
        version: The version.
        durable: Its head is durable.
        error: Why not, by rank.
        fenced: Another publisher took over: this one must stop.
        payload_nbytes: Bytes of all payloads.
        manifest_nbytes: Bytes of the manifest.
        num_changed: Changed words.
        publish_s: Seconds from the start of the gather to the verdict.
    """

    version: int
    durable: bool
    error: dict[int, str]
    fenced: bool = False
    payload_nbytes: int = 0
    manifest_nbytes: int = 0
    num_changed: int = 0
    publish_s: float = 0.0


class _Status(msgspec.Struct, array_like=True, frozen=True):
    state: _State
    error: str = ""
    manifest_nbytes: int = 0
    stuck: bool = False


@dataclass
class Publishing:
    """Everything that publishing needs and that does not change from version to version.

    Attributes:
        schema: The run's schema.
        sink: Where.
        config: Trainer-side configuration.
        group: gloo group of the worker thread's exchanges; None alone.
        carrier: Takes payloads from rank to rank; None alone.
        closing: Set when the trainer gives up waiting: no further attempt is made.
        stuck: The sink's last answer, on every rank, once a head write has been in doubt for longer than ``give_up_s``: the
            version may still turn out durable. Empty while all is well.
    """

    schema: Schema
    sink: Sink
    config: PublishConfig
    group: ProcessGroup | None
    carrier: Carrier | None
    closing: Event
    stuck: str = ""

    @property
    def algorithm(self) -> int:
        """Digest algorithm: a cryptographic one where manifests are signed."""
        return SHA256 if self.config.sign_key else XXH3_128


def publish(
    p: Publishing,
    delta: EncodedDelta | None,
    error: BaseException | None,
    version: int,
    lineage: Lineage | None,
    info: dict[str, str | int | float],
    *,
    anchor: bool = False,
) -> tuple[Outcome, Lineage | None]:
    """Publish one version.

    *Collective*: over ``p.group``; every rank must call it, with its delta or with the error that kept it from one.

    Args:
        p: The run.
        delta: This rank's part.
        error: Why it has none.
        version: Version number, the same on every rank.
        lineage: On the head writer, the version to start from.
        info: Facts for the manifest (the head writer's are taken).
        anchor: Full bytes that need no base.

    Returns:
        The verdict, and on the head writer the lineage after it.

    Raises:
        RankFailedError: A rank did not answer: the group cannot be used any more.
    """
    start, deadline = perf_counter(), monotonic() + p.config.give_up_s
    parts = _exchange(p, delta, error, version)
    if isinstance(parts, dict):
        return Outcome(version, False, parts), lineage
    assert delta is not None
    sizes = np.array([c.nbytes for c in parts], dtype=np.int64)
    placement = place(sizes, p.config.num_writers, direct=p.config.gather is GatherKind.DIRECT)
    headers = _anchor_headers(p, parts, placement) if anchor else [b""] * len(placement.writer_of)
    epoch = _from_head_writer(p, lineage.head.fence if lineage else 0, f"epoch of version {version}")
    failed = _write_payloads(p, delta, placement, sizes, headers, version, epoch, deadline)
    if failed:
        return Outcome(version, False, failed), lineage
    outcome, lineage = _write_head(p, parts, placement, headers, version, lineage, info, anchor, deadline)
    return replace(outcome, publish_s=perf_counter() - start), lineage


def _exchange(
    p: Publishing, delta: EncodedDelta | None, error: BaseException | None, version: int
) -> list[Contribution] | dict[int, str]:
    """Metadata of all ranks, or the errors of those that failed."""
    if error is None and delta is not None:
        data = b"\0" + describe(delta, DIGEST_NBYTES[p.algorithm])
    else:
        data = b"\1" + f"{type(error).__name__}: {error}".encode()
    told = all_gather_bytes(p.group, data, f"metadata of version {version}", p.config.timeout_s)
    failed = {r: bytes(d[1:]).decode() for r, d in enumerate(told) if d[0]}
    return failed or [read_contribution(d[1:]) for d in told]


def _from_head_writer(p: Publishing, value: int, what: str) -> int:
    return int.from_bytes(broadcast_bytes(p.group, value.to_bytes(8, "little"), what, p.config.timeout_s), "little")


def _write_payloads(
    p: Publishing,
    delta: EncodedDelta,
    placement: Placement,
    sizes: np.ndarray,
    headers: Sequence[bytes],
    version: int,
    epoch: int,
    deadline: float,
) -> dict[int, str]:
    """Write every payload, again and again while the sink does not answer; the errors of the ranks that failed.

    Payloads that no head names are never read: what is given up here is known not to be published.
    """
    me = rank_of(p.group)
    mine = [i for i, writer in enumerate(placement.writer_of) if writer == me]
    done: set[int] = set()
    everywhere_done: set[int] = set()

    def attempt() -> _Status:
        waiting = [i for i in mine if i not in done]
        if p.carrier is not None and placement.payload_of[me] >= 0 and placement.payload_of[me] not in everywhere_done:
            send(p.carrier, placement, delta.parts)
        status = _Status("done")
        for i in waiting:
            bytes_of = receive(p.carrier, placement, i, sizes, delta.parts)
            try:
                p.sink.create(
                    payload_key(p.schema.run, version, epoch, i),
                    _chain(headers[i], bytes_of),
                    timeout_s=p.config.timeout_s,
                )
                done.add(i)
            except Exception as e:
                for _ in bytes_of:  # the senders wait until every byte is taken
                    pass
                status = _status_of(e)
        return status

    pause = _FIRST_PAUSE_S
    while True:
        try:
            status = attempt()
        except RankFailedError as e:
            status = _Status("failed", str(e))
        told = all_gather_bytes(
            p.group,
            msgspec.msgpack.encode((status, sorted(done))),
            f"payloads of version {version}",
            p.config.timeout_s,
        )
        rows = [msgspec.msgpack.decode(t, type=tuple[_Status, list[int]]) for t in told]
        everywhere_done = {i for _, finished in rows for i in finished}
        if failed := {r: s.error for r, (s, _) in enumerate(rows) if s.state in ("failed", "fenced")}:
            return failed
        if all(s.state == "done" for s, _ in rows):
            return {}
        if pause == _FIRST_PAUSE_S:
            _say_waiting(p, version, next(s.error for s, _ in rows if s.state == "again"))
        if _any(p, p.closing.wait(pause) or monotonic() > deadline, f"retry of version {version}"):
            return {r: _given_up(p, s) for r, (s, _) in enumerate(rows) if s.state == "again"}
        pause = min(2 * pause, _LONGEST_PAUSE_S)


def _write_head(
    p: Publishing,
    parts: list[Contribution],
    placement: Placement,
    headers: Sequence[bytes],
    version: int,
    lineage: Lineage | None,
    info: dict[str, str | int | float],
    anchor: bool,
    deadline: float,
) -> tuple[Outcome, Lineage | None]:
    """The head writer's steps; the other ranks follow its rounds."""
    steps = _HeadSteps(p, lineage, version) if lineage is not None else None
    if steps is not None:
        steps.prepare(lambda: _manifest(p, parts, placement, headers, version, steps.lineage, info, anchor))
    pause = _FIRST_PAUSE_S
    while True:
        status = steps.attempt() if steps is not None else _Status("again")
        if steps is not None and status.state == "again" and monotonic() > deadline:
            # A head write in doubt may still land: that version is neither given up nor withdrawn.
            status = (
                _Status("again", status.error, stuck=True)
                if steps.in_doubt
                else _Status("failed", _given_up(p, status))
            )
        told = broadcast_bytes(
            p.group, msgspec.msgpack.encode(status), f"head of version {version}", p.config.timeout_s
        )
        status = msgspec.msgpack.decode(told, type=_Status)
        p.stuck = status.error if status.stuck else ""
        if status.state != "again":
            break
        if pause == _FIRST_PAUSE_S:
            _say_waiting(p, version, status.error)
        if _any(p, p.closing.wait(pause), f"retry of the head of version {version}"):
            status = _Status("failed", f"fate unknown, given up: {status.error}")
            break
        pause = min(2 * pause, _LONGEST_PAUSE_S)
    durable = status.state == "done"
    outcome = Outcome(
        version,
        durable,
        {} if durable else {HEAD_WRITER: status.error},
        status.state == "fenced",
        sum(placement.payload_nbytes) + sum(map(len, headers)),
        status.manifest_nbytes,
        sum(int(np.frombuffer(c.columns.num_changed, "<u4").sum(dtype=np.int64)) for c in parts),
    )
    return outcome, steps.lineage if steps is not None else None


class _HeadSteps:
    """Manifest, then head, each until it is done, failed, or fenced off by another publisher."""

    def __init__(self, p: Publishing, lineage: Lineage, version: int) -> None:
        self.p, self.lineage, self.version = p, lineage, version
        self.manifest: Manifest | None = None
        self.failure: _Status | None = None
        self.next = lineage
        self.written = self.in_doubt = False

    def prepare(self, make: Callable[[], tuple[Manifest, Lineage]]) -> None:
        """Build the manifest, keeping any error for the verdict."""
        try:
            self.manifest, self.next = make()
        except Exception as e:
            self.failure = _status_of(e)

    def attempt(self) -> _Status:
        """One bounded try."""
        if self.failure is not None or self.manifest is None:
            return self.failure or _Status("failed", "no manifest")
        p, m, timeout = self.p, self.manifest, self.p.config.timeout_s
        try:
            if not self.written:
                if m.base_version < 0:
                    write_schema(p.sink, p.schema, timeout_s=timeout)
                    write_state_table(p.sink, m.run, m.state_table, self.next.states.tobytes(), timeout_s=timeout)
                write_manifest(p.sink, m, timeout_s=timeout)
                self.written = True
            if self.in_doubt:
                durable, head = settle_fate(p.sink, self.lineage.head, m, timeout_s=timeout)
                self.lineage = replace(self.lineage, head=head)
                self.in_doubt = False
                if not durable:
                    return self._fail("the head write was lost, and was fenced off so that it cannot land later")
            else:
                self.in_doubt = True
                head = move_head(p.sink, self.lineage.head, m, timeout_s=timeout)
                self.in_doubt = False
        except Exception as e:
            status = _status_of(e)
            if status.state == "again":
                return status
            if status.state == "fenced" and self.in_doubt:
                self.in_doubt = False
            self.failure = status
            return status
        self.lineage = replace(self.next, head=head, version=m.version, digest=m.digest)
        return _Status("done", "", len(m.encoded))

    def _fail(self, why: str) -> _Status:
        self.failure = _Status("failed", why)
        return self.failure


def _manifest(
    p: Publishing,
    parts: list[Contribution],
    placement: Placement,
    headers: Sequence[bytes],
    version: int,
    lineage: Lineage,
    info: dict[str, str | int | float],
    anchor: bool,
) -> tuple[Manifest, Lineage]:
    """The manifest of a publication, and the lineage once it is durable."""
    num = len(p.schema.tensors)
    ids = np.concatenate([c.ids for c in parts])
    change = sum_rows(ids, np.concatenate([c.change for c in parts]), num)
    olds = sum_rows(ids, np.concatenate([c.touched_old for c in parts]), num)
    tables: list[FrameTable] = []
    payload_of: list[int] = []
    offset_of: list[int] = []
    for rank, c in enumerate(parts):
        if not len(c.columns.codec):
            continue
        tables.append(read_table(c.columns, p.schema, [c.nbytes], DIGEST_NBYTES[p.algorithm]))
        payload_of.append(placement.payload_of[rank])
        offset_of.append(placement.offset_of[rank] + len(headers[placement.payload_of[rank]]))
    table = merge_tables(tables, payload_of, offset_of) if tables else make_table([], DIGEST_NBYTES[p.algorithm])
    after = lineage.after(change)
    states = after.states
    touched = np.unique(table.runs["tensor_id"]).astype("<u4")
    root = content_digest(states.tobytes(), XXH3_128)
    manifest = Manifest(
        what="anchor" if anchor else "delta",
        run=p.schema.run,
        epoch=lineage.head.fence,
        version=version,
        base_version=-1 if anchor else lineage.version,
        base_digest=b"" if anchor else lineage.digest,
        schema_digest=p.schema.digest,
        payload_nbytes=tuple(n + len(h) for n, h in zip(placement.payload_nbytes, headers, strict=True)),
        frames=table,
        touched_ids=touched,
        new_states=states[touched],
        touched_olds=olds.astype("<u8").view(np.uint8).reshape(-1, 16)[touched],
        root=root,
        num_changed=int(table.columns["num_changed"].sum(dtype=np.int64)),
        state_table=root if anchor else b"",
        outer=f"{LIBRARY} level {LEVEL}",
        formulas=p.schema.formulas,
        info=info,
        digest_algorithm=p.algorithm,
        key=p.config.sign_key or None,
    )
    return manifest, after


def _anchor_headers(p: Publishing, parts: list[Contribution], placement: Placement) -> list[bytes]:
    """safetensors header of each anchor payload: one entry per owner and tensor, in the order of the bytes."""
    out = []
    for payload in range(len(placement.writer_of)):
        tables = [
            read_table(parts[r].columns, p.schema, [parts[r].nbytes], DIGEST_NBYTES[p.algorithm])
            for r in placement.owners(payload)
        ]
        out.append(anchor_header(p.schema, tables))
    return out


def _chain(header: bytes, rest: Iterable[memoryview]) -> Iterator[bytes | memoryview]:
    if header:
        yield header
    yield from rest


def _status_of(e: BaseException) -> _Status:
    text = f"{type(e).__name__}: {e}"
    if isinstance(e, RetryError):
        return _Status("again", text)
    if isinstance(e, SinkConflictError):
        return _Status("fenced", text)
    return _Status("failed", text)


def _say_waiting(p: Publishing, version: int, error: str) -> None:
    """Once a version, on the first rank: where the limit of versions in flight is reached, training waits for the sink."""
    if rank_of(p.group) == HEAD_WRITER:
        _log.warning(
            "version %d waits for the sink and is tried again for up to give_up_s=%g s: %s",
            version,
            p.config.give_up_s,
            error,
        )


def _given_up(p: Publishing, status: _Status) -> str:
    why = "the publisher was closed" if p.closing.is_set() else f"give_up_s={p.config.give_up_s:g} s passed"
    return f"given up ({why}), nothing of it was published: {status.error}"


def _any(p: Publishing, mine: bool, what: str) -> bool:
    """Whether any rank says yes; the same answer everywhere."""
    told = all_gather_bytes(p.group, b"\1" if mine else b"\0", what, p.config.timeout_s)
    return any(t[0] for t in told)
