"""Encode: frames of changed words to stored bytes and frame records, and the digest sums that go with them.

Between mask and gather (plan -> snapshot -> mask -> encode -> gather -> publish); runs behind the training loop, and in the
tools. No torch. Must not import trainer, receiver or a sink.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import msgspec
import numpy as np

from megasync.codecs.base import EncodedFrame, FrameShape
from megasync.codecs.choice import encode_frame
from megasync.codecs.registry import codec_by_id
from megasync.digest import XXH3_128, content_digest
from megasync.frames import FrameColumns, FrameRecord, FrameTable, make_table
from megasync.schema import Schema
from megasync.types import Entries, Lanes
from megasync.versions.changes import MaskedFrame


@dataclass(frozen=True, slots=True)
class EncodedDelta:
    """What one rank contributes to a publication.

    Attributes:
        records: Frame records; ``payload`` is 0 and ``offset`` is relative to this rank's bytes.
        parts: Stored planes of all frames in order.
        touched: Per tensor id: digest sum of new minus old, and of the old values at the changed words.
    """

    records: tuple[FrameRecord, ...]
    parts: tuple[bytes, ...]
    touched: dict[int, tuple[Lanes, Lanes]]

    @property
    def nbytes(self) -> int:
        """Stored bytes."""
        return sum(r.nbytes for r in self.records)

    @property
    def num_changed(self) -> int:
        """Changed words."""
        return sum(r.num_changed for r in self.records)


def encode_one(
    frame: MaskedFrame, codec: str, offset: int, algorithm: int = XXH3_128
) -> tuple[EncodedFrame, FrameRecord]:
    """Encode one frame that starts at ``offset`` of its payload; the record's payload id is 0."""
    encoded = encode_frame(codec, frame.entries)
    record = FrameRecord(
        0,
        offset,
        encoded.codec,
        frame.entries.word_nbytes,
        frame.layer,
        frame.entries.num_changed,
        encoded.plane_nbytes,
        content_digest(encoded.planes, algorithm),
        frame.entries.tensor_ids,
        frame.entries.tiles,
    )
    return encoded, record


def encode(frames: Iterable[MaskedFrame], codec: str, algorithm: int = XXH3_128) -> EncodedDelta:
    """Encode the frames of one rank.

    Args:
        frames: From the mask stage.
        codec: Codec name or ``auto``.
        algorithm: Digest algorithm of the format.
    """
    records: list[FrameRecord] = []
    parts: list[bytes] = []
    touched: dict[int, tuple[Lanes, Lanes]] = {}
    offset = 0
    for frame in frames:
        encoded, record = encode_one(frame, codec, offset, algorithm)
        records.append(record)
        parts += encoded.planes
        offset += encoded.nbytes
        for tensor_id, change in frame.change.items():
            before = touched.get(tensor_id, (Lanes(), Lanes()))
            touched[tensor_id] = (before[0] + change, before[1] + frame.touched_old[tensor_id])
    return EncodedDelta(tuple(records), tuple(parts), touched)


def entries_of(schema: Schema, delta: EncodedDelta) -> Iterator[Entries]:
    """Decode this rank's own frames again, to withdraw them from the snapshot."""
    at = 0
    for record in delta.records:
        planes = delta.parts[at : at + len(record.plane_nbytes)]
        at += len(planes)
        shape = FrameShape(
            record.word_nbytes,
            record.tensor_ids,
            record.tiles,
            schema.tile_words(record.tensor_ids, record.tiles),
            record.num_changed,
        )
        yield codec_by_id(record.codec).decode(shape, memoryview(b"".join(planes)), record.plane_nbytes)


class _Contribution(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    nbytes: int
    frames: FrameColumns
    ids: bytes
    change: bytes
    touched_old: bytes


def describe(delta: EncodedDelta, digest_nbytes: int) -> bytes:
    """The metadata of a contribution, for the head writer: frame table and digest sums."""
    ids = sorted(delta.touched)
    columns = [np.array([(x.a, x.b) for x in (delta.touched[i][k] for i in ids)], dtype="<u8") for k in (0, 1)]
    return msgspec.msgpack.encode(
        _Contribution(
            delta.nbytes,
            make_table(delta.records, digest_nbytes).to_columns(),
            np.array(ids, dtype="<u4").tobytes(),
            columns[0].tobytes(),
            columns[1].tobytes(),
        )
    )


@dataclass(frozen=True, slots=True)
class Contribution:
    """The metadata of one rank's part, on the head writer.

    Attributes:
        nbytes: Stored bytes.
        columns: Frame table on the wire.
        ids: u32 ``[K]``, touched tensors.
        change: u64 ``[K, 2]``, digest sums of new minus old.
        touched_old: u64 ``[K, 2]``, digest sums of old values.
    """

    nbytes: int
    columns: FrameColumns
    ids: np.ndarray
    change: np.ndarray
    touched_old: np.ndarray


def read_contribution(data: bytes | memoryview) -> Contribution:
    """The inverse of ``describe``."""
    c = msgspec.msgpack.decode(data, type=_Contribution)
    return Contribution(
        c.nbytes,
        c.frames,
        np.frombuffer(c.ids, "<u4"),
        np.frombuffer(c.change, "<u8").reshape(-1, 2),
        np.frombuffer(c.touched_old, "<u8").reshape(-1, 2),
    )


def merge_tables(tables: list[FrameTable], payload_of: list[int], offset_of: list[int]) -> FrameTable:
    """One table of the ranks' tables, with payload ids and offsets made absolute."""
    columns = {k: np.concatenate([t.columns[k] for t in tables]) for k in tables[0].columns}
    num = [len(t) for t in tables]
    columns["payload"] = np.repeat(np.array(payload_of, dtype="<u4"), num)
    columns["offset"] = columns["offset"] + np.repeat(np.array(offset_of, dtype="<u8"), num)
    return FrameTable(
        columns,
        np.concatenate([t.plane_nbytes for t in tables]),
        np.concatenate([t.digests for t in tables]),
        {k: np.concatenate([t.runs[k] for t in tables]) for k in tables[0].runs},
        np.concatenate([t.bitmap for t in tables]),
    )
