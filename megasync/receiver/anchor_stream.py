"""Anchors that are too large to be staged: written tile by tile, without undo, and audited at the end.

At join somebody looks on while the anchor is read, before it is written (``prior``): what fits in memory of that reading is
kept and not read again. Comes after fetch, beside ``anchor``. Must import nothing above anchor.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from megasync.errors import BaseMismatchError, TaintedError
from megasync.manifest import Manifest
from megasync.receiver.anchor import See, check_frozen, mask_of, published, tiles_of
from megasync.receiver.apply import Applied, Holder
from megasync.receiver.audit import audit
from megasync.receiver.bind import Binding
from megasync.receiver.dense import MaskPlaced
from megasync.receiver.fetch import Fetched, require_payloads
from megasync.receiver.ledger import Ledger
from megasync.receiver.pausing import back_to, let_go_on, pause, resume, taint
from megasync.receiver.status import StatusFile
from megasync.receiver.votes import together, vote
from megasync.schema import names_of
from megasync.versions.publication import PublicationReader


@dataclass
class Kept:
    """What is left to read of an anchor that was read once already, and what was kept of it.

    Attributes:
        masks: Of whole tensors, not proven; taken away as they are written.
        left: Ids of tensors to read.
        fetched: What was read.
    """

    masks: list[MaskPlaced]
    left: list[int]
    fetched: Fetched


def keep_anchor(
    binding: Binding,
    reader: PublicationReader,
    manifest: Manifest,
    pool: ThreadPoolExecutor | None,
    see: See,
    ids: np.ndarray,
    limit_nbytes: int,
) -> Kept:
    """Read an anchor that is too large to be staged, show it, and keep what fits for ``write_anchor``. Local to the rank.

    A mask without the words that it replaces takes half of what staging takes; what does not fit even so is read a second
    time while it is written.

    Args:
        binding: This rank.
        reader: Of the run.
        manifest: The anchor.
        pool: Threads; None for the caller's.
        see: Is shown every tile.
        ids: int64, the tensors that are to be written; others are not read.
        limit_nbytes: Host bytes that masks may take.

    Raises:
        RefetchError, FormatError: Bytes were refused; nothing was touched.
    """
    fetched = Fetched()
    kept: dict[int, list[MaskPlaced]] = {}
    left: set[int] = set()
    nbytes = 0
    for tile in tiles_of(binding.only(ids.tolist()), reader, manifest, pool, fetched):
        mask, tensor_id = mask_of(binding, tile, see), tile[0]
        if tensor_id in left:
            continue
        kept.setdefault(tensor_id, []).append(mask)
        nbytes += mask.mask.nbytes
        if nbytes > limit_nbytes:
            left.add(tensor_id)
            nbytes -= sum(m.mask.nbytes for m in kept.pop(tensor_id))
    return Kept([m for masks in kept.values() for m in masks], sorted(left), fetched)


def write_anchor(
    binding: Binding,
    reader: PublicationReader,
    manifest: Manifest,
    holder: Holder,
    status: StatusFile,
    pool: ThreadPoolExecutor | None,
    clock: Callable[[], float],
    kept: Kept | None = None,
) -> tuple[Applied, Ledger, Fetched]:
    """Write an anchor tile by tile while it is fetched, inside the pause, without undo. *Collective*.

    For engines whose slices are larger than what may be staged. Any failure after the first write leaves the engine
    tainted; a new anchor or a reload is what helps then.

    Args:
        binding: This rank.
        reader: Of the run.
        manifest: The anchor.
        holder: As ``apply``.
        status: As ``apply``.
        pool: Threads; None for the caller's.
        clock: Seconds.
        kept: From ``keep_anchor``: what it kept is written from memory, tensors that it did not read are right already.

    Returns:
        What it took, what is held then, and what was read of the sink, with what ``keep_anchor`` read.

    Raises:
        RetryError: A payload is not there, or the engine did not come to rest: nothing was touched.
        TaintedError: It failed half-way, or the audit after it found other bytes.
    """
    table = together(binding.engine, f"table of version {manifest.version}", lambda: reader.state_table(manifest))
    check_frozen(binding, table, pool)
    kept = Kept([], published(binding).tolist(), Fetched()) if kept is None else kept
    unread = binding.only(kept.left)
    groups = binding.shadows.touched(published(binding))
    was = status.now
    try:
        with vote(binding.engine, f"preparing anchor {manifest.version}"):
            binding.engine.check_ready()
            binding.check_alive()
            require_payloads(reader, manifest, unread.frames_of(manifest))
            status.set(state="updating", target=manifest.version)
    except BaseException:
        back_to(status, was)
        raise
    started, ledger = clock(), Ledger(manifest, table)
    base_version = None if was.torn or was.version < 0 else was.version
    stands: BaseException | None
    try:
        pause(binding, status, was, manifest.version, base_version)
        holder.writing = True
        with vote(binding.engine, f"anchor {manifest.version}"):
            while kept.masks:
                mask = kept.masks.pop()
                mask.prove()
                mask.write_()
            for tile in tiles_of(unread, reader, manifest, pool, kept.fetched):
                mask = mask_of(binding, tile)
                mask.prove()
                mask.write_()
            for group in groups:
                values = binding.shadows.derive(group, binding.storages)
                binding.shadows.write_(group, values, binding.engine.tensors())
        found = audit(binding, pool)
        wrong = binding.group_ids[(found != table[binding.group_ids]).any(axis=1)]
        if len(wrong):
            raise BaseMismatchError(f"live {names_of(binding.schema, wrong)} are not the anchor's after the write")
        holder.ledger = ledger
        holder.writing = False
        stands = resume(binding, manifest.version)
    except BaseException as error:
        if holder.ledger is ledger:
            holder.writing, stands = False, error  # interrupted after the audit: as if ``resume`` had been
            return Applied(clock() - started, tuple(d.name for d in groups), stands), ledger, kept.fetched
        if not holder.writing:
            let_go_on(binding, status, was, base_version)
            raise
        reason = f"anchor {manifest.version}, too large to be undone, failed half-way ({error})"
        taint(binding, status, reason)
        raise TaintedError(f"{reason}: replace the replica or load its weights anew, then join") from error
    return Applied(clock() - started, tuple(d.name for d in groups), stands), ledger, kept.fetched
