"""The trainer side over real gloo ranks: one wire whatever the topology, one error on all ranks, bounded buffers."""

import os
import re
import resource
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megasync.config import GatherKind, OnError, PublishConfig
from megasync.digest import content_digest
from megasync.errors import PlanError, RankFailedError
from megasync.sinks.faulty import Fault, FaultySink
from megasync.sinks.local import LocalSink
from megasync.trainer.callback import MegasyncCallback
from megasync.trainer.carrier import GlooCarrier
from megasync.trainer.exporter import Exporter, Piece
from megasync.trainer.gather import place, receive, send
from megasync.types import Box, TensorSpec
from megasync.versions.publication import PublicationReader
from tests.distributed.harness import collect_ranks, run_ranks
from tests.unit.test_publish_alone import assert_same, copy, rebuild

SPECS = [
    TensorSpec("embed", "BF16", (1003, 96)),  # an odd vocabulary
    TensorSpec("norm", "F32", (129,)),
    TensorSpec("scalar", "F64", ()),
    TensorSpec("layers.0.qkv", "BF16", (768, 384), layer=0),
    TensorSpec("layers.0.o", "BF16", (384, 768), layer=0, cut="last"),
    TensorSpec("layers.0.blocks", "U8", (3, 5, 64, 70), layer=0),
    TensorSpec("layers.1.w", "BF16", (1536, 1536), layer=1),
]


def full_model(step: int) -> dict[str, torch.Tensor]:
    """Weights after a step, the same on every rank."""
    out = {}
    for i, spec in enumerate(SPECS):
        g = torch.Generator().manual_seed(i)
        words = torch.randint(0, 256, (max(spec.nbytes, 1),), generator=g, dtype=torch.uint8)
        for s in range(1, step + 1):
            g = torch.Generator().manual_seed(1000 * s + i)
            at = torch.randint(0, len(words), (len(words) // 200 + 1,), generator=g).unique()
            words[at] ^= torch.randint(1, 256, at.shape, generator=g, dtype=torch.uint8)
        dtype = {"BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64, "U8": torch.uint8}[spec.dtype]
        out[spec.name] = words.view(dtype).reshape(spec.shape)
    return out


def cut(extent: int, parts: int, i: int) -> tuple[int, int]:
    return extent * i // parts, extent * (i + 1) // parts


class ShardedExporter(Exporter):
    """A rank's shards: rows cut for most tensors, columns for ``o``, whole where ``parts`` is 1 or an axis is short."""

    def __init__(self, parts: int, index: int, keep: Sequence[str] | None = None) -> None:
        self.parts, self.index = parts, index
        self.keep = [s.name for s in SPECS] if keep is None else list(keep)
        self.boxes: dict[str, Box] = {}
        self.live: dict[str, torch.Tensor] = {}
        for spec in SPECS:
            if spec.name not in self.keep:
                continue
            start, stop = [0] * len(spec.shape), list(spec.shape)
            axis = len(spec.shape) - 1 if spec.cut == "last" else 0
            if spec.shape and spec.shape[axis] >= 100:
                start[axis], stop[axis] = cut(spec.shape[axis], parts, index)
            self.boxes[spec.name] = Box(tuple(start), tuple(b - a for a, b in zip(start, stop, strict=True)))
        self.load(0)

    def load(self, step: int) -> None:
        weights = full_model(step)
        for name, box in self.boxes.items():
            part = weights[name][tuple(slice(s, s + e) for s, e in zip(box.start, box.extent, strict=True))]
            if name in self.live:
                self.live[name].view(torch.uint8 if part.dim() else part.dtype).copy_(
                    part.contiguous().view(torch.uint8 if part.dim() else part.dtype)
                )
            else:
                self.live[name] = part.clone()

    def specs(self) -> list[TensorSpec]:
        return [s for s in SPECS if s.name in self.keep]

    def pieces(self) -> list[Piece]:
        return [Piece(name, box, self.live[name]) for name, box in self.boxes.items()]


def publish_rank(rank: int, world: int, sink_dir: str, parts: int, config: PublishConfig, steps: int) -> list[Any]:
    exporter = ShardedExporter(parts, rank % parts)
    callback = MegasyncCallback(exporter, LocalSink(Path(sink_dir)), config)
    callback.on_train_start()
    for step in range(1, steps + 1):
        exporter.load(step)
        callback.step_end()
    callback.on_train_end()
    return [o.durable for o in callback.outcomes]


def summary(sink_dir: Path) -> list[Any]:
    """What of the publications must not depend on the topology."""
    reader = PublicationReader(LocalSink(sink_dir), "run")
    newest = reader.newest()
    assert newest is not None
    out: list[Any] = []
    for manifest in reader.chain(newest):
        counts: dict[tuple[int, int], int] = {}
        for _, e in reader.entries(manifest):
            for key, count in zip(
                zip(e.tensor_ids.tolist(), e.tiles.tolist(), strict=True), e.counts.tolist(), strict=True
            ):
                counts[key] = counts.get(key, 0) + count
        out.append(
            (
                manifest.version,
                manifest.schema_digest,
                sorted(counts.items()),
                manifest.touched_ids.tolist(),
                manifest.new_states.tobytes(),
                manifest.touched_olds.tobytes(),
                manifest.root,
                manifest.num_changed,
            )
        )
    rebuilt = rebuild(reader, newest)
    assert_same(rebuilt, copy(full_model(newest.version)))
    return out


@pytest.mark.parametrize(
    ("world", "parts", "changes"),
    [
        (2, 1, {}),
        (2, 2, {"gather": GatherKind.DIRECT}),
        (3, 3, {"num_writers": 2}),
        (4, 2, {"num_writers": 3, "codec": "lz4+zstd"}),
    ],
)
def test_the_wire_does_not_depend_on_the_topology(
    tmp_path: Path, world: int, parts: int, changes: dict[str, Any]
) -> None:
    config = PublishConfig(timeout_s=30, max_first_density=1)
    (tmp_path / "one").mkdir()
    (tmp_path / "many").mkdir()
    publish_rank(0, 1, str(tmp_path / "one"), 1, config, 2)
    verdicts = run_ranks(publish_rank, world, tmp_path, str(tmp_path / "many"), parts, replace(config, **changes), 2)
    assert verdicts == [[True] * 3] * world
    assert summary(tmp_path / "many") == summary(tmp_path / "one")


def failing_rank(rank: int, world: int, sink_dir: str, where: str) -> str:
    sink = FaultySink(LocalSink(Path(sink_dir)))
    exporter = ShardedExporter(world, rank)
    config = PublishConfig(timeout_s=20, num_writers=2, on_error=OnError.RAISE, max_first_density=1)
    callback = MegasyncCallback(exporter, sink, config)
    callback.on_train_start()
    exporter.load(1)
    if rank == 1 and where == "payload":
        sink.add(Fault("create", error=lambda o, k: OSError("disk of rank 1 is full")))
    if rank == 1 and where == "mask":
        exporter.check_alive = lambda: (_ for _ in ()).throw(PlanError("a tensor of rank 1 moved"))  # type: ignore[method-assign]
    if rank == 0 and where == "head":
        sink.add(Fault("create", key="manifest", error=lambda o, k: OSError("manifest refused")))
    try:
        callback.step_end()
        callback.flush()
    except RankFailedError as e:
        callback.exporter.__class__.check_alive = Exporter.check_alive  # type: ignore[method-assign,union-attr]
        exporter.__dict__.pop("check_alive", None)
        sink.heal()
        callback.flush()
        callback.close()
        return str(e)
    return "no error"


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("payload", "disk of rank 1 is full"),
        ("mask", "a tensor of rank 1 moved"),
        ("head", "manifest refused"),
    ],
)
def test_an_error_on_one_rank_is_the_same_error_on_all_and_the_next_version_heals(
    tmp_path: Path, where: str, message: str
) -> None:
    (tmp_path / "s").mkdir()
    texts = run_ranks(failing_rank, 3, tmp_path, str(tmp_path / "s"), where)
    assert len(set(texts)) == 1
    assert message in texts[0]
    reader = PublicationReader(LocalSink(tmp_path / "s"), "run")
    newest = reader.newest()
    assert newest is not None
    assert (newest.version, newest.base_version) == (2, 0)
    assert_same(rebuild(reader, newest), copy(full_model(1)))


def dying_rank(rank: int, world: int, sink_dir: str) -> str:
    exporter = ShardedExporter(world, rank)
    config = PublishConfig(timeout_s=3, max_first_density=1)
    callback = MegasyncCallback(exporter, LocalSink(Path(sink_dir)), config)
    callback.on_train_start()
    exporter.load(1)
    if rank == 1:
        os._exit(0)
    try:
        callback.step_end()
        callback.flush()
    except RankFailedError as e:
        return str(e)
    return "no error"


def test_case_21_a_dead_rank_is_named_and_the_head_does_not_move(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    outcomes = collect_ranks(dying_rank, 3, tmp_path, str(tmp_path / "s"))
    for o in outcomes:
        if o.rank != 1:
            assert re.findall(r"rank (\d+): did not answer", o.value) == ["1"], o
    newest = PublicationReader(LocalSink(tmp_path / "s"), "run").newest()
    assert newest is not None
    assert newest.version == 0


class LumpExporter(Exporter):
    """One rank has a large tensor, the others nothing at all."""

    def __init__(self, rank: int, nbytes: int) -> None:
        self.data = torch.zeros(nbytes if rank == 1 else 0, dtype=torch.uint8)

    def specs(self) -> list[TensorSpec]:
        return [TensorSpec("lump", "U8", (len(self.data),))] if len(self.data) else []

    def pieces(self) -> list[Piece]:
        return [Piece("lump", Box((0,), (len(self.data),)), self.data)] if len(self.data) else []


def lump_rank(rank: int, world: int, sink_dir: str, nbytes: int) -> int:
    exporter = LumpExporter(rank, nbytes)
    config = PublishConfig(timeout_s=60, codec="stored", max_first_density=1)
    callback = MegasyncCallback(exporter, LocalSink(Path(sink_dir)), config)
    callback.on_train_start()
    if rank == 1:
        exporter.data.random_(1, 256)
    dist.barrier()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    callback.step_end()
    callback.flush()
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    callback.close()
    return (after - before) * 1024


def test_case_60_uneven_payloads_are_gathered_through_bounded_buffers(tmp_path: Path) -> None:
    """The writer of 96 MB of another rank's payload grows by a few chunks, not by the payload; nothing is padded."""
    (tmp_path / "s").mkdir()
    nbytes = 96 << 20
    grown = run_ranks(lump_rank, 3, tmp_path, str(tmp_path / "s"), nbytes)
    assert grown[0] < 64 << 20, grown
    assert grown[2] < 40 << 20, grown


def test_more_writers_than_ranks_or_bytes(tmp_path: Path) -> None:
    for sizes in ([0, 0, 0], [5, 0, 7], [1, 1, 1, 1000, 1, 1], list(range(17))):
        for writers in (1, 2, 5, 50):
            for direct in (False, True):
                p = place(np.array(sizes), writers, direct=direct)
                assert sum(p.payload_nbytes) == sum(sizes)
                assert all((n > 0) == (p.payload_of[r] >= 0) for r, n in enumerate(sizes))
                for i in range(len(p.writer_of)):
                    at = 0
                    for r in p.owners(i):
                        assert p.offset_of[r] == at
                        at += sizes[r]
                    assert at == p.payload_nbytes[i]
                if direct:
                    assert [p.writer_of[p.payload_of[r]] for r, n in enumerate(sizes) if n] == [
                        r for r, n in enumerate(sizes) if n
                    ]


def one_gigabyte_rank(rank: int, world: int) -> tuple[int, bytes]:
    part = np.random.default_rng(0).integers(0, 256, 1 << 24, dtype=np.uint8).tobytes()
    parts = [part] * 64 if rank == 1 else []
    sizes = np.array([0, 64 << 24, 0], dtype=np.int64)
    placement = place(sizes, 1)
    group = dist.group.WORLD
    assert group is not None
    carrier = GlooCarrier(group, 60)
    dist.barrier()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    send(carrier, placement, parts)
    digest = b""
    if rank == placement.writer_of[0]:
        digest = content_digest(receive(carrier, placement, 0, sizes, parts))
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024, digest


def test_case_60_one_gigabyte_from_one_rank_and_nothing_from_the_others(tmp_path: Path) -> None:
    grown = run_ranks(one_gigabyte_rank, 3, tmp_path)
    part = np.random.default_rng(0).integers(0, 256, 1 << 24, dtype=np.uint8).tobytes()
    assert grown[0][1] == content_digest([part] * 64)
    assert grown[0][0] < 80 << 20, grown
    assert grown[1][0] < 80 << 20, grown
    assert grown[2][0] < 16 << 20, grown
