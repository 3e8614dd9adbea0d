"""Frames as encoded blocks of the tiles that a rank holds: what a block decoder on the device eats.

Blocks of the decoder's own formats are taken as they are, after the outer decode. Everything else is transcoded on the host:
changed words become zero-run blocks straight from their positions where they are few, else blocks of the mask, and a block
that does not get smaller stays the mask itself (`stored`). Comes after fetch, before ``stream_plan``. Must import nothing
above bind but codecs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megasync.codecs.base import FrameShape
from megasync.codecs.dense import BLOCK_NBYTES, BlockCodec, block_bounds, mask_of
from megasync.codecs.registry import codec_by_id
from megasync.codecs.zero_run import (
    ZERO_RUN_MAX_DENSITY_INVERSE,
    BlockKind,
    EncodedBlocks,
    byte_changes,
    encode_blocks,
    encode_entries,
    walk_blocks,
)
from megasync.errors import FormatError
from megasync.receiver.backend import FetchedFrame
from megasync.types import Entries


@dataclass(frozen=True, slots=True)
class TileBlocks:
    """Encoded masks of some tiles of one layer and word size.

    Attributes:
        kind: Format of the blocks that are not `stored`.
        layer: Layer of the tiles.
        word_nbytes: Bytes of a word.
        tensor_ids: u32 ``[T]``.
        tiles: u32 ``[T]``.
        tile_nbytes: int64 ``[T]``, bytes of each tile's mask.
        num_changed: Changed words of the tiles; of a frame that is kept in part about, since nobody has decoded it.
        tile_of: int64 ``[B]``, tile of each block.
        begin: int64 ``[B]``, where each block begins in its tile's mask.
        plain_nbytes: int64 ``[B]``, bytes that it decodes to.
        nbytes: int64 ``[B]``, encoded bytes; 0 where it is all zero and absent.
        stored: bool ``[B]``, blocks that are the mask itself.
        data: uint8, all blocks one after the other.
    """

    kind: BlockKind
    layer: int
    word_nbytes: int
    tensor_ids: np.ndarray
    tiles: np.ndarray
    tile_nbytes: np.ndarray
    num_changed: int
    tile_of: np.ndarray
    begin: np.ndarray
    plain_nbytes: np.ndarray
    nbytes: np.ndarray
    stored: np.ndarray
    data: np.ndarray


def tile_blocks(frame: FetchedFrame, keep: np.ndarray, kinds: Sequence[BlockKind], *, signed: bool) -> TileBlocks:
    """The kept tiles of a frame as blocks.

    Args:
        frame: Its digest was checked.
        keep: bool ``[T]``, at least one.
        kinds: Formats that the decoder knows; others are transcoded to the first.
        signed: The publication is signed with a key that this receiver has. Blocks of others are walked for bounds and
            exact length before any decoder on a device sees them.

    Raises:
        FormatError: A rule of the format is broken.
    """
    codec = codec_by_id(frame.record.codec)
    if not (isinstance(codec, BlockCodec) and codec.kind in kinds):
        return _transcoded(frame, _kept(frame.entries(), keep), kinds[0])
    try:
        return _taken(frame, codec, keep, signed)
    except FormatError as e:
        record = frame.record
        raise FormatError(
            f"version {frame.manifest.version}, frame at {record.offset} of "
            f"{frame.manifest.payload_key(record.payload)}: {e}"
        ) from e


def _taken(frame: FetchedFrame, codec: BlockCodec, keep: np.ndarray, signed: bool) -> TileBlocks:
    record = frame.record
    words = frame.schema.tile_words(record.tensor_ids, record.tiles)
    shape = FrameShape(record.word_nbytes, record.tensor_ids, record.tiles, words, record.num_changed)
    bounds, nbytes, stored, blocks = codec.table(shape, frame.stored, record.plane_nbytes)
    tile_of, begin = _places(words.astype(np.int64) * record.word_nbytes, bounds)
    plain = np.diff(bounds)
    data = np.frombuffer(blocks, np.uint8)
    ends = np.cumsum(nbytes)
    mine = keep[tile_of]
    if not mine.all():
        data = np.concatenate([data[a:b] for a, b in _spans(ends - nbytes, ends, mine)])
        nbytes, stored, plain, begin = nbytes[mine], stored[mine], plain[mine], begin[mine]
        tile_of = (np.cumsum(keep) - 1)[tile_of[mine]]
    encoded = (nbytes > 0) & ~stored
    if not signed and encoded.any():
        starts = np.cumsum(nbytes) - nbytes
        walk_blocks(codec.kind, data, starts[encoded], nbytes[encoded], plain[encoded])
    sizes = words[keep].astype(np.int64) * record.word_nbytes
    share = int(words[keep].sum(dtype=np.int64)) / max(int(words.sum(dtype=np.int64)), 1)
    return TileBlocks(
        codec.kind,
        record.layer,
        record.word_nbytes,
        record.tensor_ids[keep],
        record.tiles[keep],
        sizes,
        round(record.num_changed * share),
        tile_of,
        begin,
        plain,
        nbytes,
        stored,
        data,
    )


def _transcoded(frame: FetchedFrame, entries: Entries, kind: BlockKind) -> TileBlocks:
    w = entries.word_nbytes
    sizes = entries.tile_words.astype(np.int64) * w
    bounds = block_bounds(entries.tile_words, w)
    flat = np.repeat((np.cumsum(sizes) - sizes) // w, entries.counts) + entries.positions
    positions, values = byte_changes(flat, entries.values)
    if len(positions) * ZERO_RUN_MAX_DENSITY_INVERSE <= int(bounds[-1]):
        encoded = _smaller(encode_entries(kind, positions, values, bounds), positions, values, bounds)
    else:
        encoded = encode_blocks(kind, mask_of(entries).view(np.uint8), bounds)
    present = encoded.num_changed > 0
    nbytes = np.where(present, np.diff(encoded.bounds), 0)
    spans = _spans(encoded.bounds[:-1], encoded.bounds[1:], present)
    tile_of, begin = _places(sizes, bounds)
    return TileBlocks(
        kind,
        frame.record.layer,
        w,
        entries.tensor_ids,
        entries.tiles,
        sizes,
        entries.num_changed,
        tile_of,
        begin,
        np.diff(bounds),
        nbytes,
        encoded.stored & present,
        np.concatenate([np.empty(0, np.uint8), *(encoded.data[a:b] for a, b in spans)]),
    )


def _smaller(encoded: EncodedBlocks, positions: np.ndarray, values: np.ndarray, bounds: np.ndarray) -> EncodedBlocks:
    """The same blocks, those that are not smaller than their mask replaced by it."""
    large = np.flatnonzero(np.diff(encoded.bounds) >= np.diff(bounds))
    if not len(large):
        return encoded
    parts = [encoded.block(i) for i in range(len(encoded))]
    stored = np.zeros(len(encoded), dtype=bool)
    for i in large.tolist():
        inside = slice(*np.searchsorted(positions, bounds[i : i + 2]).tolist())
        mask = np.zeros(int(bounds[i + 1] - bounds[i]), dtype=np.uint8)
        mask[positions[inside] - bounds[i]] = values[inside]
        parts[i], stored[i] = mask, True
    ends = np.cumsum([0, *(len(p) for p in parts)], dtype=np.int64)
    return EncodedBlocks(np.concatenate(parts), ends, encoded.num_changed, stored)


def _kept(entries: Entries, keep: np.ndarray) -> Entries:
    if keep.all():
        return entries
    mine = np.repeat(keep, entries.counts)
    return Entries(
        entries.word_nbytes,
        entries.tensor_ids[keep],
        entries.tiles[keep],
        entries.tile_words[keep],
        entries.counts[keep],
        entries.positions[mine],
        entries.values[mine],
    )


def _places(tile_nbytes: np.ndarray, bounds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Tile of each block, and where the block begins in the tile's mask."""
    num = -(-tile_nbytes // BLOCK_NBYTES)
    tile_of = np.repeat(np.arange(len(tile_nbytes)), num)
    return tile_of, bounds[:-1] - (np.cumsum(tile_nbytes) - tile_nbytes)[tile_of]


def _spans(starts: np.ndarray, stops: np.ndarray, chosen: np.ndarray) -> list[tuple[int, int]]:
    """Stretches of consecutive chosen blocks, in bytes."""
    first, last = chosen.copy(), chosen.copy()
    first[1:] &= ~chosen[:-1]
    last[:-1] &= ~chosen[1:]
    return list(zip(starts[first].tolist(), stops[last].tolist(), strict=True))
