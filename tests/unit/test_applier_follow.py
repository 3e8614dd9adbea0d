"""Following the head: what passes is tried again and reported, what does not is raised; no test sleeps."""

from __future__ import annotations

from collections.abc import Callable
from threading import Event

import pytest

from megasync.config import ApplyConfig
from megasync.errors import BaseMismatchError, FormatError, MegasyncError, RetryError
from megasync.receiver.applier import Applier
from megasync.receiver.follow import LONGEST_WAIT_S, follow
from megasync.receiver.results import UpdateResult
from megasync.sinks.memory import MemorySink
from tests.unit.publishing import Publisher, changed, make_schema, random_words, spec
from tests.unit.receiving import plain_engine, words_of

SPECS = [spec("layers.0.w", "BF16", (40, 30))]


class Script:
    """Waits by doing the next thing; stops at the end."""

    def __init__(self, *things: Callable[[], object]) -> None:
        self.things, self.waits, self.stop = list(things), [], Event()  # type: ignore[var-annotated]

    def wait(self, seconds: float) -> None:
        self.waits.append(seconds)
        if self.things:
            self.things.pop(0)()
        else:
            self.stop.set()


def test_follow_applies_what_comes_and_survives_bad_heads() -> None:
    publisher = Publisher(MemorySink(), make_schema("run", SPECS))
    words = random_words(SPECS)
    publisher.checkpoint(words)
    engine = plain_engine(words)
    applier = Applier(engine, publisher.sink, ApplyConfig(workers=1))
    applier.join()
    heads: dict[str, bytes] = publisher.sink._heads  # type: ignore[attr-defined]
    good: list[bytes] = []

    def publish() -> None:
        publisher.delta(changed(publisher.words, 0.1, seed=len(good)))

    def spoil() -> None:
        good.append(heads["run"])
        heads["run"] = b"\xff" * 9

    def heal() -> None:
        heads["run"] = good[-1]

    results: list[UpdateResult] = []
    problems: list[MegasyncError] = []
    script = Script(publish, spoil, lambda: None, heal, publish)
    applier.follow(script.stop, poll_s=1.0, wait=script.wait, on_update=results.append, on_problem=problems.append)
    assert [r.version for r in results] == [1, 2]
    assert [type(p) for p in problems] == [FormatError, FormatError]
    assert script.waits == [1.0, 1.0, 2.0, 4.0, 1.0, 1.0]
    assert (words_of(engine.live["layers.0.w"]) == publisher.words["layers.0.w"]).all()


class Fake:
    """Raises what it is given, one after the other."""

    def __init__(self, *errors: Exception | None) -> None:
        self.errors = list(errors)

    def update(self, version: int | None = None) -> UpdateResult:
        error = self.errors.pop(0) if self.errors else None
        if error is not None:
            raise error
        return UpdateResult("run", 3, 3)


def test_waits_grow_to_a_limit_and_start_over() -> None:
    script = Script(*[lambda: None] * 12)
    follow(Fake(*[RetryError("no answer")] * 9, None, RetryError("again")), script.stop, poll_s=0.5, wait=script.wait)
    assert script.waits[:9] == [1.0, 2.0, 4.0, 8.0, 16.0, *[LONGEST_WAIT_S] * 4]
    assert script.waits[9:12] == [0.5, 1.0, 0.5]


def test_what_does_not_pass_is_raised_at_once() -> None:
    script = Script()
    with pytest.raises(BaseMismatchError):
        follow(Fake(BaseMismatchError("other bytes")), script.stop, poll_s=1, wait=script.wait)
    assert script.waits == []


def test_give_up_after_so_many_problems_in_a_row() -> None:
    script = Script(*[lambda: None] * 9)
    with pytest.raises(RetryError):
        follow(Fake(*[RetryError("x")] * 9), script.stop, poll_s=1, wait=script.wait, give_up_after=3)
    assert len(script.waits) == 2


def test_stopped_before_it_began() -> None:
    stop = Event()
    stop.set()
    follow(Fake(RuntimeError("never called")), stop, poll_s=1)
