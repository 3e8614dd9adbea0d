"""Tensors and changes of the golden runs of format 1, made from integers alone so that no generator can change them.

Imports numpy only, nothing of megasync: a reader written from ``FORMAT.md`` alone can start from these tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from zlib import crc32

import numpy as np

Words = Mapping[str, np.ndarray]
"""Words of each tensor, flat, ``<u{w}``, by name."""

SIGN_KEY = b"the golden key of format 1"
WORD_NBYTES = {"BOOL": 1, "U8": 1, "F4": 1, "F8_E4M3": 1, "BF16": 2, "U16": 2, "F32": 4, "F64": 8, "C64": 8, "I64": 8}
_M = (1 << 64) - 1


@dataclass(frozen=True)
class Row:
    """One tensor as the schema lists it; see ``FORMAT.md`` for the fields."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    layer: int = -1
    cut: str = "row"
    block: tuple[int, ...] = ()
    frozen: bool = False
    aliases: tuple[str, ...] = ()
    formula: str = ""
    group: str = ""

    @property
    def num_words(self) -> int:
        """Words of the tensor."""
        return prod(self.shape)


STEPS_ROWS = (
    Row("model.embed_tokens.weight", "BF16", (151, 1111), aliases=("lm_head.weight",)),
    Row("model.empty", "BF16", (0, 8)),
    Row("model.norm.weight", "F32", (77,)),
    Row("model.rotary.inv_freq", "F32", (16,), frozen=True),
    Row("model.scalar", "F32", ()),
    Row("model.layers.0.mlp.down_proj.weight", "U8", (512, 512), 0, "last"),
    Row("model.layers.0.mlp.experts.w1", "F8_E4M3", (11, 1, 256, 256), 0),
    Row("model.layers.0.mlp.gate.weight", "F4", (1031, 1100), 0, block=(1, 4), formula="nvfp4/te-1d@1", group="gate.0"),
    Row("model.layers.0.mlp.gate.weight_scale_2", "F32", (), 0, formula="nvfp4/te-1d@1", group="gate.0"),
    Row("model.layers.0.router.bias", "F64", (501, 299), 0),
    Row("model.layers.0.table", "C64", (9,), 0),
    Row("model.layers.1.flags", "BOOL", (19,), 1),
    Row("model.layers.1.mlp.scale", "F32", (3, 5, 7, 11), 1),
    Row("model.layers.1.mlp.weight", "BF16", (256, 1024), 1),
)
"""The run ``golden-steps``: it starts from a checkpoint, so its tensors can be large."""

ANCHOR_ROWS = (
    Row("embed", "BF16", (13, 7)),
    Row("empty", "F32", (3, 0)),
    Row("inv_freq", "F32", (4,), frozen=True),
    Row("scalar", "F64", ()),
    Row("l.0.codes", "F4", (6, 9), 0),
    Row("l.0.experts", "U16", (2, 3, 4, 5), 0, "last"),
    Row("l.0.scale", "F32", (5,), 0),
    Row("l.1.zero", "F32", (2, 3), 1),
    Row("l.2.ids", "I64", (2, 2, 2), 2),
)
"""The runs ``golden-anchor`` and ``golden-signed``: they start from an anchor, whose bytes are all stored."""

EXAMPLE_ROWS = (
    Row("norm", "F32", (3,)),
    Row("l.0.packed", "U8", (2, 3), 0),
    Row("l.0.table", "U8", (5,), 0),
    Row("l.0.w", "BF16", (4, 6), 0),
)
"""The run ``example``: its objects are printed in ``FORMAT.md``."""


def splitmix64(x: np.ndarray) -> np.ndarray:
    """The function of ``FORMAT.md`` on uint64."""
    z = x + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def hashed(n: int, name: str, step: int) -> np.ndarray:
    """uint64 ``[n]``: ``splitmix64(i + 2^32 * (crc32(name) XOR step))`` for i from 0 on."""
    seed = ((crc32(name.encode()) ^ step) << 32) & _M
    return splitmix64(np.arange(n, dtype=np.uint64) + np.uint64(seed))


def first_words(rows: tuple[Row, ...]) -> dict[str, np.ndarray]:
    """Version 0 of a run: word i of a tensor is the lowest bytes of ``hashed`` at step 0; ``l.1.zero`` is all zero."""
    out = {}
    for r in rows:
        words = hashed(r.num_words, r.name, 0).astype(f"<u{WORD_NBYTES[r.dtype]}")
        out[r.name] = words * 0 if r.name == "l.1.zero" else words
    return out


def some(period: int) -> tuple[str, int, int]:
    """About one word in ``period`` changes, anywhere, in its low bits."""
    return "some", period, 0


def most(start: int = 0) -> tuple[str, int, int]:
    """Four words in five change, from word ``start`` on, by a pattern that compresses."""
    return "most", 5, start


def comb(period: int) -> tuple[str, int, int]:
    """One word in ``period`` changes, at equal distances, by the same value."""
    return "comb", period, 0


def every(stop: int = 0) -> tuple[str, int, int]:
    """Every word changes, in all its bytes, up to word ``stop`` (0: all)."""
    return "every", 1, stop


def change(old: Words, step: int, what: Mapping[str, tuple[str, int, int]]) -> dict[str, np.ndarray]:
    """The next version: a copy with the words of the tensors in ``what`` changed."""
    out = {name: words.copy() for name, words in old.items()}
    for name, (kind, period, bound) in what.items():
        words = out[name]
        h, i = hashed(len(words), name, step), np.arange(len(words), dtype=np.uint64)
        if kind == "some":
            mask = np.where(h % np.uint64(period) == 0, 1 + (h >> np.uint64(32)) % np.uint64(7), 0)
        elif kind == "most":
            mask = np.where((i % np.uint64(period) != 0) & (i >= np.uint64(bound)), 1 + i % np.uint64(3), 0)
        elif kind == "comb":
            mask = np.where(i % np.uint64(period) == 0, 1, 0)
        else:
            mask = np.where(i < np.uint64(bound or len(words)), h | np.uint64(1), 0)
        words ^= mask.astype(words.dtype)
    return out


L0, L1 = "model.layers.0.", "model.layers.1."
SMALL = (L0 + "table", L1 + "flags", L1 + "mlp.scale", "model.norm.weight", "model.scalar")
"""Tensors of ``golden-steps`` that are small enough for codecs that do not compress."""

STEPS: tuple[tuple[str, dict[str, tuple[str, int, int]]], ...] = (
    (
        "sparse",
        {
            "model.embed_tokens.weight": most(65_536),
            "model.norm.weight": most(),
            "model.scalar": every(),
            L0 + "mlp.down_proj.weight": some(1500),
            L0 + "mlp.experts.w1": some(60_000),
            L0 + "mlp.gate.weight": some(6000),
            L0 + "mlp.gate.weight_scale_2": every(),
            L0 + "router.bias": some(2000),
            L0 + "table": every(4),
            L1 + "flags": some(5),
            L1 + "mlp.scale": some(40),
            L1 + "mlp.weight": comb(3),
        },
    ),
    ("sparse", {}),
    ("stored", {**dict.fromkeys(SMALL, some(3)), "model.scalar": every()}),
    ("zstd", {**dict.fromkeys(SMALL, most(2)), "model.scalar": every(), L0 + "router.bias": some(4000)}),
    (
        "snappy",
        {**dict.fromkeys(SMALL, every()), L0 + "mlp.experts.w1": most(700_000), L1 + "mlp.weight": some(30_000)},
    ),
    ("lz4", {**dict.fromkeys(SMALL, every()), L0 + "router.bias": some(5000), L0 + "mlp.experts.w1": most(700_000)}),
    ("snappy+zstd", {**dict.fromkeys(SMALL, some(2)), "model.scalar": every(), L0 + "mlp.down_proj.weight": some(900)}),
    (
        "lz4+zstd",
        {L0 + "mlp.gate.weight": some(9000), L0 + "router.bias": some(3000), "model.embed_tokens.weight": most()},
    ),
)
"""Codec and changes of versions 1 to 8 of ``golden-steps``."""

SPLIT_STEP: dict[str, tuple[str, int, int]] = {
    **dict.fromkeys(SMALL, some(2)),
    "model.embed_tokens.weight": some(3000),
    "model.scalar": every(),
    L0 + "mlp.down_proj.weight": some(5000),
    L1 + "mlp.weight": some(400),
}
"""Changes of version 9 of ``golden-steps``, of 10 (lost) and of 11; three owners, whose cuts cross tiles."""

ANCHOR_STEP: dict[str, tuple[str, int, int]] = {
    "embed": some(6),
    "scalar": every(),
    "l.0.codes": most(),
    "l.0.experts": some(4),
    "l.0.scale": every(2),
    "l.2.ids": some(2),
}

EXAMPLE_STEP: dict[str, tuple[str, int, int]] = {
    "l.0.packed": most(),
    "l.0.table": some(4),
    "l.0.w": some(4),
    "norm": every(1),
}


def owner_of_words(row: Row, index: int, owners: int) -> np.ndarray:
    """Which owner holds each word: int64 ``[num_words]``.

    Tensors with at least as many rows as owners are cut by rows, whatever the tile grid says; the others go to owner
    ``index % owners`` whole.
    """
    if owners == 1 or not row.shape or row.shape[0] < owners:
        return np.full(row.num_words, index % owners, dtype=np.int64)
    of_row = np.arange(row.shape[0], dtype=np.int64) * owners // row.shape[0]
    return np.repeat(of_row, row.num_words // row.shape[0])
