"""Mask, compaction, digests and snapshot update of one trainer rank's share, snapshot in HBM and in pinned memory (P2).

``python -m launch.bench.bench_mask`` on a GPU. Checked: the snapshot equals the live bytes afterwards, and the planes
of the second word size scatter back to the old bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import hydra
import numpy as np
import torch

from launch.bench.entry import plain_hydra, register, settings_of
from launch.bench.gpu_rank import CHANGED, DEVICE, Report, sample
from launch.bench.places import result_file
from launch.bench.rows import RESULTS, RowWriter
from launch.bench.workload import Shape, owner_share
from megasync.kernels.compact import compact_jobs_
from megasync.kernels.compact_plan import CompactPlan, plan_compact
from megasync.kernels.compact_runs import Region
from megasync.kernels.scatter_plan import Tiles
from megasync.tiles import tile_grid
from megasync.types import TensorSpec

OWNERS = 64

ARENA_NBYTES = 7_400_000_000 // 8 * 8


@dataclass
class MaskBench:
    """Configuration.

    Attributes:
        ratio: Share of the full model; 1 is the article's 6.95 GB a rank.
        pinned: Measure a snapshot in pinned host memory too.
        out: Folder of the result file, or the file itself, which ends in ``.jsonl``.
    """

    ratio: float = 1.0
    pinned: bool = True
    out: str = str(RESULTS)


def build_plans(shape: Shape, arena: torch.Tensor) -> tuple[list[CompactPlan], list[Region], int]:
    """Plans of both word sizes over live tensors carved from ``arena``; also their regions and the snapshot's bytes."""
    share = owner_share(shape, OWNERS, 3)
    at = snapshot = 0
    plans, all_regions = [], []
    for w in (1, 2):
        mine = [(spec, tiles) for spec, tiles in share if spec.word_nbytes == w]
        tensors, starts, extents, regions = [], [], [], []
        for i, (spec, tiles) in enumerate(mine):
            first, size = tile_grid(spec).boxes(tiles)
            live, at = _live(spec, len(tiles), first, size, arena, at)
            for box, extent, view in zip(first.tolist(), size.tolist(), live, strict=True):
                tensors.append(i)
                pad = 2 - len(box)
                starts.append([0] * pad + box)
                extents.append([1] * pad + extent)
                regions.append(Region(len(tensors) - 1, tuple(box), view, snapshot))
                snapshot += -(-view.numel() * w // 16) * 16
        tiles = Tiles(np.array(tensors), np.array(starts), np.array(extents))
        plans.append((w, [s.shape for s, _ in mine], tiles, regions))
        all_regions += regions
    made = [plan_compact(w, shapes, tiles, regions, snapshot) for w, shapes, tiles, regions in plans]
    return made, all_regions, snapshot


def _live(
    spec: TensorSpec, num: int, first: np.ndarray, size: np.ndarray, arena: torch.Tensor, at: int
) -> tuple[list[torch.Tensor], int]:
    """Views of a tensor's owned tiles: of the whole tensor where all are owned, else of the tile alone."""
    dtype = torch.uint8 if spec.word_nbytes == 1 else torch.int16
    if num == tile_grid(spec).num_tiles:
        whole = arena[at : at + spec.nbytes].view(dtype).view(spec.shape)
        cuts = [tuple(slice(a, a + b) for a, b in zip(f, s, strict=True)) for f, s in zip(first, size, strict=True)]
        return [whole[c] for c in cuts], at + -(-spec.nbytes // 256) * 256
    out = []
    for extent in size.tolist():
        nbytes = int(np.prod(extent)) * spec.word_nbytes
        out.append(arena[at : at + nbytes].view(dtype).view(extent))
        at += -(-nbytes // 256) * 256
    return out, at


def fill(snapshot: torch.Tensor, regions: list[Region]) -> None:
    """Brings the snapshot to the live bytes."""
    for r in regions:
        n = r.live.numel() * r.live.element_size()
        target = snapshot[r.snapshot_offset : r.snapshot_offset + n]
        target.view(r.live.dtype).view(r.live.shape).copy_(r.live)


def run_share(shape: Shape, report: Report, *, pinned: bool) -> None:
    """P2 in HBM, then from pinned memory."""
    arena = torch.empty(ARENA_NBYTES, dtype=torch.uint8, device=DEVICE)
    arena.view(torch.int64).random_()
    plans, regions, nbytes = build_plans(shape, arena)
    live = sum(p.nbytes for p in plans)
    classes = {f"{p.word_nbytes}-byte words": {v: len(ids) for v, ids, _ in p.classes} for p in plans}
    print(
        f"{live / 1e9:.2f} GB live, {len(regions)} tiles, {sum(len(p.rows) for p in plans)} pieces by vector {classes}"
    )
    snapshot = torch.zeros(nbytes, dtype=torch.uint8, device=DEVICE)
    fill(snapshot, regions)
    place = torch.randint(0, arena.numel(), (int(arena.numel() * CHANGED),), device=DEVICE).unique()
    value = torch.randint(1, 256, (len(place),), dtype=torch.uint8, device=DEVICE)
    lanes = [torch.zeros((p.num_tensors, 4), dtype=torch.int64, device=DEVICE) for p in plans]

    def change() -> None:
        arena[place] ^= value

    def compact(source: torch.Tensor, span: int | None = None) -> list:
        return list(compact_jobs_(list(zip(plans, lanes, strict=True)), source, span_nbytes=span))

    change()
    parts = compact(snapshot)
    entries = sum(part.planes.entries.shape[1] for part in parts)
    wire = sum(part.planes.entries.numel() + part.planes.counts.numel() * 4 for part in parts)
    sums = [x.clone() for x in lanes]
    change()
    compact(snapshot)
    # There and back: what the second pass adds to the sums undoes the first.
    assert all(not bool(x[:, 2:].any()) for x in lanes), "sums of a change and of its undoing do not cancel"
    assert all(bool(x.any()) for x in sums)
    check = torch.zeros_like(snapshot)
    fill(check, regions)
    assert torch.equal(check, snapshot), "the snapshot is not the live bytes"
    print(f"{entries / 1e6:.2f} M entries, {wire / 1e6:.1f} MB of planes")
    sector = 32 * entries
    report.add(
        "P2 floor: copy of the share", sample(lambda x=check: x.copy_(snapshot)), nbytes_in=nbytes, nbytes_out=nbytes
    )
    del check
    common = {"nbytes_in": 2 * live, "nbytes_out": sector + wire, "density": CHANGED}
    for span in (None, 1 << 29, 2 << 30):
        how = f"span {span >> 20} MiB" if span else "as chosen"
        report.add(
            f"P2 mask + compact + sums + snapshot, HBM, {how}",
            sample(lambda s=span: compact(snapshot, s), reset=change),
            **common,
        )
    report.add("P2 nothing changed, HBM", sample(lambda: compact(snapshot)), nbytes_in=2 * live, nbytes_out=0)
    if pinned:
        host = torch.empty(snapshot.shape, dtype=torch.uint8, pin_memory=True)
        host.copy_(snapshot)
        floor = sample(lambda: snapshot.copy_(host, non_blocking=True), num=3)
        report.add("P2 floor: PCIe up", floor, nbytes_in=live, nbytes_out=0)
        for span in (None, 1 << 27):
            how = f"span {span >> 20} MiB" if span else "as chosen"
            report.add(
                f"P2 mask + compact + sums + snapshot, pinned, {how}",
                sample(lambda s=span: compact(host, s), reset=change, num=3),
                **common,
            )
        fill(snapshot, regions)
        assert torch.equal(host.to(DEVICE), snapshot), "the pinned snapshot is not the live bytes"


def run(config: MaskBench) -> None:
    """Runs all and prints a table."""
    torch.manual_seed(0)
    with RowWriter(result_file(config.out, "mask-gpu.jsonl"), "mask") as writer:
        report = Report(writer)
        run_share(Shape().scaled(config.ratio), report, pinned=config.pinned)
    print("\n".join(report.lines))


register("bench_mask", MaskBench)


@hydra.main(version_base="1.3", config_name="bench_mask", config_path=None)
def main(config: Any) -> None:
    """Entry point."""
    run(settings_of(MaskBench, config))


if __name__ == "__main__":
    plain_hydra(MaskBench)
    main()
