"""The streaming backends: masks decoded layer by layer on the device, each XORed while the next is decoded.

``de`` decodes on the Decompression Engine, ``sm`` with nvCOMP on the SMs. HBM beyond the weights is two slots of one layer;
encoded blocks are read from host memory, and no cache of the engine is touched. Frames of any codec are taken: what the
decoder does not know is transcoded while staging. Comes between fetch and apply.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Lock

import numpy as np
import torch

from megasync.errors import MemoryPlanError
from megasync.manifest import Manifest
from megasync.receiver.backend import Backend, FetchedFrame, Placed, Placing
from megasync.receiver.bind import Binding
from megasync.receiver.cpu import CpuBackend
from megasync.receiver.scatter_layout import device_layout
from megasync.receiver.scatter_queue import WorkQueue
from megasync.receiver.stream_blocks import TileBlocks, tile_blocks
from megasync.receiver.stream_decode import BlockDecoder, make_decoder
from megasync.receiver.stream_placed import StreamPlaced
from megasync.receiver.stream_plan import Planner, cut_steps, make_step, slot_nbytes
from megasync.receiver.stream_room import RoomPool
from megasync.receiver.stream_slots import Slots
from megasync.receiver.sums import Sums


@dataclass(frozen=True, slots=True)
class StreamMemory:
    """What a streaming backend takes now, in bytes.

    Attributes:
        host_nbytes: Encoded blocks in host memory that the device reads.
        slots_nbytes: Both slots in HBM.
        decoder_nbytes: Scratch and tables of the decoder in HBM.
        records_nbytes: Record tables in HBM.
    """

    host_nbytes: int
    slots_nbytes: int
    decoder_nbytes: int
    records_nbytes: int

    @property
    def device_nbytes(self) -> int:
        """All of it that is in HBM."""
        return self.slots_nbytes + self.decoder_nbytes + self.records_nbytes


class StreamBackend(Backend):
    """See the module docstring.

    Args:
        binding: The rank.
        decoder: Decodes blocks.
        device: Where the weights live.
        slot_limit_nbytes: Largest slot; layers that do not fit go through in several steps. By default a slot holds the
            largest layer.
        prove_by_reading: Decode and read everything once before the apply, beside serving, so that nothing is written over
            words that are not the base; by default the tracked state digest and the identity of the storage prove the
            base, and the digests of what was written prove both.
        timeout_s: Longest that queued device work may take before the engine counts as tainted.

    Raises:
        ValueError: See ``device_layout``.
        MemoryPlanError: The slots do not fit the device.
    """

    threads = True

    def __init__(
        self,
        binding: Binding,
        decoder: BlockDecoder,
        device: torch.device,
        *,
        slot_limit_nbytes: int | None = None,
        prove_by_reading: bool = False,
        timeout_s: float = 60.0,
    ) -> None:
        self.binding, self.decoder, self.device = binding, decoder, device
        self.name = decoder.name
        self.prove_by_reading = prove_by_reading
        self.layout = device_layout(binding, device)
        host_ids = self.layout.host_ids
        self.host = CpuBackend(binding.only(host_ids)) if host_ids else None
        self.planner = Planner(self.layout)
        self.queue = WorkQueue(device, timeout_s)
        self.rooms = RoomPool(decoder)
        largest = slot_nbytes(self.layout)
        self.slot_nbytes = min(largest, max(slot_limit_nbytes or largest, _largest_tile(binding)))
        try:
            self.slots = Slots(device, self.slot_nbytes)
        except torch.cuda.OutOfMemoryError as e:
            raise MemoryPlanError(
                f"two slots of {self.slot_nbytes} bytes do not fit {device} ({e}); nothing was touched. Give the engine less, "
                "set slot_limit_nbytes, or choose the scatter backend"
            ) from e

    def begin(self, manifest: Manifest, frames: np.ndarray) -> Placing:
        """See ``Backend.begin``."""
        return StreamPlacing(self, manifest)

    def place(self, frames: Sequence[FetchedFrame]) -> list[Placed]:
        """See ``Backend.place``; ``begin`` streams a whole publication at once instead."""
        if not frames:
            return []
        placing = StreamPlacing(self, frames[0].manifest)
        return [*placing.place(frames), *placing.finish()]

    def write_(self, placed: Sequence[Placed], pool: ThreadPoolExecutor | None) -> list[Sums]:
        """See ``Backend.write_``; the device from one thread."""
        return super().write_(placed, None if self.device.type == "cuda" else pool)

    def judge(self, error: BaseException) -> None:
        """See ``Backend.judge``."""
        self.queue.judge(error)

    def memory(self) -> StreamMemory:
        """What is allocated now."""
        return StreamMemory(self.rooms.nbytes, 2 * self.slot_nbytes, self.decoder.device_nbytes, self.layout.nbytes)


class StreamPlacing(Placing):
    """One publication on its way into host memory. ``place`` is thread-safe."""

    def __init__(self, backend: StreamBackend, manifest: Manifest) -> None:
        super().__init__(backend)
        self._stream = backend
        self._signed = manifest.key is not None
        self._blocks: list[TileBlocks] = []
        self._lock = Lock()

    def place(self, frames: Sequence[FetchedFrame]) -> list[Placed]:
        """See ``Placing.place``; gives only what is written on the host."""
        b = self._stream
        found: list[TileBlocks] = []
        on_host: list[FetchedFrame] = []
        for frame in frames:
            ids, tiles = frame.record.tensor_ids, frame.record.tiles
            keep = b.binding.needs(ids, tiles) & (b.layout.row[ids] >= 0)
            if keep.any():
                found.append(tile_blocks(frame, keep, b.decoder.kinds, signed=self._signed))
            if b.host is not None and b.host.binding.needs(ids, tiles).any():
                on_host.append(frame)
        with self._lock:
            self._blocks += found
        return b.host.place(on_host) if b.host is not None else []

    def finish(self) -> list[Placed]:
        """See ``Placing.finish``: steps in layer order, their blocks one after the other in host memory."""
        b = self._stream
        if not self._blocks:
            return []
        steps, places, at = [], [], 0
        for tiles in cut_steps(self._blocks, b.slot_nbytes):
            step, mine = make_step(b.planner, tiles, at)
            steps.append(step)
            places += mine
            at = step.end
        room = b.rooms.take(at)
        try:
            starts = {id(x): np.cumsum(x.nbytes) - x.nbytes for x in self._blocks}
            for blocks, k, target in places:
                size, source = int(blocks.nbytes[k]), int(starts[id(blocks)][k])
                room.view[target : target + size] = blocks.data[source : source + size]
            b.decoder.prepare(steps)
        except BaseException:
            b.rooms.give(room)
            raise
        changed = sum(x.num_changed for x in self._blocks)
        self._blocks = []
        return [
            StreamPlaced(
                b.layout,
                steps,
                room,
                b.rooms,
                b.decoder,
                b.slots,
                b.queue,
                num_changed=changed,
                blind=not b.prove_by_reading,
            )
        ]


def _largest_tile(binding: Binding) -> int:
    schema = binding.schema
    ids = np.repeat(np.arange(len(schema.tensors)), np.diff(schema.first_tile))
    tiles = np.arange(int(schema.first_tile[-1])) - schema.first_tile[ids]
    return int((schema.tile_words(ids, tiles).astype(np.int64) * schema.word_nbytes[ids]).max(initial=0)) + 16


def stream_backend(name: str, binding: Binding) -> StreamBackend:
    """``sm`` or ``de`` for a bound rank.

    Raises:
        ValueError: Weights on several GPUs, or on none.
        MissingPackageError, PlanError: The decoder cannot be had here.
    """
    gpus = {d for d in binding.devices if d.type == "cuda"}
    if len(gpus) != 1:
        raise ValueError(f"backend {name!r} streams into one GPU; weights are on {sorted(map(str, binding.devices))}")
    device = gpus.pop()
    return StreamBackend(binding, make_decoder(name, device), device)


def sm_backend(binding: Binding) -> StreamBackend:
    """nvCOMP on the SMs; as ``stream_backend``."""
    return stream_backend("sm", binding)


def de_backend(binding: Binding) -> StreamBackend:
    """The Decompression Engine; as ``stream_backend``."""
    return stream_backend("de", binding)
