"""The schema document: names, shapes, dtypes, formulas and tile grids of a run. Immutable, referenced by digest.

Written once per run by the publisher; manifests speak in its integer ids. Strict encode and decode: nothing received
is trusted. Must import nothing above types, tiles, digest, documents and errors.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Annotated

import msgspec
import numpy as np

from megasync.digest import XXH3_128, content_digest
from megasync.documents import RUN_NAME, Stamp, decode_map
from megasync.errors import FormatError, SchemaMismatchError
from megasync.tiles import MAX_TILE_WORDS, TileGrid, tile_grid
from megasync.types import DTYPE_NBYTES, TensorSpec

FORMAT = 1
KIND = "megasync.schema"
_STAMP = Stamp(KIND, FORMAT)
MAX_WORDS = 1 << 48
MAX_AXES = 8
MAX_NAME_CHARACTERS = 512
MAX_BLOCK_EXTENT = 1 << 20
MAX_BLOCK_WORDS = MAX_TILE_WORDS
"""Words of a quantisation block: a tile is never larger than a tile may be, nor than a u32 counts."""
MAX_SCHEMA_NBYTES = 1 << 28
MAX_TENSORS = 1 << 21
MAX_TILES = 1 << 26
"""Tiles of all tensors: 4.4 * 10^12 words at 64 Ki words a tile, less than which tiles of large tensors seldom have. A
reader keeps a few bytes of each tile, so a schema that announces 2^48 words in a hundred bytes must not get that far."""
_Extent = Annotated[int, msgspec.Meta(ge=0, le=MAX_WORDS)]
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME_CHARACTERS)]


class _Row(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    name: _Name
    dtype: str
    shape: Annotated[list[_Extent], msgspec.Meta(max_length=MAX_AXES)]
    layer: Annotated[int, msgspec.Meta(ge=-1, lt=1 << 31)]
    cut: Annotated[int, msgspec.Meta(ge=0, le=1)]
    block: Annotated[list[Annotated[int, msgspec.Meta(ge=1, le=MAX_BLOCK_EXTENT)]], msgspec.Meta(max_length=MAX_AXES)]
    frozen: bool
    aliases: list[_Name]
    formula: str
    group: str


class _Document(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    kind: str
    format: int
    run: _Name
    tensors: Annotated[list[_Row], msgspec.Meta(max_length=MAX_TENSORS)]


@dataclass(frozen=True)
class Schema:
    """The tensors of a run; a tensor's id is its index.

    Attributes:
        run: Name of the run.
        tensors: Ordered by (layer, word size, name), which keeps frames long: a frame takes tiles of one layer and
            one word size in id order.
    """

    run: str
    tensors: tuple[TensorSpec, ...]

    @cached_property
    def ids(self) -> dict[str, int]:
        """Id by canonical name, aliases included."""
        out = {t.name: i for i, t in enumerate(self.tensors)}
        for i, t in enumerate(self.tensors):
            out.update((alias, i) for alias in t.aliases)
        return out

    @cached_property
    def encoded(self) -> bytes:
        """The document's bytes."""
        rows = [
            _Row(
                t.name,
                t.dtype,
                list(t.shape),
                t.layer,
                int(t.cut == "last"),
                list(t.block),
                t.frozen,
                list(t.aliases),
                t.formula,
                t.group,
            )
            for t in self.tensors
        ]
        return msgspec.msgpack.encode(_Document(KIND, FORMAT, self.run, rows))

    @cached_property
    def digest(self) -> bytes:
        """xxh3-128 of the document."""
        return content_digest(self.encoded, XXH3_128)

    @cached_property
    def grids(self) -> tuple[TileGrid, ...]:
        """Tile grid of each tensor."""
        return tuple(tile_grid(t) for t in self.tensors)

    @cached_property
    def layers(self) -> np.ndarray:
        """Layer of each tensor, int32."""
        return np.array([t.layer for t in self.tensors], dtype=np.int32)

    @cached_property
    def word_nbytes(self) -> np.ndarray:
        """Word size of each tensor, uint8."""
        return np.array([t.word_nbytes for t in self.tensors], dtype=np.uint8)

    @cached_property
    def frozen(self) -> np.ndarray:
        """Tensors that are never published, bool."""
        return np.array([t.frozen for t in self.tensors], dtype=bool)

    @cached_property
    def empty(self) -> np.ndarray:
        """Tensors without a word, bool."""
        return np.array([t.num_words == 0 for t in self.tensors], dtype=bool)

    @cached_property
    def formulas(self) -> tuple[str, ...]:
        """Formulas by which tensors are made, each once, sorted."""
        return tuple(sorted({t.formula for t in self.tensors if t.formula}))

    @cached_property
    def nbytes(self) -> int:
        """Canonical bytes of all tensors."""
        return sum(t.nbytes for t in self.tensors)

    @cached_property
    def num_tiles(self) -> np.ndarray:
        """Tiles of each tensor, int64."""
        return np.array([g.num_tiles for g in self.grids], dtype=np.int64)

    @cached_property
    def first_tile(self) -> np.ndarray:
        """Number of each tensor's first tile among all tiles of all tensors in id order, int64 ``[num_tensors + 1]``."""
        return np.concatenate(([0], np.cumsum(self.num_tiles)))

    @cached_property
    def _all_tile_words(self) -> np.ndarray:
        """Words of all tiles of all tensors (u32); equal grids are computed once."""
        of = {g: _tile_words(g) for g in set(self.grids)}
        parts = [of[g] for g in self.grids]
        return np.concatenate(parts) if parts else np.empty(0, np.uint32)

    def num_tile_words(self, tensor_id: int, tile: int) -> int:
        """Words of one tile of the grid."""
        return int(self._all_tile_words[self.first_tile[tensor_id] + tile])

    def tile_words(self, tensor_ids: np.ndarray, tiles: np.ndarray) -> np.ndarray:
        """Words of tiles given by tensor id and tile number (u32), vectorised.

        Raises:
            FormatError: A tile past its tensor's grid.
        """
        ids, tiles = np.asarray(tensor_ids).astype(np.intp), np.asarray(tiles)
        at = self.first_tile.take(ids) + tiles
        beyond = at >= self.first_tile[1:].take(ids)
        if beyond.any():
            i = int(np.argmax(beyond))
            spec, grid = self.tensors[int(ids[i])], self.grids[int(ids[i])]
            raise FormatError(f"tile {int(tiles[i])} of {spec.name}: its grid has {grid.num_tiles} tiles")
        out: np.ndarray = self._all_tile_words.take(at)
        return out


def _tile_words(grid: TileGrid) -> np.ndarray:
    """``TileGrid.tile_words`` of every tile of a grid, in the memory of the result alone."""
    if not grid.num_tiles:
        return np.empty(0, dtype=np.uint32)
    words = np.ones(1, dtype=np.uint32)
    for axis in grid.axes:
        band = np.full(axis.pieces, axis.size, dtype=np.uint32)
        band[-1] = axis.band - (axis.pieces - 1) * axis.size
        words = np.multiply.outer(words, np.tile(band, axis.bands)).ravel()
    return words


def runs_of_equal(values: np.ndarray) -> list[tuple[int, int]]:
    """Start and stop of each run of equal neighbours."""
    if not len(values):
        return []
    edges = np.flatnonzero(values[1:] != values[:-1]) + 1
    bounds = [0, *edges.tolist(), len(values)]
    return list(zip(bounds[:-1], bounds[1:], strict=True))


def make_schema(run: str, specs: Iterable[TensorSpec]) -> Schema:
    """A schema from specs in any order: one that every reader takes.

    Raises:
        ValueError: Listing what is wrong with which tensors.
    """
    tensors = tuple(sorted(specs, key=lambda t: (t.layer, DTYPE_NBYTES.get(t.dtype, 0), t.name)))
    schema = Schema(run, tensors)
    if wrong := _faults(schema):
        raise ValueError(f"schema of run {run!r}: " + "; ".join(wrong[:20]))
    try:
        # By the reader's own rules, the types of the wire included, before anything is written by this schema.
        decode_map(schema.encoded, _Document, "document", MAX_SCHEMA_NBYTES)
    except (FormatError, TypeError, ValueError, OverflowError) as e:
        raise ValueError(f"schema of run {run!r}: no reader would take it: {e}") from e
    return schema


def decode_schema(data: bytes | memoryview, *, digest: bytes | None = None) -> Schema:
    """Read a schema document.

    Args:
        data: The stored bytes.
        digest: What its digest must be.

    Raises:
        FormatError: Not a schema of this format, or rules broken; SchemaMismatchError: another digest.
    """
    if digest is not None and content_digest(data) != digest:
        raise SchemaMismatchError(
            f"schema digest is {content_digest(data).hex()}, the manifest names {digest.hex()}; fetch it again"
        )
    document = decode_map(data, _Document, "schema document", MAX_SCHEMA_NBYTES, _STAMP)
    _STAMP.check(document.kind, document.format, "schema document")
    tensors = tuple(
        TensorSpec(
            r.name,
            r.dtype,
            tuple(r.shape),
            r.layer,
            "last" if r.cut else "row",
            tuple(r.block),
            r.frozen,
            tuple(r.aliases),
            r.formula,
            r.group,
        )
        for r in document.tensors
    )
    schema = Schema(document.run, tensors)
    if wrong := _faults(schema):
        raise FormatError("schema document refused: " + "; ".join(wrong[:20]))
    # The stored bytes are the document, whoever wrote them: the digest is theirs, and encoding again would cost as much.
    schema.__dict__["encoded"] = bytes(data)
    return schema


def _faults(schema: Schema) -> list[str]:
    wrong: list[str] = []
    seen: set[str] = set()
    if not RUN_NAME.match(schema.run):
        wrong.append(f"run name {schema.run!r} cannot be part of a key")
    if len(schema.tensors) > MAX_TENSORS:
        wrong.append(f"{len(schema.tensors)} tensors, at most {MAX_TENSORS}")
    for t in schema.tensors:
        for name in (t.name, *t.aliases):
            if name in seen:
                wrong.append(f"{_shown(name)} appears twice")
            elif fault := _name_fault(name):
                wrong.append(f"name {name!r:.120} {fault}")
            seen.add(name)
        wrong += [f"{_shown(t.name)} has {fault}" for fault in _spec_faults(t)]
    if not wrong and (num_tiles := sum(g.num_tiles for g in schema.grids)) > MAX_TILES:
        wrong.append(f"{num_tiles} tiles in all, at most {MAX_TILES}")
    return wrong


def _name_fault(name: str) -> str:
    """What is wrong with a name, empty where nothing is."""
    if not isinstance(name, str) or not name or "\0" in name:
        return "is empty or has a NUL"
    if len(name) > MAX_NAME_CHARACTERS:
        return f"has {len(name)} characters, at most {MAX_NAME_CHARACTERS}"
    return "" if _is_text(name) else "has a surrogate, which no UTF-8 has"


def _shown(name: str) -> str:
    """A name in a message: as it is where it can be shown."""
    return name if isinstance(name, str) and len(name) <= 120 and name.isprintable() else f"{name!r:.120}"


def _is_text(value: str) -> bool:
    """Whether a str is UTF-8 once it is encoded."""
    if value.isascii():
        return True
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _spec_faults(t: TensorSpec) -> list[str]:
    wrong: list[str] = []
    if t.dtype not in DTYPE_NBYTES:
        wrong.append(f"dtype {_shown(t.dtype)}, known: {', '.join(DTYPE_NBYTES)}")
    if t.block and len(t.block) != max(len(t.shape), 1):
        wrong.append(f"block {t.block} for shape {t.shape}")
    if prod(t.block) > MAX_BLOCK_WORDS or not all(1 <= b <= MAX_BLOCK_EXTENT for b in t.block):
        wrong.append(f"block {t.block}: extents from 1 to {MAX_BLOCK_EXTENT}, at most {MAX_BLOCK_WORDS} words")
    # Each extent too: one of them may be 0, and then the product says nothing.
    if t.num_words > MAX_WORDS or len(t.shape) > MAX_AXES or not all(0 <= x <= MAX_WORDS for x in t.shape):
        wrong.append(f"shape {t.shape}: at most {MAX_AXES} axes, extents from 0 and words in all to 2^48")
    if not -1 <= t.layer < 1 << 31:
        wrong.append(f"layer {t.layer}, expected -1 (none) or up to 2^31 - 1")
    if t.cut not in ("row", "last"):
        wrong.append(f"cut axis {t.cut!r}")
    if not _is_text(t.formula) or not _is_text(t.group):
        wrong.append("a formula or group with a surrogate, which no UTF-8 has")
    return wrong


def schema_key(run: str, digest: bytes) -> str:
    """Sink key of a schema."""
    return f"{run}/schema/{digest.hex()}"


def require_same(ours: Schema, theirs: Schema) -> None:
    """Refuse another model.

    Raises:
        SchemaMismatchError: Listing the first differences.
    """
    if ours.digest == theirs.digest:
        return
    a, b = {t.name: t for t in ours.tensors}, {t.name: t for t in theirs.tensors}
    lines = [f"missing here: {n}" for n in sorted(b.keys() - a.keys())[:5]]
    lines += [f"missing there: {n}" for n in sorted(a.keys() - b.keys())[:5]]
    lines += [f"{n}: here {_brief(a[n])}, there {_brief(b[n])}" for n in sorted(a.keys() & b.keys()) if a[n] != b[n]][
        :5
    ]
    raise SchemaMismatchError(
        f"schema {ours.digest.hex()} (run {ours.run}) is not {theirs.digest.hex()} (run {theirs.run}): "
        + ("; ".join(lines) or "runs differ")
    )


def _brief(t: TensorSpec) -> str:
    return f"{t.dtype}{list(t.shape)} layer {t.layer} cut {t.cut} block {list(t.block)} formula {t.formula!r}"


def names_of(schema: Schema, ids: Sequence[int] | np.ndarray, limit: int = 8) -> str:
    """Names for a message."""
    listed = [schema.tensors[int(i)].name for i in list(ids)[:limit]]
    return ", ".join(listed) + (f" and {len(ids) - limit} more" if len(ids) > limit else "")
