"""A sink that another process serves over TCP: the client of ``serve.py``.

Connections are made when needed, proved with the run's secret, and kept for the next call. A connection that breaks
makes the call a RetryError; the next call connects again. Must not import trainer or receiver.
"""

from __future__ import annotations

import io
import os
import select
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from megasync.errors import RetryError
from megasync.sinks.base import (
    DEFAULT_TIMEOUT_S,
    Buffer,
    Deadline,
    Sink,
    byte_views,
    check_head,
    check_key,
    check_prefix,
    check_range,
    check_run,
    writable_view,
)
from megasync.sinks.wire import MAX_CHUNK_NBYTES, Answer, Channel, Request, raise_answered

T = TypeVar("T")
Address = tuple[str, int]
_CONNECT_S = 5.0
_KEPT_CONNECTIONS = 16


class RemoteSink(Sink):
    """Objects at a sink server. Usable from threads, and from children of a fork, which make their own connections.

    Attributes:
        addresses: Where the server may be reached, the first that answers and proves itself is taken.
    """

    def __init__(self, addresses: Sequence[Address], secret: bytes) -> None:
        """Name the server; nothing is connected yet.

        Args:
            addresses: (host, port) pairs, tried in order; host names, IPv4 or IPv6 addresses (no brackets).
            secret: The server's secret.

        Raises:
            ValueError: No address.
        """
        if not addresses:
            raise ValueError("a remote sink needs at least one address")
        self.addresses = list(addresses)
        self._secret = secret
        self._lock = threading.Lock()
        self._idle: list[Channel] = []
        self._owner = os.getpid()

    def create(self, key: str, parts: Iterable[Buffer], *, timeout_s: float = DEFAULT_TIMEOUT_S) -> int:
        """See ``Sink.create``."""
        check_key(key)

        def talk(channel: Channel, deadline: Deadline) -> int:
            for view in byte_views(parts):
                for start in range(0, view.nbytes, MAX_CHUNK_NBYTES):
                    channel.send_chunk(view[start : start + MAX_CHUNK_NBYTES], deadline)
            channel.send_chunk(memoryview(b""), deadline)
            return _answer(channel, deadline).number

        return self._call(Request("create", key, timeout_s), talk)

    def read(
        self, key: str, offset: int = 0, nbytes: int | None = None, *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> bytes:
        """See ``Sink.read``."""
        check_key(key)
        check_range(key, offset, nbytes, offset + (nbytes or 0))

        def talk(channel: Channel, deadline: Deadline) -> bytes:
            return _receive_body(channel, _answer(channel, deadline).body_nbytes, nbytes, deadline)

        return self._call(Request("read", key, timeout_s, offset, -1 if nbytes is None else nbytes), talk)

    def read_into(self, key: str, offset: int, out: memoryview, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """See ``Sink.read_into``."""
        check_key(key)
        view = writable_view(out)
        check_range(key, offset, view.nbytes, offset + view.nbytes)

        def talk(channel: Channel, deadline: Deadline) -> None:
            answer = _answer(channel, deadline)
            if answer.body_nbytes != view.nbytes:
                raise ConnectionError(f"{view.nbytes} bytes wanted, {answer.body_nbytes} offered")
            channel.receive_into(view, deadline)

        self._call(Request("read", key, timeout_s, offset, view.nbytes), talk)

    def size(self, key: str, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> int:
        """See ``Sink.size``."""
        return self._call(Request("size", check_key(key), timeout_s), lambda c, d: _answer(c, d).number)

    def keys(self, prefix: str, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> Iterator[str]:
        """See ``Sink.keys``. A snapshot of the moment of the call."""
        return iter(self._lines(Request("keys", check_prefix(prefix), timeout_s)))

    def delete(self, key: str, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """See ``Sink.delete``."""
        self._call(Request("delete", check_key(key), timeout_s), _answer)

    def read_head(self, run: str, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> bytes | None:
        """See ``Sink.read_head``."""
        answer = self._call(Request("read_head", check_run(run), timeout_s), _answer)
        return answer.document if answer.present else None

    def heads(self, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> list[str]:
        """See ``Sink.heads``."""
        return self._lines(Request("heads", "", timeout_s))

    def swap_head(self, run: str, expected: bytes | None, new: bytes, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """See ``Sink.swap_head``."""
        check_run(run)
        request = Request(
            "swap_head", run, timeout_s, 0, -1, expected is not None, bytes(expected or b""), bytes(check_head(new))
        )
        self._call(request, _answer)

    def check_room(self, nbytes: int) -> None:
        """See ``Sink.check_room``: the server's."""
        self._call(Request("check_room", "", DEFAULT_TIMEOUT_S, 0, nbytes), _answer)

    def describe(self) -> str:
        """What and where."""
        return "sink served at " + ", ".join(f"[{h}]:{p}" if ":" in h else f"{h}:{p}" for h, p in self.addresses)

    def close(self) -> None:
        """Close the kept connections; a later call makes new ones."""
        with self._lock:
            idle, self._idle = self._idle, []
        for channel in idle:
            channel.close()

    def _lines(self, request: Request) -> list[str]:
        def talk(channel: Channel, deadline: Deadline) -> bytes:
            return _receive_body(channel, _answer(channel, deadline).body_nbytes, None, deadline)

        listing = self._call(request, talk)
        return listing.decode().split("\n") if listing else []

    def _call(self, request: Request, talk: Callable[[Channel, Deadline], T]) -> T:
        """Send a request and have ``talk`` receive the answer, on a connection of this call alone."""
        deadline = Deadline(request.timeout_s)
        what = f"{request.operation} {request.key!r} at {self.describe()}"
        channel = self._take() or self._connect(deadline, what)
        whole = False
        try:
            channel.send_header(request, deadline)
            result = talk(channel, deadline)
            whole = True
        except _AnsweredError as answered:
            whole = True
            raise_answered(answered.answer)
            raise AssertionError("unreachable") from None
        except TimeoutError as error:
            raise deadline.passed(what) from error
        except OSError as error:
            raise RetryError(f"{what}: the connection broke ({error}); whether it took effect is unknown") from error
        finally:
            # After anything but a whole answer, the next bytes of this connection could be of this call.
            if whole:
                self._keep(channel)
            else:
                channel.close()
        return result

    def _take(self) -> Channel | None:
        with self._lock:
            if self._owner != os.getpid():
                # In a fork's child these are the parent's connections: forget them, without a shutdown.
                for channel in self._idle:
                    channel.socket.close()
                self._idle, self._owner = [], os.getpid()
            while self._idle:
                channel = self._idle.pop()
                # Readable while nothing was asked: the server closed it, or it is out of step.
                poll = select.poll()
                poll.register(channel.socket, select.POLLIN)
                if not poll.poll(0):
                    return channel
                channel.close()
        return None

    def _keep(self, channel: Channel) -> None:
        with self._lock:
            if len(self._idle) < _KEPT_CONNECTIONS:
                self._idle.append(channel)
                return
        channel.close()

    def _connect(self, deadline: Deadline, what: str) -> Channel:
        met: list[str] = []
        for host, port in self.addresses:
            left_s = min(_CONNECT_S, deadline.left_s())
            if left_s <= 0:
                break
            channel: Channel | None = None
            try:
                channel = Channel(socket.create_connection((host, port), timeout=left_s))
                channel.prove(self._secret, Deadline(left_s), server=False)
                return channel
            except OSError as error:
                met.append(f"{host} port {port}: {error}")
                if channel is not None:
                    channel.close()
        raise RetryError(
            f"{what}: no server answered and knew the secret ({'; '.join(met) or 'no time left'}); nothing was done; "
            f"check that the rank that keeps the sink is alive and reachable"
        )


class _AnsweredError(Exception):
    """The server answered with an error: the connection is fine."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(answer.message)
        self.answer = answer


def _answer(channel: Channel, deadline: Deadline) -> Answer:
    answer = channel.receive_header(Answer, deadline)
    if answer.error:
        raise _AnsweredError(answer)
    return answer


def _receive_body(channel: Channel, nbytes: int, wanted: int | None, deadline: Deadline) -> bytes:
    if nbytes < 0 or (wanted is not None and nbytes != wanted):
        raise ConnectionError(f"{wanted} bytes wanted, {nbytes} offered")
    if not nbytes:
        return b""
    # BytesIO hands its bytes on without a copy, which a bytearray could not.
    buffer = io.BytesIO()
    buffer.seek(nbytes - 1)
    buffer.write(b"\0")
    with buffer.getbuffer() as view:
        channel.receive_into(view, deadline)
    return buffer.getvalue()
