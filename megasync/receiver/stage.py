"""Stage: a publication made ready in memory while the engine serves; nothing live is written.

Reads and digest checks run on the pool, decode and place beside them where the backend gains from it. ``prove`` then
compares the live words at the touched positions with the manifest, over all ranks: it may run as part of staging where
the base is live already, and runs just before the apply where a version was staged ahead. Comes after fetch, before
apply.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import numpy as np

from megasync.errors import MemoryPlanError, PlanError
from megasync.manifest import Manifest
from megasync.receiver.backend import Backend, FetchedFrame, Placed, run_all
from megasync.receiver.bind import Binding
from megasync.receiver.fetch import Fetched, Range, fetch
from megasync.receiver.ledger import Ledger, check_before, proven_ids, said_sums
from megasync.receiver.sums import Sums
from megasync.receiver.tally import tally
from megasync.receiver.votes import vote
from megasync.versions.publication import PublicationReader


@dataclass
class Staged:
    """A delta in memory, bound to live addresses.

    Attributes:
        manifest: The publication.
        placed: Its changed words on this rank.
        fetched: What was read.
        stage_s: Seconds that staging took.
        nbytes: Host or device bytes that it takes.
        sums: Digest sums before and after, where the words were read while staging.
        found: What the live words were found to be, kept by ``Applier.stage`` for the update.
    """

    manifest: Manifest
    placed: tuple[Placed, ...]
    fetched: Fetched
    stage_s: float
    nbytes: int
    sums: list[tuple[Sums, Sums]] | None = None
    found: Found | None = None


@dataclass(frozen=True, slots=True)
class Found:
    """What ``prove`` found of a delta. Not the delta itself, which would then hold on to itself, and to its memory.

    Attributes: see `Proven`.
    """

    base: Ledger
    ledger: Ledger
    ids: np.ndarray
    before: np.ndarray
    after: np.ndarray
    own: tuple[Sums, Sums] | None


@dataclass(frozen=True, slots=True)
class Proven:
    """A staged delta whose base was found live on every rank.

    Attributes:
        staged: The delta.
        base: What is held, None where the live weights are no known version (an anchor is loaded over them).
        ledger: What will be held.
        ids: Tensors whose sums were compared.
        before: uint64 ``[K, 2]``, totals of the live words at the touched positions.
        after: The same as they will be.
        own: This rank's part of both, replicas included; None where it is not known. With it a write is compared on each
            rank by itself, and ranks tell each other one word instead of all sums, inside the pause.
    """

    staged: Staged
    base: Ledger | None
    ledger: Ledger
    ids: np.ndarray
    before: np.ndarray
    after: np.ndarray
    own: tuple[Sums, Sums] | None = None

    @property
    def base_version(self) -> int:
        """Version that an undo leads back to, -1 where it is none."""
        return -1 if self.base is None else self.base.version


@dataclass
class _Total:
    nbytes: int = 0
    placed: list[Placed] = field(default_factory=list)
    sums: list[tuple[Sums, Sums]] = field(default_factory=list)


def stage(
    binding: Binding,
    backend: Backend,
    reader: PublicationReader,
    manifest: Manifest,
    pool: ThreadPoolExecutor | None,
    *,
    limit_nbytes: int,
    read_live: bool,
    in_flight: int = 4,
) -> Staged:
    """Fetch, decode and place a delta.

    Args:
        binding: This rank.
        backend: Places frames.
        reader: Of the run.
        manifest: The delta.
        pool: Threads; None for the caller's.
        limit_nbytes: Bytes that the staged delta may take.
        read_live: The base is live now: read the words at the touched positions along the way, while offsets are in the
            cache. False where the version is staged ahead.
        in_flight: Ranges of frames read ahead.

    Returns:
        The staged delta.

    Raises:
        MemoryPlanError: It does not fit the limit.
        RefetchError, FormatError: Bytes were refused; nothing was touched.
    """
    started = perf_counter()
    total, fetched = _Total(), Fetched()

    frames = binding.frames_of(manifest)
    placing = backend.begin(manifest, frames)

    def proven(placed: list[Placed]) -> tuple[list[Placed], list[tuple[Sums, Sums]]]:
        return placed, [p.prove() for p in placed if not p.blind] if read_live else []

    def place(frames: Sequence[FetchedFrame]) -> tuple[list[Placed], list[tuple[Sums, Sums]]]:
        return proven(placing.place(frames))

    def whole(span: Range) -> tuple[list[Placed], list[tuple[Sums, Sums]]] | None:
        placed = placing.place_range(reader, span)
        return None if placed is None else proven(placed)

    def add(placed: list[Placed], sums: list[tuple[Sums, Sums]]) -> None:
        total.placed += placed
        total.sums += sums
        total.nbytes += sum(p.nbytes for p in placed)
        if total.nbytes > limit_nbytes:
            raise MemoryPlanError(
                f"version {manifest.version} of {manifest.num_changed} changed words takes more than staged_limit_nbytes "
                f"{limit_nbytes} after {fetched.num_frames} of {len(frames)} frames; nothing was touched. Raise the limit"
            )

    consume: Callable[[Sequence[FetchedFrame]], Any] = place if backend.threads else list
    with closing(
        fetch(
            reader,
            binding.schema,
            manifest,
            frames,
            consume,
            pool,
            in_flight=in_flight,
            fetched=fetched,
            scale=backend.range_scale,
            whole=whole if backend.threads else None,
        )
    ) as results:
        for result in results:
            add(*(result if backend.threads else place(result)))
    add(*proven(placing.finish()))
    return Staged(
        manifest,
        tuple(total.placed),
        fetched,
        perf_counter() - started,
        total.nbytes,
        total.sums if read_live else None,
    )


def prove(binding: Binding, ledger: Ledger, staged: Staged, pool: ThreadPoolExecutor | None) -> Proven:
    """Prove that the base of a staged delta is what is live, on every rank. *Collective*. Nothing live is written.

    A delta that was proven while it was staged, on what is still held, is not proven again: ranks stage and hold together, so
    that they agree in that too.

    Args:
        binding: This rank.
        ledger: What is held.
        staged: The delta.
        pool: Threads; None for the caller's.

    Raises:
        BaseMismatchError: Version held or live words are not the base.
        FormatError: The manifest contradicts itself or the delta.
        ReplicaDriftError: A replica differs from its primary.
    """
    known = staged.found
    if known is None or known.base is not ledger:
        known = find(binding, ledger, staged, pool)
    return Proven(staged, known.base, known.ledger, known.ids, known.before, known.after, known.own)


def find(binding: Binding, ledger: Ledger, staged: Staged, pool: ThreadPoolExecutor | None) -> Found:
    """What ``prove`` is about, always looked at. *Collective*. Arguments and exceptions are those of ``prove``."""
    after_ledger = ledger.after(staged.manifest)
    ids = proven_ids(staged.manifest, binding.group_ids)

    blind = _all_blind(binding, staged)

    own: list[Sums] = []

    def body() -> list[list[Sums]]:
        sums = staged.sums
        if sums is None:
            sums = run_all(pool, [p.prove for p in staged.placed if not p.blind])
        own.extend(Sums.join(x[k] for x in sums) for k in (0, 1))
        return [[x] for x in own]

    before, after = tally(binding, f"proof of the base of version {staged.manifest.version}", ids, body)
    if blind:
        before, after = said_sums(ledger, staged.manifest, ids)
    else:
        check_before(binding.schema, ledger, staged.manifest, ids, before, after)
    return Found(ledger, after_ledger, ids, before, after, None if blind else (own[0], own[1]))


def _all_blind(binding: Binding, staged: Staged) -> bool:
    """Whether a delta is written without having been read before, the same on every rank. *Collective*.

    Raises:
        PlanError: Ranks of one engine apply it in different ways.
    """
    blind = any(p.blind for p in staged.placed)
    with vote(binding.engine, "way of proof") as ballot:
        ballot.data = bytes([2 * blind + (not staged.placed)])
    found = {
        b[0] >> 1 for b in ballot.result if b and not b[0] & 1
    }  # a rank without a changed word goes with the others
    if len(found) > 1:
        raise PlanError(
            f"version {staged.manifest.version}: ranks of {binding.engine.name} chose backends that prove in different ways; "
            "nothing was touched. Name the backend instead of letting each rank choose"
        )
    return bool(found) and found.pop() == 1
