"""The sink served over TCP beyond the contract: strangers, silence, broken connections, IPv4 and IPv6."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megasync.errors import MemoryPlanError, RetryError, SinkConflictError
from megasync.sinks.base import Deadline
from megasync.sinks.faulty import Fault, FaultySink
from megasync.sinks.local import LocalSink
from megasync.sinks.memory import MemorySink
from megasync.sinks.process_group import host_addresses
from megasync.sinks.remote import RemoteSink
from megasync.sinks.serve import SinkServer
from megasync.sinks.wire import Channel, Request
from tests.contract.s3_server import loopback

SECRET = b"0123456789abcdef"


@pytest.fixture
def memory() -> MemorySink:
    return MemorySink("served", max_nbytes=100 << 20)


@pytest.fixture
def server(memory: MemorySink) -> Iterator[SinkServer]:
    server = SinkServer(memory, SECRET)
    yield server
    server.close()


Client = Callable[..., RemoteSink]


@pytest.fixture
def client() -> Iterator[Client]:
    """Makes clients of a server, which are closed at the end."""
    with contextlib.ExitStack() as stack:

        def make(server: SinkServer, host: str = "127.0.0.1", secret: bytes = SECRET) -> RemoteSink:
            return stack.enter_context(RemoteSink([(host, server.port)], secret))

        yield make


def _channel(server: SinkServer) -> Channel:
    channel = Channel(socket.create_connection(("127.0.0.1", server.port), timeout=5))
    channel.prove(SECRET, Deadline(5.0), server=False)
    return channel


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_case_73_ipv4_and_ipv6_reach_one_server(server: SinkServer, host: str, client: Client) -> None:
    if host == "::1" and loopback() != "::1":
        pytest.skip("this host has no IPv6")
    assert server.ipv6 == (loopback() == "::1")
    with client(server, host) as sink:
        sink.create("run/a", [b"x"])
        assert sink.read("run/a") == b"x"
        assert (f"[{host}]" if ":" in host else host) in sink.describe()


def test_the_first_address_that_answers_is_taken(server: SinkServer, memory: MemorySink) -> None:
    memory.create("run/a", [b"x"])
    with socket.create_server(("127.0.0.1", 0)) as closed:
        dead = closed.getsockname()[1]
    other = SinkServer(MemorySink("of another run"), secrets.token_bytes(32), host="127.0.0.1")
    with RemoteSink([("127.0.0.1", dead), ("127.0.0.1", other.port), (loopback(), server.port)], SECRET) as sink:
        assert sink.read("run/a") == b"x"
    other.close()
    addresses = host_addresses(ipv6=True)
    assert addresses[-2:] == ["127.0.0.1", "::1"]
    assert not any(":" in a for a in host_addresses(ipv6=False))


def test_strangers_are_refused_and_others_still_served(
    server: SinkServer, memory: MemorySink, caplog: pytest.LogCaptureFixture, client: Client
) -> None:
    memory.create("run/a", [b"x"])
    with caplog.at_level(logging.WARNING):
        with pytest.raises(RetryError, match="knew the secret"):
            client(server, secret=b"another secret, longer").read("run/a")
        with socket.create_connection(("127.0.0.1", server.port), timeout=5) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\nHost: sink\r\nAccept: everything there is\r\n\r\n")
            received = b""
            while piece := stranger.recv(1000):
                received += piece
            assert len(received) == 48, "a stranger learns the protocol's name and a number"
        for header in (struct.pack("<I", 1 << 30), struct.pack("<I", 5) + b"\xff" * 5):
            with contextlib.closing(_channel(server)) as channel:
                channel.send(header, Deadline(5.0))
                with pytest.raises(ConnectionError):
                    channel.receive(1, Deadline(5.0))
    assert client(server).read("run/a") == b"x"
    text = caplog.text
    assert "does not know this run's secret" in text or "refused a connection" in text
    assert SECRET.decode() not in text


def test_a_client_refuses_a_server_without_the_secret() -> None:
    """Nothing is sent to whoever happens to listen there."""
    received: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def pretend() -> None:
            connected, _ = listener.accept()
            with connected:
                channel = Channel(connected)
                channel.send(b"megasync-sink/1\n" + b"n" * 32 + b"guessed".ljust(32), Deadline(5.0))
                while piece := connected.recv(1000):
                    received.append(piece)

        thread = threading.Thread(target=pretend)
        thread.start()
        sink = RemoteSink([("127.0.0.1", listener.getsockname()[1])], SECRET)
        with pytest.raises(RetryError, match="does not know this run's secret"):
            sink.create("run/confidential", [b"weights"])
        thread.join(10)
    assert b"weights" not in b"".join(received)
    assert b"confidential" not in b"".join(received)


def test_silence_ends_in_time(client: Client) -> None:
    """A host that accepts and never answers, before or after the proof."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sink = RemoteSink([("127.0.0.1", listener.getsockname()[1])], SECRET)
        with pytest.raises(RetryError, match="no server answered"):
            sink.read_head("run", timeout_s=0.05)
    gate = threading.Event()
    server = SinkServer(FaultySink(MemorySink(), [Fault("read_head", gate=gate, error=None)]), SECRET)
    connected = client(server)
    assert list(connected.keys("")) == []
    with pytest.raises(RetryError, match=r"read_head 'run'.* not done within 0\.05 s"):
        connected.read_head("run", timeout_s=0.05)
    gate.set()
    server.close()


def test_errors_come_through_with_their_kind_and_text(server: SinkServer, memory: MemorySink, client: Client) -> None:
    sink = client(server)
    memory.create("run/a", [b"x"])
    with pytest.raises(MemoryPlanError, match="do not fit into max_nbytes"):
        sink.create("run/big", [bytes(60 << 20), bytes(60 << 20)])
    with pytest.raises(SinkConflictError, match="another publisher"):
        sink.create("run/a", [b"y" * (10 << 20)])
    with pytest.raises(MemoryPlanError, match="needs"):
        sink.check_room(200 << 20)
    with pytest.raises(ValueError, match="below or above"):
        sink.create("run/a/b", [b"x"])
    assert memory.held_nbytes == 1
    assert len(sink._idle) == 1, "errors that were answered leave the connection usable"


def test_a_creation_whose_client_dies_leaves_nothing(server: SinkServer, memory: MemorySink, client: Client) -> None:
    channel = _channel(server)
    channel.send_header(Request("create", "run/a", 5.0), Deadline(5.0))
    channel.send_chunk(memoryview(b"half"), Deadline(5.0))
    other = client(server)
    other.create("run/b", [b"x"])
    channel.close()
    server.close()
    assert list(memory.keys("")) == ["run/b"]


def test_a_restarted_server_is_found_again(memory: MemorySink, client: Client) -> None:
    memory.create("run/a", [b"x"])
    server = SinkServer(memory, SECRET, host="127.0.0.1")
    sink = client(server)
    assert sink.read("run/a") == b"x"
    server.close()
    with pytest.raises(RetryError):
        sink.read("run/a", timeout_s=1.0)
    again = SinkServer(memory, SECRET, host="127.0.0.1", port=server.port)
    assert sink.read("run/a") == b"x"
    again.close()
    again.close()


def test_an_object_deleted_while_it_is_read_is_an_error_not_half_an_object(memory: MemorySink, client: Client) -> None:
    nbytes = 9 << 20
    memory.create("run/a", [bytes(nbytes)])
    plan = [Fault("read", nth=2, error=None, action=lambda: memory.delete("run/a"))]
    server = SinkServer(FaultySink(memory, plan), SECRET)
    sink = client(server)
    with pytest.raises(RetryError):
        sink.read("run/a")
    with pytest.raises(KeyError):
        sink.read("run/a")
    server.close()


def test_a_forked_child_makes_its_own_connection(server: SinkServer, memory: MemorySink, client: Client) -> None:
    memory.create("run/a", [b"x"])
    sink = client(server)
    assert sink.read("run/a") == b"x"
    child = os.fork()
    if not child:
        os._exit(0 if sink.read("run/a", timeout_s=10.0) == b"x" else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert sink.read("run/a") == b"x"


def test_any_sink_can_be_served(tmp_path: Path, client: Client) -> None:
    """One host reads the shared directory for those that cannot."""
    local = LocalSink(tmp_path)
    server = SinkServer(local, SECRET)
    with client(server) as sink:
        sink.create("run/v1/a", [b"x" * (5 << 20), b"y"])
        sink.swap_head("run", None, b"head")
        assert list(sink.keys("")) == ["run/v1/a"]
    assert local.read("run/v1/a", 5 << 20) == b"y"
    assert local.read_head("run") == b"head"
    server.close()


def test_heads_are_listed_as_the_served_sink_lists_them(server: SinkServer, memory: MemorySink, client: Client) -> None:
    with client(server) as sink:
        assert sink.heads() == []
        for run in ("run2", "run"):
            sink.swap_head(run, None, b"x")
        assert sink.heads() == memory.heads() == ["run", "run2"]


def test_bad_arguments(memory: MemorySink) -> None:
    with pytest.raises(ValueError, match="16 at least"):
        SinkServer(memory, b"short")
    with pytest.raises(ValueError, match="cannot listen"):
        SinkServer(memory, SECRET, host="192.0.2.77")
    with pytest.raises(ValueError, match="at least one address"):
        RemoteSink([], SECRET)
