"""Apply: the pause. Live weights are changed, read back and proven, or put back as they were.

Status ``updating`` is durable before the engine pauses, and every rank votes between the steps, so that all ranks of an
engine end at one version. The pause holds the write, its digests, the comparison with what was proven, the vote and nothing
that can be done before: checks, copies for the undo, the status file, kernels to load. A failure after the first write is undone inside the pause; a failure of the undo is recorded
as ``tainted`` before anything else. An interrupt at any point is such a failure; once the write is proven the version is held.
Comes after stage.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

from megasync.errors import TaintedError, UndoneError, is_live_mismatch
from megasync.receiver.backend import Backend
from megasync.receiver.bind import Binding
from megasync.receiver.engine import Derivation
from megasync.receiver.ledger import Ledger, check_after, check_own
from megasync.receiver.pausing import back_to, go_on, let_go_on, pause, resume, taint
from megasync.receiver.stage import Proven
from megasync.receiver.status import Status, StatusFile
from megasync.receiver.sums import Sums
from megasync.receiver.tally import tally
from megasync.receiver.votes import vote


@dataclass(frozen=True, slots=True)
class Applied:
    """What an apply took.

    Attributes:
        pause_s: Seconds from the call of ``pause`` to the return of ``resume``.
        derived: Names of the derivations that ran.
        error: What this rank's ``resume`` raised: the new version is live and proven all the same.
    """

    pause_s: float
    derived: tuple[str, ...]
    error: BaseException | None = None


class Holder(Protocol):
    """Who holds a version.

    Attributes:
        ledger: What is held; moves in one assignment, as soon as a write is proven.
        writing: Live weights may be no version: from before the first write until it is proven or undone.
    """

    ledger: Ledger | None
    writing: bool


def apply(
    binding: Binding,
    backend: Backend,
    proven: Proven,
    holder: Holder,
    status: StatusFile,
    pool: ThreadPoolExecutor | None,
    clock: Callable[[], float],
) -> Applied:
    """Write a proven delta into live weights. *Collective*.

    Args:
        binding: This rank.
        backend: That placed the delta.
        proven: The delta; its base is live on every rank.
        holder: Holds the new version once it is proven.
        status: Left at ``updating`` on success: the caller says what is held then, and raises ``error`` if there is one.
        pool: Threads; None for the caller's.
        clock: Seconds.

    Returns:
        What it took; the engine runs on the new version.

    Raises:
        LiveMismatchError: Storage moved: nothing was touched.
        BaseMismatchError: The engine refuses updates now: nothing was touched.
        UndoneError: The write failed and was undone on every rank; the engine runs on its old version.
        TaintedError: The undo failed, or the device did: the engine stays stopped for good.
        RetryError: The engine did not come to rest: nothing was touched.
        RankFailedError: A rank failed before the first write: nothing was touched.
    """
    version = proven.ledger.version
    groups = binding.shadows.touched(proven.ids)
    was = status.now
    saved: dict[str, torch.Tensor] = {}
    try:
        with vote(binding.engine, f"preparing the apply of version {version}"):
            binding.engine.check_ready()  # first: it knows why weights that it put to sleep are not where they were
            binding.check_alive()
            saved = binding.shadows.backup(groups, binding.engine.tensors())
            for placed in proven.staged.placed:
                placed.arm()
            status.set(state="updating", target=version)
    except BaseException:
        back_to(status, was)
        raise
    with _no_collection():
        started = clock()
        base_version = None if proven.base is None else proven.base_version
        stands: BaseException | None
        try:
            pause(binding, status, was, version, base_version)
            holder.writing = True
            _write_and_compare(binding, backend, proven, groups, status, pool)
            holder.ledger = proven.ledger
            holder.writing = False
            stands = resume(binding, version)
        except BaseException as error:
            if holder.ledger is proven.ledger:
                holder.writing, stands = False, error  # interrupted after the proof: as if ``resume`` had been
                return Applied(clock() - started, tuple(d.name for d in groups), stands)
            if not holder.writing:
                let_go_on(binding, status, was, base_version)
                raise
            if isinstance(error, TaintedError):  # of this rank, or of another: the engine is one whole
                if status.now.state != "tainted":
                    taint(binding, status, str(error))
                raise
            _undo(binding, backend, proven, holder, status, was, saved, error)
            raise
        return Applied(clock() - started, tuple(d.name for d in groups), stands)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep Python from collecting garbage: of a process with an engine in it that takes longer than the pause."""
    on = gc.isenabled()
    try:
        gc.disable()
        yield
    finally:
        if on:
            gc.enable()


def _write_and_compare(
    binding: Binding,
    backend: Backend,
    proven: Proven,
    groups: Sequence[Derivation],
    status: StatusFile,
    pool: ThreadPoolExecutor | None,
) -> None:
    """Write on every rank, and compare what is live then with what was proven before: each rank by itself where it knows its
    own part, else all together."""
    version = proven.ledger.version
    if proven.own is None:
        (found,) = tally(
            binding,
            f"write of version {version}",
            proven.ids,
            lambda: [_write(binding, backend, proven, groups, status, pool)],
        )
        check_after(binding.schema, version, proven.ids, proven.after, found)
        return
    with vote(binding.engine, f"write of version {version}"):
        mine = Sums.join(_write(binding, backend, proven, groups, status, pool))
        check_own(binding.schema, version, proven.own[1], mine)


def _write(
    binding: Binding,
    backend: Backend,
    proven: Proven,
    groups: Sequence[Derivation],
    status: StatusFile,
    pool: ThreadPoolExecutor | None,
) -> list[Sums]:
    """All writes, then the derivations, then what was read back. A device fault is recorded before anything else."""
    try:
        sums = backend.write_(proven.staged.placed, pool)
        tensors = binding.engine.tensors() if groups else {}
        for group in groups:
            binding.shadows.write_(group, binding.shadows.derive(group, binding.storages), tensors)
    except BaseException as error:
        try:
            backend.judge(error)
        except TaintedError as fault:
            taint(binding, status, str(fault))
            raise
        raise
    return sums


def _undo(
    binding: Binding,
    backend: Backend,
    proven: Proven,
    holder: Holder,
    status: StatusFile,
    was: Status,
    saved: dict[str, torch.Tensor],
    error: BaseException,
) -> None:
    """Put everything back on every rank; returns only for errors that are not to be turned into `UndoneError`."""
    version = proven.ledger.version
    try:
        (found,) = tally(
            binding,
            f"undo of version {version}",
            proven.ids,
            lambda: [_put_back(binding, backend, proven, saved)],
        )
        check_after(binding.schema, proven.base_version, proven.ids, proven.before, found)
    except BaseException as undo_error:
        reason = f"version {version} failed ({error}) and could not be undone ({undo_error})"
        taint(binding, status, reason)
        raise TaintedError(f"{reason}: replace the replica, its weights are in an unknown state") from undo_error
    holder.writing = False
    stands = go_on(binding, status, was, None if proven.base is None else proven.base_version)
    if isinstance(error, Exception):
        what_now = (
            f"The touched words are as version {proven.base_version} had them, the others may not be: load the weights anew or "
            "an anchor, then join"
            if is_live_mismatch(error)
            else f"The engine has version {proven.base_version} as before; look at the cause, then update again"
        )
        raise UndoneError(
            f"version {version} failed after the first write and was undone: {error}. {what_now}"
            + ("" if stands is None else f". It stands still: resume() failed ({stands})")
        ) from error


def _put_back(binding: Binding, backend: Backend, proven: Proven, saved: dict[str, torch.Tensor]) -> list[Sums]:
    sums = backend.undo_(proven.staged.placed)
    if saved:
        tensors = binding.engine.tensors()
        with torch.inference_mode():
            for name, old in saved.items():
                tensors[name].detach().copy_(old)
    return sums


def reverse(proven: Proven) -> Proven | None:
    """The way back from an applied delta, None where its base is no known version.

    The placed words still hold what was live before; ``prove`` on the new state is what makes the way back a proof.
    """
    if proven.base is None:
        return None
    own = None if proven.own is None else (proven.own[1], proven.own[0])
    return Proven(proven.staged, proven.ledger, proven.base, proven.ids, proven.after, proven.before, own)
