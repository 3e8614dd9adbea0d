"""The mask stage without kernels: copy engines bring whole weights down to pinned memory, and the CPU path compares them.

For a snapshot in host memory where all streams of the GPU share one hardware queue (``CUDA_DEVICE_MAX_CONNECTIONS=1``). A kernel
that waits for old bytes, or runs for long, holds up whatever is queued behind it there: matrix products of 0.72 s took 19 % longer
beside kernels launched as copies come up (on a stream of high priority too), 16 % beside one kernel that reads across PCIe, and
no longer beside copies down (an H200, ``launch.bench.bench_one_queue``). Frames are those of the CPU path. With tensors on
the CPU copies are done when they are queued. Must not import receiver or an adapter.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch

from megasync.schema import Schema
from megasync.telemetry import Telemetry
from megasync.trainer.device_arena import host_arena
from megasync.trainer.device_plan import LANDING_ALIGN, VolatileCopy, buffered, landed_nbytes, landing_spans
from megasync.trainer.device_stream import Done, Mark
from megasync.trainer.mask import mask_regions
from megasync.trainer.regions import Region
from megasync.trainer.side_masker import SideMasker, SidePass
from megasync.trainer.snapshot import SAME_SIZE, Snapshot
from megasync.types import Entries
from megasync.versions.changes import MaskedFrame
from megasync.versions.encode import encode

log = logging.getLogger(__name__)

_COPY_NBYTES = 32 << 20  # at a time: the trainer's own copies get in between
_MAX_THREADS = 4  # more wait for each other at the interpreter
_LOOK_S = 5e-4  # between looks at whether copies are done: to wait in the driver would keep a core busy


class CopiedPass(SidePass):
    """One pass; arguments as of ``SidePass``."""

    def __init__(self, schema: Schema, chunks: Collection[int], late: Collection[int]) -> None:
        super().__init__(schema, chunks, late)
        self.num_uncopied = len(chunks)
        self.landed = Done()  # nothing of it reads or writes the memory that copies come down to
        self.frames: list[MaskedFrame] = []  # compared, and in the snapshot

    def encode_with(self, codec: str, algorithm: int) -> None:
        """Encode what was found, on the encoder's thread."""
        try:
            if self.error is not None:
                raise self.error
            self._delta = encode(self.frames, codec, algorithm)
            self.frames = []  # nobody needs them to undo it
        except BaseException as e:
            self._failure = e

    def _unencoded(self) -> Iterator[Entries]:
        for frame in self.frames:
            yield frame.entries


@dataclass(frozen=True, slots=True)
class _Run:
    """Live bytes that lie together, and where they come down; uint8 ``[n]`` both."""

    live: torch.Tensor
    landed: torch.Tensor


class CopiedMasker(SideMasker[CopiedPass]):
    """See the module docstring.

    Args:
        schema: The run's schema.
        snapshot: Seeded, in host memory; its regions name the live memory.
        device: Where the live weights are.
        codec: Codec name or ``auto``.
        algorithm: Digest algorithm of the format.
        telemetry: As of ``SideMasker``, and on the host ``compare_wait`` (the trainer, for the pass before), ``landing`` (waiting for
            copies), ``compare`` and ``codec``.
        num_threads: Threads that compare, of which at most 4 are of use.

    *Memory*: pinned, as much as the snapshot and at most as much again for what lies between; on the device copies of volatile
    weights and of those that take up less than half of what they are spread over. *Stream*: copies are queued when a chunk begins,
    on the trainer's thread; ``begin`` first waits on the host until the pass before it was compared, so that steps that are
    shorter than comparing takes are held up.
    """

    def __init__(
        self,
        schema: Schema,
        snapshot: Snapshot,
        device: torch.device,
        *,
        codec: str,
        algorithm: int,
        telemetry: Telemetry,
        num_threads: int = 4,
    ) -> None:
        self._codec, self._algorithm = codec, algorithm
        copies: list[VolatileCopy] = []
        self._packs: dict[int, list[VolatileCopy]] = defaultdict(list)
        self._runs: dict[int, list[_Run]] = defaultdict(list)
        spans = landing_spans(snapshot.regions, device)
        self._arena = arena = host_arena(landed_nbytes(spans), device)  # pinned as long as it is held here
        landed = {
            i: torch.empty(r.data.shape, dtype=_bits(r)) for i, r in enumerate(snapshot.regions) if not r.data.numel()
        }
        at = 0
        for span in spans:
            # Where it lies modulo 64, so that words stay aligned.
            at = -(-at // LANDING_ALIGN) * LANDING_ALIGN + span.begin % LANDING_ALIGN
            for i in span.regions:
                region = snapshot.regions[i]
                live = region.data.detach().view(_bits(region))
                if span.packed:
                    into = copies if buffered(region, device) else self._packs[span.chunk]
                    into.append(VolatileCopy(live, torch.empty(live.shape, dtype=live.dtype, device=device)))
                    live = into[-1].buffer
                start = at - span.begin + int(live.storage_offset()) * live.element_size()
                landed[i] = _lying(arena, start, live)
            self._runs[span.chunk].append(_Run(_stretch(live, span.begin, span.nbytes), arena[at : at + span.nbytes]))
            at += span.nbytes
        regions = [replace(region, data=landed[i]) for i, region in enumerate(snapshot.regions)]
        # The same words kept, beside live ones that the CPU can read.
        self._landed = Snapshot(schema, regions, lambda nbytes: snapshot.arena)
        _ = self._landed.host_units  # made here, not by several threads of the first pass at once
        self._landing: CopiedPass | None = None  # whose copies were the last to come down
        self._pool = ThreadPoolExecutor(min(num_threads, _MAX_THREADS), thread_name_prefix="megasync-compare")
        super().__init__(schema, snapshot, sorted(self._runs), copies, device, telemetry)

    def close(self) -> None:
        """See ``SideMasker.close``."""
        super().close()
        self._pool.shutdown(wait=True)

    def _new_pass(self, late: Collection[int]) -> CopiedPass:
        return CopiedPass(self._schema, self._chunks, late)

    def _begin_chunk(self, masked: CopiedPass, chunk: int, start: Mark) -> None:
        """Queues the chunk's copies at once: what the trainer launches next would stand before them in the one queue."""
        if self._landing is not masked:
            self._take_landing(masked)
        with self._side.current():
            try:
                start.hold()
                masked.begun = masked.begun or Mark(self._device)
                self._copy_down(chunk)
                masked.read = Mark(self._device)
            except Exception as e:  # of this rank alone: the others go on, and learn it from the pass
                masked.error = masked.error or e
                log.exception("megasync: copying model chunk %d failed", chunk)
        masked.num_uncopied -= 1
        if masked.num_uncopied <= 0:
            masked.issue()
        super()._begin_chunk(masked, chunk, start)

    def _take_landing(self, masked: CopiedPass) -> None:
        """Waits until the pass before is compared, or ended: each is, whatever becomes of the trainer's thread."""
        with self._telemetry.span("compare_wait"):
            if self._landing is not None:
                self._landing.landed.wait()
            self._landing = masked

    def _copy_down(self, chunk: int) -> None:
        for pack in self._packs[chunk]:  # before all copies: kernels wait for nothing then
            pack.buffer.copy_(pack.live, non_blocking=True)
        for run in self._runs[chunk]:
            for live, landed in zip(run.live.split(_COPY_NBYTES), run.landed.split(_COPY_NBYTES), strict=True):
                landed.copy_(live, non_blocking=True)

    def _read_chunk(self, masked: CopiedPass, chunk: int, start: Mark) -> None:
        """See ``SideMasker._read_chunk``: all is queued already."""

    def _finish(self, masked: CopiedPass) -> None:
        """Every copy is queued: wait for them, compare."""
        self._mark_read(masked)
        try:
            with self._telemetry.span("landing"):
                while masked.read is not None and not masked.read.passed:
                    time.sleep(_LOOK_S)
            if masked.error is None:
                with self._telemetry.span("compare"):
                    for frame in mask_regions(self._schema, self._landed, self._pool):
                        masked.frames.append(frame)  # one by one: what was found before an error is in the snapshot
        except BaseException as e:
            masked.error = masked.error or e
        masked.landed.say()
        self._encoder.submit(lambda: self._encode(masked))

    def _encode(self, masked: CopiedPass) -> None:
        with self._telemetry.span("codec"):
            masked.encode_with(self._codec, self._algorithm)
        masked.ended.say()


def _bits(region: Region) -> torch.dtype:
    return SAME_SIZE[region.data.element_size()]


def _stretch(words: torch.Tensor, begin: int, nbytes: int) -> torch.Tensor:
    """Bytes of the storage of ``words``, as a view."""
    return torch.empty(0, dtype=torch.uint8, device=words.device).set_(words.untyped_storage(), begin, (nbytes,), (1,))


def _lying(arena: torch.Tensor, at: int, like: torch.Tensor) -> torch.Tensor:
    """A view of the arena (uint8, from the beginning of its storage) from byte ``at`` on, as ``like`` lies in its own."""
    out = torch.empty(0, dtype=like.dtype)
    return out.set_(arena.untyped_storage(), at // like.element_size(), like.shape, like.stride())
