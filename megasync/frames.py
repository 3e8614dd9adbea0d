"""The frame table of a manifest: binary columns on the wire, numpy arrays in memory.

A frame is one unit of codec work: consecutive tiles of one owner in one layer and one word size. Its record names no
rank. Raw plane lengths follow from tiles and counts and are never stored. Must import nothing above schema.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import msgspec
import numpy as np

from megasync.errors import FormatError
from megasync.schema import Schema
from megasync.tiles import bounds_of, stretch_of, strides
from megasync.types import SEGMENT_WORDS

MAX_FRAMES = 1 << 24
MAX_LISTED_TILES = 1 << 26
"""Tiles over all frames, each as often as it is listed: what a reader unpacks from the bitmaps."""
MAX_SPANNED_TILES = 1 << 30
"""Bits of the bitmaps over all runs."""
ANCHOR_CODEC = 8
"""Codec id of full bytes; only there a frame may be all zero."""
MAX_FRAME_NBYTES = 64 << 20
"""Weights that a frame may carry; a tile is never larger (``schema.MAX_BLOCK_WORDS``)."""

_FRAME_COLUMNS = {
    "payload": "<u4",
    "offset": "<u8",
    "codec": "u1",
    "word_nbytes": "u1",
    "num_changed": "<u4",
    "layer": "<i4",
    "num_planes": "u1",
    "num_runs": "<u4",
}
_SEGMENT_SHIFT = SEGMENT_WORDS.bit_length() - 1
_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)).reshape(256, 8).sum(axis=1, dtype=np.uint8)
_RUN_COLUMNS = {"tensor_id": "<u4", "first_tile": "<u4", "num_tiles": "<u4"}


@dataclass(frozen=True, slots=True)
class FrameRecord:
    """One frame, ready for the table (a payload's writer adds payload id and offset).

    Attributes:
        payload: Payload index in the manifest.
        offset: Byte offset in the payload.
        codec: Codec id.
        word_nbytes: Word size of every tile of the frame.
        layer: Layer of every tile of the frame.
        num_changed: Changed words.
        plane_nbytes: Stored length of each plane.
        digest: Digest of the stored bytes.
        tensor_ids: u32 ``[T]`` touched tiles, ascending by (tensor id, tile).
        tiles: u32 ``[T]``.
    """

    payload: int
    offset: int
    codec: int
    word_nbytes: int
    layer: int
    num_changed: int
    plane_nbytes: tuple[int, ...]
    digest: bytes
    tensor_ids: np.ndarray
    tiles: np.ndarray

    @property
    def nbytes(self) -> int:
        """Stored bytes."""
        return sum(self.plane_nbytes)


class FrameColumns(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The table on the wire: each field is a packed little-endian column."""

    payload: memoryview
    offset: memoryview
    codec: memoryview
    word_nbytes: memoryview
    num_changed: memoryview
    layer: memoryview
    num_planes: memoryview
    num_runs: memoryview
    plane_nbytes: memoryview
    digest: memoryview
    tensor_id: memoryview
    first_tile: memoryview
    num_tiles: memoryview
    bitmap: memoryview


@dataclass(frozen=True)
class FrameTable:
    """All frames of a publication.

    Attributes:
        columns: Frame columns by name, one numpy array each, ``[F]``.
        plane_nbytes: u32, planes of all frames in order.
        digests: uint8 ``[F, 16 or 32]``.
        runs: Run columns by name, ``[R]``.
        bitmap: uint8, each run's touched tiles, bit 0 first, padded to whole bytes.
    """

    columns: dict[str, np.ndarray]
    plane_nbytes: np.ndarray
    digests: np.ndarray
    runs: dict[str, np.ndarray]
    bitmap: np.ndarray
    _memo: dict[str, object] = field(default_factory=dict, repr=False, compare=False)

    def __len__(self) -> int:
        return len(self.columns["codec"])

    @cached_property
    def touched(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Frame number, tensor id and tile number of every touched tile of every frame, in order."""
        return (stretch_of(self.tile_bounds), *self.tiles)

    @cached_property
    def tiles(self) -> tuple[np.ndarray, np.ndarray]:
        """Tensor id and tile number of every touched tile of every frame, in order: ``touched`` without the frames."""
        run_nbytes = (self.runs["num_tiles"].astype(np.int64) + 7) // 8
        byte, tile = bounds_of(run_nbytes), bounds_of(self._num_touched)
        # Before the first bit of each run come so many others; its tiles are numbered from ``first_tile`` on.
        shift = self.runs["first_tile"].astype(np.int64) - 8 * byte[:-1]
        total = int(tile[-1])
        ids, tiles = np.empty(total, dtype="<u4"), np.empty(total, dtype=np.uint32)
        for first, last in strides(tile):
            here, num = slice(int(tile[first]), int(tile[last])), self._num_touched[first:last]
            bits = np.flatnonzero(np.unpackbits(self.bitmap[byte[first] : byte[last]], bitorder="little"))
            ids[here] = np.repeat(self.runs["tensor_id"][first:last], num)
            tiles[here] = bits + np.repeat(shift[first:last] + 8 * byte[first], num)
        return ids, tiles

    @cached_property
    def _num_touched(self) -> np.ndarray:
        """Touched tiles of each run, int64."""
        byte = bounds_of((self.runs["num_tiles"].astype(np.int64) + 7) // 8)
        return np.diff(bounds_of(_BITS[self.bitmap])[byte])

    @cached_property
    def tile_bounds(self) -> np.ndarray:
        """Rows of ``touched`` by frame: frame ``i`` has those from ``[i]`` to ``[i + 1]``."""
        return bounds_of(self._num_touched)[bounds_of(self.columns["num_runs"])]

    @cached_property
    def plane_bounds(self) -> np.ndarray:
        """Rows of ``plane_nbytes`` by frame, as ``tile_bounds``."""
        return bounds_of(self.columns["num_planes"])

    @cached_property
    def nbytes(self) -> np.ndarray:
        """Stored bytes of each frame, int64 ``[F]``."""
        return np.diff(bounds_of(self.plane_nbytes)[self.plane_bounds])

    def record(self, i: int) -> FrameRecord:
        """Frame ``i``."""
        tiles, planes, digests, columns = self._rows
        a, b = tiles[i], tiles[i + 1]
        size = self.digests.shape[1]
        payload, offset, codec, word_nbytes, layer, num_changed = (c[i] for c in columns)
        return FrameRecord(
            payload,
            offset,
            codec,
            word_nbytes,
            layer,
            num_changed,
            tuple(self.plane_nbytes[planes[i] : planes[i + 1]].tolist()),
            digests[i * size : (i + 1) * size],
            self.tiles[0][a:b],
            self.tiles[1][a:b],
        )

    @cached_property
    def _rows(self) -> tuple[list[int], list[int], bytes, list[list[int]]]:
        """Plain numbers of all frames: picking them one by one out of arrays is most of what a record would cost."""
        names = ("payload", "offset", "codec", "word_nbytes", "layer", "num_changed")
        return (
            self.tile_bounds.tolist(),
            self.plane_bounds.tolist(),
            self.digests.tobytes(),
            [self.columns[n].tolist() for n in names],
        )

    def to_columns(self) -> FrameColumns:
        """The wire form."""
        frame = {k: memoryview(self.columns[k].astype(t).tobytes()) for k, t in _FRAME_COLUMNS.items()}
        run = {k: memoryview(self.runs[k].astype(t).tobytes()) for k, t in _RUN_COLUMNS.items()}
        return FrameColumns(
            **frame,
            **run,
            plane_nbytes=memoryview(self.plane_nbytes.astype("<u4").tobytes()),
            digest=memoryview(self.digests.tobytes()),
            bitmap=memoryview(self.bitmap.tobytes()),
        )


def make_table(records: Sequence[FrameRecord], digest_nbytes: int = 16) -> FrameTable:
    """A table of records, in the order given."""
    frame = {
        "payload": [r.payload for r in records],
        "offset": [r.offset for r in records],
        "codec": [r.codec for r in records],
        "word_nbytes": [r.word_nbytes for r in records],
        "num_changed": [r.num_changed for r in records],
        "layer": [r.layer for r in records],
        "num_planes": [len(r.plane_nbytes) for r in records],
    }
    runs, bitmap, num_runs = _runs_of(records)
    columns = {k: np.array(v, dtype=_FRAME_COLUMNS[k]) for k, v in frame.items()}
    return FrameTable(
        columns | {"num_runs": num_runs.astype(_FRAME_COLUMNS["num_runs"])},
        np.array([n for r in records for n in r.plane_nbytes], dtype="<u4"),
        np.frombuffer(b"".join(r.digest for r in records), np.uint8).reshape(len(records), digest_nbytes),
        runs,
        bitmap,
    )


def _runs_of(records: Sequence[FrameRecord]) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """Run columns, bitmap, and the number of runs of each record: over arrays, since a trainer's steps wait for Python."""
    num_tiles = np.array([len(r.tiles) for r in records], dtype=np.int64)
    if not num_tiles.sum():
        return {k: np.empty(0, t) for k, t in _RUN_COLUMNS.items()}, np.empty(0, np.uint8), np.zeros_like(num_tiles)
    frame = np.repeat(np.arange(len(records)), num_tiles)
    ids = np.concatenate([r.tensor_ids for r in records])
    tiles = np.concatenate([r.tiles for r in records]).astype(np.int64)
    begin = np.flatnonzero(np.append(True, (frame[1:] != frame[:-1]) | (ids[1:] != ids[:-1])))
    end = np.append(begin[1:], len(ids))
    first, span = tiles[begin], tiles[end - 1] - tiles[begin] + 1
    nbytes = (span + 7) // 8
    # Bits before the first tile of each run, as tiles of the run are numbered.
    shift = 8 * (np.cumsum(nbytes) - nbytes) - first
    bits = np.zeros(8 * int(nbytes.sum()), dtype=np.uint8)
    bits[tiles + np.repeat(shift, end - begin)] = 1
    found = {"tensor_id": ids[begin], "first_tile": first, "num_tiles": span}
    runs = {k: found[k].astype(t) for k, t in _RUN_COLUMNS.items()}
    return runs, np.packbits(bits, bitorder="little"), np.bincount(frame[begin], minlength=len(records))


def read_table(columns: FrameColumns, schema: Schema, payload_nbytes: Sequence[int], digest_nbytes: int) -> FrameTable:
    """Check a table from the wire against schema and payload sizes.

    Raises:
        FormatError: On the first rule that is broken, with the frame concerned.
    """

    def column(name: str, dtype: str) -> np.ndarray:
        data = getattr(columns, name)
        if len(data) % np.dtype(dtype).itemsize:
            raise FormatError(f"frame table column {name}: {len(data)} bytes are no whole number of {dtype}")
        return np.frombuffer(data, dtype)

    frame = {k: column(k, t) for k, t in _FRAME_COLUMNS.items()}
    runs = {k: column(k, t) for k, t in _RUN_COLUMNS.items()}
    planes, bitmap = column("plane_nbytes", "<u4"), column("bitmap", "u1")
    num = len(frame["codec"])
    _require(num <= MAX_FRAMES, f"{num} frames, at most {MAX_FRAMES}")
    for k, v in frame.items():
        _require(len(v) == num, f"column {k} has {len(v)} rows, codec has {num}")
    for k, v in runs.items():
        _require(
            len(v) == len(runs["tensor_id"]), f"column {k} has {len(v)} rows, tensor_id has {len(runs['tensor_id'])}"
        )
    _require(
        len(columns.digest) == num * digest_nbytes, f"digest column has {len(columns.digest)} bytes for {num} frames"
    )
    _require(int(frame["num_runs"].sum(dtype=np.int64)) == len(runs["tensor_id"]), "runs do not add up")
    _require(int(frame["num_planes"].sum(dtype=np.int64)) == len(planes), "planes do not add up")
    _require(bool((frame["num_runs"] > 0).all()), "a frame has no tiles")
    _require(
        bool(((frame["num_changed"] > 0) | (frame["codec"] == ANCHOR_CODEC)).all()),
        "a frame has no changed words; unchanged frames are absent",
    )
    num_tiles = runs["num_tiles"].astype(np.int64)
    _require(bool((num_tiles > 0).all()), "a run has no tiles")
    _require(int(num_tiles.sum()) <= MAX_SPANNED_TILES, f"runs span more than {MAX_SPANNED_TILES} tiles")
    _require(int(((num_tiles + 7) // 8).sum()) == len(bitmap), "bitmaps do not add up")
    _require(
        int(_BITS[bitmap].sum(dtype=np.int64)) <= MAX_LISTED_TILES, f"more than {MAX_LISTED_TILES} tiles are listed"
    )
    ids = runs["tensor_id"]
    _require(
        not len(ids) or int(ids.max()) < len(schema.tensors), f"tensor id past the {len(schema.tensors)} of the schema"
    )
    grid_tiles = schema.num_tiles[ids]
    beyond = runs["first_tile"].astype(np.int64) + num_tiles > grid_tiles
    if beyond.any():
        i = int(np.argmax(beyond))
        raise FormatError(f"frame table: a run of {schema.tensors[int(ids[i])].name} passes its {grid_tiles[i]} tiles")
    table = FrameTable(frame, planes, np.frombuffer(columns.digest, np.uint8).reshape(num, digest_nbytes), runs, bitmap)
    _check_bitmaps(table)
    _check_frames(table, schema, payload_nbytes)
    _check_sizes(table, schema)
    return table


def _require(good: bool, what: str) -> None:
    if not good:
        raise FormatError(f"frame table: {what}")


def _check_bitmaps(table: FrameTable) -> None:
    """First and last bit of each run are set, padding bits are not."""
    num_tiles = table.runs["num_tiles"].astype(np.int64)
    nbytes = (num_tiles + 7) // 8
    stop = np.cumsum(nbytes)
    if not len(stop):
        return
    _require(bool((table.bitmap[stop - nbytes] & 1).all()), "a run's bitmap does not start with a touched tile")
    top = (num_tiles - 1) % 8
    _require(bool((table.bitmap[stop - 1] >> top == 1).all()), "a run's bitmap does not end with a touched tile")


def _check_frames(table: FrameTable, schema: Schema, payload_nbytes: Sequence[int]) -> None:
    """Order, layer, word size, length and place of every frame."""
    frame = stretch_of(bounds_of(table.columns["num_runs"]))
    ids = table.runs["tensor_id"]
    same = frame[1:] == frame[:-1]
    _require(not (same & (ids[1:] <= ids[:-1])).any(), "tensor ids of a frame do not ascend")
    _require(bool((schema.layers[ids] == table.columns["layer"][frame]).all()), "a frame has a tensor of another layer")
    _require(
        bool((schema.word_nbytes[ids] == table.columns["word_nbytes"][frame]).all()),
        "a frame has a tensor of another word size",
    )
    if schema.frozen[ids].any():
        raise FormatError("frame table: a frozen tensor is touched")
    sizes = np.array(payload_nbytes, dtype=np.int64)
    payload = table.columns["payload"].astype(np.int64)
    _require(not len(payload) or int(payload.max()) < len(sizes), f"payload id past the {len(sizes)} of the manifest")
    # Offsets are u64 on the wire: compare before adding, so that nothing wraps.
    offset = table.columns["offset"]
    inside = (offset <= sizes[payload].astype(np.uint64)) if len(payload) else np.ones(0, bool)
    _require(bool(inside.all()), "a frame starts past the end of its payload")
    _require(
        bool((offset.astype(np.int64) + table.nbytes <= sizes[payload]).all()) if len(payload) else True,
        "a frame passes the end of its payload",
    )
    _check_places(payload, offset.astype(np.int64), table.nbytes)


def _check_places(payload: np.ndarray, offset: np.ndarray, nbytes: np.ndarray) -> None:
    """No two frames share a byte of a payload."""
    stop = offset + nbytes
    order = np.lexsort((stop, offset, payload))
    ahead, after = order[:-1], order[1:]
    shared = (payload[ahead] == payload[after]) & (stop[ahead] > offset[after])
    if shared.any():
        i = int(np.argmax(shared))
        a, b = sorted((int(ahead[i]), int(after[i])))
        raise FormatError(
            f"frame table: frames {a} and {b} overlap in payload {payload[a]}: bytes {offset[a]} to {stop[a]} and "
            f"{offset[b]} to {stop[b]}"
        )


def _check_sizes(table: FrameTable, schema: Schema) -> None:
    """What a frame decodes to and what is stored of it are bounded: nothing is allocated by what a hostile table says."""
    if not len(table):
        return
    words = schema.tile_words(*table.tiles)
    # Every frame has tiles, and those of a frame lie together: sums over stretches, since this is part of every update.
    first = table.tile_bounds[:-1]
    # Cast before they are added, as in ``bounds_of``.
    weights = np.add.reduceat(words.astype(np.int64), first) * table.columns["word_nbytes"]
    _require(bool((weights <= MAX_FRAME_NBYTES).all()), f"a frame has more than {MAX_FRAME_NBYTES} bytes of weights")
    # No codec stores more than the mask and one u32 a segment or block.
    in_tiles = (words >> np.uint32(_SEGMENT_SHIFT)) + (words % SEGMENT_WORDS > 0)
    segments = np.add.reduceat(in_tiles.astype(np.int64), first)
    most = weights + 4 * segments
    _require(bool((table.nbytes <= most).all()), "a frame stores more than its whole mask")
