"""Gather: bring every owner's frame bytes to the writers, through bounded buffers, never padded.

Fifth stop of the flow (encode -> gather -> publish). Payloads are in host memory by then. By default a gloo group of
their own carries them; NCCL is opt-in; with ``direct`` every owner is its own writer and nothing moves. Must not import
receiver, an adapter or a sink.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist

from megasync.errors import RankFailedError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_BATCH_NBYTES = 1 << 20
CHUNK_NBYTES = 16 << 20
"""Largest message, and all that a writer ever holds of a payload."""


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


def place(sizes: np.ndarray, num_writers: int, *, direct: bool = False) -> Placement:
    """Assign owners to writers.

    Writers are spread evenly over the ranks, so that they sit on different hosts; each takes a run of neighbours cut by
    bytes. Ranks without bytes take part in nothing.

    Args:
        sizes: Bytes of each rank, int64 ``[ranks]``.
        num_writers: Writers wanted; as many as ranks at most.
        direct: Every rank with bytes writes its own.
    """
    ranks = len(sizes)
    num_writers = min(num_writers, ranks)
    writers = np.arange(ranks) if direct else np.arange(num_writers) * ranks // num_writers
    if direct:
        slot = np.arange(ranks)
    else:
        middle = np.cumsum(sizes) - sizes + sizes // 2
        slot = np.minimum(middle * num_writers // max(int(sizes.sum()), 1), num_writers - 1)
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
            writer_of.append(int(writers[s]))
            payload_nbytes.append(0)
        payload_of[r], offset_of[r] = index[s], payload_nbytes[index[s]]
        payload_nbytes[index[s]] += int(sizes[r])
    return Placement(tuple(payload_of), tuple(offset_of), tuple(writer_of), tuple(payload_nbytes))


def send(
    group: ProcessGroup, placement: Placement, parts: Iterable[bytes], timeout_s: float, device: torch.device
) -> None:
    """Send this rank's bytes to its writer; nothing to do where it writes them itself or has none.

    *Collective*: point to point; the writer must be in ``receive`` for the payload.

    Args:
        group: The gather group.
        placement: From ``place``.
        parts: This rank's frame bytes in order.
        timeout_s: Longest wait for each message.
        device: CPU for gloo; the rank's GPU for NCCL.
    """
    me = dist.get_rank(group)
    payload = placement.payload_of[me]
    if payload < 0 or placement.writer_of[payload] == me:
        return
    writer = placement.writer_of[payload]
    for chunk in chunks(parts):
        message = torch.frombuffer(chunk, dtype=torch.uint8).to(device)
        _wait(
            dist.isend(message, group=group, group_dst=writer), f"sending a payload to rank {writer}", timeout_s, writer
        )


def receive(
    group: ProcessGroup | None,
    placement: Placement,
    payload: int,
    sizes: np.ndarray,
    own: Iterable[bytes],
    timeout_s: float,
    device: torch.device,
) -> Iterator[memoryview]:
    """Bytes of a payload in order, on its writer; each view is valid until the next.

    Consume it whole, also after an error elsewhere: its senders wait.

    Args:
        group: The gather group, None alone.
        placement: From ``place``.
        payload: Which one.
        sizes: Bytes of each rank.
        own: This rank's frame bytes.
        timeout_s: Longest wait for each message.
        device: As in ``send``.
    """
    me = dist.get_rank(group) if group is not None else 0
    buffer = torch.empty(min(CHUNK_NBYTES, int(sizes.max(initial=0))), dtype=torch.uint8, device=device)
    for owner in placement.owners(payload):
        if owner == me:
            yield from _batches(own)
            continue
        left = int(sizes[owner])
        while left:
            message = buffer[: min(left, CHUNK_NBYTES)]
            work = dist.irecv(message, group=group, group_src=owner)
            _wait(work, f"receiving the payload of rank {owner}", timeout_s, owner)
            yield message.cpu().numpy().data
            left -= message.numel()


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


def chunks(parts: Iterable[bytes]) -> Iterator[bytearray]:
    """Join parts to messages of exactly ``CHUNK_NBYTES``, the last one shorter."""
    buffer = bytearray()
    for part in parts:
        view = memoryview(part)
        while len(view):
            take = min(len(view), CHUNK_NBYTES - len(buffer))
            buffer += view[:take]
            view = view[take:]
            if len(buffer) == CHUNK_NBYTES:
                yield buffer
                buffer = bytearray()
    if buffer:
        yield buffer


def _wait(work: dist.Work | None, what: str, timeout_s: float, peer: int) -> None:
    if work is None:
        return
    try:
        work.wait(timedelta(seconds=timeout_s))
    except RuntimeError as e:
        raise RankFailedError(what, {peer: f"did not answer within {timeout_s:g} s: {e}"}) from e
