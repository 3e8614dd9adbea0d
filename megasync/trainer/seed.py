"""Seed: give the snapshot its first bytes, from what the engines really loaded, never from the trainer's values.

A fresh run starts from a checkpoint named by its state digests or from an anchor of the trainer's weights; a restarted
one rebuilds the head's version from the sink, or refuses. Comes between plan and the first mask. Must not import receiver
or an adapter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from megasync.digest import box_lanes, lanes_to_bytes
from megasync.errors import BaseMismatchError, NeedsAnchorError, PlanError, ReplicaDriftError, SchemaMismatchError
from megasync.frames import FrameRecord
from megasync.manifest import Manifest
from megasync.schema import Schema
from megasync.trainer.exporter import Piece
from megasync.trainer.mask import words_of
from megasync.trainer.snapshot import Snapshot
from megasync.types import Box, Entries, TensorSpec
from megasync.versions.checkpoint import Checkpoint
from megasync.versions.lineage import sum_rows
from megasync.versions.publication import PublicationReader, decode_frame

FrozenRow = tuple[int, tuple[int, ...], tuple[int, ...], int, int]
"""Tensor id, start and extent of a box, and its digest sums."""


def check_checkpoint(schema: Schema, checkpoint: Checkpoint) -> None:
    """Compare a checkpoint's names, dtypes and shapes with the schema's.

    Raises:
        SchemaMismatchError: Listing what differs; tensors that only the checkpoint has are no error (they are not
            trained).
    """
    wrong = []
    for spec in schema.tensors:
        name = find_name(checkpoint, spec)
        if name is None:
            wrong.append(f"{spec.name} is missing")
        else:
            found = checkpoint.tensors[name]
            if (found.dtype, found.shape) != (spec.dtype, spec.shape):
                wrong.append(
                    f"{spec.name} is {found.dtype}{list(found.shape)}, the trainer has {spec.dtype}{list(spec.shape)}"
                )
    if wrong:
        raise SchemaMismatchError(
            f"checkpoint {checkpoint.path.name} is not this model ({len(wrong)} tensors differ): "
            + "; ".join(wrong[:10])
        )


def find_name(checkpoint: Checkpoint, spec: TensorSpec) -> str | None:
    """The name under which a checkpoint has a tensor: its own or an alias."""
    return next((n for n in (spec.name, *spec.aliases) if n in checkpoint.tensors), None)


def fill_from_checkpoint(snapshot: Snapshot, checkpoint: Checkpoint) -> None:
    """Seed every region from a checkpoint that ``check_checkpoint`` accepted."""
    by_name = {t.name: t for t in snapshot.schema.tensors}
    snapshot.fill(lambda name, box: checkpoint.box(find_name(checkpoint, by_name[name]) or name, box))


def fill_from_live(snapshot: Snapshot) -> None:
    """Seed every region from live weights: version 0 of a fresh run without a checkpoint is the anchor of these."""
    snapshot.fill_live()


def fill_from_run(
    snapshot: Snapshot, reader: PublicationReader, newest: Manifest, checkpoint: Checkpoint | None
) -> None:
    """Rebuild the head's version: the last anchor or the checkpoint, then every delta since.

    Args:
        snapshot: To fill.
        reader: Of the run.
        newest: The head's manifest.
        checkpoint: Version 0, where the run started from one.

    Raises:
        NeedsAnchorError: No anchor, no checkpoint, or a broken chain.
    """
    chain = reader.chain(newest)
    first = chain[0]
    snapshot.clear()
    if first.what == "checkpoint":
        if checkpoint is None:
            raise NeedsAnchorError(
                f"run {reader.run!r} starts from a checkpoint (root {first.root.hex()}): give it again to restart"
            )
        check_checkpoint(snapshot.schema, checkpoint)
        fill_from_checkpoint(snapshot, checkpoint)
        chain = chain[1:]
    elif first.what == "delta":
        raise NeedsAnchorError(f"run {reader.run!r}: the chain of version {newest.version} reaches no anchor")
    for manifest in chain:
        for entries in owned_entries(snapshot, reader, manifest):
            snapshot.xor_(entries)


def owned_entries(snapshot: Snapshot, reader: PublicationReader, manifest: Manifest) -> Iterator[Entries]:
    """Entries of the frames of a publication that touch an owned tile."""
    owned = {(r.tensor_id, r.tile) for r in snapshot.regions}
    keys = np.array(sorted((t << 32) | n for t, n in owned), dtype=np.int64)
    frame, ids, tiles = manifest.frames.touched
    mine = np.isin((ids.astype(np.int64) << 32) | tiles.astype(np.int64), keys)
    for i in np.unique(frame[mine]):
        record: FrameRecord = manifest.frames.record(int(i))
        yield decode_frame(snapshot.schema, manifest, record, reader.frame_bytes(manifest, record))


def snapshot_sums(snapshot: Snapshot) -> np.ndarray:
    """Digest sums of the owned parts by tensor: u64 ``[num_tensors, 2]``."""
    ids: list[int] = []
    rows: list[bytes] = []
    for tensor_id, lanes in snapshot.lanes():
        ids.append(tensor_id)
        rows.append(lanes_to_bytes(lanes))
    table = np.frombuffer(b"".join(rows), "<u8").reshape(-1, 2)
    return sum_rows(np.array(ids, dtype=np.int64), table, len(snapshot.schema.tensors))


def frozen_rows(schema: Schema, pieces: Sequence[Piece]) -> list[FrozenRow]:
    """Digest sums of this rank's pieces of frozen tensors, which nobody owns but which are in the root.

    Returns:
        Tensor id, start and extent of the box, and both sums, one row a piece.
    """
    rows = []
    for piece in pieces:
        tensor_id = schema.ids[piece.name]
        if not schema.tensors[tensor_id].frozen or not piece.box.num_words:
            continue
        words = np.ascontiguousarray(words_of(piece.data.cpu()))
        box = piece.box if piece.box.extent else Box((0,), (1,))
        lanes = box_lanes(schema.grids[tensor_id].shape, box, words)
        rows.append((tensor_id, box.start, box.extent, lanes.a, lanes.b))
    return rows


def frozen_sums(schema: Schema, by_rank: Sequence[Sequence[FrozenRow]]) -> np.ndarray:
    """Digest sums of the frozen tensors, each box once: u64 ``[num_tensors, 2]``, zero for all others.

    Raises:
        ReplicaDriftError: Holders of one box have other bytes.
        PlanError: The boxes of a frozen tensor do not cover it once.
    """
    boxes: dict[tuple[int, tuple[int, ...], tuple[int, ...]], tuple[int, int]] = {}
    for rank, rows in enumerate(by_rank):
        for tensor_id, start, extent, a, b in rows:
            key = tensor_id, tuple(start), tuple(extent)
            if boxes.setdefault(key, (a, b)) != (a, b):
                raise ReplicaDriftError(
                    f"frozen tensor {schema.tensors[tensor_id].name}, box {start}+{extent}: rank {rank} has other bytes than "
                    f"a lower rank; reload both from one checkpoint"
                )
    out = np.zeros((len(schema.tensors), 2), dtype=np.uint64)
    covered = np.zeros(len(schema.tensors), dtype=np.int64)
    for (tensor_id, _, extent), lanes in boxes.items():
        out[tensor_id] += np.array(lanes, dtype=np.uint64)
        covered[tensor_id] += Box(extent, extent).num_words
    wrong = [t.name for i, t in enumerate(schema.tensors) if t.frozen and covered[i] != t.num_words]
    if wrong:
        raise PlanError(
            f"{len(wrong)} frozen tensors are not covered once by the ranks' pieces: {', '.join(wrong[:10])}"
        )
    return out


def require_root(root: bytes, manifest: Manifest) -> None:
    """Compare a rebuilt snapshot with the head's version.

    Raises:
        BaseMismatchError: With both roots.
    """
    if root != manifest.root:
        raise BaseMismatchError(
            f"snapshot rebuilt for version {manifest.version} of run {manifest.run!r} has root {root.hex()}, the "
            f"manifest {manifest.root.hex()}: another checkpoint was given, or payloads were changed; nothing was published"
        )
