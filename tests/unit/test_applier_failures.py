"""Failures around the write: undone inside the pause, or recorded as tainted; and what a restart finds."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from megasync.config import ApplyConfig
from megasync.errors import (
    BaseMismatchError,
    FormatError,
    NeedsAnchorError,
    PlanError,
    RetryError,
    TaintedError,
    UndoneError,
)
from megasync.receiver.applier import Applier
from megasync.receiver.backend import Placed
from megasync.receiver.cpu import CpuBackend, CpuPlaced
from megasync.receiver.runs import Run as WordRun
from megasync.receiver.status import StatusFile
from megasync.sinks.memory import MemorySink
from tests.unit.publishing import Publisher, changed, make_schema, random_words, spec
from tests.unit.receiving import BrokenBackend, PlainEngine, plain_engine, words_of

SPECS = [spec("a", "BF16", (300, 64)), spec("layers.0.b", "U8", (64, 200)), spec("layers.1.c", "F32", (40, 10))]


class World:
    """One engine at version 0 and a version 1 that waits."""

    def __init__(
        self, path: Path | None = None, density: float = 0.05, root: str = "checkpoint", **more: object
    ) -> None:
        self.publisher = Publisher(MemorySink(), make_schema("run", SPECS), frame_changed=300)
        self.old = random_words(SPECS)
        if root == "anchor":
            self.publisher.anchor(self.old)
        else:
            self.publisher.checkpoint(self.old)
        self.engine: PlainEngine = plain_engine(self.old)
        self.path = path
        self.applier = Applier(
            self.engine,
            self.publisher.sink,
            ApplyConfig(workers=1),
            status_path=path,
            **more,  # type: ignore[arg-type]
        )
        self.applier.join()
        self.new = changed(self.old, density)
        self.publisher.delta(self.new)

    def holds(self, words: dict[str, np.ndarray]) -> bool:
        return all(np.array_equal(words_of(self.engine.live[n]), w) for n, w in words.items())

    def on_disk(self) -> dict[str, object]:
        assert self.path is not None
        return dict(json.loads(self.path.read_text()))


@pytest.mark.parametrize("density", [0.05, 0.6])
@pytest.mark.parametrize("written", [0, 1, 2])
def test_case_8_31_failed_write_is_undone_and_the_old_version_serves(
    written: int, density: float, tmp_path: Path
) -> None:
    world = World(tmp_path / "s", density, backend=lambda b: BrokenBackend(b, write_fails_after=written))
    with pytest.raises(UndoneError, match=r"version 1 failed after the first write and was undone: the machine check"):
        world.applier.update()
    assert world.holds(world.old)
    assert (world.applier.version, world.applier.ready) == (0, True)
    assert world.on_disk()["state"] == "serving"
    assert world.on_disk()["version"] == 0
    assert world.engine.events == ["pause", ("resume", 0)]
    assert world.applier.audit().version == 0


def test_undo_restores_exactly_wherever_inside_a_run_the_write_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    true_write = WordRun.xor_
    calls = [0]

    def half(self: WordRun, words: object) -> None:
        calls[0] += 1
        if calls[0] == 2:
            for p in self.parts:
                live = p.take(words)  # type: ignore[arg-type]
                live[: len(live) // 2] ^= p.pick(self.values)[: len(live) // 2]
                p.put(words, live)  # type: ignore[arg-type]
            raise OSError("half of a run was written")
        true_write(self, words)  # type: ignore[arg-type]

    monkeypatch.setattr(WordRun, "xor_", half)
    with pytest.raises(UndoneError, match="half of a run"):
        world.applier.update()
    assert world.holds(world.old)
    monkeypatch.setattr(WordRun, "xor_", true_write)
    world.applier.update()
    assert world.holds(world.new)


def test_word_that_does_not_read_back_is_undone() -> None:
    """Something else writes a touched word between the proof and the read-back."""

    class Raced(CpuBackend):
        def write_(self, placed, pool):  # type: ignore[no-untyped-def]
            run = placed[0].runs[0]
            part = run.parts[0]
            words = placed[0]._words(part.segments[0][0], part.unit_nbytes)
            words[part.offsets[0]] ^= 0x55
            return super().write_(placed, pool)

    world = World(backend=Raced)
    with pytest.raises(UndoneError, match="read back after the write are not what was written"):
        world.applier.update()
    assert world.holds(world.old)


def test_failed_undo_is_tainted_durably_and_never_resumes(tmp_path: Path) -> None:
    world = World(tmp_path / "s", backend=lambda b: BrokenBackend(b, write_fails_after=1, undo_fails=True))
    seen: list[str] = []
    world.engine.quarantine = lambda reason: seen.append(str(world.on_disk()["state"]))  # type: ignore[method-assign]
    with pytest.raises(TaintedError, match="could not be undone"):
        world.applier.update()
    assert seen == ["tainted"], "the status file must say so before the engine is told"
    assert world.engine.events == ["pause"]
    assert not world.applier.ready
    for call in (world.applier.update, world.applier.audit, world.applier.stage, world.applier.rollback):
        with pytest.raises(TaintedError, match="replace the replica"):
            call()
    again = Applier(plain_engine(world.old), world.publisher.sink, ApplyConfig(workers=1), status_path=world.path)
    with pytest.raises(NeedsAnchorError, match="status is tainted"):
        again.join()


def test_case_3_restart_that_finds_updating_never_serves_and_needs_an_anchor(tmp_path: Path) -> None:
    """Killed between the first and the last write; restarted over what is left."""

    class Killed(BaseException):
        pass

    class Dies(CpuBackend):
        def write_(self, placed, pool):  # type: ignore[no-untyped-def]
            assert on_disk() == ("updating", 0, 1), "the mark must be there before the first byte"
            placed[0].xor_()
            raise Killed

        def undo_(self, placed):  # type: ignore[no-untyped-def]
            raise Killed

    path = tmp_path / "s"

    def on_disk() -> tuple[object, ...]:
        found = json.loads(path.read_text())
        return found["state"], found["version"], found["target"]

    world = World(path, backend=Dies)
    mark = []
    true_set = StatusFile.set
    world.applier._status.set = lambda **c: (
        mark.append(c)
        or (  # type: ignore[method-assign,func-returns-value]
            true_set(world.applier._status, **c) if c.get("state") == "updating" else world.applier._status.now
        )
    )
    with pytest.raises(TaintedError):
        world.applier.update()
    assert on_disk() == ("updating", 0, 1)
    assert not world.holds(world.old)
    engine = PlainEngine(world.engine.live)
    fresh = Applier(engine, world.publisher.sink, ApplyConfig(workers=1), status_path=path)
    assert not fresh.ready
    with pytest.raises(NeedsAnchorError, match=r"status is updating \(version 0, target 1\)"):
        fresh.join()
    assert not fresh.ready
    assert engine.events == []
    world.publisher.anchor(world.new, version=2)
    assert fresh.join().versions == (2,)
    assert fresh.ready
    assert world.holds(world.new)


def test_restart_with_weights_loaded_anew_is_proven_by_content(tmp_path: Path) -> None:
    path = tmp_path / "s"
    world = World(path)
    world.applier._status.set(state="updating", target=1)
    fresh = Applier(world.engine, world.publisher.sink, ApplyConfig(workers=1), status_path=path)
    assert fresh.join(reloaded=True).version == 0
    fresh.update()
    assert world.holds(world.new)
    assert fresh.ready


def test_unreadable_status_is_an_error_not_a_fresh_start(tmp_path: Path) -> None:
    path = tmp_path / "s"
    for bad in (b"", b"{", b"[]", b'{"format": 9}', b'{"format": 1, "run": "run", "state": "fine"}'):
        path.write_bytes(bad)
        with pytest.raises(FormatError, match="unreadable"):
            StatusFile("run", path)
    path.unlink()
    StatusFile("run", path).set(state="serving", version=3)
    with pytest.raises(ValueError, match="of run 'run', expected 'other'"):
        StatusFile("other", path)
    assert StatusFile("run", path).now.version == 3
    assert [p.name for p in tmp_path.iterdir()] == ["s"]


def test_status_that_cannot_be_written_stops_the_update_before_any_write(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    world = World(tmp_path / "d" / "s")
    world.path.unlink()  # type: ignore[union-attr]
    (tmp_path / "d").rmdir()
    with pytest.raises(RetryError, match=r"status file .* cannot be written .*No such file.*nothing was touched"):
        world.applier.update()
    assert world.holds(world.old)
    assert world.engine.events == []


def test_status_that_cannot_be_written_after_the_proof_does_not_undo_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "d").mkdir()
    world = World(tmp_path / "d" / "s")

    def lose_disk(version: int) -> None:
        (tmp_path / "d" / "s").unlink()
        (tmp_path / "d").rmdir()

    world.engine.on_resume = lose_disk
    assert world.applier.update().version == 1
    assert (world.applier.version, world.applier.ready) == (1, True)
    assert "still says 'updating', not 'serving'" in caplog.text
    assert world.holds(world.new)


def test_engine_that_cannot_pause_is_resumed_on_its_old_version(tmp_path: Path) -> None:
    world = World(tmp_path / "s")

    def fail() -> None:
        raise TimeoutError("a request does not end")

    world.engine.on_pause = fail
    with pytest.raises(RetryError, match=r"did not pause for version 1 .*a request does not end"):
        world.applier.update()
    assert world.holds(world.old)
    assert world.engine.events == ["pause", ("resume", 0)]
    assert (world.on_disk()["state"], world.applier.version) == ("serving", 0)


def test_case_92_sleeping_engine_refuses_before_any_write(tmp_path: Path) -> None:
    world = World(tmp_path / "s")

    def asleep() -> None:
        raise BaseMismatchError("weights are asleep: wake them first")

    world.engine.on_ready = asleep
    with pytest.raises(BaseMismatchError, match="asleep"):
        world.applier.update()
    assert world.holds(world.old)
    assert (world.on_disk()["state"], world.engine.events) == ("serving", [])


def test_interrupt_between_writes_is_undone_and_passed_on() -> None:
    class Interrupted(CpuBackend):
        def write_(self, placed, pool):  # type: ignore[no-untyped-def]
            placed[0].xor_()
            raise KeyboardInterrupt

    world = World(backend=Interrupted)
    with pytest.raises(KeyboardInterrupt):
        world.applier.update()
    assert world.holds(world.old)
    assert world.engine.events == ["pause", ("resume", 0)]


@pytest.mark.parametrize("limit", [1 << 30, 1_000])
def test_anchor_that_fails_half_way(limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With memory for undo it is undone; without, the engine is tainted."""
    from megasync.receiver.dense import MaskPlaced

    world = World(tmp_path / "s")
    world.publisher.anchor(world.new, version=2)
    config = ApplyConfig(workers=1, staged_limit_nbytes=limit)
    applier = Applier(world.engine, world.publisher.sink, config, status_path=tmp_path / "s")
    calls = [0]
    true_write = MaskPlaced.xor_

    def fail(self: MaskPlaced) -> None:
        calls[0] += 1
        if calls[0] == 2:
            raise OSError("no more")
        true_write(self)

    monkeypatch.setattr(MaskPlaced, "xor_", fail)
    assert applier.status.state == "serving"
    error = UndoneError if limit > 1_000 else TaintedError
    with pytest.raises(error, match="no more"):
        applier.join()
    monkeypatch.undo()
    assert not applier.ready
    if limit > 1_000:
        assert world.holds(world.old)
        assert world.on_disk()["state"] == "new"
    else:
        assert not world.holds(world.old)
        assert world.on_disk()["state"] == "tainted"
        config = ApplyConfig(workers=1)
    fresh = Applier(world.engine, world.publisher.sink, config, status_path=tmp_path / "s")
    assert fresh.join().versions == (2,)
    assert world.holds(world.new)
    assert fresh.ready


def test_self_test_finds_weights_that_nobody_reads() -> None:
    words = random_words(SPECS)
    publisher = Publisher(MemorySink(), make_schema("run", SPECS))
    publisher.checkpoint(words)
    engine = plain_engine(words)
    reads = ["a", "layers.0.b"]

    def output() -> bytes:
        return b"".join(engine.live[n].numpy().tobytes()[:64] for n in reads)

    engine.output = output
    config = ApplyConfig(workers=1, self_test=True)
    with pytest.raises(PlanError, match=r"layers\.#\.c changes no output"):
        Applier(engine, publisher.sink, config).join()
    assert all(np.array_equal(words_of(engine.live[n]), w) for n, w in words.items())
    reads.append("layers.1.c")
    assert "self-test" in Applier(engine, publisher.sink, config).join().proofs
    assert all(np.array_equal(words_of(engine.live[n]), w) for n, w in words.items())


def test_placed_words_can_be_undone_before_they_were_written() -> None:
    world = World()
    session = world.applier._session
    assert session is not None
    from megasync.receiver.session import make_ready

    staged = make_ready(session, world.publisher.newest, ahead=False)  # type: ignore[arg-type]
    placed: list[Placed] = list(staged.placed)
    assert any(isinstance(p, CpuPlaced) for p in placed)
    for p in placed:
        p.undo_()
        p.undo_()
    assert world.holds(world.old)
    for p in placed:
        p.xor_()
    assert world.holds(world.new)
    for p in placed:
        p.undo_()
        p.undo_()
    assert world.holds(world.old)
    assert torch.is_tensor(world.engine.live["a"])
