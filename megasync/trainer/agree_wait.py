"""Waiting for other ranks with a deadline, and finding out which of them did not come.

The floor of agree.py, which is what other modules import. A gloo collective that fails says only that it failed; here
every rank that waits long, or whose collective failed, leaves a sign in the group's store, so that all of them can name
the ranks without one. Nothing is written while collectives are quick. Where the process that held the store is gone, no
rank can be named. Must import nothing of megasync but errors.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, NoReturn

import torch
import torch.distributed as dist

from megasync.errors import RankFailedError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work

SLOW_S = 1.0
"""Seconds of waiting after which a rank writes "I am here" into the group's store."""

PATIENCE = 5
"""Timeouts that a rank waits for one that may be inside the sink: a head write is up to four operations there, and one with
an object store may take two timeouts. A rank that died is mostly noticed at once, by its connections."""

MAX_TEXT = 64 * 1024
"""Characters of all error texts of a message together."""


def gather_to_first(group: ProcessGroup, tensor: torch.Tensor, into: list[torch.Tensor], timeout_s: float) -> Work:
    """Start a gather to the group's first rank.

    Args:
        group: Gloo group.
        tensor: CPU tensor, equal shape and dtype on every rank, contiguous.
        into: One tensor like it a rank, on the first rank; empty elsewhere.
        timeout_s: Seconds that gloo gives it (a little more, so that ``finish`` ends first and can name ranks).

    Returns:
        The work to ``finish``.
    """
    options = dist.GatherOptions()
    options.rootRank = 0
    options.timeout = timedelta(seconds=timeout_s + 2 * SLOW_S)
    return group.gather([into] if into else [], [tensor], options)


def send_all(group: ProcessGroup, tensor: torch.Tensor, src: int, timeout_s: float) -> Work:
    """Start a broadcast from group rank ``src``; arguments as in ``gather_to_first``, other ranks' tensor is filled."""
    options = dist.BroadcastOptions()
    options.rootRank = src
    options.rootTensor = 0
    options.timeout = timedelta(seconds=timeout_s + 2 * SLOW_S)
    return group.broadcast([tensor], options)


def finish(group: ProcessGroup, work: Work, what: str, timeout_s: float) -> None:
    """Wait for a collective; signs in the store when that is slow, so that a waiting rank does not count as missing.

    Raises:
        RankFailedError: Naming the ranks that did not come.
    """
    try:
        work.wait(timedelta(seconds=min(SLOW_S, timeout_s)))
        return
    except RuntimeError as e:
        if work.is_completed() or timeout_s <= SLOW_S:
            lost(group, what, timeout_s, e)
    with suppress(RuntimeError, AttributeError):
        _sign(group)
    try:
        work.wait(timedelta(seconds=timeout_s - SLOW_S))
    except RuntimeError as e:
        lost(group, what, timeout_s, e)
    with suppress(RuntimeError, AttributeError):
        group.get_group_store().delete_key(_key(dist.get_rank(group)))


def _sign(group: ProcessGroup) -> None:
    group.get_group_store().set(_key(dist.get_rank(group)), "here")


def _key(rank: int) -> str:
    return f"megasync/waiting/{rank}"


def lost(group: ProcessGroup, what: str, timeout_s: float, error: RuntimeError) -> NoReturn:
    """Raise for a collective that failed, naming the ranks that left no sign in the group's store; or the store itself, where
    that is gone: who is silent is not known then.

    Raises:
        RankFailedError: Always.
    """
    ranks = global_ranks(group)
    missing: list[int] = []
    try:
        _sign(group)
        store = group.get_group_store()
        with suppress(RuntimeError):
            # Ranks that wait like this one sign within SLOW_S, even those that came last.
            store.wait([_key(r) for r in range(len(ranks))], timedelta(seconds=2 * SLOW_S))
        stack = [list(range(len(ranks)))]
        while stack:
            some = stack.pop()
            if store.check([_key(r) for r in some]):
                continue
            if len(some) == 1:
                missing += some
            else:
                stack += [some[: len(some) // 2], some[len(some) // 2 :]]
    except RuntimeError as e:
        raise RankFailedError(what, {}, f"{store_gone(e)}. The collective itself: {text_of(error)}") from error
    except AttributeError:
        pass  # a group without a store: the collective's own words are all there is
    if missing:
        causes = {ranks[r]: f"did not answer within {timeout_s:g} s; see its own log" for r in missing}
    else:
        causes = {ranks[dist.get_rank(group)]: text_of(error)}
    raise RankFailedError(what, causes) from error


def store_gone(error: RuntimeError) -> str:
    """What is known when the store of a process group does not answer."""
    return (
        f"the store of torch.distributed does not answer ({text_of(error)}): the process that holds it, usually that of rank 0, "
        "ended or cannot be reached, so that no rank can be named; look at its log first"
    )


def global_ranks(group: ProcessGroup | None) -> list[int]:
    """Global rank of each rank of a group."""
    if group is None:
        return [dist.get_rank() if dist.is_available() and dist.is_initialized() else 0]
    return dist.get_process_group_ranks(group)


def text_of(error: BaseException) -> str:
    """One line about an error, bounded."""
    return f"{type(error).__name__}: {error}"[:MAX_TEXT]
