"""Frozen records of the domain: dtypes, tensors, boxes and entries. No I/O, no torch import at module level.

Every other module of megasync speaks in these records. Nothing here may import another megasync module.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal

import numpy as np

# Bytes an element takes, by safetensors dtype name. Sub-byte dtypes are packed: their canonical shape counts bytes.
DTYPE_NBYTES: dict[str, int] = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E4M3FNUZ": 1,
    "F8_E5M2FNUZ": 1,
    "F8_E8M0": 1,
    "F4": 1,
    "F6_E2M3": 1,
    "F6_E3M2": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
    "C64": 8,
}

WORD_DTYPES: dict[int, np.dtype] = {n: np.dtype(f"<u{n}") for n in (1, 2, 4, 8)}

SEGMENT_WORDS = 65_536
"""Words of a segment: a gap fits a u16."""

CutAxis = Literal["row", "last"]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One parameter of a run, as the schema knows it.

    Attributes:
        name: Canonical (Hugging Face checkpoint) name.
        dtype: safetensors dtype name, a key of ``DTYPE_NBYTES``.
        shape: Extents in words (elements; bytes for packed and sub-byte dtypes). ``()`` is a scalar.
        layer: Global layer index, -1 where the tensor belongs to no layer.
        cut: Which axis the tile grid bands first.
        block: Elements per axis that a tile never splits (same length as ``shape``); 1s where quantisation has no block.
        frozen: In the root, owned by nobody, never published.
        aliases: Other checkpoint names of the same bytes (tied embeddings).
        formula: Quantisation formula id, empty where the bytes are a plain export.
        group: Name of the atomic group (weight, block scales, global scale, fused partner), empty where alone.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    layer: int = -1
    cut: CutAxis = "row"
    block: tuple[int, ...] = ()
    frozen: bool = False
    aliases: tuple[str, ...] = ()
    formula: str = ""
    group: str = ""

    @property
    def word_nbytes(self) -> int:
        """Bytes of a word."""
        return DTYPE_NBYTES[self.dtype]

    @property
    def num_words(self) -> int:
        """Words of the tensor; 0 for an empty one, 1 for a scalar."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Canonical bytes of the tensor."""
        return self.num_words * self.word_nbytes


@dataclass(frozen=True, slots=True)
class Box:
    """A hyper-rectangle of a tensor, in words: ``start[i] <= x[i] < start[i] + extent[i]``."""

    start: tuple[int, ...]
    extent: tuple[int, ...]

    @property
    def num_words(self) -> int:
        """Words inside the box."""
        return prod(self.extent)

    def intersect(self, other: Box) -> Box | None:
        """The common part of two boxes of one tensor, or None where they do not meet."""
        start = tuple(max(a, b) for a, b in zip(self.start, other.start, strict=True))
        stop = tuple(
            min(a + m, b + n) for a, m, b, n in zip(self.start, self.extent, other.start, other.extent, strict=True)
        )
        if any(b <= a for a, b in zip(start, stop, strict=True)):
            return None
        return Box(start, tuple(b - a for a, b in zip(start, stop, strict=True)))


@dataclass(frozen=True, slots=True)
class Entries:
    """The changed words of some tiles of one word size, the form every codec encodes from and decodes to.

    Attributes:
        word_nbytes: 1, 2, 4 or 8.
        tensor_ids: u32 ``[T]``, schema ids of the touched tiles, in (tensor id, tile) order.
        tiles: u32 ``[T]``, tile numbers.
        tile_words: u32 ``[T]``, words of each whole tile (from the grid, never from the wire).
        counts: u32 ``[T]``, changed words of each tile.
        positions: u32 ``[n]``, word index in its tile, strictly ascending inside a tile; ``n = counts.sum()``.
        values: ``<u{word_nbytes}`` ``[n]``, ``old XOR new``, never 0.
    """

    word_nbytes: int
    tensor_ids: np.ndarray
    tiles: np.ndarray
    tile_words: np.ndarray
    counts: np.ndarray
    positions: np.ndarray
    values: np.ndarray

    @property
    def num_changed(self) -> int:
        """Changed words over all tiles."""
        return int(self.positions.shape[0])

    @property
    def num_words(self) -> int:
        """Words of all touched tiles, changed or not."""
        return int(self.tile_words.sum(dtype=np.int64))

    def mask(self, t: int) -> np.ndarray:
        """The mask of tile number ``t`` of these: ``<u{word_nbytes}`` ``[tile_words[t]]``, 0 where nothing changed."""
        last = int(self.counts[: t + 1].sum(dtype=np.int64))
        mine = slice(last - int(self.counts[t]), last)
        words = np.zeros(int(self.tile_words[t]), dtype=WORD_DTYPES[self.word_nbytes])
        words[self.positions[mine]] = self.values[mine]
        return words


class WholeEntries(Entries):
    """Entries given by all words of their tiles, which may be 0; positions and values are found when asked for.

    What anchors are made of: picking billions of words that nearly all differ from 0 costs far more than writing them.

    Attributes:
        words: ``<u{word_nbytes}`` ``[num_words]``, the tiles one after the other.
    """

    __slots__ = ("_picked", "words")
    words: np.ndarray
    _picked: tuple[np.ndarray, np.ndarray] | None

    def __init__(
        self, word_nbytes: int, tensor_ids: np.ndarray, tiles: np.ndarray, tile_words: np.ndarray, words: np.ndarray
    ) -> None:
        stops = np.cumsum(tile_words, dtype=np.int64)
        counts = [
            np.count_nonzero(words[stop - num : stop])
            for stop, num in zip(stops.tolist(), tile_words.tolist(), strict=True)
        ]
        for name, value in (
            ("word_nbytes", word_nbytes),
            ("tensor_ids", tensor_ids),
            ("tiles", tiles),
            ("tile_words", tile_words),
            ("counts", np.array(counts, dtype=np.uint32)),
            ("words", words),
            ("_picked", None),
        ):
            object.__setattr__(self, name, value)

    @property
    def num_changed(self) -> int:
        """See ``Entries.num_changed``."""
        return int(self.counts.sum(dtype=np.int64))

    def mask(self, t: int) -> np.ndarray:
        """See ``Entries.mask``; a view."""
        last = int(self.tile_words[: t + 1].sum(dtype=np.int64))
        return self.words[last - int(self.tile_words[t]) : last]

    def _pick(self) -> tuple[np.ndarray, np.ndarray]:
        """Positions and values, picked once: readers ask for them tile by tile."""
        if self._picked is None:
            at = np.flatnonzero(self.words)
            first = np.cumsum(self.tile_words, dtype=np.int64) - self.tile_words
            positions = (at - np.repeat(first, self.counts)).astype(np.uint32)
            object.__setattr__(self, "_picked", (positions, self.words[at]))
        assert self._picked is not None
        return self._picked

    @property
    def positions(self) -> np.ndarray:  # type: ignore[override]
        """See ``Entries``."""
        return self._pick()[0]

    @property
    def values(self) -> np.ndarray:  # type: ignore[override]
        """See ``Entries``."""
        return self._pick()[1]


@dataclass(frozen=True, slots=True)
class Lanes:
    """A two-lane linear digest sum, each lane modulo 2^64 (see digest.py)."""

    a: int = 0
    b: int = 0

    def __add__(self, other: Lanes) -> Lanes:
        return Lanes((self.a + other.a) & _MASK64, (self.b + other.b) & _MASK64)

    def __sub__(self, other: Lanes) -> Lanes:
        return Lanes((self.a - other.a) & _MASK64, (self.b - other.b) & _MASK64)


_MASK64 = (1 << 64) - 1
