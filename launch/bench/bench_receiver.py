"""The receiver's real path on a model-like engine rank: staging (P5), pause (P1, P1b), streaming (P7), serving beside (P12).

``python -m launch.bench.bench_receiver --ratio 1`` on a GPU. A publication of 64 owners lies in a directory in memory; one
rank of a TP4 engine follows it with an `Applier`, the other three ranks answer at once. Versions undo each other, so that the
audit after two of them must equal the audit before. Rows go to ``results/receiver-gpu.jsonl``.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from launch.bench import receiver_world
from launch.bench.gpu_rank import Report
from launch.bench.receiver_world import build_world
from launch.bench.rows import RESULTS, RowWriter, Timed
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
from megasync.receiver.stream import StreamBackend, sm_backend
from megasync.receiver.stream_placed import StreamPlaced
from megasync.receiver.sums import Sums
from megasync.sinks.local import LocalSink
from megasync.versions.publication import PublicationReader

DENSITY = 0.00085


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
    """P5, P1 and P1b through the applier."""
    backend = ScatterBackend(bench.binding, processes=bench.workers)
    manifests = [bench.publish(backend) for _ in range(1)]
    applier = bench.applier(backend)
    live = bench.world.live_nbytes
    size = {"live_nbytes": live, "workers": bench.workers, "num_frames": len(manifests[0].frames)}
    rows: dict[str, list[float]] = {"staging": [], "stage and proof": [], "pause": [], "update from stage": []}
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
            rows["staging"].append(staged.stage_s)
            rows["stage and proof"].append(took)
            rows["pause"].append(result.pause_s)
            rows["update from stage"].append(result.total_s)
    assert applier.audit().version == num + 1
    share = staged.num_changed / manifests[-1].num_changed
    print(f"staged {share:.3f} of the entries, {backend.memory()}", flush=True)
    common = {"nbytes_in": staged.fetched_nbytes, "nbytes_out": staged.nbytes, "density": DENSITY}
    for name, case in (
        ("staging", "P5 staging with the touched-old check"),
        ("stage and proof", "P5 staging, as called"),
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
        read = events(lambda: [placed._read(u) for u in placed._units])
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


def run_stream(bench: Bench, report: Report) -> None:
    """P7: nvCOMP on the SMs, a sparse publication transcoded to LZ4 blocks while staging."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    backend: StreamBackend = sm_backend(bench.binding)
    backend.prove_by_reading = True
    manifest = bench.world.newest
    assert manifest is not None
    reader = PublicationReader(bench.world.sink, receiver_world.RUN)
    started = time.perf_counter()
    staged = stage(bench.binding, backend, reader, manifest, None, limit_nbytes=1 << 40, read_live=False)
    staging = time.perf_counter() - started
    (placed,) = staged.placed
    assert isinstance(placed, StreamPlaced)
    before = bench.audit()

    def whole() -> None:
        placed.write_()

    placed.write_()
    placed.write_()
    assert np.array_equal(bench.audit(), before), "writing twice does not restore"
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    held = free - torch.cuda.mem_get_info()[0]

    def decoder_alone() -> None:
        for n, step in enumerate(placed.steps):
            backend.slots.fill(n % 2, step, placed.room, backend.decoder)
            backend.decoder.finish(n % 2)

    def xor_alone() -> None:
        with backend.queue.running():
            lanes = placed._new_lanes()
            for n in range(len(placed.steps)):
                placed._launch(n % 2, n, lanes, write=True)
            placed._done.clear()
            backend.queue.wait()

    seconds = {
        name: [_wall(work) for _ in range(6)][1:]
        for name, work in (
            ("P7 two slots, total", whole),
            ("P7 decoder alone", decoder_alone),
        )
    }
    # What the slots hold now is the mask of the last steps, XORed an even number of times into every step.
    seconds["P7 XOR alone"] = [_wall(xor_alone) for _ in range(6)][2:]
    live = bench.world.live_nbytes
    for name, found in seconds.items():
        report.add(
            name,
            found,
            nbytes_in=placed.nbytes,
            nbytes_out=live,
            density=DENSITY,
            live_nbytes=live,
            hbm_nbytes=held,
            slots_nbytes=2 * backend.slot_nbytes,
            num_steps=len(placed.steps),
            staging_s=staging,
        )
    print(
        f"HBM beyond the weights {held / 1e6:.0f} MB, slots {2 * backend.slot_nbytes / 1e6:.0f} MB, {backend.memory()}"
    )


def _wall(work: Any) -> float:
    torch.cuda.synchronize()
    started = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - started


def run_serving(bench: Bench, report: Report, tokens: int = 300) -> None:
    """P12: a decoder with a captured graph, alone and while versions are staged, by processes and by threads."""
    big = sorted(bench.world.engine.live.values(), key=lambda t: -t.numel())[:24]
    views = [t[: t.numel() // 12288 * 12288].view(torch.bfloat16).view(-1, 6144) for t in big]
    x = torch.randn(6144, 1, dtype=torch.bfloat16, device="cuda")
    for v in views:
        v @ x
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for v in views:
            v @ x

    def decode(num: int) -> list[float]:
        out = []
        for _ in range(num):
            started = time.perf_counter()
            graph.replay()
            torch.cuda.current_stream().synchronize()
            out.append(time.perf_counter() - started)
        return out

    def token(case: str, found: list[float], **more: object) -> None:
        p50, p99 = np.percentile(found, (50, 99)).tolist()
        report.add(case, found, nbytes_in=0, nbytes_out=0, p99_s=p99, **more)
        print(f"{case}: p50 {p50 * 1e3:.3f} ms, p99 {p99 * 1e3:.3f} ms, {more}", flush=True)

    decode(20)
    token("P12 token alone", decode(tokens))
    for processes, workers in ((bench.workers, bench.workers), (4, 4), (1, 1), (0, 4), (0, 1)):
        backend = ScatterBackend(bench.binding, processes=processes)
        before = torch.cuda.mem_get_info()[0]
        stop, staged = threading.Event(), []
        thread = threading.Thread(target=_stage_on, args=(bench, backend, workers, stop, staged))
        thread.start()
        time.sleep(0.5)
        beside = decode(tokens)
        stop.set()
        thread.join()
        token(
            f"P12 token beside staging, {f'{processes} processes' if processes else f'{workers} threads'}",
            beside,
            stage_s=float(np.median(staged)),
            hbm_nbytes=before - torch.cuda.mem_get_info()[0],
        )
        if backend.workers is not None:
            backend.workers.close()


def _stage_on(bench: Bench, backend: ScatterBackend, workers: int, stop: threading.Event, staged: list[float]) -> None:
    """Stage the newest version again and again."""
    reader = PublicationReader(bench.world.sink, receiver_world.RUN)
    manifest = bench.world.newest
    assert manifest is not None
    with ThreadPoolExecutor(workers) as pool:
        while not stop.is_set():
            found = stage(
                bench.binding,
                backend,
                reader,
                manifest,
                pool if workers > 1 else None,
                limit_nbytes=1 << 40,
                read_live=True,
                in_flight=2 * workers,
            )
            staged.append(found.stage_s)


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=78)
    parser.add_argument("--vocabulary", type=int, default=Shape().vocabulary)
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--samples", type=int, default=3)
    parser.add_argument("--only", default="scatter,stream,serving")
    parser.add_argument("--out", type=Path, default=RESULTS / "receiver-gpu.jsonl")
    given = parser.parse_args()
    shape = replace(Shape(), num_layers=given.layers, vocabulary=given.vocabulary)
    directory = tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None)
    try:
        with RowWriter(given.out, "receiver") as writer:
            report = Report(writer)
            bench = Bench(shape, directory, "cuda", given.workers)
            for name, seconds in bench.marks.items():
                writer.add(name, nbytes_in=0, nbytes_out=bench.world.live_nbytes, took=Timed(seconds, 0.0))
            if "scatter" in given.only:
                run_scatter(bench, report, given.samples)
            if "serving" in given.only:
                run_serving(bench, report)
            if "stream" in given.only:
                run_stream(bench, report)
            print("\n".join(report.lines))
    finally:
        shutil.rmtree(directory)


if __name__ == "__main__":
    main()
