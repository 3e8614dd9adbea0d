"""Writing the end of a publication: claiming an epoch, the manifest, the head. The order is the guarantee.

Payloads are durable, then ``write_manifest`` (exclusive create), then ``move_head`` (compare-and-swap under the fence).
Used by trainer.publish_head, trainer.start and the tools. Must not import trainer or receiver.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace

from megasync.errors import MegasyncError, RetryError, SinkConflictError
from megasync.manifest import (
    MIN_PUBLISHER_NBYTES,
    Head,
    Manifest,
    check_manifest,
    check_run,
    decode_head,
    manifest_key,
    state_table_key,
)
from megasync.schema import Schema, schema_key
from megasync.sinks.base import DEFAULT_TIMEOUT_S, Sink
from megasync.versions.inventory import lost_head

_ATTEMPTS = 8


def claim(sink: Sink, run: str, *, publisher: bytes | None = None, timeout_s: float = DEFAULT_TIMEOUT_S) -> Head:
    """Take the next fencing epoch: from now on only this publisher can move the head.

    Args:
        sink: Where.
        run: Which run; created when it does not exist.
        publisher: Token of the publisher, at least 8 bytes; a fresh random one by default.
        timeout_s: Longest wait for each sink operation.

    Returns:
        The head as it is now, with the new fence.

    Raises:
        ValueError: A run name that cannot be part of a key, or a token that is too short.
        RetryError: The run has versions and no head.
        SinkConflictError: Other publishers kept claiming meanwhile.
    """
    check_run(run)
    for _ in range(_ATTEMPTS):
        try:
            return claim_seen(sink, look(sink, run, timeout_s=timeout_s), publisher=publisher, timeout_s=timeout_s)
        except SinkConflictError:
            continue
    raise SinkConflictError(f"run {run!r}: {_ATTEMPTS} claims of the head failed; another publisher keeps starting")


@dataclass(frozen=True, slots=True)
class SeenHead:
    """A head as it was when it was looked at.

    Attributes:
        head: What it said; version -1 and fence 0 where there was none.
        raw: The document itself, None where there was none.
    """

    head: Head
    raw: bytes | None


def look(sink: Sink, run: str, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> SeenHead:
    """Look at a run's head before claiming it.

    Raises:
        ValueError: A run name that cannot be part of a key.
        FormatError: The head is refused.
    """
    check_run(run)
    raw = sink.read_head(run, timeout_s=timeout_s)
    return SeenHead(decode_head(raw, run) if raw is not None else Head(run, -1, 0, b"", 0), raw)


def claim_seen(
    sink: Sink, seen: SeenHead, *, publisher: bytes | None = None, timeout_s: float = DEFAULT_TIMEOUT_S
) -> Head:
    """Take the next fencing epoch of a head that is still the one that was seen.

    Who decides by what a head names whether to claim it at all must not fence off a publisher that moved it meanwhile: of
    several that start at once, the last to claim can then always go on.

    Args:
        sink: Where.
        seen: From ``look``.
        publisher: As in ``claim``.
        timeout_s: As in ``claim``.

    Returns:
        As ``claim``.

    Raises:
        ValueError: A token that is too short.
        RetryError: There is no head, though versions are there that hung from one: a fresh start would collide with them.
        SinkConflictError: The head moved; look again.
    """
    publisher = publisher or secrets.token_bytes(MIN_PUBLISHER_NBYTES)
    if len(publisher) < MIN_PUBLISHER_NBYTES:
        raise ValueError(f"publisher token of {len(publisher)} bytes: at least {MIN_PUBLISHER_NBYTES}, and random")
    if seen.raw is None and (lost := lost_head(sink, seen.head.run, timeout_s=timeout_s)):
        raise RetryError(f"{lost}, or go on under another run name. Nothing was written")
    new = replace(seen.head, fence=seen.head.fence + 1, publisher=publisher)
    sink.swap_head(new.run, seen.raw, new.encode(), timeout_s=timeout_s)
    return new


def write_schema(sink: Sink, schema: Schema, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
    """Write the run's schema under its digest; success where it is there already."""
    sink.create(schema_key(schema.run, schema.digest), [schema.encoded], timeout_s=timeout_s)


def write_state_table(
    sink: Sink, run: str, digest: bytes, table: bytes, *, timeout_s: float = DEFAULT_TIMEOUT_S
) -> None:
    """Write a table of state digests under its digest; success where it is there already."""
    sink.create(state_table_key(run, digest), [table], timeout_s=timeout_s)


def write_manifest(sink: Sink, manifest: Manifest, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> int:
    """Create a manifest exclusively; its payloads must be durable. Returns its bytes.

    Raises:
        FormatError: A reader would refuse it; nothing was written.
        SinkConflictError: Another manifest of this (version, epoch).
    """
    check_manifest(manifest)
    key = manifest_key(manifest.run, manifest.version, manifest.epoch)
    return sink.create(key, [manifest.encoded], timeout_s=timeout_s)


def move_head(sink: Sink, held: Head, manifest: Manifest, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> Head:
    """Point the head at a durable manifest.

    Args:
        sink: Where.
        held: The head this publisher last saw or wrote, with its own fence.
        manifest: Of a higher version.
        timeout_s: Longest wait.

    Returns:
        The new head.

    Raises:
        SinkConflictError: The head is no longer ``held``: another publisher fenced this one off.
        RetryError: The answer was lost; whether the head moved is unknown (see ``settle_fate``).
    """
    if manifest.version <= held.version:
        raise SinkConflictError(
            f"run {held.run!r}: the head is at version {held.version} and only moves up, not to {manifest.version}: another "
            "publisher was there before this one claimed the run. Start again, from its version"
        )
    new = replace(held, version=manifest.version, epoch=manifest.epoch, digest=manifest.digest)
    try:
        sink.swap_head(held.run, held.encode(), new.encode(), timeout_s=timeout_s)
    except SinkConflictError as e:
        raise _taken_over(sink, held, manifest.version, e, timeout_s) from e
    return new


def _taken_over(sink: Sink, held: Head, version: int, met: SinkConflictError, timeout_s: float) -> SinkConflictError:
    """What became of a head that is no longer the one held, in the words of the format; what the sink said otherwise."""
    try:
        now = look(sink, held.run, timeout_s=timeout_s)
    except (MegasyncError, ValueError):
        return met
    where = f"run {held.run!r}: version {version} is not published"
    if now.raw is None:
        return SinkConflictError(
            f"{where}: the head is gone from {sink.describe()}: the sink was deleted or unmounted. Bring it back, or start "
            "the run anew"
        )
    return SinkConflictError(
        f"{where}: another publisher has the run. The head is at version {now.head.version} with fence {now.head.fence} of "
        f"publisher {now.head.publisher.hex()}, this one is {held.publisher.hex()} with fence {held.fence}. Stop one of them"
    )


def settle_fate(
    sink: Sink, held: Head, manifest: Manifest, *, timeout_s: float = DEFAULT_TIMEOUT_S
) -> tuple[bool, Head]:
    """Decide whether a version whose head write had no answer is durable.

    The head is moved to (same version, next fence) by compare-and-swap, so a delayed write of the old fence must fail
    from then on; what the head names at that moment is the truth.

    Args:
        sink: Where.
        held: The head before the write in doubt.
        manifest: The manifest in doubt.
        timeout_s: Longest wait for each sink operation.

    Returns:
        Whether the manifest is durable, and the head to go on from.

    Raises:
        SinkConflictError: A publisher with a higher fence is alive.
        RetryError: The sink does not answer: the fate stays unknown.
    """
    for _ in range(_ATTEMPTS):
        raw = sink.read_head(held.run, timeout_s=timeout_s)
        if raw is None:
            raise SinkConflictError(f"run {held.run!r}: its head is gone from {sink.describe()}")
        now = decode_head(raw, held.run)
        if now.publisher != held.publisher:
            raise SinkConflictError(
                f"run {held.run!r}: the head has fence {now.fence} of publisher {now.publisher.hex()}, this one is "
                f"{held.publisher.hex()} with fence {held.fence}: another one took over"
            )
        new = replace(now, fence=now.fence + 1)
        try:
            sink.swap_head(held.run, raw, new.encode(), timeout_s=timeout_s)
        except SinkConflictError:
            continue  # the delayed write landed in between: read again
        return now.version == manifest.version and now.digest == manifest.digest, new
    raise RetryError(f"run {held.run!r}: the head kept moving during {_ATTEMPTS} attempts to fence it")
