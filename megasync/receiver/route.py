"""Routes: which publications lead from what an engine holds to what the head names; and which version live weights are.

Must import nothing above ledger.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np

from megasync.errors import BaseMismatchError, NeedsAnchorError
from megasync.manifest import Manifest
from megasync.receiver.ledger import Ledger
from megasync.schema import Schema, names_of
from megasync.versions.publication import PublicationReader

Route = Callable[[PublicationReader, Ledger, Manifest], list[Manifest]]
"""Publications to apply one after the other, from what is held to a manifest."""

LONG_CHAIN = 200
"""Steps from an anchor from which a cold start is slow enough to warn of."""

_log = logging.getLogger(__name__)


def steps(reader: PublicationReader, held: Ledger, wanted: Manifest) -> list[Manifest]:
    """The chain of deltas from the version held, or from the last anchor where no delta leads on from it.

    Args:
        reader: Of the run.
        held: What is held.
        wanted: Where to go.

    Returns:
        Oldest first; empty where ``wanted`` is held already.

    Raises:
        NeedsAnchorError: Neither the version held nor an anchor is on the chain.
        BaseMismatchError: The head is older than what is held, or of another history, and no anchor leads out of it.
    """
    mine = held.manifest
    if wanted.digest == mine.digest:
        return []
    if wanted.version < mine.version:
        raise BaseMismatchError(
            f"run {mine.run!r}: version {wanted.version} is wanted, this engine holds version {mine.version}: versions only "
            "move up; nothing was touched. Roll back, or make a new applier and join where the run was reset"
        )
    try:
        chain = reader.chain(wanted, mine.version)
    except NeedsAnchorError as e:
        raise NeedsAnchorError(f"{e}; this engine holds version {mine.version}") from e
    first = chain[0]
    if first.what == "delta" and (first.base_version, first.base_digest) == (mine.version, mine.digest):
        return chain
    if first.what == "delta":
        chain = reader.chain(wanted)
        first = chain[0]
    if first.what != "anchor":
        raise NeedsAnchorError(
            f"version {wanted.version} of run {mine.run!r} is reached through version {chain[1].base_version} (manifest "
            f"{chain[1].base_digest.hex()}), this engine holds version {mine.version} (manifest {mine.digest.hex()}): another "
            "history, and its root is a checkpoint whose bytes are not in the sink. Load the engine from it, then join"
            if len(chain) > 1
            else f"version {wanted.version} of run {mine.run!r} is a checkpoint; this engine holds version {mine.version}"
        )
    _log.warning(
        "run %r: no delta leads from version %d to %d; anchor %d is loaded",
        mine.run,
        mine.version,
        wanted.version,
        first.version,
    )
    return chain


def find_version(
    reader: PublicationReader, schema: Schema, newest: Manifest, ids: np.ndarray, found: np.ndarray
) -> tuple[Ledger | None, Manifest, str]:
    """Find out which version live weights are.

    Args:
        reader: Of the run.
        schema: The run's schema.
        newest: Where the chain ends.
        ids: Tensors that were audited, ascending.
        found: uint8 ``[len(ids), 16]``, their state digests.

    Returns:
        The newest version all of whose state digests are live (None where none is), the anchor or checkpoint at the
        start of the chain, and what differs from the closest version, in words.

    Raises:
        NeedsAnchorError: The chain does not reach an anchor or a checkpoint.
    """
    chain = reader.chain(newest)
    if len(chain) > LONG_CHAIN:
        _log.warning(
            "run %r: %d steps from version %d to %d; a cold start takes them all. Publish anchors more often",
            newest.run,
            len(chain) - 1,
            chain[0].version,
            newest.version,
        )
    ledger = Ledger(chain[0], reader.state_table(chain[0]))
    best: Ledger | None = None
    closest: tuple[int, Ledger] | None = None
    for manifest in [chain[0], *chain[1:]]:
        if manifest is not chain[0]:
            ledger = ledger.after(manifest)
        wrong = int((ledger.table[ids] != found).any(axis=1).sum())
        if not wrong:
            best = ledger
        if closest is None or wrong <= closest[0]:
            closest = (wrong, ledger)
    assert closest is not None  # a chain has at least one manifest
    near = closest[1]
    wrong_ids = ids[(near.table[ids] != found).any(axis=1)]
    words = f"{len(wrong_ids)} tensors differ from version {near.version}, the closest: {names_of(schema, wrong_ids)}"
    return best, chain[0], words
