"""The regions of one rank: what it owns by the plan, matched with the live memory that holds it.

Between plan and snapshot. A region never copies: it is a view narrowed to the owned box. Must not import an adapter or
receiver.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from megasync.schema import Schema
from megasync.trainer.exporter import Piece
from megasync.trainer.plan import OwnershipPlan
from megasync.trainer.plan_holdings import brief_box, require
from megasync.types import Box


@dataclass(frozen=True, slots=True)
class Region:
    """A box inside one tile that this rank owns, and its live memory.

    Attributes:
        tensor_id: Schema id.
        tile: Tile number.
        box: Where it lies in the canonical tensor, in words, one axis for a scalar.
        inner: The same box counted from the start of the tile.
        data: View of live memory, shape ``box.extent``, words of the tensor's size, any device, any strides.
        whole: True where the box is the whole tile.
        volatile: See ``Piece``.
        chunk: See ``Piece``.
    """

    tensor_id: int
    tile: int
    box: Box
    inner: Box
    data: torch.Tensor
    whole: bool
    volatile: bool
    chunk: int


class LocalPieces:
    """Finds the local memory of any box of a canonical tensor.

    Args:
        schema: The run's schema.
        pieces: The local pieces; those of tensors unknown to the schema are passed over.
    """

    def __init__(self, schema: Schema, pieces: Sequence[Piece]) -> None:
        self._exact: dict[tuple[int, Box], list[Piece]] = defaultdict(list)
        self._of: dict[int, list[Piece]] = defaultdict(list)
        for piece in pieces:
            tensor_id = schema.ids.get(piece.name)
            if tensor_id is not None:
                self._exact[tensor_id, _with_axis(piece.box)].append(piece)
                self._of[tensor_id].append(piece)

    def find(self, tensor_id: int, box: Box) -> Iterator[tuple[Piece, torch.Tensor]]:
        """Local pieces that contain a box, each with the box's view of it; pieces that are the box come alone."""
        exact = self._exact.get((tensor_id, box), [])
        for piece in exact or self._of.get(tensor_id, []):
            held = _with_axis(piece.box)
            data = piece.data if piece.box.extent else piece.data.view(1)
            if exact:
                yield piece, data
            elif held.intersect(box) == box:
                yield piece, data[_slices(box, held)]


def match_regions(schema: Schema, plan: OwnershipPlan, rank: int, pieces: Sequence[Piece]) -> list[Region]:
    """Match what a rank owns with its local memory.

    Args:
        schema: The run's schema.
        plan: The ownership plan.
        rank: This rank.
        pieces: From ``Exporter.own``, or from ``Exporter.pieces`` where all bytes lie in the trainer's memory.

    Returns:
        Regions in (tensor id, tile, box start) order: a tile's regions follow each other and are disjoint.

    Raises:
        PlanError: Listing owned boxes without local memory, views of another shape or word size, or on the meta device.
    """
    owned = plan.owned(rank)
    local = LocalPieces(schema, pieces)
    units = owned.box_units
    ids, tiles = owned.tensor_ids[units].tolist(), owned.tiles[units].tolist()
    tile_starts = owned.tile_starts.tolist()
    regions: list[Region] = []
    faults: list[str] = []
    for i, (tensor_id, tile, box) in enumerate(zip(ids, tiles, owned.boxes(), strict=True)):
        spec = schema.tensors[tensor_id]
        found = next(local.find(tensor_id, box), None)
        if found is None:
            faults.append(f"{spec.name} {brief_box(box)} lies in no piece of rank {rank}")
            continue
        piece, data = found
        if tuple(data.shape) != box.extent:
            faults.append(f"{spec.name} {brief_box(box)}: the view has shape {list(data.shape)}")
        elif data.element_size() != spec.word_nbytes:
            faults.append(f"{spec.name}: the view has {data.dtype}, {spec.dtype} has words of {spec.word_nbytes} bytes")
        elif data.is_meta:
            faults.append(f"{spec.name} {brief_box(box)} has no bytes: take the pieces from Exporter.own")
        else:
            start = tile_starts[i][-len(box.start) :]
            inner = Box(tuple(b - a for a, b in zip(start, box.start, strict=True)), box.extent)
            whole = bool(owned.whole[i])
            regions.append(Region(tensor_id, tile, box, inner, data.detach(), whole, piece.volatile, piece.chunk))
    require(faults, f"{len(faults)} owned boxes have no usable memory", "Correct the exporter; nothing was published")
    return regions


def _slices(box: Box, held: Box) -> tuple[slice, ...]:
    return tuple(slice(b - a, b - a + n) for a, b, n in zip(held.start, box.start, box.extent, strict=True))


def _with_axis(box: Box) -> Box:
    """A scalar's box as its tile grid sees it."""
    return box if box.extent else Box((0,), (1,))
