"""What a publisher refuses to publish: another model than its run's, replicas that drifted, ranks that are set up otherwise.

Beside the callback: called at the start and before a pass or its hand-over. Must not import receiver or an adapter.
"""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING

import msgspec

from megasync.config import PublishConfig
from megasync.digest import content_digest
from megasync.errors import RankFailedError, SchemaMismatchError
from megasync.trainer.agree import all_gather_bytes
from megasync.trainer.agree_wait import global_ranks
from megasync.trainer.exporter import Exporter
from megasync.trainer.masker import Masked
from megasync.trainer.replicas import check_replicas, check_sources
from megasync.trainer.start import Started, lanes_for

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def check_settings(config: PublishConfig, has_base: bool, group: ProcessGroup | None) -> None:
    """Refuse ranks that were given other settings: they would part ways somewhere later, and not say why.

    *Collective*: over ``group``; every rank must call it.

    Args:
        config: Trainer-side configuration.
        has_base: A checkpoint is version 0.
        group: Control group.

    Raises:
        RankFailedError: On every rank, naming the settings and the ranks.
    """
    mine = {f.name: str(getattr(config, f.name)) for f in fields(config)} | {"base": "given" if has_base else "None"}
    mine["sign_key"] = content_digest(config.sign_key).hex() if config.sign_key else ""
    told = all_gather_bytes(group, msgspec.msgpack.encode(mine), "settings of the publisher", config.timeout_s)
    rows = [msgspec.msgpack.decode(t, type=dict[str, str]) for t in told]
    ranks = global_ranks(group)
    first, causes = rows[0], {}
    for rank, row in zip(ranks, rows, strict=True):
        apart = [
            f"another {name}" if name == "sign_key" else f"{name} is {row.get(name)}, rank {ranks[0]} has {first[name]}"
            for name in first
            if row.get(name) != first[name]
        ]
        if apart:
            causes[rank] = "; ".join(apart) + ": give every rank the same settings"
    if causes:
        raise RankFailedError("settings of the publisher", causes)


def check_first(
    config: PublishConfig, started: Started, masked: Masked, group: ProcessGroup | None
) -> SchemaMismatchError | None:
    """Whether a first delta is another model rather than a step.

    *Collective*: over ``group``; every rank must call it.

    Args:
        config: Trainer-side configuration.
        started: What the publisher started with.
        masked: The first pass.
        group: Control group.

    Returns:
        The error to end with, the same on every rank; None where it is a step.

    Raises:
        LookupError: On every rank: a rank could not mask, so that this version fails and the next is the first.
    """
    try:
        changed = masked.changed_nbytes()
    except Exception:
        changed = -1
    told = all_gather_bytes(group, msgspec.msgpack.encode(changed), "first density", config.timeout_s)
    by_rank = [msgspec.msgpack.decode(t, type=int) for t in told]
    if min(by_rank) < 0:
        raise LookupError("no first density: a rank could not mask")
    density = sum(by_rank) / max(started.schema.nbytes, 1)
    if density <= config.max_first_density or started.needs_anchor:
        return None
    return SchemaMismatchError(
        f"the first delta of run {config.run!r} changes {density:.1%} of the bytes, max_first_density is "
        f"{config.max_first_density:.1%}: the trainer does not start from version {started.head.version}; load it, or "
        "raise max_first_density, and start the publisher again: nothing is published before that"
    )


def check_drift(config: PublishConfig, started: Started, exporter: Exporter, group: ProcessGroup | None) -> None:
    """Compare the replicas, and those of what is quantised.

    *Collective*: over ``group``; every rank must call it, while nothing writes the weights.

    Raises:
        ReplicaDriftError, RankFailedError: As ``check_replicas``.
    """
    lanes = lanes_for(started.device)
    # Pieces are views: a fresh list costs little and sees the same memory.
    holdings, pieces = started.plan.holdings, exporter.pieces()
    check_replicas(started.schema, holdings, pieces, group, lanes_of=lanes, timeout_s=config.timeout_s)
    check_sources(config.run, exporter, group, lanes_of=lanes, timeout_s=config.timeout_s)
