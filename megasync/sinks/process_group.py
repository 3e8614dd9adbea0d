"""A sink for trainer and receivers of one torch.distributed world that share no file system.

One rank keeps the objects in its host memory and serves them over TCP; the process group is used once, to agree on who
that is and to hand round its addresses and a fresh secret. After that no call is collective: a rank that is late or
dead holds up nobody. "Durable" means for as long as the keeping rank lives, so keep anchors elsewhere too. Comes after
gather, before fetch. Must not import trainer or receiver.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from megasync.errors import RankFailedError
from megasync.sinks.base import Sink
from megasync.sinks.forward import ForwardingSink
from megasync.sinks.memory import MemorySink
from megasync.sinks.remote import Address, RemoteSink
from megasync.sinks.serve import SinkServer
from megasync.sinks.wire import SECRET_NBYTES

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_MESSAGE_NBYTES = 4096
# Documentation addresses (RFC 5737, RFC 3849): routed like any other, and connecting a datagram socket sends nothing.
_ANYWHERE = ("192.0.2.1", "2001:db8::1")


class _Hello(msgspec.Struct, forbid_unknown_fields=True):
    """What each rank tells all others."""

    host_rank: int
    addresses: list[Address] = msgspec.field(default_factory=list)
    secret: bytes = b""
    error: str = ""


class ProcessGroupSink(ForwardingSink):
    """Objects in the host memory of one rank of a process group.

    Attributes:
        host_rank: The rank of the group that keeps the objects.
        addresses: Where it serves them.
        secret: What a process outside the world needs, with an address, to read too (``RemoteSink``). Keep it so.
    """

    def __init__(
        self,
        group: ProcessGroup | None = None,
        *,
        host_rank: int = 0,
        address: str = "",
        port: int = 0,
        max_nbytes: int | None = None,
        num_versions: int | None = 4,
        timeout_s: float = 60.0,
    ) -> None:
        """Agree on the keeping rank, and reach it.

        *Collective*: every rank of ``group`` must call, with the same arguments; waits as long as the group's timeout.

        Args:
            group: A group that can exchange CPU tensors (gloo, or ``cpu:gloo,cuda:nccl``); None for the whole world.
            host_rank: Rank within the group that keeps the objects; best the one that writes most.
            address: Address that the others reach it at, IPv4 or IPv6; empty to try all that it has.
            port: Its port; 0 for any free one.
            max_nbytes: See ``MemorySink``.
            num_versions: See ``MemorySink``.
            timeout_s: How long a rank tries to reach the keeping rank.

        Raises:
            ValueError: This process is in no torch.distributed world, the group cannot exchange CPU tensors, or ranks name different keeping ranks.
            RankFailedError: On every rank: the keeping rank could not listen, or some could not reach it.
        """
        import torch.distributed as dist

        if not (dist.is_available() and dist.is_initialized()):
            raise ValueError(
                "a process group sink (pg://) keeps its objects in a torch.distributed world, and this process is in none: call "
                "torch.distributed.init_process_group first, on every rank; from outside a world give pg://host:port and the "
                "option 'secret'"
            )
        backend = dist.get_backend_config(group)
        if "cpu" not in backend:
            raise ValueError(
                f"a process group sink needs a group with a CPU backend, this one has {backend}: make one with "
                f"torch.distributed.new_group(backend='gloo')"
            )
        rank, world_size = dist.get_rank(group), dist.get_world_size(group)
        if not 0 <= host_rank < world_size:
            raise ValueError(f"host_rank {host_rank} of a process group sink: the group has {world_size} ranks")
        self.host_rank = host_rank
        self._server: SinkServer | None = None
        hello = _Hello(host_rank)
        # Made on every rank, so that wrong limits raise on every rank and none waits for the others.
        memory = MemorySink(f"of rank {host_rank}", max_nbytes=max_nbytes, num_versions=num_versions)
        if rank == host_rank:
            hello = self._serve(memory, hello, address, port)
        hellos = _exchange(hello, group, world_size)
        named = sorted({h.host_rank for h in hellos})
        if len(named) > 1:
            self._stop_serving()
            raise ValueError(f"ranks of one process group sink name different keeping ranks: {named}")
        offered = hellos[host_rank]
        self.addresses: Sequence[Address] = offered.addresses
        self.secret = offered.secret
        inner: Sink
        error = offered.error if rank == host_rank else ""
        if rank == host_rank or offered.error:
            inner = memory
        else:
            inner = RemoteSink(offered.addresses, offered.secret)
            error = _first_contact(inner, timeout_s)
        super().__init__(inner)
        met = _exchange(_Hello(host_rank, error=error), group, world_size)
        causes = {r: h.error for r, h in enumerate(met) if h.error}
        if causes:
            self.close()
            raise RankFailedError(f"starting a process group sink kept by rank {host_rank}", causes)

    def _serve(self, memory: MemorySink, hello: _Hello, address: str, port: int) -> _Hello:
        secret = secrets.token_bytes(SECRET_NBYTES)
        try:
            self._server = SinkServer(memory, secret, host=address, port=port)
        except ValueError as error:
            # Raised by all ranks together after the exchange: the others are on their way into it.
            return _Hello(hello.host_rank, error=str(error)[:1000])
        hosts = [address] if address else host_addresses(ipv6=self._server.ipv6)
        return _Hello(hello.host_rank, [(h, self._server.port) for h in hosts[:32]], secret)

    def _stop_serving(self) -> None:
        if self._server is not None:
            self._server.close()

    def describe(self) -> str:
        """What and where."""
        return f"process group sink kept by rank {self.host_rank}"

    def close(self) -> None:
        """Let go; on the keeping rank, stop serving: the others' calls then fail. Local, not collective."""
        self._stop_serving()
        super().close()


def host_addresses(*, ipv6: bool) -> list[str]:
    """Addresses at which other hosts may reach this one, the likeliest first, loopback last.

    Args:
        ipv6: Whether IPv6 addresses are of use.

    Returns:
        Numeric addresses. First the one that faces the rendezvous host of torch.distributed, where one is set.
    """
    found: list[str] = []
    rendezvous = os.environ.get("MASTER_ADDR", "")
    for target in ([rendezvous] if rendezvous else []) + list(_ANYWHERE):
        found += _facing(target)
    with contextlib.suppress(OSError):
        found += [str(info[4][0]) for info in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)]
    loopbacks = ["127.0.0.1", "::1"]
    ordered = [a for a in dict.fromkeys(found) if not _is_local(a)] + loopbacks
    return [a for a in ordered if ipv6 or ":" not in a]


def _facing(target: str) -> list[str]:
    """This host's own address on the way to another."""
    own: list[str] = []
    with contextlib.suppress(OSError):
        for family, kind, _, _, place in socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
                probe.connect(place)
                own.append(str(probe.getsockname()[0]))
    return own


def _is_local(address: str) -> bool:
    """Loopback and link-local addresses, which mean something else, or nothing, on another host."""
    return address.startswith(("127.", "169.254.", "fe80:")) or address == "::1"


def _first_contact(sink: RemoteSink, timeout_s: float) -> str:
    """Reach the keeping rank once: found at start, an unreachable rank does not wait for the first publication."""
    try:
        sink.read_head("hello", timeout_s=timeout_s)
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:1000]
    return ""


def _exchange(mine: _Hello, group: Any, world_size: int) -> list[_Hello]:
    """Give every rank's message to every rank. *Collective*: every rank of ``group`` must call."""
    import torch
    import torch.distributed as dist

    data = msgspec.msgpack.encode(mine)
    assert len(data) + 4 <= _MESSAGE_NBYTES
    padded = (len(data).to_bytes(4, "little") + data).ljust(_MESSAGE_NBYTES, b"\0")
    sent = torch.frombuffer(bytearray(padded), dtype=torch.uint8)
    received = [torch.empty(_MESSAGE_NBYTES, dtype=torch.uint8) for _ in range(world_size)]
    dist.all_gather(received, sent, group=group)
    hellos: list[_Hello] = []
    for tensor in received:
        raw = tensor.numpy().tobytes()
        hellos.append(msgspec.msgpack.decode(raw[4 : 4 + int.from_bytes(raw[:4], "little")], type=_Hello))
    return hellos
