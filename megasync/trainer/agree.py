"""Agreement of ranks: an error on one rank becomes the same error on all, and byte strings of any size are exchanged.

Before a collective no rank raises alone: it records its error, all ranks exchange what they have, and all raise. Every
call starts with a roll call (one small gather and one broadcast), so a rank that never comes, or that is at another
step of the program, is named on every rank instead of hanging the others. Used by every stage of the trainer side
that talks to other ranks. Must import nothing of megasync but errors and agree_wait.

A group is a gloo process group for this work alone (one thread at a time), or None for a process that is alone. After a
``RankFailedError`` that names a rank which did not answer, the group cannot be used any more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import torch
import torch.distributed as dist
import xxhash

from megasync.errors import RankFailedError
from megasync.trainer.agree_wait import MAX_TEXT, finish, gather_to_first, global_ranks, lost, send_all, text_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work

DEFAULT_TIMEOUT_S = 600.0
"""Seconds after which a rank that does not answer is given up."""

_CHUNK_NBYTES = 64 << 20  # largest message, and the most that is being received at a time
_OUT_OF_STEP = -1

Buffer = bytes | bytearray | memoryview


def num_ranks(group: ProcessGroup | None) -> int:
    """Ranks of a group; 1 for None.

    Raises:
        ValueError: None although this process belongs to a world of several ranks.
    """
    if group is not None:
        return dist.get_world_size(group)
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise ValueError(
            f"group None means a process alone, but the world has {dist.get_world_size()} ranks: pass a group"
        )
    return 1


def rank_of(group: ProcessGroup | None) -> int:
    """This process's rank inside a group; 0 for None."""
    return 0 if group is None else dist.get_rank(group)


def agree(
    group: ProcessGroup | None, error: BaseException | None, what: str, timeout_s: float = DEFAULT_TIMEOUT_S
) -> None:
    """Raise on every rank when any rank failed.

    *Collective*: over ``group``; every rank must call it, failed or not.

    Args:
        group: Gloo group, or None alone.
        error: What this rank caught, or None.
        what: Step, for the message; the same on every rank.
        timeout_s: Seconds to wait for the other ranks.

    Raises:
        RankFailedError: With every failed rank's cause, by global rank, the same on every rank. On a rank that failed,
            ``__cause__`` is its own error. Ranks that did not come in time are causes too.
    """
    ranks = global_ranks(group)
    me = rank_of(group)
    own: dict[int, str] = {}
    if isinstance(error, RankFailedError):
        # Agreed on at an inner step: pass on the first causes, not their retelling, where any rank is known.
        own = error.causes or {ranks[me]: text_of(error)}
    elif error is not None:
        own = {ranks[me]: text_of(error)}
    data = msgspec.msgpack.encode(own) if own else b""
    if num_ranks(group) == 1 or group is None:
        if own:
            raise RankFailedError(what, own) from error
        return
    sizes = _roll_call(group, len(data), what, timeout_s)
    if not sizes.any():
        return
    tables = _spread(group, data, sizes, what, timeout_s)
    causes: dict[int, str] = {}
    for table in tables:
        if len(table):
            causes |= msgspec.msgpack.decode(table, type=dict[int, str])
    limit = max(200, MAX_TEXT // len(causes))
    raise RankFailedError(what, {r: text[:limit] for r, text in causes.items()}) from error


def all_gather_bytes(
    group: ProcessGroup | None, data: Buffer, what: str, timeout_s: float = DEFAULT_TIMEOUT_S
) -> list[memoryview]:
    """Byte strings of all ranks, on every rank; sizes go first, nothing is padded.

    They are collected by the group's first rank, ``_CHUNK_NBYTES`` in flight, and broadcast once.

    *Collective*: over ``group``; every rank must call it.

    Args:
        group: Gloo group, or None alone.
        data: This rank's bytes, any length.
        what: Step, for messages; the same on every rank.
        timeout_s: Seconds to wait for each message.

    Returns:
        One view a rank, in group order.

    Raises:
        RankFailedError: Naming the ranks that did not answer.
    """
    if num_ranks(group) == 1 or group is None:
        return [memoryview(data).cast("B")]
    return _spread(group, data, _roll_call(group, _nbytes(data), what, timeout_s), what, timeout_s)


def gather_bytes(
    group: ProcessGroup | None, data: Buffer, what: str, timeout_s: float = DEFAULT_TIMEOUT_S, dst: int = 0
) -> list[memoryview] | None:
    """Byte strings of all ranks, on one rank; sizes go first, nothing is padded.

    *Collective*: over ``group``; every rank must call it.

    Args:
        group: Gloo group, or None alone.
        data: This rank's bytes, any length.
        what: Step, for messages; the same on every rank.
        timeout_s: Seconds to wait for each message.
        dst: Rank inside the group that gets them.

    Returns:
        One view a rank, in group order, on ``dst``; None elsewhere.

    Raises:
        RankFailedError: Naming the ranks that did not answer.
    """
    if num_ranks(group) == 1 or group is None:
        return [memoryview(data).cast("B")]
    sizes = _roll_call(group, _nbytes(data), what, timeout_s)
    return _collect(group, data, sizes, what, timeout_s, dst)


def broadcast_bytes(
    group: ProcessGroup | None, data: Buffer | None, what: str, timeout_s: float = DEFAULT_TIMEOUT_S, src: int = 0
) -> memoryview:
    """One rank's byte string, on every rank.

    *Collective*: over ``group``; every rank must call it.

    Args:
        group: Gloo group, or None alone.
        data: The bytes on ``src``; ignored elsewhere.
        what: Step, for messages; the same on every rank.
        timeout_s: Seconds to wait for each message.
        src: Rank inside the group that has them.

    Returns:
        The bytes.

    Raises:
        RankFailedError: Naming the ranks that did not answer.
    """
    mine = data if data is not None and rank_of(group) == src else b""
    if num_ranks(group) == 1 or group is None:
        return memoryview(mine).cast("B")
    size = int(_roll_call(group, _nbytes(mine), what, timeout_s)[src])
    buffer = mine if rank_of(group) == src else bytearray(size)
    _broadcast(group, buffer, src, what, timeout_s)
    return memoryview(buffer).cast("B")


def _roll_call(group: ProcessGroup, value: int, what: str, timeout_s: float) -> np.ndarray:
    """One integer of every rank, on every rank (int64 ``[ranks]``); refuses ranks that are at another step."""
    num = dist.get_world_size(group)
    step = xxhash.xxh3_64_intdigest(what.encode()) >> 1
    mine = torch.tensor([step, value], dtype=torch.int64)
    first = dist.get_rank(group) == 0
    table = torch.empty((num, 2), dtype=torch.int64)
    finish(group, gather_to_first(group, mine, list(table.unbind()) if first else [], timeout_s), what, timeout_s)
    values = table[:, 1].contiguous()
    if first:
        values[table[:, 0] != step] = _OUT_OF_STEP
    finish(group, send_all(group, values, 0, timeout_s), what, timeout_s)
    found = values.numpy()
    if (found == _OUT_OF_STEP).any():
        ranks = global_ranks(group)
        lost = {ranks[i]: f"is at another step than rank {ranks[0]}" for i in np.flatnonzero(found == _OUT_OF_STEP)}
        raise RankFailedError(what, lost)
    return found


def _spread(group: ProcessGroup, data: Buffer, sizes: np.ndarray, what: str, timeout_s: float) -> list[memoryview]:
    """Byte strings of all ranks on all ranks, after their sizes are known."""
    ends = np.cumsum(sizes).tolist()
    buffer = bytearray(ends[-1])
    views = [memoryview(buffer)[end - size : end] for end, size in zip(ends, sizes.tolist(), strict=True)]
    _collect(group, data, sizes, what, timeout_s, 0, views)
    _broadcast(group, buffer, 0, what, timeout_s)
    return views


def _collect(
    group: ProcessGroup,
    data: Buffer,
    sizes: np.ndarray,
    what: str,
    timeout_s: float,
    dst: int,
    into: Sequence[memoryview] | None = None,
) -> list[memoryview] | None:
    """Byte strings of all ranks on ``dst``, in messages of at most ``_CHUNK_NBYTES``, as many in flight."""
    me = dist.get_rank(group)
    pending: deque[tuple[Work | None, int]] = deque()
    flying = 0

    def post(tensor: torch.Tensor, peer: int) -> None:
        nonlocal flying
        while pending and flying + tensor.numel() > _CHUNK_NBYTES:
            settle()
        try:
            work = (
                dist.isend(tensor, group=group, group_dst=peer)
                if me != dst
                else dist.irecv(tensor, group=group, group_src=peer)
            )
        except RuntimeError as e:
            lost(group, what, timeout_s, e)
        pending.append((work, tensor.numel()))
        flying += tensor.numel()

    def settle() -> None:
        nonlocal flying
        work, size = pending.popleft()
        flying -= size
        try:
            if work is not None:
                work.wait(timedelta(seconds=timeout_s))
        except RuntimeError as e:
            lost(group, what, timeout_s, e)

    out: list[memoryview] | None = None
    if me != dst:
        for part in _parts(data):
            post(part, dst)
    else:
        out = list(into) if into is not None else [memoryview(bytearray(size)) for size in sizes.tolist()]
        out[me][:] = memoryview(data).cast("B")
        for peer, view in enumerate(out):
            for part in _parts(view) if peer != me else ():
                post(part, peer)
    while pending:
        settle()
    return out


def _broadcast(group: ProcessGroup, buffer: Buffer, src: int, what: str, timeout_s: float) -> None:
    for part in _parts(buffer):
        finish(group, send_all(group, part, src, timeout_s), what, timeout_s)


def _parts(data: Buffer) -> list[torch.Tensor]:
    """uint8 tensors over a buffer, each a message; a read-only buffer is copied, for torch warns about those."""
    view = memoryview(data).cast("B")
    if not len(view):
        return []
    whole = torch.frombuffer(bytearray(view) if view.readonly else view, dtype=torch.uint8)
    return [whole[at : at + _CHUNK_NBYTES] for at in range(0, len(view), _CHUNK_NBYTES)]


def _nbytes(data: Buffer) -> int:
    return memoryview(data).nbytes
