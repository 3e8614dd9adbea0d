"""What a sink server and its clients say to each other over a TCP connection.

A connection begins with each side proving that it knows the run's secret (HMAC over both sides' fresh numbers; the
secret itself never travels). What follows is neither encrypted nor signed, since manifests have signatures and frames
have digests: this keeps strangers out, not someone who can redirect connections. Then the client sends one request at a
time: a length, a msgpack header, and for a creation the object's chunks. The answer is a header and, for reads, the
bytes. Used by ``serve.py`` and ``remote.py``. Must not import trainer or receiver.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
from collections.abc import Iterator
from typing import TypeVar

import msgspec

from megasync.errors import FormatError, MemoryPlanError, RefetchError, RetryError, SinkConflictError
from megasync.sinks.base import Deadline

MAX_HEADER_NBYTES = 256 * 1024
MAX_CHUNK_NBYTES = 4 << 20
SECRET_NBYTES = 32
_MAGIC = b"megasync-sink/1\n"
_LENGTH = struct.Struct("<I")
_ERRORS: dict[str, type[Exception]] = {
    "absent": KeyError,
    "value": ValueError,
    "type": TypeError,
    "conflict": SinkConflictError,
    "refetch": RefetchError,
    "room": MemoryPlanError,
    "format": FormatError,
    "retry": RetryError,
}


class Request(msgspec.Struct, forbid_unknown_fields=True, array_like=True):
    """A call of a sink method; ``nbytes`` -1 reads to the end, ``has_expected`` tells no head from an empty one."""

    operation: str
    key: str
    timeout_s: float
    offset: int = 0
    nbytes: int = -1
    has_expected: bool = False
    expected: bytes = b""
    new: bytes = b""


class Answer(msgspec.Struct, forbid_unknown_fields=True, array_like=True):
    """What came of it: an error's kind and text, or a number, a document, and the bytes that follow this header."""

    error: str = ""
    message: str = ""
    number: int = 0
    present: bool = False
    document: bytes = b""
    body_nbytes: int = 0


Header = TypeVar("Header", Request, Answer)


class Channel:
    """One connected socket with deadlines on everything.

    Attributes:
        socket: The socket; closed by ``close``.
    """

    __slots__ = ("socket",)

    def __init__(self, connected: socket.socket) -> None:
        """Take over a connected stream socket."""
        self.socket = connected
        if connected.family in (socket.AF_INET, socket.AF_INET6):
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def send(self, data: bytes | memoryview, deadline: Deadline) -> None:
        """Send all of it.

        Raises:
            TimeoutError: The deadline passed.
            OSError: The connection broke.
        """
        view = memoryview(data)
        for start in range(0, view.nbytes, MAX_CHUNK_NBYTES):
            self._set_timeout(deadline)
            self.socket.sendall(view[start : start + MAX_CHUNK_NBYTES])

    def receive_into(self, out: memoryview, deadline: Deadline) -> None:
        """Fill ``out``; raises like ``send``."""
        at = 0
        while at < out.nbytes:
            self._set_timeout(deadline)
            got = self.socket.recv_into(out[at:])
            if not got:
                raise ConnectionResetError("the other side closed the connection")
            at += got

    def receive(self, nbytes: int, deadline: Deadline) -> bytearray:
        """Receive exactly so many bytes; raises like ``send``."""
        data = bytearray(nbytes)
        self.receive_into(memoryview(data), deadline)
        return data

    def _set_timeout(self, deadline: Deadline) -> None:
        left_s = deadline.left_s()
        if left_s <= 0:
            raise TimeoutError("deadline passed")
        self.socket.settimeout(left_s)

    def send_header(self, header: Request | Answer, deadline: Deadline) -> None:
        """Send a header."""
        body = msgspec.msgpack.encode(header)
        self.send(_LENGTH.pack(len(body)) + body, deadline)

    def receive_header(self, kind: type[Header], deadline: Deadline) -> Header:
        """Receive a header.

        Raises:
            ConnectionError: What came is no such header; the connection cannot be used any more.
        """
        nbytes = self.receive_length(MAX_HEADER_NBYTES, deadline)
        try:
            return msgspec.msgpack.decode(self.receive(nbytes, deadline), type=kind)
        except msgspec.DecodeError as error:
            raise ConnectionError(f"not a header of the sink protocol: {error}") from error

    def receive_length(self, most: int, deadline: Deadline) -> int:
        """Receive a length and refuse one above ``most``, before anything is allocated for it."""
        (nbytes,) = _LENGTH.unpack(self.receive(_LENGTH.size, deadline))
        if nbytes > most:
            raise ConnectionError(f"length {nbytes} in the sink protocol, {most} at most")
        return int(nbytes)

    def send_chunk(self, chunk: memoryview, deadline: Deadline) -> None:
        """Send a chunk of an object being created; an empty one ends it."""
        self.send(_LENGTH.pack(chunk.nbytes), deadline)
        self.send(chunk, deadline)

    def receive_chunks(self, deadline: Deadline) -> Iterator[bytearray]:
        """Receive the chunks of an object being created, to the empty one."""
        while nbytes := self.receive_length(MAX_CHUNK_NBYTES, deadline):
            yield self.receive(nbytes, deadline)

    def prove(self, secret: bytes, deadline: Deadline, *, server: bool) -> None:
        """Prove to the other side that this one knows the secret, and have it prove the same.

        Raises:
            PermissionError: It does not know it: another run's server or client, or no part of megasync.
        """
        mine = secrets.token_bytes(32)
        self.send(_MAGIC + mine, deadline)
        hello = self.receive(len(_MAGIC) + 32, deadline)
        if hello[: len(_MAGIC)] != _MAGIC:
            raise PermissionError("the other side does not speak the sink protocol")
        theirs = bytes(hello[len(_MAGIC) :])
        both = theirs + mine if server else mine + theirs
        # Each side signs under its own name, so that one side's proof cannot be sent back to it as the other's.
        self.send(_proof(secret, both, server=server), deadline)
        if not hmac.compare_digest(self.receive(32, deadline), _proof(secret, both, server=not server)):
            raise PermissionError("the other side does not know this run's secret")

    def close(self) -> None:
        """Close the socket, at once for whoever waits on it."""
        try:
            self.socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self.socket.close()


def _proof(secret: bytes, both: bytes, *, server: bool) -> bytes:
    return hmac.digest(secret, _MAGIC + (b"server" if server else b"client") + both, "sha256")


def answer_for(error: Exception) -> Answer:
    """The answer that carries an exception."""
    for name, kind in _ERRORS.items():
        if isinstance(error, kind):
            return Answer(error=name, message=str(error.args[0]) if error.args else "")
    return Answer(error="retry", message=f"the sink's host failed: {type(error).__name__}: {error}")


def raise_answered(answer: Answer) -> None:
    """Raise what an answer carries, if it carries an error."""
    if answer.error:
        raise _ERRORS.get(answer.error, RetryError)(answer.message)
