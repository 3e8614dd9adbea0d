"""Version 0: an anchor with full bytes, or a checkpoint that exists already, named by its state digests.

An anchor's payloads are safetensors files that any reader opens.

Each owner's tiles of a tensor are one entry, ``name@k`` with the owner's number in the payload, one-dimensional, tiles
in ascending order and row-major inside. Where the tiles lie is in the manifest's frame table, whose frames point into
the file. Must not import trainer or receiver.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np

from megasync.digest import SHA256, XXH3_128, content_digest
from megasync.errors import MegasyncError, SinkConflictError
from megasync.frames import FrameTable
from megasync.manifest import Manifest, empty_table, manifest_key
from megasync.schema import Schema
from megasync.sinks.base import DEFAULT_TIMEOUT_S, Sink
from megasync.versions.checkpoint import SUB_BYTE_BITS, header_bytes
from megasync.versions.head import move_head, write_manifest, write_schema, write_state_table
from megasync.versions.lineage import Lineage


def anchor_header(schema: Schema, tables: Sequence[FrameTable]) -> bytes:
    """Header of one anchor payload.

    Args:
        schema: The run's schema.
        tables: Frame table of each owner whose bytes follow, in order.
    """
    entries: list[tuple[str, str, tuple[int, ...], int]] = []
    for k, table in enumerate(tables):
        _, ids, tiles = table.touched
        words = schema.tile_words(ids, tiles).astype(np.int64)
        for tensor_id in np.unique(ids):
            spec = schema.tensors[int(tensor_id)]
            num = int(words[ids == tensor_id].sum())
            # A packed tile need not be whole elements of a sub-byte dtype as safetensors counts them: its bytes are.
            dtype = "U8" if spec.dtype in SUB_BYTE_BITS else spec.dtype
            entries.append((f"{spec.name}@{k}", dtype, (num,), num * spec.word_nbytes))
    return header_bytes(entries, {"format": "megasync anchor 1", "run": schema.run, "schema": schema.digest.hex()})


def publish_checkpoint(
    sink: Sink, lineage: Lineage, *, key: bytes | None = None, timeout_s: float = DEFAULT_TIMEOUT_S
) -> Lineage:
    """Publish version 0 as a checkpoint that the engines load themselves; no payload is written.

    Args:
        sink: Where.
        lineage: The claimed head and the checkpoint's digest sums.
        key: Shared key to sign with.
        timeout_s: Longest wait for each sink operation.

    Returns:
        The lineage at version 0.

    Raises:
        SinkConflictError: Another publisher has the run; nothing of this version is left in the sink.
    """
    schema, states = lineage.schema, lineage.states
    root = content_digest(states.tobytes(), XXH3_128)
    none = np.empty((0, 16), np.uint8)
    manifest = Manifest(
        what="checkpoint",
        run=schema.run,
        epoch=lineage.head.fence,
        version=0,
        base_version=-1,
        base_digest=b"",
        schema_digest=schema.digest,
        payload_nbytes=(),
        frames=empty_table(),
        touched_ids=np.empty(0, "<u4"),
        new_states=none,
        touched_olds=none,
        root=root,
        num_changed=0,
        state_table=root,
        digest_algorithm=SHA256 if key else XXH3_128,
        key=key,
    )
    write_schema(sink, schema, timeout_s=timeout_s)
    write_state_table(sink, schema.run, root, states.tobytes(), timeout_s=timeout_s)
    write_manifest(sink, manifest, timeout_s=timeout_s)
    try:
        head = move_head(sink, lineage.head, manifest, timeout_s=timeout_s)
    except SinkConflictError:
        # Refused for good: nothing will ever name this manifest.
        with suppress(MegasyncError):
            sink.delete(manifest_key(schema.run, 0, manifest.epoch), timeout_s=timeout_s)
        raise
    return replace(lineage, head=head, version=0, digest=manifest.digest)
