"""Inputs and oracle of the compaction tests. Like ``kernel_cases``, nothing here calls what it tests."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from megasync.digest import WordWeights
from megasync.kernels.compact_plan import CompactPlan, plan_compact
from megasync.kernels.compact_runs import Region
from megasync.kernels.planes import Planes, planes_reference, segments_of
from megasync.kernels.scatter_plan import Tiles
from megasync.tiles import make_grid
from megasync.types import Lanes
from tests.gpu.kernel_cases import random_words


@dataclass
class CompactCase:
    """Live weights beside a snapshot, with the canonical old and new tensors."""

    w: int
    shapes: list[tuple[int, ...]]
    old: list[np.ndarray]
    new: list[np.ndarray]
    owned: list[np.ndarray]
    snapshot: torch.Tensor
    plan: CompactPlan


def _scattered(new: np.ndarray, rng: np.random.Generator, kind: int, device: str) -> torch.Tensor:
    """A torch view that holds ``new`` (any rank >= 1) in memory of another shape."""
    w = new.dtype.itemsize
    words = torch.from_numpy(np.ascontiguousarray(new).view(f"<i{w}" if w > 1 else np.uint8))
    if kind == 0 or new.ndim < 2:
        buffer = torch.zeros(new.size + 32, dtype=words.dtype, device=device)
        view = buffer[kind * 3 : kind * 3 + new.size].view(new.shape)
    elif kind == 1:  # wider rows: a column slice of a fused weight
        pad = 5 if w == 1 else 16
        buffer = torch.zeros((*new.shape[:-1], new.shape[-1] + pad), dtype=words.dtype, device=device)
        view = buffer[..., pad : pad + new.shape[-1]]
    elif kind == 2:  # transposed weight
        view = torch.zeros(new.shape[::-1], dtype=words.dtype, device=device).permute(*range(new.ndim)[::-1])
    else:  # every other row: interleaved gate and up
        buffer = torch.zeros((*new.shape[:-2], new.shape[-2], 2, new.shape[-1]), dtype=words.dtype, device=device)
        view = buffer[..., 1, :]
    view.copy_(words)
    return view


def compact_case(
    w: int, density: float, seed: int, device: str = "cpu", tiny: bool = False, pinned: bool = False
) -> CompactCase:
    """Tensors whose tiles lie whole, in slices, transposed, in row halves and in column halves; one tile is partly owned."""
    rng = np.random.default_rng(seed)
    shapes = [(), (7,), (300, 512), (90, 257), (3, 64, 1024 // w), (40, 64), (1,), (66_000,)]
    if tiny:
        shapes = [(), (7,), (24, 64), (9, 107), (2, 8, 64), (16, 64), (1,), (66_000,)]
    old = [rng.integers(0, 256, int(np.prod(s)) * w, dtype=np.uint8).view(f"<u{w}").reshape(s or (1,)) for s in shapes]
    new, owned = [], []
    for o in old:
        mask = rng.random(o.shape) < density
        if tiny and 500 < o.size < 2_000:
            mask |= rng.random(o.shape) < 0.3
        if o.size > 150_000:  # a stretch without changes, and one where all changes
            mask.reshape(-1)[:70_000] = False
            mask.reshape(-1)[-66_000:] = True
        new.append(np.where(mask, o ^ random_words(o.size, w, rng).reshape(o.shape), o))
        owned.append(np.zeros(o.shape, dtype=np.bool_))
    tensors, starts, extents, regions = [], [], [], []
    offset = 0
    for t, shape in enumerate(shapes):
        grid = make_grid(shape, w)
        for tile in range(grid.num_tiles):
            box = grid.box(tile)
            index = len(tensors)
            tensors.append(t)
            starts.append([0] * (3 - len(box.start)) + list(box.start))
            extents.append([1] * (3 - len(box.start)) + list(box.extent))
            for begin, extent in _parts(box.start, box.extent, t):
                cut = tuple(slice(a, a + b) for a, b in zip(begin, extent, strict=True))
                kind = int(rng.integers(0, 4)) if len(extent) > 1 else 0
                view = _scattered(new[t][cut], rng, kind, device)
                if not shape:
                    view = view.reshape(())
                regions.append(Region(index, begin if shape else (), view, offset))
                owned[t][cut] = True
                offset += -(-new[t][cut].size * w // 8) * 8 + int(rng.integers(0, 2)) * 8
    snapshot = np.zeros(offset + 64, dtype=np.uint8)
    for r in regions:
        begin = r.start or (0,)
        size = tuple(r.live.shape) or (1,)
        cut = tuple(slice(a, a + b) for a, b in zip(begin, size, strict=True))
        data = np.ascontiguousarray(old[tensors[r.tile]][cut]).view(np.uint8).reshape(-1)
        snapshot[r.snapshot_offset : r.snapshot_offset + data.size] = data
    table = Tiles(np.array(tensors), np.array(starts), np.array(extents))
    order = rng.permutation(len(regions))
    plan = plan_compact(w, shapes, table, [regions[i] for i in order], len(snapshot))
    held = torch.from_numpy(snapshot)
    held = held.pin_memory() if pinned else held.to(device)
    return CompactCase(w, shapes, old, new, owned, held, plan)


def _parts(
    start: tuple[int, ...], extent: tuple[int, ...], tensor: int
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """How a tile is held: whole, in row parts, in column parts, or only in part."""
    if len(extent) < 2 or extent[-2] < 4:
        return [(start, extent)]
    row, column = len(extent) - 2, len(extent) - 1
    cuts = {
        2: (row, [0, extent[row] // 3 // 4 * 4, extent[row]]),
        3: (column, [0, 100, 101, extent[column]]),
        5: (column, [8, 40]),
    }
    if tensor not in cuts:
        return [(start, extent)]
    axis, at = cuts[tensor]
    out = []
    for a, b in zip(at, at[1:], strict=False):
        if b > a:
            begin, size = list(start), list(extent)
            begin[axis] += a
            size[axis] = b - a
            out.append((tuple(begin), tuple(size)))
    return out


def compact_oracle(case: CompactCase) -> tuple[Planes, list[tuple[Lanes, Lanes]]]:
    """Planes of all segments and the sums of each tensor, from the canonical tensors."""
    tiles = case.plan.tiles
    tile_of, _, words = segments_of(tiles.words)
    first = np.searchsorted(tile_of, np.arange(len(tiles.tensors)))
    segment, position, value = [], [], []
    for i, t in enumerate(tiles.tensors.tolist()):
        n = len(case.shapes[t]) or 1
        cut = tuple(slice(a, a + b) for a, b in zip(tiles.starts[i][3 - n :], tiles.extents[i][3 - n :], strict=True))
        x = (np.where(case.owned[t], case.old[t] ^ case.new[t], 0)[cut]).reshape(-1)
        at = np.nonzero(x)[0]
        segment.append(first[i] + at // 65_536)
        position.append(at % 65_536)
        value.append(x[at])
    planes = planes_reference(np.concatenate(segment), np.concatenate(position), np.concatenate(value), words, case.w)
    sums = []
    for old, new, owned in zip(case.old, case.new, case.owned, strict=True):
        at = np.nonzero(((old != new) & owned).reshape(-1))[0]
        weights = WordWeights.of(at, case.w)
        was, now = old.reshape(-1)[at], new.reshape(-1)[at]
        sums.append((weights.lanes(was), weights.change(was, now)))
    return planes, sums


def updated(case: CompactCase) -> bool:
    """Whether the snapshot holds the new bytes of every region."""
    flat = case.snapshot.cpu().numpy()
    for r in case.plan.regions:
        t = int(case.plan.tiles.tensors[r.tile])
        cut = tuple(slice(a, a + b) for a, b in zip(r.start or (0,), tuple(r.live.shape) or (1,), strict=True))
        want = np.ascontiguousarray(case.new[t][cut]).view(np.uint8).reshape(-1)
        if not np.array_equal(flat[r.snapshot_offset : r.snapshot_offset + want.size], want):
            return False
    return True


def join(parts: list[Planes]) -> Planes:
    """Planes of consecutive spans as one, on the CPU."""
    return Planes(
        parts[0].word_nbytes,
        torch.cat([p.counts.cpu() for p in parts]),
        torch.cat([p.entries.cpu() for p in parts], dim=1),
        torch.cat([p.dense.cpu() for p in parts], dim=1),
    )
