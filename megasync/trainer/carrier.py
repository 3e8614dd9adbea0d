"""Carrier: takes one message of a payload from a rank to another, over gloo or over NCCL.

Under gather, for the worker thread alone. A NCCL message runs beside the trainer's own NCCL work, in no order that ranks
share, and a message that waits on one GPU for its other half must not keep that GPU's trainer waiting: each rank would
stand behind the other's. So nothing here is on a stream that the trainer uses, nothing is queued behind a message before
the host has seen it end, and both ranks tell each other over gloo that they are there before either launches its half: a
message is on the GPUs for as long as its bytes take. What is left is what NVIDIA's manual says of communicators that are
used side by side: where both GPUs wait for all their streams at that moment (memory taken from CUDA or given back, code
loaded), the trainers wait for each other until the deadline ends the message. Must not import receiver, an adapter or a sink.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from time import monotonic, sleep
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist

from megasync.errors import RankFailedError
from megasync.trainer.agree_wait import PATIENCE, global_ranks, text_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work

MESSAGE_NBYTES = 16 << 20
"""Largest message, and all that a writer itself holds of a payload; some sinks keep all parts until the object is written."""

_NUM_BUFFERS = 3
_POLL_S = 2e-4
"""Seconds between looks at a message on the GPU: a full one takes 45 us at the 370 GB/s of NVLink."""


class MessageBuffers:
    """Host memory for messages, each for as long as anybody has a view of it: pages of fresh memory cost more than gloo does.

    A reader that takes one message after the other needs two, since it has the last one while the next one comes. Where a sink
    keeps them, others are made, no larger than they must be.
    """

    def __init__(self) -> None:
        self._buffers: list[bytearray] = []

    def take(self, nbytes: int) -> bytearray:
        """At least ``nbytes`` bytes, ``MESSAGE_NBYTES`` at most, that nobody has a view of."""
        for buffer in self._buffers:
            if _is_free(buffer):
                return buffer
        if len(self._buffers) == _NUM_BUFFERS:
            return bytearray(nbytes)
        self._buffers.append(bytearray(MESSAGE_NBYTES))
        return self._buffers[-1]


def _is_free(buffer: bytearray) -> bool:
    """Python lets nobody change the size of what a view is taken of. Back to the old size nothing is copied."""
    try:
        buffer.append(buffer.pop())
    except BufferError:
        return False
    return True


class Carrier(Protocol):
    """Messages between the ranks of a group. A send and the receive that belongs to it are called at any time, in any order."""

    @property
    def group(self) -> ProcessGroup:
        """Whose ranks the numbers are."""

    def send(self, message: bytearray, peer: int) -> None:
        """Send at most ``MESSAGE_NBYTES``; returns once they may be changed.

        Raises:
            RankFailedError: The other rank did not take them in time. The carrier cannot be used any more.
        """

    def receive(self, nbytes: int, peer: int) -> memoryview:
        """The next ``nbytes`` bytes from a rank, unchanged for as long as the view is kept: a sink may keep every part.

        Raises:
            RankFailedError: They did not come in time. The carrier cannot be used any more.
        """


class GlooCarrier:
    """From host memory to host memory.

    Args:
        group: The worker thread's gloo group.
        timeout_s: Longest wait for each message.
    """

    def __init__(self, group: ProcessGroup, timeout_s: float) -> None:
        self.group = group
        self._timeout_s = timeout_s
        self._buffers = MessageBuffers()

    def send(self, message: bytearray, peer: int) -> None:
        """See ``Carrier``."""
        what, patience_s = _sending(self.group, peer), PATIENCE * self._timeout_s
        send_to(self.group, torch.frombuffer(message, dtype=torch.uint8), peer, what, patience_s)

    def receive(self, nbytes: int, peer: int) -> memoryview:
        """See ``Carrier``."""
        buffer = self._buffers.take(nbytes)
        message = torch.frombuffer(buffer, dtype=torch.uint8, count=nbytes)
        receive_from(self.group, message, peer, _receiving(self.group, peer), self._timeout_s)
        return memoryview(buffer)[:nbytes]


class NcclCarrier:
    """From device memory to device memory, on a stream of its own.

    Device memory is taken when it is made and NCCL's when it is connected, both while nothing trains.

    Args:
        group: NCCL group that nothing else uses.
        rounds: The worker thread's gloo group, of the same ranks.
        device: This rank's GPU.
        timeout_s: Longest wait for each message.
    """

    def __init__(self, group: ProcessGroup, rounds: ProcessGroup, device: torch.device, timeout_s: float) -> None:
        self.group = group
        self._rounds = rounds
        self._timeout_s = timeout_s
        self._buffers = MessageBuffers()
        self._token = torch.zeros(1, dtype=torch.uint8)
        self._stream = torch.cuda.Stream(device)
        with torch.cuda.device(device), torch.cuda.stream(self._stream):
            self._buffer = torch.zeros(MESSAGE_NBYTES, dtype=torch.uint8, device=device)
            self._stream.synchronize()

    def connect(self, writers: Sequence[int]) -> None:
        """Send a byte from every rank to every writer: NCCL joins two ranks when they first meet, for which it takes memory.

        *Collective*: every rank of the group calls it, once all of them have made their carrier: while NCCL joins two ranks it
        waits for the other without a deadline.

        Args:
            writers: Ranks that may receive.

        Raises:
            RankFailedError: NCCL does not connect this rank.
        """
        me, ranks = dist.get_rank(self.group), dist.get_world_size(self.group)
        byte = self._buffer[:1]
        ends = [dist.P2POp(dist.isend, byte, group=self.group, group_peer=w) for w in writers if w != me]
        if me in writers:
            ends += [dist.P2POp(dist.irecv, byte, group=self.group, group_peer=r) for r in range(ranks) if r != me]
        if ends:
            with torch.cuda.device(self._buffer.device), torch.cuda.stream(self._stream):
                self._carry(ends, "connecting the ranks of gather=nccl", me)

    def send(self, message: bytearray, peer: int) -> None:
        """See ``Carrier``."""
        what = _sending(self.group, peer)
        device_bytes = self._buffer[: len(message)]
        with torch.cuda.device(self._buffer.device), torch.cuda.stream(self._stream):
            device_bytes.copy_(torch.frombuffer(message, dtype=torch.uint8))
            self._stream.synchronize()
            receive_from(self._rounds, self._token, peer, what, PATIENCE * self._timeout_s)
            send_to(self._rounds, self._token, peer, what, self._timeout_s)
            self._carry([dist.P2POp(dist.isend, device_bytes, group=self.group, group_peer=peer)], what, peer)

    def receive(self, nbytes: int, peer: int) -> memoryview:
        """See ``Carrier``."""
        what = _receiving(self.group, peer)
        device_bytes = self._buffer[:nbytes]
        with torch.cuda.device(self._buffer.device), torch.cuda.stream(self._stream):
            send_to(self._rounds, self._token, peer, what, self._timeout_s)
            receive_from(self._rounds, self._token, peer, what, self._timeout_s)
            self._carry([dist.P2POp(dist.irecv, device_bytes, group=self.group, group_peer=peer)], what, peer)
            buffer = self._buffers.take(nbytes)
            torch.frombuffer(buffer, dtype=torch.uint8, count=nbytes).copy_(device_bytes)
            return memoryview(buffer)[:nbytes]

    def _carry(self, ends: list[dist.P2POp], what: str, peer: int) -> None:
        """Launch this rank's ends and wait on the host: ``work.wait`` alone would first queue a wait for them on the stream, and
        others stand behind that."""
        deadline = monotonic() + self._timeout_s
        ended = False
        try:
            for work in dist.batch_isend_irecv(ends):  # refused where the group was ended before
                while not (ended := work.is_completed()) and monotonic() < deadline:
                    sleep(_POLL_S)
                if not ended:
                    break
                work.wait()
        except RuntimeError as e:
            raise RankFailedError(what, {global_ranks(self.group)[peer]: text_of(e)}) from e
        if not ended:
            end(self.group)
            why = f"NCCL did not end a message within {self._timeout_s:g} s; gather=gloo needs no GPU"
            raise RankFailedError(what, {global_ranks(self.group)[peer]: why})


def end(group: ProcessGroup) -> None:
    """End what a NCCL group still waits for on this GPU, so that what waits for that goes on. Local; nothing can be sent after it."""
    with suppress(ValueError, RuntimeError):
        group.abort()


def send_to(group: ProcessGroup, tensor: torch.Tensor, peer: int, what: str, timeout_s: float) -> None:
    """Send CPU bytes over gloo and wait until they are taken.

    Raises:
        RankFailedError: They were not taken in time.
    """
    _wait(lambda: dist.isend(tensor, group=group, group_dst=peer), group, peer, what, timeout_s)


def receive_from(group: ProcessGroup, tensor: torch.Tensor, peer: int, what: str, timeout_s: float) -> None:
    """Fill CPU bytes from a rank over gloo.

    Raises:
        RankFailedError: They did not come in time.
    """
    _wait(lambda: dist.irecv(tensor, group=group, group_src=peer), group, peer, what, timeout_s)


def _wait(begin: Callable[[], Work | None], group: ProcessGroup, peer: int, what: str, timeout_s: float) -> None:
    try:
        work = begin()  # gloo refuses at once where a wait in this group ended before
        assert work is not None  # both are ranks of the group
        work.wait(timedelta(seconds=timeout_s))
    except RuntimeError as e:
        why = f"did not answer within {timeout_s:g} s: {text_of(e)}"
        raise RankFailedError(what, {global_ranks(group)[peer]: why}) from e


def _sending(group: ProcessGroup, peer: int) -> str:
    return f"sending a payload to rank {global_ranks(group)[peer]}"


def _receiving(group: ProcessGroup, peer: int) -> str:
    return f"receiving the payload of rank {global_ranks(group)[peer]}"
