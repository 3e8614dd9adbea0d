"""Scatter apply on a model-like engine rank: kernel, digests, pinned memory, beside the scatter floor (P1, P1b, P6).

``python -m launch.bench.bench_apply`` on a GPU; ``ratio=0.1`` scales the model. Checked: the audit after an apply
equals the audit before it plus the apply's own sums, and a second apply restores the audit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import hydra
import numpy as np
import torch

from launch.bench.entry import plain_hydra, register, settings_of
from launch.bench.gpu_rank import CHANGED, DEVICE, LiveRank, Report, build_rank, random_planes, sample
from launch.bench.places import result_file
from launch.bench.rows import RESULTS, RowWriter
from launch.bench.workload import Shape
from megasync.kernels.planes import Planes, segments_of
from megasync.kernels.records import PackedRecords, pack_records
from megasync.kernels.scatter import launch_scatter, new_lanes, scatter_xor_, touched_sums_
from megasync.kernels.scatter_plan import ScatterPlan, Tiles, plan_scatter
from megasync.kernels.scatter_stream import EntryRing, scatter_xor_streamed_
from megasync.kernels.walk import audit_
from megasync.kernels.walk_plan import plan_audit
from megasync.layout.modes import Digit, Remap
from megasync.tiles import make_grid

BLOCKS = ((64, 1), (128, 1), (128, 2), (256, 2))
RATES = (0.001, 0.01, 0.02, 0.05)


@dataclass
class ApplyBench:
    """Configuration.

    Attributes:
        ratio: Share of the full model; 1 needs 113 GB of device memory.
        bf16_gb: GB of the BF16 list.
        out: Folder of the result file, or the file itself, which ends in ``.jsonl``.
    """

    ratio: float = 1.0
    bf16_gb: float = 32.0
    out: str = str(RESULTS)


def floor_addresses(plan: ScatterPlan, planes: Planes) -> tuple[torch.Tensor, torch.Tensor]:
    """Addresses and shifted values of all entries, in the order the layout yields."""
    from launch.bench.floor_triton import address_kernel

    (launch,) = plan.launches
    address = torch.zeros(plan.num_entries, dtype=torch.int64, device=planes.entries.device)
    value = torch.zeros(plan.num_entries, dtype=torch.int32, device=planes.entries.device)
    address_kernel[(len(launch.segments),)](
        launch.segments,
        launch.tiles,
        launch.group.table,
        planes.entries,
        planes.entries.stride(0),
        address,
        value,
        W=planes.word_nbytes,
        ND=plan.records.num_axes,
        TT=launch.group.num_terms,
        BLOCK=128,
        num_warps=1,
    )
    return address, value


def scatter_floor(lists: list[tuple[torch.Tensor, torch.Tensor]], report: Report, case: str) -> float:
    """The floor: the best of several launch shapes on ready-made addresses."""
    from launch.bench.floor_triton import floor_kernel

    best: list[float] = []
    for block, warps in ((256, 4), (512, 4), (1024, 4), (1024, 8)):

        def work(block: int = block, warps: int = warps) -> None:
            for address, value in lists:
                floor_kernel[(-(-len(address) // block),)](address, value, len(address), BLOCK=block, num_warps=warps)

        seconds = sample(work)
        if not best or np.median(seconds) < np.median(best):
            best = seconds
    num = sum(len(a) for a, _ in lists)
    return report.add(case, best, nbytes_in=12 * num, nbytes_out=4 * num)


def run_rank(live: LiveRank, report: Report) -> None:
    """P1 and P1b on a rank."""
    sizes = list(live.sizes.values())
    entries = sum(s.plan.num_entries for s in sizes)
    staged = sum(s.planes.entries.numel() for s in sizes)
    tables = sum(s.plan.nbytes for s in sizes)
    print(f"live {live.nbytes / 1e9:.2f} GB, {entries / 1e6:.1f} M entries, {staged / 1e6:.0f} + {tables / 1e6:.0f} MB")
    audits = [plan_audit(s.records) for s in sizes]

    def audit() -> list[torch.Tensor]:
        lanes = [new_lanes(s.plan) for s in sizes]
        for p, x in zip(audits, lanes, strict=True):
            audit_(p, x)
        return lanes

    def apply(lanes: list[torch.Tensor] | None = None) -> None:
        for i, s in enumerate(sizes):
            scatter_xor_(s.plan, s.planes, lanes[i] if lanes else None)

    before = audit()
    changed = [new_lanes(s.plan) for s in sizes]
    apply(changed)
    after = audit()
    for b, c, a in zip(before, changed, after, strict=True):
        assert torch.equal(a[:, :2], b[:, :2] + c[:, 2:]), "the audit does not see what the apply says it did"
        assert int((c[:, 2] != 0).sum()) > 0
    apply()
    assert all(torch.equal(a, b) for a, b in zip(audit(), before, strict=True)), "a second apply does not restore"
    common = {"nbytes_in": staged + tables, "nbytes_out": 4 * entries, "density": CHANGED}
    floor = scatter_floor([floor_addresses(s.plan, s.planes) for s in sizes], report, "P1 scatter floor")
    for block, warps in BLOCKS:

        def variant(block: int = block, warps: int = warps) -> None:
            for s in sizes:
                for la in s.plan.launches:
                    launch_scatter(la, s.plan, s.planes, None, None, write=True, sums=0, block=block, num_warps=warps)

        report.add(f"P1 apply, block {block}, {warps} warps", sample(variant), **common)
    p1 = report.add("P1 apply, entries in HBM", sample(apply), **common)
    zero = [new_lanes(s.plan) for s in sizes]
    faults = torch.zeros(1, dtype=torch.int32, device=DEVICE)

    def check() -> None:
        for s, x in zip(sizes, zero, strict=True):
            touched_sums_(s.plan, s.planes, x, faults)

    report.add("touched-old check (stage)", sample(check), **common)
    assert int(faults) == 0
    for block, warps in BLOCKS[:3]:

        def digested(block: int = block, warps: int = warps) -> None:
            for s, x in zip(sizes, zero, strict=True):
                for la in s.plan.launches:
                    launch_scatter(la, s.plan, s.planes, x, None, write=True, sums=2, block=block, num_warps=warps)

        report.add(f"P1b apply with sums, block {block}, {warps} warps", sample(digested), **common)
    want = [c[:, 2:].clone() for c in changed]

    def voted() -> bool:
        for x in zero:
            x.zero_()
        apply(zero)
        equal = [(x[:, 2:] == y).all() for x, y in zip(zero, want, strict=True)]
        return bool(torch.stack(equal).all())

    def restored() -> bool:
        return all(torch.equal(a, b) for a, b in zip(audit(), before, strict=True))

    if not restored():  # an odd number of applies was timed
        apply()
    assert restored(), "the timed applies did not cancel"
    assert voted(), "the sums of an apply are not those of the first one"
    apply()
    p1b = report.add("P1b apply, sums, compare, read-back", sample(voted, reset=None), **common)
    pinned = [_pinned(s.planes) for s in sizes]
    for chunk, name in ((None, "as chosen"), (2 << 20, "chunks of 2 Mi"), (16 << 20, "chunks of 16 Mi")):
        rings = [EntryRing(s.planes.word_nbytes, torch.device(DEVICE, 0), chunk_entries=chunk) for s in sizes]

        def streamed(rings: list[EntryRing] = rings) -> None:
            for s, p, r in zip(sizes, pinned, rings, strict=True):
                scatter_xor_streamed_(s.plan, p, r)

        report.add(f"P1 apply, entries pinned, {name}", sample(streamed), **common)
        if not restored():
            apply()
        assert restored(), "the streamed applies did not cancel"
    report.lines.append(f"P1 {p1 / floor:.3f} x floor, P1b {p1b / floor:.3f} x floor")


def _pinned(planes: Planes) -> Planes:
    """The planes in pinned host memory."""
    entries = torch.empty(planes.entries.shape, dtype=torch.uint8, pin_memory=True)
    dense = torch.empty(planes.dense.shape, dtype=torch.uint8, pin_memory=True)
    return Planes(planes.word_nbytes, planes.counts, entries.copy_(planes.entries), dense.copy_(planes.dense))


def run_bf16(report: Report, nbytes: int) -> None:
    """P6: one BF16 list of elements at several densities, identity layout."""
    rows, cols = nbytes // 2 // 8192, 8192
    live = torch.empty(rows * cols, dtype=torch.int16, device=DEVICE).view(torch.int64)
    live.random_()
    digits = (Digit(0, 0, 1, cols), Digit(1, 0, 1, 1))
    whole = (rows, cols)
    record = Remap(whole, (0, 0), whole, (0, 0), whole, ((0,), (1,)), digits, 0, "word", 2, "live", True)
    records = pack_records(2, [whole], [[record]], {"live": live})
    grid = make_grid(whole, 2)
    starts, extents = grid.boxes(np.arange(grid.num_tiles))
    tiles = Tiles(np.zeros(len(starts), dtype=np.int64), starts, extents)
    for rate in RATES:
        _bf16_rate(report, records, tiles, rate, nbytes)
        torch.cuda.empty_cache()
    _bf16_peers(report, live, nbytes)


def _bf16_rate(report: Report, records: PackedRecords, tiles: Tiles, rate: float, nbytes: int) -> None:
    """One density: checked, then the floor and the kernel in several launch shapes."""
    audit = plan_audit(records)
    planes = random_planes(segments_of(tiles.words)[2], 2, rate, one_byte=False)
    plan = plan_scatter(tiles, planes.counts.cpu().numpy(), records)
    sums = [new_lanes(plan) for _ in range(4)]
    audit_(audit, sums[0])
    scatter_xor_(plan, planes, sums[1])
    audit_(audit, sums[2])
    scatter_xor_(plan, planes)
    audit_(audit, sums[3])
    assert torch.equal(sums[2][:, :2], sums[0][:, :2] + sums[1][:, 2:]), "the audit does not see the apply"
    assert torch.equal(sums[3], sums[0]), "a second apply does not restore"
    floor = scatter_floor([floor_addresses(plan, planes)], report, f"P6 floor, bf16 {rate:.1%} of elements")
    torch.cuda.empty_cache()
    common = {
        "nbytes_in": planes.entries.numel(),
        "nbytes_out": 4 * plan.num_entries,
        "density": rate,
        "weights_nbytes": nbytes,
    }

    def variant(block: int | None, warps: int | None, atomic: bool | None) -> Callable[[], None]:
        return lambda: launch_scatter(
            plan.launches[0],
            plan,
            planes,
            None,
            None,
            write=True,
            sums=0,
            block=block,
            num_warps=warps,
            atomic=atomic,
        )

    shapes = ((None, None, None), (64, 1, True), (256, 2, True), (512, 4, True), (1024, 8, True), (1024, 8, False))
    for block, warps, atomic in shapes:
        how = f"block {block}, {warps} warps, {'atomic' if atomic else 'read and write'}" if block else "as chosen"
        took = report.add(f"P6 bf16 {rate:.1%}, {how}", sample(variant(block, warps, atomic), num=7), **common)
        report.lines[-1] += f"  {took * 1e12 / nbytes:.3f} ms/GB, {took / floor:.2f} x floor"


def _bf16_peers(report: Report, live: torch.Tensor, nbytes: int) -> None:
    """What one would do without the kernel, at 2 %: positions and new values by index_put, or a ready mask."""
    words = live.view(torch.int16)
    part = words[: len(words) // 4]  # positions take 8 bytes each
    at = torch.randint(0, len(part), (int(len(part) * 0.02),), device=DEVICE).unique()
    value = torch.randint(-32768, 32767, (len(at),), dtype=torch.int16, device=DEVICE)
    size = {"density": 0.02, "weights_nbytes": len(part) * 2}
    seconds = sample(lambda at=at, value=value: part.index_put_((at,), value), num=5)
    took = report.add(
        "P6 peer: positions + values, index_put", seconds, nbytes_in=10 * len(at), nbytes_out=2 * len(at), **size
    )
    report.lines[-1] += f"  {took * 1e12 / (len(part) * 2):.3f} ms/GB"
    del at, value
    mask = torch.randint_like(part.view(torch.int64), 1 << 62)
    whole = part.view(torch.int64)
    seconds = sample(lambda: torch.bitwise_xor(whole, mask, out=whole), num=5)
    took = report.add("P6 peer: XOR of a ready mask", seconds, nbytes_in=nbytes // 2, nbytes_out=nbytes // 4, **size)
    report.lines[-1] += f"  {took * 1e12 / (len(part) * 2):.3f} ms/GB"


def run(config: ApplyBench) -> None:
    """Runs all and prints a table."""
    torch.manual_seed(0)
    with RowWriter(result_file(config.out, "apply-gpu.jsonl"), "apply") as writer:
        report = Report(writer)
        run_bf16(report, int(config.bf16_gb * 1e9) // 16384 * 16384)
        torch.cuda.empty_cache()
        run_rank(build_rank(Shape().scaled(config.ratio)), report)
    print("\n".join(report.lines))


register("bench_apply", ApplyBench)


@hydra.main(version_base="1.3", config_name="bench_apply", config_path=None)
def main(config: Any) -> None:
    """Entry point."""
    run(settings_of(ApplyBench, config, least={"bf16_gb": 0.01}))


if __name__ == "__main__":
    plain_hydra(ApplyBench)
    main()
