"""Kinds: tensors that share a tile grid and a layout up to where it begins, so that they are evaluated together.

The experts of a model are thousands of tensors and a handful of kinds. Made once from a binding, for the CPU backend.
Must import nothing above bind.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from megasync.layout.modes import Remap
from megasync.receiver.bind import Binding
from megasync.receiver.leads import Held
from megasync.receiver.straight import lines_of
from megasync.tiles import Lines, TileGrid

_ANYWHERE = "live"


@dataclass(frozen=True, slots=True)
class Kind:
    """What tensors of one kind share.

    Attributes:
        grid: Tile grid.
        word_nbytes: Canonical word size.
        records: The records with base 0 and no storage.
        lead: For each record, whether it is one of those that hold each word once.
        primary: For each record, whether its words enter digest sums.
    """

    grid: TileGrid
    word_nbytes: int
    records: tuple[Remap, ...]
    lead: tuple[bool, ...]
    primary: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class Kinds:
    """All kinds of a binding.

    Attributes:
        kinds: The kinds.
        of: int32 ``[num_tensors]``, kind of each tensor, -1 where this rank holds nothing of it.
        row: int32 ``[num_tensors]``, row of each tensor in the arrays of its kind.
        starts: For each kind int64 ``[num_tiles, ndim]``: where its tiles begin.
        extents: For each kind int64 ``[num_tiles, ndim]``: how large they are.
        lines: For each kind and record: its layout over positions in tiles, and in which tiles that holds.
        bases: For each kind int64 ``[rows, records]``: what to add to the offsets.
        storages: For each kind int32 ``[rows, records]``: index into ``names``.
        names: Storage names.
    """

    kinds: tuple[Kind, ...]
    of: np.ndarray
    row: np.ndarray
    starts: tuple[np.ndarray, ...]
    extents: tuple[np.ndarray, ...]
    lines: tuple[tuple[tuple[Lines, np.ndarray], ...], ...]
    bases: tuple[np.ndarray, ...]
    storages: tuple[np.ndarray, ...]
    names: tuple[str, ...]


def kinds_of(binding: Binding) -> Kinds:
    """Group the tensors of a binding."""
    schema = binding.schema
    of = np.full(len(schema.tensors), -1, dtype=np.int32)
    row = np.zeros(len(schema.tensors), dtype=np.int32)
    names = tuple(binding.storages)
    index = {n: i for i, n in enumerate(names)}
    found: dict[Kind, int] = {}
    bases: list[list[list[int]]] = []
    storages: list[list[list[int]]] = []
    for i, held in binding.held.items():
        layout = held.layout
        at = found.setdefault(_kind(schema.grids[i], held), len(found))
        if at == len(bases):
            bases.append([])
            storages.append([])
        of[i], row[i] = at, len(bases[at])
        bases[at].append([r.base for r in layout.records])
        storages[at].append([index[r.storage] for r in layout.records])
    boxes = [k.grid.boxes(np.arange(k.grid.num_tiles)) for k in found]
    return Kinds(
        tuple(found),
        of,
        row,
        tuple(b[0] for b in boxes),
        tuple(b[1] for b in boxes),
        tuple(tuple(lines_of(r, *b) for r in k.records) for k, b in zip(found, boxes, strict=True)),
        tuple(np.array(b, dtype=np.int64) for b in bases),
        tuple(np.array(s, dtype=np.int32) for s in storages),
        names,
    )


def _kind(grid: TileGrid, held: Held) -> Kind:
    return Kind(
        grid,
        held.layout.word_nbytes,
        tuple(replace(r, base=0, storage=_ANYWHERE) for r in held.layout.records),
        held.lead,
        tuple(r.primary for r in held.layout.records),
    )
