"""The memory plan: what each rank will take on its host and its device, by stage, before anything is taken.

After the ownership plan, before the snapshot. Printed at every start; refused with numbers where it does not fit, rather
than running out later. Sizes that depend on how much changes are planned for ``PLANNED_DENSITY``. Must not import receiver
or an adapter.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import msgspec
import torch

from megasync.config import GatherKind, PublishConfig, SnapshotPlace
from megasync.errors import MemoryPlanError
from megasync.frames import MAX_FRAME_NBYTES
from megasync.schema import Schema
from megasync.trainer.agree import all_gather_bytes, rank_of
from megasync.trainer.carrier import MESSAGE_NBYTES
from megasync.trainer.device_plan import NUM_LANDINGS, copied_nbytes, device_work_nbytes, landing_nbytes
from megasync.trainer.device_snapshot import one_queue
from megasync.trainer.memory_room import device_name, device_room, host_name, host_room
from megasync.trainer.regions import Region

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

log = logging.getLogger(__name__)

PLANNED_DENSITY = 0.01
"""Changed words / all words that in-flight sizes are planned for: twelve times the article's step."""

_FRAME_RATIO = 16  # bytes that decoding takes for each word of a frame: positions, indices and values
_ENTRY_NBYTES = 4

When = Literal["always", "start", "running"]


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """One thing that takes memory.

    Attributes:
        stage: Stage that takes it.
        what: What it is.
        host_nbytes: On the host.
        device_nbytes: On the device.
        when: ``always``, or only at the ``start``, or only while ``running``.
    """

    stage: str
    what: str
    host_nbytes: int
    device_nbytes: int
    when: When


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What one rank plans to take.

    Attributes:
        rows: By stage.
    """

    rows: tuple[MemoryRow, ...]

    @property
    def host_nbytes(self) -> int:
        """Most that is held on the host at a time."""
        return self._most(lambda r: r.host_nbytes)

    @property
    def device_nbytes(self) -> int:
        """Most that is held on the device at a time."""
        return self._most(lambda r: r.device_nbytes)

    def _most(self, size: Callable[[MemoryRow], int]) -> int:
        # Stages of the start follow each other; those of a running job overlap.
        by_stage: dict[str, int] = defaultdict(int)
        for row in self.rows:
            if row.when == "start":
                by_stage[row.stage] += size(row)
        running = sum(size(r) for r in self.rows if r.when == "running")
        always = sum(size(r) for r in self.rows if r.when == "always")
        return always + max(running, *by_stage.values(), 0)

    def report(self) -> str:
        """The plan as text, a line a row."""
        lines = [f"host {_gb(self.host_nbytes)}, device {_gb(self.device_nbytes)} at most"]
        for row in self.rows:
            sizes = f"host {_gb(row.host_nbytes)}, device {_gb(row.device_nbytes)}"
            lines.append(f"  {row.stage} ({row.when}): {row.what}: {sizes}")
        return "\n".join(lines)


def plan_memory(
    schema: Schema,
    regions: Sequence[Region],
    config: PublishConfig,
    device: torch.device,
    *,
    anchor: bool,
    kept_ratio: float = 0.0,
) -> MemoryPlan:
    """Plan what this rank takes.

    Args:
        schema: The run's schema.
        regions: What it owns.
        config: Trainer-side configuration.
        device: Where the live weights are.
        anchor: Version 0 is to be published as full bytes.
        kept_ratio: Share of all payload bytes that the sink keeps here until they are written.
    """
    w = {r.tensor_id: schema.tensors[r.tensor_id].word_nbytes for r in regions}
    owned = sum(r.box.num_words * w[r.tensor_id] for r in regions)
    changed = int(sum(r.box.num_words for r in regions) * PLANNED_DENSITY)
    values = int(owned * PLANNED_DENSITY)
    widest = min(w.values(), default=1)
    frame = min(MAX_FRAME_NBYTES, owned) // widest * (_FRAME_RATIO + widest)
    on_device = device.type == "cuda"
    in_hbm = on_device and config.snapshot is SnapshotPlace.DEVICE
    place = "device" if in_hbm else "pinned host" if on_device else "host"
    rows = [
        MemoryRow("snapshot", f"owned bytes, {place}", 0 if in_hbm else owned, owned if in_hbm else 0, "always"),
        MemoryRow("seed", "one frame decoded", frame, 0, "start"),
    ]
    if anchor:
        rows.append(MemoryRow("version 0", "encoded full bytes, one frame", owned + frame, 0, "start"))
    flights = config.in_flight_limit * (changed * _ENTRY_NBYTES + values)
    if on_device and not in_hbm and one_queue():
        landed, work = copied_nbytes(regions, device)
        rows.append(MemoryRow("mask", "weights copied down, pinned; those packed before", landed, work, "always"))
        rows.append(MemoryRow("mask", f"changed words at {PLANNED_DENSITY:.0%}", flights, 0, "running"))
    elif on_device:
        landing = NUM_LANDINGS * landing_nbytes(owned)
        work = device_work_nbytes(regions, device, owned, staged=not in_hbm)
        rows.append(MemoryRow("mask", "landing arenas, pinned; tables, scratches and slots", landing, work, "always"))
    else:
        rows.append(MemoryRow("mask", f"changed words at {PLANNED_DENSITY:.0%}", flights, 0, "running"))
    encoded = config.in_flight_limit * (2 * changed + values)
    rows.append(MemoryRow("in flight", f"encoded deltas at {PLANNED_DENSITY:.0%}", encoded, 0, "running"))
    if kept_ratio:
        total, words = (sum(getattr(t, name) for t in schema.tensors) for name in ("nbytes", "num_words"))
        delta = int((2 * words + total) * PLANNED_DENSITY * kept_ratio)
        what = "a payload, which this sink keeps until it is written"
        rows.append(MemoryRow("gather", f"{what}, at {PLANNED_DENSITY:.0%}", delta, 0, "running"))
        if anchor:
            rows.append(MemoryRow("version 0", what, int(total * kept_ratio), 0, "start"))
    by_nccl = config.gather is GatherKind.NCCL
    rows.append(MemoryRow("gather", "message buffers", 3 * MESSAGE_NBYTES, MESSAGE_NBYTES * by_nccl, "running"))
    return MemoryPlan(tuple(rows))


class _Needs(msgspec.Struct, array_like=True, frozen=True):
    host: str
    device: str
    host_nbytes: int
    device_nbytes: int
    host_room: int
    device_room: int


def check_memory(plan: MemoryPlan, config: PublishConfig, device: torch.device, group: ProcessGroup | None) -> None:
    """Print the plan, and refuse it where ranks that share a host or a device plan more than it has left.

    *Collective*: over ``group``; every rank must call it, before any takes its memory.

    Args:
        plan: This rank's.
        config: Trainer-side configuration; ``check_memory`` off only prints.
        device: Where the live weights are.
        group: Control group.

    Raises:
        MemoryPlanError: The same on every rank, with every host and device that is too small.
    """
    room, gpu_room = host_room(), device_room(device)
    mine = _Needs(
        host_name(),
        device_name(device),
        plan.host_nbytes,
        plan.device_nbytes,
        -1 if room is None else room,
        -1 if gpu_room is None else gpu_room,
    )
    told = all_gather_bytes(group, msgspec.msgpack.encode(mine), "memory plan", config.timeout_s)
    rows = [msgspec.msgpack.decode(t, type=_Needs) for t in told]
    if rank_of(group) == 0:
        log.info("megasync run %s: memory plan of rank 0: %s", config.run, plan.report())
        log.info("megasync run %s: memory plan of %d ranks: %s", config.run, len(rows), _summary(rows))
    faults = _faults(rows)
    if not faults:
        return
    text = "; ".join(faults[:8])
    if not config.check_memory:
        log.warning("megasync run %s: the memory plan does not fit: %s", config.run, text)
        return
    raise MemoryPlanError(
        f"the memory plan of run {config.run!r} does not fit: {text}. Nothing was taken. Rank 0 plans: {plan.report()}\n"
        "Free memory, use more ranks, or move the snapshot (snapshot=host or device); where the system grows memory on "
        "demand, set check_memory=false"
        if rank_of(group) == 0
        else f"the memory plan of run {config.run!r} does not fit: {text}. Nothing was taken"
    )


def _faults(rows: Sequence[_Needs]) -> list[str]:
    """Each host and device that has less room than its ranks plan to take."""
    hosts: dict[str, list[int]] = defaultdict(list)
    devices: dict[tuple[str, str], list[int]] = defaultdict(list)
    for rank, row in enumerate(rows):
        hosts[row.host].append(rank)
        if row.device:
            devices[row.host, row.device].append(rank)
    out = []
    for host, ranks in hosts.items():
        need, room = sum(rows[r].host_nbytes for r in ranks), min(rows[r].host_room for r in ranks)
        if 0 <= room < need:
            out.append(f"host {host.split('/')[0]} has {_gb(room)} left, its {len(ranks)} ranks plan {_gb(need)}")
    for (host, _), ranks in devices.items():
        need, room = sum(rows[r].device_nbytes for r in ranks), min(rows[r].device_room for r in ranks)
        if 0 <= room < need:
            out.append(
                f"the device of rank {', '.join(map(str, ranks))} on {host.split('/')[0]} has {_gb(room)} left, "
                f"{_gb(need)} are planned"
            )
    return out


def _summary(rows: Sequence[_Needs]) -> str:
    by_host: dict[str, int] = defaultdict(int)
    for row in rows:
        by_host[row.host] += row.host_nbytes
    return (
        f"{len(by_host)} hosts, at most {_gb(max(by_host.values()))} on one, "
        f"at most {_gb(max(r.device_nbytes for r in rows))} on a device"
    )


def _gb(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 10_000_000 else f"{nbytes / 1e6:.2f} MB"
