"""Raw LZ4 and Snappy blocks of masks: zero-run encoders, stock encoders where a mask is dense, and checked decoders.

Before it in the flow: a mask, or the changed bytes of one (a ``sparse`` frame being transcoded). After it: an outer
Zstd and the wire, or the arena that the Decompression Engine or nvCOMP reads. What the zero-run encoders emit, and why
it is smaller after Zstd than stock encoders' output, is told in ``kernels.zero_run_rules``; ``kernels.zero_run`` gives
the same bytes on a GPU. Must not import torch or triton.

The rule of ``encode_blocks``, a function of the block's bytes alone: zero-run while at most one byte in
``ZERO_RUN_MAX_DENSITY_INVERSE`` changed, the stock encoder (cramjam) above, and the mask itself (`stored`) where the
result would not be smaller. Measured on uniform masks of random values, 1 MiB blocks, Zstd level 1 around, zero-run
against stock in % of the mask: LZ4 0.40 : 0.63 at a density of 0.1 %, 3.3 : 4.4 at 1 %, 13.3 : 15.6 at 5 %; Snappy
0.53 : 0.95, 3.6 : 5.3, 14.3 : 16.0. Zero-run stays 5 to 10 % ahead up to half the bytes changed, but numpy spends some
40 ns on each changed byte, so the rule leaves denser blocks to compiled code.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Final

import cramjam
import numpy as np

from megasync.codecs.zero_run_sequences import byte_changes, changed_bytes, cut_sequences, emit_lz4, emit_snappy
from megasync.codecs.zero_run_walk import walk_blocks, walk_lz4, walk_snappy
from megasync.errors import FormatError
from megasync.kernels.zero_run_rules import BLOCK_KINDS, MAX_BLOCK_NBYTES, BlockKind, check_kind

__all__ = [
    "BLOCK_KINDS",
    "MAX_BLOCK_NBYTES",
    "ZERO_RUN_MAX_DENSITY_INVERSE",
    "BlockKind",
    "EncodedBlocks",
    "block_bounds",
    "byte_changes",
    "changed_bytes",
    "decode_into",
    "decode_lz4_into",
    "decode_snappy_into",
    "encode_block",
    "encode_blocks",
    "encode_entries",
    "encode_mask",
    "walk_blocks",
    "walk_lz4",
    "walk_snappy",
]

ZERO_RUN_MAX_DENSITY_INVERSE: Final = 16
"""A block is sparse while changed bytes x 16 <= bytes."""

_GROUP_NBYTES = 16 << 20  # mask bytes, changed bytes and blocks that one vectorised pass takes: it stays in the cache
_GROUP_ENTRIES = 1 << 19
_GROUP_BLOCKS = 1 << 12


@dataclass(frozen=True, slots=True)
class EncodedBlocks:
    """Encoded blocks, one after the other without padding.

    Attributes:
        data: uint8, bytes of all blocks.
        bounds: int64 ``[B + 1]``, where each block starts and ends in ``data``.
        num_changed: int64 ``[B]``, changed bytes of each block; 0 marks an all-zero block, which a frame leaves out.
        stored: bool ``[B]``, blocks whose bytes are the mask itself.
    """

    data: np.ndarray
    bounds: np.ndarray
    num_changed: np.ndarray
    stored: np.ndarray

    def __len__(self) -> int:
        return len(self.stored)

    def block(self, i: int) -> np.ndarray:
        """uint8 view of block ``i``."""
        return self.data[self.bounds[i] : self.bounds[i + 1]]


def block_bounds(nbytes: int, block_nbytes: int = MAX_BLOCK_NBYTES) -> np.ndarray:
    """Bounds of blocks of ``block_nbytes``, the last one shorter: int64, from 0 to ``nbytes``.

    Raises:
        ValueError: ``nbytes`` or ``block_nbytes`` is out of range.
    """
    if nbytes < 1 or not 1 <= block_nbytes <= MAX_BLOCK_NBYTES:
        raise ValueError(
            f"cannot cut {nbytes} bytes into blocks of {block_nbytes}: 1 to {MAX_BLOCK_NBYTES} are allowed"
        )
    return np.append(np.arange(0, nbytes, block_nbytes, dtype=np.int64), nbytes)


def encode_entries(kind: BlockKind, positions: np.ndarray, values: np.ndarray, bounds: np.ndarray) -> EncodedBlocks:
    """Zero-run blocks straight from the changed bytes of a mask, which is never built.

    Args:
        kind: Block format.
        positions: integer ``[n]``, changed bytes, strictly ascending, inside ``bounds``.
        values: uint8 ``[n]``, none of them 0.
        bounds: integer ``[B + 1]``, where each block starts and ends in the mask; blocks of 1 byte to 1 MiB.

    Returns:
        One block each, never `stored`, whatever the density: a dense one may be larger than its mask.

    Raises:
        ValueError: An argument breaks the rules above.
    """
    bounds = _check_bounds(kind, bounds)
    positions = np.asarray(positions, dtype=np.int64)
    values = np.asarray(values)
    if values.dtype != np.uint8 or values.shape != positions.shape or positions.ndim != 1:
        raise ValueError(
            f"values must be uint8 {positions.shape}, one to a position, got {values.dtype} {values.shape}"
        )
    if len(positions) and not (
        bounds[0] <= positions[0] and positions[-1] < bounds[-1] and bool((positions[1:] > positions[:-1]).all())
    ):
        raise ValueError(f"positions must ascend strictly inside {int(bounds[0])} to {int(bounds[-1])}")
    if not values.all():
        raise ValueError("a value is 0: unchanged bytes are no entries")
    first = np.searchsorted(positions, bounds)
    parts = []
    for a, b in _groups(bounds, first):
        entries = slice(first[a], first[b])
        parts.append(
            _encode_group(kind, positions[entries] - bounds[a], values[entries], bounds[a : b + 1] - bounds[a])
        )
    return _joined(parts, np.diff(first))


def encode_mask(kind: BlockKind, mask: np.ndarray, bounds: np.ndarray) -> EncodedBlocks:
    """Zero-run blocks of a dense mask; equals ``encode_entries`` of its changed bytes.

    Args:
        kind: Block format.
        mask: uint8 ``[n]``, C-contiguous.
        bounds: As in ``encode_entries``; at most ``n``.

    Returns:
        One block each, never `stored`.

    Raises:
        ValueError: An argument breaks the rules above.
    """
    bounds = _check_bounds(kind, bounds)
    _check_mask(mask, bounds)
    parts, counts = [], []
    for a, b in _groups(bounds):
        positions, values = changed_bytes(mask[bounds[a] : bounds[b]])
        local = bounds[a : b + 1] - bounds[a]
        counts.append(np.diff(np.searchsorted(positions, local)))
        parts.append(_encode_group(kind, positions, values, local))
    return _joined(parts, np.concatenate(counts))


def encode_blocks(kind: BlockKind, mask: np.ndarray, bounds: np.ndarray) -> EncodedBlocks:
    """Blocks of a mask by the rule of this module: zero-run, stock, or `stored`.

    Args:
        kind: Block format.
        mask: uint8 ``[n]``, C-contiguous.
        bounds: As in ``encode_entries``; at most ``n``.

    Returns:
        One block each, none larger than its mask. Equal masks give equal bytes; above the density limit at equal
        versions of cramjam only.

    Raises:
        ValueError: An argument breaks the rules above.
    """
    bounds = _check_bounds(kind, bounds)
    _check_mask(mask, bounds)
    num_blocks = len(bounds) - 1
    stored = np.zeros(num_blocks, dtype=bool)
    num_changed = np.empty(num_blocks, dtype=np.int64)
    parts: list[np.ndarray] = []
    for a, b in _groups(bounds):
        positions, values = changed_bytes(mask[bounds[a] : bounds[b]])
        first = np.searchsorted(positions, bounds[a : b + 1] - bounds[a])
        num_changed[a:b] = np.diff(first)
        sparse = num_changed[a:b] * ZERO_RUN_MAX_DENSITY_INVERSE <= np.diff(bounds[a : b + 1])
        for is_sparse, stretch in groupby(range(a, b), key=lambda i: bool(sparse[i - a])):
            blocks = list(stretch)
            i, j = blocks[0], blocks[-1] + 1
            if not is_sparse:
                parts += [_stock(kind, mask[bounds[k] : bounds[k + 1]]) for k in blocks]
                continue
            entries, start = slice(first[i - a], first[j - a]), bounds[i]
            local = positions[entries] - (start - bounds[a])
            data, ends = _encode_group(kind, local, values[entries], bounds[i : j + 1] - start)
            parts += [data[ends[k] : ends[k + 1]] for k in range(len(blocks))]
    for i, part in enumerate(parts):
        plain = mask[bounds[i] : bounds[i + 1]]
        if len(part) >= len(plain):
            parts[i], stored[i] = plain, True
    ends = np.cumsum([0, *(len(p) for p in parts)], dtype=np.int64)
    return EncodedBlocks(np.concatenate(parts), ends, num_changed, stored)


def encode_block(kind: BlockKind, mask: np.ndarray) -> tuple[bool, bytes]:
    """One block by the rule of this module.

    Args:
        kind: Block format.
        mask: uint8 ``[n]``, 1 byte to 1 MiB, C-contiguous.

    Returns:
        Whether the block is `stored`, and its bytes.

    Raises:
        ValueError: An argument breaks the rules above.
    """
    encoded = encode_blocks(kind, mask, np.array([0, len(mask)]))
    return bool(encoded.stored[0]), encoded.data.tobytes()


def decode_lz4_into(block: bytes | memoryview | np.ndarray, out: np.ndarray) -> None:
    """Decode one LZ4 block that must fill ``out`` exactly.

    Args:
        block: The raw block.
        out: uint8 ``[n]``, C-contiguous, writeable; undefined after an error.

    Raises:
        FormatError: The block is malformed or has another length.
        ValueError: ``out`` is no such array.
    """
    decode_into("lz4", block, out)


def decode_snappy_into(block: bytes | memoryview | np.ndarray, out: np.ndarray) -> None:
    """Decode one Snappy block that must fill ``out`` exactly; as ``decode_lz4_into``."""
    decode_into("snappy", block, out)


def decode_into(kind: BlockKind, block: bytes | memoryview | np.ndarray, out: np.ndarray) -> None:
    """Decode one block of ``kind`` that must fill ``out`` exactly; as ``decode_lz4_into``. Releases the GIL."""
    check_kind(kind)
    if out.dtype != np.uint8 or out.ndim != 1 or not out.flags.c_contiguous or not out.flags.writeable:
        raise ValueError(f"decoding needs a writeable contiguous uint8 vector, got {out.dtype} {out.shape}")
    source = block.data if isinstance(block, np.ndarray) else block
    try:
        if kind == "lz4":
            written = cramjam.lz4.decompress_block_into(source, out.data, output_len=len(out))
        else:
            written = cramjam.snappy.decompress_raw_into(source, out.data)
    except cramjam.DecompressionError as error:
        raise FormatError(f"{kind} block of {len(block)} bytes does not decode to {len(out)} bytes: {error}") from error
    if written != len(out):
        raise FormatError(f"{kind} block of {len(block)} bytes holds {written} bytes, expected {len(out)}")


def _encode_group(
    kind: BlockKind, positions: np.ndarray, values: np.ndarray, bounds: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    narrow = positions.astype(np.int32)
    sequences = cut_sequences(kind, narrow, bounds.astype(np.int32))
    return (emit_lz4 if kind == "lz4" else emit_snappy)(sequences, narrow, values)


def _joined(parts: list[tuple[np.ndarray, np.ndarray]], num_changed: np.ndarray) -> EncodedBlocks:
    lengths = np.concatenate([np.diff(ends) for _, ends in parts])
    bounds = np.concatenate((np.zeros(1, np.int64), np.cumsum(lengths)))
    return EncodedBlocks(np.concatenate([p for p, _ in parts]), bounds, num_changed, np.zeros(len(lengths), dtype=bool))


def _stock(kind: BlockKind, mask: np.ndarray) -> np.ndarray:
    if kind == "lz4":
        return np.frombuffer(memoryview(cramjam.lz4.compress_block(mask.data, store_size=False)), np.uint8)
    return np.frombuffer(memoryview(cramjam.snappy.compress_raw(mask.data)), np.uint8)


def _groups(bounds: np.ndarray, first_entry: np.ndarray | None = None) -> Iterator[tuple[int, int]]:
    """Ranges of blocks that one pass takes; at least one block each, the limits kept unless one block passes them."""
    a, num_blocks = 0, len(bounds) - 1
    while a < num_blocks:
        b = int(np.searchsorted(bounds, bounds[a] + _GROUP_NBYTES, side="right")) - 1
        if first_entry is not None:
            b = min(b, int(np.searchsorted(first_entry, first_entry[a] + _GROUP_ENTRIES, side="right")) - 1)
        b = max(min(b, a + _GROUP_BLOCKS), a + 1)
        yield a, b
        a = b


def _check_bounds(kind: BlockKind, bounds: np.ndarray) -> np.ndarray:
    check_kind(kind)
    bounds = np.asarray(bounds, dtype=np.int64)
    if bounds.ndim != 1 or len(bounds) < 2:
        raise ValueError(f"bounds must be a vector of two or more, got shape {bounds.shape}")
    nbytes = np.diff(bounds)
    if bounds[0] < 0 or nbytes.min() < 1 or nbytes.max() > MAX_BLOCK_NBYTES:
        raise ValueError(f"blocks must have 1 to {MAX_BLOCK_NBYTES} bytes, got {nbytes.min()} to {nbytes.max()}")
    return bounds


def _check_mask(mask: np.ndarray, bounds: np.ndarray) -> None:
    if mask.dtype != np.uint8 or mask.ndim != 1 or not mask.flags.c_contiguous:
        raise ValueError(f"a mask is a contiguous uint8 vector, got {mask.dtype} {mask.shape}")
    if bounds[-1] > len(mask):
        raise ValueError(f"bounds end at {int(bounds[-1])}, the mask at {len(mask)}")
