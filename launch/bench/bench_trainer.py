r"""The trainer's side of a sync on one GPU: stream held and busy (P2), and step end to payload durable (P3).

The real code path, ``MegasyncCallback.step_end`` over a model-like list of 6.96 GB with random weights at the article's
density: mask, compaction, digests and snapshot update on the side stream, landing, outer codec, local sink with fsync,
manifest and head. Floors (device copy, PCIe) are measured in the same run. ``steps`` are matrix products that stand for a
forward and backward, with and without a sync behind them, taken in turn. Writes one JSON line a sample.

    python -m launch.bench.bench_trainer repeats=11 sink=/dev/shm/megasync-bench
    CUDA_DEVICE_MAX_CONNECTIONS=1 python -m launch.bench.bench_trainer \
        out=launch/bench/results/trainer-gpu-connections1.jsonl
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import hydra
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from launch.bench.entry import plain_hydra, refuse, register, settings_of
from launch.bench.places import emptied_fault, result_file
from launch.bench.rows import RESULTS, Row, RowWriter, Timed, middle, table
from launch.bench.workload import Shape, model_specs
from megasync.adapters.torch_trainer import TensorExporter
from megasync.config import PublishConfig, SnapshotPlace
from megasync.sinks.base import Buffer
from megasync.sinks.forward import ForwardingSink
from megasync.sinks.local import LocalSink
from megasync.trainer.callback import MegasyncCallback
from megasync.trainer.device_snapshot import make_snapshot
from megasync.trainer.groups import Groups
from megasync.trainer.metadata import exchange
from megasync.trainer.plan import make_plan
from megasync.trainer.publishing import Outcome
from megasync.trainer.regions import match_regions
from megasync.trainer.seed import fill_from_live, snapshot_sums
from megasync.trainer.start import Started
from megasync.versions.anchor import publish_checkpoint
from megasync.versions.head import claim
from megasync.versions.lineage import start_lineage

CHANGED = 0.00085
SHAPE = Shape(num_layers=3, num_dense=1, num_experts=104, vocabulary=38_720)
_DTYPES = {"BF16": torch.bfloat16, "U8": torch.uint8, "F8_E4M3": torch.float8_e4m3fn}
_ALIGN = 256
_AHEAD = 10  # products that are queued when the step ends


@dataclass
class TrainerBench:
    """Configuration.

    Attributes:
        repeats: Samples a case, after two that are not counted.
        places: Where the snapshot is.
        num_experts: Experts of the model-like list: 104 for 6.96 GB.
        step_products: 8192-wide products of a step, about 1.5 ms each: 0.7 s, less than a step of such weights takes.
        sink: Folder to publish to; emptied before and after.
        out: Folder of the result file, or the file itself, which ends in ``.jsonl``.
    """

    repeats: int = 9
    places: list[SnapshotPlace] = field(default_factory=lambda: list(SnapshotPlace))
    num_experts: int = 104
    step_products: int = 450
    sink: str = "/tmp/megasync-bench-trainer"
    out: str = str(RESULTS)


class TimedSink(ForwardingSink):
    """Notes when a payload has become durable."""

    payload_at: float = 0.0

    def create(self, key: str, parts: Iterable[Buffer], *, timeout_s: float = 60.0) -> int:
        """See ``Sink.create``."""
        nbytes = self.inner.create(key, parts, timeout_s=timeout_s)
        if "payload" in key:
            self.payload_at = time.perf_counter()
        return nbytes


class Trainer:
    """Live weights in one allocation, and a callback over them whose version 0 is named by digests alone."""

    def __init__(self, config: TrainerBench, place: SnapshotPlace) -> None:
        shape = Shape(SHAPE.num_layers, SHAPE.num_dense, config.num_experts, vocabulary=SHAPE.vocabulary)
        specs = model_specs(shape)
        self.arena = torch.empty(sum(-(-s.nbytes // _ALIGN) * _ALIGN for s in specs), dtype=torch.uint8, device="cuda")
        self.arena.random_(0, 256)
        tensors, at = {}, 0
        for spec in specs:
            tensors[spec.name] = self.arena[at : at + spec.nbytes].view(_DTYPES[spec.dtype]).view(spec.shape)
            at += -(-spec.nbytes // _ALIGN) * _ALIGN
        self.nbytes = sum(s.nbytes for s in specs)
        shutil.rmtree(config.sink, ignore_errors=True)
        Path(config.sink).mkdir(parents=True)
        self.sink = TimedSink(LocalSink(config.sink))
        self.done_at = 0.0
        self.outcome: Outcome | None = None
        publishing = PublishConfig(snapshot=place, timeout_s=120.0)
        self.callback = MegasyncCallback(TensorExporter(tensors), self.sink, publishing, on_outcome=self._done)
        self._start(tensors, publishing)

    def _start(self, tensors: dict[str, torch.Tensor], config: PublishConfig) -> None:
        exporter = TensorExporter(tensors)
        schema, holdings = exchange(config.run, exporter, None)
        plan = make_plan(schema, holdings)
        regions = match_regions(schema, plan, 0, exporter.own(plan.owned(0).named_boxes(), schema.tensors))
        snapshot = make_snapshot(schema, regions, config.snapshot, self.arena.device)
        fill_from_live(snapshot)
        lineage = start_lineage(schema, claim(self.sink, config.run), snapshot_sums(snapshot))
        lineage = publish_checkpoint(self.sink, lineage)
        started = Started(schema, plan, snapshot, lineage.head, lineage, False, self.arena.device, False)
        self.callback._enter(exporter, started, Groups(None, None, None), None)

    def _done(self, outcome: Outcome) -> None:
        self.done_at, self.outcome = time.perf_counter(), outcome

    def change(self) -> None:
        """An optimizer step: random bytes change, queued on the compute stream."""
        self.callback.before_optimizer_step()
        at = torch.randint(0, self.arena.numel(), (int(self.nbytes * CHANGED),), device="cuda")
        self.arena[at] ^= torch.randint(1, 256, at.shape, dtype=torch.uint8, device="cuda")

    def times(self) -> dict[str, float]:
        """Telemetry since the last call, once the device has come this far."""
        torch.cuda.synchronize()
        state = self.callback._state
        assert state is not None
        state.masker.collect_times()  # type: ignore[attr-defined]
        return self.callback.telemetry.drain()[0]

    def check(self) -> None:
        """The snapshot is the live weights."""
        state = self.callback._state
        assert state is not None
        snapshot = state.started.snapshot
        for i, region in enumerate(snapshot.regions):
            kept, live = snapshot.tensor(i).to("cuda"), region.data.view(snapshot.tensor(i).dtype)
            if not torch.equal(kept, live):
                raise RuntimeError(f"the snapshot differs from the live weights at {region.box}")


def floor_s(work: Callable[[], object], repeats: int) -> float:
    """Median device seconds of a piece of work."""
    took = []
    for i in range(repeats + 1):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record()
        work()
        b.record()
        b.synchronize()
        if i:
            took.append(a.elapsed_time(b) / 1e3)
    return middle(took)[0]


def one_sync(trainer: Trainer) -> Row:
    """One step end on an idle device, to the verdict."""
    trainer.change()
    trainer.times()
    cpu, start = time.process_time(), time.perf_counter()
    trainer.callback.step_end()
    returned = time.perf_counter()
    trainer.callback.before_optimizer_step()
    fenced = time.perf_counter()
    trainer.callback.flush()
    times, outcome = trainer.times(), trainer.outcome
    assert outcome is not None
    assert outcome.durable, outcome.error
    return {
        "took": Timed(trainer.sink.payload_at - start, time.process_time() - cpu),
        "nbytes_out": outcome.payload_nbytes,
        "busy_s": times["pass"],
        "step_end_s": returned - start,
        "fence_host_s": fenced - returned,
        "landing_s": times.get("landing", 0.0),
        "codec_s": times["codec"],
        "durable_s": trainer.sink.payload_at - start,
        "head_s": trainer.done_at - start,
        "num_changed": outcome.num_changed,
        "manifest_nbytes": outcome.manifest_nbytes,
    }


def steps(trainer: Trainer, config: TrainerBench) -> Iterable[Row]:
    """Steps with and without a sync behind them, in turn: device seconds of the step, and how long it was held.

    Clock and first products come before the step end, as the trainer's host runs ahead of its GPU: where all streams share one
    queue, an event that is recorded after a kernel of the mask waits for it, and would begin a step with the mask behind it.
    Order and rests must not decide: a GPU that has rested (while a pass was encoded, say) runs at another clock, and would make
    the step after it shorter. So steps come in the order with, without, without, with, and before each one that is not measured.
    """
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    for i in range(2 * config.repeats + 4):
        syncs = i % 4 in (0, 3)
        for _ in range(config.step_products):
            torch.matmul(a, b)
        trainer.change()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for j in range(config.step_products):
            torch.matmul(a, b)
            if syncs and j == _AHEAD:
                trainer.callback.step_end()
        trainer.callback.before_optimizer_step()
        end.record()
        times = trainer.times()
        trainer.callback.flush()
        step_s = begin.elapsed_time(end) / 1e3
        if i >= 4:
            yield {"syncs": syncs, "took": Timed(step_s, 0.0), "held_s": times.get("held", 0.0)}


def run(config: TrainerBench) -> Path:
    """All cases; returns the result file."""
    torch.manual_seed(0)
    path = result_file(config.out, "trainer-gpu.jsonl")
    medians: list[tuple[str, float, float]] = []
    with RowWriter(path, "trainer") as out:
        for place in config.places:
            trainer = Trainer(config, SnapshotPlace(place))
            where: Row = {"place": trainer.callback.config.snapshot.value, "file_system": file_system(config.sink)}
            where |= {"max_connections": os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "")}
            half = trainer.arena.numel() // 2
            copy_s = floor_s(trainer.arena[:half].clone, 5) * trainer.nbytes / half
            pinned = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
            up_s = floor_s(partial(pinned.to, "cuda", non_blocking=True), 5) * trainer.nbytes / pinned.numel()
            del pinned
            floors: Row = {"copy_floor_s": copy_s, "pcie_floor_s": up_s}
            rows = [one_sync(trainer) for _ in range(config.repeats + 2)][2:]
            for i, row in enumerate(rows):
                out.add("sync", nbytes_in=trainer.nbytes, density=CHANGED, sample=i, **row, **where, **floors)
            medians += [(f"{where['place']} {k}", *_two(r[k] for r in rows)) for k in rows[0] if k.endswith("_s")]
            if where["place"] == "device" or config.step_products:
                made = list(steps(trainer, config))
                for i, row in enumerate(made):
                    out.add("step", nbytes_in=0, nbytes_out=0, sample=i, **row, **where)
                for syncs in (False, True):
                    mine = [r["took"].seconds for r in made if r["syncs"] is syncs]
                    medians.append((f"{where['place']} step, {'with' if syncs else 'without'} sync", *_two(mine)))
                medians.append((f"{where['place']} held_s", *_two(r["held_s"] for r in made if r["syncs"])))
            medians += [
                (f"{where['place']} floor: copy", copy_s, copy_s),
                (f"{where['place']} floor: PCIe up", up_s, up_s),
            ]
            trainer.check()
            trainer.callback.close()
            del trainer
            torch.cuda.empty_cache()
    print(table(("case", "median ms", "p80 ms"), [(n, f"{a * 1e3:.3f}", f"{b * 1e3:.3f}") for n, a, b in medians]))
    shutil.rmtree(config.sink, ignore_errors=True)
    return path


def _two(values: Iterable[float]) -> tuple[float, float]:
    p50, _, p80 = middle(values)
    return p50, p80


def file_system(path: str) -> str:
    """Type of the file system that holds a path."""
    best = ("", "unknown")
    for line in Path("/proc/mounts").read_text().splitlines():
        _, at, kind, *_ = line.split()
        inside = at == "/" or path == at or path.startswith(at + "/")
        if inside and len(at) >= len(best[0]):
            best = (at, kind)
    return best[1]


register("bench_trainer", TrainerBench)


@hydra.main(version_base="1.3", config_name="bench_trainer", config_path=None)
def main(config: Any) -> None:
    """Entry point."""
    found = settings_of(TrainerBench, config, least={"step_products": 0})
    if fault := emptied_fault("sink=", found.sink, ".heads"):
        refuse(fault)
    run(found)


if __name__ == "__main__":
    plain_hydra(TrainerBench)
    main()
