"""The scatter backend: changed words XORed straight into live weights on a GPU, all tensors in one launch a word size.

The mask is never built, so the pause is the time of some random accesses. Planes are decoded on CPU threads into pinned
arenas, copied to HBM (or read from pinned memory while they are used), proven by reading the live words at the touched
positions through the layout, and XORed inside the pause. Frames of any codec are taken: dense ones are decoded on the host
and compacted. Tensors in host memory are written by the CPU backend. With CPU tensors the kernels' references run, so that
all of this works without a GPU. Comes between fetch and apply.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Lock
from typing import Literal

import numpy as np
import torch

from megasync.kernels.scatter_stream import EntryRing
from megasync.manifest import Manifest
from megasync.receiver.backend import Backend, FetchedFrame, Placed, Placing
from megasync.receiver.bind import Binding
from megasync.receiver.cpu import CpuBackend
from megasync.receiver.fetch import Range
from megasync.receiver.scatter_arena import ArenaPool
from megasync.receiver.scatter_layout import device_layout
from megasync.receiver.scatter_passes import Pace, Passes
from megasync.receiver.scatter_placed import ScatterPlaced
from megasync.receiver.scatter_queue import WorkQueue
from megasync.receiver.scatter_stage import Loader
from megasync.receiver.scatter_workers import SharedJob, WorkerPool
from megasync.receiver.sums import Sums
from megasync.versions.publication import PublicationReader

EntriesIn = Literal["hbm", "pinned"]

RING_SLOTS = 3
"""Slots in HBM that entries in pinned memory pass through: one read, one copied into, one between."""


@dataclass(frozen=True, slots=True)
class ScatterMemory:
    """What a scatter backend takes now, in bytes.

    Attributes:
        pinned_nbytes: Arenas in pinned host memory.
        planes_nbytes: Their twins in HBM.
        ring_nbytes: Slots in HBM through which pinned entries pass (dense segments take as much again by the word).
        records_nbytes: Record tables in HBM.
        shared_nbytes: Memory shared with worker processes, at most.
    """

    pinned_nbytes: int
    planes_nbytes: int
    ring_nbytes: int
    records_nbytes: int
    shared_nbytes: int

    @property
    def device_nbytes(self) -> int:
        """All of it that is in HBM; tables of staged versions are counted by those (``Placed.nbytes``)."""
        return self.planes_nbytes + self.ring_nbytes + self.records_nbytes


class ScatterBackend(Backend):
    """See the module docstring.

    Args:
        binding: The rank.
        device: Where its weights live; found by itself where they are all on one GPU, or all in host memory.
        entries_in: ``hbm`` copies staged entries to the device; ``pinned`` leaves them in pinned memory, takes a fixed
            ring in HBM instead, and copies them inside the pause, overlapped with the scatter.
        processes: Worker processes that read, decode and pack frames, so that staging takes neither the interpreter of an
            engine that is decoding nor turns of its own threads; 0 does it on threads of this process. As many work at
            once as the receiver has threads (``ApplyConfig.workers``).
        quiet: Stage beside an engine that is decoding: worker processes take idle cores only, and the live words are read in
            many short launches with pauses between them.
        timeout_s: Longest that queued device work may take before the engine counts as tainted.

    Raises:
        ValueError: Weights on several GPUs, a tensor whose copies are on several devices, entries in pinned memory without
            a GPU, or storage that the kernels cannot address.
    """

    name = "scatter"
    threads = True
    entry_nbytes = 16
    range_scale = 8

    def __init__(
        self,
        binding: Binding,
        *,
        device: torch.device | None = None,
        entries_in: EntriesIn = "hbm",
        processes: int = 0,
        quiet: bool = False,
        timeout_s: float = 60.0,
    ) -> None:
        self.binding = binding
        self.device = device or device_of(binding)
        if entries_in not in ("hbm", "pinned") or (entries_in == "pinned" and self.device.type != "cuda"):
            raise ValueError(f"entries in {entries_in!r} for weights on {self.device}: hbm, or pinned for a GPU")
        self.entries_in = entries_in
        self.layout = device_layout(binding, self.device)
        host_ids = self.layout.host_ids
        self.host = CpuBackend(binding.only(host_ids)) if host_ids else None
        self.queue = WorkQueue(self.device, timeout_s)
        self.arenas = ArenaPool(self.device, shared=bool(processes))
        self._rings = (
            {w: EntryRing(w, self.device, num_slots=RING_SLOTS) for w in self.layout.words}
            if entries_in == "pinned"
            else {}
        )
        pace = Pace() if quiet else None
        self._passes = {w: Passes(self._rings.get(w), pace) for w in self.layout.words}
        self.workers = WorkerPool(self.layout.view, processes, quiet=quiet) if processes else None

    def begin(self, manifest: Manifest, frames: np.ndarray) -> Placing:
        """See ``Backend.begin``."""
        return ScatterPlacing(self, manifest, frames)

    def place(self, frames: Sequence[FetchedFrame]) -> list[Placed]:
        """See ``Backend.place``; ``begin`` puts a whole publication into one launch instead."""
        if not frames:
            return []
        placing = self.begin(frames[0].manifest, np.empty(0, np.int64))
        return [*placing.place(frames), *placing.finish()]

    def write_(self, placed: Sequence[Placed], pool: ThreadPoolExecutor | None) -> list[Sums]:
        """See ``Backend.write_``; the device first, and from one thread."""
        mine = [p for p in placed if isinstance(p, ScatterPlaced)]
        others = [p for p in placed if not isinstance(p, ScatterPlaced)]
        sums = [p.write_() for p in mine]
        return sums + super().write_(others, None if self.device.type == "cuda" else pool)

    def judge(self, error: BaseException) -> None:
        """See ``Backend.judge``."""
        self.queue.judge(error)

    def memory(self) -> ScatterMemory:
        """What is allocated now."""
        rings = [RING_SLOTS * r.chunk_entries * (2 + r.word_nbytes) for r in self._rings.values()]
        return ScatterMemory(
            self.arenas.host_nbytes,
            self.arenas.device_nbytes,
            sum(rings),
            self.layout.nbytes,
            0 if self.workers is None else self.workers.host_nbytes,
        )


class ScatterPlacing(Placing):
    """One publication on its way into arenas. ``place`` is thread-safe."""

    def __init__(self, backend: ScatterBackend, manifest: Manifest, frames: np.ndarray) -> None:
        super().__init__(backend)
        self._scatter = backend
        self._loader = Loader(backend.layout, backend.arenas, manifest, frames)
        host = backend.host
        self._on_host = frozenset() if host is None else frozenset(host.binding.frames_of(manifest).tolist())
        self._manifest = manifest
        self._lock = Lock()
        self._job: SharedJob | None = None
        # Staging that is given up leaves nothing behind.
        self._finalizer = weakref.finalize(self, backend.arenas.give, self._loader.arenas)

    def place(self, frames: Sequence[FetchedFrame]) -> list[Placed]:
        """See ``Placing.place``; gives only what is written on the host."""
        self._loader.add(frames)
        host = self._scatter.host
        if host is None:
            return []
        mine = [f for f in frames if host.binding.needs(f.record.tensor_ids, f.record.tiles).any()]
        return host.place(mine)

    def place_range(self, reader: PublicationReader, span: Range) -> list[Placed] | None:
        """See ``Placing.place_range``: by a worker process, where there are some and nothing of it is on the host."""
        workers = self._scatter.workers
        if workers is None or not self._on_host.isdisjoint(span.frames):
            return None
        with self._lock:
            job = self._job = self._job or SharedJob(reader, self._manifest)
        return [] if workers.stage(job, span, self._loader) else None

    def finish(self) -> list[Placed]:
        """See ``Placing.finish``: one ``Placed`` for all that lives on the device."""
        if self._job is not None:
            self._job.close()
        load = self._loader.finish()
        if not load.pieces:
            return []
        b = self._scatter
        placed = ScatterPlaced(b.layout, load, b.queue, b.arenas, b._passes, resident=b.entries_in == "hbm")
        self._finalizer.detach()
        return [placed]


def device_of(binding: Binding) -> torch.device:
    """The device of an engine rank's weights: its GPU where it has one.

    Raises:
        ValueError: Weights on several GPUs.
    """
    gpus = {d for d in binding.devices if d.type != "cpu"}
    if len(gpus) > 1:
        raise ValueError(f"weights of one engine rank on {sorted(map(str, gpus))}: a rank writes one GPU")
    return gpus.pop() if gpus else torch.device("cpu")
