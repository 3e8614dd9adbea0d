"""The share of one trainer rank of 64 that lies inside one engine rank's slices, and its bytes as that engine holds them.

Every 16th expert's quarter, and every 16th tile of the rest: a 64th of the model, and a part of the weights that a single
engine rank can prove alone. Layers of a kind hold equal bytes in ``receiver_world``, so a block of bytes a kind fills a
share. Before it: workload. After it: trainer_process, bench_end_to_end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod

import numpy as np
import torch

from launch.bench.receiver_world import OWNERS, RUN
from launch.bench.workload import Placed, Shape, engine_rank, model_specs
from megasync.kernels.planes import WORD_DTYPES
from megasync.layout.modes import Remap
from megasync.schema import Schema
from megasync.tiles import tile_grid
from megasync.types import Box

ALIGN = 256
"""Bytes that a part starts at a multiple of."""


@dataclass(frozen=True, slots=True)
class Part:
    """Memory of the trainer that holds whole tiles of one tensor.

    Attributes:
        placed: The tensor, and where the engine rank has it.
        box: What is held, row-major.
        tiles: The tiles, ascending: all of the box.
        offset: Where it starts in the block of its layer, bytes.
    """

    placed: Placed
    box: Box
    tiles: np.ndarray
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of the part."""
        return self.box.num_words * self.placed.spec.word_nbytes


def schema_of(shape: Shape) -> Schema:
    """The schema of a model, as ``receiver_world`` makes it."""
    return Schema(RUN, tuple(sorted(model_specs(shape), key=lambda t: (t.layer, t.word_nbytes, t.name))))


def kind_of(shape: Shape, layer: int) -> int:
    """The layer whose bytes a layer holds."""
    return layer if layer < 0 else 0 if layer < shape.num_dense else shape.num_dense


def share_of(shape: Shape, tp: int) -> dict[int, list[Part]]:
    """The share of one layer of each kind, by that layer; in the others it differs in nothing but names.

    Args:
        shape: Sizes of the model.
        tp: Ranks of the engine; the share is in the slices of rank 0.
    """
    every = OWNERS // tp
    few = replace(shape, num_layers=min(shape.num_layers, shape.num_dense + 1))
    out: dict[int, list[Part]] = {}
    ends: dict[int, int] = {}
    turn: dict[int, int] = {}
    for placed in engine_rank(few, tp, 0)[0]:
        spec = placed.spec
        if kind_of(shape, spec.layer) != spec.layer:
            continue
        inside = _tiles_inside(placed)
        parts = out.setdefault(spec.layer, [])
        if ".experts." in spec.name:
            expert = int(spec.name.split(".experts.")[1].split(".")[0])
            if expert % every:
                continue
            chosen = [inside] if _fill(placed, inside) else [np.array([t]) for t in inside]
        else:
            mine = OWNERS if placed.start == (0,) * len(spec.shape) and placed.stop == spec.shape else every
            number = turn[spec.layer] = turn.get(spec.layer, -1) + 1
            chosen = [np.array([t]) for i, t in enumerate(inside) if (i + 5 * number) % mine == 0]
        for tiles in chosen:
            if not len(tiles):
                continue
            part = Part(placed, _box_of(placed, tiles), tiles, ends.get(spec.layer, 0))
            ends[spec.layer] = part.offset + -(-part.nbytes // ALIGN) * ALIGN
            parts.append(part)
    return out


def _tiles_inside(placed: Placed) -> np.ndarray:
    """Tiles that lie wholly in the rank's slice."""
    grid = tile_grid(placed.spec)
    starts, extents = grid.boxes(np.arange(grid.num_tiles))
    inside = (starts >= np.array(placed.start)) & (starts + extents <= np.array(placed.stop))
    found: np.ndarray = np.flatnonzero(inside.all(axis=1))
    return found


def _fill(placed: Placed, tiles: np.ndarray) -> bool:
    """Whether tiles are the whole of a slice."""
    size = int(tile_grid(placed.spec).tile_words(tiles).astype(np.int64).sum())
    return size == prod(b - a for a, b in zip(placed.start, placed.stop, strict=True))


def _box_of(placed: Placed, tiles: np.ndarray) -> Box:
    starts, extents = tile_grid(placed.spec).boxes(tiles)
    start, stop = starts.min(axis=0), (starts + extents).max(axis=0)
    return Box(tuple(start.tolist()), tuple((stop - start).tolist()))


def block_nbytes(parts: list[Part]) -> int:
    """Bytes of a layer's block, padding included."""
    return max((p.offset + -(-p.nbytes // ALIGN) * ALIGN for p in parts), default=0)


def taken_tiles(schema: Schema, share: Mapping[int, list[Part]]) -> dict[int, np.ndarray]:
    """Tiles of the share by tensor id: what ``ShareWorld`` leaves out."""
    taken: dict[int, list[np.ndarray]] = {}
    for part in (p for parts in share.values() for p in parts):
        taken.setdefault(schema.ids[part.placed.spec.name], []).append(part.tiles)
    return {i: np.unique(np.concatenate(tiles)) for i, tiles in taken.items()}


def read_block(live: Mapping[str, torch.Tensor], parts: list[Part]) -> torch.Tensor:
    """The canonical bytes of a layer's parts as an engine rank holds them, through its layout.

    Args:
        live: Storages by name, uint8, flat.
        parts: Of one layer.

    Returns:
        uint8, host; padding is 0.
    """
    out = torch.zeros(block_nbytes(parts), dtype=torch.uint8)
    for part in parts:
        record, w = part.placed.record, part.placed.spec.word_nbytes
        words = live[record.storage].view(WORD_DTYPES[w])
        found = words[_offsets(record, part.box, words.device)]
        out[part.offset : part.offset + part.nbytes] = found.view(torch.uint8).cpu()
    return out


def _offsets(record: Remap, box: Box, device: torch.device) -> torch.Tensor:
    """Offset of every word of a box in its storage, by the digits themselves: int64, row-major."""
    coordinates = torch.meshgrid(
        *(torch.arange(a, a + n, device=device) for a, n in zip(box.start, box.extent, strict=True)), indexing="ij"
    )
    out = torch.full(box.extent, record.base, dtype=torch.int64, device=device)
    for digit in record.digits:
        (axis,) = record.merge[digit.axis]
        x = (coordinates[axis] - record.origin[axis]) // digit.src_stride
        out += (x % digit.extent if digit.extent else x) * digit.dst_stride
    return out.reshape(-1)
