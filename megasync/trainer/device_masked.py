"""One pass on a device: what has begun, what has been read, what came down, and the encoded frames.

Made by ``device_masker``, which fills it from its threads; the publisher waits for its frames here. Must not import receiver
or an adapter.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from threading import Event

import numpy as np
import torch

from megasync.kernels.planes import Planes
from megasync.schema import Schema
from megasync.trainer.device_arena import Landing
from megasync.trainer.device_frames import RawPlanes, Strip, cut, encode_raw
from megasync.trainer.device_plan import Compaction
from megasync.trainer.device_stream import Mark
from megasync.trainer.masker import Masked
from megasync.types import Entries
from megasync.versions.encode import EncodedDelta, entries_of


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


class DeviceMasked(Masked):
    """See the module docstring.

    Args:
        schema: The run's schema.
        chunks: Chunks with compactions.
        late: Chunks that begin later, with or without compactions of this rank.
    """

    def __init__(self, schema: Schema, chunks: Collection[int], late: Collection[int]) -> None:
        self._schema = schema
        self.num_left = len(chunks)
        self.waiting = set(late)
        self.landing: Landing | None = None
        self.landed: list[Landed] = []
        self.error: BaseException | None = None
        self.begun: Mark | None = None
        self.read: Mark | None = None  # after the last read of live weights that is queued so far
        self._issued = Event()
        self._delta: Future[EncodedDelta] = Future()
        self._broken: list[Entries] = []

    def issue(self) -> None:
        """Every read of live weights is queued; ``read`` is when the last is done."""
        self._issued.set()

    def wait_issued(self) -> Mark | None:
        """Wait until the last read is queued, and give its mark."""
        self._issued.wait()
        return self.read

    def encode_with(self, codec: str, algorithm: int, num_threads: int, pool: Executor) -> None:
        """Encode what came down, on the encoder's thread; afterwards the landing arena is not read any more."""
        try:
            if self.error is not None:
                raise self.error
            raws = [x.raw() for x in self.landed]
            self._delta.set_result(encode_raw(self._schema, raws, codec, algorithm, num_threads=num_threads, pool=pool))
        except BaseException as e:
            self._keep_entries()
            self._delta.set_exception(e)
        self.landed.clear()

    def fail(self, error: BaseException) -> None:
        """The pass never ran, or nobody encodes it."""
        self.error = self.error or error
        self._issued.set()
        if not self._delta.done():
            self._delta.set_exception(self.error)

    def changed_nbytes(self) -> int:
        """See ``Masked.changed_nbytes``."""
        return sum(r.num_changed * r.word_nbytes for r in self._delta.result().records)

    def encode(self, codec: str, algorithm: int) -> EncodedDelta:
        """See ``Masked.encode``: it was begun when the words came down, with the codec and algorithm of the run."""
        return self._delta.result()

    def entries(self) -> Iterator[Entries]:
        """See ``Masked.entries``."""
        if self._delta.exception() is None:
            yield from entries_of(self._schema, self._delta.result())
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
