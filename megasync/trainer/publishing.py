"""Publishing: what all attempts to publish a version share, and how an attempt ended.

Floor of ``publish`` and ``publish_head``. Every attempt is bounded in time and ends in an exchange of its ``Status``, so that an
error on one rank becomes the same error on all, and an unreachable sink is retried by all together. Must not import
receiver or an adapter.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Event
from time import monotonic
from typing import TYPE_CHECKING, Literal

import msgspec

from megasync.config import PublishConfig
from megasync.digest import SHA256, XXH3_128
from megasync.errors import RetryError, SinkConflictError
from megasync.schema import Schema
from megasync.sinks.base import Sink
from megasync.trainer.agree import all_gather_bytes, rank_of
from megasync.trainer.agree_wait import PATIENCE
from megasync.trainer.carrier import Carrier

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

HEAD_WRITER = 0
"""Rank that writes manifests and moves the head."""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 5.0
"""Seconds between attempts: doubled from the first to the longest."""

_State = Literal["done", "again", "failed", "fenced"]
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a version; the same on every rank.

    Attributes:
        version: The version.
        durable: Its head is durable.
        error: Why not, by rank.
        fenced: Another publisher took over: this one must stop.
        payload_nbytes: Bytes of all payloads.
        manifest_nbytes: Bytes of the manifest.
        num_changed: Changed words.
        publish_s: Seconds from the start of the gather to the verdict.
    """

    version: int
    durable: bool
    error: dict[int, str]
    fenced: bool = False
    payload_nbytes: int = 0
    manifest_nbytes: int = 0
    num_changed: int = 0
    publish_s: float = 0.0


class Status(msgspec.Struct, array_like=True, frozen=True):
    """How an attempt ended, on the wire between ranks.

    Attributes:
        state: Done; to be tried again; failed; or fenced off by another publisher.
        error: Why not done.
        manifest_nbytes: Bytes of the manifest, once it is done.
        stuck: A head write has been in doubt for longer than ``give_up_s``.
    """

    state: _State
    error: str = ""
    manifest_nbytes: int = 0
    stuck: bool = False


@dataclass
class Publishing:
    """Everything that publishing needs and that does not change from version to version.

    Attributes:
        schema: The run's schema.
        sink: Where.
        config: Trainer-side configuration.
        group: gloo group of the worker thread's exchanges; None alone.
        carrier: Takes payloads from rank to rank; None alone.
        closing: Set when the trainer gives up waiting: no further attempt is made.
        stuck: The sink's last answer, on every rank, once a head write has been in doubt for longer than ``give_up_s``: the
            version may still turn out durable. Empty while all is well.
    """

    schema: Schema
    sink: Sink
    config: PublishConfig
    group: ProcessGroup | None
    carrier: Carrier | None
    closing: Event
    stuck: str = ""

    @property
    def algorithm(self) -> int:
        """Digest algorithm: a cryptographic one where manifests are signed."""
        return SHA256 if self.config.sign_key else XXH3_128


def status_of(e: BaseException) -> Status:
    """The status that an exception of a sink stands for."""
    text = f"{type(e).__name__}: {e}"
    if isinstance(e, RetryError):
        return Status("again", text)
    if isinstance(e, SinkConflictError):
        return Status("fenced", text)
    return Status("failed", text)


@contextmanager
def watched(p: Publishing, version: int, what: str) -> Iterator[None]:
    """Say so on this rank where it is in the sink for longer than it should be: the others know only that it does not answer."""
    begin = monotonic()
    try:
        yield
    finally:
        if (took_s := monotonic() - begin) > p.config.timeout_s:
            _log.warning(
                "version %d: rank %d took %.1f s for its %s in %s, timeout_s is %g: the other ranks give up one that takes %g s",
                version,
                rank_of(p.group),
                took_s,
                what,
                p.sink.describe(),
                p.config.timeout_s,
                PATIENCE * p.config.timeout_s,
            )


def say_waiting(p: Publishing, version: int, error: str) -> None:
    """Once a version, on the first rank: where the limit of versions in flight is reached, training waits for the sink."""
    if rank_of(p.group) == HEAD_WRITER:
        _log.warning(
            "version %d waits for the sink and is tried again for up to give_up_s=%g s: %s",
            version,
            p.config.give_up_s,
            error,
        )


def given_up(p: Publishing, status: Status) -> str:
    """Text of an attempt that is not repeated."""
    why = "the publisher was closed" if p.closing.is_set() else f"give_up_s={p.config.give_up_s:g} s passed"
    return f"given up ({why}), nothing of it was published: {status.error}"


def any_rank(p: Publishing, mine: bool, what: str) -> bool:
    """Whether any rank says yes; the same answer everywhere."""
    told = all_gather_bytes(p.group, b"\1" if mine else b"\0", what, p.config.timeout_s)
    return any(t[0] for t in told)
