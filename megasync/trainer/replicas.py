"""Replica check: ranks that hold the same bytes compare digests of them, and only digests travel.

At plan time, after a restore, and every so many publications if asked. Collapsing replicas to one owner is right only
while they are equal: a drifted one would be lost in silence. First one digest a holder set crosses ranks, and details of
a set only where its members differ. Must not import an adapter or receiver.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import torch

from megasync.digest import box_lanes, content_digest, lanes_to_bytes
from megasync.errors import ReplicaDriftError
from megasync.schema import Schema
from megasync.trainer.agree import DEFAULT_TIMEOUT_S, agree, all_gather_bytes, rank_of
from megasync.trainer.exporter import Exporter, Piece
from megasync.trainer.mask import words_of
from megasync.trainer.metadata import exchange
from megasync.trainer.plan_cells import cells_of
from megasync.trainer.plan_holdings import Holdings, brief_box, brief_ranks
from megasync.trainer.regions import LocalPieces
from megasync.types import Box, Lanes

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_SLAB_NBYTES = 64 << 20
_LISTED = 20
_TWICE = b""  # sent in place of a digest

LanesOf = Callable[[tuple[int, ...], Box, torch.Tensor], Lanes]
"""Digest sum of a box of a canonical tensor: shape of the tensor, the box, a view of its words (any device, strides)."""


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """What a check looked at.

    Attributes:
        num_boxes: Boxes on this rank that other ranks hold too (or this rank twice).
        nbytes: Their bytes.
        num_unread: Boxes without bytes yet (a quantised export's before ``own``): their sources are what replicas share.
    """

    num_boxes: int
    nbytes: int
    num_unread: int


def check_replicas(
    schema: Schema,
    holdings: Holdings,
    pieces: Sequence[Piece],
    group: ProcessGroup | None,
    *,
    lanes_of: LanesOf | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> ReplicaReport:
    """Compare all replicas.

    *Collective*: over ``group``; every rank must call it, while nothing writes the weights.
    *Stream*: the current stream; the digests are read back, so it is synchronised on return.

    Args:
        schema: The run's schema.
        holdings: What ranks hold (of the exchange or of the plan).
        pieces: This rank's pieces.
        group: Gloo group of all trainer ranks, or None alone.
        lanes_of: Computes a box's digest sum where its words are; ``host_lanes`` by default.
        timeout_s: Seconds to wait for the other ranks.

    Returns:
        What was compared here.

    Raises:
        ReplicaDriftError: On every rank, naming tensors, boxes and the ranks that differ.
        RankFailedError: On every rank, when one could not read its pieces or did not come.
    """
    cells = cells_of(schema, holdings)
    found: dict[int, dict[int, bytes]] = {}
    report = ReplicaReport(0, 0, 0)
    error: Exception | None = None
    try:
        found, report = _local(schema, cells, pieces, rank_of(group), lanes_of or host_lanes)
    except Exception as e:
        error = e
    agree(group, error, "reading replicas", timeout_s)
    brief = {s: _brief(by_cell) for s, by_cell in found.items()}
    told = _exchange(group, brief, "replica digests", timeout_s)
    apart = {s for t in told for s in t if t[s] == _TWICE or len({o[s] for o in told if s in o}) > 1}
    if not apart:
        return report
    mine = {cell: lanes for s, by_cell in found.items() if s in apart for cell, lanes in by_cell.items()}
    differences = _differences(schema, cells, _exchange(group, mine, "replica details", timeout_s))
    if differences:
        raise ReplicaDriftError(differences)
    return report


def check_sources(
    run: str,
    exporter: Exporter,
    group: ProcessGroup | None,
    *,
    lanes_of: LanesOf | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> ReplicaReport | None:
    """Compare the replicas of weights whose canonical bytes only their owners make (quantised export).

    Comes beside ``check_replicas``, which cannot see them: a replica that drifted would be quantised, or not, depending on who
    owns the tile. What each rank holds of the sources is exchanged first.

    *Collective*: over ``group``; every rank must call it, while nothing writes the weights.

    Args:
        run: Name of the run.
        exporter: This rank's exporter.
        group: Gloo group of all trainer ranks, or None alone.
        lanes_of: As for ``check_replicas``.
        timeout_s: Seconds to wait for the other ranks.

    Returns:
        What was compared here; None where the exporter has no such weights on any rank.

    Raises:
        ReplicaDriftError, RankFailedError, PlanError: As ``check_replicas`` and the exchange.
    """
    sources = exporter.sources
    if sources is None:
        return None
    schema, holdings = exchange(run, sources, group, timeout_s=timeout_s)
    return check_replicas(schema, holdings, sources.pieces(), group, lanes_of=lanes_of, timeout_s=timeout_s)


def host_lanes(shape: tuple[int, ...], box: Box, data: torch.Tensor) -> Lanes:
    """Digest sum of a box, computed on the CPU.

    *Memory*: at most 64 MiB of the box are copied at a time.

    Args:
        shape: Extents of the whole tensor in words.
        box: The box.
        data: Its words, shape ``box.extent``, any device, any strides.

    Returns:
        The sums of both lanes.
    """
    axis = next((i for i, n in enumerate(box.extent) if n > 1), None)
    if axis is None or data.nbytes <= _SLAB_NBYTES:
        return box_lanes(shape, box, np.ascontiguousarray(words_of(data.detach().cpu())))
    total = Lanes()
    step = max(1, box.extent[axis] * _SLAB_NBYTES // data.nbytes)
    for at in range(0, box.extent[axis], step):
        num = min(step, box.extent[axis] - at)
        start = tuple(s + at if i == axis else s for i, s in enumerate(box.start))
        extent = tuple(num if i == axis else n for i, n in enumerate(box.extent))
        total += host_lanes(shape, Box(start, extent), data.narrow(axis, at, num))
    return total


def _local(
    schema: Schema, cells: Holdings, pieces: Sequence[Piece], rank: int, lanes_of: LanesOf
) -> tuple[dict[int, dict[int, bytes]], ReplicaReport]:
    """By holder set and cell: 16 bytes for each different value that this rank has of it (one, unless it has drifted)."""
    local = LocalPieces(schema, pieces)
    found: dict[int, dict[int, bytes]] = defaultdict(dict)
    num_boxes = nbytes = num_unread = 0
    with_me = np.array([rank in cells.sets[s] for s in range(len(cells.sets))], dtype=bool)
    for cell in np.flatnonzero(with_me[cells.set_ids]).tolist():
        tensor_id, set_id = int(cells.tensor_ids[cell]), int(cells.set_ids[cell])
        shape = schema.grids[tensor_id].shape
        box = cells.box(cell, len(shape))
        copies = {(d.data_ptr(), d.stride()): d for _, d in local.find(tensor_id, box) if not d.is_meta}
        if not copies:
            num_unread += 1
        elif len(copies) > 1 or len(cells.sets[set_id]) > 1:
            values = {lanes_to_bytes(lanes_of(shape, box, data)) for data in copies.values()}
            found[set_id][cell] = b"".join(sorted(values))
            num_boxes += 1
            nbytes += box.num_words * schema.tensors[tensor_id].word_nbytes
    return dict(found), ReplicaReport(num_boxes, nbytes, num_unread)


def _brief(by_cell: dict[int, bytes]) -> bytes:
    """One digest for all cells of a holder set; ``_TWICE`` where this rank disagrees with itself."""
    if any(len(values) > 16 for values in by_cell.values()):
        return _TWICE
    return content_digest([x for cell in sorted(by_cell) for x in (cell.to_bytes(4, "little"), by_cell[cell])])


def _exchange(
    group: ProcessGroup | None, mine: dict[int, bytes], what: str, timeout_s: float
) -> list[dict[int, bytes]]:
    blobs = all_gather_bytes(group, msgspec.msgpack.encode(mine), what, timeout_s)
    return [msgspec.msgpack.decode(b, type=dict[int, bytes]) for b in blobs]


def _differences(schema: Schema, cells: Holdings, told: list[dict[int, bytes]]) -> str:
    """What differs, by tensor, box and ranks; empty where ranks differ only in which boxes have bytes yet."""
    lines: list[str] = []
    names: set[str] = set()
    for cell in sorted(set().union(*told)):
        by_value: dict[bytes, list[int]] = {}
        for rank, values in enumerate(told):
            if cell in values:
                by_value.setdefault(values[cell], []).append(rank)
        if len(by_value) == 1 and len(next(iter(by_value))) == 16:
            continue
        spec = schema.tensors[int(cells.tensor_ids[cell])]
        names.add(spec.name)
        groups = sorted(by_value.items(), key=lambda kv: (-len(kv[1]), kv[1]))
        said = "; ".join(
            f"ranks {brief_ranks(ranks)} have {', '.join(v[i : i + 16].hex()[:16] for i in range(0, len(v), 16))}"
            for v, ranks in groups
        )
        lines.append(f"{spec.name} {brief_box(cells.box(cell, len(spec.shape)))}: {said}")
    if not lines:
        return ""
    more = f"; and {len(lines) - _LISTED} more boxes" if len(lines) > _LISTED else ""
    return (
        f"{len(names)} tensors differ between ranks that ought to hold equal bytes (state digest sums): "
        + "; ".join(lines[:_LISTED])
        + more
        + ". Nothing was published: restore the trainer from a checkpoint, or find what updates them apart"
    )
