"""Benchmark of both ends on one CPU core, all checks on: encode a step of the model-like list, and apply it.

``encode`` is mask, digest sums, codec, frame digests, manifest and head (into a sink in memory). ``apply`` is an update of
an engine that holds the list in its own layout: fetch, frame digests, decode, remap, proof of the base against touched-old
digests, state digests and root, write and read-back; ``stage`` and ``pause`` are its two halves. Publisher and applier are
the real ones. Every version is drawn anew; at the end the engine is audited, so each sample is known to be right. Peers of
the same run: comparing and copying all weights. Targets: encode 3, apply 15 GB of weights a second at a density of 0.1 %.

    python launch/bench/bench_cpu.py nbytes=4000000000 repeats=7
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Any

import hydra
import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from launch.bench.entry import plain_hydra, register, settings_of
from launch.bench.host_rank import HostEngine, is_weight, live_words, nbytes_of, random_tensor, share
from launch.bench.masks import uniform_positions
from launch.bench.places import result_file
from launch.bench.rows import RESULTS, Row, RowWriter, Timed, middle, table, timed
from launch.bench.workload import model_specs
from megasync.adapters.torch_trainer import TensorExporter
from megasync.codecs.choice import codec_names
from megasync.config import ApplyConfig, PublishConfig
from megasync.receiver.applier import Applier
from megasync.schema import Schema
from megasync.sinks.memory import MemorySink
from megasync.tiles import MAX_TILE_WORDS
from megasync.trainer.mask import mask_regions
from megasync.trainer.metadata import exchange
from megasync.trainer.plan import make_plan
from megasync.trainer.publish import publish
from megasync.trainer.publishing import Publishing
from megasync.trainer.regions import match_regions
from megasync.trainer.snapshot import Snapshot
from megasync.versions.anchor import publish_checkpoint
from megasync.versions.changes import contiguous
from megasync.versions.encode import EncodedDelta, encode
from megasync.versions.head import claim
from megasync.versions.lineage import start_lineage
from megasync.versions.publication import PublicationReader

TARGETS = {"encode": 3.0, "apply": 15.0}
RUN = "bench"
_COPY_NBYTES = 256 << 20  # far beyond any cache
_MOST_DENSITY = 0.5  # words that may change / all bytes is more than that in every list


@dataclass
class CpuBench:
    """Configuration.

    Attributes:
        nbytes: Bytes of weights; twice as much memory is needed.
        densities: Changed bytes / all bytes, at most a half: the router and block scales never change.
        repeats: Samples a density, after one that is not counted.
        codec: Codec.
        out: Folder of the result file, or the file itself, which ends in ``.jsonl``.
    """

    nbytes: int = 4_000_000_000
    densities: list[float] = field(default_factory=lambda: [0.001, 0.00085, 0.0001, 0.01])
    repeats: int = 5
    codec: str = "sparse"
    out: str = str(RESULTS)


class Trainer:
    """A trainer that owns the whole list: live tensors, snapshot, and the publishing end without a process group."""

    def __init__(self, nbytes: int, sink: MemorySink, codec: str) -> None:
        self.tensors = {t.name: random_tensor(t, 0) for t in model_specs(share(nbytes))}
        exporter = TensorExporter(self.tensors)
        config = PublishConfig(run=RUN, codec=codec)
        self.schema, holdings = exchange(RUN, exporter, None)
        regions = match_regions(self.schema, make_plan(self.schema, holdings), 0, exporter.pieces())
        self.snapshot = Snapshot(self.schema, regions)
        self.snapshot.fill(lambda name, box: self._words(name, box.start, box.extent))
        sums = np.zeros((len(self.schema.tensors), 2), dtype=np.uint64)
        for i, lanes in self.snapshot.lanes():
            sums[i] += np.array([lanes.a, lanes.b], dtype=np.uint64)
        self.codec = codec
        self.publishing = Publishing(self.schema, sink, config, None, None, Event())
        self.lineage = publish_checkpoint(sink, start_lineage(self.schema, claim(sink, RUN), sums))

    def _words(self, name: str, start: tuple[int, ...], extent: tuple[int, ...]) -> np.ndarray:
        tensor = self.tensors[name]
        words = live_words(tensor).reshape(tensor.shape)
        return words[tuple(slice(a, a + n) for a, n in zip(start, extent, strict=True))]

    def step(self, density: float, rng: np.random.Generator) -> int:
        """Change weights as the article's generator does; the number of changed bytes."""
        chosen = [t for t in self.schema.tensors if is_weight(t)]
        rate = density * self.schema.nbytes / sum(t.num_words for t in chosen)
        num = 0
        for t in chosen:
            at = uniform_positions(t.num_words, rate, rng)
            live_words(self.tensors[t.name])[at] ^= 1
            num += len(at)
        return num

    def publish(self, version: int) -> tuple[EncodedDelta, int]:
        """Everything from the end of a step to the durable head; the delta and the bytes of the manifest."""
        delta = encode(mask_regions(self.schema, self.snapshot), self.codec)
        outcome, lineage = publish(self.publishing, delta, None, version, self.lineage, {})
        if not outcome.durable or lineage is None:
            raise RuntimeError(f"version {version} was not published: {outcome.error}")
        self.lineage = lineage
        return delta, outcome.manifest_nbytes

    def compare(self) -> int:
        """The peer: read all of old and new, and do nothing else. Also proves the snapshot to be what was published."""
        flags = np.empty(MAX_TILE_WORDS * 8, dtype=bool)
        num = 0
        for kept, live in self.snapshot.host_views:
            new = contiguous(live)
            whole = kept.nbytes % 8 == 0
            pair = (kept.view("<u8"), new.view("<u8")) if whole else (kept, new)
            num += int(np.not_equal(*pair, out=flags[: len(pair[0])]).any())
        return num


def encode_samples(config: CpuBench, sink: MemorySink, out: RowWriter) -> Schema:
    """Publish every density ``repeats + 1`` times; versions stay in the sink."""
    trainer = Trainer(config.nbytes, sink, config.codec)
    rng = np.random.default_rng(1)
    version = 0
    for density in config.densities:
        for sample in range(-1, config.repeats):
            version += 1
            num = trainer.step(density, rng)
            (delta, manifest_nbytes), took = timed(lambda v=version: trainer.publish(v))  # type: ignore[misc]
            if delta.num_changed != num:
                raise RuntimeError(f"version {version}: {delta.num_changed} words encoded, {num} were changed")
            if sample >= 0:
                nbytes = delta.nbytes + manifest_nbytes
                add(out, "encode", trainer.schema, sample, density, took, nbytes, changed=num)
    different, took = timed(trainer.compare)
    if different:
        raise RuntimeError(f"the snapshot differs from the live weights in {different} tiles")
    add(out, "compare", trainer.schema, 0, 0.0, took, 0)
    return trainer.schema


def apply_samples(config: CpuBench, schema: Schema, sink: MemorySink, out: RowWriter) -> None:
    """Follow the versions of the sink with an engine that starts at version 0."""
    engine = HostEngine(share(config.nbytes))
    for t in schema.tensors:
        tensor = random_tensor(t, 0)
        engine.load(t.name, live_words(tensor).reshape(tensor.shape))
    applier = Applier(engine, sink, ApplyConfig(run=RUN, workers=1))
    _, took = timed(applier.join)
    add(out, "join", schema, 0, 0.0, took, 0)
    version = 0
    for density in config.densities:
        for sample in range(-1, config.repeats):
            version += 1
            result, took = timed(lambda v=version: applier.update(v))  # type: ignore[misc]
            if sample >= 0:
                _, decoding = timed(lambda v=version: decode(sink, v))  # type: ignore[misc]
                add(out, "decode", schema, sample, density, decoding, result.fetched_nbytes)
                more = {"stage_s": result.stage_s, "pause_s": result.pause_s, "changed": result.num_written}
                add(out, "apply", schema, sample, density, took, result.fetched_nbytes, **more)
    applier.audit()
    applier.close()
    into = torch.zeros(_COPY_NBYTES, dtype=torch.uint8)
    _, took = timed(lambda: [into[: len(p)].copy_(p) for t in engine.tensors().values() for p in t.split(_COPY_NBYTES)])
    add(out, "copy", schema, 0, 0.0, took, schema.nbytes)


def decode(sink: MemorySink, version: int) -> int:
    """Fetch, check and decode a version once more, and nothing else: the part of ``apply`` that comes before places."""
    reader = PublicationReader(sink, RUN)
    newest = reader.newest()
    assert newest is not None
    manifest = next(m for m in reader.chain(newest, version - 1) if m.version == version)
    return sum(entries.num_changed for _, entries in reader.entries(manifest))


def add(
    out: RowWriter, case: str, schema: Schema, sample: int, density: float, took: Timed, nbytes: int, **more: float
) -> None:
    """One row and one line on the terminal."""
    row = out.add(
        case,
        nbytes_in=schema.nbytes,
        nbytes_out=nbytes,
        density=density,
        sample=sample,
        took=took,
        num_tensors=len(schema.tensors),
        **more,
    )
    print(
        f"{case} {density:.3%} #{sample}: {_speed(row, 'cpu_s'):.2f} GB/s of CPU time, {_speed(row, 'seconds'):.2f} wall"
    )


def _speed(row: Row, column: str) -> float:
    return float(row["nbytes_in"]) / 1e9 / float(row[column])


def summary(rows: list[Row]) -> str:
    """Medians in GB of weights a second, beside the targets."""
    lines = []
    for case, density in dict.fromkeys((r["case"], r["density"]) for r in rows):
        mine = [r for r in rows if (r["case"], r["density"]) == (case, density)]
        cpu, p20, p80 = middle(_speed(r, "cpu_s") for r in mine)
        wall = middle(_speed(r, "seconds") for r in mine)[0]
        best = max(_speed(r, "cpu_s") for r in mine)
        halves = ["", ""]
        if case == "apply":
            halves = [f"{middle(r[k] for r in mine)[0]:.3f}" for k in ("stage_s", "pause_s")]
        target = f"{TARGETS[case]:.0f}" if density == 0.001 and case in TARGETS else ""
        name = f"{case} {density:.3%}" if density else case
        lines.append([name, f"{cpu:.2f}", f"{p20:.2f}-{p80:.2f}", f"{best:.2f}", f"{wall:.2f}", *halves, target])
    header = ["case", "GB/s (CPU time)", "p20-p80", "best", "GB/s (wall)", "stage s", "pause s", "target"]
    return table(header, lines)


@contextmanager
def one_core() -> Iterator[None]:
    """This process on its last core, torch on one thread."""
    torch.set_num_threads(1)
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def run(config: CpuBench) -> Path:
    """Take all samples and write them.

    Returns:
        The result file.
    """
    path = result_file(config.out, f"{'cpu' if config.codec == 'sparse' else f'cpu-{config.codec}'}.jsonl")
    with one_core(), RowWriter(path, "cpu") as out:
        sink = MemorySink()
        schema = encode_samples(config, sink, out)
        apply_samples(config, schema, sink, out)
        print(summary(out.rows))
    return path


register("bench_cpu", CpuBench)


@hydra.main(version_base="1.3", config_name="bench_cpu", config_path=None)
def main(config: Any) -> None:
    """Entry point."""
    least, most = {"nbytes": nbytes_of(share(1))}, {"densities": _MOST_DENSITY}
    run(settings_of(CpuBench, config, least=least, most=most, choices={"codec": codec_names()}))


if __name__ == "__main__":
    plain_hydra(CpuBench, cuda=False)
    main()
