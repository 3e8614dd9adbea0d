"""Worker processes of staging: the same bytes as without, what they leave to the engine's process, and their end."""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from megasync.config import ApplyConfig
from megasync.errors import BaseMismatchError, FormatError, MemoryPlanError, RefetchError, RetryError
from megasync.receiver import scatter_workers
from megasync.receiver import stage as stage_module
from megasync.receiver.applier import Applier
from megasync.receiver.bind import Binding
from megasync.receiver.scatter import ScatterBackend
from megasync.receiver.scatter_stage import Loader
from megasync.receiver.scatter_workers import WorkerPool
from megasync.sinks.base import Sink
from megasync.sinks.local import LocalSink
from megasync.sinks.memory import MemorySink
from tests.unit.publishing import Publisher, changed, make_schema, random_words, spec
from tests.unit.receiving import plain_engine, words_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memfd_create is Linux's")

SPECS = [
    spec("a", "BF16", (300, 64)),
    spec("layers.0.b", "U8", (64, 200)),
    spec("layers.1.c", "F32", (40, 10)),
    spec("layers.1.d", "I64", (7,)),
]


class World:
    """One engine at version 0 of a run, staged by two processes."""

    def __init__(self, codec: str = "sparse", sink: Sink | None = None, quiet: bool = False) -> None:
        self.quiet = quiet
        self.publisher = Publisher(sink or MemorySink(), make_schema("run", SPECS), frame_changed=200, codec=codec)
        self.words = random_words(SPECS)
        self.publisher.checkpoint(self.words)
        self.engine = plain_engine(self.words)
        self.made: list[ScatterBackend] = []
        self.applier = Applier(self.engine, self.publisher.sink, ApplyConfig(workers=3), backend=self._backend)
        self.applier.join()

    def _backend(self, binding: Binding) -> ScatterBackend:
        self.made.append(ScatterBackend(binding, processes=2, quiet=self.quiet))
        return self.made[0]

    @property
    def pool(self) -> WorkerPool:
        found = self.made[0].workers
        assert found is not None
        return found

    def step(self, density: float = 0.05) -> dict[str, np.ndarray]:
        new = changed(self.publisher.words, density, seed=self.publisher.newest.version + 1)  # type: ignore[union-attr]
        self.publisher.delta(new)
        return new

    def holds(self, words: dict[str, np.ndarray]) -> bool:
        live = {n: words_of(t) for n, t in self.engine.live.items()}
        return all(np.array_equal(live[n], w.reshape(live[n].shape)) for n, w in words.items())


def num_files() -> int:
    """Open files of this process."""
    gc.collect()
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    pool = made.pool
    yield made
    pool.close()


def test_versions_by_workers_alone(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(self: Loader, frames: object) -> None:
        raise AssertionError("a range was staged in this process")

    monkeypatch.setattr(Loader, "add", never)
    for density in (0.05, 0.002, 0.9):
        new = world.step(density)
        result = world.applier.update()
        assert world.holds(new)
        assert result.num_written == result.num_changed == world.publisher.newest.num_changed  # type: ignore[union-attr]
        assert result.fetched_nbytes == sum(world.publisher.newest.payload_nbytes)  # type: ignore[union-attr]
    world.applier.rollback()
    assert world.applier.audit().version == 2


def test_workers_read_the_files_of_a_local_sink_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(sink=LocalSink(tmp_path))

    def never(self: LocalSink, *a: object, **k: object) -> None:
        raise AssertionError("a payload was read in this process")

    monkeypatch.setattr(LocalSink, "read_into", never)
    files = num_files()
    for density in (0.05, 0.9, 0.002, 0.05):
        new = world.step(density)
        result = world.applier.update()
        assert world.holds(new)
        assert result.fetched_nbytes == sum(world.publisher.newest.payload_nbytes)  # type: ignore[union-attr]
        if density == 0.9:
            files = num_files()  # two sets of the largest arenas there will be
    assert num_files() <= files
    world.pool.close()


def test_payload_file_that_is_cut_short_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    world = World(sink=LocalSink(tmp_path))
    world.step()
    for path in tmp_path.rglob("payload-*"):
        os.truncate(path, path.stat().st_size // 2)
    with caplog.at_level(logging.WARNING), pytest.raises(RefetchError, match="passes its end"):
        world.applier.update()
    assert "the payload ends inside the range" in caplog.text
    assert world.holds(world.words)
    world.pool.close()


def test_quiet_workers_run_on_idle_cores_only() -> None:
    world = World(quiet=True)
    new = world.step()
    world.applier.update()
    assert world.holds(new)
    assert [os.sched_getscheduler(w.process.pid) for w in world.pool._workers] == 2 * [os.SCHED_IDLE]
    world.pool.close()


def test_worker_that_dies_while_it_writes_fails_the_staging_and_nothing_else(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    true, victims = Loader.reserve, [0]

    def reserve(self: Loader, *a: object) -> object:
        found = true(self, *a)  # type: ignore[arg-type]
        victims[0] += 1
        if victims[0] == 1:
            for worker in world.pool._workers:
                worker.process.kill()
                worker.process.wait()
        return found

    monkeypatch.setattr(Loader, "reserve", reserve)
    new = world.step()
    with caplog.at_level(logging.WARNING), pytest.raises(RetryError, match="while it wrote"):
        world.applier.update()
    assert world.holds(world.words)
    gc.collect()
    assert world.made[0].arenas._taken == []
    world.applier.update()
    assert world.holds(new)


def test_no_room_leaves_the_workers_ready(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Loader, *a: object) -> object:
        raise MemoryPlanError("no room")

    new = world.step()
    with monkeypatch.context() as patch:
        patch.setattr(Loader, "reserve", full)
        with pytest.raises(MemoryPlanError, match="no room"):
            world.applier.update()
    monkeypatch.setattr(Loader, "add", None)
    world.applier.update()
    assert world.holds(new)
    assert len(world.pool._workers) == 2


def test_staged_is_proven_once_and_holds_on_to_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing but the update refers to what was staged, its arenas go back without a search for cycles."""
    new = world.step()
    gc.disable()
    try:
        assert world.applier.stage() is not None
        session = world.applier._session
        assert session is not None
        session.staged.clear()
        assert world.made[0].arenas._taken == []
    finally:
        gc.enable()
    assert world.applier.stage() is not None
    monkeypatch.setattr(stage_module, "find", None)
    world.applier.update()
    assert world.holds(new)


def test_live_words_that_are_not_the_base_are_found_by_stage(world: World) -> None:
    world.step(0.9)
    world.engine.live["a"].view(torch.uint8).reshape(-1)[:4000] ^= 1
    with pytest.raises(BaseMismatchError, match="a are not those of version 0"):
        world.applier.stage()
    assert world.applier._session is not None
    assert not world.applier._session.staged


def test_dense_codecs_are_left_to_the_engines_process() -> None:
    world = World("lz4")
    new = world.step()
    world.applier.update()
    assert world.holds(new)
    world.pool.close()


def test_bad_frame_is_read_again_and_named(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.publisher.edit_frame = lambda b: b[:-1] + bytes([b[-1] ^ 1])
    world.step()
    with caplog.at_level(logging.WARNING), pytest.raises(FormatError, match=r"version 1, frame at \d+ of run/"):
        world.applier.update()
    assert "staged in the engine's process: FormatError" in caplog.text
    assert world.holds(world.words)


def test_stored_bytes_with_another_digest_are_fetched_again(world: World, caplog: pytest.LogCaptureFixture) -> None:
    new = world.step()
    sink = world.publisher.sink
    true, reads = sink.read_into, [0]

    def flaky(key: str, offset: int, out: memoryview, **more: object) -> None:
        true(key, offset, out, **more)  # type: ignore[arg-type]
        reads[0] += 1
        if reads[0] == 1:
            out[0] ^= 1

    sink.read_into = flaky  # type: ignore[method-assign,assignment]
    with caplog.at_level(logging.WARNING):
        world.applier.update()
    assert "RefetchError" in caplog.text
    assert world.holds(new)


def test_worker_that_dies_is_done_without(world: World, caplog: pytest.LogCaptureFixture) -> None:
    for worker in list(world.pool._workers):
        worker.process.kill()
        worker.process.wait()
    with caplog.at_level(logging.WARNING):
        new = world.step()
        world.applier.update()
    assert world.holds(new)
    assert "ended by itself" in caplog.text
    new = world.step()
    world.applier.update()
    assert world.holds(new)


def test_range_that_does_not_fit_is_staged_here(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scatter_workers, "IN_NBYTES", 10)
    new = world.step()
    world.applier.update()
    assert world.holds(new)


def test_processes_end_with_their_backend() -> None:
    world = World()
    processes = [w.process for w in world.pool._workers]
    assert all(p.poll() is None for p in processes)
    world.applier.close()
    del world
    gc.collect()
    assert [p.poll() for p in processes] == [0, 0]


def test_at_least_one_process() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        WorkerPool(None, 0)  # type: ignore[arg-type]
