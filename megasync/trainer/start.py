"""Start of a publisher: exporter -> metadata -> ownership plan -> regions -> snapshot, and version 0 or the head again.

Called once by the callback, before the first training step. Must not import receiver or an adapter.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec
import numpy as np
import torch

from megasync.config import FirstDifference, GatherKind, PublishConfig
from megasync.digest import XXH3_128, content_digest
from megasync.errors import BaseMismatchError, MegasyncError
from megasync.manifest import Head, Manifest, decode_head
from megasync.schema import Schema, require_same
from megasync.sinks.base import Sink
from megasync.trainer.agree import agree, all_gather_bytes, broadcast_bytes, num_ranks, rank_of
from megasync.trainer.agree_wait import PATIENCE
from megasync.trainer.device_digest import device_lanes
from megasync.trainer.device_snapshot import device_of, make_snapshot
from megasync.trainer.exporter import Exporter
from megasync.trainer.gather import writers_of
from megasync.trainer.mask import words_of
from megasync.trainer.memory_plan import check_memory, plan_memory
from megasync.trainer.metadata import exchange
from megasync.trainer.plan import OwnershipPlan, make_plan
from megasync.trainer.publishing import HEAD_WRITER
from megasync.trainer.regions import match_regions
from megasync.trainer.replicas import LanesOf, check_replicas, check_sources, host_lanes
from megasync.trainer.seed import (
    FrozenRow,
    check_checkpoint,
    fill_from_checkpoint,
    fill_from_live,
    fill_from_run,
    frozen_rows,
    frozen_sums,
    require_root,
    snapshot_sums,
)
from megasync.trainer.snapshot import Snapshot
from megasync.versions.anchor import publish_checkpoint
from megasync.versions.changes import compact
from megasync.versions.checkpoint import Checkpoint
from megasync.versions.head import claim
from megasync.versions.lineage import Lineage, start_lineage
from megasync.versions.publication import PublicationReader

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Started:
    """What a publisher starts with.

    Attributes:
        schema: The run's schema.
        plan: Who owns what.
        snapshot: Seeded.
        head: The head, claimed.
        lineage: On the head writer.
        needs_anchor: Version 0 is still to be published, as an anchor.
        device: Where the live weights are.
        volatile: Some rank has weights that something other than the optimizer writes.
    """

    schema: Schema
    plan: OwnershipPlan
    snapshot: Snapshot
    head: Head
    lineage: Lineage | None
    needs_anchor: bool
    device: torch.device
    volatile: bool


def together(group: ProcessGroup | None, what: str, timeout_s: float, work: Callable[[], T]) -> T:
    """Run local work on every rank; an error on one becomes the same error on all.

    *Collective*: over ``group``; every rank must call it.
    """
    error: BaseException | None = None
    result: T | None = None
    try:
        result = work()
    except Exception as e:
        error = e
    agree(group, error, what, timeout_s)
    return result  # type: ignore[return-value]


def start(
    exporter: Exporter,
    sink: Sink,
    config: PublishConfig,
    group: ProcessGroup | None,
    base: Path | None,
) -> Started:
    """Plan, claim the run, seed the snapshot.

    *Collective*: over ``group`` (gloo); every rank must call it.

    Args:
        exporter: The trainer's weights.
        sink: Where to publish.
        config: Trainer-side configuration.
        group: Control group.
        base: Checkpoint that is version 0; None makes an anchor of the trainer's weights version 0 of a fresh run.

    Raises:
        RankFailedError: With every rank's cause (plan errors, another schema, a snapshot that does not match).
        MemoryPlanError: On every rank, when what is planned does not fit on one of the hosts or devices.
    """
    timeout = config.timeout_s
    patience = PATIENCE * timeout  # for ranks that are in the sink or in files
    schema, holdings = exchange(config.run, exporter, group, timeout_s=timeout)
    plan = together(group, "ownership plan", timeout, lambda: make_plan(schema, holdings))
    _same_everywhere(group, plan.digest, "ownership plan", timeout)
    me = rank_of(group)
    pieces = together(
        group, "owned pieces", timeout, lambda: exporter.own(plan.owned(me).named_boxes(), schema.tensors)
    )
    regions = together(group, "owned regions", timeout, lambda: match_regions(schema, plan, me, pieces))
    exporter.settle()
    live = [p.data for p in exporter.pieces()] + [r.data for r in regions]
    device = together(group, "device of the weights", timeout, lambda: device_of(live))
    check_replicas(schema, holdings, exporter.pieces(), group, lanes_of=lanes_for(device), timeout_s=timeout)
    check_sources(config.run, exporter, group, lanes_of=lanes_for(device), timeout_s=timeout)
    if me == HEAD_WRITER:
        log.info("megasync run %s: %s", config.run, plan.report())
    fresh = base is None and _is_fresh(sink, config, group)
    kept = _kept_ratio(sink, config, group)
    check_memory(plan_memory(schema, regions, config, device, anchor=fresh, kept_ratio=kept), config, device, group)
    snapshot = together(group, "snapshot", timeout, lambda: make_snapshot(schema, regions, config.snapshot, device))
    together(group, "reading the head", patience, lambda: _require_key(sink, config) if me == HEAD_WRITER else None)
    head = _claim(sink, config, group)
    reader = PublicationReader(sink, config.run, config.sign_key or None, timeout)
    newest = _newest(reader, head, schema, group, patience)
    checkpoint = together(group, "checkpoint", patience, lambda: Checkpoint(base) if base is not None else None)
    try:
        together(group, "seeding the snapshot", patience, lambda: _seed(snapshot, reader, newest, checkpoint))
    finally:
        if checkpoint is not None:
            checkpoint.close()
    frozen = _frozen(group, schema, exporter, timeout)
    sums = frozen + _sum_over_ranks(group, snapshot_sums(snapshot), timeout)
    lineage = start_lineage(schema, head, sums)
    if newest is not None:
        root = content_digest(lineage.states.tobytes(), XXH3_128)
        together(group, "comparing the snapshot with the head", timeout, lambda: require_root(root, newest))
    anchor = newest is None and checkpoint is None
    if config.first_difference is FirstDifference.REFUSE and not anchor:
        version = 0 if newest is None else newest.version
        what = f"comparing the trainer with version {version}"
        together(group, what, timeout, lambda: _refuse_difference(snapshot, config.run, version))
    if newest is None and checkpoint is not None:
        lineage = _publish_checkpoint(sink, config, group, lineage)
    if anchor:
        lineage = Lineage(schema, head, -1, b"", frozen, lineage.mix)
    mine = lineage if rank_of(group) == HEAD_WRITER else None
    volatile = any(p.volatile for p in exporter.pieces())
    told = all_gather_bytes(group, bytes([volatile]), "whether weights are volatile", timeout)
    return Started(schema, plan, snapshot, lineage.head, mine, anchor, device, b"\x01" in map(bytes, told))


def _kept_ratio(sink: Sink, config: PublishConfig, group: ProcessGroup | None) -> float:
    """Share of the bytes gathered from all ranks that lies here while the sink writes it; an owner's own lie here anyway."""
    writers = writers_of(num_ranks(group), config.num_writers)
    if not sink.keeps_parts or config.gather is GatherKind.DIRECT or group is None or rank_of(group) not in writers:
        return 0.0
    return 1 / len(writers)


def lanes_for(device: torch.device) -> LanesOf:
    """How replicas are digested where the live weights are."""
    return host_lanes if device.type == "cpu" else device_lanes


def _seed(
    snapshot: Snapshot, reader: PublicationReader, newest: Manifest | None, checkpoint: Checkpoint | None
) -> None:
    if newest is not None:
        fill_from_run(snapshot, reader, newest, checkpoint)
    elif checkpoint is not None:
        check_checkpoint(snapshot.schema, checkpoint)
        fill_from_checkpoint(snapshot, checkpoint)
    else:
        fill_from_live(snapshot)


def _require_key(sink: Sink, config: PublishConfig) -> None:
    """Refuse to go on with a run whose manifests are signed without the key, or the reverse, before the run is claimed: its
    publisher goes on.

    Raises:
        ValueError: They are, and there is no key, or the reverse.
    """
    with suppress(MegasyncError):  # what cannot be read is told where it is needed
        raw = sink.read_head(config.run, timeout_s=config.timeout_s)
        head = None if raw is None else decode_head(raw, config.run)
        if head is None or head.version < 0:
            return
        reader = PublicationReader(sink, config.run, None, config.timeout_s)
        signed = reader.manifest(head.version, head.epoch, head.digest).is_signed
        if signed and not config.sign_key:
            raise ValueError(
                f"run {config.run!r} is signed (version {head.version}), and this publisher has no sign_key: an unsigned version "
                "would stop every reader and publisher that has one. Give the key, or use another run"
            )
        if config.sign_key and not signed:
            raise ValueError(
                f"run {config.run!r} is not signed (version {head.version}), and this publisher has a sign_key: readers that have it "
                "take no version without a signature. Leave sign_key out, or use another run"
            )


def _is_fresh(sink: Sink, config: PublishConfig, group: ProcessGroup | None) -> bool:
    """Whether the run has no version yet, on every rank."""
    error: BaseException | None = None
    fresh = False
    if rank_of(group) == HEAD_WRITER:
        try:
            raw = sink.read_head(config.run, timeout_s=config.timeout_s)
            fresh = raw is None or decode_head(raw, config.run).version < 0
        except Exception as e:
            error = e
    agree(group, error, f"reading the head of run {config.run!r}", PATIENCE * config.timeout_s)
    return bytes(broadcast_bytes(group, bytes([fresh]), "whether the run is fresh", config.timeout_s)) == b"\x01"


def _claim(sink: Sink, config: PublishConfig, group: ProcessGroup | None) -> Head:
    data = b""
    error: BaseException | None = None
    if rank_of(group) == HEAD_WRITER:
        try:
            data = claim(sink, config.run, timeout_s=config.timeout_s).encode()
        except Exception as e:
            error = e
    agree(group, error, f"claiming run {config.run!r}", PATIENCE * config.timeout_s)
    return decode_head(bytes(broadcast_bytes(group, data, "claimed head", config.timeout_s)), config.run)


def _newest(
    reader: PublicationReader, head: Head, schema: Schema, group: ProcessGroup | None, timeout_s: float
) -> Manifest | None:
    """The head's manifest on every rank, after its schema was compared with the trainer's."""

    def read() -> Manifest | None:
        if head.version < 0:
            return None
        manifest = reader.manifest(head.version, head.epoch, head.digest)
        require_same(schema, reader.schema(manifest.schema_digest))
        return manifest

    return together(group, f"reading version {head.version}", timeout_s, read)


def _sum_over_ranks(group: ProcessGroup | None, sums: np.ndarray, timeout_s: float) -> np.ndarray:
    """Digest sums of all ranks added up; only rows that a rank owns travel."""
    ids = np.flatnonzero(sums.any(axis=1)).astype("<u4")
    mine = msgspec.msgpack.encode((ids.tobytes(), sums[ids].astype("<u8").tobytes()))
    total = np.zeros_like(sums)
    for told in all_gather_bytes(group, mine, "digest sums of the snapshot", timeout_s):
        id_bytes, rows = msgspec.msgpack.decode(told, type=tuple[bytes, bytes])
        total[np.frombuffer(id_bytes, "<u4")] += np.frombuffer(rows, "<u8").reshape(-1, 2)
    return total


def _frozen(group: ProcessGroup | None, schema: Schema, exporter: Exporter, timeout_s: float) -> np.ndarray:
    """Digest sums of the frozen tensors, from the live memory of whoever holds them."""
    rows = together(group, "digests of frozen tensors", timeout_s, lambda: frozen_rows(schema, exporter.pieces()))
    told = all_gather_bytes(group, msgspec.msgpack.encode(rows), "digest sums of frozen tensors", timeout_s)
    by_rank = [msgspec.msgpack.decode(t, type=list[FrozenRow]) for t in told]
    return together(group, "frozen tensors", timeout_s, lambda: frozen_sums(schema, by_rank))


def _same_everywhere(group: ProcessGroup | None, digest: bytes, what: str, timeout_s: float) -> None:
    told = [bytes(d) for d in all_gather_bytes(group, digest, f"digest of the {what}", timeout_s)]
    error = None
    if len(set(told)) > 1:
        error = BaseMismatchError(f"{what} differs between ranks: {', '.join(d.hex()[:8] for d in told)}")
    agree(group, error, what, timeout_s)


def _refuse_difference(snapshot: Snapshot, run: str, version: int) -> None:
    differing = [
        snapshot.schema.tensors[r.tensor_id].name
        for i, r in enumerate(snapshot.regions)
        if len(compact(snapshot.words(i), np.ascontiguousarray(words_of(r.data)).reshape(-1)))
    ]
    if differing:
        raise BaseMismatchError(
            f"the trainer starts elsewhere than version {version} of run {run!r}: {len(differing)} tiles "
            f"differ, first in {differing[0]}; load that version, or set first_difference=publish"
        )


def _publish_checkpoint(sink: Sink, config: PublishConfig, group: ProcessGroup | None, lineage: Lineage) -> Lineage:
    """Version 0 names the checkpoint by its state digests; no payload is written."""
    error: BaseException | None = None
    data = b""
    if rank_of(group) == HEAD_WRITER:
        try:
            after = publish_checkpoint(sink, lineage, key=config.sign_key or None, timeout_s=config.timeout_s)
            data = after.head.encode()
        except Exception as e:
            error = e
    agree(group, error, "publishing version 0", PATIENCE * config.timeout_s)
    head = decode_head(bytes(broadcast_bytes(group, data, "head of version 0", config.timeout_s)), config.run)
    return replace(lineage, head=head, version=0, digest=head.digest)
