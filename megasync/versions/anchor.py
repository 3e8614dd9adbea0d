"""Anchors: publications with full bytes, whose payloads are safetensors files that any reader opens.

Each owner's tiles of a tensor are one entry, ``name@k`` with the owner's number in the payload, one-dimensional, tiles
in ascending order and row-major inside. Where the tiles lie is in the manifest's frame table, whose frames point into
the file. Must not import trainer or receiver.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megasync.frames import FrameTable
from megasync.schema import Schema
from megasync.versions.checkpoint import SUB_BYTE_BITS, header_bytes


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
