"""What the device's mask stage prepares once: compactions by chunk and word size, and buffers for volatile weights.

Between snapshot and the first pass. Addresses of live weights, snapshot and buffers go into the tables here and never move
afterwards, so a captured graph stays valid. Must not import receiver or an adapter.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megasync.kernels.compact import SPAN_NBYTES, staged_span_nbytes
from megasync.kernels.compact_launch import MAX_ROOM_RATIO, PENDING_NBYTES
from megasync.kernels.compact_plan import CompactPlan, plan_compact
from megasync.kernels.compact_runs import PIECE_COLUMNS
from megasync.kernels.compact_runs import Region as LiveBox
from megasync.kernels.scatter_plan import Tiles
from megasync.schema import Schema
from megasync.trainer.device_frames import TileTable
from megasync.trainer.regions import Region
from megasync.trainer.snapshot import SAME_SIZE, Snapshot
from megasync.types import SEGMENT_WORDS

NUM_LANDINGS = 2
"""Landing arenas: one lands while the one before is encoded."""

LANDING_RATIO = 1 / 16
"""Size of a landing arena over owned bytes; a denser pass goes on into ordinary memory."""

MIN_LANDING_NBYTES = 1 << 20
LANDING_ALIGN = 64
NUM_STAGING_SLOTS = 3
"""One is compared, one waits, one fills: the copy goes on while the mask's thread waits for its turn."""

HELD_NBYTES = 1 << 27
"""Planes of a pass that stay on the device until all its spans were read: bringing them down then delays no read."""


@dataclass(frozen=True)
class Compaction:
    """The tiles of one word size in one model chunk.

    Attributes:
        chunk: Model chunk.
        plan: Tables of the kernel.
        table: The same tiles, for the encoder.
        lane_ids: Schema id of each tensor of the plan.
        lanes: int64 ``[num_tensors, 4]`` on the device, cleared by every pass.
    """

    chunk: int
    plan: CompactPlan
    table: TileTable
    lane_ids: np.ndarray
    lanes: torch.Tensor


@dataclass(frozen=True)
class VolatileCopy:
    """A buffer that takes the place of a weight which may be written again before the pass has read it.

    Attributes:
        live: The weight, any strides.
        buffer: Its copy, same dtype and shape, on the device.
    """

    live: torch.Tensor
    buffer: torch.Tensor


def buffered(region: Region, device: torch.device) -> bool:
    """Whether a region is copied at step end: volatile, or not on the device that is read."""
    return region.volatile or region.data.device != device


@dataclass(frozen=True)
class LandingSpan:
    """Bytes that come down together for a pass without kernels (``copied_masker``).

    Attributes:
        chunk: Model chunk.
        begin: First byte in the storage of the regions, or 0 where they are packed.
        end: The byte after the last.
        regions: Numbers of the regions that lie in it.
        packed: A single region that is brought together on the device before: it is volatile, not on the device, or takes up
            less than half of the bytes that it is spread over.
    """

    chunk: int
    begin: int
    end: int
    regions: tuple[int, ...]
    packed: bool

    @property
    def nbytes(self) -> int:
        """Bytes that come down."""
        return self.end - self.begin


def landing_spans(regions: Sequence[Region], device: torch.device) -> list[LandingSpan]:
    """What comes down for a pass without kernels: regions as they lie, with what lies between them, or packed.

    Tiles of a weight may be bands of its columns: together they are the weight, and come down as it lies.

    Args:
        regions: Owned regions; those without a word are left out.
        device: Where the live weights are.
    """
    out: list[LandingSpan] = []
    lying: dict[tuple[int, int, int], list[tuple[int, int, int]]] = defaultdict(list)
    for i, region in enumerate(regions):
        t = region.data
        if not t.numel():
            continue
        if buffered(region, device):
            out.append(LandingSpan(region.chunk, 0, t.nbytes, (i,), True))
            continue
        begin = int(t.storage_offset()) * t.element_size()
        last = sum((n - 1) * int(step) for n, step in zip(t.shape, t.stride(), strict=True))
        storage = t.untyped_storage()
        key = region.chunk, storage.data_ptr(), storage.nbytes()
        lying[key].append((begin, begin + (last + 1) * t.element_size(), i))
    for (chunk, _, _), found in lying.items():
        for group in _touching(sorted(found)):
            begin, end = group[0][0], max(stop for _, stop, _ in group)
            numbers = tuple(i for _, _, i in group)
            if 2 * sum(regions[i].data.nbytes for i in numbers) >= end - begin:
                out.append(LandingSpan(chunk, begin, end, numbers, False))
                continue
            for low, high, i in group:
                nbytes = regions[i].data.nbytes
                tight = high - low == nbytes
                out.append(LandingSpan(chunk, low if tight else 0, high if tight else nbytes, (i,), not tight))
    return out


def _touching(found: Sequence[tuple[int, int, int]]) -> Iterator[list[tuple[int, int, int]]]:
    """Groups of stretches (first byte, end, number; ascending) that overlap or follow each other."""
    group: list[tuple[int, int, int]] = []
    reach = 0
    for one in found:
        if group and one[0] > reach:
            yield group
            group = []
        group.append(one)
        reach = max(reach, one[1])
    if group:
        yield group


def plan_compactions(
    schema: Schema, snapshot: Snapshot, device: torch.device
) -> tuple[list[Compaction], list[VolatileCopy]]:
    """Make the tables.

    Args:
        schema: The run's schema.
        snapshot: Its regions name the live memory.
        device: Where the live weights are.

    Returns:
        Compactions by (chunk, word size), and what to copy at every step end.
    """
    copies: list[VolatileCopy] = []
    by_tile: dict[tuple[int, int], list[int]] = defaultdict(list)
    for i, region in enumerate(snapshot.regions):
        by_tile[region.tensor_id, region.tile].append(i)
    groups: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for key, members in sorted(by_tile.items()):
        chunk = max(snapshot.regions[i].chunk for i in members)  # a tile is read whole, with the last of its parts
        groups[chunk, schema.tensors[key[0]].word_nbytes].append(key)
    out = []
    for (chunk, w), keys in sorted(groups.items()):
        ids = np.array([t for t, _ in keys], dtype=np.uint32)
        numbers = np.array([n for _, n in keys], dtype=np.uint32)
        lane_ids, local = np.unique(ids, return_inverse=True)
        axes = max(len(schema.grids[t].shape) for t in lane_ids.tolist())
        starts, extents = np.zeros((len(keys), axes), np.int64), np.ones((len(keys), axes), np.int64)
        for row, t in enumerate(lane_ids.tolist()):
            mine = local == row
            a, b = schema.grids[t].boxes(numbers[mine])
            starts[mine, axes - a.shape[1] :], extents[mine, axes - a.shape[1] :] = a, b
        boxes = []
        for row, key in enumerate(keys):
            for i in by_tile[key]:
                live = _read_place(snapshot.regions[i], w, device, copies)
                boxes.append(LiveBox(row, snapshot.regions[i].box.start, live, int(snapshot.offsets[i])))
        shapes = [schema.grids[t].shape for t in lane_ids.tolist()]
        tiles = Tiles(local.astype(np.int64), starts, extents)
        plan = plan_compact(w, shapes, tiles, boxes, snapshot.nbytes)
        lanes = torch.zeros((len(lane_ids), 4), dtype=torch.int64, device=device)
        out.append(Compaction(chunk, plan, TileTable(w, ids, numbers, extents.prod(axis=1)), lane_ids, lanes))
    return out, copies


def _read_place(region: Region, w: int, device: torch.device, copies: list[VolatileCopy]) -> torch.Tensor:
    """Where a pass reads a region's words."""
    live = region.data.detach().view(SAME_SIZE[w])
    if not buffered(region, device):
        return live
    buffer = torch.empty(live.shape, dtype=live.dtype, device=device)
    copies.append(VolatileCopy(live, buffer))
    return buffer


def landing_nbytes(owned_nbytes: int) -> int:
    """Size of a landing arena: counts of every segment, and changed words up to ``LANDING_RATIO``."""
    return int(owned_nbytes * LANDING_RATIO) + 4 * (owned_nbytes // SEGMENT_WORDS) + MIN_LANDING_NBYTES


def copied_nbytes(regions: Sequence[Region], device: torch.device) -> tuple[int, int]:
    """Pinned and device memory that passes without kernels need (``copied_masker``), for the memory plan.

    Args:
        regions: Owned regions.
        device: Where the live weights are.
    """
    spans = landing_spans(regions, device)
    return landed_nbytes(spans), sum(s.nbytes for s in spans if s.packed)


def landed_nbytes(spans: Iterable[LandingSpan]) -> int:
    """Size of the arena that spans come down to, with room to keep each at its place modulo ``LANDING_ALIGN``."""
    return sum((-(-s.nbytes // LANDING_ALIGN) + 2) * LANDING_ALIGN for s in spans)


def device_work_nbytes(regions: Iterable[Region], device: torch.device, owned_nbytes: int, *, staged: bool) -> int:
    """Device memory that passes need beside the snapshot, for the memory plan.

    Args:
        regions: Owned regions.
        device: Where the live weights are.
        owned_nbytes: Their bytes.
        staged: The snapshot is in host memory and comes up through slots.

    Returns:
        Bytes: tables, copies of volatile weights, the scratch, staging slots, and planes: those held until the end of a
        pass, and room for spans whose sizes are not known yet.
    """
    copies = sum(r.box.num_words * r.data.element_size() for r in regions if buffered(r, device))
    span = min(staged_span_nbytes(owned_nbytes) if staged else SPAN_NBYTES, owned_nbytes)
    tables = (owned_nbytes // SEGMENT_WORDS + 1) * (PIECE_COLUMNS + 8) * 8
    slots = NUM_STAGING_SLOTS * span if staged else 0
    held = min(HELD_NBYTES, int(4 * owned_nbytes * LANDING_RATIO))
    rooms = PENDING_NBYTES if owned_nbytes > PENDING_NBYTES else int(owned_nbytes * MAX_ROOM_RATIO)
    return copies + tables + span // 4 + slots + held + rooms
