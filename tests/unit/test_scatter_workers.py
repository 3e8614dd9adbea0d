"""Worker processes of staging: the same bytes as without, what they leave to the engine's process, and their end."""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Iterator

import numpy as np
import pytest

from megasync.config import ApplyConfig
from megasync.errors import FormatError
from megasync.receiver import scatter_workers
from megasync.receiver.applier import Applier
from megasync.receiver.bind import Binding
from megasync.receiver.scatter import ScatterBackend
from megasync.receiver.scatter_stage import Loader
from megasync.receiver.scatter_workers import WorkerPool
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

    def __init__(self, codec: str = "sparse") -> None:
        self.publisher = Publisher(MemorySink(), make_schema("run", SPECS), frame_changed=200, codec=codec)
        self.words = random_words(SPECS)
        self.publisher.checkpoint(self.words)
        self.engine = plain_engine(self.words)
        self.made: list[ScatterBackend] = []
        self.applier = Applier(self.engine, self.publisher.sink, ApplyConfig(workers=3), backend=self._backend)
        self.applier.join()

    def _backend(self, binding: Binding) -> ScatterBackend:
        self.made.append(ScatterBackend(binding, processes=2))
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
