"""Sparse frames of one word size unpacked together: fewer and longer steps than one frame after the other.

Comes after fetch, before place and the kernels. Must import nothing above backend.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megasync.codecs.base import FrameShape
from megasync.codecs.sparse import SparseCodec
from megasync.codecs.sparse_batch import RawFrames, unpack_frames
from megasync.errors import FormatError
from megasync.receiver.backend import FetchedFrame
from megasync.types import Entries


def unpack_together(frames: Sequence[FetchedFrame]) -> RawFrames:
    """Raw planes of sparse frames of one word size.

    Raises:
        FormatError: A frame breaks a rule of the format; which one is not said.
    """
    records = [f.record for f in frames]
    ids = np.concatenate([r.tensor_ids for r in records])
    tiles = np.concatenate([r.tiles for r in records])
    num_planes = {len(r.plane_nbytes) for r in records}
    if num_planes != {3 + 2 * records[0].word_nbytes}:
        raise FormatError(f"sparse frames with {sorted(num_planes)} planes, expected {3 + 2 * records[0].word_nbytes}")
    changed = np.array([r.num_changed for r in records], dtype=np.int64)
    words = frames[0].schema.tile_words(ids, tiles)
    return unpack_frames(
        FrameShape(records[0].word_nbytes, ids, tiles, words, int(changed.sum())),
        np.array([len(r.tiles) for r in records], dtype=np.int64),
        changed,
        [f.stored for f in frames],
        np.array([r.plane_nbytes for r in records], dtype=np.int64),
    )


def decode_together(frames: Sequence[FetchedFrame]) -> list[Entries]:
    """Changed words of frames of one word size: those of all sparse frames as one, then those of the others.

    Raises:
        FormatError: A frame breaks a rule of the format; it is named.
    """
    sparse = [f for f in frames if f.record.codec == SparseCodec.id]
    others = [f.entries() for f in frames if f.record.codec != SparseCodec.id]
    if not sparse:
        return others
    try:
        return [unpack_together(sparse).decoded(), *others]
    except FormatError:
        return [*(f.entries() for f in sparse), *others]  # names the frame that is at fault
