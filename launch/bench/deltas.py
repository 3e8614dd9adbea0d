"""What a delta between two states of a model is made of: changed words, bytes, segments, blocks, scales, and its bound.

A state is the canonical words of every tensor of a schema, in id order. Before it: training (real states). After it:
bench_deltas (rows), payload_cases (masks that were kept). Must not import a codec or Megatron.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from launch.bench.masks import bound_nbytes
from megasync.schema import Schema, decode_schema
from megasync.types import SEGMENT_WORDS, WORD_DTYPES
from megasync.versions.changes import TileChange, compare, contiguous

State = Sequence[np.ndarray]
"""Words of every tensor, ``<u{w}``, of the tensor's shape, in id order."""

BLOCK_NBYTES = 1 << 20
"""What dense codecs cut a tile into."""

PAGE_NBYTES = 4096
"""A finer grain than blocks, which a small model touches all."""


@dataclass(frozen=True, slots=True)
class DeltaFacts:
    """A delta in numbers; shares are between 0 and 1.

    Attributes:
        nbytes: Bytes of all weights.
        num_words: Words of all weights.
        num_changed: Changed words.
        words_ratio: Changed words / all words.
        density: Bytes that differ / all bytes.
        bound_nbytes: ``log2 C(n, k) + k H(value)`` of each dtype, added up.
        segment_changed: Median, 20th and 80th percentile of the changed words of a segment.
        segments_ratio: Segments with a changed word / all segments.
        blocks_ratio: Blocks of at most 1 MiB with a changed word / all blocks, cut as dense codecs cut them.
        pages_ratio: Runs of 4 KiB of a tile with a changed word / all such runs.
    """

    nbytes: int
    num_words: int
    num_changed: int
    words_ratio: float
    density: float
    bound_nbytes: float
    segment_changed: tuple[float, float, float]
    segments_ratio: float
    blocks_ratio: float
    pages_ratio: float


@dataclass(frozen=True, slots=True)
class AmaxMoves:
    """How often the scales of NVFP4 weights moved in a delta; shares are between 0 and 1.

    Attributes:
        globals_ratio: Global scales that changed: the largest magnitude of a weight, or of fused partners, moved.
        scales_ratio: Block scales that changed: the rounded largest magnitude of 16 weights moved.
        codes_ratio: Bytes of codes that changed.
        scale_only_ratio: Blocks whose scale changed and whose codes did not.
        codes_only_ratio: Blocks whose codes changed and whose scale did not.
        both_ratio: Blocks in which both changed.
    """

    globals_ratio: float
    scales_ratio: float
    codes_ratio: float
    scale_only_ratio: float
    codes_only_ratio: float
    both_ratio: float


def changed_tiles(schema: Schema, old: State, new: State) -> Iterator[TileChange]:
    """The changed tiles between two states, as the mask stage of a trainer finds them.

    Args:
        schema: The tensors.
        old: The base.
        new: What it became.

    Yields:
        Tiles with at least one changed word, in (tensor id, tile) order.
    """
    for i, (a, b) in enumerate(zip(old, new, strict=True)):
        grid = schema.grids[i]
        a, b = a.reshape(grid.shape), b.reshape(grid.shape)
        for tile in range(grid.num_tiles):
            box = grid.box(tile)
            at = tuple(slice(s, s + n) for s, n in zip(box.start, box.extent, strict=True))
            found = compare(contiguous(a[at]), b[at])
            if len(found.index):
                yield TileChange(i, tile, found.index, found.old, found.new)


def facts_of(schema: Schema, old: State, new: State) -> DeltaFacts:
    """Count what changed between two states.

    Args:
        schema: The tensors.
        old: The base.
        new: What it became.
    """
    tiles = list(changed_tiles(schema, old, new))
    masks = [t.old ^ t.new for t in tiles]
    by_segment = _changed_by(schema, tiles, lambda word_nbytes: SEGMENT_WORDS)
    num_words = sum(t.num_words for t in schema.tensors)
    num_changed = sum(len(m) for m in masks)
    odd = sum(int(np.count_nonzero(m.view(np.uint8))) for m in masks)
    p20, p50, p80 = np.percentile(by_segment, (20, 50, 80)).tolist()
    return DeltaFacts(
        nbytes=schema.nbytes,
        num_words=num_words,
        num_changed=num_changed,
        words_ratio=num_changed / num_words,
        density=odd / schema.nbytes,
        bound_nbytes=_bound_nbytes(schema, tiles, masks),
        segment_changed=(p50, p20, p80),
        segments_ratio=_touched(by_segment),
        blocks_ratio=_touched(_changed_by(schema, tiles, lambda word_nbytes: BLOCK_NBYTES // word_nbytes)),
        pages_ratio=_touched(_changed_by(schema, tiles, lambda word_nbytes: PAGE_NBYTES // word_nbytes)),
    )


def _bound_nbytes(schema: Schema, tiles: Sequence[TileChange], masks: Sequence[np.ndarray]) -> float:
    total = 0.0
    for dtype in dict.fromkeys(t.dtype for t in schema.tensors):
        mine = [m for t, m in zip(tiles, masks, strict=True) if schema.tensors[t.tensor_id].dtype == dtype]
        if mine:
            num_words = sum(t.num_words for t in schema.tensors if t.dtype == dtype)
            total += bound_nbytes(num_words, np.concatenate(mine))
    return total


def _changed_by(schema: Schema, tiles: Sequence[TileChange], size_of: Callable[[int], int]) -> np.ndarray:
    """Changed words of every piece of every tile, untouched ones last; ``size_of`` gives a piece's words by word size."""
    total = 0
    for spec, grid in zip(schema.tensors, schema.grids, strict=True):
        words = grid.tile_words(np.arange(grid.num_tiles)).astype(np.int64)
        total += int((-(-words // size_of(spec.word_nbytes))).sum())
    pieces = [t.positions // size_of(schema.tensors[t.tensor_id].word_nbytes) for t in tiles]
    counts = [np.unique(p, return_counts=True)[1] for p in pieces]
    return np.concatenate((*counts, np.zeros(total - sum(map(len, counts)), np.int64)))


def _touched(counts: np.ndarray) -> float:
    return float((counts > 0).mean())


def amax_moves(schema: Schema, old: State, new: State) -> AmaxMoves | None:
    """How often scales moved between two states.

    Args:
        schema: The tensors; NVFP4 codes, block scales and global scales go by the names of ModelOpt checkpoints.
        old: The base.
        new: What it became.

    Returns:
        The shares over all NVFP4 weights; None where there are none.
    """
    blocks = {"scale": 0, "codes": 0, "both": 0, "all": 0}
    codes = [0, 0]
    wholes = [0, 0]
    for i, spec in enumerate(schema.tensors):
        if not spec.formula.startswith("nvfp4/") or spec.dtype != "U8":
            continue
        scale, whole = schema.ids[f"{spec.name}_scale"], schema.ids[f"{spec.name}_scale_2"]
        code_moved = old[i] != new[i]
        by_block = code_moved.reshape(*old[scale].shape, -1).any(axis=-1)
        scale_moved = old[scale] != new[scale]
        blocks["all"] += by_block.size
        blocks["scale"] += int((scale_moved & ~by_block).sum())
        blocks["codes"] += int((by_block & ~scale_moved).sum())
        blocks["both"] += int((by_block & scale_moved).sum())
        codes = [codes[0] + int(code_moved.sum()), codes[1] + code_moved.size]
        wholes = [wholes[0] + int(old[whole] != new[whole]), wholes[1] + 1]
    if not blocks["all"]:
        return None
    share = {k: v / blocks["all"] for k, v in blocks.items()}
    return AmaxMoves(
        globals_ratio=wholes[0] / wholes[1],
        scales_ratio=share["scale"] + share["both"],
        codes_ratio=codes[0] / codes[1],
        scale_only_ratio=share["scale"],
        codes_only_ratio=share["codes"],
        both_ratio=share["both"],
    )


def keep(path: Path, schema: Schema, old: State, new: State) -> None:
    """Write the mask of a delta to a compressed file: the schema, and the XOR of all words as byte planes.

    Args:
        path: The ``.npz``.
        schema: The tensors.
        old: The base.
        new: What it became.
    """
    planes: dict[str, Any] = {}
    for size in sorted({t.word_nbytes for t in schema.tensors}):
        ids = [i for i, t in enumerate(schema.tensors) if t.word_nbytes == size]
        words = np.concatenate([(old[i] ^ new[i]).reshape(-1) for i in ids])
        planes[f"planes_{size}"] = np.ascontiguousarray(words.view(np.uint8).reshape(-1, size).T)
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(path, schema=np.frombuffer(schema.encoded, np.uint8), **planes)


def kept(path: Path) -> tuple[Schema, list[np.ndarray]]:
    """Read what ``keep`` wrote.

    Args:
        path: The ``.npz``.

    Returns:
        The schema, and ``old XOR new`` of every tensor, in its shape.
    """
    with np.load(path) as file:
        schema = decode_schema(file["schema"].tobytes())
        planes = {size: file[f"planes_{size}"] for size in {t.word_nbytes for t in schema.tensors}}
    masks, used = [], dict.fromkeys(planes, 0)
    for spec in schema.tensors:
        size, at = spec.word_nbytes, used[spec.word_nbytes]
        used[size] = at + spec.num_words
        bytes_of = np.ascontiguousarray(planes[size][:, at : used[size]].T)
        masks.append(bytes_of.reshape(-1).view(WORD_DTYPES[size]).reshape(spec.shape))
    return schema, masks
