"""Cuts what a rank owns of a weight into regions that are each read once: codes and scales of one place are one job.

Tile grids of codes and of scales differ, so an owned box of scales rarely is an owned box of codes; where they meet, one pass
over the weight makes both. Comes after the ownership plan (``trainer.quantised``), before ``quant.passes``. Must import
nothing above kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megasync.errors import PlanError
from megasync.quant.checkpoint import Member, QuantisedWeight
from megasync.quant.passes import Job
from megasync.types import Box


@dataclass(frozen=True, slots=True)
class Owned:
    """An owned box of codes or scales.

    Attributes:
        member: Which tensor of the weight.
        box: The box of it, in words.
        region: The same in elements of the weight; cut at block multiples.
        buffer: Where its bytes go, shape ``box.extent``.
    """

    member: Member
    box: Box
    region: Box
    buffer: torch.Tensor


def jobs_of(
    weight: QuantisedWeight, slot: int, owned: Sequence[Owned], held: Sequence[tuple[Box, torch.Tensor]]
) -> list[Job]:
    """Regions of one weight, each with all that this rank owns of it.

    Args:
        weight: The weight.
        slot: Index of its atomic group.
        owned: Boxes of codes and scales; those of one tensor are disjoint.
        held: This rank's pieces of the weight, in elements, with their live memory.

    Returns:
        Disjoint regions, none outside an owned box.

    Raises:
        PlanError: A region lies in no piece of this rank.
    """
    codes = [o for o in owned if o.member.role == "codes"]
    scales = [o for o in owned if o.member.role == "scales"]
    cuts: list[tuple[Box, Owned | None, Owned | None]] = []
    rest = {id(o): [o.region] for o in owned}
    for c in codes:
        for s in scales:
            both = c.region.intersect(s.region)
            if both is not None:
                cuts.append((both, c, s))
                for o in (c, s):
                    rest[id(o)] = [part for left in rest[id(o)] for part in subtract(left, both)]
    cuts += [(box, c, None) for c in codes for box in rest[id(c)]]
    cuts += [(box, None, s) for s in scales for box in rest[id(s)]]
    return [_job(weight, slot, box, c, s, held) for box, c, s in cuts]


def subtract(box: Box, hole: Box) -> list[Box]:
    """The parts of a box outside another one: disjoint boxes, at most two an axis.

    Args:
        box: The box.
        hole: What is taken away; may lie partly or wholly outside.
    """
    common = box.intersect(hole)
    if common is None:
        return [box]
    out: list[Box] = []
    start, extent = list(box.start), list(box.extent)
    for axis, (a, n) in enumerate(zip(common.start, common.extent, strict=True)):
        stop = start[axis] + extent[axis]
        for low, high in ((start[axis], a), (a + n, stop)):
            if low < high:
                out.append(
                    Box((*start[:axis], low, *start[axis + 1 :]), (*extent[:axis], high - low, *extent[axis + 1 :]))
                )
        start[axis], extent[axis] = a, n
    return out


def _job(
    weight: QuantisedWeight,
    slot: int,
    region: Box,
    codes: Owned | None,
    scales: Owned | None,
    held: Sequence[tuple[Box, torch.Tensor]],
) -> Job:
    found = next(((box, data) for box, data in held if box.intersect(region) == region), None)
    if found is None:
        raise PlanError(
            f"region {list(region.start)}+{list(region.extent)} of {weight.source.name} lies in no local piece"
        )
    job = Job(weight.formula, slot, _cut(found[1].detach(), found[0], region))
    if codes is not None:
        job.codes = _cut(codes.buffer, codes.box, weight.member_box(codes.member, region))
    if scales is not None:
        view = _cut(scales.buffer, scales.box, weight.member_box(scales.member, region))
        if scales.member.spec.dtype == "F8_E8M0":
            job.e8m0 = view
        else:
            job.scales = view
    return job


def _cut(data: torch.Tensor, box: Box, part: Box) -> torch.Tensor:
    """The view of a part of what lies at a box."""
    at = zip(box.start, part.start, part.extent, strict=True)
    return data[tuple(slice(b - a, b - a + n) for a, b, n in at)]
