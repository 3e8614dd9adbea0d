"""The object store sink beyond the contract: lost answers, silence, limits; against a small S3 server, over IPv6 where the host has it."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from megasync.errors import RefetchError, RetryError, SinkConflictError
from tests.contract.s3_server import S3Server

pytest.importorskip("obstore", reason="obstore is not installed (extra s3)")

from megasync.sinks import open_sink
from megasync.sinks.object_store import ObjectStoreSink


@pytest.fixture
def server() -> Iterator[S3Server]:
    with S3Server() as server:
        yield server


@pytest.fixture
def sink(server: S3Server) -> ObjectStoreSink:
    sink = open_sink({"url": "s3://bucket/deep/prefix", **server.options})
    assert isinstance(sink, ObjectStoreSink)
    return sink


def test_case_73_conditions_and_places_on_the_wire(server: S3Server, sink: ObjectStoreSink) -> None:
    sink.create("run/v1/payload", [b"pay", b"load"])
    sink.swap_head("run", None, b"one")
    sink.swap_head("run", b"one", b"two")
    assert server.objects == {
        "/bucket/deep/prefix/run/v1/payload": b"payload",
        "/bucket/deep/prefix/.heads/run": b"two",
    }
    assert sink.describe() == "object store sink s3://bucket/deep/prefix"
    server.objects["/bucket/deep/prefix/.heads/run"] = b"three"
    with pytest.raises(
        SinkConflictError, match=r"expected 3 bytes, crc32 [0-9a-f]{8}, found 5 bytes, crc32 [0-9a-f]{8}"
    ):
        sink.swap_head("run", b"two", b"four")


def test_many_keys_are_listed_over_pages(sink: ObjectStoreSink) -> None:
    keys = [f"run/v{n:03d}/a" for n in range(20)]
    for key in reversed(keys):
        sink.create(key, [b"x"])
    assert list(sink.keys("run")) == keys


def test_an_object_whose_answer_was_lost_is_created_once(server: S3Server, sink: ObjectStoreSink) -> None:
    """The client sends the put again, meets its own object, and finds it equal."""
    server.answers["PUT"] = [-500]
    assert sink.create("run/a", [b"bytes"]) == 5
    assert sink.read("run/a") == b"bytes"
    assert [method for method, _ in server.requests].count("PUT") == 2
    server.answers["PUT"] = [500]
    assert sink.create("run/b", [b"bytes"]) == 5


def test_a_head_whose_answer_was_lost_is_unknown_never_a_conflict(server: S3Server, sink: ObjectStoreSink) -> None:
    sink.swap_head("run", None, b"one")
    server.answers["PUT"] = [-500]
    with pytest.raises(RetryError, match="unknown"):
        sink.swap_head("run", b"one", b"two")
    assert sink.read_head("run") == b"two"
    server.answers["PUT"] = [503]
    with pytest.raises(RetryError, match="unknown"):
        sink.swap_head("run", b"two", b"three")
    assert sink.read_head("run") == b"two"


def test_silence_ends_in_time(server: S3Server, sink: ObjectStoreSink) -> None:
    gate = threading.Event()
    for method, call in (
        ("PUT", lambda: sink.create("run/a", [b"x"], timeout_s=0.1)),
        ("GET", lambda: sink.read_head("run", timeout_s=0.1)),
        ("HEAD", lambda: sink.size("run/a", timeout_s=0.1)),
    ):
        server.answers[method] = [gate] * 5
        with pytest.raises(RetryError):
            call()
    gate.set()


def test_credentials_refused_are_told_apart(server: S3Server, sink: ObjectStoreSink) -> None:
    server.answers["PUT"] = [403]
    with pytest.raises(RetryError, match="credentials refused"):
        sink.create("run/a", [b"x"])
    assert list(sink.keys("")) == []


def test_one_object_takes_one_request(sink: ObjectStoreSink) -> None:
    small = open_sink({"url": "s3://bucket/p", "max_object_nbytes": 10, "region": "r"})
    with pytest.raises(ValueError, match="11 bytes, one object takes 10; spread it"):
        small.create("run/a", [b"x" * 11])
    body = bytes(range(256)) * (40 << 10)  # 10 MiB: two ranges
    sink.create("run/a", [body])
    assert sink.read("run/a") == body
    out = bytearray(len(body) - 1)
    sink.read_into("run/a", 1, memoryview(out))
    assert out == body[1:]
    with pytest.raises(RefetchError, match=f"{len(body)} there"):
        sink.read_into("run/a", 2, memoryview(bytearray(len(body) - 1)))


def test_settings_that_obstore_does_not_know_are_refused() -> None:
    with pytest.raises(ValueError, match="colour"):
        open_sink("s3://bucket/p?colour=red&region=r")
