"""A rank that is inside the sink for as long as it may be is waited for; ranks that do not take part make the same calls."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from megasync.config import OnError, PublishConfig
from megasync.errors import RetryError
from megasync.sinks.base import Buffer
from megasync.sinks.local import LocalSink
from megasync.trainer import gather, publishing, start
from megasync.trainer.callback import MegasyncCallback
from megasync.trainer.memory_plan import MemoryPlan
from megasync.versions.publication import PublicationReader
from tests.distributed.harness import run_ranks
from tests.distributed.test_publish import ShardedExporter, full_model
from tests.unit.test_publish_alone import assert_same, copy, rebuild

TIMEOUT_S = 2.0
CONFIG = PublishConfig(timeout_s=TIMEOUT_S, give_up_s=60, on_error=OnError.RETRY, max_first_density=1)


class SlowSink(LocalSink):
    """The first payload of version 1 is not answered for in time, or its manifest and head take most of their time each, or
    the head is read as slowly."""

    def __init__(self, folder: Path, kind: str) -> None:
        super().__init__(folder)
        self.kind, self.moved = kind, 0

    def create(self, key: str, parts: Iterable[Buffer], *, timeout_s: float = 60.0) -> int:
        if "v000000000001/" in key:
            if "payload" not in key:
                time.sleep(0.7 * TIMEOUT_S if self.kind == "head" else 0)
            elif self.kind in ("payload", "whole payload"):
                for _ in parts if self.kind == "whole payload" else [next(iter(parts))]:
                    pass
                self.kind = ""
                time.sleep(1.1 * TIMEOUT_S)
                raise RetryError("no answer within timeout_s")
        return super().create(key, parts, timeout_s=timeout_s)

    def read_head(self, run: str, *, timeout_s: float = 60.0) -> bytes | None:
        if self.kind == "start" and not self.moved:
            time.sleep(1.1 * TIMEOUT_S)
        return super().read_head(run, timeout_s=timeout_s)

    def swap_head(self, run: str, expected: bytes | None, new: bytes, *, timeout_s: float = 60.0) -> None:
        self.moved += 1
        if self.kind == "head" and self.moved == 3:  # after the claim and version 0
            time.sleep(0.7 * TIMEOUT_S)
        super().swap_head(run, expected, new, timeout_s=timeout_s)


def publish_rank(rank: int, world: int, folder: str, kind: str, config: PublishConfig, ranks: list[int] | None) -> Any:
    members = range(world) if ranks is None else ranks
    told: list[str] = []
    vars(publishing._log).update(warning=lambda text, *given: told.append(text % given))
    exporter = ShardedExporter(len(members), members.index(rank) if rank in members else 0)
    callback = MegasyncCallback(exporter, SlowSink(Path(folder), kind), config, ranks=ranks)
    callback.on_train_start()
    for step in (1, 2):
        exporter.load(step)
        callback.step_end()
    callback.on_train_end()
    if kind == "whole payload" and rank == 0:
        assert any("rank 0 took 2." in said and "for its payload in local sink" in said for said in told), told
    return callback.version, [o.durable for o in callback.outcomes]


def require_newest(folder: Path) -> None:
    reader = PublicationReader(LocalSink(folder), "run")
    newest = reader.newest()
    assert newest is not None
    assert newest.version == 2
    assert_same(rebuild(reader, newest), copy(full_model(2)))


@pytest.mark.parametrize("kind", ["payload", "whole payload", "head", "start"])
def test_a_rank_that_stands_in_the_sink_is_waited_for(tmp_path: Path, kind: str) -> None:
    (tmp_path / "sink").mkdir()
    found = run_ranks(publish_rank, 3, tmp_path, str(tmp_path / "sink"), kind, CONFIG, None)
    assert found == [(2, [True] * 3)] * 3
    require_newest(tmp_path / "sink")


def test_ranks_that_do_not_take_part_make_the_same_calls(tmp_path: Path) -> None:
    (tmp_path / "sink").mkdir()
    config = replace(CONFIG, timeout_s=20)
    found = run_ranks(publish_rank, 3, tmp_path, str(tmp_path / "sink"), "", config, [1, 2])
    assert found == [(-1, []), (2, [True] * 3), (2, [True] * 3)]
    require_newest(tmp_path / "sink")


def strange_rank(rank: int, world: int, ranks: list[int]) -> str:
    callback = MegasyncCallback(ShardedExporter(1, 0), LocalSink(Path("/nowhere")), CONFIG, ranks=ranks)
    with pytest.raises(ValueError, match="ranks=") as raised:
        callback.on_train_start()
    return str(raised.value)


@pytest.mark.parametrize("ranks", [[], [0, 0], [1, 2]])
def test_ranks_of_no_world_are_refused_on_every_rank(tmp_path: Path, ranks: list[int]) -> None:
    wanted = f"ranks={ranks}: expected some of 0 to 1, each once; None stands for all"
    assert run_ranks(strange_rank, 2, tmp_path, ranks) == [wanted] * 2


class KeepingSink(LocalSink):
    """Has all parts before it writes the first, as object stores do."""

    keeps_parts = True

    def create(self, key: str, parts: Iterable[Buffer], *, timeout_s: float = 60.0) -> int:
        return super().create(key, list(parts), timeout_s=timeout_s)


def keeping_rank(rank: int, world: int, folder: str) -> list[bool]:
    vars(gather).update(MESSAGE_NBYTES=10_000)
    planned: list[MemoryPlan] = []
    vars(start).update(check_memory=lambda plan, *given: planned.append(plan))
    config = replace(CONFIG, timeout_s=20)
    callback = MegasyncCallback(ShardedExporter(world, rank), KeepingSink(Path(folder)), config)
    callback.on_train_start()
    callback.exporter.load(1)  # type: ignore[union-attr]
    callback.step_end()
    callback.exporter.load(2)  # type: ignore[union-attr]
    callback.on_train_step_end()
    callback.on_train_end()
    counted = any("which this sink keeps" in row.what for row in planned[0].rows)
    assert counted == (rank == 0)  # the writer
    return [o.durable for o in callback.outcomes]


def test_a_sink_that_keeps_all_parts_gets_those_of_every_rank_right_and_they_are_planned(tmp_path: Path) -> None:
    (tmp_path / "sink").mkdir()
    assert run_ranks(keeping_rank, 3, tmp_path, str(tmp_path / "sink")) == [[True] * 3] * 3
    require_newest(tmp_path / "sink")


class BusySink(LocalSink):
    """Payloads of version 1 take nearly two timeouts, as they may with an object store."""

    def create(self, key: str, parts: Iterable[Buffer], *, timeout_s: float = 60.0) -> int:
        if "v000000000001/" in key and "payload" in key:
            time.sleep(1.8 * timeout_s)
        return super().create(key, parts, timeout_s=timeout_s)


def closing_rank(rank: int, world: int, folder: str) -> tuple[float, int, int]:
    exporter = ShardedExporter(world, rank)
    before = len(dist.distributed_c10d._world.pg_map)
    callback = MegasyncCallback(exporter, BusySink(Path(folder)), replace(CONFIG, timeout_s=1.0))
    callback.on_train_start()
    worker = next(t for t in threading.enumerate() if t.name == "megasync-publish")
    exporter.load(1)
    callback.step_end()
    begin = time.monotonic()
    callback.close()
    took_s = time.monotonic() - begin
    held = len(dist.distributed_c10d._world.pg_map) - before
    worker.join(20)
    return took_s, held, len(dist.distributed_c10d._world.pg_map) - before


def test_closing_beside_a_worker_in_the_sink_leaves_no_group_once_it_has_ended(tmp_path: Path) -> None:
    (tmp_path / "sink").mkdir()
    (took_s, held, left), _ = run_ranks(closing_rank, 2, tmp_path, str(tmp_path / "sink"))
    assert took_s < 1.7  # one timeout: it does not wait for the sink
    assert (held, left) == (1, 0)
