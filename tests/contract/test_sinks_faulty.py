"""The sinks in memory: planned faults, limits, and keeping the last versions."""

from __future__ import annotations

import threading

import pytest

from megasync.errors import MemoryPlanError, RetryError, SinkConflictError
from megasync.manifest import manifest_key, payload_key, state_table_key
from megasync.sinks.faulty import Fault, FaultySink
from megasync.sinks.memory import Chunks, MemorySink


def test_fails_the_nth_operation_before_it_took_effect() -> None:
    sink = FaultySink(MemorySink(), [Fault("create", nth=2, times=2)])
    sink.create("run/1", [b"1"])
    for _ in range(2):
        with pytest.raises(RetryError, match="planned fault"):
            sink.create("run/2", [b"2"])
    assert list(sink.keys("run")) == ["run/1"]
    sink.create("run/2", [b"2"])
    assert [key for operation, key in sink.calls if operation == "create"] == ["run/1", "run/2", "run/2", "run/2"]


def test_durable_but_its_answer_lost() -> None:
    sink = FaultySink(MemorySink(), [Fault("create", key="manifest", when="after"), Fault("swap_head", when="after")])
    sink.create("run/payload", [b"p"])
    with pytest.raises(RetryError):
        sink.create("run/manifest", [b"m"])
    assert sink.read("run/manifest") == b"m"
    assert sink.create("run/manifest", [b"m"]) == 1
    with pytest.raises(RetryError):
        sink.swap_head("run", None, b"head")
    assert sink.read_head("run") == b"head"


def test_a_delayed_head_write_fails_after_a_fence() -> None:
    sink = FaultySink(MemorySink(), [Fault("swap_head", nth=2, when="late")])
    sink.swap_head("run", None, b"v1 fence 1")
    with pytest.raises(RetryError):
        sink.swap_head("run", b"v1 fence 1", b"v2 fence 1")
    assert sink.read_head("run") == b"v1 fence 1"
    sink.swap_head("run", b"v1 fence 1", b"v1 fence 2")
    (outcome,) = sink.release_late()
    assert isinstance(outcome, SinkConflictError)
    assert sink.read_head("run") == b"v1 fence 2"
    assert sink.release_late() == []


def test_a_delayed_head_write_without_a_fence_lands() -> None:
    sink = FaultySink(MemorySink(), [Fault("swap_head", nth=2, when="late"), Fault("create", when="late")])
    sink.swap_head("run", None, b"v1")
    part = bytearray(b"payload")
    with pytest.raises(RetryError):
        sink.create("run/a", [part])
    part[:] = b"altered"
    with pytest.raises(RetryError):
        sink.swap_head("run", b"v1", b"v2")
    assert sink.release_late() == [None, None]
    assert sink.read_head("run") == b"v2"
    assert sink.read("run/a") == b"payload"


def test_holds_until_told_to_go_on() -> None:
    gate = threading.Event()
    sink = FaultySink(MemorySink(), [Fault("create", gate=gate, error=None)])
    with pytest.raises(RetryError, match="not done within"):
        sink.create("run/a", [b"x"], timeout_s=0.01)
    sink.heal()
    sink.add(Fault("create", gate=gate, error=None))
    thread = threading.Thread(target=sink.create, args=("run/a", [b"x"]))
    thread.start()
    assert list(sink.keys("run")) == []
    gate.set()
    thread.join(10)
    assert sink.read("run/a") == b"x"


def test_delays_pass_on_the_given_clock_and_actions_run() -> None:
    slept: list[float] = []
    acted: list[str] = []
    plan = [Fault("read_head", delay_s=3600.0, error=None, action=lambda: acted.append("now"), times=1000)]
    sink = FaultySink(MemorySink(), plan, sleep=slept.append)
    assert sink.read_head("run") is None
    assert sink.read_head("run") is None
    assert (slept, acted) == ([3600.0, 3600.0], ["now", "now"])


def test_plans_that_make_no_sense_are_refused() -> None:
    for wrong in (
        {"operation": "write"},
        {"operation": "create", "nth": 0},
        {"operation": "create", "times": 0},
        {"operation": "read", "when": "late"},
        {"operation": "create", "when": "late", "error": None},
    ):
        with pytest.raises(ValueError, match=r"operation|nth|late"):
            Fault(**wrong)


def test_memory_limit_is_held_and_given_back() -> None:
    sink = MemorySink("small", max_nbytes=100)
    sink.create("run/a", [b"x" * 60])
    with pytest.raises(MemoryPlanError, match=r"60 bytes held, 41 more do not fit into max_nbytes 100"):
        sink.create("run/b", [b"y" * 41])
    with pytest.raises(MemoryPlanError, match="needs 41 bytes, 40 of max_nbytes 100 are free"):
        sink.check_room(41)
    sink.check_room(40)
    assert sink.held_nbytes == 60
    assert sink.create("run/a", [b"x" * 60]) == 60
    with pytest.raises(SinkConflictError):
        sink.create("run/a", [b"z" * 60])
    assert sink.held_nbytes == 60
    sink.delete("run/a")
    assert sink.held_nbytes == 0
    sink.create("run/b", [b"y" * 100])


def test_keeps_the_last_versions_of_a_run_and_all_other_objects() -> None:
    sink = MemorySink(num_versions=2)
    kept = [state_table_key("run", b"\1" * 16), "run/schema/abc", manifest_key("other", 1, 1)]
    for key in kept:
        sink.create(key, [b"k"])
    head: bytes | None = None
    for version in range(1, 5):
        keys = [payload_key("run", version, 1, 0), manifest_key("run", version, 1)]
        for key in keys:
            sink.create(key, [b"%d" % version])
        new = b"head %d" % version
        sink.swap_head("run", head, new)
        head = new
        wanted = [
            key
            for v in (version - 1, version)
            if v > 0
            for key in (payload_key("run", v, 1, 0), manifest_key("run", v, 1))
        ]
        assert sorted(sink.keys("")) == sorted(kept + wanted)


def test_named_sinks_are_one_in_a_process() -> None:
    first = MemorySink.named("shared", num_versions=3)
    first.create("run/a", [b"x"])
    assert MemorySink.named("shared", num_versions=3) is first
    with pytest.raises(ValueError, match="num_versions 3"):
        MemorySink.named("shared")
    MemorySink.forget("shared")
    again = MemorySink.named("shared")
    assert list(again.keys("")) == []
    MemorySink.forget("shared")
    with pytest.raises(ValueError, match="max_nbytes"):
        MemorySink(max_nbytes=0)


def test_an_object_is_read_without_copying_what_is_whole() -> None:
    part = b"x" * 1000
    sink = MemorySink()
    sink.create("run/a", [part])
    assert sink.read("run/a") is part
    chunks = Chunks([b"ab", b"cde", b"f"])
    assert [bytes(v) for v in chunks.views(1, 4)] == [b"b", b"cde"]
    assert [chunks.read(o, n) for o, n in ((0, 6), (2, 3), (5, 1), (6, 0), (0, 0))] == [
        b"abcdef",
        b"cde",
        b"f",
        b"",
        b"",
    ]
