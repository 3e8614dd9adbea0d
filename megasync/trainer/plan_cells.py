"""From the boxes that ranks hold to disjoint cells that cover every tensor once, each with all its holders.

First step of the ownership plan. Where ranks hold equal boxes or boxes that do not meet, cells are the boxes. Where
boxes overlap without being equal (one rank holds a whole tensor, another a half), they are split along each other's
faces. A word that nobody holds is an error. Must not import torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from megasync.schema import Schema
from megasync.trainer.plan_holdings import (
    Holdings,
    SetTable,
    brief_box,
    brief_ranks,
    padded_shapes,
    require,
    unpad,
)

_ADVICE = (
    "The ownership plan must cover every byte once: check the exporter's tables on the ranks that ought to hold them; "
    "nothing was published"
)


def cells_of(schema: Schema, holdings: Holdings) -> Holdings:
    """Disjoint cells with their holders.

    Args:
        schema: The run's schema; frozen and empty tensors get no cells.
        holdings: What ranks hold.

    Returns:
        Cells in (tensor id, start, extent) order; every word of every other tensor lies in exactly one.

    Raises:
        PlanError: Listing boxes outside their tensor, or tensors with words that no rank holds.
    """
    shapes = padded_shapes(schema, holdings.starts.shape[1])
    live = np.array([not t.frozen for t in schema.tensors], dtype=bool) & (shapes.prod(axis=1) > 0)
    _check_bounds(schema, holdings, shapes)
    keep = live[holdings.tensor_ids] & (holdings.words > 0)
    ids, sets = holdings.tensor_ids[keep], holdings.set_ids[keep]
    starts, extents = holdings.starts[keep], holdings.extents[keep]
    simple = _slabs_in_order(ids, starts, extents, shapes)
    odd = np.flatnonzero(live & ~simple)
    if not len(odd):
        return Holdings(ids, starts, extents, sets, holdings.sets, holdings.world_size)
    return _split(schema, shapes, odd, Holdings(ids, starts, extents, sets, holdings.sets, holdings.world_size))


def _check_bounds(schema: Schema, holdings: Holdings, shapes: np.ndarray) -> None:
    outside = (holdings.starts < 0) | (holdings.extents < 0)
    outside |= holdings.starts + holdings.extents > shapes[holdings.tensor_ids]
    faults: list[str] = []
    for i in np.flatnonzero(outside.any(axis=1)):
        spec = schema.tensors[int(holdings.tensor_ids[i])]
        box = brief_box(holdings.box(int(i), len(spec.shape)))
        ranks = brief_ranks(holdings.sets[int(holdings.set_ids[i])])
        faults.append(f"{spec.name} {list(spec.shape)} has box {box} on ranks {ranks}")
    require(faults, f"{len(faults)} boxes lie outside their tensor", "Correct the exporter")


def _slabs_in_order(ids: np.ndarray, starts: np.ndarray, extents: np.ndarray, shapes: np.ndarray) -> np.ndarray:
    """Which tensors (bool ``[tensors]``) are cut along one axis at most, by boxes that follow each other."""
    simple = np.zeros(len(shapes), dtype=bool)
    if not len(ids):
        return simple
    first = np.flatnonzero(np.r_[True, ids[1:] != ids[:-1]])
    last = np.r_[first[1:], len(ids)] - 1
    shape = shapes[ids]
    cut = extents != shape
    cut_axes = np.bitwise_or.reduceat((cut << np.arange(cut.shape[1])).sum(axis=1), first)
    one_axis = (cut_axes & (cut_axes - 1)) == 0
    # Along the cut axis; a tensor cut nowhere looks at its last axis.
    axis = np.zeros(len(cut_axes), dtype=np.int64)
    for i in range(1, cut.shape[1]):
        axis[cut_axes >> i == 1] = i
    axis[cut_axes == 0] = cut.shape[1] - 1
    rows = np.arange(len(ids))
    along = np.repeat(axis, last - first + 1)
    begin, end = starts[rows, along], starts[rows, along] + extents[rows, along]
    follows = np.ones(len(ids), dtype=bool)
    follows[1:] = begin[1:] == end[:-1]
    follows[first] = begin[first] == 0
    follows[last] &= end[last] == shape[last, axis]
    simple[ids[first]] = one_axis & np.logical_and.reduceat(follows, first)
    return simple


@dataclass(slots=True)
class _Pattern:
    """How the boxes of a tensor lie to each other; the same for all layers of a model, so worked out once.

    Attributes:
        starts: int64 ``[C, D]`` of the cells.
        extents: int64 ``[C, D]``.
        covers: Which boxes cover each cell; empty for a gap.
    """

    starts: np.ndarray
    extents: np.ndarray
    covers: list[tuple[int, ...]]
    unions: dict[tuple[int, ...], list[int]] = field(default_factory=dict)


def _split(schema: Schema, shapes: np.ndarray, odd: np.ndarray, held: Holdings) -> Holdings:
    """Replace the boxes of the tensors ``odd`` by cells."""
    table = SetTable(held.sets[i] for i in range(len(held.sets)))
    begin = np.searchsorted(held.tensor_ids, odd, side="left").tolist()
    end = np.searchsorted(held.tensor_ids, odd, side="right").tolist()
    patterns: dict[bytes, _Pattern] = {}
    gaps: list[str] = []
    ids: list[np.ndarray] = []
    new: list[_Pattern] = []
    sets: list[int] = []
    for tensor_id, a, b in zip(odd.tolist(), begin, end, strict=True):
        shape, starts, extents = shapes[tensor_id], held.starts[a:b], held.extents[a:b]
        key = shape.tobytes() + starts.tobytes() + extents.tobytes()
        pattern = patterns.get(key)
        if pattern is None:
            pattern = patterns[key] = _pattern(shape, starts, extents)
        spec = schema.tensors[tensor_id]
        lost = [i for i, cover in enumerate(pattern.covers) if not cover]
        if lost:
            where = [brief_box(unpad(pattern.starts[i], pattern.extents[i], len(spec.shape))) for i in lost[:4]]
            words = int(pattern.extents[lost].prod(axis=1).sum())
            more = f" and {len(lost) - 4} more ranges" if len(lost) > 4 else ""
            gaps.append(f"{spec.name} {list(spec.shape)}: {words} words, {', '.join(where)}{more}")
            continue
        owners = tuple(held.set_ids[a:b].tolist())
        if owners not in pattern.unions:
            pattern.unions[owners] = [
                table.add(np.concatenate([held.sets[owners[i]] for i in cover])) for cover in pattern.covers
            ]
        ids.append(np.full(len(pattern.covers), tensor_id, dtype=np.uint32))
        new.append(pattern)
        sets += pattern.unions[owners]
    require(gaps, f"no rank holds some words of {len(gaps)} tensors", _ADVICE)
    stay = ~np.isin(held.tensor_ids, odd)
    empty = np.empty((0, shapes.shape[1]), dtype=np.int64)
    all_ids = np.concatenate([held.tensor_ids[stay], *ids])
    all_starts = np.concatenate([held.starts[stay], empty, *(p.starts for p in new)])
    all_extents = np.concatenate([held.extents[stay], empty, *(p.extents for p in new)])
    all_sets = np.concatenate([held.set_ids[stay], np.array(sets, dtype=np.uint32)]).astype(np.uint32)
    order = np.argsort(all_ids, kind="stable")
    return Holdings(
        all_ids[order], all_starts[order], all_extents[order], all_sets[order], table.sets(), held.world_size
    )


def _pattern(shape: np.ndarray, starts: np.ndarray, extents: np.ndarray) -> _Pattern:
    """Cells of one tensor: the boxes themselves where they are disjoint, else pieces of the grid of all their faces."""
    num_axes = len(shape)
    faces = [np.unique(np.r_[0, shape[i], starts[:, i], starts[:, i] + extents[:, i]]) for i in range(num_axes)]
    lo = [np.searchsorted(faces[i], starts[:, i]) for i in range(num_axes)]
    hi = [np.searchsorted(faces[i], starts[:, i] + extents[:, i]) for i in range(num_axes)]
    label = np.zeros([len(f) - 1 for f in faces], dtype=np.int64)
    names: list[tuple[int, ...]] = [()]
    for box in range(len(starts)):
        inside = tuple(slice(int(lo[i][box]), int(hi[i][box])) for i in range(num_axes))
        old, where = np.unique(label[inside], return_inverse=True)
        fresh = np.arange(len(names), len(names) + len(old))
        names += [(*names[int(k)], box) for k in old]
        label[inside] = fresh[where].reshape(label[inside].shape)
    if (label > 0).all() and all(len(names[int(k)]) == 1 for k in np.unique(label)):
        return _Pattern(starts, extents, [(i,) for i in range(len(starts))])
    cells = _blocks(label)
    cell_starts = np.array([[faces[i][c[i][0]] for i in range(num_axes)] for c in cells], dtype=np.int64)
    cell_ends = np.array([[faces[i][c[i][1]] for i in range(num_axes)] for c in cells], dtype=np.int64)
    covers = [names[int(label[tuple(a for a, _ in c)])] for c in cells]
    return _Pattern(cell_starts, cell_ends - cell_starts, covers)


def _blocks(label: np.ndarray) -> list[Sequence[tuple[int, int]]]:
    """Blocks of one value each that make up an array, ``(start, stop)`` per axis; grown along the last axis first."""
    free = np.ones(label.shape, dtype=bool)
    out: list[Sequence[tuple[int, int]]] = []
    for at in np.ndindex(label.shape):
        if not free[at]:
            continue
        block = [(x, x + 1) for x in at]
        for axis in range(label.ndim - 1, -1, -1):
            while block[axis][1] < label.shape[axis]:
                stop = block[axis][1]
                grown = tuple(slice(stop, stop + 1) if i == axis else slice(*block[i]) for i in range(label.ndim))
                if not (free[grown].all() and (label[grown] == label[at]).all()):
                    break
                block[axis] = (block[axis][0], stop + 1)
        free[tuple(slice(*b) for b in block)] = False
        out.append(block)
    return out
