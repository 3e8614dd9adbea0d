"""``megasync diff``: a publication from two checkpoints on disk, streamed tile by tile.

The same tiles, frames and digests as a trainer would publish. Memory is bounded by one frame and the frame table.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np

from megasync.codecs.choice import check_codec
from megasync.codecs.planes import LEVEL, LIBRARY
from megasync.digest import XXH3_128, box_lanes, content_digest
from megasync.errors import (
    BaseMismatchError,
    FormatError,
    MegasyncError,
    SchemaMismatchError,
    SinkConflictError,
)
from megasync.frames import FrameRecord, make_table
from megasync.manifest import Head, Manifest, check_run, decode_manifest, manifest_key, payload_key
from megasync.schema import Schema, make_schema, require_same
from megasync.sinks.base import Sink
from megasync.sinks.local import LocalSink
from megasync.types import Lanes
from megasync.versions.anchor import publish_checkpoint
from megasync.versions.changes import TileChange, compact, cut_frames, mask_frame
from megasync.versions.checkpoint import Checkpoint, specs_of
from megasync.versions.encode import encode_one
from megasync.versions.head import claim_seen, look, move_head, write_manifest
from megasync.versions.lineage import Lineage, start_lineage
from megasync.versions.publication import PublicationReader

_CREATE_S = 7 * 86_400.0  # the payload is made while it is written, and that takes as long as it takes
_STALE_S = 6 * 3600.0  # what a writer has not touched for so long, it left behind
_ATTEMPTS = 8


@dataclass(frozen=True, slots=True)
class DiffResult:
    """What was published.

    Attributes:
        run: Run.
        version: New version.
        base_version: Version of the base checkpoint.
        num_changed: Changed words.
        density: Changed bytes over all bytes, counting a changed word whole.
        payload_nbytes: Bytes of the payload.
        full_nbytes: Bytes of the new checkpoint's tensors.
        num_frames: Frames.
    """

    run: str
    version: int
    base_version: int
    num_changed: int
    density: float
    payload_nbytes: int
    full_nbytes: int
    num_frames: int


def schema_of(run: str, checkpoint: Checkpoint) -> Schema:
    """The schema of a checkpoint by naming convention.

    Raises:
        ValueError: The run's name cannot be part of a key.
        FormatError: The checkpoint has tensors that the format cannot carry.
    """
    check_run(run)
    try:
        return make_schema(run, specs_of(checkpoint))
    except ValueError as e:
        raise FormatError(f"{checkpoint.path} cannot be published: {e}; nothing was written") from e


def state_sums(schema: Schema, checkpoint: Checkpoint) -> np.ndarray:
    """Digest sums of every tensor of a checkpoint, read tile by tile: u64 ``[num_tensors, 2]``."""
    sums = np.zeros((len(schema.tensors), 2), dtype=np.uint64)
    for i, spec in enumerate(schema.tensors):
        grid = schema.grids[i]
        total = Lanes()
        for tile in range(grid.num_tiles):
            total += box_lanes(grid.shape, grid.box(tile), checkpoint.tile(spec.name, grid, tile))
        sums[i] = total.a, total.b
    return sums


def diff(base_dir: Path, new_dir: Path, sink: Sink, *, run: str = "run", codec: str = "sparse") -> DiffResult:
    """Publish the difference of two checkpoints.

    A fresh run gets the base as version 0, named by its state digests. An existing run's head must be the base.

    Args:
        base_dir: Checkpoint directory or file.
        new_dir: The same tensors, other bytes.
        sink: Where to publish.
        run: Name of the run.
        codec: Codec name or ``auto``.

    Raises:
        FormatError: A checkpoint is broken, or has tensors that the format cannot carry; nothing was written.
        SchemaMismatchError: The two are not one model, or not the run's.
        BaseMismatchError: The run's head is not the base.
        RetryError: The run's head was lost, its versions are there; or the sink does not answer.
        ValueError: The run is signed, or the sink is the folder of one of the checkpoints.
        SinkConflictError: Another publisher has the run; what this one wrote of the new version was removed.
    """
    check_codec(codec)
    for place in (base_dir, new_dir):
        if isinstance(sink, LocalSink) and Path(sink.directory).resolve() == place.resolve():
            raise ValueError(f"the sink is the folder of checkpoint {place}: give another folder. Nothing was written")
    with Checkpoint(base_dir) as base, Checkpoint(new_dir) as new:
        schema = schema_of(run, base)
        _require_same_model(schema, base, new)
        lineage = _lineage(schema, base, sink, run)
        payload = _Payload(schema, base, new, codec)
        manifest, nbytes = _publish(sink, lineage, payload)
    with suppress(MegasyncError, ValueError):
        sink.sweep(min_age_s=_STALE_S)
    return DiffResult(
        run,
        manifest.version,
        manifest.base_version,
        manifest.num_changed,
        payload.changed_nbytes / max(schema.nbytes, 1),
        nbytes,
        schema.nbytes,
        len(manifest.frames),
    )


def _require_same_model(schema: Schema, base: Checkpoint, new: Checkpoint) -> None:
    missing = sorted(base.tensors.keys() - new.tensors.keys())
    extra = sorted(new.tensors.keys() - base.tensors.keys())
    other = [
        f"{n}: {base.tensors[n].dtype}{list(base.tensors[n].shape)} and {new.tensors[n].dtype}{list(new.tensors[n].shape)}"
        for n in sorted(base.tensors.keys() & new.tensors.keys())
        if (base.tensors[n].dtype, base.tensors[n].shape) != (new.tensors[n].dtype, new.tensors[n].shape)
    ]
    if missing or extra or other:
        raise SchemaMismatchError(
            f"{base.path} and {new.path} are not one model: {len(missing)} tensors only in the first {missing[:5]}, "
            f"{len(extra)} only in the second {extra[:5]}, {len(other)} of another dtype or shape {other[:5]}"
        )


def root_of_sums(schema: Schema, sums: np.ndarray) -> bytes:
    """Root digest of a checkpoint by its digest sums."""
    return content_digest(start_lineage(schema, Head(schema.run, 0, 0, b"", 0), sums).states.tobytes(), XXH3_128)


def _lineage(schema: Schema, base: Checkpoint, sink: Sink, run: str) -> Lineage:
    """Claim the run; its head must be the base, which a fresh run gets as version 0.

    Only a head that is still the one that was looked at is claimed: who can not go on must not fence off who can.
    """
    reader = PublicationReader(sink, run)
    sums: np.ndarray | None = None
    for _ in range(_ATTEMPTS):
        seen = look(sink, run)
        at = seen.head
        newest = reader.manifest(at.version, at.epoch, at.digest) if at.version >= 0 else None
        if newest is not None:
            require_same(schema, reader.schema(newest.schema_digest))
            if newest.is_signed:
                raise ValueError(
                    f"run {run!r} is signed, and this command has no key: an unsigned version would stop every reader and "
                    "publisher that has one. Publish with its trainer, or under another --run"
                )
        if sums is None:
            sums = state_sums(schema, base)
        if newest is not None and (root := root_of_sums(schema, sums)) != newest.root:
            raise BaseMismatchError(
                f"run {run!r} is at version {newest.version} with root {newest.root.hex()}, {base.path} has root "
                f"{root.hex()}: give the checkpoint of that version as base (megasync apply makes it), or another --run"
            )
        try:
            lineage = start_lineage(schema, claim_seen(sink, seen), sums)
        except SinkConflictError:
            continue
        return lineage if newest is not None else publish_checkpoint(sink, lineage)
    raise SinkConflictError(f"run {run!r}: its head moved {_ATTEMPTS} times in a row: other publishers have the run")


def _publish(sink: Sink, lineage: Lineage, payload: _Payload) -> tuple[Manifest, int]:
    """Payload, manifest, head; where the version will surely never be published, nothing of it is left."""
    run, version = lineage.schema.run, lineage.version + 1
    mine: list[str] = []
    try:
        nbytes = 0
        if (first := next(payload, None)) is not None:
            mine.append(payload_key(run, version, lineage.head.fence, 0))
            nbytes = sink.create(mine[-1], chain((first,), payload), timeout_s=_CREATE_S)
        manifest = _manifest(lineage, payload, version, nbytes)
        decode_manifest(manifest.encoded, lineage.schema, digest=manifest.digest)
        mine.append(manifest_key(run, version, manifest.epoch))
        write_manifest(sink, manifest)
    except SinkConflictError:
        _remove(sink, mine[:-1])  # the last one exists and is another publisher's
        raise
    except BaseException:
        _remove(sink, mine)
        raise
    try:
        move_head(sink, lineage.head, manifest)
    except SinkConflictError:
        _remove(sink, mine)
        raise
    return manifest, nbytes


def _remove(sink: Sink, keys: list[str]) -> None:
    for key in keys:
        with suppress(MegasyncError, ValueError):
            sink.delete(key)


class _Payload(Iterator[bytes]):
    """The payload's bytes as they are made; keeps records and digest sums."""

    def __init__(self, schema: Schema, base: Checkpoint, new: Checkpoint, codec: str) -> None:
        self.records: list[FrameRecord] = []
        self.change = np.zeros((len(schema.tensors), 2), dtype=np.uint64)
        self.touched_old = np.zeros_like(self.change)
        self.changed_nbytes = 0
        self._parts = self._make(schema, base, new, codec)

    def __next__(self) -> bytes:
        return next(self._parts)

    def _make(self, schema: Schema, base: Checkpoint, new: Checkpoint, codec: str) -> Iterator[bytes]:
        offset = 0
        for tiles in cut_frames(schema, _changed_tiles(schema, base, new)):
            frame = mask_frame(schema, tiles)
            encoded, record = encode_one(frame, codec, offset)
            offset += encoded.nbytes
            self.records.append(record)
            self.changed_nbytes += frame.entries.num_changed * frame.entries.word_nbytes
            for table, sums in ((self.change, frame.change), (self.touched_old, frame.touched_old)):
                for tensor_id, lanes in sums.items():
                    table[tensor_id] += np.array([lanes.a, lanes.b], dtype=np.uint64)
            yield from encoded.planes


def _changed_tiles(schema: Schema, base: Checkpoint, new: Checkpoint) -> Iterator[TileChange]:
    for tensor_id, spec in enumerate(schema.tensors):
        grid = schema.grids[tensor_id]
        for tile in range(grid.num_tiles):
            old = np.ascontiguousarray(base.tile(spec.name, grid, tile)).reshape(-1)
            now = np.ascontiguousarray(new.tile(spec.name, grid, tile)).reshape(-1)
            index = compact(old, now)
            if len(index):
                yield TileChange(tensor_id, tile, index, old[index], now[index])


def _manifest(lineage: Lineage, payload: _Payload, version: int, nbytes: int) -> Manifest:
    schema, after = lineage.schema, lineage.after(payload.change)
    table = make_table(payload.records)
    touched = np.unique(table.runs["tensor_id"]).astype("<u4")
    states = after.states
    return Manifest(
        what="delta",
        run=schema.run,
        epoch=lineage.head.fence,
        version=version,
        base_version=lineage.version,
        base_digest=lineage.digest,
        schema_digest=schema.digest,
        payload_nbytes=(nbytes,) if nbytes else (),
        frames=table,
        touched_ids=touched,
        new_states=states[touched],
        touched_olds=payload.touched_old.view(np.uint8).reshape(-1, 16)[touched],
        root=content_digest(states.tobytes(), XXH3_128),
        num_changed=sum(r.num_changed for r in payload.records),
        outer=f"{LIBRARY} level {LEVEL}",
        info={"density": payload.changed_nbytes / max(schema.nbytes, 1)},
    )
