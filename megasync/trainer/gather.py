"""Gather: bring every owner's frame bytes to the writers, through bounded buffers, never padded.

Fifth stop of the flow (encode -> gather -> publish). Payloads are in host memory by then. A ``carrier`` takes them from
rank to rank, over gloo unless NCCL is asked for; with ``direct`` every owner is its own writer and nothing moves. Must not
import receiver, an adapter or a sink.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch.distributed as dist

from megasync.trainer.carrier import MESSAGE_NBYTES, Carrier

_BATCH_NBYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Placement:
    """Which rank writes what, the same on every rank.

    Attributes:
        payload_of: Payload index of each rank's bytes, -1 for ranks that have none.
        offset_of: Where each rank's bytes start in its payload.
        writer_of: Writing rank of each payload.
        payload_nbytes: Size of each payload.
    """

    payload_of: tuple[int, ...]
    offset_of: tuple[int, ...]
    writer_of: tuple[int, ...]
    payload_nbytes: tuple[int, ...]

    def owners(self, payload: int) -> list[int]:
        """Ranks whose bytes make up a payload, in order."""
        return [r for r, p in enumerate(self.payload_of) if p == payload]


def writers_of(ranks: int, num_writers: int) -> list[int]:
    """Ranks that write where not every owner does: spread evenly over the ranks, so that they sit on different hosts."""
    num_writers = min(num_writers, ranks)
    return [i * ranks // num_writers for i in range(num_writers)]


def place(sizes: np.ndarray, num_writers: int, *, direct: bool = False) -> Placement:
    """Assign owners to writers.

    Each of ``writers_of`` takes a run of neighbours cut by bytes. A writer keeps its own bytes, so that none stands behind
    another one before it writes. Ranks without bytes take part in nothing.

    Args:
        sizes: Bytes of each rank, int64 ``[ranks]``.
        num_writers: Writers wanted; as many as ranks at most.
        direct: Every rank with bytes writes its own.
    """
    ranks = len(sizes)
    num_writers = min(num_writers, ranks)
    writers = list(range(ranks)) if direct else writers_of(ranks, num_writers)
    if direct:
        slot = np.arange(ranks)
    else:
        middle = np.cumsum(sizes) - sizes + sizes // 2
        slot = np.minimum(middle * num_writers // max(int(sizes.sum()), 1), num_writers - 1)
        slot[writers] = np.arange(num_writers)
    payload_of, offset_of = [-1] * ranks, [0] * ranks
    writer_of: list[int] = []
    payload_nbytes: list[int] = []
    index: dict[int, int] = {}
    for r in range(ranks):
        if not sizes[r]:
            continue
        s = int(slot[r])
        if s not in index:
            index[s] = len(writer_of)
            writer_of.append(writers[s])
            payload_nbytes.append(0)
        payload_of[r], offset_of[r] = index[s], payload_nbytes[index[s]]
        payload_nbytes[index[s]] += int(sizes[r])
    return Placement(tuple(payload_of), tuple(offset_of), tuple(writer_of), tuple(payload_nbytes))


def send(carrier: Carrier, placement: Placement, parts: Iterable[bytes]) -> None:
    """Send this rank's bytes to its writer; nothing to do where it writes them itself or has none.

    *Collective*: point to point; the writer must be in ``receive`` for the payload.

    Args:
        carrier: What takes messages to other ranks.
        placement: From ``place``.
        parts: This rank's frame bytes in order.

    Raises:
        RankFailedError: The writer did not take them.
    """
    me = dist.get_rank(carrier.group)
    payload = placement.payload_of[me]
    if payload < 0 or placement.writer_of[payload] == me:
        return
    for message in messages(parts):
        carrier.send(message, placement.writer_of[payload])


def receive(
    carrier: Carrier | None, placement: Placement, payload: int, sizes: np.ndarray, own: Iterable[bytes]
) -> Iterator[memoryview]:
    """Bytes of a payload in order, on its writer; a sink may keep them all.

    Consume it whole, also after an error elsewhere: its senders wait.

    Args:
        carrier: What brings messages of other ranks; None alone.
        placement: From ``place``.
        payload: Which one.
        sizes: Bytes of each rank.
        own: This rank's frame bytes.

    Raises:
        RankFailedError: An owner did not send them.
    """
    me = 0 if carrier is None else dist.get_rank(carrier.group)
    for owner in placement.owners(payload):
        if owner == me or carrier is None:
            yield from _batches(own)
            continue
        left = int(sizes[owner])
        while left:
            nbytes = min(left, MESSAGE_NBYTES)
            yield carrier.receive(nbytes, owner)
            left -= nbytes


def _batches(parts: Iterable[bytes]) -> Iterator[memoryview]:
    """Parts joined to a megabyte or more: a sink then writes a few times, not once for each of some thousand planes."""
    batch: list[bytes] = []
    nbytes = 0
    for part in parts:
        batch.append(part)
        nbytes += len(part)
        if nbytes >= _BATCH_NBYTES:
            yield memoryview(batch[0] if len(batch) == 1 else b"".join(batch))
            batch, nbytes = [], 0
    if nbytes:
        yield memoryview(b"".join(batch))


def messages(parts: Iterable[bytes]) -> Iterator[bytearray]:
    """Join parts to messages of exactly ``MESSAGE_NBYTES``, the last one shorter."""
    buffer = bytearray()
    for part in parts:
        view = memoryview(part)
        while len(view):
            take = min(len(view), MESSAGE_NBYTES - len(buffer))
            buffer += view[:take]
            view = view[take:]
            if len(buffer) == MESSAGE_NBYTES:
                yield buffer
                buffer = bytearray()
    if buffer:
        yield buffer
