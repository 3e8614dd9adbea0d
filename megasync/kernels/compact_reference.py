"""The specification of the compaction, in plain torch: what the Triton kernels must equal bit for bit.

Runs on any device, slowly. Must import nothing of megasync but ``types`` and kernels.
"""

from __future__ import annotations

import numpy as np
import torch

from megasync.kernels.compact_plan import CompactPlan, Span
from megasync.kernels.compact_runs import Region
from megasync.kernels.planes import WORD_DTYPES, Planes, planes_reference
from megasync.kernels.weights import change_terms_reference
from megasync.types import SEGMENT_WORDS


def compact_reference(plan: CompactPlan, span: Span, snapshot: torch.Tensor, lanes: torch.Tensor) -> Planes:
    """Changed words of a span; the snapshot takes the new bytes.

    Args:
        plan: Tables.
        span: Segments to look at.
        snapshot: uint8 ``[n]``, contiguous.
        lanes: int64 ``[num_tensors, 4]``, added to.

    Returns:
        Planes of the span's segments, on the live words' device.
    """
    w = plan.word_nbytes
    first_segment = np.append(0, np.cumsum(-(-plan.tiles.words // SEGMENT_WORDS)))
    found: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
    for region in plan.regions:
        low, high = first_segment[region.tile], first_segment[region.tile + 1]
        if not region.live.numel() or high <= span.segments[0] or low >= span.segments[1]:
            continue
        old = snapshot[region.snapshot_offset : region.snapshot_offset + region.live.numel() * w]
        old = old.view(WORD_DTYPES[w]).view(region.live.shape)
        new = region.live.view(WORD_DTYPES[w])
        at = torch.nonzero(old.to(new.device) ^ new, as_tuple=True) if new.dim() else None
        if at is None:
            old, new = old.reshape(1), new.reshape(1)
            at = torch.nonzero(old.to(new.device) ^ new, as_tuple=True)
        position, flat = _places(plan, region, at)
        segment = int(low) + position // SEGMENT_WORDS
        mine = (segment >= span.segments[0]) & (segment < span.segments[1])
        at = tuple(a[mine] for a in at)
        here = tuple(a.to(snapshot.device) for a in at)
        was, now = _unsigned(old[here].to(new.device), w), _unsigned(new[at], w)
        lanes[int(plan.tiles.tensors[region.tile])] += change_terms_reference(flat[mine], was, now, w).sum(0)
        found.append((segment[mine] - span.segments[0], position[mine] % SEGMENT_WORDS, was ^ now))
        old[here] = new[at].to(snapshot.device)
    empty = torch.zeros(0, dtype=torch.int64, device=plan.device)
    segment, position, value = (torch.cat([f[i] for f in found] or [empty]) for i in range(3))
    order = torch.argsort(segment * SEGMENT_WORDS + position)
    segments, positions, values = (x[order].cpu().numpy() for x in (segment, position, value))
    words = plan.segment_words[slice(*span.segments)]
    planes = planes_reference(segments, positions, values.astype(f"<u{w}"), words, w)
    device = plan.device
    return Planes(w, planes.counts.to(device), planes.entries.to(device), planes.dense.to(device))


def _places(plan: CompactPlan, region: Region, at: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Tile positions and canonical word numbers of words of a region."""
    tiles = plan.tiles
    corner, extent = tiles.starts[region.tile].tolist(), tiles.extents[region.tile].tolist()
    whole = plan.canonical[tiles.tensors[region.tile]].tolist()
    start = region.start or (0,)
    pad = len(corner) - len(start)
    position, flat = torch.zeros_like(at[0]), torch.zeros_like(at[0])
    for axis, (a, begin) in enumerate(zip(at, start, strict=True), start=pad):
        position = position * extent[axis] + a + (begin - corner[axis])
        flat = flat * whole[axis] + a + begin
    return position, flat


def _unsigned(words: torch.Tensor, w: int) -> torch.Tensor:
    """Words as int64, zero-extended below 8 bytes."""
    return words.to(torch.int64) if w == 8 else words.to(torch.int64) & ((1 << (8 * w)) - 1)
