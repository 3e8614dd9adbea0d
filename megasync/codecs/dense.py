"""The dense codecs: masks as raw Snappy, LZ4 or Zstd blocks of at most 1 MiB, with an optional outer Zstd.

They are what the Decompression Engine eats, what other stacks speak, and what wins when most bytes change. A frame's
mask is its touched tiles one after the other, row-major; blocks restart at each tile so that a receiver can take only
the tiles that it holds. Two planes: a table (u32 a block: stored length, top bit set where the block is `stored`, 0
where it is all zero and absent) and the blocks. See FORMAT.md.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import numpy as np

from megasync.codecs.base import Codec, EncodedFrame, FrameShape
from megasync.codecs.planes import compress, pack, split_planes, unpack
from megasync.codecs.zero_run import BlockKind, decode_into, encode_blocks
from megasync.errors import FormatError
from megasync.types import WORD_DTYPES, Entries, WholeEntries

BLOCK_NBYTES = 1 << 20
_STORED = 1 << 31
_MISCOUNTED = "frame holds {} changed words, its record says {}"
_Blocks = tuple[np.ndarray, np.ndarray, list[bytes | np.ndarray]]


def block_bounds(tile_words: np.ndarray, word_nbytes: int) -> np.ndarray:
    """Where blocks start and end in a frame's mask: int64 ``[B + 1]``; at most 1 MiB each, restarting at each tile."""
    tile_nbytes = tile_words.astype(np.int64) * word_nbytes
    num = -(-tile_nbytes // BLOCK_NBYTES)
    first = np.repeat(np.cumsum(tile_nbytes) - tile_nbytes, num)
    index = np.arange(int(num.sum())) - np.repeat(np.cumsum(num) - num, num)
    return np.append(first + index * BLOCK_NBYTES, int(tile_nbytes.sum()))


def mask_of(entries: Entries) -> np.ndarray:
    """The dense mask of all touched tiles, one after the other (``<u{w}``)."""
    if isinstance(entries, WholeEntries):
        return entries.words
    words = entries.tile_words.astype(np.int64)
    mask = np.zeros(int(words.sum()), dtype=WORD_DTYPES[entries.word_nbytes])
    mask[np.repeat(np.cumsum(words) - words, entries.counts) + entries.positions] = entries.values
    return mask


def entries_of(shape: FrameShape, mask: np.ndarray) -> Entries:
    """Entries of a frame's mask.

    Args:
        shape: What the frame must hold.
        mask: ``<u{w}``, all touched tiles one after the other.

    Raises:
        FormatError: Other counts than the frame must hold.
    """
    words = shape.tile_words.astype(np.int64)
    at = np.flatnonzero(mask)
    if len(at) != shape.num_changed:
        raise FormatError(_MISCOUNTED.format(len(at), shape.num_changed))
    counts = np.diff(np.searchsorted(at, np.append(np.cumsum(words) - words, words.sum())))
    if (counts == 0).any():
        raise FormatError(f"tile {int(shape.tiles[int(np.argmin(counts))])} is listed but unchanged")
    positions = at - np.repeat(np.cumsum(words) - words, counts)
    return Entries(
        shape.word_nbytes,
        shape.tensor_ids,
        shape.tiles,
        shape.tile_words,
        counts.astype(np.uint32),
        positions.astype(np.uint32),
        mask[at],
    )


class DenseCodec(Codec):
    """What all dense codecs share."""

    outer = False
    num_planes = 2

    @abstractmethod
    def encode_blocks(self, mask: np.ndarray, bounds: np.ndarray) -> _Blocks:
        """Lengths (int64, 0 where all zero), `stored` flags, and the bytes of each block that is not absent."""

    @abstractmethod
    def decode_block(self, block: memoryview, out: np.ndarray) -> None:
        """Decode one block that must fill ``out`` (uint8) exactly, or FormatError."""

    def encode(self, entries: Entries) -> EncodedFrame:
        """See ``Codec.encode``."""
        mask = mask_of(entries).view(np.uint8)
        lengths, stored, blocks = self.encode_blocks(mask, block_bounds(entries.tile_words, entries.word_nbytes))
        table = np.where(stored, lengths | _STORED, lengths).astype("<u4")
        body = b"".join(b if isinstance(b, bytes) else b.data for b in blocks)
        return EncodedFrame(
            self.id, (pack(table), pack(np.frombuffer(body, np.uint8), block=True) if self.outer else body)
        )

    def table(
        self, shape: FrameShape, stored: memoryview, plane_nbytes: Sequence[int]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, memoryview]:
        """A frame's block table and blocks after the outer decode, for decoders that run elsewhere.

        Returns:
            Bounds in the mask (int64 ``[B + 1]``), stored lengths (int64 ``[B]``), `stored` flags, and the blocks.

        Raises:
            FormatError: Lengths that cannot be.
        """
        planes = split_planes(stored, tuple(plane_nbytes), self.num_planes)
        bounds = block_bounds(shape.tile_words, shape.word_nbytes)
        raw = np.frombuffer(unpack(planes[0], 4 * (len(bounds) - 1), "block table"), "<u4").astype(np.int64)
        lengths, is_stored = raw & (_STORED - 1), raw >= _STORED
        sizes = np.diff(bounds)
        if (lengths > sizes).any() or (is_stored & (lengths != sizes)).any() or (~is_stored & (lengths == sizes)).any():
            raise FormatError(f"{self.name} frame: a block is longer than its mask, or `stored` at another length")
        total = int(lengths.sum())
        if not self.outer and len(planes[1]) != total:
            raise FormatError(f"{self.name} frame: blocks of {total} bytes in {len(planes[1])}")
        return bounds, lengths, is_stored, unpack(planes[1], total, "blocks")

    def decode(self, shape: FrameShape, stored: memoryview, plane_nbytes: Sequence[int]) -> Entries:
        """See ``Codec.decode``."""
        bounds, lengths, is_stored, blocks = self.table(shape, stored, plane_nbytes)
        mask = np.zeros(int(bounds[-1]), dtype=np.uint8)
        ends = np.cumsum(lengths)
        for i in np.flatnonzero(lengths):
            block = blocks[int(ends[i] - lengths[i]) : int(ends[i])]
            out = mask[bounds[i] : bounds[i + 1]]
            if is_stored[i]:
                out[:] = np.frombuffer(block, np.uint8)
            else:
                self.decode_block(block, out)
        return entries_of(shape, mask.view(WORD_DTYPES[shape.word_nbytes]))


def _non_zero(mask: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    return np.array([mask[a:b].any() for a, b in zip(bounds[:-1], bounds[1:], strict=True)])


class StoredCodec(DenseCodec):
    """Masks as they are: what ``auto`` takes when nothing compresses."""

    id, name = 2, "stored"

    def encode_blocks(self, mask: np.ndarray, bounds: np.ndarray) -> _Blocks:
        """Every block that is not all zero, `stored`."""
        present = _non_zero(mask, bounds)
        lengths = np.where(present, np.diff(bounds), 0)
        return lengths, present, [mask[bounds[i] : bounds[i + 1]] for i in np.flatnonzero(present)]

    def decode_block(self, block: memoryview, out: np.ndarray) -> None:
        """A `stored` frame has no other blocks."""
        raise FormatError(f"stored frame: a block of {len(block)} bytes for {len(out)} of mask")


class ZstdCodec(DenseCodec):
    """Each block a Zstd frame."""

    id, name = 3, "zstd"

    def encode_blocks(self, mask: np.ndarray, bounds: np.ndarray) -> _Blocks:
        """Zstd frames, `stored` where not smaller."""
        present = _non_zero(mask, bounds)
        lengths, stored = np.zeros(len(present), dtype=np.int64), np.zeros(len(present), dtype=bool)
        blocks: list[bytes | np.ndarray] = []
        for i in np.flatnonzero(present):
            plain = mask[bounds[i] : bounds[i + 1]]
            packed: bytes | np.ndarray = compress(plain, block=True)
            if len(packed) >= len(plain):
                packed, stored[i] = plain, True
            lengths[i] = len(packed)
            blocks.append(packed)
        return lengths, stored, blocks

    def decode_block(self, block: memoryview, out: np.ndarray) -> None:
        """One Zstd frame with its content size."""
        out[:] = np.frombuffer(unpack(block, len(out), "zstd block"), np.uint8)


class BlockCodec(DenseCodec):
    """Raw Snappy or LZ4 blocks, with or without an outer Zstd around all blocks of a frame."""

    def __init__(self, codec_id: int, kind: BlockKind, outer: bool) -> None:
        self.id, self.kind, self.outer = codec_id, kind, outer
        self.name = f"{kind}+zstd" if outer else kind

    def encode_blocks(self, mask: np.ndarray, bounds: np.ndarray) -> _Blocks:
        """Blocks by the rule of ``codecs.zero_run``."""
        encoded = encode_blocks(self.kind, mask, bounds)
        present = encoded.num_changed > 0
        lengths = np.where(present, np.diff(encoded.bounds), 0)
        return lengths, encoded.stored & present, [encoded.block(int(i)) for i in np.flatnonzero(present)]

    def decode_block(self, block: memoryview, out: np.ndarray) -> None:
        """One raw block."""
        decode_into(self.kind, block, out)


class AnchorCodec(Codec):
    """Full bytes of tiles, as they lie in an anchor's safetensors payload: a mask against an all-zero base."""

    id, name = 8, "anchor"

    def encode(self, entries: Entries) -> EncodedFrame:
        """One raw plane, all words of all listed tiles."""
        return EncodedFrame(self.id, (mask_of(entries).tobytes(),))

    def decode(self, shape: FrameShape, stored: memoryview, plane_nbytes: Sequence[int]) -> Entries:
        """Entries of all words that are not zero; tiles may have none."""
        if len(plane_nbytes) != 1 or plane_nbytes[0] != len(stored):
            raise FormatError(f"anchor frame: {len(plane_nbytes)} planes, expected one of {len(stored)} bytes")
        total = int(shape.tile_words.sum(dtype=np.int64)) * shape.word_nbytes
        if len(stored) != total:
            raise FormatError(f"anchor frame: {len(stored)} bytes for tiles of {total}")
        words = np.frombuffer(stored, WORD_DTYPES[shape.word_nbytes])
        entries = WholeEntries(shape.word_nbytes, shape.tensor_ids, shape.tiles, shape.tile_words, words)
        if entries.num_changed != shape.num_changed:
            raise FormatError(_MISCOUNTED.format(entries.num_changed, shape.num_changed))
        return entries


ANCHOR_ID = AnchorCodec.id

DENSE_CODECS: tuple[Codec, ...] = (
    StoredCodec(),
    ZstdCodec(),
    BlockCodec(4, "snappy", False),
    BlockCodec(5, "lz4", False),
    BlockCodec(6, "snappy", True),
    BlockCodec(7, "lz4", True),
    AnchorCodec(),
)
