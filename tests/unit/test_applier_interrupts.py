"""An interrupt at any line of an update, a stage or a rollback: the weights are one version and the applier says which, or it
is not ready; and what helps then does help."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from threading import Barrier
from types import FrameType
from typing import Any

import numpy as np
import pytest

import megasync
from megasync.errors import BaseMismatchError, NeedsAnchorError, TaintedError
from megasync.receiver.applier import Applier
from megasync.receiver.bind import Binding
from megasync.receiver.pausing import pause
from megasync.receiver.session import Session
from tests.unit.receiving import PlainEngine, on_ranks, words_of
from tests.unit.test_applier_versions import Run
from tests.unit.test_receiver_ranks import World as Ranks

RECEIVER = str(Path(megasync.__file__).parent / "receiver")
AROUND_THE_WRITE = ("apply.py", "pausing.py", "session.py", "applier.py", "votes.py", "status.py", "anchor.py")


class Lines:
    """Counts the lines that a call runs of the receiver, and raises KeyboardInterrupt at one of them."""

    def __init__(self, at: int = 0) -> None:
        self.at, self.num = at, 0
        self.seen: dict[tuple[str, int], list[int]] = {}

    def _line(self, frame: FrameType, event: str, arg: object) -> Any:
        if event == "line":
            self.num += 1
            self.seen.setdefault((frame.f_code.co_filename, frame.f_lineno), []).append(self.num)
            if self.num == self.at:
                raise KeyboardInterrupt
        return self._line

    def _call(self, frame: FrameType, event: str, arg: object) -> Any:
        # A turn's own lock: the line at which it is let go cannot be interrupted outside of a trace.
        mine = frame.f_code.co_filename.startswith(RECEIVER) and frame.f_code.co_name not in ("_turn", "_no_collection")
        return self._line if mine else None

    def run(self, call: Callable[[], object]) -> BaseException | None:
        before = sys.gettrace()
        sys.settrace(self._call)
        try:
            call()
        except BaseException as e:
            return e
        finally:
            sys.settrace(before)
        return None


def world(what: str) -> tuple[Run, Applier, PlainEngine, Callable[[], object]]:
    run = Run(1, root="anchor")
    applier, engine = run.applier(run.words[0], staged_limit_nbytes=100 if what == "streamed" else 1 << 30)
    applier.join()
    if what in ("anchor", "streamed"):
        run.anchor()
    else:
        applier.update()
    if what in ("update", "stage"):
        run.step()
    calls: dict[str, Callable[[], object]] = {"stage": applier.stage, "rollback": applier.rollback}
    return run, applier, engine, calls.get(what, applier.update)


def is_paused(engine: PlainEngine) -> bool:
    moves = [e for e in engine.events if e == "pause" or (isinstance(e, tuple) and e[0] == "resume")]
    return bool(moves) and moves[-1] == "pause"


@pytest.mark.parametrize("what", ["update", "stage", "rollback", "anchor", "streamed"])
def test_interrupted_at_any_line_it_is_one_version_or_not_ready(what: str) -> None:
    _, _, _, call = world(what)
    lines = Lines()
    assert lines.run(call) is None
    ats: set[int] = set()
    for (file, _), found in lines.seen.items():
        # Every line around the write, the first and the last time; of the others some.
        ats |= {found[0], found[-1]} if file.endswith(AROUND_THE_WRITE) else {found[-1]}
    ordered = sorted(ats)
    core = {
        n
        for (f, _), found in lines.seen.items()
        if f.endswith(("receiver/apply.py", "receiver/pausing.py"))
        for n in found
    }
    chosen = sorted({*ordered[:: 1 + len(ordered) // 25], *(core & ats)})
    for at in chosen:
        run, applier, engine, call = world(what)
        error = Lines(at).run(call)
        words = {n: words_of(t) for n, t in engine.live.items()}
        versions = [v for v, w in enumerate(run.words) if all(np.array_equal(words[n], x) for n, x in w.items())]
        if what == "streamed" and isinstance(error, TaintedError):  # nothing is kept to undo it with
            assert (applier.status.state, applier.ready) == ("tainted", False)
            assert applier.join().version == len(run.words) - 1
            continue
        assert isinstance(error, KeyboardInterrupt), at
        assert versions == [applier.version], at
        assert not (applier.ready and is_paused(engine)), at
        assert applier.status.state in ("serving", "behind"), at
        if applier.ready:
            assert applier.status.version == applier.version, at
        applier.update()
        assert (applier.version, applier.ready, is_paused(engine)) == (len(run.words) - 1, True, False), at
        assert applier.audit().version == applier.version


def test_interrupted_again_while_it_is_undone_it_is_torn_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second interrupt keeps the mark from being written: the first one must be enough."""
    run, applier, engine, _ = world("update")

    def interrupt(*args: object, **more: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("megasync.receiver.apply._write_and_compare", interrupt)
    monkeypatch.setattr("megasync.receiver.apply._undo", interrupt)
    with pytest.raises(KeyboardInterrupt):
        applier.update()
    monkeypatch.undo()
    assert (applier.version, applier.ready, applier.status.state) == (-1, False, "updating")
    with pytest.raises(BaseMismatchError, match=r"holds no version \(interrupted \(KeyboardInterrupt.*join again"):
        applier.update()
    applier.join()
    applier.update()
    assert (applier.version, applier.ready) == (2, True)
    assert all(np.array_equal(words_of(engine.live[n]), w) for n, w in run.words[2].items())


def test_what_is_kept_of_an_older_version_is_no_way_back_after_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the proof of version 2 and what is kept of it: version 1's mask must not be taken off version 2."""
    _, applier, _, _ = world("update")

    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Session, "held_awake", interrupt)
    session = applier._session
    assert session is not None
    before = session.last
    with pytest.raises(KeyboardInterrupt):
        applier.update()
    monkeypatch.undo()
    session.last = before  # as if the interrupt had come one line earlier
    with pytest.raises(NeedsAnchorError, match="nothing is kept"):
        applier.rollback()
    applier.update()
    assert (applier.version, applier.ready) == (2, True)


def test_a_rank_interrupted_between_two_votes_does_not_go_on_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others may have taken the version: this one is not ready, and says that its weights are to be overwritten."""
    several = Ranks(2)
    several.join()
    several.publish(0.1, seed=3)
    several.mailbox.barrier = Barrier(2, timeout=0.5)

    def pause_and_interrupt(binding: Binding, *args: Any) -> None:
        pause(binding, *args)
        if binding.engine.rank == 0:
            raise KeyboardInterrupt

    def caught(applier: Applier) -> BaseException | None:
        try:
            applier.update()
        except BaseException as e:
            return e
        return None

    monkeypatch.setattr("megasync.receiver.apply.pause", pause_and_interrupt)
    found = on_ranks([partial(caught, a) for a in several.appliers])
    assert [type(e) for e in found] == [KeyboardInterrupt, TaintedError]
    assert [(a.ready, a.status.state) for a in several.appliers] == [(False, "updating"), (False, "tainted")]
    assert several.engines[0].events[-1] != ("resume", 1)
    assert several.appliers[0].version == -1
