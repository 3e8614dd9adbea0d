"""The dense ways to new weights: a compressed mask is decoded, on the CPU or on the SMs, and XORed in.

The mask is cut in blocks of the arena and compressed beforehand by the library that decodes it. Decoding and XOR overlap
through slots. Before it: peers_weights. After it: bench_peers.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import cramjam
import numpy as np
import torch
import zstandard

from launch.bench.peers_weights import BLOCK_NBYTES, Change, Way
from megasync.codecs.nvcomp import BlockBatch, plan_compress, plan_decompress, span_of
from megasync.codecs.nvcomp_library import NvcompLibrary, find_library
from megasync.kernels.zero_run_rules import BlockKind

LEVEL = 1
SLOT_NBYTES = 256 << 20
NUM_SLOTS = 3
GPU_BLOCK_NBYTES = 64 << 10
GPU_SLOT_NBYTES = 1 << 30


class Zstd:
    """CPU Zstd in frames of 1 MiB, decoded into pinned slots, uploaded and XORed.

    Args:
        change: The weights.
        num_threads: Of the decoder.
    """

    def __init__(self, change: Change, num_threads: int) -> None:
        self._change, self._threads = change, num_threads
        self._pool = ThreadPoolExecutor(num_threads)
        gpu = change.arena.is_cuda
        size = min(SLOT_NBYTES, len(change.arena))
        self._host = [torch.empty(size, dtype=torch.uint8, pin_memory=gpu) for _ in range(NUM_SLOTS)]
        self._device = [torch.empty(size, dtype=torch.uint8, device=change.arena.device) for _ in range(NUM_SLOTS)]
        self._free: list[torch.cuda.Event | None] = [None] * NUM_SLOTS
        self._steps = [(a, min(a + size, len(change.arena))) for a in range(0, len(change.arena), size)]
        self._frames = [frame for begin, stop in self._steps for frame in self._encode(begin, stop)]

    def _encode(self, begin: int, stop: int) -> list[bytes]:
        self._host[0][: stop - begin].copy_(self._change.mask(begin, stop))
        blocks = self._host[0].numpy()[: stop - begin].reshape(-1, BLOCK_NBYTES)
        return list(self._pool.map(lambda b: zstandard.ZstdCompressor(level=LEVEL).compress(b.data), blocks))

    def _decode(self, number: int, out: np.ndarray) -> None:
        if cramjam.zstd.decompress_into(self._frames[number], out.data) != BLOCK_NBYTES:
            raise RuntimeError(f"frame {number} decodes to another length")

    def _submit(self, step: int) -> list[Future[None]]:
        slot = step % NUM_SLOTS
        free = self._free[slot]
        if free is not None:
            free.synchronize()
        begin, stop = self._steps[step]
        out = self._host[slot].numpy()[: stop - begin].reshape(-1, BLOCK_NBYTES)
        return [self._pool.submit(self._decode, begin // BLOCK_NBYTES + i, block) for i, block in enumerate(out)]

    def work(self) -> None:
        """Decode, upload and XOR; the next slot is decoded meanwhile."""
        arena = self._change.arena
        waiting = self._submit(0)
        for step, (begin, stop) in enumerate(self._steps):
            following = self._submit(step + 1) if step + 1 < len(self._steps) else []
            for future in waiting:
                future.result()
            slot = step % NUM_SLOTS
            mask = self._device[slot][: stop - begin]
            mask.copy_(self._host[slot][: stop - begin], non_blocking=True)
            if arena.is_cuda:
                self._free[slot] = torch.cuda.Event()
                self._free[slot].record()  # type: ignore[union-attr]
            xor_(arena[begin:stop], mask)
            waiting = following
        self._free = [None] * NUM_SLOTS

    def way(self) -> Way:
        """For the table."""
        stored = sum(map(len, self._frames))
        return Way(
            f"CPU Zstd level {LEVEL} of the mask on {self._threads} threads, upload, XOR",
            self.work,
            moved_nbytes=len(self._change.arena),
            more={"stored_nbytes": stored, "num_threads": self._threads, "block_nbytes": BLOCK_NBYTES},
        )


def xor_(words: torch.Tensor, mask: torch.Tensor) -> None:
    """XOR a ready mask in, eight bytes at a time: by single bytes torch reaches a fraction of the bandwidth."""
    words.view(torch.int64).bitwise_xor_(mask.view(torch.int64))


@dataclass
class _Step:
    """Blocks of one slot: where they go in the arena, and where they lie encoded."""

    begin: int
    stop: int
    source: torch.Tensor
    offsets: np.ndarray
    nbytes: np.ndarray


def nvcomp_way(change: Change, kind: BlockKind) -> Way:
    """nvCOMP's SM decoder, its input uploaded ahead of it, two slots; the XOR of one beside the decoding of the other.

    Read in place from pinned memory, the input would make it several times slower."""
    library = NvcompLibrary(find_library())
    size = min(GPU_SLOT_NBYTES, len(change.arena))
    num = size // GPU_BLOCK_NBYTES
    encoder = BlockBatch(library, plan_compress(library, kind, num, GPU_BLOCK_NBYTES), change.arena.device)
    steps = [_encode(change, encoder, a, min(a + size, len(change.arena))) for a in range(0, len(change.arena), size)]
    del encoder
    torch.cuda.empty_cache()
    largest = max(int(s.nbytes.sum()) for s in steps)
    plan = plan_decompress(library, kind, num, GPU_BLOCK_NBYTES, largest)
    batches = [BlockBatch(library, plan, change.arena.device) for _ in range(2)]
    slots = [torch.empty(size, dtype=torch.uint8, device=change.arena.device) for _ in range(2)]
    blocks = [torch.empty_like(s.source, device=change.arena.device, pin_memory=False) for s in steps]
    stream, uploads = torch.cuda.Stream(), torch.cuda.Stream()
    used: list[torch.cuda.Event | None] = [None, None]

    def work() -> None:
        stream.wait_stream(torch.cuda.current_stream())
        there = []
        with torch.cuda.stream(uploads):
            for step, target in zip(steps, blocks, strict=True):
                target.copy_(step.source, non_blocking=True)
                there.append(torch.cuda.Event())
                there[-1].record()
        for n, step in enumerate(steps):
            slot = n % 2
            if n >= 2:
                batches[slot].finish()
            if (free := used[slot]) is not None:
                stream.wait_event(free)
            stream.wait_event(there[n])
            out = np.arange(len(step.nbytes), dtype=np.int64) * GPU_BLOCK_NBYTES
            whole = np.full(len(step.nbytes), GPU_BLOCK_NBYTES, dtype=np.int64)
            batches[slot].decompress(
                span_of(blocks[n]), step.offsets, step.nbytes, span_of(slots[slot]), out, whole, stream
            )
            decoded = torch.cuda.Event()
            decoded.record(stream)
            torch.cuda.current_stream().wait_event(decoded)
            xor_(change.arena[step.begin : step.stop], slots[slot][: step.stop - step.begin])
            used[slot] = torch.cuda.Event()
            used[slot].record()  # type: ignore[union-attr]
        for slot in range(min(2, len(steps))):
            batches[slot].finish()

    return Way(
        f"nvCOMP {library.file.version} {kind} on the SMs, XOR, pinned",
        work,
        moved_nbytes=sum(int(s.nbytes.sum()) for s in steps),
        more={"block_nbytes": GPU_BLOCK_NBYTES},
    )


def _encode(change: Change, encoder: BlockBatch, begin: int, stop: int) -> _Step:
    """Compress the mask of a slot, and bring the blocks to pinned memory without the room between them."""
    plan, stream = encoder.plan, torch.cuda.current_stream()
    mask = change.mask(begin, stop)
    at = np.arange(0, stop - begin, GPU_BLOCK_NBYTES, dtype=np.int64)
    out = torch.empty(plan.output_nbytes, dtype=torch.uint8, device=mask.device)
    encoder.compress(span_of(mask), at, np.full(len(at), GPU_BLOCK_NBYTES, dtype=np.int64), span_of(out), stream)
    nbytes = encoder.finish()
    room = -(-nbytes // 16) * 16  # blocks begin aligned
    ends = np.cumsum(room)
    slots = out.view(plan.num_blocks, plan.slot_nbytes)[: len(at)]
    source = torch.empty(int(ends[-1]), dtype=torch.uint8, pin_memory=True)
    packed = torch.empty_like(source, device=mask.device, pin_memory=False)
    step = 1024
    for a in range(0, len(at), step):
        size = torch.from_numpy(room[a : a + step]).to(mask.device)
        kept = torch.arange(plan.slot_nbytes, device=mask.device) < size[:, None]
        first = int(ends[a] - room[a])
        last = int(ends[min(a + step, len(at)) - 1])
        packed[first:last] = slots[a : a + step][kept]
    source.copy_(packed)
    torch.cuda.synchronize()
    return _Step(begin, stop, source, ends - room, nbytes)
