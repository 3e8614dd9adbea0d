"""From exporters on real ranks to regions: one plan everywhere, every byte owned once, failures and drift on all ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megasync.errors import MegasyncError, PlanError, RankFailedError, ReplicaDriftError
from megasync.trainer.agree import all_gather_bytes
from megasync.trainer.exporter import Exporter, Piece
from megasync.trainer.metadata import exchange
from megasync.trainer.plan import make_plan
from megasync.trainer.regions import match_regions
from megasync.trainer.replicas import check_replicas, host_lanes
from megasync.types import Box, Lanes, TensorSpec
from tests.distributed.harness import preload, run_ranks

preload("megasync.trainer.metadata", "megasync.trainer.regions", "megasync.trainer.replicas")

LAYERS = 4


def specs() -> list[TensorSpec]:
    out = [TensorSpec("embed", "BF16", (1002, 160), -1, aliases=("lm_head",))]
    for i in range(LAYERS):
        out += [
            TensorSpec(f"layers.{i}.q", "BF16", (256, 300), i),
            TensorSpec(f"layers.{i}.o", "BF16", (300, 512), i, "last"),
            TensorSpec(f"layers.{i}.norm", "F32", (300,), i),
            TensorSpec(f"layers.{i}.scale", "F32", (), i),
            TensorSpec(f"layers.{i}.input_scale", "F32", (4,), i, frozen=True),
            TensorSpec(f"layers.{i}.none", "F32", (0, 3), i),
        ]
    return out


def value(spec: TensorSpec) -> np.ndarray:
    """The reference bytes of a tensor, as words."""
    rng = np.random.default_rng(list(spec.name.encode()))
    return rng.integers(0, 1 << 8 * spec.word_nbytes, spec.shape or (1,), dtype=f"u{spec.word_nbytes}")


class Rank(Exporter):
    """Pipeline stages of tensor-parallel pairs (none in a world of 1), each pair as often as ranks are left for it."""

    def __init__(self, rank: int, world_size: int, stages: int) -> None:
        self.stages, self.tp = stages, min(2, world_size)
        self.stage, self.shard = rank * stages // world_size, rank % self.tp
        self.memory = {s.name: torch.from_numpy(value(s).view(f"i{s.word_nbytes}")) for s in specs() if self.has(s)}

    def has(self, spec: TensorSpec) -> bool:
        return spec.layer < 0 or spec.layer // (LAYERS // self.stages) == self.stage

    def specs(self) -> list[TensorSpec]:
        return [s for s in specs() if self.has(s)]

    def pieces(self) -> list[Piece]:
        out: list[Piece] = []
        for spec in self.specs():
            data = self.memory[spec.name]
            kind = spec.name.rsplit(".", 1)[-1]
            if kind == "q":  # fused with keys and values: groups of 16 rows go round among the shards
                rows = range(16 * self.shard, 256, 16 * self.tp)
                boxes = [Box((r, 0), (16, 300)) for r in rows]
            elif kind in ("embed", "o"):
                axis, extent = (0, 1002) if kind == "embed" else (1, 512)
                start, part = [0, 0], list(spec.shape)
                part[axis] = extent // self.tp
                start[axis] = self.shard * part[axis]
                boxes = [Box(tuple(start), tuple(part))]
            elif kind == "scale":
                out.append(Piece(spec.name, Box((), ()), data.view(())))
                continue
            else:
                boxes = [Box((0,) * len(spec.shape), spec.shape)]
            for box in boxes:
                at = tuple(slice(s, s + e) for s, e in zip(box.start, box.extent, strict=True))
                out.append(Piece(spec.name, box, data[at]))
        return out


def _own(rank: int, world_size: int, stages: int) -> tuple[list[tuple[str, Box, np.ndarray]], int, str]:
    group = dist.group.WORLD
    exporter = Rank(rank, world_size, stages)
    schema, holdings = exchange("run", exporter, group, timeout_s=20.0)
    plan = make_plan(schema, holdings)
    assert len({bytes(d) for d in all_gather_bytes(group, plan.digest + schema.digest, "plan", 20.0)}) == 1
    report = check_replicas(schema, holdings, exporter.pieces(), group, timeout_s=20.0)
    assert report.num_unread == 0
    assert (report.num_boxes > 0) == (world_size > 1)
    regions = match_regions(schema, plan, rank, exporter.own(plan.owned(rank).named_boxes(), schema.tensors))
    assert len(regions) == len(match_regions(schema, plan, rank, exporter.pieces()))
    own = [(schema.tensors[r.tensor_id].name, r.box, r.data.numpy()) for r in regions]
    return own, int(plan.loads[rank]), str(plan.report())


@pytest.mark.parametrize(("world_size", "stages"), [(1, 1), (2, 1), (4, 2), (4, 1)])
def test_every_byte_is_owned_once_and_is_the_live_one(world_size: int, stages: int, tmp_path: Path) -> None:
    results = run_ranks(_own, world_size, tmp_path, stages)
    for spec in specs():
        count = np.zeros(spec.shape or (1,), dtype=np.uint8)
        found = np.zeros(spec.shape or (1,), dtype=f"u{spec.word_nbytes}")
        for own, _, _ in results:
            for name, box, words in own:
                if name == spec.name:
                    at = tuple(slice(s, s + e) for s, e in zip(box.start, box.extent, strict=True))
                    count[at] += 1
                    found[at] = words.view(found.dtype)
        assert (count == (0 if spec.frozen else 1)).all()
        assert spec.frozen or np.array_equal(found, value(spec))
    assert sum(load for _, load, _ in results) == sum(s.nbytes for s in specs() if not s.frozen)
    assert len({text for _, _, text in results}) == 1


def _failing(rank: int, world_size: int, how: str) -> tuple[str, Any]:
    group = dist.group.WORLD
    exporter = Rank(rank, world_size, 2)
    if rank == 1 and how == "export":
        exporter.pieces = lambda: (_ for _ in ()).throw(PlanError("no table maps decoder.extra"))  # type: ignore[method-assign]
    if rank == 1 and how == "conflict":
        wrong = [replace(s, layer=7) if s.name == "embed" else s for s in exporter.specs()]
        exporter.specs = lambda: wrong  # type: ignore[method-assign]
    if how == "gap":
        kept = [p for p in exporter.pieces() if p.name != "embed"]
        exporter.pieces = lambda: kept  # type: ignore[method-assign]
    try:
        make_plan(*exchange("run", exporter, group, timeout_s=20.0))
    except MegasyncError as e:
        all_gather_bytes(group, b"", "still in step", 20.0)
        return type(e).__name__, str(e)
    raise AssertionError("no error")


@pytest.mark.parametrize(
    ("how", "kind", "text"),
    [
        ("export", RankFailedError, "exporting failed on 1 rank(s): rank 1: PlanError: no table maps decoder.extra"),
        ("conflict", PlanError, "embed: ranks 0, 2-3 have layer -1, ranks 1 have layer 7"),
        ("gap", PlanError, "embed [1002, 160]: 160320 words, [0:1002, 0:160]"),
    ],
)
def test_a_failure_on_one_rank_is_the_same_on_all(how: str, kind: type, text: str, tmp_path: Path) -> None:
    results = run_ranks(_failing, 4, tmp_path, how)
    assert len(set(results)) == 1
    assert results[0][0] == kind.__name__
    assert text in results[0][1]


def _drift(rank: int, world_size: int, how: str) -> tuple[str, str]:
    group = dist.group.WORLD
    exporter = Rank(rank, world_size, 2)
    schema, holdings = exchange("run", exporter, group, timeout_s=20.0)
    if rank == 3 and how == "drift":
        exporter.memory["layers.2.norm"][7] ^= 1  # replicated over the tensor-parallel ranks 2 and 3
    if rank == 2 and how == "drift":
        exporter.memory["embed"][100, 3] ^= 1 << 14  # shard 0, on ranks 0 and 2

    def lanes(shape: tuple[int, ...], box: Box, data: torch.Tensor) -> Lanes:
        if rank == 0 and how == "fault":
            raise RuntimeError("device fault")
        return host_lanes(shape, box, data)

    try:
        check_replicas(schema, holdings, exporter.pieces(), group, lanes_of=lanes, timeout_s=20.0)
    except MegasyncError as e:
        return type(e).__name__, str(e)
    raise AssertionError("no error")


def test_case_79_a_drifted_replica_is_named_with_its_ranks_on_every_rank(tmp_path: Path) -> None:
    results = run_ranks(_drift, 4, tmp_path, "drift")
    assert len(set(results)) == 1
    kind, text = results[0]
    assert kind == ReplicaDriftError.__name__
    assert "2 tensors differ" in text
    assert "embed [0:501, 0:160]: ranks 0 have " in text
    assert "; ranks 2 have " in text
    assert "layers.2.norm [0:300]: ranks 2 have " in text
    assert "layers.3.norm" not in text


def test_a_rank_that_cannot_read_its_replicas_fails_the_check_on_all(tmp_path: Path) -> None:
    results = run_ranks(_drift, 4, tmp_path, "fault")
    assert set(results) == {
        ("RankFailedError", "reading replicas failed on 1 rank(s): rank 0: RuntimeError: device fault")
    }
