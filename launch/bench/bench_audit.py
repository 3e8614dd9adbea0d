"""Whole-tensor kernels on a model-like engine rank: the audit by class of layout, the dense XOR of one layer (P8,
P7's XOR).

``python -m launch.bench.bench_audit`` on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import hydra
import numpy as np
import torch

from launch.bench.entry import plain_hydra, register, settings_of
from launch.bench.gpu_rank import CHANGED, DEVICE, LiveRank, Report, build_rank, random_planes, sample
from launch.bench.places import result_file
from launch.bench.rows import RESULTS, RowWriter
from launch.bench.workload import Shape
from megasync.kernels.planes import segments_of
from megasync.kernels.records import pack_records
from megasync.kernels.scatter import new_lanes, scatter_xor_
from megasync.kernels.scatter_plan import Tiles, plan_scatter
from megasync.kernels.walk import audit_, dense_xor_, launch_walk
from megasync.kernels.walk_plan import plan_audit, plan_dense
from megasync.layout import named
from megasync.tiles import make_grid

SHAPES = ((128, 1), (256, 2))


@dataclass
class AuditBench:
    """Configuration.

    Attributes:
        ratio: Share of the full model; 1 needs 113 GB of device memory.
        out: Folder of the result file, or the file itself, which ends in ``.jsonl``.
    """

    ratio: float = 1.0
    out: str = str(RESULTS)


def run_floors(report: Report) -> float:
    """Copy and read bandwidth; returns bytes a second of reading."""
    from launch.bench.floor_triton import read_kernel

    a = torch.empty(4 << 27, dtype=torch.int64, device=DEVICE).random_()
    b = torch.empty_like(a)
    nbytes = a.numel() * 8
    report.add("floor: copy", sample(lambda x=b: x.copy_(a)), nbytes_in=nbytes, nbytes_out=nbytes)
    del b
    out = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    best = 1e9
    for block, steps, warps in ((1024, 8, 4), (2048, 4, 4), (2048, 16, 4)):
        grid = (-(-a.numel() // (block * steps)),)
        seconds = sample(
            lambda g=grid, k=block, s=steps, n=warps: read_kernel[g](a, out, a.numel(), BLOCK=k, STEPS=s, num_warps=n)
        )
        best = min(best, report.add(f"floor: read, block {block}", seconds, nbytes_in=nbytes, nbytes_out=0))
    return nbytes / best


def run_rank(live: LiveRank, report: Report, read_rate: float) -> None:
    """The audit, whole and by class, and the dense XOR of the experts of one layer."""
    for w, size in live.sizes.items():
        plan = plan_audit(size.records)
        lanes = new_lanes(size.plan)
        total = 0
        for c in plan.fast:
            nbytes = int(c.items[:, 4].sum()) * 16
            total += nbytes
            one = replace(plan, fast=(c,), slow=())
            kind = f"{w}-byte words, pieces of {c.piece_nbytes}, {c.num_digits} digits, {c.num_checks} checks"
            for block, warps in ((None, None), *SHAPES):
                how = f"block {block} x {warps}" if block else "as chosen"
                seconds = sample(
                    lambda p=one, x=lanes, b=block, n=warps: launch_walk(p, None, x, sums=2, block=b, num_warps=n),
                    num=7,
                )
                took = report.add(f"P8 {kind}, {how}", seconds, nbytes_in=nbytes, nbytes_out=0)
                report.lines[-1] += f"  {nbytes / took / read_rate:.0%} of reading"
        for s in plan.slow:
            one = replace(plan, fast=(), slow=(s,))
            nbytes = int(s.boxes[:, 2].sum()) * w
            report.add(
                f"P8 {w}-byte words, word by word, as chosen",
                sample(lambda p=one, x=lanes: launch_walk(p, None, x, sums=2), num=7),
                nbytes_in=nbytes,
                nbytes_out=0,
            )
        report.add(
            f"P8 audit of all {w}-byte words",
            sample(lambda p=plan, x=lanes: audit_(p, x)),
            nbytes_in=total,
            nbytes_out=0,
        )
    size = live.sizes[1]
    layer = max(p.spec.layer for p in size.placed)
    mine = np.nonzero(np.array([size.placed[t].spec.layer == layer for t in size.tiles.tensors]))[0]
    tiles = Tiles(size.tiles.tensors[mine], size.tiles.starts[mine], size.tiles.extents[mine])
    offsets = np.cumsum(tiles.words) - tiles.words
    plan = plan_dense(tiles, offsets, size.records)
    num = int(tiles.words.sum())
    mask = torch.empty(-(-num // 8) * 8, dtype=torch.uint8, device=DEVICE)
    for density in (CHANGED, 0.5):
        mask.zero_()
        for part in mask.split(1 << 28):
            hit = torch.rand(part.numel(), device=DEVICE) < density
            part.copy_(torch.randint(1, 256, (part.numel(),), dtype=torch.uint8, device=DEVICE) * hit)
            del hit
        names = {p.record.storage for p in size.placed if p.spec.layer == layer}
        before = {k: live.storages[k].clone() for k in names}
        lanes = new_lanes(size.plan)
        audit = plan_audit(size.records)
        audit_(audit, lanes)
        old, changed = lanes.clone(), torch.zeros_like(lanes)
        dense_xor_(plan, mask, changed)
        audit_(audit, lanes.zero_())
        assert torch.equal(lanes[:, :2], old[:, :2] + changed[:, 2:]), "the audit does not see what the XOR says"
        dense_xor_(plan, mask)
        assert all(torch.equal(live.storages[k], before[k]) for k in names), "a second XOR does not restore"
        del before
        live_bytes = int(num * min(1.0, density * 32)) * 2
        for sums in (0, 4):
            for block, warps in ((None, None), (64, 1), (256, 2)):
                how = f"block {block} x {warps}" if block else "as chosen"
                seconds = sample(
                    lambda s=sums, x=changed, b=block, n=warps: launch_walk(
                        plan, mask, x if s else None, sums=s, block=b, num_warps=n
                    ),
                    num=7,
                )
                took = report.add(
                    f"dense XOR of a layer, {density:.3%}, sums {sums}, {how}",
                    seconds,
                    nbytes_in=num,
                    nbytes_out=live_bytes,
                    density=density,
                )
                report.lines[-1] += f"  {took * 1e12 / num:.3f} ms/GB"


def run_nibbles(report: Report, read_rate: float, shape: tuple[int, int] = (16_384, 65_536)) -> None:
    """The audit of a 4-bit weight in Marlin's order, which goes nibble by nibble."""
    layout = named.marlin_nibbles(shape, storage="live")
    nbytes = shape[0] * shape[1]
    live = torch.empty(nbytes, dtype=torch.uint8, device=DEVICE)
    live.view(torch.int64).random_()
    records = pack_records(1, [layout.shape], [layout.records], {"live": live})
    plan = plan_audit(records)
    starts, extents = make_grid(shape, 1).boxes(np.arange(make_grid(shape, 1).num_tiles))
    tiles = Tiles(np.zeros(len(starts), dtype=np.int64), starts, extents)
    planes = random_planes(segments_of(tiles.words)[2], 1, CHANGED, one_byte=True)
    scatter = plan_scatter(tiles, planes.counts.cpu().numpy(), records)
    before, changed, after = (new_lanes(scatter) for _ in range(3))
    audit_(plan, before)
    scatter_xor_(scatter, planes, changed)
    audit_(plan, after)
    assert torch.equal(after[:, :2], before[:, :2] + changed[:, 2:]), "the audit does not see what the apply says"
    seconds = sample(lambda: audit_(plan, after), num=7)
    took = report.add("P8 nibble repack of Marlin, as chosen", seconds, nbytes_in=nbytes, nbytes_out=0)
    report.lines[-1] += f"  {nbytes / took / read_rate:.0%} of reading"


def run(config: AuditBench) -> None:
    """Runs all and prints a table."""
    torch.manual_seed(0)
    with RowWriter(result_file(config.out, "audit-gpu.jsonl"), "audit") as writer:
        report = Report(writer)
        rate = run_floors(report)
        run_nibbles(report, rate)
        torch.cuda.empty_cache()
        run_rank(build_rank(Shape().scaled(config.ratio)), report, rate)
    print("\n".join(report.lines))


register("bench_audit", AuditBench)


@hydra.main(version_base="1.3", config_name="bench_audit", config_path=None)
def main(config: Any) -> None:
    """Entry point."""
    run(settings_of(AuditBench, config))


if __name__ == "__main__":
    plain_hydra(AuditBench)
    main()
