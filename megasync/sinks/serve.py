"""Serves a sink to other processes over TCP (IPv4 and IPv6), to those who know the run's secret.

``remote.py`` is the client; ``process_group.py`` starts one on the rank that keeps the objects. Every connection has a
thread of its own, which mostly waits in the kernel. Must not import trainer or receiver.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Iterator

from megasync.sinks.base import DEFAULT_TIMEOUT_S, Deadline, Sink, check_range
from megasync.sinks.wire import MAX_CHUNK_NBYTES, Answer, Channel, Request, answer_for

_HANDSHAKE_S = 10.0
_ANSWER_S = 5.0
_ACCEPT_AGAIN_S = 0.1
_BACKLOG = 512

logger = logging.getLogger(__name__)


class SinkServer:
    """A thread that accepts connections to a sink, and one thread for each of them.

    *Memory*: one read keeps at most 4 MiB of copies, a creation one chunk beside what the sink keeps.

    Attributes:
        sink: The sink served; the server does not close it.
        port: The port it listens on.
        ipv6: Whether IPv6 addresses reach it (then IPv4 ones do too, unless one IPv6 address was given).
    """

    def __init__(
        self,
        sink: Sink,
        secret: bytes,
        *,
        host: str = "",
        port: int = 0,
        idle_s: float = 3600.0,
        max_connections: int = 4096,
    ) -> None:
        """Listen and begin to serve.

        Args:
            sink: Any sink.
            secret: Shared with the clients, 16 bytes at least.
            host: Address to listen on, IPv4 or IPv6; empty for all addresses of both kinds.
            port: Port; 0 for any free one.
            idle_s: Connections without a request for so long are closed.
            max_connections: Connections beyond these are closed at once.

        Raises:
            ValueError: A secret that is too short, or an address that cannot be listened on.
        """
        if len(secret) < 16:
            raise ValueError(f"the secret of a sink server has {len(secret)} bytes; 16 at least")
        Deadline(idle_s)
        self.sink = sink
        self._secret = secret
        self._idle_s = idle_s
        self._max_connections = max_connections
        try:
            self._listener = _listen(host, port)
        except OSError as error:
            raise ValueError(f"cannot listen on host {host!r} port {port} for {sink.describe()}: {error}") from error
        self.port: int = self._listener.getsockname()[1]
        self.ipv6 = self._listener.family == socket.AF_INET6
        self._lock = threading.Lock()
        self._channels: set[Channel] = set()
        self._closing = threading.Event()
        self._acceptor = threading.Thread(target=self._accept, name="megasync-sink-accept", daemon=True)
        self._acceptor.start()

    def close(self) -> None:
        """Stop: clients meet a closed connection. Idempotent."""
        with self._lock:
            if self._closing.is_set():
                return
            self._closing.set()
            channels = list(self._channels)
        # Shutting down wakes the thread that waits in accept; closing alone would leave it there.
        try:
            self._listener.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._listener.close()
        for channel in channels:
            channel.close()
        self._acceptor.join(timeout=5.0)

    def _accept(self) -> None:
        while True:
            try:
                connected, _ = self._listener.accept()
            except OSError as error:
                # A client that gave up, or no descriptor free for now: the others must still be served, without
                # asking again at once.
                if self._closing.wait(_ACCEPT_AGAIN_S):
                    return
                logger.warning("sink server of %s: accept failed: %s", self.sink.describe(), error)
                continue
            channel = Channel(connected)
            with self._lock:
                full = self._closing.is_set() or len(self._channels) >= self._max_connections
                if not full:
                    self._channels.add(channel)
            if full:
                channel.close()
                continue
            threading.Thread(target=self._converse, args=(channel,), name="megasync-sink", daemon=True).start()

    def _converse(self, channel: Channel) -> None:
        try:
            channel.prove(self._secret, Deadline(_HANDSHAKE_S), server=True)
            while True:
                request = channel.receive_header(Request, Deadline(self._idle_s))
                self._answer(channel, request)
        except PermissionError as error:
            logger.warning("sink server of %s refused a connection: %s", self.sink.describe(), error)
        except OSError:
            pass  # The client is gone or has been idle for too long: it connects again when it wants something.
        except Exception:
            logger.exception("sink server of %s: connection closed by an error", self.sink.describe())
        finally:
            with self._lock:
                self._channels.discard(channel)
            channel.close()

    def _answer(self, channel: Channel, request: Request) -> None:
        timeout_s = request.timeout_s if 0 < request.timeout_s < 1e6 else DEFAULT_TIMEOUT_S
        deadline = Deadline(timeout_s)
        # A sink that was too slow still says so: the client's own patience ends at about the same time.
        answering = Deadline(timeout_s + _ANSWER_S)
        chunks = channel.receive_chunks(deadline) if request.operation == "create" else iter(())
        body: Iterator[bytes | memoryview] = iter(())
        try:
            answer, body = self._call(request, chunks, deadline)
        except OSError:
            raise  # The connection's, since sinks raise none: nothing was created.
        except Exception as error:
            answer = answer_for(error)
        # A creation refused half-way: the client is still sending, and listens only when it is done.
        for _ in chunks:
            pass
        channel.send_header(answer, answering)
        sent = 0
        for piece in body:
            channel.send(piece, answering)
            sent += len(piece)
        if sent != answer.body_nbytes:
            raise ConnectionError("the object changed while it was sent")

    def _call(
        self, request: Request, chunks: Iterator[bytearray], deadline: Deadline
    ) -> tuple[Answer, Iterator[bytes | memoryview]]:
        sink, key, left_s = self.sink, request.key, deadline.timeout_s
        nothing: Iterator[bytes | memoryview] = iter(())
        match request.operation:
            case "create":
                return Answer(number=sink.create(key, chunks, timeout_s=left_s)), nothing
            case "read":
                size = sink.size(key, timeout_s=left_s)
                wanted = check_range(key, request.offset, None if request.nbytes == -1 else request.nbytes, size)
                return Answer(body_nbytes=wanted), self._pieces(key, request.offset, wanted, left_s)
            case "size":
                return Answer(number=sink.size(key, timeout_s=left_s)), nothing
            case "keys":
                listing = "\n".join(sink.keys(key, timeout_s=left_s)).encode()
                return Answer(body_nbytes=len(listing)), iter([listing])
            case "heads":
                listing = "\n".join(sink.heads(timeout_s=left_s)).encode()
                return Answer(body_nbytes=len(listing)), iter([listing])
            case "delete":
                sink.delete(key, timeout_s=left_s)
                return Answer(), nothing
            case "read_head":
                head = sink.read_head(key, timeout_s=left_s)
                return Answer(present=head is not None, document=head or b""), nothing
            case "swap_head":
                expected = request.expected if request.has_expected else None
                sink.swap_head(key, expected, request.new, timeout_s=left_s)
                return Answer(), nothing
            case "check_room":
                sink.check_room(request.nbytes)
                return Answer(), nothing
        raise ValueError(f"no sink operation {request.operation!r} in this version of megasync")

    def _pieces(self, key: str, offset: int, nbytes: int, timeout_s: float) -> Iterator[bytes | memoryview]:
        for start in range(0, nbytes, MAX_CHUNK_NBYTES):
            try:
                yield self.sink.read(key, offset + start, min(MAX_CHUNK_NBYTES, nbytes - start), timeout_s=timeout_s)
            except KeyError as error:
                raise ConnectionError(f"object {key!r} was deleted while it was sent") from error


def _listen(host: str, port: int) -> socket.socket:
    if not host and socket.has_dualstack_ipv6():
        try:
            return socket.create_server(
                ("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=_BACKLOG, reuse_port=False
            )
        except OSError:
            pass  # IPv6 is compiled in but switched off on this host.
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=_BACKLOG)
