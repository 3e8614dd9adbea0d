"""What is in a pause and what is not: checks, copies, kernels and the status file before it; comparisons where the sums are."""

from __future__ import annotations

import gc
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from megasync.errors import BaseMismatchError, UndoneError
from megasync.receiver.ledger import check_own
from megasync.receiver.scatter import ScatterBackend
from megasync.receiver.scatter_passes import Passes
from megasync.receiver.scatter_placed import ScatterPlaced
from megasync.receiver.scatter_units import Totals
from megasync.receiver.status import StatusFile
from megasync.receiver.stream_placed import StreamPlaced
from megasync.receiver.stream_slots import Slots
from megasync.receiver.sums import Sums
from tests.unit.receiving import PlainEngine
from tests.unit.test_scatter_backend import World as ScatterWorld
from tests.unit.test_stream_backend import World as StreamWorld


def scatter_placed(world: ScatterWorld) -> ScatterPlaced:
    (found,) = world.applier._session.last.staged.placed  # type: ignore[union-attr]
    assert isinstance(found, ScatterPlaced)
    return found


def logged(monkeypatch: pytest.MonkeyPatch, log: list[str], owner: type, name: str) -> None:
    """Every call of a method goes to the log, under the method's name."""
    true = getattr(owner, name)

    def call(self: object, *a: object, **k: object) -> object:
        log.append(name)
        return true(self, *a, **k)

    monkeypatch.setattr(owner, name, call)


def test_all_that_can_be_done_before_is_done_before_the_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    world = ScatterWorld()
    world.step()
    log: list[str] = []
    for owner, name in (
        (PlainEngine, "pause"),
        (PlainEngine, "resume"),
        (PlainEngine, "check_ready"),
        (ScatterPlaced, "prove"),
        (ScatterPlaced, "arm"),
        (ScatterPlaced, "write_"),
        (Totals, "sums"),
        (StatusFile, "set"),
    ):
        logged(monkeypatch, log, owner, name)
    world.applier.update()
    at = log.index("pause")
    assert log[at:] == ["pause", "write_", "resume", "set"]
    assert set(log[:at]) == {"prove", "sums", "check_ready", "arm", "set"}
    assert log[at - 2 : at] == ["arm", "set"]


def test_status_says_updating_on_disk_before_the_engine_pauses(tmp_path: Path) -> None:
    world = ScatterWorld(tmp_path / "s")
    world.step()
    said: list[str] = []
    world.engine.pause = lambda: said.append(json.loads((tmp_path / "s").read_text())["state"])  # type: ignore[method-assign]
    world.applier.update()
    assert said == ["updating"]


def test_sums_that_agree_on_the_device_are_those_of_the_proof() -> None:
    world = ScatterWorld()
    world.step()
    world.applier.update()
    last, placed = world.applier._session.last, scatter_placed(world)  # type: ignore[union-attr]
    assert last is not None
    assert last.own is not None
    assert last.own[1] is placed._after
    before, after = placed.prove()  # as it would be undone
    np.testing.assert_array_equal(before.lanes, last.own[1].lanes)
    np.testing.assert_array_equal(after.lanes, last.own[0].lanes)
    assert placed.write_() is after
    assert world.holds(world.words)


@pytest.mark.parametrize("armed", [False, True])
def test_sums_that_differ_come_back_as_they_were_found(armed: bool) -> None:
    """Words that another writer changed between proof and write, whether the XOR touches the bit or not."""
    world = ScatterWorld()
    new = world.step()
    world.applier.update()
    placed = scatter_placed(world)
    before, after = placed.prove()
    at = int(np.flatnonzero((new["layers.0.b"] != world.words["layers.0.b"]).reshape(-1))[0])
    world.engine.live["layers.0.b"].reshape(-1)[at] ^= 4
    if armed:
        placed.arm()
    found = placed.write_()
    assert found is not after
    wrong = (found.over(after.ids) != after.lanes).any(axis=1)
    assert [world.publisher.schema.tensors[i].name for i in after.ids[wrong]] == ["layers.0.b"]
    with pytest.raises(BaseMismatchError, match=r"layers\.0\.b read back after the write are not what was written"):
        check_own(world.publisher.schema, 1, after, found)
    placed.undo_()
    world.engine.live["layers.0.b"].reshape(-1)[at] ^= 4
    assert world.holds(new)
    np.testing.assert_array_equal(placed.read_back().lanes, before.lanes)


def test_writer_beside_the_update_is_found_and_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    world = ScatterWorld()
    new = world.step()
    at = int(np.flatnonzero((new["a"] != world.words["a"]).reshape(-1))[0])
    live = world.engine.live["a"].view(torch.int16).reshape(-1)
    true = PlainEngine.pause

    def pause(self: PlainEngine) -> None:
        live[at] ^= 1
        true(self)

    monkeypatch.setattr(PlainEngine, "pause", pause)
    with pytest.raises(Exception, match="something else writes these weights"):
        world.applier.update()
    live[at] ^= 1
    assert world.holds(world.words)


def test_preparation_that_fails_touches_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = ScatterWorld(tmp_path / "s")
    new = world.step()

    def fail(self: Passes, *a: object) -> None:
        raise RuntimeError("the kernel does not load")

    with monkeypatch.context() as m:
        m.setattr(Passes, "rehearse", fail)
        with pytest.raises(RuntimeError, match="does not load"):
            world.applier.update()
    assert (world.engine.events, world.on_disk()) == ([], "serving")
    assert world.holds(world.words)
    world.applier.update()
    assert world.holds(new)


@pytest.mark.parametrize("on", [True, False])
def test_garbage_is_not_collected_in_the_pause(on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    world = ScatterWorld()
    seen: list[bool] = []
    monkeypatch.setattr(PlainEngine, "pause", lambda self: seen.append(gc.isenabled()))
    was = gc.isenabled()
    try:
        gc.enable() if on else gc.disable()
        world.step()
        world.applier.update()
        assert (seen, gc.isenabled()) == ([False], on)

        def fail(self: ScatterPlaced) -> Sums:
            raise OSError("the host gave up")

        monkeypatch.setattr(ScatterPlaced, "write_", fail)
        world.step()
        with pytest.raises(UndoneError):
            world.applier.update()
        assert gc.isenabled() == on
    finally:
        gc.enable() if was else gc.disable()


def test_replicas_and_host_tensors_still_compare_on_the_host() -> None:
    """Several parts, or equal sums in other objects: value by value, as of backends that compare nothing themselves."""
    world = ScatterWorld()
    schema = world.publisher.schema
    one = Sums(np.array([0, 2]), np.array([[1, 2], [3, 4]], dtype=np.uint64))
    other = Sums(np.array([2, 0]), np.array([[3, 4], [1, 2]], dtype=np.uint64))
    check_own(schema, 1, one, Sums(one.ids.copy(), one.lanes.copy()))
    check_own(schema, 1, one, other)
    assert Sums.join([one]) is one
    with pytest.raises(BaseMismatchError, match=r"version 1: layers\.1\.c read back"):
        check_own(schema, 1, one, Sums(one.ids, one.lanes + np.array([[0, 0], [0, 1]], dtype=np.uint64)))


def test_stream_decodes_its_first_steps_before_the_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    world = StreamWorld()
    new = world.step()
    log: list[str] = []
    for owner, name in ((PlainEngine, "pause"), (StreamPlaced, "arm"), (Slots, "fill"), (StreamPlaced, "_launch")):
        logged(monkeypatch, log, owner, name)
    world.applier.update()
    at = log.index("pause")
    assert log[:at] == ["arm", "fill", "fill"]
    assert log[at:].count("_launch") == log[at:].count("fill") + 2 == len(world.placed.steps)
    assert world.holds(new)


def test_masks_that_another_publication_decoded_over_are_decoded_again() -> None:
    world = StreamWorld()
    new = world.step()
    world.applier.update()
    placed = world.placed
    world.step()
    world.applier.stage()
    (other,) = next(iter(world.applier._session.staged.values())).placed  # type: ignore[union-attr]
    placed.arm()
    other.prove()
    placed.write_()
    assert world.holds(world.words)
    placed.arm()
    placed.write_()
    assert world.holds(new)


def test_scatter_backend_arms_nothing_that_was_not_proven() -> None:
    """Sums are cleared by the write where nothing was armed, and by arming where something was."""
    world = ScatterWorld(backend=ScatterBackend)
    new = world.step()
    world.applier.update()
    placed = scatter_placed(world)
    for k in range(4):
        _, after = placed.prove()
        if k % 2:
            placed.arm()
        assert placed.write_() is after
    assert world.holds(new)
