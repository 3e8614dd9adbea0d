"""The rules of the zero-run block encoders: what every implementation of them (numpy, torch, Triton) must agree on.

A mask is mostly zeros, so the encoders look for one thing only: runs of zero bytes. A block is cut into *sequences*,
each some literal bytes and then at most one match at offset 1, which repeats the byte before it, a zero:

* A run is a maximal stretch of zero bytes of a block. Its first byte stays a literal; the match covers the others.
* The match ends early where the format wants literals at the end of a block (``last_literals``), and is dropped when
  it starts too near that end (``match_guard``) or is shorter than ``MIN_MATCH_NBYTES``.
* Everything outside a match is a literal. The last sequence of a block has no match.

LZ4 (the LZ4 block format description): token, literal length extension, literals, offset ``01 00``, match length
extension. Snappy (google/snappy format_description.txt): the block length as a varint, then for each sequence one
literal element and the copies: ``FE 01 00`` (64 bytes) as often as it fits, then the rest ``r`` as nothing (0), a
two-byte copy (4 to 11), or a three-byte copy (12 to 63). A rest of 1 to 3 is no copy any encoder makes: the last
64-byte copy becomes 60 bytes (``EE 01 00``) and the two-byte copy takes ``r + 4``.

No offset other than 1 ever occurs, so tokens and offsets carry next to no entropy and an outer Zstd shrinks such
blocks 1.4 to 2.4 times further than those of stock encoders, which any standard decoder reads all the same.

Comes before the numpy encoder (codecs/zero_run) and the GPU one (kernels/zero_run). Must not import torch or triton.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

BlockKind = Literal["lz4", "snappy"]
"""Raw block format: LZ4 block without size or frame header, or Snappy with its varint length."""

BLOCK_KINDS: tuple[BlockKind, ...] = ("lz4", "snappy")

MAX_BLOCK_NBYTES = 1 << 20
"""Mask bytes of a block at most: what every decoder takes, the Decompression Engine's limit included."""

MIN_MATCH_NBYTES = 4
"""Shortest match: LZ4's own minimum, and the shortest copy that saves a byte in Snappy."""

SNAPPY_COPY_NBYTES = 64
"""Bytes that one Snappy copy element repeats at most."""


@dataclass(frozen=True, slots=True)
class EndRule:
    """What a format wants at the end of a block.

    Attributes:
        last_literals: Bytes at the end of a block that no match may cover.
        match_guard: A match starts at least so many bytes before the end of its block.
    """

    last_literals: int
    match_guard: int


END_RULES: dict[BlockKind, EndRule] = {"lz4": EndRule(5, 12), "snappy": EndRule(0, 0)}


def check_kind(kind: str) -> None:
    """Refuse a block kind that is not one of ``BLOCK_KINDS``.

    Raises:
        ValueError: ``kind`` is unknown.
    """
    if kind not in BLOCK_KINDS:
        raise ValueError(f"block kind must be one of {BLOCK_KINDS}, got {kind!r}")
