"""Every sink passes the sink contract (megasync.sinks.contract)."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megasync.sinks.contract import CHECKS
from megasync.sinks.contract_place import Place
from megasync.sinks.faulty import FaultySink
from megasync.sinks.local import LocalSink
from megasync.sinks.memory import MemorySink
from megasync.sinks.remote import RemoteSink
from megasync.sinks.serve import SinkServer
from tests.contract.s3_server import S3Server, loopback

SINKS = ("local", "memory", "faulty", "served", "object-store", "s3")


@pytest.fixture(params=SINKS)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    kind: str = request.param
    if kind == "local":
        yield Place(lambda: LocalSink(tmp_path / "sink"), url=(tmp_path / "sink").as_uri())
    elif kind in ("memory", "faulty"):
        memory = MemorySink()
        yield Place(lambda: memory if kind == "memory" else FaultySink(memory))
    elif kind == "served":
        secret = secrets.token_bytes(32)
        host = loopback()
        server = SinkServer(MemorySink(), secret, host=host)
        yield Place(
            lambda: RemoteSink([(host, server.port)], secret),
            url=f"pg://[{host}]:{server.port}" if ":" in host else f"pg://{host}:{server.port}",
            options={"secret": secret.hex()},
        )
        server.close()
    else:
        pytest.importorskip("obstore", reason="obstore is not installed (extra s3)")
        yield from _object_store_place(kind)


def _object_store_place(kind: str) -> Iterator[Place]:
    from obstore.store import MemoryStore

    from megasync.sinks.object_store import ObjectStoreSink

    if kind == "object-store":
        store = MemoryStore()
        yield Place(lambda: ObjectStoreSink(store))
        return
    with S3Server() as server:
        yield Place(
            lambda: ObjectStoreSink.from_url("s3://bucket/some/prefix", **server.options),
            url="s3://bucket/some/prefix",
            options=server.options,
            large_mib=20,
            measured=False,
        )


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_contract(check: Callable[[Place], None], place: Place) -> None:
    check(place)
