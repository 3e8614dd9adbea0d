"""The head writer's part of publishing: manifest, then head, while the other ranks follow its rounds.

After the payloads of ``publish`` are durable. Must not import receiver or an adapter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from time import monotonic

import msgspec
import numpy as np

from megasync.codecs.planes import LEVEL, LIBRARY
from megasync.digest import XXH3_128, content_digest
from megasync.frames import FrameTable, make_table, read_table
from megasync.manifest import DIGEST_NBYTES, Manifest
from megasync.trainer.agree import broadcast_bytes
from megasync.trainer.agree_wait import PATIENCE
from megasync.trainer.gather import Placement
from megasync.trainer.publishing import (
    FIRST_PAUSE_S,
    HEAD_WRITER,
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
from megasync.versions.encode import Contribution, merge_tables
from megasync.versions.head import move_head, settle_fate, write_manifest, write_schema, write_state_table
from megasync.versions.lineage import Lineage, sum_rows


def write_head(
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
    pause = FIRST_PAUSE_S
    while True:
        with watched(p, version, "manifest and head"):
            status = steps.attempt() if steps is not None else Status("again")
        if steps is not None and status.state == "again" and monotonic() > deadline:
            # A head write in doubt may still land: that version is neither given up nor withdrawn.
            status = (
                Status("again", status.error, stuck=True) if steps.in_doubt else Status("failed", given_up(p, status))
            )
        told = broadcast_bytes(
            p.group, msgspec.msgpack.encode(status), f"head of version {version}", PATIENCE * p.config.timeout_s
        )
        status = msgspec.msgpack.decode(told, type=Status)
        p.stuck = status.error if status.stuck else ""
        if status.state != "again":
            break
        if pause == FIRST_PAUSE_S:
            say_waiting(p, version, status.error)
        if any_rank(p, p.closing.wait(pause), f"retry of the head of version {version}"):
            status = Status("failed", f"fate unknown, given up: {status.error}")
            break
        pause = min(2 * pause, LONGEST_PAUSE_S)
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
        self.failure: Status | None = None
        self.next = lineage
        self.written = self.in_doubt = False

    def prepare(self, make: Callable[[], tuple[Manifest, Lineage]]) -> None:
        """Build the manifest, keeping any error for the verdict."""
        try:
            self.manifest, self.next = make()
        except Exception as e:
            self.failure = status_of(e)

    def attempt(self) -> Status:
        """One bounded try."""
        if self.failure is not None or self.manifest is None:
            return self.failure or Status("failed", "no manifest")
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
            status = status_of(e)
            if status.state == "again":
                return status
            if status.state == "fenced" and self.in_doubt:
                self.in_doubt = False
            self.failure = status
            return status
        self.lineage = replace(self.next, head=head, version=m.version, digest=m.digest)
        return Status("done", "", len(m.encoded))

    def _fail(self, why: str) -> Status:
        self.failure = Status("failed", why)
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
