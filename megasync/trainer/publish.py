"""Publish: payloads durable, then the manifest, then the head; one verdict for all ranks.

Last stop of the flow (encode -> gather -> publish); runs behind the training loop, on its own thread and process group.
Every attempt is bounded in time and ends in an exchange of what happened, so that an error on one rank becomes the same
error on all, and an unreachable sink is retried by all together. Must not import receiver or an adapter.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from time import monotonic, perf_counter

import msgspec
import numpy as np

from megasync.config import GatherKind
from megasync.errors import RankFailedError
from megasync.frames import read_table
from megasync.manifest import DIGEST_NBYTES, payload_key
from megasync.trainer.agree import all_gather_bytes, broadcast_bytes, rank_of
from megasync.trainer.agree_wait import PATIENCE
from megasync.trainer.gather import Placement, place, receive, send
from megasync.trainer.publish_head import write_head
from megasync.trainer.publishing import (
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    Outcome,
    Publishing,
    Status,
    any_rank,
    given_up,
    say_waiting,
    status_of,
    watched,
)
from megasync.versions.anchor import anchor_header
from megasync.versions.encode import Contribution, EncodedDelta, describe, read_contribution
from megasync.versions.lineage import Lineage


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
    outcome, lineage = write_head(p, parts, placement, headers, version, lineage, info, anchor, deadline)
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

    def attempt() -> Status:
        waiting = [i for i in mine if i not in done]
        if p.carrier is not None and placement.payload_of[me] >= 0 and placement.payload_of[me] not in everywhere_done:
            send(p.carrier, placement, delta.parts)
        status = Status("done")
        for i in waiting:
            bytes_of = receive(p.carrier, placement, i, sizes, delta.parts)
            try:
                key = payload_key(p.schema.run, version, epoch, i)
                with watched(p, version, "payload"):
                    p.sink.create(key, _chain(headers[i], bytes_of), timeout_s=p.config.timeout_s)
                done.add(i)
            except Exception as e:
                for _ in bytes_of:  # the senders wait until every byte is taken
                    pass
                status = status_of(e)
        return status

    pause = FIRST_PAUSE_S
    while True:
        try:
            status = attempt()
        except RankFailedError as e:
            status = Status("failed", str(e))
        told = all_gather_bytes(
            p.group,
            msgspec.msgpack.encode((status, sorted(done))),
            f"payloads of version {version}",
            PATIENCE * p.config.timeout_s,
        )
        rows = [msgspec.msgpack.decode(t, type=tuple[Status, list[int]]) for t in told]
        everywhere_done = {i for _, finished in rows for i in finished}
        if failed := {r: s.error for r, (s, _) in enumerate(rows) if s.state in ("failed", "fenced")}:
            return failed
        if all(s.state == "done" for s, _ in rows):
            return {}
        if pause == FIRST_PAUSE_S:
            say_waiting(p, version, next(s.error for s, _ in rows if s.state == "again"))
        if any_rank(p, p.closing.wait(pause) or monotonic() > deadline, f"retry of version {version}"):
            return {r: given_up(p, s) for r, (s, _) in enumerate(rows) if s.state == "again"}
        pause = min(2 * pause, LONGEST_PAUSE_S)


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
