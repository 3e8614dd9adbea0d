"""One pass on a device: what has begun, what has been read, what came down, and the encoded frames.

Made by ``device_masker``, which fills it from its threads; the publisher waits for its frames here. Must not import receiver
or an adapter.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass, field

import numpy as np
import torch

from megasync.kernels.planes import Planes
from megasync.schema import Schema
from megasync.trainer.device_arena import Landing
from megasync.trainer.device_frames import RawPlanes, Strip, cut, encode_raw
from megasync.trainer.device_plan import Compaction
from megasync.trainer.side_masker import SidePass
from megasync.types import Entries


@dataclass
class Landed:
    """What came down of one compaction so far.

    Attributes:
        compaction: Which.
        counts: int32 ``[S]``, of all segments; 0 where a pass broke off before.
        entries: Planes of each span, uint8 ``[2 + w, n]``, host.
        dense: Mask planes of each span, uint8 ``[w, m]``, host.
        lanes: int64 ``[num_tensors, 4]``, host; valid once the pass has landed.
    """

    compaction: Compaction
    counts: torch.Tensor
    lanes: torch.Tensor
    entries: list[torch.Tensor] = field(default_factory=list)
    dense: list[torch.Tensor] = field(default_factory=list)

    def bring_down(self, segments: tuple[int, int], planes: Planes, landing: Landing) -> None:
        """Copy a span's planes to host memory.

        *Stream*: the current stream; where the planes were made on it they may be dropped at once.
        """
        self.counts[slice(*segments)].copy_(planes.counts, non_blocking=True)
        for source, kept in ((planes.entries, self.entries), (planes.dense, self.dense)):
            if source.shape[1]:
                place = landing.take(tuple(source.shape), source.dtype)
                place.copy_(source, non_blocking=True)
                kept.append(place)

    def raw(self) -> RawPlanes:
        """For the encoder."""
        return RawPlanes(
            self.compaction.table,
            self.counts.numpy(),
            Strip(p.numpy() for p in self.entries),
            Strip(p.numpy() for p in self.dense),
            self.lanes.numpy(),
            self.compaction.lane_ids,
        )


class DeviceMasked(SidePass):
    """See the module docstring. Arguments as of ``SidePass``."""

    def __init__(self, schema: Schema, chunks: Collection[int], late: Collection[int]) -> None:
        super().__init__(schema, chunks, late)
        self.landing: Landing | None = None
        self.landed: list[Landed] = []
        self._broken: list[Entries] = []

    def encode_with(self, codec: str, algorithm: int, num_threads: int, pool: Executor) -> None:
        """Encode what came down, on the encoder's thread; afterwards the landing arena is not read any more."""
        try:
            if self.error is not None:
                raise self.error
            raws = [x.raw() for x in self.landed]
            self._delta = encode_raw(self._schema, raws, codec, algorithm, num_threads=num_threads, pool=pool)
        except BaseException as e:
            try:
                self._keep_entries()
            except BaseException as lost:
                self.unknown = self.unknown or lost
            self._failure = e
        self.landed.clear()

    def _unencoded(self) -> Iterator[Entries]:
        yield from self._broken

    def _keep_entries(self) -> None:
        """Take the words out of the landing arena, so that the pass can be undone although it has no frames."""
        # Arrays of a decoded frame may be views of the arena.
        for frame in cut(self._schema, [x.raw() for x in self.landed]):
            e = frame.entries()
            self._broken.append(
                Entries(
                    e.word_nbytes,
                    e.tensor_ids,
                    e.tiles,
                    e.tile_words,
                    e.counts,
                    np.array(e.positions),
                    np.array(e.values),
                )
            )
