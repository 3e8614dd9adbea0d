"""``megasync inspect`` and ``megasync verify``: what is in a sink, and whether all of it is whole."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megasync.codecs.registry import codec_by_id
from megasync.digest import state_lanes
from megasync.errors import FormatError, MegasyncError
from megasync.manifest import Head, Manifest, decode_head, manifest_key, root_of
from megasync.schema import Schema
from megasync.sinks.base import Sink
from megasync.tools.survey import survey
from megasync.types import Entries, Lanes
from megasync.versions.changes import word_sums
from megasync.versions.publication import PublicationReader, decode_frame

_VERSION = re.compile(r"v\d{12}")


def runs_of(sink: Sink) -> list[str]:
    """Runs that have anything in a sink: one of which only the head is left is damaged, not absent.

    A run that was claimed and never published is none.
    """
    parts = (key.split("/") for key in sink.keys(""))
    found = {p[0] for p in parts if len(p) > 2 and (p[1] in ("schema", "state") or _VERSION.fullmatch(p[1]))}
    return sorted(found | {run for run in sink.heads() if run not in found and _was_published(sink, run)})


def _was_published(sink: Sink, run: str) -> bool:
    """Whether a head names a version, or may have done so before it was damaged."""
    raw = sink.read_head(run)
    try:
        return raw is not None and decode_head(raw, run).version >= 0
    except (MegasyncError, ValueError):
        return True


def examine(sink: Sink, run: str, *, key: bytes | None = None) -> dict[str, Any]:
    """Facts of a run from its documents, of whatever versions can be read; no payload is read.

    Returns:
        ``run``, ``head`` (None where it is missing or cannot be read; version -1 where the run was claimed and has none),
        ``schema``, ``tensors`` and ``full_nbytes`` where a version can be read, ``versions``, oldest first, each with its
        codecs, sizes, counts and how it hangs together with the others (``Survey.link_of``), ``unreadable`` ones,
        ``objects`` that lie there where that is not told by the versions, and ``faults``.
    """
    found = survey(sink, run, key=key)
    out: dict[str, Any] = {"run": run, "head": _head_of(found.head)}
    if found.chains:
        schema = found.reader.schema(found.chains[0][-1].schema_digest)
        out |= {"schema": schema.digest.hex(), "tensors": len(schema.tensors), "full_nbytes": schema.nbytes}
    if found.objects is not None:
        there = found.objects
        out["objects"] = {
            "manifests": len(there.manifests),
            "payloads": there.payloads,
            "schemas": there.schemas,
            "state_tables": there.state_tables,
        }
    out["versions"] = [_row(m) | {"chain": found.link_of(m)} for m in found.manifests]
    return out | {"unreadable": sorted(found.unreadable), "faults": found.faults}


def _head_of(head: Head | None) -> dict[str, Any] | None:
    if head is None:
        return None
    return {"version": head.version, "epoch": head.epoch, "fence": head.fence, "digest": head.digest.hex()}


def _row(m: Manifest) -> dict[str, Any]:
    codecs = Counter(codec_by_id(int(c)).name for c in m.frames.columns["codec"])
    return {
        "version": m.version,
        "epoch": m.epoch,
        "what": m.what,
        "base_version": m.base_version,
        "num_changed": m.num_changed,
        "tensors_touched": len(m.touched_ids),
        "frames": len(m.frames),
        "codecs": dict(codecs),
        "payloads": len(m.payload_nbytes),
        "payload_nbytes": m.payload_total_nbytes,
        "manifest_nbytes": len(m.encoded),
        "root": m.root.hex(),
        "outer": m.outer,
        "formulas": list(m.formulas),
        "signed": m.is_signed,
        "info": dict(m.info),
    }


@dataclass
class VerifyReport:
    """What verifying found.

    Attributes:
        run: Run.
        versions: Versions checked, oldest first.
        unreadable: Versions that could not be, because their manifest is damaged, gone or refused.
        unchained: Versions checked to which no anchor or checkpoint leads: their roots could not be followed.
        unreached: Versions checked to which the head does not lead.
        frames: Frames read and decoded.
        nbytes: Stored bytes read.
        faults: What is wrong; empty for a whole run.
        orphans: Keys that no head chain names (garbage of dead epochs; told only of a run whose chain is whole), and what
            writers that were killed more than an hour ago left half-written; no fault.
        complete: The chain leads back to an anchor or a checkpoint, and all that it names is there and whole.
    """

    run: str
    versions: list[int] = field(default_factory=list)
    unreadable: list[int] = field(default_factory=list)
    unchained: list[int] = field(default_factory=list)
    unreached: list[int] = field(default_factory=list)
    frames: int = 0
    nbytes: int = 0
    faults: list[str] = field(default_factory=list)
    orphans: list[str] = field(default_factory=list)
    complete: bool = False


def verify(sink: Sink, run: str, *, key: bytes | None = None) -> VerifyReport:
    """Read everything of a run that can be read: digests, decoding, counts, sizes, state digests and chain.

    State digests are followed from the oldest table of each chain: each delta's change is ``old XOR value`` only at the
    receiver, so here the touched-old and new sums are compared with the root's table.
    """
    found = survey(sink, run, key=key)
    reader, manifests = found.reader, found.manifests
    report = VerifyReport(
        run,
        versions=[m.version for m in manifests],
        unreadable=sorted(found.unreadable),
        unchained=[m.version for m in manifests if m.digest not in found.started],
        unreached=[m.version for m in manifests if m.digest not in found.reached],
        faults=list(found.faults),
    )
    if not manifests and not report.faults:
        report.faults.append(
            f"run {run!r} has no publication in {sink.describe()}: it was claimed and has no version yet (there: "
            f"{found.objects}). Verify it once its trainer has published"
        )
    for chain in found.chains:
        states: np.ndarray | None = None
        for m in chain:
            try:
                states = _follow(reader, m, states)
            except MegasyncError as e:
                report.faults.append(f"version {m.version}: {e}")
            _read_payloads(reader, m, states, report)
    if not found.faults:
        reached = {k for m in manifests for k in _keys_of(m)}
        report.orphans = [k for k in sink.keys(run) if k not in reached and "/v" in k]
    report.orphans += sink.leftovers(run)
    report.complete = bool(manifests) and not report.faults
    return report


def _follow(reader: PublicationReader, m: Manifest, states: np.ndarray | None) -> np.ndarray | None:
    """The table of state digests at a version; the manifest's root must be its digest."""
    if m.what != "delta":
        return reader.state_table(m).copy()
    if states is None:
        return None
    states[m.touched_ids] = m.new_states
    if root_of(states) != m.root:
        raise FormatError(f"its touched tensors do not lead to its root {m.root.hex()}")
    return states


def _read_payloads(reader: PublicationReader, m: Manifest, states: np.ndarray | None, report: VerifyReport) -> None:
    schema, before = reader.schema(m.schema_digest), len(report.faults)
    sizes = _check_sizes(reader, m, report)
    sums: dict[int, Lanes] = {}
    for i in range(len(m.frames)):
        record = m.frames.record(i)
        if record.offset + record.nbytes > sizes.get(record.payload, 0):
            continue  # cut or gone, which is told already
        try:
            stored = reader.frame_bytes(m, record)
            entries = decode_frame(schema, m, record, stored)
        except MegasyncError as e:
            report.faults.append(f"version {m.version}, frame {i}: {e}")
            continue
        report.frames += 1
        report.nbytes += record.nbytes
        if m.what == "anchor":
            _add_sums(schema, entries, sums)
    if m.what == "anchor" and states is not None and len(report.faults) == before:
        # Every tensor: one that the anchor does not list is all zero, and its state must say so. Frozen ones are in the
        # root but in no anchor: their bytes are in nobody's payload.
        for i, (tensor, state) in enumerate(zip(schema.tensors, states, strict=True)):
            if not tensor.frozen and state_lanes(tensor, state.tobytes()) != sums.get(i, Lanes()):
                report.faults.append(f"version {m.version}: {tensor.name} has other bytes than its digest")


def _check_sizes(reader: PublicationReader, m: Manifest, report: VerifyReport) -> dict[int, int]:
    """Compare the sizes of a manifest's payloads; returns them, but for those that cannot be read at all. Each is told once.

    Frames name all that a reader needs, so that it never sees what follows the last one: only the size tells.
    """
    sizes: dict[int, int] = {}
    for i, expected in enumerate(m.payload_nbytes):
        key = m.payload_key(i)
        try:
            found = reader.sink.size(key, timeout_s=reader.timeout_s)
        except (KeyError, MegasyncError) as e:
            fault = reader.missing(m, key, "payload") if isinstance(e, KeyError) else e
            report.faults.append(f"version {m.version}: {fault}")
            continue
        sizes[i] = found
        if found != expected:
            report.faults.append(
                f"version {m.version}: payload {key} has {found} bytes, its manifest says {expected}: "
                + ("it was cut" if found < expected else "bytes were put after its end")
                + ". Put the right object back from a copy of the sink"
            )
    return sizes


def _add_sums(schema: Schema, entries: Entries, sums: dict[int, Lanes]) -> None:
    for tensor_id, lanes in word_sums(schema, entries, entries.values).items():
        sums[tensor_id] = sums.get(tensor_id, Lanes()) + lanes


def _keys_of(m: Manifest) -> list[str]:
    return [manifest_key(m.run, m.version, m.epoch), *(m.payload_key(i) for i in range(len(m.payload_nbytes)))]
