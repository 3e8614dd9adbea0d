"""Decoders of encoded blocks into a slot: nvCOMP on the SMs, the Decompression Engine, and the CPU as their reference.

Each has two places, so that the blocks of one step are decoded while those of the step before are looked at. Blocks lie in
host memory that the device reads by itself. Comes between ``stream_plan`` and ``stream_placed``. Must import nothing above
errors but codecs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from megasync.codecs.block_batch import Span
from megasync.codecs.engine import Engine, QueuedBatch, probe_engine
from megasync.codecs.engine_arena import HostArena
from megasync.codecs.engine_driver import CudaDriver, load_libcuda
from megasync.codecs.nvcomp import BlockBatch, plan_decompress, span_of
from megasync.codecs.nvcomp_library import NvcompLibrary, find_library
from megasync.codecs.zero_run import BLOCK_KINDS, MAX_BLOCK_NBYTES, BlockKind, decode_into
from megasync.errors import FormatError, MissingPackageError, PlanError
from megasync.receiver.stream_plan import Step
from megasync.receiver.stream_room import Room

PLACES = 2


class BlockDecoder(ABC):
    """Decodes the blocks of steps.

    Attributes:
        name: Name of the backend that it makes: ``sm``, ``de``, ``cpu``.
        kinds: Formats it knows; the first is what others are transcoded to.
    """

    name: str
    kinds: tuple[BlockKind, ...]

    @abstractmethod
    def make_room(self, nbytes: int) -> Room:
        """Host memory for encoded blocks."""

    def close_room(self, room: Room) -> None:  # noqa: B027
        """Let go of a room, where dropping it is not enough."""

    @abstractmethod
    def prepare(self, steps: Sequence[Step]) -> None:
        """Make room for the largest of the steps, so that nothing is allocated while they run."""

    @abstractmethod
    def queue(self, place: int, step: Step, room: Room, slot: torch.Tensor, stream: torch.cuda.Stream | None) -> None:
        """Queue the encoded blocks of a step; ``finish`` comes before the place is used again.

        Args:
            place: 0 or 1.
            step: Which blocks.
            room: Where they are.
            slot: uint8, where they go.
            stream: Where the work goes.
        """

    @abstractmethod
    def finish(self, place: int) -> None:
        """Wait for a place's blocks and check their lengths.

        Raises:
            FormatError: A block did not decode to its length.
            TaintedError: The device failed.
        """

    @property
    @abstractmethod
    def device_nbytes(self) -> int:
        """HBM that it takes beside the slots."""


class CpuDecoder(BlockDecoder):
    """Decodes on the host at once: the reference."""

    name = "cpu"
    kinds = BLOCK_KINDS

    def make_room(self, nbytes: int) -> Room:
        """See ``BlockDecoder.make_room``."""
        memory = np.empty(nbytes, np.uint8)
        return Room(memory, memory)

    def prepare(self, steps: Sequence[Step]) -> None:
        """See ``BlockDecoder.prepare``."""

    def queue(self, place: int, step: Step, room: Room, slot: torch.Tensor, stream: torch.cuda.Stream | None) -> None:
        """See ``BlockDecoder.queue``."""
        out = slot.numpy()
        for kind, batch in step.batches.items():
            columns = (batch.source, batch.nbytes, batch.target, batch.plain_nbytes)
            for a, n, b, m in zip(*(c.tolist() for c in columns), strict=True):
                decode_into(kind, room.view[a : a + n], out[b : b + m])

    def finish(self, place: int) -> None:
        """See ``BlockDecoder.finish``."""

    @property
    def device_nbytes(self) -> int:
        """See ``BlockDecoder.device_nbytes``."""
        return 0


class SmDecoder(BlockDecoder):
    """nvCOMP on the SMs, reading pinned memory.

    Args:
        device: The GPU.
        library: nvCOMP; found among the installed packages by default.

    Raises:
        MissingPackageError: nvCOMP is not installed.
    """

    name = "sm"
    kinds = ("lz4", "snappy")

    def __init__(self, device: torch.device, library: NvcompLibrary | None = None) -> None:
        self.device = device
        self.library = library or NvcompLibrary(find_library())
        self._batches: dict[tuple[BlockKind, int], BlockBatch] = {}
        self._queued: dict[int, list[BlockKind]] = {p: [] for p in range(PLACES)}

    def make_room(self, nbytes: int) -> Room:
        """See ``BlockDecoder.make_room``; pinned."""
        memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        return Room(memory.numpy(), memory)

    def prepare(self, steps: Sequence[Step]) -> None:
        """See ``BlockDecoder.prepare``."""
        for kind, (blocks, encoded) in _largest(steps).items():
            for place in range(PLACES):
                found = self._batches.get((kind, place))
                if found is None or found.plan.num_blocks < blocks or found.plan.input_nbytes < encoded:
                    plan = plan_decompress(self.library, kind, blocks + blocks // 8, MAX_BLOCK_NBYTES, 2 * encoded)
                    self._batches[kind, place] = BlockBatch(self.library, plan, self.device)

    def queue(self, place: int, step: Step, room: Room, slot: torch.Tensor, stream: torch.cuda.Stream | None) -> None:
        """See ``BlockDecoder.queue``."""
        assert stream is not None
        source = Span(room.view.ctypes.data, room.view.nbytes)
        for kind, b in step.batches.items():
            self._batches[kind, place].decompress(
                source, b.source, b.nbytes, span_of(slot), b.target, b.plain_nbytes, stream
            )
            self._queued[place].append(kind)

    def finish(self, place: int) -> None:
        """See ``BlockDecoder.finish``."""
        while self._queued[place]:
            self._batches[self._queued[place].pop(), place].finish()

    @property
    def device_nbytes(self) -> int:
        """See ``BlockDecoder.device_nbytes``."""
        return sum(b.plan.temp_nbytes + b.plan.table_nbytes for b in self._batches.values())


class EngineDecoder(BlockDecoder):
    """The Decompression Engine, called through the driver.

    Args:
        device: The GPU.
        driver: The driver; loaded by default.

    Raises:
        PlanError: The device has no engine for LZ4.
    """

    name = "de"

    def __init__(self, device: torch.device, driver: CudaDriver | None = None) -> None:
        self.device = device
        self._ordinal = device.index if device.index is not None else torch.cuda.current_device()
        self._driver = driver or CudaDriver(load_libcuda())
        probe = probe_engine(self._driver, self._ordinal)
        known: tuple[BlockKind, ...] = ("lz4", "snappy")
        self._engines: dict[BlockKind, Engine] = {"lz4": Engine(self._driver, probe, "lz4")}
        self._engines |= {k: Engine(self._driver, probe, k) for k in known[1:] if probe.refusal(k) is None}
        self.kinds: tuple[BlockKind, ...] = tuple(self._engines)
        self._actual: HostArena | None = None
        self._num_blocks = 0
        self._queued: dict[int, list[QueuedBatch]] = {p: [] for p in range(PLACES)}
        self._done: list[torch.cuda.Event | None] = [None] * PLACES

    def make_room(self, nbytes: int) -> Room:
        """See ``BlockDecoder.make_room``; engine-capable memory of the device's NUMA node."""
        arena = HostArena(self._driver, self._ordinal, nbytes)
        return Room(arena.view, arena)

    def close_room(self, room: Room) -> None:
        """See ``BlockDecoder.close_room``."""
        assert isinstance(room.owner, HostArena)
        room.owner.close()

    def prepare(self, steps: Sequence[Step]) -> None:
        """See ``BlockDecoder.prepare``."""
        blocks = max((s.num_blocks for s in steps), default=0)
        if self._actual is None or self._num_blocks < blocks:
            if self._actual is not None:
                self._actual.close()
            self._num_blocks = max(blocks + blocks // 8, 1)
            nbytes = 4 * PLACES * self._num_blocks
            self._actual = HostArena(self._driver, self._ordinal, nbytes, device_writes=True)

    def queue(self, place: int, step: Step, room: Room, slot: torch.Tensor, stream: torch.cuda.Stream | None) -> None:
        """See ``BlockDecoder.queue``."""
        assert self._actual is not None, "prepare() comes before queue()"
        rows = self._actual.view[: 4 * PLACES * self._num_blocks].view(np.uint32).reshape(PLACES, -1)[place]
        out, first = Span(slot.data_ptr(), slot.numel()), 0
        for kind, b in step.batches.items():
            n = len(b.source)
            engine = self._engines[kind]
            plan = engine.plan(n, int(b.plain_nbytes.max()), int(b.nbytes.sum()))
            self._queued[place].append(
                engine.decompress(
                    plan,
                    room.view,
                    b.source,
                    b.nbytes,
                    out,
                    b.target,
                    b.plain_nbytes,
                    rows[first : first + n],
                    0 if stream is None else stream.cuda_stream,
                )
            )
            first += n
        if stream is not None:
            done = self._done[place] = torch.cuda.Event()
            done.record(stream)

    def finish(self, place: int) -> None:
        """See ``BlockDecoder.finish``."""
        done, self._done[place] = self._done[place], None
        if done is not None:
            done.synchronize()
        while self._queued[place]:
            self._queued[place].pop().check()

    @property
    def device_nbytes(self) -> int:
        """See ``BlockDecoder.device_nbytes``."""
        return 0


def _largest(steps: Sequence[Step]) -> Mapping[BlockKind, tuple[int, int]]:
    """Most blocks and most encoded bytes of a step, by format."""
    out: dict[BlockKind, tuple[int, int]] = {}
    for step in steps:
        for kind, b in step.batches.items():
            blocks, encoded = out.get(kind, (0, 0))
            out[kind] = max(blocks, len(b.source)), max(encoded, int(b.nbytes.sum()))
    return out


def why_not(name: str, device: torch.device) -> str | None:
    """Why a decoder cannot be had here, None where it can: ``sm`` needs nvCOMP, ``de`` an engine that answers the probe."""
    if device.type != "cuda":
        return f"weights are on {device}"
    try:
        if name == "sm":
            NvcompLibrary(find_library())
        else:
            EngineDecoder(device)
    except (MissingPackageError, PlanError, FormatError) as e:
        return str(e)
    return None


def make_decoder(name: str, device: torch.device) -> BlockDecoder:
    """A decoder by the name of its backend.

    Raises:
        MissingPackageError, PlanError: It cannot be had here.
        ValueError: Unknown name.
    """
    if name == "cpu":
        return CpuDecoder()
    if name not in ("sm", "de"):
        raise ValueError(f"decoder {name!r} is unknown; known: sm, de, cpu")
    return SmDecoder(device) if name == "sm" else EngineDecoder(device)
