"""What bench_payload encodes: synthetic masks on one large tensor, one owner's share of the model-like list, real deltas.

Weights are not in memory: only the changed words are, with random old values. The real deltas are masks that bench_deltas
kept from a training run, in ``inputs``. Before it: masks, workload, deltas. After it: bench_payload. Must not import a codec.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from launch.bench.deltas import kept
from launch.bench.host_rank import is_weight
from launch.bench.masks import ROW_NBYTES, STEPS, Histogram, MaskKind, draw, uniform_positions
from launch.bench.workload import Shape, owner_share
from megasync.schema import Schema, make_schema
from megasync.types import WORD_DTYPES, TensorSpec
from megasync.versions.changes import TileChange

RUN = "bench"
INPUTS = Path(__file__).resolve().parent / "inputs"
OWNERS, OWNER = 64, 3
"""Trainer ranks that share the model, and the one whose part is encoded."""

Seen = dict[str, Histogram]
"""By dtype, the words that may change and the values of those that did."""


@dataclass
class Case:
    """One set of changed words.

    Attributes:
        name: Its name.
        schema: Tensors.
        nbytes: Bytes of weights.
        draw: Draws the changed tiles in order, and tells ``Seen`` of everything drawn from.
        target: Most that the fetched bytes of ``sparse`` may be over the bound; 0 where only the figure is wanted.
        every_codec: Run every codec; else the default one and its nearest rival.
        seen: What was drawn, once ``tiles`` came to its end.
    """

    name: str
    schema: Schema
    nbytes: int
    draw: Callable[[Seen], Iterator[TileChange]]
    target: float = 0.0
    every_codec: bool = True
    seen: Seen = field(default_factory=dict)

    def tiles(self) -> Iterator[TileChange]:
        """The changed tiles in (tensor id, tile) order; equal at every call."""
        self.seen.clear()
        return self.draw(self.seen)

    @property
    def bound_nbytes(self) -> float:
        """``log2 C(n, k) + k H(value)`` of each dtype, added up."""
        return sum(h.bound_nbytes for h in self.seen.values())

    @property
    def density(self) -> float:
        """Changed words, each counted with all its bytes, over all bytes."""
        size = {t.dtype: t.word_nbytes for t in self.schema.tensors}
        return float(sum(h.num_changed * size[d] for d, h in self.seen.items()) / self.nbytes)


def mask_case(kind: MaskKind, nbytes: int, density: float | None = None) -> Case:
    """A mask on one large matrix.

    Args:
        kind: Which mask.
        nbytes: Bytes of the matrix, a multiple of its row.
        density: Changed words / all words; the published one, which has a target on masks A to D, by default.
    """
    columns = ROW_NBYTES // kind.word_nbytes
    spec = TensorSpec("model.layers.0.weight", kind.dtype, (nbytes // ROW_NBYTES, columns), 0)
    schema = make_schema(RUN, [spec])

    def tiles(seen: Seen) -> Iterator[TileChange]:
        rng = np.random.default_rng(0)
        positions, values = draw(kind, spec.num_words, rng, density)
        seen[kind.dtype] = Histogram(kind.word_nbytes)
        seen[kind.dtype].add(int(spec.num_words * kind.eligible), values)
        starts, extents = schema.grids[0].boxes(np.arange(schema.grids[0].num_tiles))
        assert (extents[:, 1] == columns).all(), "a row is far smaller than a tile: tiles are runs of rows"
        edges = np.searchsorted(positions, np.append(starts[:, 0], spec.shape[0]) * columns)
        for tile, (a, b) in enumerate(zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)):
            if b > a:
                yield _change(0, tile, positions[a:b] - int(starts[tile, 0]) * columns, values[a:b], rng)

    decisive = density is None and bool(kind.letter)
    name = f"{kind.letter if density is None else ''} {kind.name} {density or kind.density:.3%}".strip()
    return Case(name, schema, spec.nbytes, tiles, 1.05 if decisive else 0.0)


def list_case(how: str, density: float, scale: float, *, decisive: bool) -> Case:
    """One owner's share of the model-like list.

    Args:
        how: ``article`` XORs 1 into uniformly random weights and leaves scales and router alone; ``steps`` moves every
            kind of tensor a little.
        density: Changed bytes / all bytes.
        scale: Share of the model that is divided among the owners.
        decisive: The case has a target and runs every codec.
    """
    owned = {spec.name: (spec, tiles) for spec, tiles in owner_share(Shape().scaled(scale), OWNERS, OWNER)}
    schema = make_schema(RUN, [spec for spec, _ in owned.values()])
    mine = [owned[t.name][1] for t in schema.tensors]
    words = [int(g.tile_words(m).sum(dtype=np.int64)) for g, m in zip(schema.grids, mine, strict=True)]
    chosen = [how == "steps" or is_weight(t) for t in schema.tensors]
    nbytes = sum(n * t.word_nbytes for n, t in zip(words, schema.tensors, strict=True))
    # ``article`` changes elements alike, whatever their size; ``steps`` changes bytes alike.
    alike = density * nbytes / sum(n for n, ok in zip(words, chosen, strict=True) if ok)

    def tiles(seen: Seen) -> Iterator[TileChange]:
        rng = np.random.default_rng(0)
        for i, spec in enumerate(schema.tensors):
            if not chosen[i]:
                continue
            histogram = seen.setdefault(spec.dtype, Histogram(spec.word_nbytes))
            rate = alike if how == "article" else density * spec.word_nbytes
            for tile in mine[i].tolist():
                num = schema.num_tile_words(i, tile)
                at = uniform_positions(num, rate, rng)
                ones = np.ones(len(at), dtype=WORD_DTYPES[spec.word_nbytes])
                values = ones if how == "article" else STEPS[spec.dtype](rng, len(at))
                histogram.add(num, values)
                if len(at):
                    yield _change(i, tile, at, values, rng)

    return Case(f"list-{how} {density:.3%}", schema, nbytes, tiles, 1.15 if decisive else 0.0, decisive)


def real_case(path: Path) -> Case:
    """A delta of a training run.

    Args:
        path: A mask that ``deltas.keep`` wrote; its name says model, export, learning rate and steps.
    """
    schema, masks = kept(path)

    def tiles(seen: Seen) -> Iterator[TileChange]:
        rng = np.random.default_rng(0)
        for i, (spec, grid, mask) in enumerate(zip(schema.tensors, schema.grids, masks, strict=True)):
            histogram = seen.setdefault(spec.dtype, Histogram(spec.word_nbytes))
            histogram.add(spec.num_words, mask[mask != 0])
            for tile in range(grid.num_tiles):
                box = grid.box(tile)
                cut = mask.reshape(grid.shape)[
                    tuple(slice(a, a + n) for a, n in zip(box.start, box.extent, strict=True))
                ]
                words = cut.reshape(-1)
                if len(at := np.flatnonzero(words)):
                    yield _change(i, tile, at, words[at], rng)

    return Case(path.stem.replace("_", " "), schema, schema.nbytes, tiles)


def _change(tensor: int, tile: int, at: np.ndarray, values: np.ndarray, rng: np.random.Generator) -> TileChange:
    old = rng.integers(0, 1 << 8 * values.itemsize, len(at), dtype=values.dtype)
    return TileChange(tensor, tile, at, old, old ^ values)
