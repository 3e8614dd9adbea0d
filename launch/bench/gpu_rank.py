"""What the kernel benchmarks share: timing by events, random changed words, an engine rank and its floors on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from launch.bench.rows import RowWriter, Timed, middle
from launch.bench.workload import Placed, Shape, engine_rank, slice_tiles
from megasync.kernels.planes import Planes, segments_of
from megasync.kernels.records import PackedRecords, pack_records
from megasync.kernels.scatter_plan import ScatterPlan, Tiles, plan_scatter

DEVICE = "cuda"

CHANGED = 0.00085
"""The article's density: changed bytes / all bytes, one byte of a changed word."""


def sample(work: Callable[[], object], *, reset: Callable[[], object] | None = None, num: int = 11) -> list[float]:
    """Times work.

    Seconds on the current stream of ``num`` runs after two that do not count; ``reset`` runs before each, untimed."""
    out = []
    for i in range(num + 2):
        if reset:
            reset()
        torch.cuda.synchronize()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        end.synchronize()
        if i >= 2:
            out.append(start.elapsed_time(end) / 1e3)
    return out


class Report:
    """Collects samples: rows for the file, lines for the terminal."""

    def __init__(self, writer: RowWriter) -> None:
        self.writer = writer
        self.lines: list[str] = []
        self.medians: dict[str, float] = {}

    def add(
        self,
        case: str,
        seconds: list[float],
        *,
        nbytes_in: int,
        nbytes_out: int,
        density: float | None = None,
        **more: object,
    ) -> float:
        """Writes the samples of a case; returns the median."""
        p50, p20, p80 = middle(seconds)
        for i, s in enumerate(seconds):
            self.writer.add(
                case,
                nbytes_in=nbytes_in,
                nbytes_out=nbytes_out,
                density=density,
                sample=i,
                took=Timed(s, 0.0),
                **more,
            )
        rate = (nbytes_in + nbytes_out) / p50 / 1e9
        self.lines.append(f"{case:58s} {p50 * 1e3:9.3f} ms  [{p20 * 1e3:.3f}, {p80 * 1e3:.3f}]  {rate:8.1f} GB/s")
        print(self.lines[-1], flush=True)
        self.medians[case] = p50
        return p50


def random_planes(words: np.ndarray, w: int, rate: float, *, one_byte: bool) -> Planes:
    """Changed words at random places of segments, on the GPU.

    Args:
        words: Words of each segment.
        w: 1 or 2 bytes a word.
        rate: Changed words / words.
        one_byte: Only one random byte of a word changes.

    Returns:
        Planes without dense segments (``rate`` must be far below a third).
    """
    size = torch.from_numpy(words).to(DEVICE)
    drawn = torch.poisson(size.to(torch.float32) * rate).to(torch.int64).minimum(size // 4)
    segment = torch.repeat_interleave(torch.arange(len(words), device=DEVICE), drawn)
    position = (torch.rand(len(segment), device=DEVICE, dtype=torch.float64) * size[segment]).to(torch.int64)
    key = torch.sort((segment << 16) | position).values
    del segment, position
    key = torch.unique_consecutive(key)
    segment, position = key >> 16, key & 0xFFFF
    counts = torch.bincount(segment, minlength=len(words)).to(torch.int32)
    gap = position.clone()
    gap[1:] -= torch.where(segment[1:] == segment[:-1], position[:-1] + 1, 0)
    entries = torch.empty((2 + w, len(key)), dtype=torch.uint8, device=DEVICE)
    entries[0], entries[1] = gap & 0xFF, gap >> 8
    entries[2:].random_(1, 256)
    if one_byte and w == 2:
        high = torch.rand(len(key), device=DEVICE) < 0.5
        entries[2].masked_fill_(high, 0)
        entries[3].masked_fill_(~high, 0)
    return Planes(w, counts, entries, torch.zeros((w, 0), dtype=torch.uint8, device=DEVICE))


@dataclass
class WordSize:
    """The tensors of one word size on a rank.

    Attributes:
        placed: The tensors.
        records: Their layout.
        tiles: The tiles that the rank's slices meet.
        plan: Scatter plan of the changed words.
        planes: The changed words.
    """

    placed: list[Placed]
    records: PackedRecords
    tiles: Tiles
    plan: ScatterPlan
    planes: Planes


@dataclass
class LiveRank:
    """An engine rank full of random weights, with random changes for them.

    Attributes:
        storages: The live weights.
        sizes: By bytes of a word.
    """

    storages: dict[str, torch.Tensor]
    sizes: dict[int, WordSize]

    @property
    def nbytes(self) -> int:
        """Bytes of the live weights."""
        return sum(t.numel() for t in self.storages.values())


def build_rank(shape: Shape, *, tp: int = 4, rank: int = 1, changed: float = CHANGED) -> LiveRank:
    """Builds a rank: layout, random weights, changed words and plans."""
    placed, nbytes = engine_rank(shape, tp, rank)
    storages = {}
    for name, n in nbytes.items():
        storages[name] = torch.empty(n, dtype=torch.uint8, device=DEVICE)
        storages[name][: n // 8 * 8].view(torch.int64).random_()
    sizes = {}
    for w in (1, 2):
        mine = [p for p in placed if p.spec.word_nbytes == w]
        names = {p.record.storage for p in mine}
        held = {k: v for k, v in storages.items() if k in names}
        records = pack_records(w, [p.spec.shape for p in mine], [[p.record] for p in mine], held)
        tiles = Tiles(*slice_tiles(mine))
        planes = random_planes(segments_of(tiles.words)[2], w, changed * w, one_byte=True)
        plan = plan_scatter(tiles, planes.counts.cpu().numpy(), records)
        sizes[w] = WordSize(mine, records, tiles, plan, planes)
    return LiveRank(storages, sizes)
