"""The receiver's real path on a model-like engine rank: staging (P5), pause (P1, P1b), streaming (P7), serving beside (P12).

``python -m launch.bench.bench_receiver --ratio 1`` on a GPU. A publication of 64 owners lies in a directory in memory; one
rank of a TP4 engine follows it with an `Applier`, the other three ranks answer at once. Versions undo each other, so that the
audit after two of them must equal the audit before. Rows go to ``results/receiver-gpu.jsonl``.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from launch.bench import receiver_world
from launch.bench.entry import Parser, count, require_cuda, trace
from launch.bench.gpu_rank import Report
from launch.bench.places import result_file
from launch.bench.receiver_staging import run_serving, run_staging
from launch.bench.receiver_stream import run_stream
from launch.bench.receiver_world import build_world
from launch.bench.rows import RowWriter, Timed
from launch.bench.workload import Shape
from megasync.config import ApplyConfig
from megasync.manifest import Manifest, root_of
from megasync.receiver import applier as applier_module
from megasync.receiver.applier import Applier
from megasync.receiver.audit import audit
from megasync.receiver.backend import Backend
from megasync.receiver.bind import bind
from megasync.receiver.ledger import as_lanes
from megasync.receiver.scatter import ScatterBackend
from megasync.receiver.scatter_placed import ScatterPlaced
from megasync.receiver.stage import stage
from megasync.receiver.sums import Sums
from megasync.sinks.local import LocalSink
from megasync.versions.publication import PublicationReader

DENSITY = 0.00085
PARTS = ("scatter", "staging", "stream", "serving")


class Bench:
    """One engine rank at version 0, and the two versions that lead away and back.

    Args:
        shape: Sizes of the model.
        directory: Of the sink.
        device: Where the weights live.
        workers: Threads of the receiver.
    """

    def __init__(self, shape: Shape, directory: str, device: str, workers: int) -> None:
        self.workers = workers
        self.marks: dict[str, float] = {}
        started = time.perf_counter()
        self.world = build_world(shape, LocalSink(directory), device)
        self._mark("world_s", started)
        started = time.perf_counter()
        self.binding = bind(self.world.engine, self.world.schema, shadow_limit_nbytes=1 << 30)
        self._mark("bind_s", started)
        # Binding 116,058 tensors takes a while and is no part of any figure: it is done once for all appliers.
        applier_module.bind = lambda *a, **k: self.binding
        started = time.perf_counter()
        self.table = self.audit()
        self._mark("audit_s", started)
        self.world.checkpoint(self.table)
        self.sums: tuple[np.ndarray, np.ndarray] | None = None
        self.tables = [self.table]

    def _mark(self, name: str, started: float) -> None:
        self.marks[name] = time.perf_counter() - started
        print(f"{name} {self.marks[name]:.2f}", flush=True)

    def audit(self) -> np.ndarray:
        """State digests of what is live, frozen tensors of other ranks aside."""
        table = np.zeros((len(self.world.schema.tensors), 16), np.uint8)
        table[self.binding.group_ids] = audit(self.binding, None)
        return table

    def publish(self, backend: Backend) -> Manifest:
        """The next version: there, or back again. The sums of the first one are learnt by staging it."""
        draft = self.world.draft(DENSITY)
        ids = draft.touched_ids.astype(np.int64)
        if self.sums is None:
            reader = PublicationReader(self.world.sink, receiver_world.RUN)
            staged = stage(
                self.binding, backend, reader, draft, None, limit_nbytes=1 << 40, read_live=True, in_flight=2
            )
            assert staged.sums is not None
            before, after = (Sums.join(x[k] for x in staged.sums).over(ids) for k in (0, 1))
            self.sums = before, after
            lanes = as_lanes(self.table).copy()
            lanes[ids] += after - before
            self.tables.append(lanes.astype("<u8").view(np.uint8).reshape(-1, 16))
        there = draft.version % 2 == 1
        before = self.sums[0 if there else 1]
        table = self.tables[1 if there else 0]
        olds = np.ascontiguousarray(before).astype("<u8").view(np.uint8).reshape(-1, 16)
        return self.world.publish(draft, table[ids], olds, root_of(table))

    def applier(self, backend: Backend) -> Applier:
        """An applier that has joined."""
        config = ApplyConfig(run=receiver_world.RUN, workers=self.workers, staged_limit_nbytes=1 << 40)
        made = Applier(self.world.engine, self.world.sink, config, backend=lambda b: backend)
        made.join()
        return made


def events(work: Any, num: int = 5) -> float:
    """Median seconds of work on the current stream, by events."""
    found = []
    for _ in range(num):
        torch.cuda.synchronize()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end) / 1e3)
    return float(np.median(found))


def run_scatter(bench: Bench, report: Report, num: int) -> None:
    """P1 and P1b through the applier."""
    backend = ScatterBackend(bench.binding, processes=bench.workers)
    manifests = [bench.publish(backend) for _ in range(1)]
    applier = bench.applier(backend)
    live = bench.world.live_nbytes
    size = {"live_nbytes": live, "workers": bench.workers, "num_frames": len(manifests[0].frames)}
    rows: dict[str, list[float]] = {"pause": [], "update from stage": []}
    for k in range(num + 1):
        if k:
            manifests.append(bench.publish(backend))
        started = time.perf_counter()
        staged = applier.stage()
        took = time.perf_counter() - started
        assert staged is not None
        result = applier.update()
        print(
            f"version {result.version}: stage {staged.stage_s * 1e3:.1f} ms, call {took * 1e3:.1f} ms, pause "
            f"{result.pause_s * 1e3:.2f} ms, update {result.total_s * 1e3:.1f} ms",
            flush=True,
        )
        if k:  # the first one makes the arenas
            rows["pause"].append(result.pause_s)
            rows["update from stage"].append(result.total_s)
    assert applier.audit().version == num + 1
    share = staged.num_changed / manifests[-1].num_changed
    print(f"staged {share:.3f} of the entries, {backend.memory()}", flush=True)
    common = {"nbytes_in": staged.fetched_nbytes, "nbytes_out": staged.nbytes, "density": DENSITY}
    for name, case in (
        ("pause", "P1b pause: write, new-state digest, read-back, vote, resume"),
        ("update from stage", "update of a staged version"),
    ):
        report.add(case, rows[name], **common, staged_share=share, **size)
    session = applier._session
    assert session is not None
    assert session.last is not None
    (placed,) = session.last.staged.placed
    assert isinstance(placed, ScatterPlaced)
    with backend.queue.running():
        plain = events(placed.xor_)
        read = events(placed._read)
        floor = _floor(placed)
    report.add("P1 scatter floor", [floor], nbytes_in=0, nbytes_out=0, **size)
    report.add("P1 apply through the applier's plan", [plain], nbytes_in=0, nbytes_out=0, floor_s=floor, **size)
    report.add("read-back of all touched words", [read], nbytes_in=0, nbytes_out=0, floor_s=floor, **size)
    placed.xor_()  # five were timed: back to the version held
    torch.cuda.synchronize()
    assert applier.audit().version == num + 1
    print(f"P1 {plain / floor:.3f} x floor; P1b {np.median(rows['pause']) / floor:.3f} x floor", flush=True)
    applier.rollback()
    applier.close()


def _floor(placed: ScatterPlaced) -> float:
    """Ready-made addresses in the order that the layout yields, best of several launch shapes."""
    from launch.bench.bench_apply import floor_addresses
    from launch.bench.floor_triton import floor_kernel

    lists = [floor_addresses(u.places.plan, u.planes) for u in placed._units]
    best = np.inf
    for block, warps in ((256, 4), (512, 4), (1024, 8)):

        def work(block: int = block, warps: int = warps) -> None:
            for address, value in lists:
                floor_kernel[(-(-len(address) // block),)](address, value, len(address), BLOCK=block, num_warps=warps)

        best = min(best, events(work, 6))
    return float(best)


def main() -> None:
    """Run what was asked for."""
    parser = Parser(__doc__)
    parser.add_argument("--layers", type=count, default=78)
    parser.add_argument("--vocabulary", type=count, default=Shape().vocabulary)
    parser.add_argument("--workers", type=count, default=16)
    parser.add_argument("--samples", type=count, default=3)
    parser.add_argument("--only", default=",".join(PARTS), help="some of these, with commas")
    parser.add_argument("--tokens", type=count, default=1000, help="in each of three rounds")
    parser.add_argument("--trace", type=trace, help="chrome trace of one two-slot pass, .json.gz")
    given = parser.parse_args()
    if unknown := {*given.only.split(",")} - {*PARTS}:
        parser.error(f"argument --only: unknown {sorted(unknown)}; known: {', '.join(PARTS)}")
    if given.trace and "stream" not in given.only.split(","):
        parser.error("argument --trace: it is made by the part stream, which --only leaves out")
    require_cuda()
    shape = replace(Shape(), num_layers=given.layers, vocabulary=given.vocabulary)
    directory = tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None)
    try:
        with RowWriter(result_file(given.out, "receiver-gpu.jsonl"), "receiver") as writer:
            report = Report(writer)
            bench = Bench(shape, directory, "cuda", given.workers)
            for name, seconds in bench.marks.items():
                writer.add(name, nbytes_in=0, nbytes_out=bench.world.live_nbytes, took=Timed(seconds, 0.0))
            if "scatter" in given.only:
                run_scatter(bench, report, given.samples)
            if "staging" in given.only:
                run_staging(bench, report)
            if "serving" in given.only:
                run_serving(bench, report, given.tokens)
            if "stream" in given.only:
                run_stream(bench, report, given.trace)
            print("\n".join(report.lines))
    finally:
        shutil.rmtree(directory)


if __name__ == "__main__":
    main()
