"""What both mask stages of a device share: fences between passes, and interrupts anywhere on the trainer's thread."""

from __future__ import annotations

import dis
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest
import torch

from megasync.config import SnapshotPlace
from megasync.digest import XXH3_128
from megasync.trainer import side_masker
from megasync.trainer.device_masker import DeviceMasker
from megasync.trainer.device_snapshot import DeviceSnapshot
from megasync.trainer.device_stream import Mark
from megasync.trainer.side_masker import SideMasker, SidePass
from tests.gpu import trainer_cases as cases

KINDS = pytest.mark.parametrize("connections", ["1", "8"], ids=["copied", "kernels"])
_LOOKS = ("CALL", "RESUME", "JUMP_BACKWARD")
_TRACED = ("side_masker.py", "copied_masker.py", "device_masker.py", "device_stream.py")


def made(rank: cases.Rank, connections: str, patch: pytest.MonkeyPatch) -> tuple[DeviceSnapshot, SideMasker[Any]]:
    patch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", connections)
    snapshot, masker = cases.on_device(rank, place=SnapshotPlace.HOST, codec="sparse")
    assert isinstance(masker, SideMasker)
    assert isinstance(masker, DeviceMasker) == (connections != "1")
    return snapshot, masker


@contextmanager
def interrupt_at(number: int, files: tuple[str, ...] = _TRACED) -> Iterator[list[int]]:
    """A KeyboardInterrupt at the place of that number in some files where this thread looks for one; counts them.

    The interpreter looks behind calls, at the beginning of functions and when a loop turns, and nowhere else: locks rely on it.
    """
    seen = [0]
    last: dict[FrameType, int] = {}

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        if not frame.f_code.co_filename.endswith(files):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            before, last[frame] = last.get(frame), frame.f_code.co_code[frame.f_lasti]
            seen[0] += before is not None and dis.opname[before].startswith(_LOOKS)
            if seen[0] == number:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    traced = sys.gettrace()
    sys.settrace(trace)
    try:
        yield seen
    finally:
        sys.settrace(traced)


def one_sync(masker: SideMasker[Any], has_read: threading.Event) -> None:
    masker.begin(late=(1,))
    assert has_read.wait(20)  # the chunk that is not late: the snapshot may have advanced
    masker.start_chunk(1)
    masker.fence()


@KINDS
def test_an_interrupt_anywhere_leaves_nothing_that_waits_and_a_pass_that_can_be_undone(
    connections: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = cases.make_rank()
    snapshot, masker = made(rank, connections, monkeypatch)
    passes: list[SidePass] = []
    new_pass = masker._new_pass

    def noted(late: Any) -> SidePass:
        passes.append(new_pass(late))
        return passes[-1]

    has_read, read_chunk = threading.Event(), masker._read_chunk

    def read(masked: SidePass, chunk: int, start: Mark) -> None:
        read_chunk(masked, chunk, start)
        has_read.set()

    finished: list[SidePass] = []
    finish = masker._finish

    def finishing(masked: SidePass) -> None:
        finished.append(masked)
        finish(masked)

    monkeypatch.setattr(masker, "_new_pass", noted)
    monkeypatch.setattr(masker, "_read_chunk", read)
    monkeypatch.setattr(masker, "_finish", finishing)
    before = cases.copies_of(snapshot)
    rank.change(0.01, 1)
    number, interrupted, unlike = 1, 0, 0
    while True:
        passes.clear()
        has_read.clear()
        with interrupt_at(number) as seen:
            try:
                one_sync(masker, has_read)
            except KeyboardInterrupt:
                interrupted += 1
        masker.start_rest()
        masker.fence()
        assert len(passes) <= 1
        if passes and passes[0].read is not None:
            passes[0].ended.wait()
            error = passes[0]._failure
            assert error is None or isinstance(error, KeyboardInterrupt)
            unlike += any((a != b).any() for a, b in zip(cases.copies_of(snapshot), before, strict=True))
            masker.undo(passes)
        cases.assert_same_bytes(cases.copies_of(snapshot), before)
        if seen[0] < number:
            break
        number += 1
    assert interrupted > 30
    assert unlike > 10  # that had advanced the snapshot
    masker.begin().encode("sparse", XXH3_128)
    cases.assert_snapshot_is_live(snapshot)
    assert len({id(p) for p in finished}) == len(finished)  # each by one thread, once
    masker.close()


@KINDS
def test_a_pass_is_fenced_before_the_next_one_begins(connections: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Volatile copies of the first would be written again while they are read."""
    rank = cases.make_rank()
    _, masker = made(rank, connections, monkeypatch)
    assert masker._copies
    first = masker.begin()
    assert isinstance(first, SidePass)
    waited: list[SidePass] = []
    wait_issued = SidePass.wait_issued

    def noted(self: SidePass) -> Mark | None:
        waited.append(self)
        return wait_issued(self)

    monkeypatch.setattr(SidePass, "wait_issued", noted)
    second = masker.begin()
    assert waited == [first]
    masker.fence()
    assert waited == [first, second]
    masker.fence()  # of nothing
    assert waited == [first, second]
    masker.close()


@KINDS
def test_what_fails_in_a_step_end_fails_the_version_and_not_the_step(
    connections: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = cases.make_rank()
    snapshot, masker = made(rank, connections, monkeypatch)
    before = cases.copies_of(snapshot)
    calls: list[Callable[[], Any]] = [masker.begin, lambda: masker.begin(late=(1,))]

    def failing(device: torch.device) -> Mark:
        raise RuntimeError("event: out of memory")

    for call in calls:
        with monkeypatch.context() as patch:
            patch.setattr(side_masker, "Mark", failing)
            masked = call()
        masker.start_rest()
        masker.fence()
        with pytest.raises(RuntimeError, match="event: out of memory"):
            masked.encode("sparse", XXH3_128)
        masker.undo([masked])
        cases.assert_same_bytes(cases.copies_of(snapshot), before)
    rank.change(0.01, 1)
    masker.begin().encode("sparse", XXH3_128)
    cases.assert_snapshot_is_live(snapshot)
    masker.close()


@KINDS
def test_a_fence_before_every_chunk_has_begun_fails_the_pass_and_not_the_step(
    connections: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = cases.make_rank()
    snapshot, masker = made(rank, connections, monkeypatch)
    before = cases.copies_of(snapshot)
    rank.change(0.01, 1)
    masked = masker.begin(late=(1,))
    masker.fence()
    assert isinstance(masked, SidePass)
    masked.ended.wait()
    assert "chunks [1] have not begun" in str(masked._failure)
    masker.undo([masked])
    cases.assert_same_bytes(cases.copies_of(snapshot), before)
    masker.begin().encode("sparse", XXH3_128)
    cases.assert_snapshot_is_live(snapshot)
    masker.close()


@KINDS
def test_a_pass_is_taken_back_once_however_often_that_is_asked_for(
    connections: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = cases.make_rank()
    snapshot, masker = made(rank, connections, monkeypatch)
    before = cases.copies_of(snapshot)
    rank.change(0.01, 1)
    passes = [masker.begin()]
    for _ in range(2):
        masker.undo(passes)
        cases.assert_same_bytes(cases.copies_of(snapshot), before)
    masker.close()
