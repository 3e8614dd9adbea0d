"""The ownership plan: which rank masks and encodes which tile, a pure function of what the ranks hold.

Second stop of the flow (exporter -> plan -> snapshot -> mask -> encode -> gather -> publish). Every rank makes it from the
same holdings (metadata.py) and compares its digest with the others. Steps: cells (plan_cells.py), units (plan_tiles.py),
balance (plan_fill.py). Each word of each tensor that is not frozen has one owner, and the owner holds it. Must not
import torch, an adapter or receiver.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import xxhash

from megasync.schema import Schema
from megasync.trainer.plan_cells import cells_of
from megasync.trainer.plan_fill import divide, fill, level, lower_bound, order_of
from megasync.trainer.plan_holdings import Holdings, collector_paused, unpad
from megasync.trainer.plan_report import BalanceReport, balance_report
from megasync.trainer.plan_tiles import GridTable, Parts, part_boxes, parts_of
from megasync.types import Box


@dataclass(frozen=True, slots=True)
class OwnedUnits:
    """What one rank owns, in (tensor id, tile) order, which is (layer, word size, tensor id, tile) order.

    Attributes:
        schema: The run's schema.
        tensor_ids: uint32 ``[U]``.
        tiles: uint32 ``[U]``; a tile occurs once, also where the rank owns several parts of it.
        box_offsets: int64 ``[U + 1]``; unit ``u`` is made of the disjoint boxes ``box_offsets[u]`` to ``[u + 1]``.
        starts: int64 ``[B, D]``, in the tensor, leading axes padded with 0, ascending inside a unit.
        extents: int64 ``[B, D]``, leading axes padded with 1.
        tile_starts: int64 ``[B, D]``, where the tile of each box starts.
        whole: bool ``[B]``, whether the box is its whole tile.
    """

    schema: Schema
    tensor_ids: np.ndarray
    tiles: np.ndarray
    box_offsets: np.ndarray
    starts: np.ndarray
    extents: np.ndarray
    tile_starts: np.ndarray
    whole: np.ndarray

    def __len__(self) -> int:
        return len(self.tiles)

    @property
    def box_units(self) -> np.ndarray:
        """Unit of each box, int64 ``[B]``."""
        return np.repeat(np.arange(len(self)), np.diff(self.box_offsets))

    def boxes(self) -> list[Box]:
        """Every box in the coordinates of its grid (a scalar's has one axis)."""
        axes = np.array([max(len(t.shape), 1) for t in self.schema.tensors], dtype=np.int64)
        num = axes[self.tensor_ids[self.box_units]].tolist()
        return [unpad(self.starts[i], self.extents[i], n) for i, n in enumerate(num)]

    def named_boxes(self) -> list[tuple[str, Box]]:
        """Canonical name and box of each box, as ``Exporter.own`` takes them (a scalar's has no axis)."""
        ids = self.tensor_ids[self.box_units].tolist()
        out: list[tuple[str, Box]] = []
        for tensor_id, box in zip(ids, self.boxes(), strict=True):
            spec = self.schema.tensors[tensor_id]
            out.append((spec.name, box if spec.shape else Box((), ())))
        return out

    @property
    def nbytes(self) -> int:
        """Canonical bytes owned."""
        sizes = self.schema.word_nbytes.astype(np.int64)[self.tensor_ids[self.box_units]]
        return int((self.extents.prod(axis=1) * sizes).sum())


@dataclass(frozen=True)
class OwnershipPlan:
    """Who owns what.

    Attributes:
        schema: The run's schema.
        holdings: What ranks hold as disjoint boxes (cells) that cover every tensor once.
        grids: The tile grids as columns.
        parts: The cells' parts by tile; the parts of one holder set in one tile make a unit.
        owners: uint32 ``[U]``, rank that owns each unit.
        loads: int64 ``[ranks]``, bytes owned by each rank.
        optimum: Bytes that the fullest rank of any plan owns at least, given who holds what.
    """

    schema: Schema
    holdings: Holdings
    grids: GridTable
    parts: Parts
    owners: np.ndarray
    loads: np.ndarray
    optimum: int

    @property
    def world_size(self) -> int:
        """Ranks of the plan."""
        return self.holdings.world_size

    @cached_property
    def digest(self) -> bytes:
        """16 bytes (xxh3-128) over schema, cells, units and owners: equal on every rank or the plan is not one plan."""
        state = xxhash.xxh3_128(self.schema.digest)
        state.update(self.world_size.to_bytes(8, "little"))
        cells, parts = self.holdings, self.parts
        where = [cells.tensor_ids, cells.starts, cells.extents, cells.set_ids, cells.sets.offsets, cells.sets.members]
        for column in (*where, parts.cells, parts.tiles, parts.first, self.owners):
            state.update(len(column).to_bytes(8, "little"))
            state.update(np.ascontiguousarray(column).data)
        return state.digest()

    @property
    def part_owners(self) -> np.ndarray:
        """Rank that owns each part, uint32 ``[P]``."""
        return np.repeat(self.owners, np.diff(np.r_[self.parts.first, len(self.parts.cells)]))

    def owned(self, rank: int) -> OwnedUnits:
        """What one rank owns.

        Raises:
            ValueError: A rank outside the world.
        """
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} of a plan for {self.world_size} ranks")
        mine = np.flatnonzero(self.part_owners == rank)
        rows, tiles = self.parts.cells[mine], self.parts.tiles[mine]
        starts, extents, origins, whole = part_boxes(self.grids, self.holdings, rows, tiles)
        ids = self.holdings.tensor_ids[rows]
        # Parts of one tile that lie with different holder sets become one unit, and its boxes ascend.
        order = np.lexsort([*starts.T[::-1], tiles, ids])
        ids, tiles = ids[order], tiles[order]
        first = np.ones(len(ids), dtype=bool)
        first[1:] = (ids[1:] != ids[:-1]) | (tiles[1:] != tiles[:-1])
        offsets = np.r_[np.flatnonzero(first), len(ids)].astype(np.int64)
        boxes = (starts[order], extents[order], origins[order], whole[order])
        return OwnedUnits(self.schema, ids[first], tiles[first], offsets, *boxes)

    def report(self) -> BalanceReport:
        """How evenly the bytes lie on the ranks."""
        return balance_report(self.schema, self.holdings, self.loads, self.optimum, len(self.owners))


def make_plan(schema: Schema, holdings: Holdings) -> OwnershipPlan:
    """Give every tile to one of its holders, balanced by bytes over the whole model.

    Args:
        schema: The run's schema.
        holdings: What every rank holds.

    Returns:
        The plan; equal arguments give equal plans, down to the digest.

    Raises:
        PlanError: Listing the tensors with words that no rank holds, or boxes outside their tensor.
        ValueError: A holder outside the world.
    """
    world_size = holdings.world_size
    if world_size < 1 or int(holdings.sets.members.max(initial=0)) >= world_size:
        raise ValueError(f"holders up to rank {holdings.sets.members.max(initial=0)} in a world of {world_size} ranks")
    with collector_paused():
        cells = cells_of(schema, holdings)
        grids = GridTable.of(schema, cells.starts.shape[1])
    parts = parts_of(grids, cells)
    rows = parts.cells[parts.first]
    sizes = schema.word_nbytes.astype(np.int64)[cells.tensor_ids[parts.cells]] * parts.words
    weights = np.add.reduceat(sizes, parts.first) if len(parts.first) else np.empty(0, dtype=np.int64)
    owners, loads, optimum = _balance(cells.set_ids[rows], weights, cells)
    return OwnershipPlan(schema, cells, grids, parts, owners, loads, optimum)


def _balance(unit_sets: np.ndarray, weights: np.ndarray, cells: Holdings) -> tuple[np.ndarray, np.ndarray, int]:
    """Owner of each unit, bytes of each rank, and the bound."""
    used, unit_set = np.unique(unit_sets, return_inverse=True)
    members: Sequence[np.ndarray] = [cells.sets[int(s)].astype(np.int64) for s in used]
    by_set = np.argsort(unit_set, kind="stable")
    stops = np.cumsum(np.bincount(unit_set, minlength=len(used)))
    units = [by_set[a:b] for a, b in zip(np.r_[0, stops[:-1]], stops, strict=True)] if len(used) else []
    totals = np.array([int(weights[u].sum()) for u in units], dtype=np.int64)
    shares, loads = fill(members, totals, cells.world_size)
    optimum = lower_bound(members, totals, loads)
    owners = np.zeros(len(weights), dtype=np.uint32)
    # Whole units now: what rounding gave a rank too much or too little, the sets still to come make good.
    for s in order_of(members):
        own = members[s]
        free = loads[own] - shares[s]
        index = divide(weights[units[s]], level(free, int(totals[s])))
        owners[units[s]] = own[index]
        given = np.zeros(len(own), dtype=np.int64)
        np.add.at(given, index, weights[units[s]])
        loads[own] = free + given
    return owners, loads, optimum
