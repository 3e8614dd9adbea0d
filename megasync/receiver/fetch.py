"""Fetch: the frames of a publication that this rank needs, read, checked and handed on, several at a time.

Neighbouring frames are read in one range. Every frame's digest is checked; a bad one is read once more by itself, and
refused if it is bad again. Work on a range (check, and what the caller does with its frames) runs on the same thread,
and only so many ranges are in flight, so memory is bounded. Comes before stage. Must not import stage or apply.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import numpy as np

from megasync.errors import RefetchError
from megasync.frames import FrameRecord
from megasync.manifest import Manifest
from megasync.receiver.backend import FetchedFrame
from megasync.schema import Schema
from megasync.tiles import bounds_of
from megasync.versions.publication import PublicationReader, check_frame

T = TypeVar("T")

RANGE_NBYTES = 4 << 20
"""Stored bytes read at once; a frame is never cut."""

RANGE_CHANGED = 1 << 19
"""Changed words in a range, so that what is decoded from it stays small too."""

GAP_NBYTES = 64 << 10
"""Bytes of other ranks' frames that are read along rather than starting another range."""


@dataclass(frozen=True, slots=True)
class Range:
    """Neighbouring frames of one payload.

    Attributes:
        payload: Payload index.
        offset: First byte.
        nbytes: Bytes, gaps included.
        frames: Frame numbers, by offset.
    """

    payload: int
    offset: int
    nbytes: int
    frames: tuple[int, ...]


@dataclass
class Fetched:
    """What a fetch took.

    Attributes:
        nbytes: Bytes read, gaps and bad reads included.
        num_frames: Frames handed on.
        num_refetched: Frames that were bad the first time.
    """

    nbytes: int = 0
    num_frames: int = 0
    num_refetched: int = 0


def plan_ranges(manifest: Manifest, frames: np.ndarray, scale: int = 1) -> list[Range]:
    """Cut the wanted frames in ranges, those of a payload about equally large: several threads are done at the same time then.

    Args:
        manifest: The publication.
        frames: Frame numbers.
        scale: Ranges may be so many times larger than ``RANGE_NBYTES`` and ``RANGE_CHANGED``.
    """
    table = manifest.frames
    payload, offset = table.columns["payload"][frames], table.columns["offset"][frames].astype(np.int64)
    order = np.lexsort((offset, payload))
    numbers, payload, start = frames[order], payload[order], offset[order]
    stop = start + table.nbytes[numbers]
    words = bounds_of(table.columns["num_changed"][numbers])
    gap = start[1:] - stop[:-1]
    far = (payload[1:] != payload[:-1]) | (gap < 0) | (gap > GAP_NBYTES)
    out: list[Range] = []
    for begin, end in pairwise([0, *(np.flatnonzero(far) + 1).tolist(), len(order)] if len(order) else [0]):
        here = begin
        # A manifest has no two frames that share a byte, so ends ascend like starts.
        most_nbytes = _even(np.append(start[begin:end], stop[end - 1 : end]), scale * RANGE_NBYTES)
        most_changed = _even(words[begin : end + 1], scale * RANGE_CHANGED)
        while here < end:
            fits = (
                int(np.searchsorted(stop[here:end], start[here] + most_nbytes, side="right")),
                int(np.searchsorted(words[here + 1 : end + 1], words[here] + most_changed, side="right")),
            )
            last = here + max(1, min(fits))
            first_byte = int(start[here])
            span = numbers[here:last].tolist()
            out.append(Range(int(payload[here]), first_byte, int(stop[last - 1]) - first_byte, tuple(span)))
            here = last
    return out


def _even(bounds: np.ndarray, limit: int) -> int:
    """What a range may take of a stretch of frames, at most ``limit``, so that as few ranges as possible take about the same.

    Args:
        bounds: int64 ``[n + 1]``, where each frame begins, and where the last one ends.
        limit: Of a range.
    """
    if len(bounds) < 2:
        return limit
    total = int(bounds[-1] - bounds[0])
    parts = max(1, -(-total // limit))
    return min(limit, -(-total // parts) + int(np.diff(bounds).max()))


def fetch(
    reader: PublicationReader,
    schema: Schema,
    manifest: Manifest,
    frames: np.ndarray,
    consume: Callable[[Sequence[FetchedFrame]], T],
    pool: ThreadPoolExecutor | None,
    *,
    in_flight: int = 4,
    fetched: Fetched | None = None,
    scale: int = 1,
    whole: Callable[[Range], T | None] | None = None,
) -> Generator[T, None, None]:
    """Read frames and hand them on.

    Args:
        reader: Of the run.
        schema: The manifest's schema.
        manifest: The publication.
        frames: Numbers of the frames wanted.
        consume: Called with the frames of each range, on a thread of the pool; must not keep the frames.
        pool: Threads; None works on the caller's.
        in_flight: Ranges read ahead of the one whose result is taken.
        fetched: Counts are added to it.
        scale: Of the ranges, see ``plan_ranges``.
        whole: Called with each range before it is read, in the place of ``consume``; where it gives None, the range is
            read and consumed as usual.

    Yields:
        Results of ``consume``, in the order of the ranges.

    Raises:
        RefetchError: A frame was bad twice.
        RetryError: A payload is not there, although its manifest is.
        NeedsAnchorError: The publication was pruned.
        FormatError: ``consume`` found bytes that break the format.
    """
    counts = fetched if fetched is not None else Fetched()

    def work(span: Range) -> tuple[T, Fetched]:
        mine = Fetched()
        done = None if whole is None else whole(span)
        if done is not None:
            return done, Fetched(span.nbytes, len(span.frames))
        return consume(list(_read(reader, schema, manifest, span, mine))), mine

    def take(result: tuple[T, Fetched]) -> T:
        counts.nbytes += result[1].nbytes
        counts.num_frames += result[1].num_frames
        counts.num_refetched += result[1].num_refetched
        return result[0]

    ranges = plan_ranges(manifest, frames, scale)
    if pool is None:
        for span in ranges:
            yield take(work(span))
        return
    waiting: deque[Future[tuple[T, Fetched]]] = deque()
    try:
        for span in ranges:
            while len(waiting) > in_flight:
                yield take(waiting.popleft().result())
            waiting.append(pool.submit(work, span))
        while waiting:
            yield take(waiting.popleft().result())
    finally:
        for future in waiting:
            future.cancel()


def _read(
    reader: PublicationReader, schema: Schema, manifest: Manifest, span: Range, counts: Fetched
) -> Iterator[FetchedFrame]:
    buffer = memoryview(bytearray(span.nbytes))
    key = manifest.payload_key(span.payload)
    try:
        reader.sink.read_into(key, span.offset, buffer, timeout_s=reader.timeout_s)
    except KeyError as e:
        raise reader.missing(manifest, key, "payload") from e
    counts.nbytes += span.nbytes
    for number in span.frames:
        record = manifest.frames.record(number)
        at = record.offset - span.offset
        stored = buffer[at : at + record.nbytes]
        try:
            check_frame(manifest, record, stored)
        except RefetchError:
            counts.num_refetched += 1
            counts.nbytes += record.nbytes
            stored = _read_again(reader, manifest, record)
        counts.num_frames += 1
        yield FetchedFrame(schema, manifest, record, stored)


def _read_again(reader: PublicationReader, manifest: Manifest, record: FrameRecord) -> memoryview:
    """The frame alone, into fresh memory; RefetchError where it is bad again."""
    try:
        return reader.frame_bytes(manifest, record)
    except RefetchError as e:
        raise RefetchError(f"{e}; it was read twice: the stored payload is bad. Nothing was touched") from e


def require_payloads(reader: PublicationReader, manifest: Manifest, frames: np.ndarray) -> None:
    """Ask for every payload of some frames, before a write that cannot be undone half-way.

    Args:
        reader: Of the run.
        manifest: The publication.
        frames: Frame numbers.

    Raises:
        RetryError: One is not there, though the publication is.
        NeedsAnchorError: The publication was pruned.
    """
    for payload in np.unique(manifest.frames.columns["payload"][frames]).tolist():
        key = manifest.payload_key(payload)
        try:
            reader.sink.size(key, timeout_s=reader.timeout_s)
        except KeyError as e:
            raise reader.missing(manifest, key, "payload") from e
