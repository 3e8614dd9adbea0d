"""Exceptions grouped by what the caller should do next.

Bad calls and configuration are plain ``ValueError`` or ``TypeError``. Everything a run can meet at night is one of
these. The message says what failed, for which version, tensor and rank, what was expected and found, and what to do.
"""

from __future__ import annotations

from collections.abc import Mapping


class MegasyncError(Exception):
    """Base of all errors that megasync raises about the world rather than about a call."""


class RetryError(MegasyncError):
    """Nothing is broken for good: re-read and retry (a sink that did not answer, a head that moved meanwhile)."""


class SinkConflictError(MegasyncError):
    """An exclusive create or a compare-and-swap found something else: another publisher is alive. Stop this one."""


class RefetchError(MegasyncError):
    """Bytes that were fetched are not the bytes that were published: drop the cached copy and fetch again."""


class FormatError(MegasyncError):
    """A document or frame breaks the format's rules. Nothing was touched; report the publisher, do not retry."""


class NeedsAnchorError(MegasyncError):
    """No chain leads from the version held to the version wanted: load an anchor."""


class BaseMismatchError(MegasyncError):
    """The live bytes or the version held are not the base of the delta. Nothing was touched."""


class LiveMismatchError(BaseMismatchError):
    """The live bytes are not those of the version held, or are no longer where they were proven, whatever the delta: the
    engine holds no version until a join or a reload says otherwise."""


class SchemaMismatchError(MegasyncError):
    """Names, shapes, dtypes or the run differ between the two ends. Nothing was touched."""


class PlanError(MegasyncError):
    """A plan (ownership or layout) cannot be made: the message lists every name concerned. Nothing was touched."""


class ReplicaDriftError(MegasyncError):
    """Holders that ought to have equal bytes differ; the message names the tensor and the ranks."""


class NonFiniteError(MegasyncError):
    """A weight that must be quantised holds NaN or infinity: nothing was published; skip the step or restore."""


class TaintedError(MegasyncError):
    """The engine's weights are in an unknown state: replace the replica, never resume it."""


class UndoneError(MegasyncError):
    """The update failed after the first write and was undone: the engine serves its old version."""


class MemoryPlanError(MegasyncError):
    """A planned allocation does not fit; the message has the numbers. Nothing was allocated."""


class MissingPackageError(MegasyncError):
    """An optional package is needed; the message says which extra installs it."""


class RankFailedError(MegasyncError):
    """One or more ranks failed; raised on every rank with every rank's cause.

    Args:
        what: What failed.
        causes: Rank to the text of its error; empty where no rank is known to be at fault.
        unknown: What is known instead, where no rank is.

    Attributes:
        causes: Rank to the text of its error.
    """

    def __init__(self, what: str, causes: Mapping[int, str], unknown: str = "") -> None:
        self.causes = dict(causes)
        listed = "; ".join(f"rank {r}: {c}" for r, c in sorted(self.causes.items()))
        super().__init__(
            f"{what} failed on {len(self.causes)} rank(s): {listed}" if self.causes else f"{what} failed: {unknown}"
        )


def is_live_mismatch(error: BaseException | None) -> bool:
    """Whether live words were found to be no version: by this rank, by one among ranks that failed in different ways, or as
    the cause of an undone update. So are replicas that differ: at most one of them is the version."""
    if isinstance(error, UndoneError):
        return is_live_mismatch(error.__cause__)
    if isinstance(error, RankFailedError):
        return any(cause.startswith(_NO_VERSION) for cause in error.causes.values())
    return isinstance(error, LiveMismatchError | ReplicaDriftError)


_NO_VERSION = tuple(f"{kind.__name__}:" for kind in (LiveMismatchError, ReplicaDriftError))
