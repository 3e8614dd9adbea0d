"""Votes of an engine's ranks: an error on one is an error on all, and no rank raises alone before a collective.

Used between all stages of the receiver. Must import nothing above the Engine port.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from megasync import errors
from megasync.errors import RankFailedError
from megasync.receiver.engine import Engine

T = TypeVar("T")

_MAX_CAUSE = 2000


class _Ballot(msgspec.Struct, array_like=True, frozen=True):
    kind: str
    error: str | None
    data: memoryview


@dataclass
class Vote:
    """What this rank brings to a vote.

    Attributes:
        data: Bytes for all ranks.
        result: Every rank's bytes, once the vote is over.
    """

    data: bytes | memoryview = b""
    result: list[memoryview] = field(default_factory=list)


@contextmanager
def vote(engine: Engine, what: str) -> Iterator[Vote]:
    """Run the body, then tell every rank whether it went well. *Collective*.

    Args:
        engine: Whose ranks vote.
        what: Names the stage in messages.

    Yields:
        Set ``data`` on it; ``result`` has every rank's after the block.

    Raises:
        BaseException: The body's own error where the engine has one rank.
        MegasyncError: The class that all failing ranks' errors share, so that the caller knows what to do next.
        RankFailedError: Ranks failed in different ways, or with errors that are not megasync's; the cause of each in
            it.
    """
    mine = Vote()
    error: BaseException | None = None
    try:
        yield mine
    except BaseException as e:
        if engine.num_ranks == 1:
            raise
        error = e
    if engine.num_ranks == 1:
        mine.result = [memoryview(mine.data)]
        return
    text = None if error is None else str(error)[:_MAX_CAUSE]
    ballot = _Ballot(type(error).__name__, text, memoryview(b"" if error is not None else mine.data))
    raw = engine.gather(msgspec.msgpack.encode(ballot))
    ballots = [msgspec.msgpack.decode(b, type=_Ballot) for b in raw]
    causes = {rank: f"{b.kind}: {b.error}" for rank, b in enumerate(ballots) if b.error is not None}
    if error is not None and not isinstance(error, Exception):
        raise error
    if causes:
        kinds = {b.kind for b in ballots if b.error is not None}
        shared = getattr(errors, kinds.pop(), None) if len(kinds) == 1 else None
        if shared is not None and shared is not RankFailedError:
            raise shared(f"{what}: " + "; ".join(f"rank {r}: {c}" for r, c in causes.items())) from error
        raise RankFailedError(what, causes) from error
    mine.result = [b.data for b in ballots]


def together(engine: Engine, what: str, body: Callable[[], T]) -> T:
    """``vote`` around one call whose result stays on its rank. *Collective*."""
    with vote(engine, what):
        result = body()
    return result
