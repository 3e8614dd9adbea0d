"""Joining: which version an engine's weights are, found by content; an anchor loaded over weights that are none.

Comes after bind, before the first update. Must not import applier.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from megasync.errors import BaseMismatchError, LiveMismatchError, NeedsAnchorError, PlanError
from megasync.manifest import Manifest
from megasync.receiver.audit import audit
from megasync.receiver.engine import Engine
from megasync.receiver.ledger import Ledger
from megasync.receiver.prior import Prior
from megasync.receiver.results import UpdateResult
from megasync.receiver.route import find_version
from megasync.receiver.self_test import self_test
from megasync.receiver.session import Session, advance
from megasync.receiver.status import StatusFile
from megasync.receiver.votes import together, vote


def is_torn(engine: Engine, status: StatusFile, reloaded: bool) -> bool:
    """Whether some rank's weights may be neither one version nor another. *Collective*.

    Args:
        engine: Whose ranks.
        status: This rank's; set to ``new`` where no rank's weights are torn.
        reloaded: The weights were loaded anew since the status was written.
    """
    with vote(engine, "status") as ballot:
        ballot.data = bytes([status.now.torn and not reloaded])
    torn = any(map(any, ballot.result))
    if not torn:
        together(engine, "status", lambda: status.set(state="new", version=-1, manifest=""))
    return torn


def enter(session: Session, newest: Manifest, torn: bool, result: UpdateResult) -> UpdateResult:
    """Find the version of the live weights, or load an anchor over them. *Collective*.

    Args:
        session: Bound, without a ledger.
        newest: What the head names.
        torn: The weights are no version, whatever they are: they are overwritten.
        result: To be added to.

    Raises:
        NeedsAnchorError, BaseMismatchError, PlanError: See ``Applier.join``.
    """
    binding = session.binding
    found: Ledger | None = None
    digests: np.ndarray | None = None
    if torn:
        now = session.status.now
        reason = f" ({now.reason.rstrip('.')})" if now.reason else ""
        why = f"status is {now.state} (version {now.version}, target {now.target}): weights may be torn{reason}"
        start = together(binding.engine, "chain", lambda: session.reader.chain(newest)[0])
    else:
        try:
            with session.telemetry.span("audit"):
                seen = digests = audit(binding, session.pool)
        except LiveMismatchError:
            # What is derived, as a cast, is of no canonical bytes at all: fresh weights, which an anchor overwrites.
            start = together(binding.engine, "chain", lambda: session.reader.chain(newest)[0])
            if start.what != "anchor":
                raise
        else:
            found, start, why = together(
                binding.engine,
                "finding the version",
                lambda: find_version(session.reader, binding.schema, newest, binding.group_ids, seen),
            )
    if found is not None:
        session.hold(found, "serving" if found.version == newest.version else "behind")
        binding.engine.holds(found.version)
        result = replace(result, from_version=found.version, version=found.version, proofs=("audit",))
    elif start.what == "anchor":
        prior = Prior(binding, session.reader, start, digests)
        try:
            result = advance(session, start, "serving" if start.version == newest.version else "behind", result, prior)
        except PlanError:
            binding.engine.holds(-1)
            raise
    else:
        binding.engine.holds(-1)
        raise (NeedsAnchorError if torn else BaseMismatchError)(
            f"{binding.engine.name}: {why}. The chain of run {newest.run!r} starts with the checkpoint of version "
            f"{start.version}, whose bytes are not in the sink; nothing was touched. Load the engine from it and join with "
            "reloaded=True, or publish an anchor"
        )
    if session.config.self_test and self_test(binding):
        result = replace(result, proofs=(*result.proofs, "self-test"))
    return result
