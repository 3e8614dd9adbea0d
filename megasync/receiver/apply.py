"""Apply: the pause. Live weights are changed, read back and proven, or put back as they were.

Status ``updating`` is durable before the engine pauses, and every rank votes between the steps, so that all ranks of an
engine end at one version. The pause holds the write, its digests, the comparison with what was proven, the vote and nothing
that can be done before: checks, copies for the undo, the status file, kernels to load. A failure after the first write is undone inside the pause; a failure of the undo is recorded
as ``tainted`` before anything else. Comes after stage.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from megasync.errors import RetryError, TaintedError, UndoneError, is_live_mismatch
from megasync.receiver.backend import Backend
from megasync.receiver.bind import Binding
from megasync.receiver.engine import Derivation
from megasync.receiver.ledger import check_after, check_own
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


def apply(
    binding: Binding,
    backend: Backend,
    proven: Proven,
    status: StatusFile,
    pool: ThreadPoolExecutor | None,
    clock: Callable[[], float],
) -> Applied:
    """Write a proven delta into live weights. *Collective*.

    Args:
        binding: This rank.
        backend: That placed the delta.
        proven: The delta; its base is live on every rank.
        status: Left at ``updating`` on success: the caller says what is held then, and raises ``error`` if there is one.
        pool: Threads; None for the caller's.
        clock: Seconds.

    Returns:
        What it took; the engine runs on the new version.

    Raises:
        BaseMismatchError: Storage moved, or the engine refuses updates now: nothing was touched.
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
            binding.check_alive()
            binding.engine.check_ready()
            saved = binding.shadows.backup(groups, binding.engine.tensors())
            for placed in proven.staged.placed:
                placed.arm()
            status.set(state="updating", target=version)
    except BaseException:
        back_to(status, was)
        raise
    with _no_collection():
        started = clock()
        pause(binding, status, was, version, None if proven.base is None else proven.base_version)
        try:
            _write_and_compare(binding, backend, proven, groups, status, pool)
        except BaseException as error:
            if isinstance(error, TaintedError):  # of this rank, or of another: the engine is one whole
                if status.now.state != "tainted":
                    taint(binding, status, str(error))
                raise
            _undo(binding, backend, proven, status, was, saved, error)
            raise
        stands = resume(binding, version)
        return Applied(clock() - started, tuple(d.name for d in groups), stands)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep Python from collecting garbage: of a process with an engine in it that takes longer than the pause."""
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()


def pause(binding: Binding, status: StatusFile, was: Status, version: int, base_version: int | None) -> None:
    """Stop the engine on every rank, or let it go on. *Collective*.

    Args:
        binding: This rank.
        status: Put back to ``was`` where the engine goes on.
        was: The status before the update.
        version: What it is stopped for.
        base_version: Version of the live weights; None where they are of none.

    Raises:
        RetryError: It did not come to rest.
    """
    try:
        with vote(binding.engine, f"pausing for version {version}"):
            try:
                binding.engine.pause()
            except TimeoutError as e:
                raise RetryError(
                    f"{binding.engine.name} did not pause for version {version} ({e}): nothing was touched, update again"
                ) from e
    except BaseException:
        back_to(status, was)
        if base_version is not None:
            wake(binding, status, base_version)
        raise


def resume(binding: Binding, version: int) -> BaseException | None:
    """Let this rank go on at a proven version; what that raises is no reason to doubt the weights."""
    try:
        binding.engine.resume(version)
    except BaseException as error:
        return error
    return None


def wake(
    binding: Binding, status: StatusFile, version: int, run: Callable[[], BaseException | None] | None = None
) -> BaseException | None:
    """Let the engine go on at a proven version, or record that it does not. *Collective*.

    Args:
        binding: This rank.
        status: Becomes ``behind``, with the reason, and ``asleep`` where a rank's ``resume`` fails.
        version: Version of the live weights.
        run: Gives what this rank's ``resume`` raised; calls it by default.

    Returns:
        The error, the same kind on every rank; None where all go on.
    """
    try:
        with vote(binding.engine, f"resuming at version {version}"):
            error = resume(binding, version) if run is None else run()
            if error is not None:
                raise error
    except BaseException as e:
        status.asleep = version
        now = status.now
        reason = f"version {version} is live and proven, but resume() failed ({e}): the engine may stand still"
        status.set(durable=False, state="behind", version=now.version, manifest=now.manifest, reason=reason)
        return e
    status.asleep = None
    return None


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
    back_to(status, was)
    stands = wake(binding, status, proven.base_version) if proven.base is not None else None
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


def taint(binding: Binding, status: StatusFile, reason: str) -> None:
    """Record, durably and before anything else, that the weights are in an unknown state; then quarantine the
    engine."""  # The file says `updating` where it cannot be written: never served either.
    status.set(durable=False, state="tainted", reason=reason)
    binding.engine.quarantine(reason)


def back_to(status: StatusFile, was: Status) -> None:
    """Nothing was touched, or all was put back: the status is what it was."""
    # Where the disk refuses, it still has `updating` or what was: a restart is then careful without need, never
    # careless.
    status.set(durable=False, state=was.state, version=was.version, manifest=was.manifest, reason=was.reason)


def reverse(proven: Proven) -> Proven | None:
    """The way back from an applied delta, None where its base is no known version.

    The placed words still hold what was live before; ``prove`` on the new state is what makes the way back a proof.
    """
    if proven.base is None:
        return None
    own = None if proven.own is None else (proven.own[1], proven.own[0])
    return Proven(proven.staged, proven.ledger, proven.base, proven.ids, proven.after, proven.before, own)
