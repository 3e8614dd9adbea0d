"""From the trainer's callback to the first token on the new weights (P11), two processes on one host and one GPU.

``python -m launch.bench.bench_end_to_end`` on a GPU. The trainer process publishes its 445/64 GB through `MegasyncCallback`
into a local sink, as the head writer of a publication of up to 65 owners: the payloads of the others, who have every tile that the
trainer does not, lie there already, and their frame tables and digest sums join its own. The receiver process holds one rank
of a TP4 engine, 111 GB, and decodes from a captured CUDA graph while an `Applier` follows the head. Times of both are of one
clock, and the stages of a sync are exclusive: they add up to the whole. The trainer's tiles lie in the rank's slices, so all
that it changes is proved by this rank alone; the three other ranks answer at once and hold nothing of it. Checked: the audit
against the digests that the trainer published, and the bytes of its share at both ends. Rows go to
``results/end-to-end-gpu.jsonl``; with ``--engine`` bench_engine runs on the same rank before it.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Thread

import numpy as np

from launch.bench import bench_engine
from launch.bench.bench_engine import TRACE, EngineBench, decoding, scatter_floor
from launch.bench.bench_trainer import file_system
from launch.bench.entry import Parser, count, folder, require_cuda
from launch.bench.other_owners import Others
from launch.bench.places import result_file
from launch.bench.report_measures import SHARE_NBYTES
from launch.bench.report_receiver import LIVE_NBYTES
from launch.bench.rows import Row, RowWriter, Timed, middle
from launch.bench.serving import DENSITY, ServingRank
from launch.bench.stamps import StampedSink, StampedTelemetry
from launch.bench.trainer_process import Answer, Remote, Trainer, prepare
from launch.bench.trainer_share import Part, read_block, share_of
from launch.bench.workload import Shape
from megasync.receiver.applier import Applier
from megasync.receiver.results import UpdateResult
from megasync.sinks.local import LocalSink

POLL_S = 0.002
"""Seconds between looks of the receiver at the head."""

STAGES = (
    "mask",
    "encode",
    "gather",
    "payload",
    "manifest",
    "head",
    "notice",
    "read_manifest",
    "stage",
    "prove",
    "stand",
    "write",
    "first_token",
)
"""Stages of a sync in order. Trainer: changed words found and in host memory, encoded, metadata of all owners together,
payload durable, manifest durable, head moved. Receiver: head seen, manifest read and checked, frames fetched, decoded, bound
and their touched words digested, base proved, decode loop stands, written and proved, first token on the new weights."""


def exclusive(entry: int, ends: dict[str, int]) -> dict[str, float]:
    """Seconds that each stage adds to the whole: from the end of all before it to its own, 0 where it ended earlier.

    Args:
        entry: When the sync began, ns.
        ends: When each of ``STAGES`` ended, ns.
    """
    out, reached = {}, entry
    for name in STAGES:
        out[name] = max(0, ends[name] - reached) / 1e9
        reached = max(reached, ends[name])
    return out


@contextmanager
def following(applier: Applier) -> Iterator[SimpleQueue[UpdateResult | BaseException]]:
    """An applier that follows the head on a thread; its results, or the error that ended it."""
    results: SimpleQueue[UpdateResult | BaseException] = SimpleQueue()
    stop = Event()

    def body() -> None:
        try:
            applier.follow(stop, on_update=results.put, on_problem=results.put)
        except BaseException as e:
            results.put(e)

    thread = Thread(target=body, name="follow", daemon=True)
    thread.start()
    try:
        yield results
    finally:
        stop.set()
        thread.join(60)


def one_sync(
    rank: ServingRank,
    trainer: Trainer,
    results: SimpleQueue[UpdateResult | BaseException],
    sink: StampedSink,
    telemetry: StampedTelemetry,
) -> tuple[Answer, dict[str, int]]:
    """One step of the trainer and what follows from it.

    Returns:
        The trainer's answer, and when each stage ended, ns.

    Raises:
        RuntimeError: The receiver did not take the version.
    """
    loop = rank.engine.loop
    assert loop is not None
    loop.wait(5)
    trainer.send({"do": "step"})
    result = results.get(timeout=120)
    if isinstance(result, BaseException):
        raise RuntimeError(f"the receiver did not take the version: {result}") from result
    first = loop.first_after(rank.engine.resumed_at)
    answer = trainer.receive()
    if result.versions != (answer["version"],):
        raise RuntimeError(f"the trainer published version {answer['version']}, the receiver took {result.versions}")
    trainer_ends = ("masked", "encoded", "gathered", "payload", "manifest", "head")
    ends = dict(zip(STAGES, (answer[k] for k in trainer_ends), strict=False))
    ends |= {
        "notice": sink.seen[result.version],
        "read_manifest": telemetry.begun["stage"],
        "stage": telemetry.ended["stage"],
        "prove": telemetry.ended["prove"],
        "stand": rank.engine.standing_at,
        "write": rank.engine.resumed_at,
        "first_token": loop.ends[first],
    }
    return answer | {"pause_s": (loop.ends[first] - loop.ends[first - 1]) / 1e9}, ends


def run(
    rank: ServingRank,
    trainer: Trainer,
    directory: Path,
    writer: RowWriter,
    *,
    syncs: int = 5,
    density: float = DENSITY,
    rows: int = 8192,
) -> None:
    """The syncs of one trainer and one rank, after one that does not count.

    Args:
        rank: Whose live weights are what ``rank.table`` says.
        trainer: Asked to prepare, its answer not yet taken.
        directory: Empty; gets the sink and what the trainer is told.
        writer: Gets the rows.
        syncs: How many.
        density: Changed bytes / all bytes of the other owners.
        rows: Rows of a layer's matrices that the decoder takes.
    """
    share = share_of(rank.shape, rank.tp)
    others = Others(rank, share, density)
    base = {}
    for kind, parts in share.items():
        base[kind] = str(directory / f"base{kind}.npy")
        np.save(base[kind], read_block(rank.engine.live, parts).numpy())
    np.save(directory / "table.npy", rank.table)
    ready = trainer.receive()
    if ready["schema"] != rank.world.schema.digest.hex():
        raise RuntimeError("trainer and engine speak of different schemas")
    told = str(others.save(directory / "others"))
    where = {"directory": str(directory / "sink"), "table": str(directory / "table.npy"), "others": told}
    trainer.send({"do": "start", "base": base, **where})
    epoch = trainer.receive()["epoch"]
    sink, telemetry = StampedSink(LocalSink(directory / "sink")), StampedTelemetry()
    applier = rank.applier(sink, telemetry, POLL_S)
    others.place(directory / "sink", syncs + 1, epoch)
    with decoding(rank, rows), following(applier) as results:
        found = [one_sync(rank, trainer, results, sink, telemetry) for _ in range(syncs + 1)][1:]
    _check(rank, trainer, share, applier, directory)
    _write(rank, writer, found, ready["nbytes"], directory)
    applier.close()


def _check(
    rank: ServingRank, trainer: Trainer, share: dict[int, list[Part]], applier: Applier, directory: Path
) -> None:
    """Digests of all live weights, and the bytes of the trainer's share in one layer of each kind.

    Raises:
        RuntimeError: They differ.
    """
    applier.audit()
    moved = 0
    for kind, parts in share.items():
        path = directory / f"now{kind}.npy"
        trainer.send({"do": "block", "kind": kind, "path": str(path)})
        trainer.receive()
        live, held = read_block(rank.engine.live, parts).numpy(), np.load(path)
        moved += int((held != np.load(directory / f"base{kind}.npy")).sum())
        for part in parts:
            span = slice(part.offset, part.offset + part.nbytes)
            if not np.array_equal(live[span], held[span]):
                raise RuntimeError(f"{part.placed.spec.name}: the engine has other bytes than the trainer")
    if not moved:
        raise RuntimeError("nothing of the trainer's share changed")


def _write(
    rank: ServingRank, writer: RowWriter, found: list[tuple[Answer, dict[str, int]]], share_nbytes: int, directory: Path
) -> None:
    live = rank.world.live_nbytes
    payload = found[0][0]["payload_nbytes"]
    kept_in = file_system(str(directory))
    said = (
        f"{share_nbytes / 1e9:.2f} GB in ({share_nbytes / 445e9 * 64:.3f}/64 of the model), {live / 1e9:.2f} GB out; a trainer "
        f"process (MegasyncCallback, snapshot in HBM, head writer) and a receiver process (Applier, {rank.workers} staging "
        f"processes, engine decoding from a CUDA graph) on one GPU, which they share by "
        f"time slices, and {os.cpu_count()} cores; LocalSink on {kept_in}, with "
        f"fsync; {payload / 1e6:.0f} MB of payload, of which the trainer writes its own and the other owners' lie there "
        f"before, their metadata at hand and not gathered over a network; head polled every {POLL_S * 1e3:g} ms"
    )
    full = live > 0.95 * LIVE_NBYTES and share_nbytes > 0.95 * SHARE_NBYTES
    target: Row = {"target_id": "P11"} if full else {}
    stages = [exclusive(answer["entry"], ends) for answer, ends in found]
    for i, ((answer, ends), stage) in enumerate(zip(found, stages, strict=True)):
        took = (ends["first_token"] - answer["entry"]) / 1e9
        columns: Row = {f"{name}_s": round(s, 6) for name, s in stage.items()}
        writer.add(
            "P11 callback entry to first token",
            nbytes_in=share_nbytes,
            nbytes_out=live,
            density=DENSITY,
            sample=i,
            took=Timed(took, 0.0),
            value=took,
            said=said,
            held_s=(answer["returned"] - answer["entry"]) / 1e9,
            pause_s=answer["pause_s"],
            payload_nbytes=answer["payload_nbytes"],
            manifest_nbytes=answer["manifest_nbytes"],
            num_changed=answer["num_changed"],
            live_nbytes=live,
            file_system=kept_in,
            **target,
            **columns,
        )
    for name in STAGES:
        print(f"{name:14s} {middle(s[name] for s in stages)[0] * 1e3:9.2f} ms")
    whole = middle((ends["first_token"] - answer["entry"]) / 1e9 for answer, ends in found)
    print(f"P11 {whole[0] * 1e3:.1f} ms [{whole[1] * 1e3:.1f}, {whole[2] * 1e3:.1f}]", flush=True)


def main() -> None:
    """Run all on one GPU."""
    parser = Parser(__doc__)
    parser.add_argument("--layers", type=count, default=78)
    parser.add_argument("--workers", type=count, default=16)
    parser.add_argument("--syncs", type=count, default=5)
    parser.add_argument("--pauses", type=count, default=EngineBench.syncs, help="of bench_engine")
    parser.add_argument("--engine", action="store_true", help="bench_engine first, on the same rank")
    parser.add_argument("--directory", type=folder, default=Path("/tmp"), help="in which the sink is made")
    given = parser.parse_args()
    path = result_file(given.out, "end-to-end-gpu.jsonl")
    engine_path = path.with_name("engine-gpu.jsonl")
    if given.engine and path == engine_path:
        parser.error(f"argument --out: with --engine the rows of bench_engine go to {path}: give another name")
    require_cuda()
    shape = replace(Shape(), num_layers=given.layers)
    given.directory.mkdir(parents=True, exist_ok=True)
    directory = Path(tempfile.mkdtemp(dir=given.directory))
    trainer = Remote()
    try:
        prepare(trainer, shape, 4, "cuda")
        rank = ServingRank(shape, directory / "own", "cuda", workers=given.workers)
        if given.engine:
            with RowWriter(engine_path, "engine") as writer:
                bench_engine.run(rank, EngineBench(given.pauses), writer, scatter_floor, path.with_name(TRACE))
        started = time.perf_counter()
        with RowWriter(path, "end to end") as writer:
            run(rank, trainer, directory, writer, syncs=given.syncs)
        print(f"end to end took {time.perf_counter() - started:.1f} s", flush=True)
        rank.close()
    finally:
        trainer.close()
        shutil.rmtree(directory)


if __name__ == "__main__":
    main()
